#include "trainer/shards.h"

#include <stdlib.h>

#include "comm/exchange.h"

/* A flat buffer of the model as its parameters' tensors. */
static struct comm_part *parts_of(const struct run *run, void *buffer, enum dtype dtype) {
  const int n = model_param_number(run->model);
  struct comm_part *parts = calloc((size_t)n, sizeof *parts);
  for (int i = 0; parts && i < n; i++) {
    const struct param *p = model_param(run->model, i);
    parts[i] = (struct comm_part){(char *)buffer + (size_t)p->offset * dtype_bytes(dtype), p->rows, p->cols, dtype};
  }
  return parts;
}

bool shards_open(struct run *run, struct error *e) {
  if (run->world == 1) return true;
  run->gradient_parts = parts_of(run, model_gradients(run->model), model_gradient_dtype(run->model));
  run->weight_parts = parts_of(run, model_params(run->model), run->config.train.param_dtype);
  run->weight_copies = calloc((size_t)model_unit_number(run->model), sizeof *run->weight_copies);
  const bool good = (run->gradient_parts && run->weight_parts && run->weight_copies) || error_set(e, ERROR_SYSTEM, "out of memory");
  const struct comm_device device = {run->device, run->staging, run->staging_bytes};
  if (!comm_agree(run->comm, good, e)) return false;
  comm_enter(run->comm, COMM_START, "start of exchanges", -1);
  return comm_exchange_open(run->comm, &device, model_unit_number(run->model), e);
}

void shards_close(struct run *run) {
  if (run->comm) comm_exchange_close(run->comm);
  free(run->gradient_parts);
  free(run->weight_parts);
  free(run->weight_copies);
}

void shards_begin_sum(struct run *run, int unit) {
  if (run->world <= 1) return;
  const struct model_unit u = model_unit(run->model, unit);
  (void)comm_reduce_scatter_begin(run->comm, run->gradient_parts + u.first, u.n);
}

void shards_begin_copy(struct run *run, int unit) {
  if (run->world <= 1) return;
  const struct model_unit u = model_unit(run->model, unit);
  run->weight_copies[unit] = comm_all_gather_begin(run->comm, run->weight_parts + u.first, u.n);
}

bool shards_finish_sums(struct run *run, struct error *e) { return run->world <= 1 || comm_finish_all(run->comm, e); }

bool shards_finish_copy(struct run *run, int unit, struct error *e) {
  return run->world <= 1 || comm_finish(run->comm, run->weight_copies[unit], e);
}

bool shards_settle(struct run *run, struct error *e) {
  for (int unit = 0; unit < model_unit_number(run->model); unit++) {
    if (!shards_finish_copy(run, unit, e)) return false;
    model_refresh_unit(run->model, unit);
  }
  return true;
}
