/* The CPU backend's own header: its device and what its files share.
 *
 * Work is cut into tasks that write disjoint outputs, so every result is the
 * same for any number of threads.  Operations run one after another; each may
 * use the device's scratch from its beginning.
 */
#ifndef FP4D_KERNELS_CPU_CPU_H
#define FP4D_KERNELS_CPU_CPU_H

#include "base/clones.h"
#include "base/threads.h"
#include "kernels/kernels.h"

/* Hot loops. */
#define CPU_CLONES CLONES

struct cpu_device {
  struct device device; /* first */
  struct threads *threads;
  char *scratch;
  int64_t scratch_bytes;
  double *event; /* the clock at each */
};

static inline struct cpu_device *cpu_of(struct device *d) { return (struct cpu_device *)d; }

/* Opens the device with `threads` workers (0 = threads_available()).  NULL with *e filled. */
struct device *cpu_open(int threads, struct error *e);

/* A condition that the caller guarantees; aborts with the reason if it does not hold. */
#define CPU_REQUIRE(condition, what)                                              \
  do {                                                                            \
    if (!(condition)) cpu_defect(__func__, what);                                 \
  } while (0)
void cpu_defect(const char *function, const char *what) __attribute__((noreturn, cold));

/* ---- rows in FP32 (kernels/cpu/rows.c) ---------------------------------- */
/* values[n] from element `first` of a matrix, exactly. */
void cpu_load(float *values, const struct matrix *m, int64_t first, int64_t n);
/* Rounds values[n] to m's type (nearest even) and writes them. */
void cpu_store(struct matrix *m, int64_t first, const float *values, int64_t n);
/* Rounds values[n] in place to what `type` can hold. */
void cpu_round(float *values, enum dtype type, int64_t n);

/* ---- emission (kernels/cpu/emit.c) --------------------------------------- */
/* Producers work in strips of CPU_STRIP source rows: they compute a strip in
 * FP32, round it to the activation type (cpu_round) and emit it. */
enum { CPU_STRIP = 32 };

/* Writes rows [first_row, first_row + rows) of a [source_rows, cols] result:
 * plain, row and column operand, whichever `out` has (no operand that is made
 * from the whole result: kernels/cpu/whole.h). values is [rows][cols].
 * Adds to counts[VIEW_ROW] and counts[VIEW_COLUMN] (the worker's own; may be NULL). `scratch`:
 * cpu_emit_scratch_bytes(cols) bytes of the worker. */
void cpu_emit_strip(const struct emission *out, int64_t source_rows, int64_t cols, int64_t first_row, int64_t rows,
                    const float *values, struct quantise_counts *counts, void *scratch);
int64_t cpu_emit_scratch_bytes(int64_t cols);

/* Adds *from to *to, amax by maximum; any worker may at any time. */
void cpu_counts_add(struct quantise_counts *to, const struct quantise_counts *from);

/* ---- the operations: kernels.h says what each does ----------------------- */
const char *cpu_refuse_encoding(const struct device *d, const struct encoding *e, enum view view);
const char *cpu_refuse_attention(const struct device *d, const struct attention_formats *f, enum attention_part part,
                                 const struct attention_shape *s);
void cpu_quantise(struct device *d, const struct emission *out, const struct matrix *source);
void cpu_embedding_forward(struct device *d, struct matrix *x, const struct matrix *table, const int32_t *tokens);
void cpu_embedding_backward(struct device *d, struct matrix *d_table, const struct matrix *dx, const int32_t *tokens);
void cpu_add_rmsnorm_forward(struct device *d, const struct emission *out, struct matrix *residual_out, float *rstd,
                             const struct matrix *residual, const struct matrix *delta, const struct matrix *gain,
                             float eps);
void cpu_add_rmsnorm_forward_cast(struct device *d, const struct emission *out, struct matrix *residual_out, float *rstd,
                                  const struct matrix *residual, const struct matrix *delta, const struct matrix *gain,
                                  float eps);
void cpu_add_rmsnorm_backward(struct device *d, const struct emission *out, struct matrix *d_gain,
                              const struct matrix *dy, const struct matrix *d_above, const struct matrix *residual, const float *rstd,
                              const struct matrix *gain);
void cpu_rope_forward(struct device *d, struct matrix *qkv, const struct attention_payload *payload,
                      struct quantise_counts *counts, const float *cos_sin, const struct attention_shape *s);
void cpu_rope_backward(struct device *d, const struct emission *out, const struct matrix *d_qkv, const float *cos_sin,
                       const struct attention_shape *s);
void cpu_attention_forward(struct device *d, struct matrix *out, float *lse, float *max_logit,
                           struct quantise_counts *counts, const struct matrix *qkv,
                           const struct attention_payload *payload, const int32_t *starts,
                           const struct attention_shape *s);
void cpu_attention_gradient(struct device *d, const struct attention_gradient *g, struct quantise_counts *counts,
                            const struct matrix *d_out, const struct matrix *out, const float *lse,
                            const struct attention_formats *formats, const struct attention_shape *s);
void cpu_attention_backward(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts,
                            const struct matrix *d_out, const struct attention_gradient *g, const struct matrix *out,
                            const float *lse, const struct matrix *qkv, const struct attention_payload *payload,
                            const int32_t *starts, const struct attention_shape *s);
void cpu_swiglu_forward(struct device *d, const struct emission *out, const struct matrix *gate_up);
void cpu_swiglu_backward(struct device *d, const struct emission *out, const struct matrix *d_act,
                         const struct matrix *gate_up);
void cpu_contract(struct device *d, struct matrix *out, const struct operand *a, const struct operand *b,
                  const struct matrix *add);
void cpu_cross_entropy_within(struct device *d, float *nll, const struct matrix *logits, int64_t vocabulary,
                              const int32_t *targets);
void cpu_cross_entropy(struct device *d, float *nll, struct matrix *d_logits, const struct matrix *logits,
                       const int32_t *targets, float grad_scale);
void cpu_adamw_update(struct device *d, const struct adamw_tensor *tensors, int count, enum dtype param_dtype, enum dtype grad_dtype,
                      const struct adamw *a, const struct draw *draw);
void cpu_measure(struct device *d, struct measure *measured, const struct matrix *x, int count);
void cpu_sum(struct device *d, double *sum, const struct matrix *x);

/* Instruction sets of the contraction.  The bits are the same in all; the name
 * of the one in use is what start-up records: "amx-bf16", "avx512-fma",
 * "avx2-fma", "neon-fma", "plain-fma".  (With "amx-bf16", operands in FP32 run
 * on the best FMA kernel.)
 *
 * cpu_isa_choose takes one of these names or "portable", the best one without
 * AMX; NULL = the environment's FP4D_ISA, and the best one where that is unset.
 * False with *e = ERROR_DEVICE when this processor has no such kernel.  Not
 * during a contraction.  cpu_open makes the NULL choice. */
bool cpu_isa_choose(const char *name, struct error *e);
const char *cpu_isa_name(void);

/* FLOP/s of FP32 fused multiply-adds in registers alone, all workers together,
 * measured (some milliseconds): what `bench` compares with. */
double cpu_peak_fma(struct device *d);

/* Scratch that each group of operations needs, all workers together. */
int64_t cpu_contract_scratch_bytes(const struct extent *x, int threads);
int64_t cpu_attention_scratch_bytes(const struct extent *x, int threads);
int64_t cpu_producer_scratch_bytes(const struct extent *x, int threads); /* producers, quantise, embedding, loss, optimizer */
int64_t cpu_embedding_scratch_bytes(int64_t tokens);                     /* of it, the embedding's */

#endif
