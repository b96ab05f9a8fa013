#include "trainer/run.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/log.h"
#include "base/threads.h"
#include "trainer/indexing.h"

static bool same_configuration(struct run *run, struct error *e) {
  struct hash first = run->config_hash;
  if (!comm_broadcast(run->comm, &first, sizeof first, 0, e)) return false;
  bool same = hash_equal(first, run->config_hash);
  if (!same) {
    error_set(e, ERROR_CONFIG, "this rank's configuration differs from rank 0's");
    error_hint(e, "every rank must read the same file and the same --set arguments");
  }
  return comm_agree(run->comm, same, e);
}

/* Hosts may have copies of a stream of their own: then of the same content. */
static bool same_streams(struct run *run, struct error *e) {
  const struct stream *const streams[2] = {run->train, run->validation};
  struct hash own[2] = {{0, 0}, {0, 0}}, first[2];
  for (int i = 0; i < 2; i++)
    if (streams[i]) own[i] = stream_info(streams[i])->digest;
  memcpy(first, own, sizeof first);
  if (!comm_broadcast(run->comm, first, sizeof first, 0, e)) return false;
  bool same = true;
  for (int i = 0; same && i < 2; i++) {
    if (hash_equal(first[i], own[i])) continue;
    char wanted[HASH_TEXT], have[HASH_TEXT];
    hash_text(first[i], wanted);
    hash_text(own[i], have);
    same = error_set(e, ERROR_DATA, "%s is not what rank 0 reads: digest %s, there %s", stream_path(streams[i]), have, wanted);
    error_hint(e, "copy the stream anew to the host that has an old one");
  }
  return comm_agree(run->comm, same, e);
}

/* Global batch = local batch x accumulation x ranks, checked, never rounded. */
static bool divide_batch(struct run *run, struct error *e) {
  const struct config *c = &run->config;
  int64_t per_pass, accumulation;
  if (!checked_mul(c->train.local_batch, run->world, &per_pass) ||
      !checked_div_exact(c->train.global_batch, per_pass, &accumulation)) {
    error_set(e, ERROR_CONFIG,
              "train.global_batch %" PRId64 " is not a multiple of train.local_batch %" PRId64 " x %d ranks",
              c->train.global_batch, c->train.local_batch, run->world);
    return error_hint(e, "change one of them, or the number of ranks");
  }
  if (c->train.accumulation != 0 && c->train.accumulation != accumulation) {
    error_set(e, ERROR_CONFIG,
              "train.accumulation %" PRId64 " does not fit: global_batch %" PRId64 " / (local_batch %" PRId64
              " x %d ranks) = %" PRId64,
              c->train.accumulation, c->train.global_batch, c->train.local_batch, run->world, accumulation);
    return error_hint(e, "leave train.accumulation out to have it computed");
  }
  run->local_batch = c->train.local_batch;
  run->accumulation = accumulation;
  return true;
}

static struct model_shape shape_of(const struct run *run, enum run_purpose purpose) {
  const struct config *c = &run->config;
  return (struct model_shape){
      .batch = c->train.local_batch,
      .seq_len = c->train.seq_len,
      .recompute = c->train.recompute,
      .recompute_every = (int)c->train.recompute_every,
      .head_chunk = c->train.head_chunk,
      .param_dtype = c->train.param_dtype,
      .master = purpose == RUN_TRAIN && c->train.master,
      .training = purpose == RUN_TRAIN,
  };
}

