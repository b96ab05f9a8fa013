/* A route from the words of a configuration. */
#include <math.h>
#include <string.h>

#include "kernels/attention.h"
#include "trainer/config_load.h"

static bool linear_same(const struct linear_route *a, const struct linear_route *b) {
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
    if (!encoding_equal(&a->operand[role], &b->operand[role])) return false;
  return true;
}

static bool route_same(const struct route *a, const struct route *b, int n_layers) {
  if (a->activations != b->activations || a->attention_qk != b->attention_qk || a->attention_pv != b->attention_pv ||
      a->attention_d_out != b->attention_d_out || a->attention_p_slope != b->attention_p_slope ||
      a->attention_p_offset != b->attention_p_offset || a->attention_d_out_lift != b->attention_d_out_lift || a->forward_tail != b->forward_tail || !linear_same(&a->head, &b->head))
    return false;
  for (int i = 0; i < n_layers * LINEAR_SITES; i++) {
    const int layer = i / LINEAR_SITES;
    const enum linear_site site = (enum linear_site)(i % LINEAR_SITES);
    if (!linear_same(route_linear(a, layer, site), route_linear(b, layer, site))) return false;
  }
  return true;
}

/* Every linear once: route_add_span refuses overlaps, here are the gaps. */
static bool covers_all(struct config_loader *l, const struct route *r, int n_layers) {
  bool all = true;
  for (int first = 0, next; first < n_layers; first = next) {
    const unsigned sites = route_sites_without(r, first);
    char text[LINEAR_SITES_TEXT];
    for (next = first + 1; next < n_layers && route_sites_without(r, next) == sites;) next++;
    if (sites == 0) continue;
    config_problem(l, "route.linears", "no entry covers blocks %d-%d of %d (%s linears)", first + 1, next, n_layers,
                   linear_sites_text(sites, text));
    all = false;
  }
  return all;
}

static bool parse_format(struct config_loader *l, const char *key, const char *word, enum format *out) {
  struct error e = {0};
  if (!CONFIG_SOUND(l, key)) return false;
  if (format_parse(word, out, &e)) return true;
  config_problem(l, key, "%s", e.message);
  return false;
}

static struct route_words words_of(const struct span_draft *s) {
  return (struct route_words){.layers = s->layers, .fprop_x = s->fprop_x, .fprop_w = s->fprop_w, .dgrad_dy = s->dgrad_dy,
                              .dgrad_w = s->dgrad_w, .wgrad_x = s->wgrad_x, .wgrad_dy = s->wgrad_dy,
                              .hadamard = s->hadamard, .sites = s->sites[0] ? s->sites : NULL};
}

/* Numbers of formats that are not there, and lifts that would round. */
static bool resolve_attention(struct config_loader *l, const struct route *r) {
  const double lift = r->attention_d_out_lift;
  int exponent;
  const bool slope = r->attention_p_slope > 0 && r->attention_pv != FORMAT_MXFP4;
  const bool offset = r->attention_p_offset != 0 && !(r->attention_p_slope > 0);
  const bool no_codes = lift > 0 && attention_format_plain(r->attention_d_out);
  const bool rounds = lift > 0 && (frexp(lift, &exponent) != 0.5 || lift < 0x1p-100);
  if (slope) config_problem(l, "route.attention.p_slope", "has no meaning with route.attention.pv %s", format_name(r->attention_pv));
  if (offset) config_problem(l, "route.attention.p_offset", "has no meaning without route.attention.p_slope");
  if (no_codes) config_problem(l, "route.attention.do_lift", "has no meaning with route.attention.do %s", format_name(r->attention_d_out));
  if (rounds) config_problem(l, "route.attention.do_lift", "%g is no power of two from 2^-100 to 2^100", lift);
  if (slope || offset || no_codes || rounds) return false;

  /* of the largest P, which a row of one key has alone */
  const struct attention_formats f = route_attention(r);
  const float largest = attention_p_affine(0, 0, f.p_slope, f.p_offset);
  const bool vanishes = r->attention_p_slope > 0 && !(f.p_slope > 0), empty = f.p_slope > 0 && e2m1_encode(largest) == 0u;
  if (vanishes) config_problem(l, "route.attention.p_slope", "%g is 0 in FP32; 0 means 2^x", r->attention_p_slope);
  if (empty)
    config_problem(l, "route.attention.p_slope", "with p_offset %g the largest P has the code 0, and attention would be 0/0: p_slope log2(6) + p_offset must be above 0.25",
                   r->attention_p_offset);
  return !vanishes && !empty;
}

