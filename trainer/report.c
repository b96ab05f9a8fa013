#include "trainer/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/exchange.h"
#include "data/tokenizer.h"
#include "trainer/choices.h"
#include "trainer/plan.h"
#include "trainer/version.h"

/* A longer wait for samples, of more of the update, is said. */
#define SLOW_DATA_S 0.05
#define SLOW_DATA_SHARE 0.1

static const char *const verdict_name[] = {
    [VERDICT_APPLY] = "applied", [VERDICT_SKIP] = "skipped", [VERDICT_HALT] = "halted"};

static const char *const role_name[OPERAND_ROLE_COUNT] = {
    [FPROP_X] = "fprop_x",   [FPROP_W] = "fprop_w",   [DGRAD_DY] = "dgrad_dy",
    [DGRAD_W] = "dgrad_w",   [WGRAD_DY] = "wgrad_dy", [WGRAD_X] = "wgrad_x"};

/* Shares of what was quantised; amax where it is kept. */
static json_t *counts_object(const struct quantise_counts *n, bool saturates, bool amax) {
  json_t *counts = json_object();
  if (saturates) record_real(counts, "saturated", (double)n->saturated / (double)n->elements);
  record_real(counts, "underflowed", (double)n->underflowed / (double)n->elements);
  if (n->blocks > 0) record_real(counts, "zero_blocks", (double)n->zero_blocks / (double)n->blocks);
  if (amax) record_real(counts, "amax", (double)n->amax);
  return counts;
}

/* P's largest code is met by rule, not by saturation; only gradients have an amax. */
static json_t *attention_object(const struct quantise_counts counts[ATTENTION_TENSORS]) {
  json_t *o = json_object();
  for (int t = 0; t < ATTENTION_TENSORS; t++)
    if (counts[t].elements > 0)
      json_object_set_new(o, attention_tensor_name((enum attention_tensor)t),
                          counts_object(&counts[t], t != ATTENTION_P, t == ATTENTION_DO || t == ATTENTION_DS));
  return o;
}

static double tokens_per_second(const struct run *run, const struct update_report *r) {
  return (double)(run->config.train.global_batch * run->config.train.seq_len) / r->time->total;
}

/* Model FLOP/s of a rank over what it could reach: MFU against the stated peak. */
static double utilisation(const struct run *run, const struct update_report *r) {
  return tokens_per_second(run, r) / run->world * r->flops_per_token / r->peak_flops;
}

/* By source: tokens read since the run began, counted targets of this update. */
static json_t *sources_object(const struct run *run, const struct update_report *r) {
  const struct stream_info *info = stream_info(run->train);
  json_t *o = json_object();
  for (int s = 0; s < info->n_sources; s++) {
    json_t *one = json_object();
    record_integer(one, "tokens", run->source_tokens[s]);
    record_integer(one, "targets", r->source_targets[s]);
    json_object_set_new(o, info->source[s].name, one);
  }
  return o;
}

static int64_t device_itself(const struct run *run) {
  return run->device->k->own_bytes + comm_exchange_own_bytes(run->device, run->world);
}

/* After the first update, whose operations have been loaded and whose memory will not grow. */
static bool memory_seen(const struct run *run, const struct update_report *r, int64_t *planned, int64_t *used, int64_t *total) {
  const struct kernels *k = run->device->k;
  struct error unknown;
  *planned = (int64_t)run->arena.used + device_itself(run);
  return r->done == 1 && k->memory && k->memory(run->device, used, total, &unknown);
}

json_t *report_record(const struct run *run, const struct update_report *r) {
  json_t *o = json_object();
  record_text(o, "kind", "update");
  record_integer(o, "update", r->update);
  record_real(o, "loss", r->signals->loss);
  record_real(o, "grad_norm", r->signals->grad_norm);
  record_real(o, "clip_coefficient", r->step->clip_coefficient);
  record_real(o, "lr", r->step->lr);
  record_real(o, "update_to_weight", r->step->update_to_weight);
  record_integer(o, "samples", run->samples);
  record_integer(o, "tokens", run->tokens_read);
  record_integer(o, "targets", r->batch_targets);
  json_object_set_new(o, "sources", sources_object(run, r));
  record_hash(o, "batch_hash", r->batch_hash);
  record_text(o, "verdict", verdict_name[r->judgement->verdict]);
  if (r->judgement->reason[0]) record_text(o, "reason", r->judgement->reason);
  if (model_forward_kind(run->model) == FORWARD_PLAIN) record_text(o, "forward", dtype_name(run->config.route.activations));
  record_integer(o, "nonfinite", r->signals->nonfinite);
  record_real(o, "loss_z", r->judgement->loss_z);
  record_real(o, "grad_norm_z", r->judgement->grad_norm_z);

  const struct model_signals *seen = r->seen;
  record_real(o, "max_attention_logit", (double)seen->max_logit);
  json_t *quantised = json_object();
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    const struct quantise_counts *n = &seen->counts[role];
    if (n->elements > 0) json_object_set_new(quantised, role_name[role], counts_object(n, true, false));
  }
  json_object_set_new(o, "quantised", quantised);
  const struct attention_formats formats = route_attention(&run->config.route);
  if (!attention_plain(&formats)) json_object_set_new(o, "attention", attention_object(seen->attention));

  json_t *seconds = json_object();
  for (int p = 0; p < PHASE_COUNT; p++) record_real(seconds, timeline_name((enum phase)p), r->time->seconds[p]);
  record_real(seconds, "total", r->time->total);
  json_object_set_new(o, "seconds", seconds);
  record_real(o, "exchange_wait_ms", r->exchange_wait * 1e3);
  record_real(o, "data_wait_ms", r->data_wait * 1e3);
  record_real(o, "tokens_per_second", tokens_per_second(run, r));
  record_real(o, "tokens_per_second_per_rank", tokens_per_second(run, r) / run->world);
  record_real(o, "mfu", utilisation(run, r));
  int64_t planned, used, total;
  if (memory_seen(run, r, &planned, &used, &total)) {
    json_t *memory = json_object();
    record_integer(memory, "planned", planned);
    record_integer(memory, "used", used);
    record_integer(memory, "total", total);
    json_object_set_new(o, "device_memory_bytes", memory);
  }
  json_t *contractions = r->done == 1 ? choices_object(run->device) : NULL;
  if (contractions) json_object_set_new(o, "contractions", contractions);
  return o;
}

