/* The CUDA backends' own header: their device, how kernels are launched, what
 * their files share.  `sm90` and `sm100` have one table of operations but for
 * attention; kernels/kernels.h says what each operation does.
 *
 * The same sources are compiled twice: by nvcc for the GPUs, and by g++ with
 * FP4D_CUDA_MODEL for the host model (kernels/cuda/model/fibers.h), in which
 * `make check` runs them.  So machine instructions stand only where both have
 * them: the built-in functions of kernels/cuda/model/device.h, and ptx.h of
 * kernels/sm90.
 *
 * In a kernel: `static __global__ void name(...)`, threadIdx and its kin,
 * __shared__ variables (no initial values), CUDA_DYNAMIC_SHARED.  Arithmetic that
 * must give the CPU's bits comes from kernels/formats.h, elementary.h, reduce.h.
 * Sizes and indices are int64_t: tensors have more than 2^31 elements.
 */
#ifndef FP4D_KERNELS_CUDA_CUDA_H
#define FP4D_KERNELS_CUDA_CUDA_H

#ifdef FP4D_CUDA_MODEL
#include "kernels/cuda/model/runtime.h"
#else
#include <cuda_runtime.h>
#endif

extern "C" {
#include "kernels/elementary.h"
#include "kernels/kernels.h"
#include "kernels/link.h"
}

struct cuda_gemm; /* what `contract` keeps: kernels/cuda/gemm.cu */

struct cuda_device {
  struct device device; /* first */
  int ordinal, sm_count;
  char name[256]; /* of the GPU */
  cudaStream_t stream;
  char *scratch;
  int64_t scratch_bytes;
  int64_t attention_kept_most; /* bytes of scratch for dS in attention's backward on Hopper; 0: none is kept */
  struct cuda_gemm *gemm;
  cudaEvent_t *event; /* [n_events] */
  int n_events;
  /* The first error since the last synchronisation; cudaSuccess: none. */
  cudaError_t fault;
  const char *fault_at;    /* the kernel that was launched, or the call */
  const char *last_kernel; /* launched last */
};

static inline struct cuda_device *cuda_of(struct device *d) { return (struct cuda_device *)d; }
static inline const struct cuda_device *cuda_of(const struct device *d) { return (const struct cuda_device *)d; }

/* A condition that the caller guarantees; aborts with the reason if it does not hold. */
#define CUDA_REQUIRE(condition, what)                                              \
  do {                                                                             \
    if (!(condition)) cuda_defect(__func__, what);                                 \
  } while (0)
extern "C" void cuda_defect(const char *function, const char *what) __attribute__((noreturn, cold));

/* The same in a kernel, of values that only the device sees: the launch faults,
 * and `synchronize` reports it. */
#ifdef FP4D_CUDA_MODEL
#define CUDA_DEVICE_REQUIRE(condition, what)                                       \
  do {                                                                             \
    if (!(condition)) cuda_model_fail("%s", what);                                 \
  } while (0)
#else
#define CUDA_DEVICE_REQUIRE(condition, what)                                       \
  do {                                                                             \
    if (!(condition)) __trap();                                                    \
  } while (0)
#endif

/* Keeps an error of an asynchronous call for `synchronize`; `what` lives as long
 * as the program.  The first one stays. */
static inline void cuda_keep_fault(struct cuda_device *d, cudaError_t code, const char *what) {
  if (code == cudaSuccess || d->fault != cudaSuccess) return;
  d->fault = code;
  d->fault_at = what;
}

/* ---- launching ------------------------------------------------------------ */
/* On d->stream; arguments are converted to the parameters' types.  A template's
 * instance stands in parentheses: CUDA_LAUNCH(d, (copy<float, 4>), grid, ...).
 * Dynamic shared memory needs nothing else, up to what a block can have beside the kernel's own. */
