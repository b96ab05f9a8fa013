/* Numerical operations behind one header.
 *
 * A backend is a table of functions chosen at start-up; callers know none of
 * them.  The CPU backend is the definition: on any other backend quantisers
 * and element-wise producers are bit-identical to it, contractions, attention
 * and cross-entropy are close (only the order of accumulation differs).
 *
 * Conventions
 *   - Matrices are row-major and contiguous.  "tokens" is batch * seq_len; row
 *     t of a token matrix is token t % seq_len of sample t / seq_len.
 *   - Sums are FP32 unless said; elements are read in their type, computed in
 *     FP32, and rounded once (to nearest even) when written.
 *   - Pointers are device pointers (on the CPU backend: ordinary memory).
 *   - Operations are asynchronous and do not fail by return value: a fault of
 *     the device is kept and reported by `synchronize`.  Shapes and encodings
 *     are checked before start-up by `refuse_encoding` and the model, so an
 *     operation given something else is a defect (it aborts with the reason).
 *   - Outputs must not overlap inputs unless an operation says so.
 */
#ifndef FP4D_KERNELS_KERNELS_H
#define FP4D_KERNELS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/encoding.h"

enum dtype { DTYPE_F32 = 1, DTYPE_BF16 = 2 };

static inline size_t dtype_bytes(enum dtype d) { return d == DTYPE_BF16 ? 2 : 4; }
static inline const char *dtype_name(enum dtype d) { return d == DTYPE_BF16 ? "bf16" : "fp32"; }

/* A plain matrix: rows x cols elements of `dtype`, row-major, no gaps. */
struct matrix {
  void *data;
  enum dtype dtype;
  int64_t rows, cols;
};

/* Which axis of the source an operand contracts over. */
enum view {
  VIEW_ROW = 0,   /* contraction along the source's columns: operand is rows x cols */
  VIEW_COLUMN = 1 /* contraction along the source's rows: operand is cols x rows */
};

/* An operand of a contraction: `rows` vectors of `cols` elements, contracted
 * along cols.
 *
 * Packed formats: codes [rows, cols/2], two a byte, element 2j in the low
 * nibble; scales in 512-byte tiles of 128 rows x 4 scale columns: with
 * G = ceil(scale columns / 4), scale (r, c) stands at
 *   ((r/128)*G + c/4)*512 + (r%32)*16 + ((r%128)/32)*4 + c%4
 * rows padded to 128 and scale columns to 4 with zero bytes (the tcgen05 and
 * cuBLASLt block-scaled layout).  2D scales are replicated to every row.
 *
 * E4M3 and E5M2: codes [rows, cols], a byte each; no block scales.
 *
 * Outer factors: outer[(r / strip) * segments + c / segment], segments = cols /
 * segment.  An element is  code * block scale * outer * k,  with k = 1/6 for
 * MXFP4 (no outer; 1 by SCALE_MX_FLOOR), 1/2688 for NVFP4 (outer is the view's
 * amax; 1/1536 by SCALE_TENSOR_4OVER6), else 1.
 *
 * Plain formats: `codes` is the source matrix itself, `scales` is NULL; with
 * VIEW_COLUMN it is stored as the source is, [cols, rows] row-major. */
struct operand {
  struct encoding encoding;
  enum view view;
  int64_t rows, cols;
  uint8_t *codes;
  uint8_t *scales;
  float *outer;    /* FP32 factors; NULL for MXFP4 and plain formats */
  int64_t strip;   /* rows that share an outer factor; 0 = all */
  int64_t segment; /* columns that do; 0 = all. Two arms of one contraction (W1|W3) are two segments. */
};

/* A plain matrix as an operand. */
struct operand operand_of_matrix(const struct matrix *m, enum view view);

/* Bytes of codes and of scales (padding included) for a packed operand. */
int64_t operand_code_bytes(const struct encoding *e, int64_t rows, int64_t cols);
int64_t operand_scale_bytes(const struct encoding *e, int64_t rows, int64_t cols);

/* Outer factors of an operand whose encoding, shape, strip and segment are set; 0 where it has none. */
int64_t operand_outer_count(const struct operand *o);

