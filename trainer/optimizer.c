#include "trainer/optimizer.h"

#include <math.h>
#include <stdio.h>

#include "trainer/schedule.h"
#include "trainer/shards.h"

/* The rows of a parameter that this rank owns, in a flat buffer. */
static void *own_rows(const struct run *run, int i, void *buffer, enum dtype dtype) {
  const struct param *p = model_param(run->model, i);
  return (char *)buffer + (size_t)(p->offset + model_param_share(run->model, i)->first_row * p->cols) * dtype_bytes(dtype);
}

enum { TOGETHER = 64 }; /* tensors of one call */

/* All ranks, in agreement. */
static bool wait_for_device(struct run *run, struct error *e) {
  const bool good = run->device->k->synchronize(run->device, e);
  return run->world > 1 ? comm_agree(run->comm, good, e) : good;
}

bool optimizer_measure(struct run *run, struct update_signals *s, struct error *e) {
  const struct kernels *k = run->device->k;
  const int n = model_param_number(run->model);
  const size_t bytes = (size_t)n * sizeof(struct measure);
  const enum dtype dtype = model_gradient_dtype(run->model);
  k->clear(run->device, run->gradient_measures, bytes);
  for (int i = 0; i < n;) {
    struct matrix g[TOGETHER];
    const int first = i;
    for (; i < n && i < first + TOGETHER; i++)
      g[i - first] = (struct matrix){own_rows(run, i, model_gradients(run->model), dtype), dtype, model_param_share(run->model, i)->rows,
                                     model_param(run->model, i)->cols};
    k->measure(run->device, &run->gradient_measures[first], g, i - first);
  }
  const struct measure *host = run->host_gradient_measures;
  k->download(run->device, run->host_gradient_measures, run->gradient_measures, bytes);
  if (!wait_for_device(run, e)) return false;
  double sum = 0, last = 0; /* how many parameters come after the first that has a non-finite element, and itself */
  int64_t nonfinite = 0;
  for (int i = 0; i < n; i++) {
    sum += host[i].sum_squares;
    nonfinite += host[i].nonfinite;
    if (nonfinite > 0 && last == 0) last = n - i;
  }
  if (run->world > 1 && !(comm_sum_f64(run->comm, &sum, 1, e) && comm_sum_i64(run->comm, &nonfinite, 1, e) &&
                          comm_max_f64(run->comm, &last, 1, e)))
    return false;
  s->grad_norm = sqrt(sum);
  s->nonfinite = nonfinite;
  snprintf(s->nonfinite_where, sizeof s->nonfinite_where, "%s", nonfinite > 0 ? model_param(run->model, n - (int)last)->name : "");
  return true;
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
  const struct draw draw = {.seed = (uint64_t)c->run.seed, .update = (uint32_t)update, .operand = DRAW_PARAMETER};
  float *master = model_master(run->model);
  const enum dtype gradient_dtype = model_gradient_dtype(run->model);

  const int n = model_param_number(run->model);
  const size_t bytes = (size_t)n * sizeof(struct update_measure);
  k->clear(run->device, run->update_measures, bytes);
  model_expire_weights(run->model);
  struct adamw_tensor tensors[TOGETHER];
  int count = 0;
  for (int unit = 0; unit < model_unit_number(run->model); unit++) {
    const struct model_unit u = model_unit(run->model, unit);
    for (int i = u.first; i < u.first + u.n; i++) {
      const struct param *p = model_param(run->model, i);
      const struct param_share *own = model_param_share(run->model, i);
      const bool unit_ends = i + 1 == u.first + u.n, copied = unit_ends && run->world > 1, last = i + 1 == n;
      if (own->rows > 0)
        tensors[count++] = (struct adamw_tensor){.param = own_rows(run, i, model_params(run->model), dtype),
                                                 .master = master ? master + own->offset : NULL,
                                                 .m = model_adam_m(run->model) + own->offset,
                                                 .v = model_adam_v(run->model) + own->offset,
                                                 .grad = own_rows(run, i, model_gradients(run->model), gradient_dtype),
                                                 .n = own->rows * p->cols,
                                                 .weight_decay = p->decay ? (float)c->optimizer.weight_decay : 0,
                                                 .layer = (uint32_t)i,
                                                 .first = (uint64_t)(own->first_row * p->cols),
                                                 .measured = &run->update_measures[i]};
      if (count < TOGETHER && !copied && !last) continue;
      k->adamw_update(run->device, tensors, count, dtype, gradient_dtype, &a, &draw);
      count = 0;
    }
    shards_begin_copy(run, unit);
  }
  run->applied = t;

  const struct update_measure *host = run->host_update_measures;
  k->download(run->device, run->host_update_measures, run->update_measures, bytes);
  if (!wait_for_device(run, e)) return false;
  double sums[2] = {0, 0}; /* of the change, of the weights */
  for (int i = 0; i < n; i++) {
    sums[0] += host[i].update_sum_squares;
    sums[1] += host[i].weight_sum_squares;
  }
  if (run->world > 1 && !comm_sum_f64(run->comm, sums, 2, e)) return false;
  out->update_to_weight = sums[1] > 0 ? sqrt(sums[0] / sums[1]) : 0;
  return true;
}
