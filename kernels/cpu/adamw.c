/* AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization").
 *
 * Per element, each line one FP32 operation after the other as written:
 *   g  = grad_scale * grad
 *   m' = fma(beta1, m, (1 - beta1) * g)
 *   v' = fma(beta2, v, ((1 - beta2) * g) * g)
 *   u  = (m' / bias1) / (sqrt(v' / bias2) + eps)
 *   u  = fma(weight_decay, w, u)
 *   w' = fma(-lr, u, w)
 * grad is read in its type.  1 - beta is taken once in FP32.  What is stored of w' is: w' itself (FP32
 * parameter or master), the nearest BF16 (parameter beside a master), or a
 * stochastically rounded BF16 (parameter alone).
 */
#include "kernels/cpu/longsum.h"
#include "kernels/cpu/reduce.h"

enum { PIECE = REDUCE_LANES, DRAW_ELEMENTS = 8 };

CPU_CLONES
static void step(float *restrict w, float *restrict m, float *restrict v, const float *restrict grad,
                 const struct adamw *a, float decay, int64_t n) {
  float lr = -a->lr, beta1 = a->beta1, beta2 = a->beta2, eps = a->eps, scale = a->grad_scale;
  float rest1 = 1.0f - beta1, rest2 = 1.0f - beta2, bias1 = a->bias1, bias2 = a->bias2;
  for (int64_t i = 0; i < n; i++) {
    float g = scale * grad[i];
    float m1 = f32_fma(beta1, m[i], rest1 * g);
    float v1 = f32_fma(beta2, v[i], (rest2 * g) * g);
    float u = (m1 / bias1) / (f32_sqrt(v1 / bias2) + eps);
    u = f32_fma(decay, w[i], u);
    m[i] = m1;
    v[i] = v1;
    w[i] = f32_fma(lr, u, w[i]);
  }
}

/* words[4 b + j] = word j of draw block `first + b`. */
CPU_CLONES
static void draw_words(uint32_t *restrict words, const struct draw *d, uint64_t first, int64_t blocks) {
  for (int64_t b = 0; b < blocks; b++) {
    uint64_t block = first + (uint64_t)b;
    struct philox_block r =
        philox4x32_10(d->seed, philox_counter(d->update, block >> 32, d->layer, d->operand, (uint32_t)block));
    for (int j = 0; j < 4; j++) words[4 * b + j] = r.word[j];
  }
}

CPU_CLONES
static void round_stochastically(float *restrict w, const uint32_t *restrict field, int64_t n) {
  for (int64_t i = 0; i < n; i++) w[i] = bf16_decode(bf16_encode_stochastic(w[i], field[i]));
}

/* Rounds w[n], which begins at element `first` of its tensor. */
static void round_by_draw(float *w, const struct draw *d, uint64_t first, int64_t n) {
  uint32_t words[(PIECE / DRAW_ELEMENTS + 1) * 4], field[PIECE];
  uint64_t block = first / DRAW_ELEMENTS, last = (first + (uint64_t)n - 1) / DRAW_ELEMENTS;
  int64_t skip = (int64_t)(first % DRAW_ELEMENTS);
  draw_words(words, d, block, (int64_t)(last - block) + 1);
  for (int64_t i = 0; i < n; i++) field[i] = words[(i + skip) / 2] >> ((i + skip) % 2 * 16);
  round_stochastically(w, field, n);
}

/* Sums of the squares of the change and of the old value. */
CPU_CLONES
static void add_squares(double *restrict change, double *restrict weight, const float *restrict before,
                        const float *restrict after, int64_t n) {
  for (int64_t l = 0; l < n; l++) {
    double old = (double)before[l], moved = (double)after[l] - old;
    change[l] = f64_fma(moved, moved, change[l]);
    weight[l] = f64_fma(old, old, weight[l]);
  }
}

struct update {
  struct matrix param, master, grad; /* one row each; master.data may be NULL */
  float *m, *v;
  struct adamw a;
  float weight_decay;
  struct draw draw;
  bool stochastic, measured;
};

static void update_chunk(const void *op, int64_t first, int64_t n, struct longsum_part *part) {
  const struct update *u = op;
  struct matrix param = u->param, master = u->master;
  const struct matrix *source = master.data ? &master : &param;
  double change[REDUCE_LANES] = {0}, weight[REDUCE_LANES] = {0};
  for (int64_t i = 0; i < n; i += PIECE) {
    int64_t at = first + i, count = n - i < PIECE ? n - i : PIECE;
    float before[PIECE], w[PIECE], grad[PIECE];
    cpu_load(w, source, at, count);
    cpu_load(grad, &u->grad, at, count);
    if (u->measured) memcpy(before, w, (size_t)count * sizeof *w);
    step(w, u->m + at, u->v + at, grad, &u->a, u->weight_decay, count);
    if (u->stochastic) round_by_draw(w, &u->draw, u->draw.first_sample + (uint64_t)at, count);
    if (master.data) cpu_store(&master, at, w, count);
    cpu_store(&param, at, w, count);
    if (u->measured) add_squares(change, weight, before, w, count);
  }
  if (!u->measured) return;
  int64_t used = n < REDUCE_LANES ? n : REDUCE_LANES;
  part->sum[0] = cpu_reduce_lanes_f64(change, used);
  part->sum[1] = cpu_reduce_lanes_f64(weight, used);
}

void cpu_adamw_update(struct device *d, const struct adamw_tensor *tensors, int count, enum dtype param_dtype, enum dtype grad_dtype,
                      const struct adamw *a, const struct draw *draw) {
  for (const struct adamw_tensor *t = tensors; t < tensors + count; t++) {
    struct update u = {.param = {t->param, param_dtype, 1, t->n},
                       .master = {t->master, DTYPE_F32, 1, t->n},
                       .grad = {(void *)(uintptr_t)t->grad, grad_dtype, 1, t->n}, /* read alone */
                       .m = t->m,
                       .v = t->v,
                       .a = *a,
                       .weight_decay = t->weight_decay,
                       .stochastic = param_dtype == DTYPE_BF16 && !t->master,
                       .measured = t->measured != NULL};
    CPU_REQUIRE(!u.stochastic || draw, "a BF16 parameter without a master needs a draw");
    if (u.stochastic) {
      u.draw = *draw;
      u.draw.layer = t->layer;
      u.draw.first_sample = t->first;
    }
    struct longsum_part total = cpu_longsum(d, t->n, &u, update_chunk);
    if (!t->measured) continue;
    t->measured->update_sum_squares += total.sum[0];
    t->measured->weight_sum_squares += total.sum[1];
  }
}
