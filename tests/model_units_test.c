/* Units of a model tell when their weights are needed and their gradients complete: neither earlier nor
 * later may anything touch them. */
#include "tests/test.h"

#include "tests/model_rig.h"

enum { UNITS = 8 };

struct watch {
  struct rig *g;
  void *params, *gradients; /* whole buffers: what parameters are; gradients as they were when told of */
  int needed[UNITS], complete[UNITS], n_needed, n_complete;
  int64_t touched; /* bytes of gradients that changed after they were complete */
};

static size_t bytes_of(const struct rig *g, enum dtype dtype) { return (size_t)g->elements * dtype_bytes(dtype); }

/* Bytes [*at, *at + result) of the unit in a flat buffer. */
static size_t range(const struct rig *g, int unit, enum dtype dtype, size_t *at) {
  const struct model_unit u = model_unit(g->m, unit);
  const struct param *first = model_param(g->m, u.first), *last = model_param(g->m, u.first + u.n - 1);
  *at = (size_t)first->offset * dtype_bytes(dtype);
  return (size_t)(last->offset + last->rows * last->cols) * dtype_bytes(dtype) - *at;
}

/* The unit's parameters come at this moment. */
static void on_weights(void *context, int unit) {
  struct watch *w = context;
  size_t at, n = range(w->g, unit, DTYPE_BF16, &at);
  memcpy((char *)model_params(w->g->m) + at, (char *)w->params + at, n);
  model_refresh_unit(w->g->m, unit);
  if (w->n_needed < UNITS) w->needed[w->n_needed++] = unit;
}

/* From this moment on the unit's gradients are rubbish: another's, who sums them. */
static void on_gradient(void *context, int unit) {
  struct watch *w = context;
  size_t at, n = range(w->g, unit, model_gradient_dtype(w->g->m), &at);
  memcpy((char *)w->gradients + at, (char *)model_gradients(w->g->m) + at, n);
  memset((char *)model_gradients(w->g->m) + at, 0x7F, n);
  if (w->n_complete < UNITS) w->complete[w->n_complete++] = unit;
}

struct setting {
  const char *name, *route;
  bool tied, master;
  enum dtype gradients;
  enum recompute recompute;
};

static const struct setting settings[] = {
    {"bf16", "bf16", false, true, DTYPE_F32, RECOMPUTE_NONE},
    {"tied", "bf16", true, false, DTYPE_BF16, RECOMPUTE_ALL},
    {"tied, packed", "mxfp4-row-sr", true, true, DTYPE_F32, RECOMPUTE_NONE},
    {"tied, boundaries again", "nvfp4-global", true, false, DTYPE_BF16, RECOMPUTE_BOUNDARIES},
    {"packed", "mxfp4-row-sr", false, false, DTYPE_BF16, RECOMPUTE_EVERY_NTH},
    {"packed, all again", "mxfp4-row-sr", false, true, DTYPE_F32, RECOMPUTE_ALL},
    {"attention", "attention-fp8-proj-nvfp4", false, true, DTYPE_F32, RECOMPUTE_NONE},
};

static bool open_setting(struct rig *g, const struct setting *s) {
  struct model_config c = rig_config_of(s->route);
  struct model_shape shape = rig_shape(2, DTYPE_BF16);
  c.tied = s->tied;
  shape.master = s->master;
  shape.gradient_dtype = s->gradients;
  shape.recompute = s->recompute;
  return rig_open(g, &c, s->route, &shape, 2);
}

static bool in_order(const int *units, int n, int wanted, int first, int step) {
  if (n != wanted) return false;
  for (int i = 0; i < n; i++)
    if (units[i] != first + step * i) return false;
  return true;
}

