/* Rotary embedding of q and k, interleaved pairs (Su et al., "RoFormer").
 *
 *   y0 = x0 cos - x1 sin      y1 = x0 sin + x1 cos
 * each one product and one fma; the inverse is the rotation by -sin.  Forward
 * is a producer whose plain output is its own input.
 */
#include "kernels/cpu/attention.h"
#include "kernels/cpu/producer.h"
#include "kernels/elementary.h"

CPU_CLONES
static void rotate_head(float *restrict x, const float *restrict cos_sin, float direction, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i++) {
    float x0 = x[2 * i], x1 = x[2 * i + 1];
    float c = cos_sin[2 * i], s = cos_sin[2 * i + 1] * direction;
    x[2 * i] = f32_fma(x0, c, -(x1 * s));
    x[2 * i + 1] = f32_fma(x0, s, x1 * c);
  }
}

struct rotation {
  const struct matrix *x;
  const float *cos_sin;
  const struct attention_shape *shape;
  float direction; /* 1 forward, -1 inverse */
};

static void rotate_row(const void *op, int64_t row, float *values, float *scratch, float *shared) {
  (void)scratch, (void)shared;
  const struct rotation *r = op;
  const struct attention_shape *s = r->shape;
  int64_t cols = r->x->cols;
  cpu_load(values, r->x, row * cols, cols);
  const float *cos_sin = r->cos_sin + row % s->seq_len * s->head_dim;
  for (int64_t h = 0; h < s->n_heads + s->n_kv_heads; h++)
    rotate_head(values + h * s->head_dim, cos_sin, r->direction, s->head_dim / 2);
}

static void rotate(struct device *d, const struct emission *out, const struct rotation *r) {
  const struct attention_shape *s = r->shape;
  CPU_REQUIRE(r->x->cols == (s->n_heads + 2 * s->n_kv_heads) * s->head_dim && r->x->rows == s->batch * s->seq_len,
              "qkv does not have the attention's shape");
  cpu_produce(d, &(struct producer){.out = out,
                                    .type = r->x->dtype,
                                    .rows = r->x->rows,
                                    .cols = r->x->cols,
                                    .compute = rotate_row,
                                    .op = r});
}

void cpu_rope_forward(struct device *d, struct matrix *qkv, const struct attention_payload *payload,
                      struct quantise_counts *counts, const float *cos_sin, const struct attention_shape *s) {
  rotate(d, &(struct emission){.plain = qkv}, &(struct rotation){qkv, cos_sin, s, 1.0f});
  if (payload && !attention_plain(&payload->formats)) attention_publish(d, payload, counts, qkv, s);
}

void cpu_rope_backward(struct device *d, const struct emission *out, const struct matrix *d_qkv, const float *cos_sin,
                       const struct attention_shape *s) {
  rotate(d, out, &(struct rotation){d_qkv, cos_sin, s, -1.0f});
}
