/* Sum of squares, non-finite count and amax of a matrix: one look at every
 * element.  Squares are exact in FP64, so nothing overflows; non-finite
 * elements are told by their bits and left out of both other figures.
 * And the plain sum, where they count as the numbers they are. */
#include "kernels/cpu/longsum.h"
#include "kernels/cpu/reduce.h"

/* Counts what is not finite and makes it 0; the largest |x| as bits. */
CPU_CLONES
static int32_t sift(float *restrict x, int64_t n, uint32_t *amax) {
  int32_t nonfinite = 0;
  uint32_t largest = *amax;
  for (int64_t i = 0; i < n; i++) {
    uint32_t a = f32_bits(x[i]) & 0x7FFFFFFFu;
    int32_t bad = a >= 0x7F800000u;
    nonfinite += bad;
    a = bad ? 0u : a;
    largest = a > largest ? a : largest;
    x[i] = f32_from_bits(a);
  }
  *amax = largest;
  return nonfinite;
}

CPU_CLONES
static void add_squares(double *restrict lanes, const float *restrict x, int64_t n) {
  for (int64_t l = 0; l < n; l++) lanes[l] = f64_fma((double)x[l], (double)x[l], lanes[l]);
}

static void measure_chunk(const void *op, int64_t first, int64_t n, struct longsum_part *part) {
  const struct matrix *x = op;
  double lanes[REDUCE_LANES] = {0};
  float values[REDUCE_LANES];
  for (int64_t i = 0; i < n; i += REDUCE_LANES) {
    int64_t count = n - i < REDUCE_LANES ? n - i : REDUCE_LANES;
    cpu_load(values, x, first + i, count);
    part->count += sift(values, count, &part->largest);
    add_squares(lanes, values, count);
  }
  part->sum[0] = cpu_reduce_lanes_f64(lanes, n < REDUCE_LANES ? n : REDUCE_LANES);
}

void cpu_measure(struct device *d, struct measure *measured, const struct matrix *x, int count) {
  for (int i = 0; i < count; i++) {
    struct longsum_part total = cpu_longsum(d, x[i].rows * x[i].cols, &x[i], measure_chunk);
    measured[i].sum_squares += total.sum[0];
    measured[i].nonfinite += total.count;
    float amax = f32_from_bits(total.largest);
    if (amax > measured[i].amax) measured[i].amax = amax;
  }
}

CPU_CLONES
static void add(double *restrict lanes, const float *restrict x, int64_t n) {
  for (int64_t l = 0; l < n; l++) lanes[l] = lanes[l] + (double)x[l];
}

static void sum_chunk(const void *op, int64_t first, int64_t n, struct longsum_part *part) {
  const struct matrix *x = op;
  double lanes[REDUCE_LANES] = {0};
  float values[REDUCE_LANES];
  for (int64_t i = 0; i < n; i += REDUCE_LANES) {
    int64_t count = n - i < REDUCE_LANES ? n - i : REDUCE_LANES;
    cpu_load(values, x, first + i, count);
    add(lanes, values, count);
  }
  part->sum[0] = cpu_reduce_lanes_f64(lanes, n < REDUCE_LANES ? n : REDUCE_LANES);
}

void cpu_sum(struct device *d, double *sum, const struct matrix *x) {
  *sum += cpu_longsum(d, x->rows * x->cols, x, sum_chunk).sum[0];
}