#define CUDA_LAUNCH(d, kernel, grid, block, ...) /* dynamic_shared_bytes, arguments */ \
  cuda_launch(d, #kernel, kernel, false, grid, block, __VA_ARGS__)

/* The same of a kernel that is set up while the last one still runs: it calls cuda_wait_for_last
 * before it reads or writes memory ("programmatic dependent launch" in CUDA's guide). */
#define CUDA_LAUNCH_EARLY(d, kernel, grid, block, ...) cuda_launch(d, #kernel, kernel, true, grid, block, __VA_ARGS__)

template <class... Parameters, class... Arguments>
static inline void cuda_launch(struct cuda_device *d, const char *name, void (*kernel)(Parameters...), bool early, dim3 grid, dim3 block,
                               size_t dynamic_shared_bytes, Arguments... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "a kernel's arguments");
  d->last_kernel = name;
#ifdef FP4D_CUDA_MODEL
  (void)early;
  auto run = [=] { kernel(static_cast<Parameters>(arguments)...); };
  cuda_model_submit(d->stream, [=]() mutable {
    cuda_model_launch(name, grid, block, dynamic_shared_bytes, [](void *r) { (*static_cast<decltype(run) *>(r))(); }, &run);
    return true;
  });
#else
  if (dynamic_shared_bytes > 0) /* without, both kinds together have 48 KiB */
    cuda_keep_fault(d, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic_shared_bytes)), name);
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = grid, launch.blockDim = block, launch.dynamicSmemBytes = dynamic_shared_bytes, launch.stream = d->stream;
  launch.attrs = &overlap, launch.numAttrs = early ? 1 : 0;
  cuda_keep_fault(d, cudaLaunchKernelEx(&launch, kernel, static_cast<Parameters>(arguments)...), name);
#endif
}

#ifdef FP4D_CUDA_MODEL
static inline void cuda_wait_for_last() {}
#else
static __device__ __forceinline__ void cuda_wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

/* A number of blocks as a grid's x; what has more is a defect. */
static inline unsigned cuda_grid(int64_t blocks) {
  CUDA_REQUIRE(blocks > 0 && blocks <= 0x7FFFFFFF, "a launch of no blocks, or of too many");
  return static_cast<unsigned>(blocks);
}

/* A kernel's dynamic shared memory, aligned to 1024 bytes. */
#ifdef FP4D_CUDA_MODEL
#define CUDA_DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(cuda_model_dynamic_shared())
#else
extern __shared__ __align__(1024) unsigned char cuda_dynamic_shared[];
#define CUDA_DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(cuda_dynamic_shared)
#endif

