#include "trainer/loop.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/exchange.h"
#include "trainer/choices.h"
#include "trainer/control.h"
#include "trainer/evaluate.h"
#include "trainer/optimizer.h"
#include "trainer/passes.h"
#include "trainer/report.h"
#include "trainer/saving.h"
#include "trainer/shards.h"

/* One rank's view of the loop. */
struct loop {
  struct run *run;
  struct saving saving;
  struct record_file *records; /* rank 0 */
  struct loader *loader;
  struct share *shares; /* [world] */
  struct passes passes;
  double started;        /* clock at the loop's start */
  int64_t first_update;  /* of this process */
  double peak_flops;     /* of one rank */
  double flops_per_token;
};

/* ---- loading ---------------------------------------------------------------- */

/* What a rank tells the others of its samples of an update: counts and the batch
 * hash, whose sums do not depend on order, and how long it waited for them. */
struct share {
  struct hash hash;
  int64_t targets[STREAM_SOURCES], tokens[STREAM_SOURCES]; /* by source */
  double waited;
};

/* An update's samples: this rank's, and the sums over all ranks. */
struct batch {
  const struct loader_batch *own;
  struct share all; /* waited: the longest */
  int64_t targets;
};

static void *allocate_samples(void *context, size_t bytes, struct error *e) {
  struct device *d = context;
  return d->k->allocate_host(d, bytes, e);
}

static void release_samples(void *context, void *p) {
  struct device *d = context;
  d->k->release_host(d, p);
}

/* The device copies micro-batches out of the loader's memory while nobody waits for it: an
 * update's samples stand until the next call of loader_next, and no update ends before the
 * device has been synchronized after its last micro-batch. */
static bool open_loader(struct loop *l, struct error *e) {
  const struct run *run = l->run;
  const struct config *c = &run->config;
  const struct loader_plan plan = {
      .order = &run->train_order,
      .first = (c->train.overfit_one_batch ? 0 : run->samples) + run->first_micro_batch * run->local_batch,
      .share = run->accumulation * run->local_batch,
      .stride = c->train.overfit_one_batch ? 0 : c->train.global_batch,
      .updates = c->train.updates - run->update,
      .documents = run->starts != NULL,
  };
  l->shares = calloc((size_t)run->world, sizeof *l->shares);
  bool good = l->shares != NULL || error_set(e, ERROR_SYSTEM, "out of memory");
  const struct loader_memory memory = {allocate_samples, release_samples, run->device};
  if (good) l->loader = loader_open(&plan, &memory, e);
  return comm_agree(run->comm, l->loader != NULL, e);
}

static bool load_batch(struct loop *l, struct batch *out, struct error *e) {
  struct run *run = l->run;
  struct share own = {.waited = 0};
  out->own = loader_next(l->loader, &own.waited, e);
  if (!comm_agree(run->comm, out->own != NULL, e)) return false;
  own.hash = out->own->hash;
  memcpy(own.targets, out->own->targets_of, sizeof own.targets);
  memcpy(own.tokens, out->own->tokens_of, sizeof own.tokens);
  if (!comm_gather_all(run->comm, l->shares, &own, sizeof own, e)) return false;

  out->all = (struct share){.waited = 0};
  out->targets = 0;
  for (int r = 0; r < run->world; r++) {
    const struct share *s = &l->shares[r];
    out->all.hash = hash_sum(out->all.hash, s->hash);
    if (s->waited > out->all.waited) out->all.waited = s->waited;
    for (int i = 0; i < STREAM_SOURCES; i++) {
      out->all.targets[i] += s->targets[i];
      out->all.tokens[i] += s->tokens[i];
      out->targets += s->targets[i];
    }
  }
  if (out->targets == 0) return error_set(e, ERROR_DATA, "update %" PRId64 " has no target token to learn from", run->update + 1);
  return true;
}

/* ---- what ranks saw --------------------------------------------------------- */

