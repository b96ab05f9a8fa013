/* Residual + RMSNorm (Zhang and Sennrich, "Root Mean Square Layer
 * Normalization"), forward and backward.
 *
 * Forward, per row of n elements:  r = 1 / sqrt(sum x^2 / n + eps),
 *   y_i = (x_i r) g_i
 * with sum x^2 by the row tree; of the cast forward x_i r is rounded to the
 * residual's type before the gain.
 *
 * Backward.  With t_i = dy_i g_i and dr/dx_j = -r^3 x_j / n,
 *   dx_j = sum_i t_i d(x_i r)/dx_j = r t_j - (r^3 / n) x_j sum_i t_i x_i
 *        = r (t_j - x_j c),   c = ((sum t x / n) r) r
 * and dg_i = sum over rows of dy_i (x_i r), by the column tree; then what stands
 * in d_gain is added and the sum rounded to its type.
 *
 * Each line of a loop below is one FP32 operation after the other as written.
 */
#include "base/checked.h"
#include "kernels/cpu/producer.h"
#include "kernels/cpu/reduce.h"

_Static_assert((int)CPU_STRIP == REDUCE_STRIP, "the column tree is cut as producers are");

CPU_CLONES
static void add_row(float *restrict x, const float *restrict delta, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = x[i] + delta[i];
}

CPU_CLONES
static void normalise_row(float *restrict x, const float *restrict gain, float rstd, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = (x[i] * rstd) * gain[i];
}

CPU_CLONES
static void scale_row_by(float *restrict x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = x[i] * factor;
}

CPU_CLONES
static void gain_row(float *restrict x, const float *restrict gain, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = x[i] * gain[i];
}

/* The gain stands first in the shared part of the scratch, in FP32. */
static void load_gain(struct device *d, const struct matrix *gain, int64_t n) {
  CPU_REQUIRE(gain->rows * gain->cols == n, "the gain does not have the rows' length");
  CPU_REQUIRE(n * (int64_t)sizeof(float) <= cpu_of(d)->scratch_bytes, "scratch is too small");
  cpu_load(cpu_producer_shared(d), gain, 0, n);
}

struct forward {
  struct matrix *residual_out;
  float *rstd;
  const struct matrix *residual, *delta;
  float eps;
  bool cast; /* before the gain */
};

static void forward_row(const void *op, int64_t row, float *x, float *delta, float *gain) {
  const struct forward *f = op;
  int64_t n = f->residual->cols;
  cpu_load(x, f->residual, row * n, n);
  if (f->delta) {
    cpu_load(delta, f->delta, row * n, n);
    add_row(x, delta, n);
    cpu_round(x, f->residual->dtype, n);
    cpu_store(f->residual_out, row * n, x, n);
  }
  float mean = cpu_reduce_dot(x, x, n) / (float)n;
  float rstd = 1.0f / f32_sqrt(mean + f->eps);
  f->rstd[row] = rstd;
  if (!f->cast) {
    normalise_row(x, gain, rstd, n);
    return;
  }
  scale_row_by(x, rstd, n);
  cpu_round(x, f->residual->dtype, n);
  gain_row(x, gain, n);
}

static void run_forward(struct device *d, const struct emission *out, const struct forward *f, const struct matrix *gain) {
  const struct matrix *residual = f->residual;
  CPU_REQUIRE(!f->delta || (f->residual_out && f->residual_out->dtype == residual->dtype),
              "residual_out is not of residual's type");
  load_gain(d, gain, residual->cols);
  cpu_produce(d, &(struct producer){.out = out,
                                    .type = residual->dtype,
                                    .rows = residual->rows,
                                    .cols = residual->cols,
                                    .compute = forward_row,
                                    .op = f,
                                    .row_floats = residual->cols,
                                    .shared_floats = residual->cols});
}