/* Position of scale (r, c) in the tiled layout; `scale_cols` = cols / block. */
int64_t operand_scale_offset(int64_t r, int64_t c, int64_t scale_cols);

/* 1/k. */
double operand_divisor(const struct encoding *e);

/* values[cols] of row r of an operand in host memory, of any format, as above:
 * in double, where the product is exact but for k. A transform is not undone. */
void operand_decode(const struct operand *o, int64_t r, double *values);

/* Stochastic rounding: where the draws stand (base/philox.h).  Row r of the
 * source belongs to sample `first_sample + r / seq_len`; the block index
 * inside the sample is ((r % seq_len) * source_cols + col) / 16.  A column
 * view that draws (operand + DRAW_COLUMN) groups 16 tokens: its block index is
 * col * (seq_len / 16) + (r % seq_len) / 16. */
struct draw {
  uint64_t seed;
  uint32_t update;
  uint64_t first_sample; /* index in the run of the micro-batch's first sample */
  int64_t seq_len;
  uint32_t layer;
  uint32_t operand; /* enum draw_operand */
};

/* Who draws. The numbers are part of the checkpoint contract. */
enum draw_operand {
  DRAW_DY_QKV = 1,
  DRAW_DY_OUT = 2,
  DRAW_DY_GATE_UP = 3,
  DRAW_DY_DOWN = 4,
  DRAW_DY_HEAD = 5,
  DRAW_PARAMETER = 16, /* stochastic rounding of BF16 parameters; layer = parameter number */
  DRAW_INITIAL = 17,   /* initial values; layer = parameter number, block = element / 4 */
  DRAW_COLUMN = 32     /* added to a DRAW_DY: its column view (Transformer Engine's recipe alone) */
};

/* Counts over quantised elements; operations add to them. */
struct quantise_counts {
  int64_t elements;    /* elements quantised */
  int64_t saturated;   /* |z| beyond the largest code's reach before rounding */
  int64_t underflowed; /* nonzero z that became code 0 */
  int64_t blocks, zero_blocks;
  float amax; /* largest finite magnitude before scaling, after any transform; the maximum is kept */
};

/* What a producer writes besides computing.  NULL members are not written.
 * `plain` has the producer's shape in the activation type; row and column
 * operands are quantised from the values *as rounded to that type*, whether
 * or not `plain` is kept. */
struct emission {
  struct matrix *plain;
  struct operand *row;
  struct operand *column;
  struct draw draw;               /* read only by stochastic encodings */
  struct quantise_counts *counts; /* may be NULL; else two, [VIEW_ROW] and [VIEW_COLUMN]: each operand adds to its own */
};

struct attention_shape {
  int64_t batch, seq_len, n_heads, n_kv_heads, head_dim;
};

/* ---- attention in few bits: the rules are in kernels/attention.h ----------- */
/* How attention's tensors are written; BF16 or FP32: the activations as they are.
 *   qk     BF16; E4M3; NVFP4 (K16 blocks along head_dim, no outer factor)
 *   pv     BF16; E4M3; MXFP4 (P in blocks of 32 keys, V in blocks of 32 tokens of a feature)
 *   d_out  BF16: P and dS of the backward stay in FP32; E5M2 or E4M3: P and dS are
 *          E4M3, and dO is this
 * All zero is BF16 throughout. */
struct attention_formats {
  enum format qk, pv, d_out;
  float p_slope, p_offset; /* MXFP4: a code of P is that of max(0, slope x + offset); slope 0: of 2^x */
  float d_out_lift;        /* dO is published times 4 L: this power of two; 0: by its largest magnitude */
};

static inline bool attention_format_plain(enum format f) { return f == 0 || f == FORMAT_F32 || f == FORMAT_BF16; }
static inline bool attention_plain(const struct attention_formats *f) {
  return attention_format_plain(f->qk) && attention_format_plain(f->pv) && attention_format_plain(f->d_out);
}

enum attention_part { ATTENTION_PART_QK, ATTENTION_PART_PV, ATTENTION_PART_D_OUT, ATTENTION_PARTS };