/* All parameters and packed weights are rubbish until their unit is asked for; all gradients once it is told of. */
TEST(neither_earlier_nor_later) {
  for (int i = 0; i < (int)(sizeof settings / sizeof *settings); i++) {
    const struct setting *s = &settings[i];
    struct rig g;
    if (!open_setting(&g, s)) {
      FAIL("%s: no model", s->name);
      return;
    }
    const int units = model_unit_number(g.m);
    const size_t param_bytes = bytes_of(&g, DTYPE_BF16), gradient_bytes = bytes_of(&g, s->gradients);
    struct watch w = {.g = &g, .params = malloc(param_bytes), .gradients = malloc(gradient_bytes)};
    float *nll = malloc((size_t)g.tokens * sizeof *nll);
    memcpy(w.params, model_params(g.m), param_bytes);

    /* two micro-batches as ever */
    model_reset_signals(g.m);
    rig_clear(&g);
    for (int pass = 0; pass < 2; pass++) model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
    memcpy(nll, g.nll, (size_t)g.tokens * sizeof *nll);
    void *expected = malloc(gradient_bytes);
    memcpy(expected, model_gradients(g.m), gradient_bytes);
    const struct model_signals signals = *rig_signals(g.m);

    /* and with parameters that come in the first forward and gradients that go in the last backward */
    memset(model_params(g.m), 0x7F, param_bytes);
    model_refresh_weights(g.m); /* packed rubbish */
    model_expire_weights(g.m);
    model_reset_signals(g.m);
    rig_clear(&g);
    for (int pass = 0; pass < 2; pass++) {
      model_on_weights(g.m, pass == 0 ? on_weights : NULL, &w);
      model_on_gradient(g.m, pass == 1 ? on_gradient : NULL, &w);
      model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
    }
    if (!in_order(w.needed, w.n_needed, units, 0, 1)) FAIL("%s: weights of %d units, or in another order", s->name, w.n_needed);
    if (!in_order(w.complete, w.n_complete, units, units - 1, -1)) FAIL("%s: gradients of %d units, or in another order", s->name, w.n_complete);
    for (size_t at = 0; at < gradient_bytes; at++) w.touched += ((unsigned char *)model_gradients(g.m))[at] != 0x7F;
    if (w.touched) FAIL("%s: %lld bytes of gradients were touched after they were complete", s->name, (long long)w.touched);
    if (memcmp(nll, g.nll, (size_t)g.tokens * sizeof *nll) != 0) FAIL("%s: other losses", s->name);
    if (memcmp(expected, w.gradients, gradient_bytes) != 0) FAIL("%s: other gradients", s->name);
    if (memcmp(&signals, rig_signals(g.m), sizeof signals) != 0) FAIL("%s: other signals", s->name);
    free(w.params);
    free(w.gradients);
    free(expected);
    free(nll);
    rig_close(&g);
  }
}

/* Of weights the present operands are counted: once, however often the rest is forgotten. */
TEST(counts_of_weights) {
  const struct setting s = {"packed", "mxfp4-row-sr", false, true, DTYPE_F32, RECOMPUTE_NONE};
  struct rig g;
  if (!open_setting(&g, &s)) {
    FAIL("no model");
    return;
  }
  const struct quantise_counts whole = rig_signals(g.m)->counts[FPROP_W];
  CHECK(whole.elements > 0 && whole.underflowed > 0);
  model_reset_signals(g.m);
  model_forward_backward(g.m, &g.b, 1, g.nll);
  CHECK(memcmp(&rig_signals(g.m)->counts[FPROP_W], &whole, sizeof whole) == 0);
  model_refresh_unit(g.m, 1); /* not old: nothing to do */
  CHECK(memcmp(&rig_signals(g.m)->counts[FPROP_W], &whole, sizeof whole) == 0);
  model_expire_weights(g.m);
  CHECK_EQ_I64(rig_signals(g.m)->counts[FPROP_W].elements, 0);
  int64_t before = 0;
  for (int unit = 0; unit < model_unit_number(g.m); unit++) {
    const bool block = unit > 0 && unit < model_unit_number(g.m) - 1;
    for (int twice = 0; twice < 2; twice++) model_refresh_unit(g.m, unit);
    const int64_t now = rig_signals(g.m)->counts[FPROP_W].elements;
    CHECK((now > before) == block);
    before = now;
  }
  CHECK(memcmp(&rig_signals(g.m)->counts[FPROP_W], &whole, sizeof whole) == 0);
  rig_close(&g);
}

int main(void) {
  RUN(neither_earlier_nor_later);
  RUN(counts_of_weights);
  return test_report();
}