bool run_lay_out(struct run *run, enum run_purpose purpose, struct error *e) {
  struct model_shape shape = shape_of(run, purpose);
  run->tokens = shape.batch * shape.seq_len;
  run->model = model_create(run->device, &run->arena, &run->config.model.shape, &run->config.route, &shape, e);
  if (!run->model) return false;
  run->inputs = arena_take(&run->arena, ARENA_TRANSIENT, run->tokens, sizeof *run->inputs);
  run->targets = arena_take(&run->arena, ARENA_TRANSIENT, run->tokens, sizeof *run->targets);
  run->nll = arena_take(&run->arena, ARENA_TRANSIENT, run->tokens, sizeof *run->nll);
  if (purpose == RUN_GENERATE)
    run->logits = arena_take(&run->arena, ARENA_HEAD, run->config.model.shape.vocab_size, sizeof *run->logits);
  const int64_t n = model_param_number(run->model);
  run->gradient_measures = arena_take(&run->arena, ARENA_TRANSIENT, n, sizeof *run->gradient_measures);
  run->update_measures = arena_take(&run->arena, ARENA_TRANSIENT, n, sizeof *run->update_measures);
  return true;
}

static bool open_model(struct run *run, enum run_purpose purpose, struct error *e) {
  run->threads = (int)run->config.run.threads;
  if (run->threads == 0) {
    run->threads = threads_available() / comm_local_world(run->comm);
    if (run->threads < 1) run->threads = 1;
  }
  run->device = device_open(run->config.run.backend, run->threads, e);
  if (!run->device) return false;

  run->arena = arena_measure();
  if (!run_lay_out(run, purpose, e)) return false;
  model_destroy(run->model);
  run->model = NULL;
  size_t bytes = run->arena.used;
  if (run->arena.exhausted) return error_set(e, ERROR_CONFIG, "the model does not fit any address space");
  run->memory = run->device->k->allocate(run->device, bytes, e);
  if (!run->memory) {
    error_context(e, "the run needs %.2f GiB on this rank", (double)bytes / (1 << 30));
    return error_hint(e, "`fp4d plan` shows where it goes; a smaller train.local_batch or train.recompute: all needs less");
  }
  run->arena = arena_over(run->memory, bytes);
  if (!run_lay_out(run, purpose, e)) return false;
  if (run->arena.exhausted)
    return error_set(e, ERROR_INTERNAL, "the memory plan (%zu bytes) is smaller than the layout", bytes);

  size_t host_tokens = (size_t)(run->accumulation * run->tokens);
  run->host_inputs = malloc(host_tokens * sizeof *run->host_inputs);
  run->host_targets = malloc(host_tokens * sizeof *run->host_targets);
  run->host_nll = malloc((size_t)run->tokens * sizeof *run->host_nll);
  if (!run->host_inputs || !run->host_targets || !run->host_nll)
    return error_set(e, ERROR_SYSTEM, "out of memory for a batch of %zu tokens", host_tokens);
  return true;
}

static bool open_stream(struct run *run, const char *path, struct stream **stream, struct data_order *order,
                        struct error *e) {
  *stream = stream_open(path, (int32_t)run->config.model.shape.vocab_size, e);
  return *stream && data_order_make(order, *stream, run->config.train.seq_len, (uint64_t)run->config.data.seed, e);
}

static bool open_data(struct run *run, enum run_purpose purpose, struct error *e) {
  const struct config *c = &run->config;
  if (purpose == RUN_TRAIN && !open_stream(run, c->data.train, &run->train, &run->train_order, e)) return false;
  if (purpose != RUN_GENERATE && c->data.validation[0] &&
      !open_stream(run, c->data.validation, &run->validation, &run->validation_order, e))
    return false;
  if (purpose == RUN_TRAIN && run->validation && !run_has_validation_samples(run, c->validation.samples, e)) return false;
  if (purpose == RUN_EVAL && !run->validation)
    return error_set(e, ERROR_CONFIG, "data.validation names no stream to evaluate on");
  return true;
}

