/* A Llama-family decoder: parameters, forward, backward.
 *
 *   x = embedding(tokens)
 *   for each block:  x += out( attention( rope( qkv( rmsnorm(x) ))))
 *                    x += down( silu(gate) * up ),  gate, up = gate_up( rmsnorm(x) )
 *   nll = cross_entropy( head( rmsnorm(x) ), targets )
 *
 * Touvron et al., "LLaMA"; Grattafiori et al., "The Llama 3 Herd of Models".
 * Rotary pairs are interleaved, as in Meta's reference.
 */
#ifndef FP4D_MODEL_MODEL_H
#define FP4D_MODEL_MODEL_H

#include <stdint.h>

#include "base/arena.h"
#include "base/error.h"
#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "model/linears.h"

struct model_config {
  int64_t vocab_size, hidden_size, ffn_size, n_layers, n_heads, n_kv_heads, head_dim;
  bool tied; /* the head is the embedding table */
  double norm_eps;
  double rope_theta;
  struct rope_scaling rope_scaling;
};

/* Named models ("llama3-8b": 8,030,261,248 parameters, …). False: no such name. */
bool model_preset(const char *name, struct model_config *out);
const char *const *model_preset_names(void); /* NULL-terminated */

/* Impossible shapes, all of them, one line each in e->message. */
bool model_config_check(const struct model_config *c, struct error *e);

/* What a backward makes again instead of finding it kept.
 *   BOUNDARIES  of every block the X of its linears' wgrad, by the producers alone (RMSNorm, SwiGLU,
 *               quantisation): what contractions and attention wrote is kept
 *   EVERY_NTH   the whole forward of blocks n, 2n, …, which keep x_in alone
 *   ALL         of every block
 * The bits of everything are the same. */
enum recompute { RECOMPUTE_NONE, RECOMPUTE_BOUNDARIES, RECOMPUTE_EVERY_NTH, RECOMPUTE_ALL };

/* For block `layer` (0-based): NONE, BOUNDARIES or ALL. */
static inline enum recompute recompute_of_block(enum recompute r, int64_t every, int layer) {
  if (r != RECOMPUTE_EVERY_NTH) return r;
  return (layer + 1) % every == 0 ? RECOMPUTE_ALL : RECOMPUTE_NONE;
}

struct model_shape {
  int64_t batch;   /* samples of a micro-batch on this rank */
  int64_t seq_len;
  enum recompute recompute;
  int recompute_every;  /* RECOMPUTE_EVERY_NTH: n */
  int64_t head_chunk;   /* tokens whose logits exist at once; 0 = chosen */
  enum dtype param_dtype;
  bool master;          /* FP32 master weights (param_dtype BF16 only) */
  enum dtype gradient_dtype; /* what gradients are accumulated in; 0 = DTYPE_F32. BF16 (activations BF16 only):
                              * every addition to the buffer is made in FP32 and rounded once */
  bool training;        /* false: no gradients, moments or saved activations */
  int rank, world;      /* whose rows of moments and master are held (comm/share.h); world 0 is 1: all */
};

/* ---- parameters --------------------------------------------------------- */
struct param {
  char name[96]; /* "layers.0.attention.wq.weight": Meta's names */
  int64_t rows, cols; /* a gain is [hidden, 1] */
  int64_t offset;     /* of its first element in the flat buffers */
  int layer;          /* -1 outside the blocks */
  bool decay;         /* weight decay applies: matrices yes, gains no */
  float init_std;     /* truncated at 3 std; 0 = all ones */
};

/* How many a configuration has, and all of them, in the order of the flat buffers. */
int params_number(const struct model_config *c);
void params_list(const struct model_config *c, struct param *out);

/* The rows of a parameter whose moments and master a rank holds. */
struct param_share {
  int64_t first_row, rows;
  int64_t offset; /* of their first element in moments and master */
};

int64_t model_config_param_count(const struct model_config *c);
/* Contraction parameters per token used in FLOPs: all but the embedding table
 * (the head's counts once, tied or not). */
int64_t model_config_matmul_params(const struct model_config *c);
/* FLOPs a token of forward + backward: 6 * matmul params + attention, counted
 * for the full square (12 L H d S: the reports' convention) or its causal half. */
double model_config_flops(const struct model_config *c, int64_t seq_len, bool causal_half);

struct model; /* opaque */

/* Lays the model out in `arena` on `d`; with a measuring arena nothing is
 * touched and the model serves only `model_destroy` (so `plan` needs no
 * memory).  d may be any backend. Checks config, shape and route. */
struct model *model_create(struct device *d, struct arena *arena, const struct model_config *c,
                           const struct route *r, const struct model_shape *s, struct error *e);
void model_destroy(struct model *m);

int model_param_number(const struct model *m);
const struct param *model_param(const struct model *m, int i);
int64_t model_param_elements(const struct model *m); /* of the flat buffers; parameters are packed without gaps */

/* Parameters that are exchanged, and whose gradients are complete, together: the
 * embedding; each block; the final norm with the head.  Unit u is parameters
 * [first, first + n); units are in the order of the flat buffers, and of a forward. */
struct model_unit {
  int first, n;
};
int model_unit_number(const struct model *m);
struct model_unit model_unit(const struct model *m, int u);

/* Flat device buffers, element i of one is element i of the other; NULL where the
 * shape has none. */
void *model_params(const struct model *m);      /* param_dtype */
void *model_gradients(const struct model *m);   /* model_gradient_dtype */
/* Of the rows that shape.rank of shape.world owns, one parameter's after the other's
 * without gaps; in a world of one as the flat buffers. */