/* What boundary (2) publishes of the rotated qkv, as BF16 holds it.  T = tokens,
 * Q = n_heads * head_dim, K = n_kv_heads * head_dim columns, head after head.
 *   Q4, K4       E2M1, [T, Q/2] and [T, K/2], two codes a byte, low nibble first;
 *                value = code * scale
 *   …_SCALES     E4M3 of 16 columns, in operands' tiles of 128 rows x 4: one operand
 *                of T rows and Q/16 (K/16) scale columns
 *   Q8, K8, V8   E4M3 of four times the value, [T, Q], [T, K], [T, K]
 *   V4           E2M1 by feature: [batch, K, S/2], S = seq_len rounded up to 32 and the
 *                tokens that do not exist zero; value = code * scale / 6
 *   V4_SCALES    E8M0 of 32 tokens, for each sample an operand of K rows and S/32
 *                scale columns */
enum attention_view {
  ATTENTION_Q4, ATTENTION_Q4_SCALES,
  ATTENTION_K4, ATTENTION_K4_SCALES,
  ATTENTION_V4, ATTENTION_V4_SCALES,
  ATTENTION_Q8, ATTENTION_K8, ATTENTION_V8,
  ATTENTION_VIEWS
};

/* Boundary (2)'s payload: rope_forward writes every view, attention's forward and
 * backward read them.  A view of 0 bytes is NULL. */
struct attention_payload {
  struct attention_formats formats;
  uint8_t *view[ATTENTION_VIEWS];
};

/* Bytes of a view that these formats need; `training`: a backward follows. */
int64_t attention_view_bytes(const struct attention_formats *f, const struct attention_shape *s, bool training,
                             enum attention_view view);

/* What the boundary of the output projection's dgrad publishes, where d_out has codes. */
struct attention_gradient {
  uint8_t *codes; /* [tokens, n_heads * head_dim] of 4 L dO */
  float *lift;    /* L, [batch, n_kv_heads]; NaN where dO is not finite */
  float *d_stat;  /* -4 sum over d of O * decoded code, [batch, n_heads, seq_len] */
  float *l_stat;  /* 8 - log2(e) lse, likewise */
};

/* Counts of attention's codes: quantise_counts[ATTENTION_TENSORS], added to.  P
 * and dS: of the pairs key <= query; what is never 0 but for rounding is P, and
 * dS where dP differs from D.  P in forward, dO and dS in backward, the others by
 * every view that rope_forward writes.  amax stands for dO and dS alone. */
enum attention_tensor {
  ATTENTION_Q, ATTENTION_K, ATTENTION_V, ATTENTION_P, ATTENTION_DO, ATTENTION_DS, ATTENTION_TENSORS
};

/* One AdamW update.  g = grad_scale * grad;
 *   m = beta1 m + (1-beta1) g;  v = beta2 v + (1-beta2) g^2
 *   w -= lr * ( (m/bias1) / (sqrt(v/bias2) + eps) + weight_decay * w )
 * (Loshchilov and Hutter, "Decoupled Weight Decay Regularization"), w being
 * the master where there is one, else the parameter itself. */
struct adamw {
  float lr, beta1, beta2, eps, grad_scale;
  float bias1, bias2; /* 1 - beta^t, made by the caller; in (0, 1] */
};

struct update_measure {
  double update_sum_squares; /* of the change of w */
  double weight_sum_squares; /* of w before */
};

/* A tensor, or a slice of one, and what AdamW keeps of it: n elements each. */
struct adamw_tensor {
  void *param;
  float *master; /* NULL: the parameter is the only copy */
  float *m, *v;
  const void *grad;
  int64_t n;
  float weight_decay;
  uint32_t layer;                  /* of its draws */
  uint64_t first;                  /* the element that param[0] is in its tensor: slices draw as the whole would */
  struct update_measure *measured; /* added to; may be NULL */
};

struct measure {
  double sum_squares; /* of the finite elements */
  int64_t nonfinite;
  float amax; /* of the finite elements */
};

/* The largest extents that operations will be called with; sizes scratch. */
struct extent {
  int64_t tokens;        /* batch * seq_len */
  int64_t head_chunk;    /* tokens whose logits exist at once */
  struct attention_shape attention; /* the very one: a shorter sample's backward may want more */
  int64_t hidden_size, ffn_size, vocab_size;
  enum dtype attention_backward; /* what attention's backward is called with; 0: it is not called */
};