static void eta_text(double seconds, char *text, int size) {
  int64_t s = (int64_t)(seconds + 0.5);
  if (s >= 86400)
    snprintf(text, (size_t)size, "%" PRId64 "d%02" PRId64 "h", s / 86400, s / 3600 % 24);
  else if (s >= 3600)
    snprintf(text, (size_t)size, "%" PRId64 "h%02" PRId64 "m", s / 3600, s / 60 % 60);
  else
    snprintf(text, (size_t)size, "%" PRId64 "m%02" PRId64 "s", s / 60, s % 60);
}

/* A run's plan is kept within this share. */
#define PLAN_SHARE 0.03

static void say_memory(const struct run *run, const struct update_report *r) {
  int64_t planned, used, total;
  if (!memory_seen(run, r, &planned, &used, &total)) return;
  const double off = (double)used / (double)planned - 1;
  log_info("device memory: %.3f GB of %.3f are in use, %.3f planned (%+.1f%%)", (double)used / 1e9, (double)total / 1e9, (double)planned / 1e9, 100 * off);
  if (fabs(off) > PLAN_SHARE)
    log_warning("device memory in use differs from the plan by %.1f%%: what other processes hold on this GPU counts (nvidia-smi); where there are none, `fp4d plan` is wrong here",
                100 * fabs(off));
}

void report_line(const struct run *run, const struct update_report *r) {
  const struct config *c = &run->config;
  const bool odd = r->judgement->reason[0] != 0;
  if (odd)
    log_warning("update %" PRId64 " %s: %s", r->update, verdict_name[r->judgement->verdict], r->judgement->reason);
  say_memory(run, r);
  if (r->update % c->log.every != 0 && r->update != c->train.updates && r->done != 1) return;
  if (r->done > 1 && r->data_wait > SLOW_DATA_S && r->data_wait > SLOW_DATA_SHARE * r->time->total)
    log_warning("update %" PRId64 " stood still for %.0f of %.0f ms: samples are read slower than they are trained on", r->update,
                r->data_wait * 1e3, r->time->total * 1e3);
  char eta[32];
  eta_text(r->elapsed / (double)r->done * (double)(c->train.updates - r->update), eta, sizeof eta);
  log_info("update %6" PRId64 "/%" PRId64 "  loss %7.4f  norm %8.4f  lr %.2e  %8.0f tok/s  %5.1f%% of peak  wait %4.0f ms  %6.1f ms  ETA %s",
           r->update, c->train.updates, r->signals->loss, r->signals->grad_norm, r->step->lr, tokens_per_second(run, r),
           100 * utilisation(run, r), r->data_wait * 1e3, r->time->total * 1e3, eta);
}

static void describe_line(void *context, const char *text) {
  log_info("%s", text);
  json_array_append_new(context, json_string(text));
}

/* The run reads no text, but what generates or scores with it later does. */
static void warn_of_tokenizer(const struct run *run) {
  const char *const made = stream_info(run->train)->tokenizer, *const named = run->config.data.tokenizer;
  struct error e;
  if (!made[0] || strcmp(made, named) == 0) return;
  struct tokenizer *t = tokenizer_open(named, &e);
  if (!t)
    log_warning("%s was made with tokenizer %s, and data.tokenizer cannot be used: %s", run->config.data.train, made, e.message);
  else if (strcmp(made, tokenizer_info(t)->name) != 0)
    log_warning("%s was made with tokenizer %s, data.tokenizer is %s: set it to what made the stream, or generate and score read other text",
                run->config.data.train, made, tokenizer_info(t)->name);
  tokenizer_close(t);
}

