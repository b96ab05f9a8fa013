#include "trainer/passes.h"

#include <math.h>
#include <signal.h>
#include <string.h>

#include "kernels/formats.h"
#include "trainer/shards.h"

/* ---- where a rank stands -------------------------------------------------------- */

static void stand(struct passes *p, enum phase phase, const char *operation) {
  const struct run *run = p->run;
  timeline_enter(&p->time, phase);
  comm_enter(run->comm, run->update == p->first ? COMM_START : COMM_UPDATE, operation, run->update + 1);
}

void passes_enter(struct passes *p, enum phase phase) {
  static const char *const operations[PHASE_COUNT] = {"load data",        "forward",   "head",   "backward",
                                                      "reduce gradients", "optimizer", "between"};
  stand(p, phase, operations[phase]);
}

/* A validation's forwards are no phases of an update. */
static void on_model_phase(void *context, enum model_phase phase) {
  struct passes *p = context;
  if (p->time.running) passes_enter(p, timeline_of_model(phase));
}

bool passes_open(struct passes *p, struct run *run, struct error *e) {
  *p = (struct passes){.run = run, .first = run->update};
  model_on_phase(run->model, on_model_phase, p);
  return timeline_make(&p->time, run->device, run->accumulation, model_unit_number(run->model), e);
}

void passes_close(struct passes *p) {
  model_on_phase(p->run->model, NULL, NULL);
  timeline_release(&p->time);
}

/* ---- faults that tests ask for by configuration (`fault`); a healthy run has none -------- */

static void set_gradient(struct run *run, int64_t element, float value) {
  const enum dtype dtype = model_gradient_dtype(run->model);
  const uint16_t rounded = bf16_encode(value);
  const void *bits = dtype == DTYPE_BF16 ? (const void *)&rounded : &value;
  char *to = (char *)model_gradients(run->model) + (size_t)element * dtype_bytes(dtype);
  struct error ignored; /* a fault of the device stays with it */
  run->device->k->upload(run->device, to, bits, dtype_bytes(dtype));
  (void)run->device->k->synchronize(run->device, &ignored); /* `rounded` goes away */
}

static bool unit_holds(const struct run *run, int unit, int64_t element) {
  const struct model_unit u = model_unit(run->model, unit);
  const struct param *first = model_param(run->model, u.first), *last = model_param(run->model, u.first + u.n - 1);
  return element >= first->offset && element < last->offset + last->rows * last->cols;
}

static void inject_before_sum(struct run *run, int unit) {
  const int64_t update = run->update + 1, middle = model_param_elements(run->model) / 2;
  if (unit_holds(run, unit, middle) && run_fault(run, "nan", update)) set_gradient(run, middle, NAN);
  if (unit_holds(run, unit, 0) && run_fault(run, "spike", update)) set_gradient(run, 0, 1e6f);
}

/* In the midst of the backward, with sums under way. */
static void inject_beside_sums(struct run *run, int unit) {
  const int64_t update = run->update + 1;
  if (unit != model_unit_number(run->model) / 2) return;
  if (run_fault(run, "stall", update)) raise(SIGSTOP);
  if (run_fault(run, "kill", update)) raise(SIGKILL);
}

/* ---- beside the model -------------------------------------------------------------- */

static void on_weights(void *context, int unit) {
  struct passes *p = context;
  const enum phase phase = p->time.current;
  if (!p->failed) {
    stand(p, PHASE_REDUCE, "gather weights");
    p->failed = !shards_finish_copy(p->run, unit, &p->failure);
  }
  stand(p, PHASE_OPTIMIZER, "refresh weights");
  model_refresh_unit(p->run->model, unit);
  passes_enter(p, phase);
}

/* All ranks come here for the same units in the same order, whatever the gradients are: what is wrong with
 * these is seen once they are summed.  Only a broken world is not told of more. */
static void on_gradient(void *context, int unit) {
  struct passes *p = context;
  inject_before_sum(p->run, unit);
  if (!p->failed) shards_begin_sum(p->run, unit);
  inject_beside_sums(p->run, unit);
}

bool passes_compute(struct passes *p, const struct loader_batch *own, int64_t targets, struct error *e) {
  struct run *run = p->run;
  const struct kernels *k = run->device->k;
  const struct matrix nll = {run->nll, DTYPE_F32, 1, run->tokens};
  const float grad_scale = (float)(1.0 / (double)targets);

  model_reset_signals(run->model);
  k->clear(run->device, run->loss, sizeof *run->loss);
  model_clear_gradients(run->model);
  for (int64_t pass = 0; pass < run->accumulation && !p->failed; pass++) {
    const int64_t at = pass * run->tokens;
    struct micro_batch b = run_upload(run, own->inputs + at, own->targets + at, own->starts ? own->starts + at : NULL);
    b.first_sample = (uint64_t)(own->first + pass * run->local_batch);
    b.update = (uint32_t)(run->update + 1);
    b.seed = (uint64_t)run->config.run.seed;
    model_on_weights(run->model, pass == 0 ? on_weights : NULL, p);
    model_on_gradient(run->model, pass == run->accumulation - 1 ? on_gradient : NULL, p);
    model_forward_backward(run->model, &b, grad_scale, run->nll);
    k->sum(run->device, run->loss, &nll);
  }
  model_on_weights(run->model, NULL, NULL);
  model_on_gradient(run->model, NULL, NULL);
  k->download(run->device, run->host_loss, run->loss, sizeof *run->loss);
  model_fetch_signals(run->model);
  passes_enter(p, PHASE_REDUCE);
  if (p->failed) *e = p->failure;
  if (p->failed || !shards_finish_sums(run, e)) return false;
  passes_enter(p, PHASE_OPTIMIZER);
  return true;
}
