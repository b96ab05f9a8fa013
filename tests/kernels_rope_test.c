/* Rotary tables against libm in long double, and Llama-3.1 scaling. */
#include "kernels/rope.h"

#include <math.h>
#include <stdlib.h>

#include "tests/test.h"

static const struct rope_scaling llama31 = {true, 8.0, 1.0, 4.0, 8192};

/* theta^(-2i/head_dim) and its scaling as Hugging Face writes them: by wavelength. */
static long double frequency(int64_t i, int64_t head_dim, long double theta, const struct rope_scaling *s) {
  long double f = powl(theta, -2.0L * (long double)i / (long double)head_dim);
  if (!s || !s->enabled) return f;
  long double wavelength = 2.0L * acosl(-1.0L) / f, original = (long double)s->original_max_position;
  long double low = (long double)s->low_freq_factor, high = (long double)s->high_freq_factor;
  if (wavelength < original / high) return f;
  if (wavelength > original / low) return f / (long double)s->factor;
  long double smooth = (original / wavelength - low) / (high - low);
  return (1.0L - smooth) * f / (long double)s->factor + smooth * f;
}

static void check_table(int64_t seq_len, int64_t head_dim, double theta, const struct rope_scaling *s) {
  float *table = malloc((size_t)(seq_len * head_dim) * sizeof *table);
  if (!table) {
    FAIL("out of memory");
    return;
  }
  rope_table(table, seq_len, head_dim, theta, s);
  for (int64_t t = 0; t < seq_len; t += t < 40 ? 1 : 1 + seq_len / 41) {
    for (int64_t i = 0; i < head_dim / 2; i++) {
      long double angle = (long double)t * frequency(i, head_dim, (long double)theta, s);
      CHECK_CLOSE(table[t * head_dim + 2 * i], (double)cosl(angle), 0x1.01p-25);
      CHECK_CLOSE(table[t * head_dim + 2 * i + 1], (double)sinl(angle), 0x1.01p-25);
    }
  }
  for (int64_t i = 0; i < head_dim / 2; i++) CHECK(table[2 * i] == 1.0f && table[2 * i + 1] == 0.0f);
  free(table);
}

TEST(table) {
  check_table(8192, 128, 500000.0, NULL);
  check_table(8192, 128, 500000.0, &llama31);
  check_table(131072, 16, 500000.0, &llama31);
  check_table(77, 2, 10000.0, NULL);
  check_table(1, 64, 10000.0, &(struct rope_scaling){.enabled = false});
}

/* Of the 8B model's 64 frequencies 29 stay, 6 are blended, 29 are divided by 8. */
TEST(llama31_frequencies) {
  float plain[2 * 128], scaled[2 * 128];
  rope_table(plain, 2, 128, 500000.0, NULL);
  rope_table(scaled, 2, 128, 500000.0, &llama31);
  int kept = 0, divided = 0, blended = 0;
  for (int i = 0; i < 64; i++) { /* position 1: the angle is the frequency */
    double f = atan2((double)plain[128 + 2 * i + 1], (double)plain[128 + 2 * i]);
    double g = atan2((double)scaled[128 + 2 * i + 1], (double)scaled[128 + 2 * i]);
    bool same = fabs(g / f - 1.0) < 1e-6, eighth = fabs(g / f * 8.0 - 1.0) < 1e-6;
    kept += same, divided += eighth, blended += !same && !eighth;
    if (i < 29) CHECK(same);
    else if (i > 34) CHECK(eighth);
    else CHECK(g < f && g > f / 8);
  }
  CHECK_EQ_I64(kept, 29);
  CHECK_EQ_I64(blended, 6);
  CHECK_EQ_I64(divided, 29);
}

TEST(bits_are_fixed) {
  enum { N = 600 * 64 };
  static float table[N];
  rope_table(table, 600, 64, 500000.0, &llama31);
  uint64_t h = 0xCBF29CE484222325u;
  for (int i = 0; i < N; i++) {
    uint32_t u;
    memcpy(&u, &table[i], sizeof u);
    h = (h ^ u) * 0x100000001B3u;
  }
  if (h != 0x7bad43969d04c9e7u) FAIL("hash 0x%016" PRIx64, h);
}

int main(void) {
  RUN(table);
  RUN(llama31_frequencies);
  RUN(bits_are_fixed);
  return test_report();
}