struct device; /* opaque */
struct links;

struct kernels {
  const char *backend; /* "cpu", "sm90", "sm100" */
  bool host_memory;    /* device pointers are ordinary memory, which the host may read and MPI may send */
  const struct links *links; /* what moves device memory between ranks (kernels/link.h); NULL where host_memory */

  /* What the device computes with, for the run's record: "2 threads, contractions
   * by amx-bf16". */
  void (*describe)(const struct device *d, char *text, int size);
  /* Where a library chooses how a contraction is computed: each one so far and what was
   * chosen, in words.  The same words are the same order of sums.  NULL: nothing is chosen. */
  void (*choices)(const struct device *d, void (*take)(void *context, const char *contraction, const char *choice), void *context);

  /* NULL when the backend executes this encoding as an operand of this view
   * of a contraction, else why not, as words that follow "mxfp4/...: ". */
  const char *(*refuse_encoding)(const struct device *d, const struct encoding *e, enum view view);
  /* NULL when it executes this part of attention so, in BF16 activations, else
   * why not, as words that follow "attention qk nvfp4: ".  Not asked of what is plain. */
  const char *(*refuse_attention)(const struct device *d, const struct attention_formats *f, enum attention_part part,
                                  const struct attention_shape *s);

  /* NULL when it executes operations of these extents with activations of this type, else
   * why not, in words that name the extent.  What it takes no operation refuses. */
  const char *(*refuse_extent)(const struct device *d, const struct extent *x, enum dtype activations);

  /* Scratch that the operations below need for these extents, in bytes;
   * `set_scratch` hands it over once, before any operation. */
  int64_t (*scratch_bytes)(const struct device *d, const struct extent *x);
  void (*set_scratch)(struct device *d, void *scratch, int64_t bytes);

  /* Memory.  allocate returns NULL with *e filled. */
  void *(*allocate)(struct device *d, size_t bytes, struct error *e);
  void (*release)(struct device *d, void *p);
  void (*clear)(struct device *d, void *p, size_t bytes); /* zero bytes */
  /* Host memory that copies to and from the device run fastest with (pinned); any
   * other is allowed.  allocate_host returns NULL with *e filled. */
  void *(*allocate_host)(struct device *d, size_t bytes, struct error *e);
  void (*release_host)(struct device *d, void *p);
  /* Bytes of the device's memory that are in use, by whatever process, and that it has.
   * NULL: the host's memory is its own. */
  bool (*memory)(struct device *d, int64_t *used, int64_t *total, struct error *e);
  /* What the device holds of its memory beside allocations (context, code of kernels,
   * libraries): an estimate, for plans. */
  int64_t own_bytes;
  /* In order with the operations.  What is uploaded is read, and what is downloaded
   * is there, at the next synchronize at the latest. */
  void (*upload)(struct device *d, void *to_device, const void *from_host, size_t bytes);
  void (*download)(struct device *d, void *to_host, const void *from_device, size_t bytes);
  bool (*synchronize)(struct device *d, struct error *e);

  /* Events: moments in the order of the operations, numbered 0 to n - 1; make_events
   * replaces those there were.  One comes when every operation before it is done, and
   * costs nobody a wait.  seconds_between two: after a synchronize that followed both. */
  bool (*make_events)(struct device *d, int n, struct error *e);
  void (*record_event)(struct device *d, int event);
  double (*seconds_between)(struct device *d, int from, int to);

  /* Quantises (or copies) a matrix that has no fused producer: weights,
   * attention output.  For a 2D encoding row and column get the same codes
   * and scales, transposed. */
  void (*quantise)(struct device *d, const struct emission *out, const struct matrix *source);

  /* y = x[tokens, hidden] of table[vocab, hidden] by token id. */
  void (*embedding_forward)(struct device *d, struct matrix *x, const struct matrix *table,
                            const int32_t *tokens);
  /* d_table[vocab, hidden]: row tokens[t] += dx row t.  A row's sum starts at what
   * stands there and takes its tokens in token order, in FP32; it is rounded to
   * d_table's type once. */
  void (*embedding_backward)(struct device *d, struct matrix *d_table, const struct matrix *dx,
                             const int32_t *tokens);

