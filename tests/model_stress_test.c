/* A whole forward and backward of every route where the tensors are hard: a
 * channel of 1e4, blocks of zeros, a weight that is infinite or NaN. */
#include "kernels/formats.h"
#include "tests/test.h"

#include "tests/model_rig.h"

static const char *const *all_routes; /* those that run, NULL-terminated */

static int find_param(const struct rig *g, const char *name) {
  for (int i = 0; i < model_param_number(g->m); i++)
    if (strcmp(model_param(g->m, i)->name, name) == 0) return i;
  printf("not ok no parameter %s\n", name);
  exit(1);
}

static enum dtype type; /* of the parameters */

static void set_elements(struct rig *g, const char *name, int64_t first, int64_t n, float value) {
  const struct param *p = model_param(g->m, find_param(g, name));
  for (int64_t i = p->offset + first; i < p->offset + first + n; i++) {
    if (type == DTYPE_F32) ((float *)model_params(g->m))[i] = value;
    else ((uint16_t *)model_params(g->m))[i] = bf16_encode(value);
  }
}

struct outcome {
  double loss, norm; /* of the gradient */
  int64_t wrong;     /* values in both that are not finite */
};

static struct outcome step(struct rig *g) {
  struct outcome o = {0};
  model_refresh_weights(g->m);
  rig_clear(g);
  model_forward_backward(g->m, &g->b, 1.0f / (float)g->tokens, g->nll);
  for (int64_t t = 0; t < g->tokens; t++) {
    o.loss += (double)g->nll[t] / (double)g->tokens;
    o.wrong += !isfinite(g->nll[t]);
  }
  const float *gradient = model_gradients(g->m);
  for (int64_t i = 0; i < g->elements; i++) o.wrong += !isfinite(gradient[i]);
  o.norm = sqrt(dot(gradient, gradient, g->elements));
  return o;
}

static bool open_route(struct rig *g, const char *route) {
  struct model_config c = rig_config_of(route);
  struct model_shape s = rig_shape(2, type = rig_dtype(route));
  bool good = rig_open(g, &c, route, &s, 2);
  if (!good) FAIL("%s: no model", route);
  return good;
}

/* One channel of what `qkv` and `gate_up` read, and one row of a weight. */
TEST(outliers) {
  for (int i = 0; all_routes[i]; i++) {
    struct rig g;
    if (!open_route(&g, all_routes[i])) return;
    struct outcome calm = step(&g);
    set_elements(&g, "layers.1.attention_norm.weight", 5, 1, 1e4f);
    set_elements(&g, "layers.0.ffn_norm.weight", 37, 1, -1e4f);
    struct outcome o = step(&g);
    if (o.wrong || !(o.loss > 0 && o.loss < 1e3) || !(o.norm > 0 && o.norm < 1e6 * calm.norm))
      FAIL("%s, a channel of 1e4: loss %g, norm %g (%g before), %d values not finite", all_routes[i], o.loss, o.norm,
           calm.norm, (int)o.wrong);
    rig_close(&g);
    if (!open_route(&g, all_routes[i])) return;
    set_elements(&g, "layers.1.feed_forward.w2.weight", 3, 1, 1e4f);
    o = step(&g);
    if (o.wrong || !(o.loss > 0 && o.loss < 1e3) || !(o.norm > 0))
      FAIL("%s, a weight of 1e4: loss %g, norm %g, %d values not finite", all_routes[i], o.loss, o.norm, (int)o.wrong);
    rig_close(&g);
  }
}

/* Channels of zeros: their weights have no gradient at all, the rest has. */
TEST(zeros) {
  for (int i = 0; all_routes[i]; i++) {
    struct rig g;
    if (!open_route(&g, all_routes[i])) return;
    set_elements(&g, "layers.1.attention_norm.weight", 32, 32, 0);
    set_elements(&g, "layers.1.feed_forward.w1.weight", 0, 32 * 64, 0); /* rows: 32 channels of the activation */
    struct outcome o = step(&g);
    if (o.wrong || !(o.norm > 0)) FAIL("%s: norm %g, %d values not finite", all_routes[i], o.norm, (int)o.wrong);
    static const struct {
      const char *name;
      int64_t cols, from;
    } of[] = {{"layers.1.attention.wq.weight", 64, 32}, {"layers.1.attention.wv.weight", 64, 32}, {"layers.1.feed_forward.w2.weight", 0, 0}};
    for (int k = 0; k < 3; k++) {
      const struct param *p = model_param(g.m, find_param(&g, of[k].name));
      const float *gradient = (const float *)model_gradients(g.m) + p->offset;
      int64_t there = 0, elsewhere = 0;
      for (int64_t e = 0; e < p->rows * p->cols; e++) {
        int64_t c = e % p->cols;
        bool zeroed = c >= of[k].from && c < of[k].from + 32;
        *(zeroed ? &there : &elsewhere) += gradient[e] != 0;
      }
      if (there || !(elsewhere > p->rows * p->cols / 4))
        FAIL("%s, %s: %d gradients of zero channels, %d of the rest", all_routes[i], of[k].name, (int)there, (int)elsewhere);
    }
    rig_close(&g);
  }
}

/* One element of each kind of parameter: the gradient tells, whatever the route
 * makes of it, so no update is taken from it. */
TEST(not_finite) {
  static const char *const names[] = {"layers.1.attention_norm.weight", "layers.0.attention.wk.weight",
                                      "layers.1.attention.wo.weight",   "layers.0.feed_forward.w3.weight",
                                      "layers.2.feed_forward.w2.weight", "norm.weight"};
  for (int i = 0; all_routes[i]; i++)
    for (int k = 0; k < 6; k++)
      for (int nan = 0; nan < 2; nan++) {
        struct rig g;
        if (!open_route(&g, all_routes[i])) return;
        set_elements(&g, names[k], 7, 1, nan ? NAN : INFINITY);
        struct outcome o = step(&g);
        if (isfinite(o.norm)) FAIL("%s, %s %s: the gradient is finite", all_routes[i], nan ? "NaN" : "infinite", names[k]);
        rig_close(&g);
      }
}

int main(void) {
  all_routes = rig_routes();
  RUN(outliers);
  RUN(zeros);
  RUN(not_finite);
  return test_report();
}