json_t *report_start(struct run *run, bool resumed) {
  const struct config *c = &run->config;
  json_t *o = json_object(), *memory = json_object(), *executed = json_array();
  char text[HASH_TEXT], device[256], exchange[384], documents[RUN_DOCUMENTS_TEXT];
  record_text(o, "kind", "start");
  record_integer(o, "update", run->update);
  json_object_set_new(o, "resumed", json_boolean(resumed));
  record_real(o, "wall_time", clock_wall());
  record_text(o, "build", version_build());
  record_text(o, "name", c->run.name);
  record_text(o, "route", c->route.name);
  record_text(o, "config", run->config_text);
  record_hash(o, "config_hash", run->config_hash);
  record_hash(o, "init_hash", run->init_hash);
  record_hash(o, "train_digest", stream_info(run->train)->digest);
  if (run->validation) record_hash(o, "validation_digest", stream_info(run->validation)->digest);
  record_text(o, "topology", comm_topology(run->comm));
  comm_exchange_describe(run->comm, exchange, sizeof exchange);
  if (exchange[0]) record_text(o, "exchange", exchange);
  record_text(o, "backend", run->device->k->backend);
  run->device->k->describe(run->device, device, sizeof device);
  record_text(o, "device", device);
  record_integer(o, "world", run->world);
  record_integer(o, "local_batch", run->local_batch);
  record_integer(o, "accumulation", run->accumulation);
  record_integer(o, "parameters", model_config_param_count(&c->model.shape));
  record_real(o, "flops_per_token_causal", model_config_flops(&c->model.shape, c->train.seq_len, true));
  record_real(o, "flops_per_token_full_square", model_config_flops(&c->model.shape, c->train.seq_len, false));
  for (int i = 0; i < ARENA_CATEGORY_COUNT; i++)
    record_integer(memory, arena_category_name((enum arena_category)i), (int64_t)run->arena.by_category[i]);
  record_integer(memory, "total", (int64_t)run->arena.used);
  if (device_itself(run) > 0) record_integer(memory, "device_itself", device_itself(run));
  record_integer(memory, "checkpoint_staging", plan_checkpoint_bytes(c) / run->world);
  json_object_set_new(o, "memory_bytes", memory);

  if (run->rank == 0) {
    log_info("fp4d %s, run %s, route %s, %s", version_build(), c->run.name, c->route.name, comm_topology(run->comm));
    const int64_t least = c->train.global_batch / c->train.local_batch / run->world; /* micro-batches of a rank */
    char accumulated[48];
    snprintf(accumulated, sizeof accumulated, least < run->accumulation ? "%" PRId64 " to %" PRId64 : "%" PRId64, least, run->accumulation);
    log_info("%" PRId64 " parameters, %.2f GiB a rank, global batch %" PRId64 " = %" PRId64 " local x %s accumulated x %d ranks, sequence %" PRId64,
             model_config_param_count(&c->model.shape), (double)run->arena.used / (1 << 30), c->train.global_batch,
             run->local_batch, accumulated, run->world, c->train.seq_len);
    log_info("backend %s: %s", run->device->k->backend, device);
    if (exchange[0]) log_info("exchanges: %s", exchange);
    hash_text(run->init_hash, text);
    log_info("initial parameters %s", text);
    hash_text(stream_info(run->train)->digest, text);
    log_info("training stream    %s, %" PRId64 " tokens, %" PRId64 " samples an epoch and %" PRId64 " tokens over", text,
             stream_info(run->train)->tokens, data_order_epoch_samples(&run->train_order), data_order_dropped_tokens(&run->train_order));
    warn_of_tokenizer(run);
    run_documents_text(c, documents);
    log_info("documents: %s", documents);
    model_describe(run->model, describe_line, executed);
  }
  json_object_set_new(o, "executed", executed);
  return o;
}

double report_peak_flops(struct run *run) {
  const struct kernels *k = run->device->k;
  if (run->config.log.peak_flops > 0) return run->config.log.peak_flops;
  const struct machine *gpu = machine_of_device(run->device);
  if (gpu) return gpu->bf16_flops;

  /* The gradient buffer is free before the first update: operands and result
   * of a square contraction lie in it. */
  const int64_t bytes = model_param_elements(run->model) * (int64_t)dtype_bytes(model_gradient_dtype(run->model));
  int64_t n = 1024;
  while (n > 1 && 2 * n * n * (int64_t)sizeof(float) > bytes) n /= 2;
  float *memory = model_gradients(run->model);
  k->clear(run->device, memory, (size_t)(2 * n * n) * sizeof(float));
  struct matrix a = {memory, DTYPE_BF16, n, n}, out = {memory + n * n, DTYPE_F32, n, n};
  struct operand row = operand_of_matrix(&a, VIEW_ROW);
  double best = 0;
  struct error ignored;
  for (int i = 0; i < 5; i++) {
    double t0 = clock_seconds();
    k->contract(run->device, &out, &row, &row, NULL);
    k->synchronize(run->device, &ignored);
    double rate = 2.0 * (double)(n * n * n) / (clock_seconds() - t0);
    if (rate > best) best = rate;
  }
  return best;
}