/* ---- opening: device.cu --------------------------------------------------- */
extern "C" {
/* The GPU `ordinal` as backend "sm90" or "sm100".  NULL with *e = ERROR_DEVICE. */
struct device *cuda_open(const char *backend, int ordinal, struct error *e);
/* One that touches no GPU: device_open_plan's. */
struct device *cuda_open_plan(const char *backend, struct error *e);

#ifdef FP4D_CUDA_MODEL
/* The host model's device: the whole table over host memory; `contract` is the
 * CPU's.  The machine becomes one that the backend is for. */
struct device *cuda_model_open(const char *backend, struct error *e);
struct device *cuda_model_open_rank(const char *backend, int ordinal, struct error *e);
#endif

extern const struct links cuda_links; /* link.cu */

/* ---- the operations: kernels.h says what each does ----------------------- */
const char *cuda_refuse_encoding(const struct device *d, const struct encoding *e, enum view view);
const char *cuda_refuse_attention(const struct device *d, const struct attention_formats *f, enum attention_part part,
                                  const struct attention_shape *s);
const char *cuda_refuse_extent(const struct device *d, const struct extent *x, enum dtype activations);
void cuda_quantise(struct device *d, const struct emission *out, const struct matrix *source);
void cuda_embedding_forward(struct device *d, struct matrix *x, const struct matrix *table, const int32_t *tokens);
void cuda_embedding_backward(struct device *d, struct matrix *d_table, const struct matrix *dx, const int32_t *tokens);
void cuda_add_rmsnorm_forward(struct device *d, const struct emission *out, struct matrix *residual_out, float *rstd,
                              const struct matrix *residual, const struct matrix *delta, const struct matrix *gain, float eps);
void cuda_add_rmsnorm_forward_cast(struct device *d, const struct emission *out, struct matrix *residual_out, float *rstd,
                                   const struct matrix *residual, const struct matrix *delta, const struct matrix *gain, float eps);
void cuda_add_rmsnorm_backward(struct device *d, const struct emission *out, struct matrix *d_gain, const struct matrix *dy,
                               const struct matrix *d_above, const struct matrix *residual, const float *rstd,
                               const struct matrix *gain);
void cuda_rope_forward(struct device *d, struct matrix *qkv, const struct attention_payload *payload,
                       struct quantise_counts *counts, const float *cos_sin, const struct attention_shape *s);
void cuda_rope_backward(struct device *d, const struct emission *out, const struct matrix *d_qkv, const float *cos_sin,
                        const struct attention_shape *s);
void cuda_swiglu_forward(struct device *d, const struct emission *out, const struct matrix *gate_up);
void cuda_swiglu_backward(struct device *d, const struct emission *out, const struct matrix *d_act, const struct matrix *gate_up);
void cuda_cross_entropy(struct device *d, float *nll, struct matrix *d_logits, const struct matrix *logits, const int32_t *targets,
                        float grad_scale);
void cuda_cross_entropy_within(struct device *d, float *nll, const struct matrix *logits, int64_t vocabulary, const int32_t *targets);
void cuda_adamw_update(struct device *d, const struct adamw_tensor *tensors, int count, enum dtype param_dtype, enum dtype grad_dtype,
                       const struct adamw *a, const struct draw *draw);
void cuda_measure(struct device *d, struct measure *measured, const struct matrix *x, int count);
void cuda_sum(struct device *d, double *sum, const struct matrix *x);

/* Attention of any head_dim up to 256, BF16 or FP32, without tensor cores. */
void cuda_attention_forward(struct device *d, struct matrix *out, float *lse, float *max_logit, struct quantise_counts *counts,
                            const struct matrix *qkv, const struct attention_payload *payload, const int32_t *starts,
                            const struct attention_shape *s);
void cuda_attention_backward(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts, const struct matrix *d_out,
                             const struct attention_gradient *g, const struct matrix *out, const float *lse,
                             const struct matrix *qkv, const struct attention_payload *payload, const int32_t *starts,
                             const struct attention_shape *s);

/* Scratch that each group of operations needs; each takes it from its beginning. */
int64_t cuda_producer_scratch_bytes(const struct extent *x); /* producers, embedding, loss, optimizer */
int64_t cuda_embedding_scratch_bytes(int64_t tokens);        /* of it, the embedding's */
int64_t cuda_rmsnorm_scratch_bytes(int64_t rows, int64_t cols);
int64_t cuda_attention_scratch_bytes(const struct extent *x);

/* contract keeps a library's handle and its choices of algorithms. */
bool cuda_contract_open(struct cuda_device *d, struct error *e);
void cuda_contract_close(struct cuda_device *d);
void cuda_contract_describe(const struct cuda_device *d, char *text, int size);
void cuda_contract_choices(const struct device *d, void (*take)(void *context, const char *contraction, const char *choice), void *context);
int64_t cuda_contract_scratch_bytes(const struct cuda_device *d, const struct extent *x);
void cuda_contract(struct device *d, struct matrix *out, const struct operand *a, const struct operand *b,
                   const struct matrix *add);

const char *sm90_refuse_extent(const struct device *d, const struct extent *x, enum dtype activations);
/* sm90's attention: its own kernels' or cuda_attention_forward and _backward (kernels/sm90/attention.cu). */
void sm90_choose_attention_forward(struct device *d, struct matrix *out, float *lse, float *max_logit, struct quantise_counts *counts,
                                   const struct matrix *qkv, const struct attention_payload *payload, const int32_t *starts,
                                   const struct attention_shape *s);
void sm90_choose_attention_backward(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts, const struct matrix *d_out,
                                    const struct attention_gradient *g, const struct matrix *out, const float *lse,
                                    const struct matrix *qkv, const struct attention_payload *payload, const int32_t *starts,
                                    const struct attention_shape *s);
void sm90_choose_attention_rope_backward(struct device *d, struct matrix *d_qkv, const struct matrix *d_out, const struct matrix *out,
                                         const float *lse, const struct matrix *qkv, const float *cos_sin, const int32_t *starts,
                                         const struct attention_shape *s);
/* Attention on Hopper's tensor cores: kernels/sm90. */
void sm90_attention_forward(struct device *d, struct matrix *out, float *lse, float *max_logit, struct quantise_counts *counts,
                            const struct matrix *qkv, const struct attention_payload *payload, const int32_t *starts,
                            const struct attention_shape *s);
void sm90_attention_backward(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts, const struct matrix *d_out,
                             const struct attention_gradient *g, const struct matrix *out, const float *lse, const struct matrix *qkv,
                             const struct attention_payload *payload, const int32_t *starts, const struct attention_shape *s);
void sm90_attention_rope_backward(struct device *d, struct matrix *d_qkv, const struct matrix *d_out, const struct matrix *out, const float *lse,
                                  const struct matrix *qkv, const float *cos_sin, const int32_t *starts, const struct attention_shape *s);
int64_t sm90_attention_forward_scratch_bytes(const struct extent *x);
int64_t sm90_attention_backward_scratch_bytes(const struct cuda_device *d, const struct extent *x);
}

#endif
