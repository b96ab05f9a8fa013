/* The recipe ledger of "Format-Aware Fusion for Fast FP4 Pretraining", as rows
 * of the same words that a YAML route uses; `fp32` for tests, an FP8 baseline,
 * and our variants.  configs/routes/NAME.yaml says the same of each.
 *
 * Weights, X, scales and the column view of dY are rounded to nearest in every
 * row but those of Transformer Engine's recipe, which draws for both views of
 * dY.  The head is BF16 throughout, attention in all rows but the last six: those
 * are the training route of "Hardware-Aware FP4 FlashAttention-4" and its diverging
 * control, alone and with projections in few bits.  Of the projections the report
 * has fprop and the NVFP4 arm's dgrad; wgrad and the E4M3 arm's dgrad are BF16. */
#include <stdio.h>
#include <string.h>

#include "model/route.h"

/* Spans of one encoding family. H: the transform of both wgrad operands. */
#define PLAIN(LAYERS, F) \
  { LAYERS, F, F, F, "same", F, F, "none", NULL }
#define TE(LAYERS) \
  { LAYERS, "nvfp4", "nvfp4/2d16", "nvfp4/sr", "same", "nvfp4", "nvfp4/sr", "signed-16", NULL }
#define GLOBAL(LAYERS, H) \
  { LAYERS, "nvfp4", "nvfp4/2d16", "nvfp4/sr", "same", "nvfp4", "nvfp4", H, NULL }
#define LOCAL(LAYERS, H) \
  { LAYERS, "nvfp4-local", "nvfp4-local/2d16", "nvfp4-local/sr", "same", "nvfp4-local", "nvfp4-local", H, NULL }
#define POW2(LAYERS, H) \
  { LAYERS, "nvfp4-local/pow2", "nvfp4-local/2d16/pow2", "nvfp4-local/pow2/sr", "same", "nvfp4-local/pow2", \
    "nvfp4-local/pow2", H, NULL }
#define MX(LAYERS, H) \
  { LAYERS, "mxfp4", "mxfp4/2d32", "mxfp4/sr", "same", "mxfp4", "mxfp4", H, NULL }
#define HYBRID(LAYERS, H) \
  { LAYERS, "mxfp4", "mxfp4/2d32", "nvfp4-local/sr", "nvfp4-local/2d16", "mxfp4", "mxfp4", H, NULL }

#define FP8(LAYERS) \
  { LAYERS, "e4m3", "e4m3", "e5m2", "same", "e4m3", "e5m2", "none", NULL }

/* BF16 in the FFN, projections in E4M3 or NVFP4. */
#define FFN_BF16 \
  { "all", "bf16", "bf16", "bf16", "same", "bf16", "bf16", "none", "ffn" }
#define PROJ_E4M3 \
  { "all", "e4m3", "e4m3", "bf16", "bf16", "bf16", "bf16", "none", "attention" }
#define PROJ_NVFP4 \
  { "all", "nvfp4", "nvfp4/2d16", "nvfp4", "same", "bf16", "bf16", "none", "attention" }

/* Attention's qk, pv, do. */
#define ATTENTION_FP8 \
  { FORMAT_NVFP4, FORMAT_E4M3, FORMAT_E5M2 }
#define ATTENTION_MXFP4 \
  { FORMAT_NVFP4, FORMAT_MXFP4, FORMAT_E5M2 }
#define AS_ACTIVATIONS \
  { 0 }

struct row {
  const char *name;
  struct route_words span[2]; /* layers, fprop x, w, dgrad dy, w, wgrad x, dy, hadamard, sites */
  double forward_tail;
  enum format attention[3]; /* qk, pv, do; all 0: as the activations */
};

