/* What the model's files share: the parts of a model and who makes them.
 *
 * Every pointer is a device pointer laid out in the arena (model/layout.c);
 * while measuring all are NULL, so presence is told by shape: a matrix with
 * rows 0 or an operand with format 0 is not there. */
#ifndef FP4D_MODEL_PARTS_H
#define FP4D_MODEL_PARTS_H

#include "model/linears.h"
#include "model/model.h"

/* One tensor as its producer writes it and as contractions read it. A packed
 * operand stands for its view; a view without one reads `plain`. */
struct views {
  struct matrix plain;
  struct operand row, column;
};

/* A linear of a block: Y = X W^T and its gradients. */
struct linear {
  struct matrix source;   /* [n, k], the parameters */
  struct matrix gradient; /* [n, k], the gradients' type */
  struct views x, w, dy;
  int layer;     /* 0-based; -1: the head's */
  enum linear_site site; /* of a block's */
  int64_t arm;   /* > 0: two outputs of this width in one matrix (W1|W3) */
  uint32_t draw; /* enum draw_operand of dy */
};

/* A block: its parameters, and what its forward leaves for its backward. */
struct block {
  int layer; /* 0-based */
  enum recompute recompute; /* NONE, BOUNDARIES or ALL; without training NONE */
  struct linear linear[LINEAR_SITES];
  struct matrix attention_gain, ffn_gain; /* [1, hidden] */
  struct matrix d_attention_gain, d_ffn_gain; /* [1, hidden], the gradients' type */

  struct matrix x_in, x_mid;          /* residual stream before attention and before the FFN */
  struct matrix qkv;                  /* rotated */
  struct attention_payload payload;   /* of qkv, for attention */
  struct matrix attended;             /* attention's output */
  struct matrix gate_up;
  float *attention_rstd, *ffn_rstd;   /* [tokens] */
  float *lse;                         /* [batch, n_heads, seq_len] */
};

/* Final norm, output matrix, loss. */
struct head {
  struct matrix gain;
  struct linear output; /* packed operands of X and dY hold a chunk; x.plain and dy.plain are set for each */
  struct matrix d_gain;   /* [1, hidden], the gradients' type */
  struct matrix x_out;    /* residual stream after the last block */
  struct matrix normed;   /* rmsnorm(x_out) */
  float *rstd;
  struct matrix logits;   /* [chunk, vocab] FP32 */
  struct matrix d_logits; /* [chunk, vocab], activations' type; FP32: the logits themselves */
};

/* What operations see while they compute, on the device. */
struct seen_of_passes {
  struct quantise_counts x[2], dy[2]; /* by view */
  struct quantise_counts attention[ATTENTION_TENSORS];
  float max_logit;
};

struct seen {
  struct seen_of_passes passes; /* since the last reset */
  struct quantise_counts w[2];  /* of the weights' operands as they are */
};

/* Copies to and from it run beside the computation, so neither end may be memory that goes away. */
struct seen_host {
  struct seen_of_passes none;
  struct seen fetched;
};

struct model {
  struct device *d;
  struct model_config config;
  struct model_shape shape;
  struct route route;
  struct extent extent;
  enum dtype type; /* of activations */
  enum forward_kind forward;
  struct model_parity parity;

  struct param *param;
  struct param_share *share; /* [n_params] */
  int n_params;
  int64_t elements, share_elements;
  void *params;
  float *master, *adam_m, *adam_v;
  void *gradients;
  bool fresh; /* the next backward is the first of an update: it writes the linears' gradients, others add */
  bool *old; /* [units]: operands of weights are of parameters that have changed since */

  struct matrix embedding, d_embedding; /* [vocab, hidden] */
  struct block *block;
  struct head head;
  float *cos_sin;

  /* Live across a block or two, one of each. */
  struct matrix delta;      /* what a sublayer adds to the residual stream */
  struct matrix d_residual; /* gradient of the residual stream */
  struct matrix d_normed, d_qkv, d_attended, d_act;

