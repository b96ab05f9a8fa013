#include "trainer/loop.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "trainer/control.h"
#include "trainer/optimizer.h"
#include "trainer/report.h"

/* One rank's view of the loop. */
struct loop {
  struct run *run;
  struct state *state;
  struct record_file *records; /* rank 0 */
  struct timeline time;
  double started;        /* clock at the loop's start */
  int64_t first_update;  /* of this process */
  int64_t saved_update;  /* the newest checkpoint's update; -1 none */
  double peak_flops;     /* of one rank */
  double flops_per_token;
};

static const char *const phase_operation[] = {"load data", "forward",        "head",    "backward",
                                              "reduce gradients", "optimizer", "between"};

static void enter(struct loop *l, enum phase phase) {
  timeline_enter(&l->time, phase);
  comm_enter(l->run->comm, l->run->update == 0 && l->run->applied == 0 ? COMM_START : COMM_UPDATE,
             phase_operation[phase], l->run->update + 1);
}

static void on_model_phase(void *context, enum model_phase phase) { enter(context, timeline_of_model(phase)); }

/* ---- loading ---------------------------------------------------------------- */

/* What all ranks sum before an update begins: counted targets, and the batch
 * hash as four 32-bit pieces (sums of which do not depend on order). */
struct batch {
  int64_t targets;
  struct hash hash;
};

static int64_t first_sample_of(const struct run *run) {
  return run->config.train.overfit_one_batch ? 0 : run->samples;
}

static bool load_batch(struct loop *l, struct batch *out, struct error *e) {
  struct run *run = l->run;
  const int64_t seq = run->config.train.seq_len, share = run->config.train.global_batch / run->world;
  const int64_t first = first_sample_of(run) + share * run->rank;
  struct hash sum = {0, 0};
  int64_t targets = 0;
  bool good = true;
  for (int64_t i = 0; good && i < share; i++) {
    int32_t *inputs = run->host_inputs + i * seq, *wanted = run->host_targets + i * seq;
    good = data_sample(&run->train_order, first + i, inputs, wanted, e);
    if (!good) break;
    sum = hash_sum(sum, data_sample_hash(first + i, inputs, wanted, seq));
    for (int64_t t = 0; t < seq; t++) targets += wanted[t] >= 0;
  }
  struct hash *all = calloc((size_t)run->world, sizeof *all);
  if (good && !all) good = error_set(e, ERROR_SYSTEM, "out of memory");
  if (!comm_agree(run->comm, good, e)) {
    free(all);
    return false;
  }
  good = comm_gather_all(run->comm, all, &sum, sizeof sum, e) && comm_sum_i64(run->comm, &targets, 1, e);
  out->hash = (struct hash){0, 0};
  for (int r = 0; good && r < run->world; r++) out->hash = hash_sum(out->hash, all[r]);
  free(all);
  out->targets = targets;
  if (good && targets == 0)
    good = error_set(e, ERROR_DATA, "update %" PRId64 " has no target token to learn from", run->update + 1);
  return good;
}

/* ---- computing -------------------------------------------------------------- */

/* Tests ask for faults by configuration (`fault`); a healthy run has none. */
static void inject_before_reduce(struct loop *l) {
  struct run *run = l->run;
  const int64_t update = run->update + 1;
  const struct kernels *k = run->device->k;
  if (run_fault(run, "nan", update)) {
    const float poison = NAN;
    k->upload(run->device, model_gradients(run->model) + model_param_elements(run->model) / 2, &poison, sizeof poison);
  }
  if (run_fault(run, "spike", update)) {
    const float large = 1e6f;
    k->upload(run->device, model_gradients(run->model), &large, sizeof large);
  }
  if (run_fault(run, "stall", update)) raise(SIGSTOP);
  if (run_fault(run, "kill", update)) raise(SIGKILL);
}

static bool compute(struct loop *l, const struct batch *batch, struct update_signals *signals, struct error *e) {
  struct run *run = l->run;
  const struct kernels *k = run->device->k;
  const int64_t share = run->config.train.global_batch / run->world;
  const size_t bytes = (size_t)run->tokens * sizeof(int32_t);
  const float grad_scale = (float)(1.0 / (double)batch->targets); /* the loss is the mean over all targets */
  double loss = 0;
  bool good = true;

  model_reset_signals(run->model);
  k->clear(run->device, model_gradients(run->model), (size_t)model_param_elements(run->model) * sizeof(float));
  for (int64_t pass = 0; good && pass < run->accumulation; pass++) {
    k->upload(run->device, run->inputs, run->host_inputs + pass * run->tokens, bytes);
    k->upload(run->device, run->targets, run->host_targets + pass * run->tokens, bytes);
    struct micro_batch b = {
        .inputs = run->inputs,
        .targets = run->targets,
        .first_sample = (uint64_t)(first_sample_of(run) + share * run->rank + pass * run->local_batch),
        .update = (uint32_t)(run->update + 1),
        .seed = (uint64_t)run->config.run.seed,
    };
    model_forward_backward(run->model, &b, grad_scale, run->nll);
    k->download(run->device, run->host_nll, run->nll, bytes);
    good = k->synchronize(run->device, e);
    for (int64_t t = 0; t < run->tokens; t++) loss += (double)run->host_nll[t];
  }
  inject_before_reduce(l);
  enter(l, PHASE_REDUCE);
  if (!comm_agree(run->comm, good, e)) return false;
  if (!comm_sum_f32(run->comm, model_gradients(run->model), model_param_elements(run->model), e)) return false;
  if (!comm_sum_f64(run->comm, &loss, 1, e)) return false;
  signals->loss = loss / (double)batch->targets;
  enter(l, PHASE_OPTIMIZER);
  return true;
}

