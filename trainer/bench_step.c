/* bench step: one update, its micro-batches and its optimizer step, by phase, for several routes. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/threads.h"
#include "comm/share.h"
#include "trainer/bench.h"
#include "trainer/machine.h"
#include "trainer/optimizer.h"
#include "trainer/plan.h"
#include "trainer/record.h"
#include "trainer/shards.h"
#include "trainer/timeline.h"

enum { ROUTES_MOST = 16 };

/* A run without data, world and records. */
struct subject {
  struct run run;
  struct timeline time;
  double *phase[PHASE_COUNT], *total; /* [repeat] */
  int64_t planned, used;              /* bytes of device memory of all routes; 0: the host's */
};

static void on_phase(void *context, enum model_phase phase) { timeline_enter(context, timeline_of_model(phase)); }

/* Any ids will do. */
static bool fill_batch(struct run *run, struct error *e) {
  const size_t bytes = (size_t)run->tokens * sizeof(int32_t);
  int32_t *ids = malloc(bytes);
  if (!ids) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (int64_t i = 0; i < run->tokens; i++) ids[i] = (int32_t)((uint64_t)i * 2654435761u % (uint64_t)run->config.model.shape.vocab_size);
  run->device->k->upload(run->device, run->inputs, ids, bytes);
  run->device->k->upload(run->device, run->targets, ids, bytes);
  const bool good = run->device->k->synchronize(run->device, e);
  free(ids);
  return good;
}

/* Micro-batches of the configuration's rank 0 in an update; of one rank where it does not say how many. */
static int64_t passes_of(const struct config *c) {
  if (c->train.accumulation > 0) return c->train.accumulation;
  return share_micro_batches_most(c->train.global_batch / c->train.local_batch, c->run.ranks > 0 ? c->run.ranks : 1);
}

static bool open_subject(const struct bench *b, const char *route, struct subject *s, struct error *e) {
  struct run *run = &s->run;
  run->config = *b->config;
  if (route && !route_named(route, (int)b->config->model.shape.n_layers, &run->config.route, e)) return false;
  const int threads = run->config.run.threads > 0 ? (int)run->config.run.threads : threads_available();
  run->local_batch = run->config.train.local_batch;
  run->accumulation = passes_of(&run->config);
  run->device = device_open(run->config.run.backend, threads, e);
  if (!run->device || !timeline_make(&s->time, run->device, run->accumulation, 0, e)) return false;
  run->arena = arena_measure();
  if (!run_lay_out(run, RUN_TRAIN, e)) return false;
  model_destroy(run->model);
  run->model = NULL;
  const size_t bytes = run->arena.used;
  run->memory = run->device->k->allocate(run->device, bytes, e);
  if (!run->memory) return error_context(e, "route %s", run->config.route.name);
  run->arena = arena_over(run->memory, bytes);
  if (!run_lay_out(run, RUN_TRAIN, e) || !run_take_host(run, RUN_TRAIN, e)) return false;
  if (!model_initialise(run->model, (uint64_t)run->config.run.seed, threads, e) || !fill_batch(run, e)) return false;
  model_refresh_weights(run->model);
  model_on_phase(run->model, on_phase, &s->time);
  for (int p = 0; p < PHASE_COUNT; p++) {
    s->phase[p] = calloc((size_t)b->a.repeat, sizeof *s->phase[p]);
    if (!s->phase[p]) return error_set(e, ERROR_SYSTEM, "out of memory");
  }
  s->total = calloc((size_t)b->a.repeat, sizeof *s->total);
  return s->total || error_set(e, ERROR_SYSTEM, "out of memory");
}

static void close_subject(struct subject *s) {
  struct run *run = &s->run;
  for (int p = 0; p < PHASE_COUNT; p++) free(s->phase[p]);
  free(s->total);
  timeline_release(&s->time);
  if (run->model) model_destroy(run->model);
  run_release_host(run);
  if (run->memory) run->device->k->release(run->device, run->memory);
  if (run->device) run->device->k->close(run->device);
}

