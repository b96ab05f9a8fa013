/* The fixed trees: the definition against a literal drawing of it, and the
 * fast twins against the definition. */
#include "kernels/cpu/reduce.h"

#include <math.h>
#include <stdlib.h>

#include "base/philox.h"
#include "tests/test.h"

enum { LONGEST = 9000 };
static float a[LONGEST], b[LONGEST];

/* Values of very different sizes, so that any other order shows. */
static void fill(float *x, int64_t n, uint64_t key) {
  for (int64_t i = 0; i < n; i++) {
    struct philox_block r = philox4x32_10(key, philox_counter(0, 0, 0, 0, (uint32_t)i));
    x[i] = ldexpf((float)(int32_t)r.word[0], (int)(r.word[1] % 24) - 40);
  }
}

/* The tree by recursion from the top: the lanes under node `index` of `level`. */
static float node(const float *products, int64_t n, int level, int index) {
  if (level > 0) return node(products, n, level - 1, 2 * index) + node(products, n, level - 1, 2 * index + 1);
  float lane = 0.0f;
  for (int64_t i = index; i < n; i += 1024) lane = lane + products[i];
  return lane;
}

TEST(definition_is_the_tree) {
  static const int64_t sizes[] = {1, 2, 3, 8, 96, 1000, 1023, 1024, 1025, 2049, 4096, LONGEST};
  fill(a, LONGEST, 1);
  for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    float want = node(a, sizes[s], 10, 0);
    CHECK(f32_bits(reduce_row_sum(a, sizes[s])) == f32_bits(want));
  }
  /* Dot by hand: two elements of one lane, fma once. */
  static float x[1025], y[1025];
  x[0] = 1.0f + 0x1p-20f, y[0] = 1.0f + 0x1p-20f, x[1024] = 0x1p-30f, y[1024] = 3.0f;
  float want = f32_fma(x[1024], y[1024], x[0] * y[0]);
  CHECK(reduce_row_dot(x, y, 1025) == want);
  CHECK(f32_bits(reduce_row_sum(a, 0)) == 0);
}

TEST(order_matters_in_these_data) {
  fill(a, LONGEST, 1);
  float plain = 0;
  for (int i = 0; i < LONGEST; i++) plain += a[i];
  CHECK(plain != reduce_row_sum(a, LONGEST));
}

TEST(twins_equal_the_definition) {
  for (int64_t n = 0; n < LONGEST; n += n < 70 ? 1 : n < 1100 ? 61 : 487) {
    fill(a, n, 2 + (uint64_t)n);
    fill(b, n, 90000 + (uint64_t)n);
    CHECK(f32_bits(cpu_reduce_sum(a, n)) == f32_bits(reduce_row_sum(a, n)));
    CHECK(f32_bits(cpu_reduce_dot(a, b, n)) == f32_bits(reduce_row_dot(a, b, n)));
    CHECK(f32_bits(cpu_reduce_dot(a, a, n)) == f32_bits(reduce_row_dot(a, a, n)));
  }
  for (int64_t n = 0; n <= REDUCE_LANES; n += 37) {
    float x[REDUCE_LANES] = {0}, y[REDUCE_LANES];
    double u[REDUCE_LANES] = {0}, v[REDUCE_LANES];
    for (int64_t i = 0; i < n; i++) x[i] = a[i], u[i] = (double)a[i] / 3.0;
    memcpy(y, x, sizeof y);
    memcpy(v, u, sizeof v);
    CHECK(cpu_reduce_lanes(y, n) == reduce_pairs(x, REDUCE_LANES));
    CHECK(cpu_reduce_lanes_f64(v, n) == reduce_pairs_f64(u, REDUCE_LANES));
  }
}

TEST(zeros_have_no_sign) {
  for (int i = 0; i < 2000; i++) a[i] = -0.0f, b[i] = 1.0f;
  CHECK(f32_bits(cpu_reduce_sum(a, 2000)) == 0 && f32_bits(reduce_row_sum(a, 2000)) == 0);
  CHECK(f32_bits(cpu_reduce_dot(a, b, 7)) == 0 && f32_bits(reduce_row_dot(a, b, 7)) == 0);
}

TEST(strips) {
  enum { COLS = 13, STRIDE = 16, MOST = 41 };
  static float x[MOST * STRIDE], column[MOST];
  for (int64_t strips = 1; strips <= MOST; strips++) {
    fill(x, strips * STRIDE, 7 + (uint64_t)strips);
    float want[COLS];
    for (int c = 0; c < COLS; c++) {
      for (int64_t s = 0; s < strips; s++) column[s] = x[s * STRIDE + c];
      want[c] = reduce_pairs(column, strips);
    }
    /* An odd one that passes through is as one that is added to +0. */
    float padded[64] = {0};
    for (int64_t s = 0; s < strips; s++) padded[s] = x[s * STRIDE];
    CHECK(reduce_pairs(padded, 64) == want[0]);
    cpu_reduce_strips(x, strips, STRIDE, COLS);
    CHECK(memcmp(x, want, sizeof want) == 0);
  }
}

TEST(long_sum) {
  int64_t n = 2 * REDUCE_CHUNK + 1234;
  float *x = malloc((size_t)n * sizeof *x);
  if (!x) {
    FAIL("out of memory");
    return;
  }
  long double want = 0;
  for (int64_t i = 0; i < n; i++) x[i] = (float)(i % 1013) * 1e18f, want += (long double)x[i] * (long double)x[i];
  CHECK_CLOSE((double)((long double)reduce_long_sum_squares(x, n) / want), 1.0, 1e-14);
  CHECK(reduce_long_sum_squares(x, 0) == 0.0);
  free(x);
}

int main(void) {
  RUN(definition_is_the_tree);
  RUN(order_matters_in_these_data);
  RUN(twins_equal_the_definition);
  RUN(zeros_have_no_sign);
  RUN(strips);
  RUN(long_sum);
  return test_report();
}