enum { COUNTS_MOST = (int)OPERAND_ROLE_COUNT > (int)ATTENTION_TENSORS ? (int)OPERAND_ROLE_COUNT : (int)ATTENTION_TENSORS };

/* Counts of all ranks, and the largest of *more: saturation and logits may rise on one of them first. */
static bool gather_counts(const struct run *run, struct quantise_counts *of, int n, float *more, struct error *e) {
  int64_t counts[COUNTS_MOST][5];
  double largest[COUNTS_MOST + 1];
  if (run->world == 1) return true;
  for (int i = 0; i < n; i++) {
    const int64_t own[5] = {of[i].elements, of[i].saturated, of[i].underflowed, of[i].blocks, of[i].zero_blocks};
    memcpy(counts[i], own, sizeof own);
    largest[i] = (double)of[i].amax;
  }
  largest[n] = (double)*more;
  if (!comm_sum_i64(run->comm, counts[0], n * 5, e) || !comm_max_f64(run->comm, largest, n + 1, e)) return false;
  *more = (float)largest[n];
  for (int i = 0; i < n; i++) {
    const int64_t *c = counts[i];
    of[i] = (struct quantise_counts){c[0], c[1], c[2], c[3], c[4], (float)largest[i]};
  }
  return true;
}

/* What attention saw, which may judge the update. */
static bool gather_attention(const struct run *run, struct update_signals *s, struct error *e) {
  const struct attention_formats f = route_attention(&run->config.route);
  float unused = 0;
  memcpy(s->attention, model_signals(run->model)->attention, sizeof s->attention);
  return attention_plain(&f) || gather_counts(run, s->attention, ATTENTION_TENSORS, &unused, e);
}

/* What the model saw, the weights' new operands with it. */
static bool gather_signals(const struct run *run, const struct update_signals *s, struct model_signals *seen, struct error *e) {
  *seen = *model_signals(run->model);
  memcpy(seen->attention, s->attention, sizeof seen->attention);
  return gather_counts(run, seen->counts, OPERAND_ROLE_COUNT, &seen->max_logit, e);
}

/* ---- between updates ---------------------------------------------------------- */

/* Rank 0 writes; all ranks learn whether it could. */
static bool write_record(struct loop *l, json_t *object, struct error *e) {
  bool good = true;
  if (l->records)
    good = record_write(l->records, object, e);
  else
    json_decref(object);
  return comm_agree(l->run->comm, good, e);
}

static bool validate(struct loop *l, struct error *e) {
  struct run *run = l->run;
  if (!run->validation) return true;
  struct evaluation v;
  int64_t samples = run_validation_samples(run, run->config.validation.samples);
  comm_enter(run->comm, COMM_SAVE, "validation", run->update);
  double t0 = clock_seconds();
  if (!run_evaluate(run, samples, NULL, &v, e)) return false;
  json_t *o = json_object();
  record_text(o, "kind", "validation");
  record_integer(o, "update", run->update);
  record_real(o, "loss", v.mean);
  record_real(o, "standard_error", v.standard_error);
  record_integer(o, "samples", v.samples);
  record_integer(o, "targets", v.targets);
  record_real(o, "seconds", clock_seconds() - t0);
  char text[64];
  run_evaluation_text(&v, 4, text, sizeof text);
  if (run->rank == 0)
    log_info("update %6" PRId64 "  validation loss %s over %" PRId64 " sequence%s", run->update, text, v.samples,
             v.samples == 1 ? "" : "s");
  return write_record(l, o, e);
}