/* `at` < 0: not counted. */
static bool update(struct subject *s, int at, struct error *e) {
  struct run *run = &s->run;
  struct micro_batch batch = {.inputs = run->inputs, .targets = run->targets, .update = (uint32_t)(run->update + 1), .seed = 1};
  struct update_signals signals = {0};
  struct step step;
  timeline_open(&s->time);
  model_reset_signals(run->model);
  model_clear_gradients(run->model);
  for (int64_t pass = 0; pass < run->accumulation; pass++) {
    batch.first_sample = (uint64_t)(pass * run->local_batch);
    model_forward_backward(run->model, &batch, 1.0f / (float)(run->tokens * run->accumulation), run->nll);
  }
  timeline_enter(&s->time, PHASE_OPTIMIZER);
  if (!optimizer_measure(run, &signals, e) || !optimizer_step(run, run->update + 1, signals.grad_norm, &step, e) || !shards_settle(run, e) ||
      !run->device->k->synchronize(run->device, e))
    return false;
  timeline_close(&s->time);
  run->update++;
  if (at < 0) return true;
  for (int p = 0; p < PHASE_COUNT; p++) s->phase[p][at] = s->time.seconds[p];
  s->total[at] = s->time.total;
  return true;
}

/* ---- beside what is possible ------------------------------------------------------ */

/* Of a GPU that is listed; NULL: no roof is known. */
struct roof {
  const struct machine *gpu;
  struct plan_time light;         /* an update of one rank's micro-batches, at the GPU's peaks */
  double flops_causal, flops_full; /* of an update, by both conventions */
};

static struct roof roof_of(const struct run *run) {
  struct config alone = run->config;
  struct roof r = {.gpu = machine_of_device(run->device)};
  const double tokens = (double)(run->tokens * run->accumulation);
  alone.train.global_batch = run->local_batch * run->accumulation;
  if (r.gpu && !plan_time(&alone, r.gpu, 1, &r.light)) r.gpu = NULL;
  r.flops_causal = tokens * model_config_flops(&alone.model.shape, alone.train.seq_len, true);
  r.flops_full = tokens * model_config_flops(&alone.model.shape, alone.train.seq_len, false);
  return r;
}

static void say_roof(const struct bench *b, const struct run *run) {
  const struct roof r = roof_of(run);
  if (!r.gpu) return;
  bench_title(b, "MFU: of %.5g TFLOP/s, the dense BF16 peak of %s in its data sheet. Half: the causal half of attention counted,", r.gpu->bf16_flops * 1e-12, r.gpu->title);
  bench_title(b, "  6 P + 6 L H d S a token, %.4g TFLOP an update; full: its square, 6 P + 12 L H d S, %.4g. Light: the update at", r.flops_causal * 1e-12, r.flops_full * 1e-12);
  bench_title(b, "  the roofline of `fp4d plan --gpus 1` (%.1f ms by route %s), over its time", r.light.total * 1e3, run->config.route.name);
}

/* Of all routes together: all of them are open. */
static bool say_memory(const struct bench *b, struct subject *s, int n, struct error *e) {
  int64_t planned = 0, used, total;
  struct device *d = s[0].run.device;
  if (!d->k->memory) return true;
  for (int i = 0; i < n; i++) planned += (int64_t)s[i].run.arena.used;
  planned += d->k->own_bytes;
  if (!d->k->memory(d, &used, &total, e)) return false;
  for (int i = 0; i < n; i++) s[i].planned = planned, s[i].used = used;
  bench_title(b, "device memory after updates: %.3f GB of %.3f are in use (by every process), %.3f planned, %+.1f%%", (double)used / 1e9,
              (double)total / 1e9, (double)planned / 1e9, 100 * ((double)used / (double)planned - 1));
  return true;
}

