/* bench step: one micro-batch and one optimizer step by phase, for several routes. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/threads.h"
#include "trainer/bench.h"
#include "trainer/optimizer.h"
#include "trainer/record.h"
#include "trainer/shards.h"
#include "trainer/timeline.h"

enum { ROUTES_MOST = 16 };

/* A run without data, world and records. */
struct subject {
  struct run run;
  struct timeline time;
  double *phase[PHASE_COUNT], *total; /* [repeat] */
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

static bool open_subject(const struct bench *b, const char *route, struct subject *s, struct error *e) {
  struct run *run = &s->run;
  run->config = *b->config;
  if (route && !route_named(route, (int)b->config->model.shape.n_layers, &run->config.route, e)) return false;
  const int threads = run->config.run.threads > 0 ? (int)run->config.run.threads : threads_available();
  run->device = device_open(run->config.run.backend, threads, e);
  if (!run->device) return false;
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
  if (run->model) model_destroy(run->model);
  run_release_host(run);
  if (run->memory) run->device->k->release(run->device, run->memory);
  if (run->device) run->device->k->close(run->device);
}

/* One update of one micro-batch; `at` < 0: not counted. */
static bool update(struct subject *s, int at, struct error *e) {
  struct run *run = &s->run;
  const struct kernels *k = run->device->k;
  const struct micro_batch batch = {.inputs = run->inputs, .targets = run->targets, .update = (uint32_t)(run->update + 1), .seed = 1};
  struct update_signals signals = {0};
  struct step step;
  timeline_open(&s->time);
  timeline_enter(&s->time, PHASE_FORWARD);
  model_reset_signals(run->model);
  model_clear_gradients(run->model);
  model_forward_backward(run->model, &batch, 1.0f / (float)run->tokens, run->nll);
  if (!k->synchronize(run->device, e)) return false;
  timeline_enter(&s->time, PHASE_OPTIMIZER);
  if (!optimizer_measure(run, &signals, e) || !optimizer_step(run, run->update + 1, signals.grad_norm, &step, e) || !shards_settle(run, e) ||
      !k->synchronize(run->device, e))
    return false;
  timeline_close(&s->time);
  run->update++;
  if (at < 0) return true;
  for (int p = 0; p < PHASE_COUNT; p++) s->phase[p][at] = s->time.seconds[p];
  s->total[at] = s->time.total;
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
  record_integer(o, "tokens", run->tokens);
  record_real(o, "tokens_per_second", (double)run->tokens / total.median);
  char ratio[32] = "";
  if (bf16 > 0) {
    record_real(o, "ratio_to_bf16", total.median / bf16);
    snprintf(ratio, sizeof ratio, "%6.3f", total.median / bf16);
  }
  bench_row(b, o, &total, "%-20s %10.2f %10.2f %10.2f %10.2f %10.2f  %10.0f  %s", run->config.route.name, phase[0] * 1e3, phase[1] * 1e3,
            phase[2] * 1e3, phase[3] * 1e3, total.median * 1e3, (double)run->tokens / total.median, ratio);
}

bool bench_step(struct bench *b, struct error *e) {
  static const char *const usual[] = {"bf16", "mxfp4-row-sr"};
  const struct argument_list *l = &b->a.routes;
  const int n = l->n ? l->n : 2;
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
    bench_title(b, "one micro-batch of %" PRId64 " x %" PRId64 " tokens and one optimizer step of %" PRId64 " parameters, milliseconds",
                run->config.train.local_batch, run->config.train.seq_len, model_config_param_count(&run->config.model.shape));
    bench_title(b, "  %-20s %10s %10s %10s %10s %10s  %10s  %s", "route", "forward", "head", "backward", "optimizer", "total",
                "tokens/s", "/ bf16");
    for (int i = 0; i < n; i++) report(b, &s[i], bf16);
  }
  for (int i = 0; i < n; i++) close_subject(&s[i]);
  free(s);
  return good;
}