float *model_master(const struct model *m);
float *model_adam_m(const struct model *m);
float *model_adam_v(const struct model *m);
const struct param_share *model_param_share(const struct model *m, int i);
int64_t model_share_elements(const struct model *m); /* of these buffers */
enum dtype model_gradient_dtype(const struct model *m);
/* On the device, before the first micro-batch of an update: what that one does not write, but adds to, becomes zero. */
void model_clear_gradients(struct model *m);

/* Initial values from the seed alone (Philox by parameter and element, normal
 * by inverse distribution function, truncated); moments zeroed, master = the
 * unrounded value of the rows that are held.  `threads` host threads make them: the same bits for any number. */
bool model_initialise(struct model *m, uint64_t seed, int threads, struct error *e);

/* What fprop contracts: the route's operands, or plain ones in the activations'
 * type, which only a route with a forward tail has room for.  The backward is
 * the route's either way.  Holds until it is set again; FORWARD_ROUTE at first. */
enum forward_kind { FORWARD_ROUTE, FORWARD_PLAIN };
void model_set_forward(struct model *m, enum forward_kind kind);
enum forward_kind model_forward_kind(const struct model *m);

/* Where an RMSNorm's x / rms is rounded to the activations' type: with its gain alone, as
 * training does, or before the gain as well, as transformers does (in FP32 the same bits). */
enum norm_cast { NORM_CAST_AFTER, NORM_CAST_BEFORE };

/* What other programs compute otherwise than training here; zeros: nothing. */
struct model_parity {
  enum norm_cast norm_cast;
  enum rope_angles rope_angles; /* kernels/rope.h */
  int64_t vocabulary; /* model_forward: ids below it alone share the probability; 0: all rows do */
};

/* Of a model without backward; holds until it is set again.  False: ERROR_DEVICE, the
 * backend does not have it; nothing has changed then. */
bool model_set_parity(struct model *m, const struct model_parity *p, struct error *e);

/* Operands of weights, in the formats of contractions.  Once parameters change those of all
 * units are old; each is made anew before a forward reads it: unit by unit, as their
 * parameters arrive, or all at once.  Refreshing a unit that is not old does nothing. */
void model_expire_weights(struct model *m);
void model_refresh_unit(struct model *m, int unit);
void model_refresh_weights(struct model *m); /* after any change: all of them */

/* ---- computing ---------------------------------------------------------- */
struct micro_batch {
  const int32_t *inputs, *targets; /* device, [batch * seq_len]; target < 0: not counted */
  const int32_t *starts;           /* device, likewise: where each token's document begins in its sample, for attention
                                    * within documents (kernels/kernels.h); NULL: attention to the whole sample */
  uint64_t first_sample;           /* index in the run */
  uint32_t update;
  uint64_t seed;                   /* of stochastic rounding */
};

/* nll [tokens] (device). */
void model_forward(struct model *m, const struct micro_batch *b, float *nll);
/* The same and gradients of grad_scale * sum(nll), added to model_gradients. */
void model_forward_backward(struct model *m, const struct micro_batch *b, float grad_scale, float *nll);
/* Logits [vocab] (FP32, device) at token row `row` of the batch. */
void model_logits(struct model *m, const struct micro_batch *b, int64_t row, float *logits);

/* Tells when a phase of the computation begins (for timing and for reports of
 * where a rank stands). NULL: nobody listens. */
enum model_phase { MODEL_FORWARD, MODEL_HEAD, MODEL_BACKWARD };
void model_on_phase(struct model *m, void (*begin)(void *context, enum model_phase phase), void *context);

/* Tells of units (above), so that what ranks exchange goes on beside the computation; in
 * the order in which operations are given to the device.  NULL: nobody listens. */
typedef void model_unit_listener(void *context, int unit);
/* In a forward before a unit's weights are first read, from the first unit to the last. */
void model_on_weights(struct model *m, model_unit_listener *listener, void *context);
/* In a backward once a unit's gradients are complete, from the last unit to the first.  A
 * tied table is the embedding's: complete at the very end. */
void model_on_gradient(struct model *m, model_unit_listener *listener, void *context);

/* Hands over a linear's X and W before its fprop and its dY before its dgrad, as
 * plain device matrices that stand as long as the call: those that a contraction
 * reads as they are, so under a route of plain formats all of them.  X and W of
 * a block whose whole forward is recomputed come twice. NULL: nobody listens. */
typedef void model_listener(void *context, int layer, enum linear_site site, enum tensor tensor,
                            const struct matrix *values);
void model_on_tensor(struct model *m, model_listener *listener, void *context);

/* Hands over logits [rows, vocab] (FP32, device) of tokens [first, first + rows), a
 * chunk after the other, as model_forward computes them; they stand as long as the
 * call. NULL: nobody listens. */
typedef void model_logits_listener(void *context, int64_t first, const struct matrix *logits);
void model_on_logits(struct model *m, model_logits_listener *listener, void *context);

/* ---- what was seen ------------------------------------------------------ */
struct model_signals {
  float max_logit;                                        /* attention, scaled */
  struct quantise_counts counts[OPERAND_ROLE_COUNT];      /* by role, all layers */
  struct quantise_counts attention[ATTENTION_TENSORS];    /* where its formats have codes, all layers */
};
/* Since the last reset; of weights: of their operands as they are, whenever they were made,
 * which no reset forgets.  Fetching begins the copy to the host; what it brought is there,
 * and stands until the next one, when the device has been synchronized.  Neither fetching
 * nor resetting waits for the device. */
void model_reset_signals(struct model *m);
void model_fetch_signals(struct model *m);
const struct model_signals *model_signals(const struct model *m);

/* One line a layer range: "blocks 1-4 qkv  fprop x mxfp4/1x32/encode …": the
 * formats that are actually executed, and by which backend. Calls line(ctx, text). */
void model_describe(const struct model *m, void (*line)(void *context, const char *text), void *context);

#endif