bool run_open(struct run *run, const struct config *config, bool loaded, enum run_purpose purpose, struct error *e) {
  memset(run, 0, sizeof *run);
  struct error joining = {0};
  run->comm = comm_open(loaded ? (int)config->run.ranks : 0, &joining);
  if (!run->comm) {
    if (loaded) *e = joining;
    return false;
  }
  run->rank = comm_rank(run->comm);
  run->world = comm_world(run->comm);
  if (!comm_agree(run->comm, loaded, e)) goto failed;

  run->config = *config;
  static const char *const levels[] = {"error", "warning", "info", "debug"};
  enum log_level level = LOG_INFO;
  for (int i = 0; i < 4; i++)
    if (strcmp(run->config.log.level, levels[i]) == 0) level = (enum log_level)i;
  log_setup(run->rank, run->world, level);

  run->config_text = config_dump(&run->config);
  if (!comm_agree(run->comm, run->config_text != NULL || error_set(e, ERROR_SYSTEM, "out of memory"), e)) goto failed;
  run->config_hash = hash_bytes(run->config_text, strlen(run->config_text));
  if (!same_configuration(run, e)) goto failed;
  if (purpose == RUN_GENERATE && run->world > 1) {
    error_set(e, ERROR_USAGE, "generate runs in one process, %d were started", run->world);
    goto failed;
  }

  if (purpose == RUN_TRAIN && indexing_is_wanted(&run->config) && !indexing_make_in_world(&run->config, run->comm, e)) goto failed;
  bool good = divide_batch(run, e) && open_data(run, purpose, e) && open_model(run, purpose, e);
  if (!comm_agree(run->comm, good, e) || !same_streams(run, e)) goto failed;

  detector_open(&run->divergence.loss, run->config.divergence.window);
  detector_open(&run->divergence.grad_norm, run->config.divergence.window);
  return true;

failed:
  if (run->rank != 0) e->message[0] = e->hint[0] = 0; /* rank 0 speaks for all */
  return false;
}

int run_leave(struct run *run, bool good, struct error *e) {
  if (good) {
    run_close(run);
    return ERROR_NONE;
  }
  /* A broken connection is this rank's own news: the others may be waiting. */
  const bool alone = e->code == ERROR_COMMUNICATION && run->comm && run->world > 1;
  if (e->message[0] && (run->rank == 0 || alone)) {
    if (e->code == ERROR_PREEMPTED)
      log_info("%s (%s)", e->message, e->hint);
    else
      log_failure(e);
  }
  if (alone) comm_abort(run->comm, e->code);
  run_close(run);
  return (int)e->code;
}

void run_close(struct run *run) {
  if (run->model) model_destroy(run->model);
  if (run->memory) run->device->k->release(run->device, run->memory);
  if (run->device) run->device->k->close(run->device);
  if (run->train) stream_close(run->train);
  if (run->validation) stream_close(run->validation);
  free(run->host_inputs);
  free(run->host_targets);
  free(run->host_nll);
  free(run->config_text);
  if (run->comm) comm_close(run->comm);
  memset(run, 0, sizeof *run);
}

bool run_parameter_hash(struct run *run, struct hash *out, struct error *e) {
  const void *source = model_master(run->model);
  size_t size = sizeof(float);
  if (!source) {
    source = model_params(run->model);
    size = dtype_bytes(run->config.train.param_dtype);
  }
  enum { PIECE = 1 << 20 };
  char *piece = malloc(PIECE);
  struct hash_state *state = piece ? hash_open() : NULL;
  if (!state) {
    free(piece);
    return error_set(e, ERROR_SYSTEM, "out of memory");
  }
  size_t bytes = (size_t)model_param_elements(run->model) * size;
  bool good = true;
  for (size_t at = 0; good && at < bytes; at += PIECE) {
    size_t n = bytes - at < PIECE ? bytes - at : PIECE;
    run->device->k->download(run->device, piece, (const char *)source + at, n);
    good = run->device->k->synchronize(run->device, e);
    hash_feed(state, piece, n);
  }
  *out = hash_close(state);
  free(piece);
  return good;
}

bool run_has_validation_samples(const struct run *run, int64_t wanted, struct error *e) {
  const int64_t have = data_order_epoch_samples(&run->validation_order);
  if (wanted <= have) return true;
  error_set(e, ERROR_DATA, "%s holds %" PRId64 " samples, %" PRId64 " are asked for", stream_path(run->validation), have, wanted);
  return error_hint(e, "0 takes all there are");
}

