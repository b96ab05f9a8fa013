/* The recipe ledger of "Format-Aware Fusion for Fast FP4 Pretraining", as rows
 * of the same words that a YAML route uses; `fp32` for tests, an FP8 baseline,
 * and our variants.  configs/routes/NAME.yaml says the same of each.
 *
 * Weights, X, scales and the column view of dY are rounded to nearest in every
 * row but those of Transformer Engine's recipe, which draws for both views of
 * dY.  Attention and head are BF16 throughout. */
#include <stdio.h>
#include <string.h>

#include "model/route.h"

/* Spans of one encoding family. H: the transform of both wgrad operands. */
#define PLAIN(LAYERS, F) \
  { LAYERS, F, F, F, "same", F, F, "none" }
#define TE(LAYERS) \
  { LAYERS, "nvfp4", "nvfp4/2d16", "nvfp4/sr", "same", "nvfp4", "nvfp4/sr", "signed-16" }
#define GLOBAL(LAYERS, H) \
  { LAYERS, "nvfp4", "nvfp4/2d16", "nvfp4/sr", "same", "nvfp4", "nvfp4", H }
#define LOCAL(LAYERS, H) \
  { LAYERS, "nvfp4-local", "nvfp4-local/2d16", "nvfp4-local/sr", "same", "nvfp4-local", "nvfp4-local", H }
#define POW2(LAYERS, H) \
  { LAYERS, "nvfp4-local/pow2", "nvfp4-local/2d16/pow2", "nvfp4-local/pow2/sr", "same", "nvfp4-local/pow2", \
    "nvfp4-local/pow2", H }
#define MX(LAYERS, H) \
  { LAYERS, "mxfp4", "mxfp4/2d32", "mxfp4/sr", "same", "mxfp4", "mxfp4", H }
#define HYBRID(LAYERS, H) \
  { LAYERS, "mxfp4", "mxfp4/2d32", "nvfp4-local/sr", "nvfp4-local/2d16", "mxfp4", "mxfp4", H }

#define FP8(LAYERS) \
  { LAYERS, "e4m3", "e4m3", "e5m2", "same", "e4m3", "e5m2", "none" }

struct row {
  const char *name;
  struct route_words span[2]; /* layers, fprop x, w, dgrad dy, w, wgrad x, dy, hadamard */
  double forward_tail;
};

static const struct row table[] = {
    {"fp32", {PLAIN("all", "fp32")}, 0},
    {"bf16", {PLAIN("all", "bf16")}, 0},
    {"te-native", {TE("all")}, 0},
    {"te-last4-bf16", {TE("all-but-last-4"), PLAIN("last-4", "bf16")}, 0},
    {"nvfp4-global", {GLOBAL("all", "none")}, 0},
    {"mxfp4-row-sr", {MX("all", "none")}, 0},
    {"nvfp4-local", {LOCAL("all", "none")}, 0},
    {"nvfp4-local-h16", {LOCAL("all", "signed-16")}, 0},
    {"depth-27-5", {LOCAL("all-but-last-5", "none"), MX("last-5", "none")}, 0},
    {"mxfp4-row-sr-h32", {MX("all", "signed-32")}, 0},
    {"operand-hybrid-h16", {HYBRID("all", "plain-16")}, 0},
    {"operand-hybrid-h32", {HYBRID("all", "signed-32")}, 0},
    {"fp8", {FP8("all")}, 0},
    {"nvfp4-te/forward-bf16-tail", {TE("all")}, 0.1},
    {"nvfp4-local-pow2", {POW2("all", "none")}, 0},
    {"nvfp4-local-pow2-h16", {POW2("all", "signed-16")}, 0},
};

enum { ROWS = sizeof table / sizeof table[0] };

const char *const *route_names(void) {
  static const char *const names[] = {
      "fp32",         "bf16",             "te-native",
      "te-last4-bf16", "nvfp4-global",    "mxfp4-row-sr",
      "nvfp4-local",  "nvfp4-local-h16",  "depth-27-5",
      "mxfp4-row-sr-h32", "operand-hybrid-h16", "operand-hybrid-h32",
      "fp8",          "nvfp4-te/forward-bf16-tail", "nvfp4-local-pow2",
      "nvfp4-local-pow2-h16", NULL};
  _Static_assert(sizeof names / sizeof names[0] == ROWS + 1, "one name a row");
  return names;
}

bool route_named(const char *name, int n_layers, struct route *out, struct error *e) {
  for (int i = 0; i < ROWS; i++) {
    if (strcmp(table[i].name, name) != 0) continue;
    bool wide = strcmp(name, "fp32") == 0;
    enum format plain = wide ? FORMAT_F32 : FORMAT_BF16;
    struct route r;
    memset(&r, 0, sizeof r);
    (void)snprintf(r.name, sizeof r.name, "%s", name);
    r.activations = wide ? DTYPE_F32 : DTYPE_BF16;
    r.attention_qk = r.attention_pv = r.attention_d_out = plain;
    r.head = linear_route_plain(plain);
    r.forward_tail = table[i].forward_tail;
    for (int s = 0; s < 2 && table[i].span[s].layers; s++)
      if (!route_add_span(&r, &table[i].span[s], n_layers, e)) return error_context(e, "route %s", name);
    *out = r;
    return true;
  }
  char known[512];
  size_t used = 0;
  for (int i = 0; i < ROWS && used < sizeof known; i++)
    used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", table[i].name);
  return error_set(e, ERROR_CONFIG, "no route is named \"%s\" (%s)", name, known);
}