  /* Boundaries (1) and (4): residual + RMSNorm.
   *   residual_out = residual + delta          (delta NULL: residual_out is not written)
   *   out = residual_out * rstd * gain,  rstd[t] = 1/sqrt(mean(residual_out^2) + eps)
   * The sum is rounded to the residual's type before it is normalised.
   * residual_out may be the same matrix as residual. gain [1, hidden]. */
  void (*add_rmsnorm_forward)(struct device *d, const struct emission *out, struct matrix *residual_out,
                              float *rstd, const struct matrix *residual, const struct matrix *delta,
                              const struct matrix *gain, float eps);
  /* The same with residual_out * rstd rounded to the residual's type before the gain, as
   * transformers computes it: in BF16 two roundings, in FP32 the same bits.  For evaluating;
   * no backward belongs to it.  NULL: the backend does not have it. */
  void (*add_rmsnorm_forward_cast)(struct device *d, const struct emission *out, struct matrix *residual_out,
                                   float *rstd, const struct matrix *residual, const struct matrix *delta,
                                   const struct matrix *gain, float eps);
  /* d_residual = d_above + d(norm)/d(residual) applied to dy; emission `out` is
   * d_residual: plain is the gradient that flows on, row/column the dY of the
   * linear whose output was `delta`.  d_above NULL means zero.  out->plain may
   * be d_above.  d_gain [1, hidden] is added to: rows summed by the fixed tree, the sum
   * added in FP32 to what stands there and rounded to d_gain's type once. */
  void (*add_rmsnorm_backward)(struct device *d, const struct emission *out, struct matrix *d_gain,
                               const struct matrix *dy, const struct matrix *d_above,
                               const struct matrix *residual, const float *rstd, const struct matrix *gain);

  /* Boundary (2): rotary embedding of q and k inside qkv[tokens,
   * (n_heads + 2 n_kv_heads) * head_dim], pairs interleaved (2i, 2i+1), in
   * place; cos_sin [seq_len, head_dim/2, 2] FP32 (kernels/rope.h).  Then the
   * payload's views, from what was rounded.  payload, counts: may be NULL. */
  void (*rope_forward)(struct device *d, struct matrix *qkv, const struct attention_payload *payload,
                       struct quantise_counts *counts, const float *cos_sin, const struct attention_shape *s);
  /* The inverse rotation on d_qkv, then emission (plain may be d_qkv). */
  void (*rope_backward)(struct device *d, const struct emission *out, const struct matrix *d_qkv,
                        const float *cos_sin, const struct attention_shape *s);

  /* Causal grouped-query attention.  out [tokens, n_heads * head_dim];
   * lse [batch, n_heads, seq_len] FP32, natural log of the softmax denominator
   * with scores scaled by 1/sqrt(head_dim).  *max_logit = max(*max_logit,
   * largest scaled score); may be NULL, as counts may.  payload NULL: all plain;
   * else of Q, K and V the views are read where formats have them.
   * starts [batch, seq_len]: the first position of its sample that each query
   * attends to, the first of its document: ascending, none after its own.  What
   * is before it has no part in any sum.  NULL: 0 everywhere. */
  void (*attention_forward)(struct device *d, struct matrix *out, float *lse, float *max_logit,
                            struct quantise_counts *counts, const struct matrix *qkv,
                            const struct attention_payload *payload, const int32_t *starts,
                            const struct attention_shape *s);
  /* Publishes *g from dO where formats->d_out has codes (else it is not called). */
  void (*attention_gradient)(struct device *d, const struct attention_gradient *g, struct quantise_counts *counts,
                             const struct matrix *d_out, const struct matrix *out, const float *lse,
                             const struct attention_formats *formats, const struct attention_shape *s);
  /* d_qkv is the true gradient, whatever lifts were in between. With g, dO and lse
   * are read in it alone; g NULL: formats->d_out is plain. */
  void (*attention_backward)(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts,
                             const struct matrix *d_out, const struct attention_gradient *g, const struct matrix *out,
                             const float *lse, const struct matrix *qkv, const struct attention_payload *payload,
                             const int32_t *starts, const struct attention_shape *s);
  /* Both backwards of boundary (2) for plain formats, where nothing but the plain view is
   * emitted: dQ and dK are rotated before they are rounded, once.  NULL: the backend has
   * the two alone. */
  void (*attention_rope_backward)(struct device *d, struct matrix *d_qkv, const struct matrix *d_out, const struct matrix *out,
                                  const float *lse, const struct matrix *qkv, const float *cos_sin, const int32_t *starts,
                                  const struct attention_shape *s);

