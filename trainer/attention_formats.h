/* Attention's tensors in few bits for measurement: FP64 in, what the codes represent
 * out.  Scale and code rules are those of kernels/attention.h and kernels/formats.h.
 */
#ifndef FP4D_TRAINER_ATTENTION_FORMATS_H
#define FP4D_TRAINER_ATTENTION_FORMATS_H

#include <stdbool.h>
#include <stdint.h>

/* ---- Q, K, V ------------------------------------------------------------------------ */
enum tensor_format {
  TENSOR_BF16,
  TENSOR_E4M3,     /* of four times the value */
  TENSOR_NVFP4,    /* 16 along the contraction, E4M3 scale */
  TENSOR_NVFP4_64, /* Q, K: of four such scales that one for all 64 which has the least squared error */
  TENSOR_MXFP4     /* 32 along the contraction; Q, K: no clipping, V: cutoff 1.203125 */
};
extern const char *const tensor_format_names[];

/* to[rows][cols] from values[rows][cols]: BF16 numbers; blocks along columns. */
void tensor_represent(float *to, const float *values, int64_t rows, int64_t cols, enum tensor_format format);
/* to[tokens][cols], blocks along tokens; MXFP4: *six times* what is represented, exactly. */
void tensor_represent_v(float *to, const float *values, int64_t tokens, int64_t cols, enum tensor_format format);

/* ---- P -------------------------------------------------------------------------------- */
struct p_format {
  const char *name;
  enum { P_EXACT, P_E4M3, P_NVFP4, P_MXFP4, P_DIRECT } kind;
  enum { P_MAXIMUM, P_NONE, P_NORMALISED } reference; /* what 2^t is relative to: the row's maximum, 1, its sum */
  int block;          /* keys of a scale */
  float lift;         /* NVFP4: G, which multiplies P before its scale is encoded */
  bool affine;        /* codes by 1.5 x + 1.2 instead of 2^x */
  enum { P_FAST, P_ACCURATE, P_GUARDED } policy; /* of P_DIRECT */
};

struct p_counts {
  int64_t blocks, zero_blocks, codes, zero_codes;
};

/* p[n], not normalised, of log2 scores t[n]; *denominator is what it is divided by: the
 * sum of p, E4M3: of what was rounded. */
void p_represent(double *p, double *denominator, struct p_counts *counts, const double *t, int64_t n, const struct p_format *format);

#endif