/* A failed save is reported and the run goes on, with its older checkpoints. */
static bool save(struct loop *l, struct error *e) {
  struct run *run = l->run;
  if (l->saved_update == run->update) return true;
  comm_enter(run->comm, COMM_SAVE, "checkpoint", run->update);
  double t0 = clock_seconds();
  bool good = run_fault(run, "save-error", run->update)
                  ? error_set(e, ERROR_CHECKPOINT, "save refused by the configured fault")
                  : true;
  good = comm_agree(run->comm, good, e) && state_save(l->state, run, e);
  if (!good) {
    if (run->rank == 0) log_warning("update %" PRId64 ": checkpoint not saved: %s", run->update, e->message);
    return false;
  }
  l->saved_update = run->update;
  json_t *o = json_object();
  record_text(o, "kind", "checkpoint");
  record_integer(o, "update", run->update);
  record_real(o, "seconds", clock_seconds() - t0);
  if (run->rank == 0) log_info("update %6" PRId64 "  saved in %.2f s", run->update, clock_seconds() - t0);
  return write_record(l, o, e);
}

static bool stopped(const struct run *run, struct error *e) {
  error_set(e, ERROR_PREEMPTED, "stopped on request after update %" PRId64 " of %" PRId64, run->update, run->config.train.updates);
  return error_hint(e, "start the same command again to go on");
}

static bool due(int64_t every, int64_t update) { return every > 0 && update % every == 0; }

/* One update: false when the loop must end (then *e tells why). */
static bool one_update(struct loop *l, struct error *e) {
  struct run *run = l->run;
  const struct config *c = &run->config;
  const int64_t update = run->update + 1;
  struct batch batch;
  struct update_signals signals;
  struct judgement judgement;
  struct step step = {.clip_coefficient = 1};

  timeline_open(&l->time);
  enter(l, PHASE_DATA);
  if (!load_batch(l, &batch, e)) return false;
  run_set_forward(run, update);
  if (!compute(l, &batch, &signals, e)) return false;
  bool good = optimizer_measure(run, &signals, e);
  if (!comm_agree(run->comm, good, e) || !gather_attention(run, &signals, e)) return false;
  divergence_judge(&run->divergence, c, &signals, &judgement);
  if (judgement.verdict == VERDICT_APPLY) good = optimizer_step(run, update, signals.grad_norm, &step, e);
  struct model_signals seen;
  if (!comm_agree(run->comm, good, e) || !gather_signals(run, &signals, &seen, e)) return false;
  timeline_close(&l->time);

  if (judgement.verdict != VERDICT_HALT) {
    run->update = update;
    run->samples += c->train.global_batch;
    run->tokens_read += c->train.global_batch * c->train.seq_len;
  }
  struct update_report report = {
      .update = update,
      .batch_targets = batch.targets,
      .batch_hash = batch.hash,
      .signals = &signals,
      .judgement = &judgement,
      .seen = &seen,
      .step = &step,
      .time = &l->time,
      .flops_per_token = l->flops_per_token,
      .peak_flops = l->peak_flops,
      .elapsed = clock_seconds() - l->started,
      .done = update - l->first_update + 1,
  };
  if (!write_record(l, report_record(run, &report), e)) return false;
  if (run->rank == 0) report_line(run, &report);
  if (judgement.verdict == VERDICT_HALT) {
    error_set(e, ERROR_DIVERGED, "update %" PRId64 ": %s", update, judgement.reason);
    return error_hint(e, "no parameter was changed by it; the last checkpoint stands");
  }
  return true;
}

bool loop_train(struct run *run, struct state *state, struct record_file *records, struct error *e) {
  const struct config *c = &run->config;
  struct loop l = {
      .run = run,
      .state = state,
      .records = records,
      .started = clock_seconds(),
      .first_update = run->update + 1,
      .saved_update = run->update > 0 ? run->update : -1,
      .peak_flops = report_peak_flops(run),
      .flops_per_token = model_config_flops(&c->model.shape, c->train.seq_len, true),
  };
  model_on_phase(run->model, on_model_phase, &l);

  /* Asked to stop during the start: the state is the checkpoint's, or nobody's work yet. */
  int64_t early = control_take();
  if (!comm_or_i64(run->comm, &early, 1, e)) return false;
  if (early & CONTROL_STOP) return stopped(run, e);

  while (run->update < c->train.updates) {
    if (!one_update(&l, e)) return false;

    const int64_t done = run->update;
    const bool last = done == c->train.updates;
    if ((due(c->validation.every, done) || last) && !validate(&l, e)) return false;

    int64_t requests = control_take();
    if (!comm_or_i64(run->comm, &requests, 1, e)) return false;
    requests |= early;
    early = 0;
    if (c->run.stop_after_update == done) requests |= CONTROL_STOP;
    const bool stop = (requests & CONTROL_STOP) && !last;
    const bool wanted = due(c->checkpoint.every, done) || (last && c->checkpoint.at_end) || requests != 0;
    if (wanted && !save(&l, e) && (stop || last || e->code != ERROR_CHECKPOINT)) return false;
    if (stop) return stopped(run, e);
  }
  comm_enter(run->comm, COMM_FINISH, "finish", run->update);
  return true;
}
