/* The gated FFN's non-linearity (Shazeer, "GLU Variants Improve Transformer").
 *
 *   out    = (g s) u                        s = sigmoid(g)
 *   d_gate = (d u) (s (g (1 - s) + 1))      one fma inside
 *   d_up   = d (g s)
 */
#include "kernels/cpu/producer.h"
#include "kernels/elementary.h"

CPU_CLONES
static void gate_row(float *restrict out, const float *restrict gate, const float *restrict up, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = f32_silu(gate[i]) * up[i];
}

CPU_CLONES
static void differentiate_row(float *restrict d_gate, float *restrict d_up, const float *restrict d_act,
                              const float *restrict gate, const float *restrict up, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    float g = gate[i], s = f32_sigmoid(g);
    d_gate[i] = (d_act[i] * up[i]) * (s * f32_fma(g, 1.0f - s, 1.0f));
    d_up[i] = d_act[i] * (g * s);
  }
}

static void forward_row(const void *op, int64_t row, float *out, float *gate, float *shared) {
  (void)shared;
  const struct matrix *gate_up = op;
  int64_t n = gate_up->cols / 2;
  cpu_load(gate, gate_up, row * 2 * n, 2 * n);
  gate_row(out, gate, gate + n, n);
}

void cpu_swiglu_forward(struct device *d, const struct emission *out, const struct matrix *gate_up) {
  cpu_produce(d, &(struct producer){.out = out,
                                    .type = gate_up->dtype,
                                    .rows = gate_up->rows,
                                    .cols = gate_up->cols / 2,
                                    .compute = forward_row,
                                    .op = gate_up,
                                    .row_floats = gate_up->cols});
}

struct backward {
  const struct matrix *d_act, *gate_up;
};

static void backward_row(const void *op, int64_t row, float *d_gate_up, float *scratch, float *shared) {
  (void)shared;
  const struct backward *b = op;
  int64_t n = b->d_act->cols;
  float *d_act = scratch, *gate = scratch + n, *up = gate + n;
  cpu_load(d_act, b->d_act, row * n, n);
  cpu_load(gate, b->gate_up, row * 2 * n, 2 * n);
  differentiate_row(d_gate_up, d_gate_up + n, d_act, gate, up, n);
}

void cpu_swiglu_backward(struct device *d, const struct emission *out, const struct matrix *d_act,
                         const struct matrix *gate_up) {
  CPU_REQUIRE(gate_up->cols == 2 * d_act->cols && gate_up->rows == d_act->rows, "d_act does not fit gate_up");
  struct backward b = {d_act, gate_up};
  cpu_produce(d, &(struct producer){.out = out,
                                    .type = d_act->dtype,
                                    .rows = gate_up->rows,
                                    .cols = gate_up->cols,
                                    .compute = backward_row,
                                    .op = &b,
                                    .row_floats = 3 * d_act->cols});
}
