#include "trainer/bench_samples.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "kernels/formats.h"

enum { SAMPLES = 1 << 22 };

struct bench_samples {
  float wide[BENCH_KINDS][SAMPLES];
  uint16_t narrow[SAMPLES]; /* parameters in BF16 */
};

struct bench_samples *bench_samples_open(struct error *e) {
  struct bench_samples *s = malloc(sizeof *s);
  if (!s) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  for (int64_t i = 0; i < SAMPLES; i++) { /* sums of eight uniform numbers */
    const uint64_t words[2] = {hash_word(&i, sizeof i, 1), hash_word(&i, sizeof i, 2)};
    const double u = (double)(words[0] % 1000003) / 1000003;
    double sum = 0;
    for (int j = 0; j < 8; j++) sum += (double)(words[j / 4] >> 16 * (j % 4) & 0xffff) * 0x1p-16 - 0.5;
    const double normal = sum * 1.2247448713915890; /* of variance 8/12 */
    s->wide[BENCH_PARAM][i] = (float)(0.02 * normal);
    s->wide[BENCH_ADAM_M][i] = (float)(1e-5 * normal * u);
    s->wide[BENCH_ADAM_V][i] = (float)(1e-9 * normal * normal * u);
    s->narrow[i] = bf16_encode(s->wide[BENCH_PARAM][i]);
  }
  return s;
}

void bench_samples_close(struct bench_samples *s) { free(s); }

/* Copies the samples into the slice, or compares them. */
static bool visit(const struct bench_samples *s, enum bench_kind kind, int64_t number, const struct tensor_slice *slice, bool compare) {
  const char *from = slice->dtype == DTYPE_F32 ? (const char *)s->wide[kind] : (const char *)s->narrow;
  const size_t element = dtype_bytes(slice->dtype);
  const int64_t n = slice->rows * slice->cols;
  char *to = slice->data;
  int64_t at = number * 7919 % SAMPLES;
  for (int64_t done = 0, piece; done < n; done += piece, at = 0) {
    piece = n - done < SAMPLES - at ? n - done : SAMPLES - at;
    char *part = to + (size_t)done * element;
    const char *source = from + (size_t)at * element;
    if (compare && memcmp(part, source, (size_t)piece * element) != 0) return false;
    if (!compare) memcpy(part, source, (size_t)piece * element);
  }
  return true;
}

void bench_samples_fill(const struct bench_samples *s, enum bench_kind kind, int64_t number, const struct tensor_slice *slice) {
  visit(s, kind, number, slice, false);
}

bool bench_samples_equal(const struct bench_samples *s, enum bench_kind kind, int64_t number, const struct tensor_slice *slice) {
  return visit(s, kind, number, slice, true);
}