/* The mean over all targets, once the device has been waited for. */
static bool gather_loss(const struct run *run, const struct batch *batch, struct update_signals *s, struct error *e) {
  double loss = *run->host_loss;
  if (!comm_sum_f64(run->comm, &loss, 1, e)) return false;
  s->loss = loss / (double)batch->targets;
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

/* What the model saw. */
static bool gather_signals(const struct run *run, const struct update_signals *s, struct model_signals *seen, struct error *e) {
  *seen = *model_signals(run->model);
  memcpy(seen->attention, s->attention, sizeof seen->attention);
  return gather_counts(run, seen->counts, OPERAND_ROLE_COUNT, &seen->max_logit, e);
}

/* ---- between updates ---------------------------------------------------------- */

/* Copies of parameters may be under way since the update: before they are read. */
static bool settle(struct run *run, struct error *e) {
  comm_enter(run->comm, COMM_UPDATE, "gather weights", run->update);
  return shards_settle(run, e);
}

static bool validate(struct loop *l, struct error *e) {
  struct run *run = l->run;
  if (!run->validation) return true;
  if (!settle(run, e)) return false;
  struct evaluation v;
  int64_t samples = evaluate_samples(run, run->config.validation.samples);
  comm_enter(run->comm, COMM_SAVE, "validation", run->update);
  double t0 = clock_seconds();
  if (!evaluate_run(run, samples, NULL, &v, e)) return false;
  json_t *o = json_object();
  record_text(o, "kind", "validation");
  record_integer(o, "update", run->update);
  evaluate_record(run, &v, o);
  record_real(o, "seconds", clock_seconds() - t0);
  char text[64], sources[512];
  evaluate_text(&v, 4, text, sizeof text);
  evaluate_sources_text(run, &v, 4, sources, sizeof sources);
  if (run->rank == 0)
    log_info("update %6" PRId64 "  validation loss %s over %" PRId64 " sequence%s%s%s", run->update, text, v.samples,
             v.samples == 1 ? "" : "s", sources[0] ? ": " : "", sources);
  return record_write_together(l->records, run->comm, o, e);
}

static bool stopped(const struct run *run, struct error *e) {
  error_set(e, ERROR_PREEMPTED, "stopped on request after update %" PRId64 " of %" PRId64, run->update, run->config.train.updates);
  return error_hint(e, "start the same command again to go on");
}

static bool due(int64_t every, int64_t update) { return every > 0 && update % every == 0; }

/* One update: false when the loop must end (then *e tells why).  The host waits for the device twice: in
 * optimizer_measure, where it must know loss, norm and what was not finite before it judges, and in
 * optimizer_step, which ends an update that is applied: its record has what the optimizer saw, and the host may
 * write samples and statistics again. */
static bool one_update(struct loop *l, struct error *e) {
  struct run *run = l->run;
  const struct config *c = &run->config;
  const int64_t update = run->update + 1;
  struct batch batch;
  struct update_signals signals;
  struct judgement judgement;
  struct step step = {.clip_coefficient = 1};
  const double waited = comm_exchange_waited(run->comm);

  timeline_open(&l->passes.time);
  passes_enter(&l->passes, PHASE_DATA);
  if (!load_batch(l, &batch, e)) return false;
  run_set_forward(run, update);
  if (!passes_compute(&l->passes, batch.own, batch.targets, e)) return false;
  if (!optimizer_measure(run, &signals, e) || !gather_loss(run, &batch, &signals, e) || !gather_attention(run, &signals, e)) return false;
  divergence_judge(&run->divergence, c, &signals, &judgement);
  if (judgement.verdict == VERDICT_APPLY && !optimizer_step(run, update, signals.grad_norm, &step, e)) return false;
  struct model_signals seen;
  if (!gather_signals(run, &signals, &seen, e)) return false;
  timeline_close(&l->passes.time);

  if (judgement.verdict != VERDICT_HALT) {
    run->update = update;
    run->samples += c->train.global_batch;
    run->tokens_read += c->train.global_batch * c->train.seq_len;
    for (int s = 0; s < STREAM_SOURCES; s++) run->source_tokens[s] += batch.all.tokens[s];
  }
  struct update_report report = {
      .update = update,
      .batch_targets = batch.targets,
      .batch_hash = batch.all.hash,
      .source_targets = batch.all.targets,
      .exchange_wait = comm_exchange_waited(run->comm) - waited,
      .data_wait = batch.all.waited,
      .signals = &signals,
      .judgement = &judgement,
      .seen = &seen,
      .step = &step,
      .time = &l->passes.time,
      .flops_per_token = l->flops_per_token,
      .peak_flops = l->peak_flops,
      .elapsed = clock_seconds() - l->started,
      .done = update - l->first_update + 1,
  };
  json_t *record = report_record(run, &report);
  if (l->records) choices_compare(record_contractions(l->records), json_object_get(record, "contractions"));
  if (!record_write_together(l->records, run->comm, record, e)) return false;
  if (run->rank == 0) report_line(run, &report);
  if (judgement.verdict == VERDICT_HALT) {
    error_set(e, ERROR_DIVERGED, "update %" PRId64 ": %s", update, judgement.reason);
    return error_hint(e, "no parameter was changed by it; the last checkpoint stands");
  }
  return true;
}

/* After an update: what ranks were asked for, and what is under way. *stop: leave now. */
static bool between_updates(struct loop *l, int64_t asked, bool *stop, struct error *e) {
  struct run *run = l->run;
  const struct config *c = &run->config;
  const int64_t done = run->update;
  const bool last = done == c->train.updates;
  if ((due(c->validation.every, done) || last) && !validate(l, e)) return false;

  int64_t requests = control_take() | saving_busy(&l->saving);
  if (!comm_or_i64(run->comm, &requests, 1, e)) return false;
  if (!saving_poll(&l->saving, requests & CONTROL_SAVING, e) && !saving_tolerates(&l->saving, e)) return false;
  requests = (requests & ~CONTROL_SAVING) | asked;
  if (c->run.stop_after_update == done) requests |= CONTROL_STOP;
  *stop = (requests & CONTROL_STOP) && !last;
  if (!due(c->checkpoint.every, done) && !(last && c->checkpoint.at_end) && requests == 0) return true;
  const bool leaving = *stop || last;
  if (!settle(run, e)) return false;
  const bool good = saving_begin(&l->saving, e) && (!leaving || saving_finish(&l->saving, e));
  return good || (!leaving && saving_tolerates(&l->saving, e));
}

static bool train(struct loop *l, struct error *e) {
  struct run *run = l->run;
  /* Asked to stop during the start: the state is the checkpoint's, or nobody's work yet. */
  int64_t early = control_take();
  if (!comm_or_i64(run->comm, &early, 1, e)) return false;
  if (early & CONTROL_STOP) return stopped(run, e);

  while (run->update < run->config.train.updates) {
    bool stop = false;
    if (!one_update(l, e) || !between_updates(l, early, &stop, e)) return false;
    early = 0;
    if (stop) return stopped(run, e);
  }
  return true;
}

bool loop_train(struct run *run, struct state *state, struct record_file *records, struct error *e) {
  const struct config *c = &run->config;
  struct loop l = {
      .run = run,
      .records = records,
      .started = clock_seconds(),
      .first_update = run->update + 1,
      .peak_flops = report_peak_flops(run),
      .flops_per_token = model_config_flops(&c->model.shape, c->train.seq_len, true),
  };
  saving_open(&l.saving, run, state, records);
  const bool good = comm_agree(run->comm, passes_open(&l.passes, run, e), e) && open_loader(&l, e) && train(&l, e) && settle(run, e);
  passes_close(&l.passes);
  loader_close(l.loader);
  free(l.shares);
  /* What is under way where all ranks end alike comes to its end; it is reported there. */
  struct error late;
  if ((good || e->code == ERROR_DIVERGED) && !saving_finish(&l.saving, &late) && good && !saving_tolerates(&l.saving, &late)) {
    *e = late;
    return false;
  }
  if (good) comm_enter(run->comm, COMM_FINISH, "finish", run->update);
  return good;
}