static bool resolve_head(struct config_loader *l, struct linear_route *out) {
  static const char *const parts[] = {"route.head.fprop.x", "route.head.fprop.w", "route.head.dgrad.dy",
                                      "route.head.wgrad.x", "route.head.wgrad.dy"};
  const struct route_draft *draft = &l->route;
  const bool mapping = draft->head[0] == 0;
  if (!CONFIG_SOUND(l, "route.head", "route.head.dgrad.w", "route.head.wgrad.hadamard")) return false;
  bool whole = true;
  for (int i = 0; mapping && i < 5; i++) {
    const enum option_state state = config_record(l, parts[i])->state;
    if (state == OPTION_DEFAULT) findings_add(&l->problems, config_record(l, "route.head")->at, parts[i], "is missing");
    whole &= state == OPTION_GIVEN;
  }
  if (!whole) return false;
  const struct route_words w = mapping ? words_of(&draft->head_parts) : route_words_of(draft->head);
  struct error e = {0};
  if (linear_route_parse(&w, out, &e)) return true;
  config_problem(l, "route.head", "%s", e.message);
  return false;
}

static void resolve_mapping(struct config_loader *l, int n_layers) {
  const struct route_draft *draft = &l->route;
  struct route *r = &l->config->route;
  if (!config_record(l, "route.name")->state) config_problem(l, "route.name", "is missing: say what to call this route");
  if (!config_record(l, "route.linears")->state || (CONFIG_SOUND(l, "route.linears") && draft->n_spans == 0))
    config_problem(l, "route.linears", "is missing: at least one entry is needed");
  bool good = CONFIG_SOUND(l, "route.name", "route.linears", "route.activations") && draft->n_spans > 0;
  snprintf(r->name, sizeof r->name, "%s", draft->name);
  r->activations = draft->activations;
  good &= parse_format(l, "route.attention.qk", draft->attention_qk, &r->attention_qk);
  good &= parse_format(l, "route.attention.pv", draft->attention_pv, &r->attention_pv);
  good &= parse_format(l, "route.attention.do", draft->attention_d_out, &r->attention_d_out);
  good &= CONFIG_SOUND(l, "route.attention.p_slope", "route.attention.p_offset", "route.attention.do_lift");
  r->attention_p_slope = draft->p_slope;
  r->attention_p_offset = draft->p_offset;
  r->attention_d_out_lift = draft->d_out_lift;
  if (good) good = resolve_attention(l, r);
  good &= resolve_head(l, &r->head);
  good &= CONFIG_SOUND(l, "route.forward_bf16_tail");
  r->forward_tail = draft->forward_tail;
  for (int i = 0; i < draft->n_spans && CONFIG_SOUND(l, "route.linears"); i++) {
    const struct span_draft *s = &draft->span[i];
    const struct route_words w = words_of(s);
    struct error e = {0};
    if (route_add_span(r, &w, n_layers, &e)) continue;
    char label[32];
    snprintf(label, sizeof label, "route.linears[%d]", i + 1);
    findings_add(&l->problems, s->at, label, "%s", e.message);
    good = false;
  }
  if (!good || !covers_all(l, r, n_layers)) return;
  for (const char *const *name = route_names(); *name; name++) {
    struct route builtin;
    struct error e;
    if (strcmp(*name, r->name) != 0) continue;
    if (!route_named(*name, n_layers, &builtin, &e) || !route_same(r, &builtin, n_layers))
      config_problem(l, "route.name", "'%s' is the name of a built-in route, and this mapping is not that route; choose another",
                     r->name);
  }
}

void config_resolve_route(struct config_loader *l, int n_layers) {
  struct config *c = l->config;
  if (!CONFIG_SOUND(l, "route")) return;
  memset(&c->route, 0, sizeof c->route);
  if (l->route.mapping) {
    resolve_mapping(l, n_layers);
  } else {
    struct error e = {0};
    if (!route_named(l->route.name, n_layers, &c->route, &e)) config_problem(l, "route", "%s", e.message);
  }
  snprintf(c->route_name, sizeof c->route_name, "%s", c->route.name);
}
