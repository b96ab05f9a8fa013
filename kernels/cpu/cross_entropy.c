/* Cross-entropy of one row of logits a task, with its gradient.
 *
 *   top   = largest logit (NaNs passed over)
 *   sum   = sum of e^(x - top), by the row tree
 *   nll   = log(sum) + (top - x[target])
 *   p     = e^(x - top) * (1 / sum)
 *   d     = p * grad_scale, at the target (p - 1) * grad_scale
 * A NaN or +inf logit makes sum, and so nll and the row's gradient, NaN.
 */
#include "kernels/cpu/reduce.h"

#include "kernels/cpu/cpu.h"

enum { PIECE = REDUCE_LANES, TOP_LANES = 64 };

CPU_CLONES
static float row_top(const float *x, int64_t n) {
  float lanes[TOP_LANES], top = -F32_INFINITY;
  for (int l = 0; l < TOP_LANES; l++) lanes[l] = top;
  int64_t i = 0;
  for (; i + TOP_LANES <= n; i += TOP_LANES)
    for (int l = 0; l < TOP_LANES; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  for (int l = 0; l < TOP_LANES; l++) top = lanes[l] > top ? lanes[l] : top;
  return top;
}

/* lanes[l] += e^(x[l] - top) */
CPU_CLONES
static void add_exponentials(float *restrict lanes, const float *restrict x, float top, int64_t n) {
  for (int64_t l = 0; l < n; l++) lanes[l] += f32_exp(x[l] - top);
}

static float row_sum(const float *x, float top, int64_t n) {
  float lanes[REDUCE_LANES];
  int64_t used = n < REDUCE_LANES ? n : REDUCE_LANES;
  memset(lanes, 0, (size_t)used * sizeof *lanes);
  for (int64_t i = 0; i < n; i += REDUCE_LANES) add_exponentials(lanes, x + i, top, n - i < used ? n - i : used);
  return cpu_reduce_lanes(lanes, used);
}

CPU_CLONES
static void weigh(float *restrict d, const float *restrict x, float top, float inverse, float scale, int64_t n) {
  for (int64_t i = 0; i < n; i++) d[i] = (f32_exp(x[i] - top) * inverse) * scale;
}

struct loss {
  float *nll;
  struct matrix *d_logits;
  const struct matrix *logits;
  int64_t vocabulary; /* columns that take part: all where there is a gradient */
  const int32_t *targets;
  float grad_scale;
};

static void loss_row(void *context, int64_t row, int worker) {
  (void)worker;
  const struct loss *s = context;
  int64_t n = s->vocabulary;
  int32_t target = s->targets[row];
  CPU_REQUIRE(target < n, "target outside the vocabulary");
  const float *x = (const float *)s->logits->data + row * s->logits->cols;
  float piece[PIECE], top = 0.0f, inverse = 0.0f, at_target = 0.0f;
  if (target < 0) {
    s->nll[row] = 0.0f;
    memset(piece, 0, sizeof piece);
  } else {
    top = row_top(x, n);
    float sum = row_sum(x, top, n);
    s->nll[row] = f32_log(sum) + (top - x[target]);
    inverse = 1.0f / sum;
    at_target = (f32_exp(x[target] - top) * inverse - 1.0f) * s->grad_scale;
  }
  if (!s->d_logits) return;
  for (int64_t i = 0; i < n; i += PIECE) {
    int64_t count = n - i < PIECE ? n - i : PIECE;
    if (target >= 0) weigh(piece, x + i, top, inverse, s->grad_scale, count);
    if (target >= i && target < i + count) piece[target - i] = at_target;
    cpu_store(s->d_logits, row * n + i, piece, count);
  }
}

void cpu_cross_entropy(struct device *d, float *nll, struct matrix *d_logits, const struct matrix *logits,
                       const int32_t *targets, float grad_scale) {
  CPU_REQUIRE(logits->dtype == DTYPE_F32, "logits are not FP32");
  CPU_REQUIRE(!d_logits || (d_logits->rows == logits->rows && d_logits->cols == logits->cols),
              "d_logits does not have the shape of logits");
  struct loss s = {nll, d_logits, logits, logits->cols, targets, grad_scale};
  threads_run(cpu_of(d)->threads, logits->rows, loss_row, &s);
}

void cpu_cross_entropy_within(struct device *d, float *nll, const struct matrix *logits, int64_t vocabulary,
                              const int32_t *targets) {
  CPU_REQUIRE(logits->dtype == DTYPE_F32, "logits are not FP32");
  CPU_REQUIRE(vocabulary > 0 && vocabulary <= logits->cols, "the vocabulary is none of the logits' columns");
  struct loss s = {nll, NULL, logits, vocabulary, targets, 0};
  threads_run(cpu_of(d)->threads, logits->rows, loss_row, &s);
}
