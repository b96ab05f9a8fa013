#include "trainer/optimizer.h"

#include <math.h>
#include <stdio.h>

#include "trainer/schedule.h"

static void *gradient_at(const struct run *run, const struct param *p) {
  return (char *)model_gradients(run->model) + (size_t)p->offset * dtype_bytes(model_gradient_dtype(run->model));
}

bool optimizer_measure(struct run *run, struct update_signals *s, struct error *e) {
  const struct kernels *k = run->device->k;
  const int n = model_param_number(run->model);
  const size_t bytes = (size_t)n * sizeof(struct measure);
  const enum dtype dtype = model_gradient_dtype(run->model);
  k->clear(run->device, run->gradient_measures, bytes);
  for (int i = 0; i < n; i++) {
    const struct param *p = model_param(run->model, i);
    struct matrix g = {gradient_at(run, p), dtype, p->rows, p->cols};
    k->measure(run->device, &run->gradient_measures[i], &g);
  }
  const struct measure *host = run->host_gradient_measures;
  k->download(run->device, run->host_gradient_measures, run->gradient_measures, bytes);
  bool good = k->synchronize(run->device, e);
  double sum = 0;
  s->nonfinite = 0;
  s->nonfinite_where[0] = 0;
  for (int i = 0; good && i < n; i++) {
    sum += host[i].sum_squares;
    if (host[i].nonfinite > 0 && s->nonfinite == 0)
      snprintf(s->nonfinite_where, sizeof s->nonfinite_where, "%s", model_param(run->model, i)->name);
    s->nonfinite += host[i].nonfinite;
  }
  s->grad_norm = sqrt(sum);
  return good;
}

bool optimizer_step(struct run *run, int64_t update, double grad_norm, struct step *out, struct error *e) {
  const struct kernels *k = run->device->k;
  const struct config *c = &run->config;
  const enum dtype dtype = c->train.param_dtype;
  const int64_t t = run->applied + 1;
  out->lr = schedule_lr(c, update);
  out->clip_coefficient = c->optimizer.clip > 0 && grad_norm > c->optimizer.clip ? c->optimizer.clip / grad_norm : 1;

  struct adamw a = {
      .lr = (float)out->lr,
      .beta1 = (float)c->optimizer.beta1,
      .beta2 = (float)c->optimizer.beta2,
      .eps = (float)c->optimizer.eps,
      .grad_scale = (float)out->clip_coefficient,
      .bias1 = (float)schedule_bias(c->optimizer.beta1, t),
      .bias2 = (float)schedule_bias(c->optimizer.beta2, t),
  };
  struct draw draw = {.seed = (uint64_t)c->run.seed, .update = (uint32_t)update, .operand = DRAW_PARAMETER};
  float *master = model_master(run->model);
  const bool stochastic = dtype == DTYPE_BF16 && !master;

  const int n = model_param_number(run->model);
  const size_t bytes = (size_t)n * sizeof(struct update_measure);
  k->clear(run->device, run->update_measures, bytes);
  for (int i = 0; i < n; i++) {
    const struct param *p = model_param(run->model, i);
    a.weight_decay = p->decay ? (float)c->optimizer.weight_decay : 0;
    draw.layer = (uint32_t)i;
    k->adamw_update(run->device, (char *)model_params(run->model) + (size_t)p->offset * dtype_bytes(dtype), dtype,
                    master ? master + p->offset : NULL, model_adam_m(run->model) + p->offset,
                    model_adam_v(run->model) + p->offset, gradient_at(run, p), model_gradient_dtype(run->model),
                    p->rows * p->cols, &a, stochastic ? &draw : NULL, &run->update_measures[i]);
  }
  model_refresh_weights(run->model);
  model_fetch_signals(run->model);

  const struct update_measure *host = run->host_update_measures;
  k->download(run->device, run->host_update_measures, run->update_measures, bytes);
  bool good = k->synchronize(run->device, e);
  double change = 0, weight = 0;
  for (int i = 0; good && i < n; i++) {
    change += host[i].update_sum_squares;
    weight += host[i].weight_sum_squares;
  }
  out->update_to_weight = weight > 0 ? sqrt(change / weight) : 0;
  run->applied = t;
  return good;
}
