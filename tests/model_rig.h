/* A model on the CPU with a batch of random tokens, for tests of the model. */
#ifndef FP4D_TESTS_MODEL_RIG_H
#define FP4D_TESTS_MODEL_RIG_H

#include <math.h>
#include <stdlib.h>

#include "base/philox.h"
#include "model/model.h"

struct rig {
  struct device *d;
  struct model *m;
  void *memory;
  int32_t *inputs, *targets;
  float *nll;
  int64_t tokens, elements;
  struct micro_batch b;
};

/* Two query heads a key head, odd vocabulary, three blocks. */
static inline struct model_config rig_config(void) {
  return (struct model_config){.vocab_size = 67, .hidden_size = 64, .ffn_size = 96, .n_layers = 3, .n_heads = 4,
                               .n_kv_heads = 2, .head_dim = 16, .norm_eps = 1e-5, .rope_theta = 1e4};
}

/* The same, as deep and as wide in the FFN as a route of the table needs. */
static inline struct model_config rig_config_of(const char *route) {
  struct model_config c = rig_config();
  struct route r;
  struct error e;
  if (!route_named(route, (int)c.n_layers, &r, &e)) c.n_layers = 6;
  if (!route_named(route, (int)c.n_layers, &r, &e)) return c;
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
    if (r.span[0].linear.operand[role].format == FORMAT_NVFP4_LOCAL) c.ffn_size = 256; /* whole strips an arm */
  return c;
}

static inline struct model_shape rig_shape(int64_t batch, enum dtype param_dtype) {
  return (struct model_shape){.batch = batch, .seq_len = 32, .recompute_every = 2, .head_chunk = 20,
                              .param_dtype = param_dtype, .training = true};
}

static inline enum dtype rig_dtype(const char *route) { return strcmp(route, "fp32") == 0 ? DTYPE_F32 : DTYPE_BF16; }

/* Routes of the table that the CPU executes, NULL-terminated. */
static inline const char *const *rig_routes(void) {
  static const char *runs[64];
  int n = 0;
  struct error e;
  struct device *d = device_open("cpu", 1, &e);
  for (const char *const *name = route_names(); d && *name && n < 63; name++) {
    struct model_config c = rig_config_of(*name);
    struct extent x = {.tokens = 64, .head_chunk = 20, .attention = {2, 32, c.n_heads, c.n_kv_heads, c.head_dim},
                       .hidden_size = c.hidden_size, .ffn_size = c.ffn_size, .vocab_size = c.vocab_size};
    struct route r;
    bool named = route_named(*name, (int)c.n_layers, &r, &e);
    if (!named || (!route_check(&r, (int)c.n_layers, &x, d, &e) && e.code != ERROR_DEVICE))
      printf("not ok %s: %s\n", *name, e.message), exit(1);
    if (route_check(&r, (int)c.n_layers, &x, d, &e)) runs[n++] = *name;
  }
  runs[n] = NULL;
  if (d) d->k->close(d);
  return runs;
}

/* Does every scale of the operand belong to one token (a row view) or one sample
 * (a column view)?  Else what other tokens hold moves it. */
static inline bool rig_scale_is_local(const struct encoding *e) {
  return encoding_is_plain(e) || e->format == FORMAT_MXFP4;
}

/* The route's words for X and dY in its first blocks, all of them so. */
static inline bool rig_layout_is_free(const char *route) {
  static const enum operand_role roles[] = {FPROP_X, WGRAD_X, DGRAD_DY, WGRAD_DY};
  struct route r;
  struct error e;
  if (!route_named(route, 32, &r, &e)) return false;
  for (int s = 0; s < r.n_spans; s++)
    for (int i = 0; i < 4; i++)
      if (!rig_scale_is_local(&r.span[s].linear.operand[roles[i]])) return false;
  return true;
}

/* Sample i of the run has the same tokens in every rig. */
static inline void rig_batch(struct rig *g, uint64_t first_sample, int64_t seq_len, int64_t vocab) {
  for (int64_t t = 0; t < g->tokens; t++) {
    uint64_t sample = first_sample + (uint64_t)(t / seq_len);
    struct philox_block r = philox4x32_10(sample, (struct philox_block){{(uint32_t)(t % seq_len), 7, 7, 7}});
    g->inputs[t] = (int32_t)(r.word[0] % (uint32_t)vocab);
    g->targets[t] = (int32_t)(r.word[1] % (uint32_t)vocab);
  }
  g->b = (struct micro_batch){.inputs = g->inputs, .targets = g->targets, .first_sample = first_sample, .update = 3,
                              .seed = 11};
}

