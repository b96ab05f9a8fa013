/* Sum of squares, non-finite count and amax of a matrix: one look at every
 * element.  Squares are exact in FP64, so nothing overflows; non-finite
 * elements are told by their bits and left out of both other figures. */
#include "kernels/cpu/longsum.h"
#include "kernels/cpu/reduce.h"

CPU_CLONES
static void look(double *restrict lanes, const float *restrict x, int64_t n, int32_t *nonfinite, uint32_t *amax) {
  int32_t count = 0;
  uint32_t largest = *amax;
  for (int64_t l = 0; l < n; l++) {
    uint32_t a = f32_bits(x[l]) & 0x7FFFFFFFu;
    uint32_t bad = a >= 0x7F800000u;
    count += (int32_t)bad;
    a = bad ? 0u : a;
    largest = a > largest ? a : largest;
    double v = (double)f32_from_bits(a);
    lanes[l] = f64_fma(v, v, lanes[l]);
  }
  *nonfinite += count;
  *amax = largest;
}

static void measure_chunk(const void *op, int64_t first, int64_t n, struct longsum_part *part) {
  const struct matrix *x = op;
  double lanes[REDUCE_LANES] = {0};
  float values[REDUCE_LANES];
  int32_t nonfinite = 0;
  for (int64_t i = 0; i < n; i += REDUCE_LANES) {
    int64_t count = n - i < REDUCE_LANES ? n - i : REDUCE_LANES;
    cpu_load(values, x, first + i, count);
    look(lanes, values, count, &nonfinite, &part->largest);
  }
  part->sum[0] = cpu_reduce_lanes_f64(lanes, n < REDUCE_LANES ? n : REDUCE_LANES);
  part->count = nonfinite;
}

void cpu_measure(struct device *d, struct measure *measured, const struct matrix *x) {
  struct longsum_part total = cpu_longsum(d, x->rows * x->cols, x, measure_chunk);
  measured->sum_squares += total.sum[0];
  measured->nonfinite += total.count;
  float amax = f32_from_bits(total.largest);
  if (amax > measured->amax) measured->amax = amax;
}