void cpu_add_rmsnorm_forward(struct device *d, const struct emission *out, struct matrix *residual_out, float *rstd,
                             const struct matrix *residual, const struct matrix *delta, const struct matrix *gain,
                             float eps) {
  run_forward(d, out, &(struct forward){residual_out, rstd, residual, delta, eps, false}, gain);
}

void cpu_add_rmsnorm_forward_cast(struct device *d, const struct emission *out, struct matrix *residual_out, float *rstd,
                                  const struct matrix *residual, const struct matrix *delta, const struct matrix *gain,
                                  float eps) {
  run_forward(d, out, &(struct forward){residual_out, rstd, residual, delta, eps, true}, gain);
}

CPU_CLONES
static void scale_row(float *restrict t, const float *restrict dy, const float *restrict gain, int64_t n) {
  for (int64_t i = 0; i < n; i++) t[i] = dy[i] * gain[i];
}

CPU_CLONES
static void differentiate_row(float *restrict t, float *restrict d_gain, const float *restrict dy,
                              const float *restrict x, float rstd, float c, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    d_gain[i] = f32_fma(dy[i], x[i] * rstd, d_gain[i]);
    t[i] = rstd * f32_fma(-x[i], c, t[i]);
  }
}

struct backward {
  const struct matrix *dy, *d_above, *residual;
  const float *rstd;
};

/* Shared: the gain, then one partial d_gain a strip. */
static void backward_row(const void *op, int64_t row, float *t, float *scratch, float *shared) {
  const struct backward *b = op;
  int64_t n = b->dy->cols;
  float *dy = scratch, *x = scratch + n, *above = dy;
  float *d_gain = shared + (1 + row / CPU_STRIP) * n, rstd = b->rstd[row];
  if (row % CPU_STRIP == 0) memset(d_gain, 0, (size_t)n * sizeof *d_gain);
  cpu_load(dy, b->dy, row * n, n);
  cpu_load(x, b->residual, row * n, n);
  scale_row(t, dy, shared, n);
  float c = cpu_reduce_dot(t, x, n) / (float)n * rstd * rstd;
  differentiate_row(t, d_gain, dy, x, rstd, c, n);
  if (b->d_above) {
    cpu_load(above, b->d_above, row * n, n);
    add_row(t, above, n);
  }
}

enum { GAIN_COLUMNS = 256 };

struct gain_sum {
  struct matrix *d_gain;
  float *partial;
  int64_t strips, cols;
};

static void sum_gain(void *context, int64_t index, int worker) {
  (void)worker;
  const struct gain_sum *s = context;
  int64_t first = index * GAIN_COLUMNS, left = s->cols - first, n = left < GAIN_COLUMNS ? left : GAIN_COLUMNS;
  if (s->strips == 0) return;
  cpu_reduce_strips(s->partial + first, s->strips, s->cols, n);
  float sum[GAIN_COLUMNS];
  cpu_load(sum, s->d_gain, first, n);
  add_row(sum, s->partial + first, n);
  cpu_store(s->d_gain, first, sum, n);
}

void cpu_add_rmsnorm_backward(struct device *d, const struct emission *out, struct matrix *d_gain,
                              const struct matrix *dy, const struct matrix *d_above, const struct matrix *residual, const float *rstd,
                              const struct matrix *gain) {
  struct backward b = {dy, d_above, residual, rstd};
  int64_t n = dy->cols, strips = ceil_div(dy->rows, CPU_STRIP);
  CPU_REQUIRE(d_gain->rows * d_gain->cols == n, "d_gain does not have the rows' length");
  load_gain(d, gain, n);
  cpu_produce(d, &(struct producer){.out = out,
                                    .type = dy->dtype,
                                    .rows = dy->rows,
                                    .cols = n,
                                    .compute = backward_row,
                                    .op = &b,
                                    .row_floats = 2 * n,
                                    .shared_floats = (1 + strips) * n});
  struct gain_sum s = {d_gain, cpu_producer_shared(d) + n, strips, n};
  threads_run(cpu_of(d)->threads, ceil_div(n, GAIN_COLUMNS), sum_gain, &s);
}