static void report(const struct bench *b, struct subject *s, double bf16) {
  static const enum phase shown[] = {PHASE_FORWARD, PHASE_HEAD, PHASE_BACKWARD, PHASE_OPTIMIZER};
  const int n = (int)b->a.repeat;
  const struct run *run = &s->run;
  const struct bench_seconds total = bench_median(s->total, n);
  double phase[4];
  json_t *o = json_object(), *seconds = json_object();
  for (int i = 0; i < 4; i++) {
    phase[i] = bench_median(s->phase[shown[i]], n).median;
    record_real(seconds, timeline_name(shown[i]), phase[i]);
  }
  record_text(o, "route", run->config.route.name);
  json_object_set_new(o, "phases", seconds);
  const double tokens = (double)(run->tokens * run->accumulation);
  record_integer(o, "micro_batches", run->accumulation);
  record_integer(o, "tokens", run->tokens * run->accumulation);
  record_real(o, "tokens_per_second", tokens / total.median);
  const struct roof r = roof_of(run);
  char ratio[32] = "", roof[64] = "";
  if (r.gpu) {
    const double half = r.flops_causal / r.gpu->bf16_flops / total.median, full = r.flops_full / r.gpu->bf16_flops / total.median;
    record_real(o, "mfu_causal", half);
    record_real(o, "mfu_full_square", full);
    record_real(o, "peak_flops", r.gpu->bf16_flops);
    record_real(o, "roofline_seconds", r.light.total);
    snprintf(roof, sizeof roof, "%6.1f%% %6.1f%% %6.1f%%  ", 100 * half, 100 * full, 100 * r.light.total / total.median);
  }
  if (s->used > 0) {
    record_integer(o, "device_memory_used_bytes", s->used);
    record_integer(o, "device_memory_planned_bytes", s->planned);
  }
  if (bf16 > 0) {
    record_real(o, "ratio_to_bf16", total.median / bf16);
    snprintf(ratio, sizeof ratio, "%6.3f", total.median / bf16);
  }
  bench_row(b, o, &total, "%-20s %10.2f %10.2f %10.2f %10.2f %10.2f  %10.0f  %s%s", run->config.route.name, phase[0] * 1e3, phase[1] * 1e3,
            phase[2] * 1e3, phase[3] * 1e3, total.median * 1e3, tokens / total.median, roof, ratio);
}

bool bench_step(struct bench *b, struct error *e) {
  static const char *const usual[] = {"bf16", "mxfp4-row-sr"};
  const struct argument_list *l = &b->a.routes;
  const bool cpu = strcmp(b->config->run.backend, "cpu") == 0;
  const int n = l->n ? l->n : cpu ? 2 : 1; /* GPUs execute plain operands */
  if (n > ROUTES_MOST) return error_set(e, ERROR_USAGE, "bench step: at most %d routes", ROUTES_MOST);
  struct subject *s = calloc((size_t)n, sizeof *s);
  if (!s) return error_set(e, ERROR_SYSTEM, "out of memory");
  bool good = true;
  for (int i = 0; good && i < n; i++) good = open_subject(b, l->n ? l->item[i] : usual[i], &s[i], e);

  /* Routes take turns, so that what the machine does meanwhile meets all of them. */
  for (int at = -1; good && at < (int)b->a.repeat; at++)
    for (int i = 0; good && i < n; i++) good = update(&s[i], at, e);

  if (good) {
    char text[256];
    const struct run *run = &s[0].run;
    double bf16 = 0;
    for (int i = 0; i < n; i++)
      if (strcmp(s[i].run.config.route.name, "bf16") == 0) bf16 = bench_median(s[i].total, (int)b->a.repeat).median;
    run->device->k->describe(run->device, text, sizeof text);
    bench_title(b, "backend %s: %s", run->device->k->backend, text);
    bench_title(b, "an update: %" PRId64 " micro-batch%s of %" PRId64 " x %" PRId64 " tokens and one optimizer step of %" PRId64 " parameters, milliseconds",
                run->accumulation, run->accumulation > 1 ? "es" : "", run->local_batch, run->config.train.seq_len,
                model_config_param_count(&run->config.model.shape));
    say_roof(b, run);
    good = say_memory(b, s, n, e);
    bench_title(b, "  %-20s %10s %10s %10s %10s %10s  %10s  %s%s", "route", "forward", "head", "backward", "optimizer", "total",
                "tokens/s", roof_of(run).gpu ? "   half    full   light  " : "", "/ bf16");
    for (int i = 0; i < n; i++) report(b, &s[i], bf16);
  }
  for (int i = 0; i < n; i++) close_subject(&s[i]);
  free(s);
  return good;
}