  struct attention_gradient attention_gradient; /* of d_attended, for attention's backward */

  struct seen *seen;                        /* device; the three below lie in it */
  float *max_logit;
  struct quantise_counts *counts[TENSOR_COUNT]; /* [2 views] */
  struct quantise_counts *attention_counts; /* [ATTENTION_TENSORS] */
  struct seen_host *seen_host;              /* the backend's host memory */
  struct model_signals *signals;            /* host; made of it */
  void (*on_phase)(void *context, enum model_phase phase);
  void *on_phase_context;
  model_unit_listener *on_weights, *on_gradient;
  void *on_weights_context, *on_gradient_context;
  model_listener *on_tensor;
  void *on_tensor_context;
  model_logits_listener *on_logits;
  void *on_logits_context;
};

/* One run over the blocks. */
struct pass {
  const struct micro_batch *b;
  bool training; /* a backward follows */
  bool again;    /* recomputation: counted and watched the first time */
};

/* ---- params.c ------------------------------------------------------------ */
enum block_param { P_ATTENTION_NORM, P_WQ, P_WK, P_WV, P_WO, P_FFN_NORM, P_W1, P_W3, P_W2 };
int64_t param_offset(const struct model *m, int layer, enum block_param which);
int64_t param_offset_norm(const struct model *m);
int64_t param_offset_head(const struct model *m); /* tied: the embedding's */

/* ---- layout.c ------------------------------------------------------------ */
/* Gives every pointer of `m` its place in the arena. */
void layout_model(struct model *m, struct arena *arena);

/* ---- linear.c ------------------------------------------------------------ */
/* The operand of `view`: packed, or the plain matrix. */
struct operand views_operand(const struct views *v, enum view view);
/* An emission into `v` of the wanted views; plain is written if one of them
 * reads it. */
struct emission emission_of(struct model *m, struct views *v, enum tensor t, bool row, bool column);
/* X of a linear: the row view for fprop, the column view where a backward follows. */
struct emission emission_of_x(struct model *m, struct linear *l, bool row, const struct pass *p);
struct emission emission_of_dy(struct model *m, struct linear *l, int layer, const struct pass *p);
/* The operand of `view` as fprop reads it: in the forward tail the plain matrix. */
struct operand views_forward(const struct model *m, const struct views *v);
void linear_forward(struct model *m, struct linear *l, struct matrix *y);   /* y = X W^T */
/* dx = dY W; gradient = dY^T X, of the first, or += dY^T X. */
void linear_backward(struct model *m, struct linear *l, struct matrix *dx, bool first);
void linear_refresh(struct model *m, struct linear *l);

/* ---- block.c ------------------------------------------------------------- */
/* Residual + RMSNorm as parity.norm_cast says; kernels.h has the arguments. */
void block_normalise(struct model *m, const struct emission *out, struct matrix *residual_out, float *rstd,
                     const struct matrix *residual, const struct matrix *delta, const struct matrix *gain);
/* x = residual (+ delta) through the block; leaves its last addend in
 * m->delta and the stream before it in b->x_mid. */
void block_forward(struct model *m, struct block *b, const struct matrix *residual, const struct matrix *delta,
                   const struct pass *p);
/* From m->d_residual and the dY of `down` to m->d_residual before the block
 * and, where there is a block below, the dY of its `down`. */
void block_backward(struct model *m, struct block *b, struct block *below, const struct pass *p);

/* ---- head.c -------------------------------------------------------------- */
void head_normalise(struct model *m);
void head_loss(struct model *m, const int32_t *targets, float *nll);
/* The loss with gradients, down to m->d_residual and the dY of the last block's `down`. */
void head_loss_backward(struct model *m, const struct pass *p, float grad_scale, float *nll);
void head_logits(struct model *m, int64_t row, float *logits);

#endif