static const struct row table[] = {
    {"fp32", {PLAIN("all", "fp32")}, 0, AS_ACTIVATIONS},
    {"bf16", {PLAIN("all", "bf16")}, 0, AS_ACTIVATIONS},
    {"te-native", {TE("all")}, 0, AS_ACTIVATIONS},
    {"te-last4-bf16", {TE("all-but-last-4"), PLAIN("last-4", "bf16")}, 0, AS_ACTIVATIONS},
    {"nvfp4-global", {GLOBAL("all", "none")}, 0, AS_ACTIVATIONS},
    {"mxfp4-row-sr", {MX("all", "none")}, 0, AS_ACTIVATIONS},
    {"nvfp4-local", {LOCAL("all", "none")}, 0, AS_ACTIVATIONS},
    {"nvfp4-local-h16", {LOCAL("all", "signed-16")}, 0, AS_ACTIVATIONS},
    {"depth-27-5", {LOCAL("all-but-last-5", "none"), MX("last-5", "none")}, 0, AS_ACTIVATIONS},
    {"mxfp4-row-sr-h32", {MX("all", "signed-32")}, 0, AS_ACTIVATIONS},
    {"operand-hybrid-h16", {HYBRID("all", "plain-16")}, 0, AS_ACTIVATIONS},
    {"operand-hybrid-h32", {HYBRID("all", "signed-32")}, 0, AS_ACTIVATIONS},
    {"fp8", {FP8("all")}, 0, AS_ACTIVATIONS},
    {"nvfp4-te/forward-bf16-tail", {TE("all")}, 0.1, AS_ACTIVATIONS},
    {"nvfp4-local-pow2", {POW2("all", "none")}, 0, AS_ACTIVATIONS},
    {"nvfp4-local-pow2-h16", {POW2("all", "signed-16")}, 0, AS_ACTIVATIONS},
    {"attention-fp8", {PLAIN("all", "bf16")}, 0, ATTENTION_FP8},
    {"attention-fp8-proj-e4m3", {PROJ_E4M3, FFN_BF16}, 0, ATTENTION_FP8},
    {"attention-fp8-proj-nvfp4", {PROJ_NVFP4, FFN_BF16}, 0, ATTENTION_FP8},
    {"attention-mxfp4", {PLAIN("all", "bf16")}, 0, ATTENTION_MXFP4},
    {"attention-mxfp4-proj-e4m3", {PROJ_E4M3, FFN_BF16}, 0, ATTENTION_MXFP4},
    {"attention-mxfp4-proj-nvfp4", {PROJ_NVFP4, FFN_BF16}, 0, ATTENTION_MXFP4},
};

enum { ROWS = sizeof table / sizeof table[0] };

const char *const *route_names(void) {
  static const char *const names[] = {
      "fp32",         "bf16",             "te-native",
      "te-last4-bf16", "nvfp4-global",    "mxfp4-row-sr",
      "nvfp4-local",  "nvfp4-local-h16",  "depth-27-5",
      "mxfp4-row-sr-h32", "operand-hybrid-h16", "operand-hybrid-h32",
      "fp8",          "nvfp4-te/forward-bf16-tail", "nvfp4-local-pow2",
      "nvfp4-local-pow2-h16", "attention-fp8", "attention-fp8-proj-e4m3",
      "attention-fp8-proj-nvfp4", "attention-mxfp4", "attention-mxfp4-proj-e4m3",
      "attention-mxfp4-proj-nvfp4", NULL};
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
    const enum format *attention = table[i].attention;
    r.attention_qk = attention[0] ? attention[0] : plain;
    r.attention_pv = attention[1] ? attention[1] : plain;
    r.attention_d_out = attention[2] ? attention[2] : plain;
    r.head = linear_route_plain(plain);
    r.forward_tail = table[i].forward_tail;
    for (int s = 0; s < 2 && table[i].span[s].layers; s++)
      if (!route_add_span(&r, &table[i].span[s], n_layers, e)) return error_context(e, "route %s", name);
    *out = r;
    return true;
  }
  char known[768];
  size_t used = 0;
  for (int i = 0; i < ROWS && used < sizeof known; i++)
    used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", table[i].name);
  return error_set(e, ERROR_CONFIG, "no route is named \"%s\" (%s)", name, known);
}