int64_t run_validation_samples(const struct run *run, int64_t wanted) {
  return wanted == 0 ? data_order_epoch_samples(&run->validation_order) : wanted;
}

bool run_evaluate(struct run *run, int64_t samples, double *sequence_nll, struct evaluation *out, struct error *e) {
  const int64_t seq = run->config.train.seq_len, batch = run->local_batch;
  /* [0, samples): sums of NLL; [samples, 2 samples): counted targets. */
  double *sums = calloc((size_t)samples * 2, sizeof *sums);
  bool good = sums != NULL || error_set(e, ERROR_SYSTEM, "out of memory for %" PRId64 " sequences", samples);

  const int64_t share = ceil_div(samples, run->world);
  const int64_t first = share * run->rank < samples ? share * run->rank : samples;
  const int64_t last = first + share < samples ? first + share : samples;
  for (int64_t at = first; good && at < last; at += batch) {
    const int64_t n = last - at < batch ? last - at : batch;
    for (int64_t i = 0; good && i < n; i++)
      good = data_sample(&run->validation_order, at + i, run->host_inputs + i * seq, run->host_targets + i * seq, e);
    for (int64_t i = n * seq; i < batch * seq; i++) { /* a short last batch is filled with uncounted tokens */
      run->host_inputs[i] = 0;
      run->host_targets[i] = -1;
    }
    if (!good) break;
    const struct kernels *k = run->device->k;
    size_t bytes = (size_t)run->tokens * sizeof(int32_t);
    k->upload(run->device, run->inputs, run->host_inputs, bytes);
    k->upload(run->device, run->targets, run->host_targets, bytes);
    struct micro_batch b = {.inputs = run->inputs, .targets = run->targets};
    model_forward(run->model, &b, run->nll);
    k->download(run->device, run->host_nll, run->nll, bytes);
    good = k->synchronize(run->device, e);
    for (int64_t i = 0; i < n; i++)
      for (int64_t t = 0; t < seq; t++) {
        if (run->host_targets[i * seq + t] < 0) continue;
        sums[at + i] += (double)run->host_nll[i * seq + t];
        sums[samples + at + i] += 1;
      }
  }
  good = comm_agree(run->comm, good, e) && comm_sum_f64(run->comm, sums, samples * 2, e);
  if (good) {
    double total = 0, targets = 0, mean = 0, square = 0;
    for (int64_t i = 0; i < samples; i++) {
      total += sums[i];
      targets += sums[samples + i];
      mean += sums[i] / sums[samples + i];
      if (sequence_nll) sequence_nll[i] = sums[i] / sums[samples + i];
    }
    mean /= (double)samples;
    for (int64_t i = 0; i < samples; i++) {
      double d = sums[i] / sums[samples + i] - mean;
      square += d * d;
    }
    out->samples = samples;
    out->targets = (int64_t)targets;
    out->mean = total / targets;
    out->standard_error = samples > 1 ? sqrt(square / (double)(samples - 1) / (double)samples) : NAN;
  }
  free(sums);
  return good;
}

void run_evaluation_text(const struct evaluation *v, int digits, char *text, int size) {
  if (v->samples > 1)
    snprintf(text, (size_t)size, "%.*f +- %.*f", digits, v->mean, digits, v->standard_error);
  else
    snprintf(text, (size_t)size, "%.*f", digits, v->mean);
}

void run_set_forward(struct run *run, int64_t update) {
  const bool tail = route_in_forward_tail(&run->config.route, update, run->config.train.updates);
  model_set_forward(run->model, tail ? FORWARD_PLAIN : FORWARD_ROUTE);
}

bool run_fault(const struct run *run, const char *kind, int64_t update) {
  char name[32];
  long long at;
  int rank = 0, n = sscanf(run->config.fault, "%31[a-z-]@%lld/%d", name, &at, &rank);
  return n >= 2 && strcmp(name, kind) == 0 && at == update && rank == run->rank;
}