static inline bool rig_open_route(struct rig *g, const struct model_config *c, const struct route *r,
                                  const struct model_shape *s, int threads) {
  struct error e;
  memset(g, 0, sizeof *g);
  g->d = device_open("cpu", threads, &e);
  if (!g->d) return false;
  struct arena a = arena_measure();
  g->m = model_create(g->d, &a, c, r, s, &e);
  if (!g->m) {
    printf("# %s\n", e.message);
    return false;
  }
  model_destroy(g->m);
  g->memory = g->d->k->allocate(g->d, a.used, &e);
  memset(g->memory, 0x7F, a.used); /* nothing may count on zeros */
  a = arena_over(g->memory, a.used);
  g->m = model_create(g->d, &a, c, r, s, &e);
  g->tokens = s->batch * s->seq_len;
  g->elements = model_param_elements(g->m);
  g->inputs = malloc((size_t)g->tokens * sizeof *g->inputs);
  g->targets = malloc((size_t)g->tokens * sizeof *g->targets);
  g->nll = malloc((size_t)g->tokens * sizeof *g->nll);
  rig_batch(g, 5, s->seq_len, c->vocab_size);
  bool good = model_initialise(g->m, 42, threads, &e);
  model_refresh_weights(g->m);
  return good;
}

static inline bool rig_open(struct rig *g, const struct model_config *c, const char *route,
                            const struct model_shape *s, int threads) {
  struct error e;
  struct route r;
  return route_named(route, (int)c->n_layers, &r, &e) && rig_open_route(g, c, &r, s, threads);
}

static inline void rig_close(struct rig *g) {
  model_destroy(g->m);
  free(g->inputs);
  free(g->targets);
  free(g->nll);
  if (g->d) {
    g->d->k->release(g->d, g->memory);
    g->d->k->close(g->d);
  }
}

static inline void rig_clear(struct rig *g) {
  model_clear_gradients(g->m);
}

static inline const struct model_signals *rig_signals(struct model *m) {
  model_fetch_signals(m); /* the CPU's copies are done when they return */
  return model_signals(m);
}

static inline double rig_loss(struct rig *g) {
  model_forward(g->m, &g->b, g->nll);
  double sum = 0;
  for (int64_t t = 0; t < g->tokens; t++) sum += (double)g->nll[t];
  return sum;
}

/* AdamW on the one batch until its mean loss is below `enough`, for at most `most` updates; the last loss. */
static inline double rig_learn(struct rig *g, enum dtype param_dtype, int most, double enough, int *updates) {
  double last = rig_loss(g) / (double)g->tokens;
  int step = 0;
  while (step < most && last > enough) {
    rig_clear(g);
    g->b.update = (uint32_t)step++;
    model_forward_backward(g->m, &g->b, 1.0f / 64, g->nll);
    const struct adamw a = {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .grad_scale = 1,
                            .bias1 = 1 - powf(0.9f, (float)step), .bias2 = 1 - powf(0.95f, (float)step)};
    const struct draw draw = {0};
    const struct adamw_tensor all = {.param = model_params(g->m), .master = model_master(g->m), .m = model_adam_m(g->m), .v = model_adam_v(g->m),
                                     .grad = model_gradients(g->m), .n = g->elements};
    g->d->k->adamw_update(g->d, &all, 1, param_dtype, model_gradient_dtype(g->m), &a, &draw);
    model_refresh_weights(g->m);
    last = rig_loss(g) / (double)g->tokens;
  }
  *updates = step;
  return last;
}

static inline double dot(const float *a, const float *b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
  return sum;
}

/* |a - b| / |b| */
static inline double distance(const float *a, const float *b, int64_t n) {
  double difference = 0;
  for (int64_t i = 0; i < n; i++) difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
  return sqrt(difference / dot(b, b, n));
}

#endif