  /* Boundary (3): out[tokens, ffn] = silu(gate) * up from gate_up[tokens,
   * 2 ffn], gate in the first ffn columns. */
  void (*swiglu_forward)(struct device *d, const struct emission *out, const struct matrix *gate_up);
  /* out is d_gate_up [tokens, 2 ffn]. */
  void (*swiglu_backward)(struct device *d, const struct emission *out, const struct matrix *d_act,
                          const struct matrix *gate_up);

  /* The contraction out[M,N] = A[M,K] B[N,K]^T (+ add).  `add` may be out
   * itself (accumulation), any matrix of out's shape and type, one in FP32
   * where out is BF16, or NULL; it is added in FP32 after every scale factor.
   * Operands are of any format each; kernels/cpu/gemm.h defines the outputs. */
  void (*contract)(struct device *d, struct matrix *out, const struct operand *a, const struct operand *b,
                   const struct matrix *add);

  /* nll[t] = lse(logits[t]) - logits[t, target]; targets < 0 are not counted
   * (nll 0, zero gradient).  d_logits (NULL: not wanted) gets
   * (softmax - onehot) * grad_scale, in its own type; it may be `logits`
   * itself where the types are equal.  logits [n, vocab] FP32. */
  void (*cross_entropy)(struct device *d, float *nll, struct matrix *d_logits, const struct matrix *logits,
                        const int32_t *targets, float grad_scale);

  /* nll alone, of a softmax over the first `vocabulary` columns: what stands in the others has no
   * part, as if the rows of the output matrix were not there.  Targets lie below `vocabulary`.
   * NULL where a backend does not have it. */
  void (*cross_entropy_within)(struct device *d, float *nll, const struct matrix *logits, int64_t vocabulary,
                               const int32_t *targets);

  /* `count` tensors, parameters in param_dtype and gradients in grad_dtype, FP32 or BF16; all have a master
   * or none, all are measured or none.  A BF16 parameter without a master is rounded stochastically by the
   * draws of (draw->seed, update, operand) and the tensor's layer, one call per 8 elements: element e of the
   * tensor takes 16-bit field e % 8 of block e / 8, field 2j being the low half of word j and 2j+1 its high
   * half; bits of the block above 32 stand as the sample.  Others take no draw: NULL. */
  void (*adamw_update)(struct device *d, const struct adamw_tensor *tensors, int count, enum dtype param_dtype,
                       enum dtype grad_dtype, const struct adamw *a, const struct draw *draw);

  /* Sum of squares, non-finite count and amax of each of `count` matrices of one type, by the fixed tree
   * for long sums (kernels/reduce.h), as are adamw_update's two sums; measured[i], in device memory, is
   * added to (amax: maximum taken with). */
  void (*measure)(struct device *d, struct measure *measured, const struct matrix *x, int count);

  /* *sum += the elements of x, in FP64 by the same tree. */
  void (*sum)(struct device *d, double *sum, const struct matrix *x);

  void (*close)(struct device *d);
};

/* A device begins with its table, so `device->k` is all a caller needs. */
struct device {
  const struct kernels *k;
};

/* Opens a backend by name: "cpu" with `threads` workers (0 = threads_available());
 * "sm90" and "sm100" where the program was built with CUDA, on the machine's first
 * GPU.  NULL with *e = ERROR_DEVICE. */
struct device *device_open(const char *backend, int threads, struct error *e);
/* The same for one of several processes of a machine: GPU `local_rank` of it. */
struct device *device_open_rank(const char *backend, int threads, int local_rank, struct error *e);
/* One to plan with, where no GPU need be: it tells what its backend refuses, what scratch
 * it needs and what it holds itself.  Nothing else may be asked of it. */
struct device *device_open_plan(const char *backend, int threads, struct error *e);

#endif
