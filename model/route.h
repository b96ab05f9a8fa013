/* Routes: which format each contraction's operands take, layer by layer.
 *
 * A route is data.  The eleven routes of "Format-Aware Fusion for Fast FP4
 * Pretraining" and some of ours are rows of one table (model/route_table.c);
 * a user writes others in YAML with the same words.
 * Whether a backend can execute a route is asked of the backend
 * (route_check), never decided here.
 */
#ifndef FP4D_MODEL_ROUTE_H
#define FP4D_MODEL_ROUTE_H

#include "base/error.h"
#include "kernels/kernels.h"

/* The six operands of a linear's three contractions.
 *   fprop  Y  = X W^T    row view of X,   row view of W
 *   dgrad  dX = dY W     row view of dY,  column view of W
 *   wgrad  dW = dY^T X   column view of both (token axis) */
enum operand_role { FPROP_X, FPROP_W, DGRAD_DY, DGRAD_W, WGRAD_DY, WGRAD_X, OPERAND_ROLE_COUNT };

struct linear_route {
  struct encoding operand[OPERAND_ROLE_COUNT];
};

/* The four linears of a block, one matrix each: Q, K and V of attention, its
 * output projection; W1 and W3 of the FFN, W2. */
enum linear_site { LINEAR_QKV, LINEAR_OUT, LINEAR_GATE_UP, LINEAR_DOWN, LINEAR_SITES };

/* `sites` (bit s: enum linear_site s) of blocks first..last (1-based, inclusive) use this. */
struct route_span {
  int first, last;
  unsigned sites;
  struct linear_route linear;
};

enum { ROUTE_SPANS = 16 };

struct route {
  char name[64];
  enum dtype activations; /* BF16; FP32 in the test route */
  struct route_span span[ROUTE_SPANS];
  int n_spans;
  struct linear_route head; /* the output matrix's contractions: logits = X W^T */
  enum format attention_qk, attention_pv, attention_d_out;
  double attention_p_slope, attention_p_offset, attention_d_out_lift; /* as of struct attention_formats; 0 by default */
  double forward_tail; /* share of the updates, the last ones, whose fprop contracts plain operands; 0 = none */
};

/* What a YAML route (or a table row) says, still as words. */
struct route_words {
  const char *layers; /* "all", "5", "1-27", "28-32", "last-4", "all-but-last-4" */
  const char *fprop_x, *fprop_w, *dgrad_dy, *dgrad_w, *wgrad_x, *wgrad_dy; /* "mxfp4", "mxfp4/2d32", "mxfp4/sr", "same" */
  const char *hadamard; /* "none", "plain-16", "signed-16", "signed-32": both wgrad operands */
  const char *sites;    /* "attention" (qkv, out), "ffn" (gate_up, down), one by its name; "all" or NULL */
};

/* Parses "FORMAT[/BLOCK][/SCALE-RULE][/stripN][/sr][/TRANSFORM]", the words in
 * this order; what is left out takes the format's default for that role
 * (docs/numerics.md). "same" is for dgrad_w: the encoding of fprop_w.  Reads
 * whatever encoding_text writes of an encoding that the role may have. */
bool encoding_parse(const char *words, enum operand_role role, struct encoding *out, struct error *e);
bool format_parse(const char *word, enum format *out, struct error *e);
const char *format_name(enum format f);
const char *hadamard_name(enum hadamard h); /* "none", "plain-16", … */

/* The same plain format for all six operands. */
struct linear_route linear_route_plain(enum format f);

/* The words of one linear route (w->layers and w->sites are not looked at). */
bool linear_route_parse(const struct route_words *w, struct linear_route *out, struct error *e);

/* One word for all operands of a linear: "fp8" encodes each by its role's default. */
struct route_words route_words_of(const char *word);

/* "all", "attention", …: the word for a span's sites; "qkv, down" for any others. */
enum { LINEAR_SITES_TEXT = 32 };
const char *linear_sites_text(unsigned sites, char text[LINEAR_SITES_TEXT]);

/* Adds a span; layers resolved against n_layers. Overlap is an error. */
bool route_add_span(struct route *r, const struct route_words *w, int n_layers, struct error *e);

/* A table row by name, for a model of n_layers blocks. Unknown: ERROR_CONFIG
 * listing the names. */
bool route_named(const char *name, int n_layers, struct route *out, struct error *e);
/* Names of the table's rows, NULL-terminated. */
const char *const *route_names(void);

/* Every linear of every layer has exactly one span, and the backend executes all of it for
 * these extents (block and tile divisibility included). Each problem is one
 * line of e->message, layer and operand named.  ERROR_DEVICE when all there is
 * against it is what the backend cannot execute, else ERROR_CONFIG. */
bool route_check(const struct route *r, int n_layers, const struct extent *x, const struct device *d,
                 struct error *e);

/* The route of a linear of block `layer` (0-based); NULL: none. */
const struct linear_route *route_linear(const struct route *r, int layer, enum linear_site site);

/* Linears (bits, as of a span) of block `layer` that no span is for. */
unsigned route_sites_without(const struct route *r, int layer);

/* Is update `update` (1-based) of `updates` in the route's forward tail? */
bool route_in_forward_tail(const struct route *r, int64_t update, int64_t updates);

/* The formats of attention. */
static inline struct attention_formats route_attention(const struct route *r) {
  return (struct attention_formats){.qk = r->attention_qk,
                                    .pv = r->attention_pv,
                                    .d_out = r->attention_d_out,
                                    .p_slope = (float)r->attention_p_slope,
                                    .p_offset = (float)r->attention_p_offset,
                                    .d_out_lift = (float)r->attention_d_out_lift};
}

/* The format of the activations. */
static inline enum format route_plain_format(const struct route *r) {
  return r->activations == DTYPE_F32 ? FORMAT_F32 : FORMAT_BF16;
}

#endif
