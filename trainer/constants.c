#include "trainer/constants.h"

#include <stdio.h>
#include <string.h>

#include "base/philox.h"
#include "kernels/attention.h"
#include "kernels/cpu/attention.h"
#include "kernels/formats.h"
#include "kernels/hadamard.h"
#include "kernels/nvfp4_local.h"
#include "trainer/record.h"

/* What some operand of the run asks for. */
struct uses {
  bool scale[SCALE_TENSOR_4OVER6 + 1];
  bool nvfp4, draws, signs, width[33];
  int32_t strip[(ROUTE_SPANS + 1) * OPERAND_ROLE_COUNT];
  int n_strips;
};

static void add_strip(struct uses *u, int32_t strip) {
  int at = u->n_strips;
  for (int i = 0; i < u->n_strips; i++)
    if (u->strip[i] == strip) return;
  for (; at > 0 && u->strip[at - 1] > strip; at--) u->strip[at] = u->strip[at - 1];
  u->strip[at] = strip;
  u->n_strips++;
}

static void add_linear(struct uses *u, const struct linear_route *linear) {
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    const struct encoding *e = &linear->operand[role];
    u->scale[e->scale] = true;
    u->nvfp4 |= e->format == FORMAT_NVFP4 && e->scale == SCALE_TENSOR;
    u->draws |= e->rounding == ROUND_STOCHASTIC;
    u->signs |= e->hadamard == HADAMARD_SIGNED_16 || e->hadamard == HADAMARD_SIGNED_32;
    u->width[hadamard_width(e->hadamard)] = true;
    if (e->strip > 0) add_strip(u, e->strip);
  }
}

static struct uses uses_of(const struct config *c) {
  struct uses u;
  memset(&u, 0, sizeof u);
  for (int i = 0; i < c->route.n_spans; i++) add_linear(&u, &c->route.span[i].linear);
  add_linear(&u, &c->route.head);
  u.draws |= c->train.param_dtype == DTYPE_BF16 && !c->train.master;
  return u;
}

static void record_integers(json_t *object, const char *key, const int32_t *values, int n) {
  json_t *list = json_array();
  for (int i = 0; i < n; i++) json_array_append_new(list, json_integer(values[i]));
  json_object_set_new(object, key, list);
}

/* From which fraction on a block of V in MXFP4 takes the next power of two. */
static double v_cutoff(void) {
  uint32_t n = 0;
  while (n < 128 && attention_v_scale(127u << 7 | n) == 127u) n++;
  return 1 + n / 128.0;
}

/* Of attention in few bits; the CPU's keys of a tile are the definition's. */
static void record_attention(json_t *o, const struct attention_formats *f) {
  const bool gradients = !attention_format_plain(f->d_out), p = !attention_format_plain(f->pv);
  if (attention_plain(f)) return;
  record_integer(o, "attention_tile", ATTENTION_KEYS);
  if (p) record_real(o, "attention_lazy", (double)ATTENTION_LAZY);
  if (gradients || f->qk == FORMAT_E4M3 || f->pv == FORMAT_E4M3) record_real(o, "attention_lift", (double)ATTENTION_LIFT);
  if (gradients) {
    record_real(o, "attention_p_lift_log2", (double)ATTENTION_LIFT_P_LOG2);
    record_real(o, "attention_do_lift", (double)f->d_out_lift); /* 0: each its own, which differs from any given one */
    if (!(f->d_out_lift > 0)) /* what a sample's kv head is lifted to: its largest magnitude is in [this, twice this) */
      record_real(o, "attention_do_target", (double)attention_d_out_lift(127u << 7));
  }
  if (f->pv == FORMAT_MXFP4) {
    record_integer(o, "attention_mx_block", ATTENTION_MX);
    record_real(o, "attention_v_cutoff", v_cutoff());
    const bool affine = f->p_slope > 0;
    record_text(o, "attention_p_map", affine ? "affine" : "exp2");
    record_real(o, "attention_p_raise", (double)(affine ? ATTENTION_RAISE_AFFINE : ATTENTION_RAISE_EXP2));
    if (affine) record_real(o, "attention_p_slope", (double)f->p_slope);
    if (affine) record_real(o, "attention_p_offset", (double)f->p_offset);
  }
}

json_t *constants_make(const struct config *c) {
  const struct uses u = uses_of(c);
  json_t *o = json_object();
  if (u.scale[SCALE_MX_ADAPTIVE]) record_real(o, "mx_adaptive_threshold", (double)MX_ADAPTIVE_THRESHOLD);
  /* the largest scale (448; 256 where a block may take 4/6 of it) times the largest code */
  if (u.nvfp4) record_integer(o, "nvfp4_target", 448 * 6);
  if (u.scale[SCALE_TENSOR_4OVER6]) record_integer(o, "nvfp4_4over6_target", 256 * 6);
  const bool faithful = u.scale[SCALE_LOCAL_FAITHFUL], pow2 = u.scale[SCALE_LOCAL_POW2];
  if (faithful) record_real(o, "local_faithful_target", (double)NVFP4_LOCAL_TARGET);
  if (pow2) record_real(o, "local_pow2_target", NVFP4_LOCAL_POW2_TARGET);
  if (faithful || pow2) record_integer(o, "local_chunk", NVFP4_LOCAL_CHUNK);
  if (u.n_strips > 0) record_integers(o, "local_strip", u.strip, u.n_strips);
  if (u.signs) {
    char signs[16];
    snprintf(signs, sizeof signs, "0x%04x", HADAMARD_SIGNS);
    record_text(o, "hadamard_signs", signs);
  }
  static const int32_t widths[] = {16, 32};
  int32_t used[2];
  int n = 0;
  for (int i = 0; i < 2; i++)
    if (u.width[widths[i]]) used[n++] = widths[i];
  if (n > 0) record_integers(o, "hadamard_width", used, n);
  if (u.draws) {
    record_integer(o, "draw_seed", c->run.seed);
    record_integer(o, "draw_rounds", PHILOX_ROUNDS);
    record_text(o, "draw_counter", "block, sample, update, sample>>32:8 layer:12 operand:12");
  }
  const struct attention_formats attention = route_attention(&c->route);
  record_attention(o, &attention);
  return o;
}

bool constants_check(const json_t *saved, const struct config *c, struct error *e) {
  json_t *own = constants_make(c);
  const char *key;
  json_t *value;
  char problems[2048] = "";
  json_object_foreach(own, key, value) {
    const json_t *was = json_object_get(saved, key);
    if (!was || json_equal(was, value)) continue;
    char *before = json_dumps(was, JSON_ENCODE_ANY | JSON_COMPACT), *now = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    const size_t used = strlen(problems);
    snprintf(problems + used, sizeof problems - used, "%s%s is %s, the checkpoint's is %s", used ? "; " : "", key,
             now ? now : "?", before ? before : "?");
    free(before);
    free(now);
  }
  json_decref(own);
  if (!problems[0]) return true;
  error_set(e, ERROR_CHECKPOINT, "a constant of the route changed: %s", problems);
  return error_hint(e, "go on with the checkpoint's, or begin another run");
}
