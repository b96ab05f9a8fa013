#include "trainer/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/threads.h"
#include "comm/exchange.h"
#include "comm/share.h"
#include "trainer/evaluate.h"
#include "trainer/indexing.h"
#include "trainer/shards.h"

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

/* What a device says of itself, without which one of its host's it is, or how many threads it has. */
static const char *kind_of(const char *description) {
  const char *at = description + strcspn(description, ":,");
  return *at ? at + strspn(at, ":, ") : description;
}

/* Ranks of one kind give one run's bits wherever each of them stands; those of several do not. */
static bool compare_devices(const struct run *run, struct error *e) {
  char own[512] = "", (*all)[sizeof own] = calloc((size_t)run->world, sizeof own);
  run->device->k->describe(run->device, own, sizeof own);
  bool good = comm_agree(run->comm, all != NULL || error_set(e, ERROR_SYSTEM, "out of memory"), e) &&
              comm_gather_all(run->comm, all, own, sizeof own, e);
  int first = 0, others = 0;
  for (int r = run->world - 1; good && r > 0; r--)
    if (strcmp(kind_of(all[r]), kind_of(all[0])) != 0) others++, first = r;
  if (others > 0 && run->rank == 0)
    log_warning("%d of %d ranks compute otherwise than rank 0, as rank %d: %s; rank 0: %s; the run's bits may depend on which rank is where", others, run->world,
                first, kind_of(all[first]), kind_of(all[0]));
  free(all);
  return good;
}

/* Global batch = the sum of ranks' local batch x micro-batches, checked, never rounded. */
static bool divide_batch(struct run *run, enum run_purpose purpose, struct error *e) {
  const struct config *c = &run->config;
  run->local_batch = c->train.local_batch;
  if (purpose != RUN_TRAIN) return true; /* no updates: evaluate.c shares what it reads */
  const int64_t n = c->train.global_batch / c->train.local_batch; /* exact, or the configuration is refused */
  if (n < run->world) {
    error_set(e, ERROR_CONFIG, "train.global_batch %" PRId64 " / train.local_batch %" PRId64 " makes %" PRId64 " micro-batch%s for %d ranks",
              c->train.global_batch, c->train.local_batch, n, n == 1 ? "" : "es", run->world);
    return error_hint(e, "change one of them, or the number of ranks: each computes one or more");
  }
  if (c->train.accumulation != 0 && (n % run->world != 0 || c->train.accumulation != n / run->world)) {
    error_set(e, ERROR_CONFIG,
              "train.accumulation %" PRId64 " does not fit: global_batch %" PRId64 " / (local_batch %" PRId64 " x %d ranks) = %.4g",
              c->train.accumulation, c->train.global_batch, c->train.local_batch, run->world, (double)n / run->world);
    return error_hint(e, "leave train.accumulation out to have it computed");
  }
  run->first_micro_batch = share_micro_batch(n, run->rank, run->world);
  run->accumulation = share_micro_batch(n, run->rank + 1, run->world) - run->first_micro_batch;
  if (run->rank == 0 && n % run->world != 0)
    log_warning("%" PRId64 " micro-batches an update over %d ranks: %" PRId64 " of them compute %" PRId64 ", the others %" PRId64
                " and wait (at most %.1f %% of what equal shares do)",
                n, run->world, n % run->world, run->accumulation, n / run->world, 100.0 * (double)n / (double)(run->accumulation * run->world));
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
      .gradient_dtype = purpose == RUN_TRAIN ? c->train.gradient_dtype : DTYPE_F32,
      .training = purpose == RUN_TRAIN,
      .rank = run->rank,
      .world = run->world,
  };
}

/* A prompt is one document. */
static bool within_documents(const struct run *run, enum run_purpose purpose) {
  return purpose != RUN_GENERATE && run->config.data.attention == DATA_ATTENTION_DOCUMENT;
}

bool run_lay_out(struct run *run, enum run_purpose purpose, struct error *e) {
  struct model_shape shape = shape_of(run, purpose);
  run->tokens = shape.batch * shape.seq_len;
  run->model = model_create(run->device, &run->arena, &run->config.model.shape, &run->config.route, &shape, e);
  if (!run->model || !model_set_parity(run->model, &run->parity, e)) return false;
  run->inputs = arena_take(&run->arena, ARENA_TRANSIENT, run->tokens, sizeof *run->inputs);
  run->targets = arena_take(&run->arena, ARENA_TRANSIENT, run->tokens, sizeof *run->targets);
  if (within_documents(run, purpose))
    run->starts = arena_take(&run->arena, ARENA_TRANSIENT, run->tokens, sizeof *run->starts);
  run->nll = arena_take(&run->arena, ARENA_TRANSIENT, run->tokens, sizeof *run->nll);
  run->loss = arena_take(&run->arena, ARENA_TRANSIENT, 1, sizeof *run->loss);
  if (purpose == RUN_GENERATE)
    run->logits = arena_take(&run->arena, ARENA_HEAD, run->config.model.shape.vocab_size, sizeof *run->logits);
  const int64_t n = model_param_number(run->model);
  run->gradient_measures = arena_take(&run->arena, ARENA_TRANSIENT, n, sizeof *run->gradient_measures);
  run->update_measures = arena_take(&run->arena, ARENA_TRANSIENT, n, sizeof *run->update_measures);
  run->staging_bytes = purpose == RUN_TRAIN ? comm_exchange_staging_bytes(run->device, run->world) : 0;
  run->staging = arena_take(&run->arena, ARENA_COMMUNICATION, run->staging_bytes, 1);
  return true;
}

static void lay_out_host(struct run *run, struct arena *a, enum run_purpose purpose) {
  const int64_t n = model_param_number(run->model);
  const enum arena_category c = ARENA_TRANSIENT;
  run->host_inputs = arena_take(a, c, run->tokens, sizeof *run->host_inputs);
  run->host_targets = arena_take(a, c, run->tokens, sizeof *run->host_targets);
  if (within_documents(run, purpose)) run->host_starts = arena_take(a, c, run->tokens, sizeof *run->host_starts);
  run->host_nll = arena_take(a, c, run->tokens, sizeof *run->host_nll);
  run->host_loss = arena_take(a, c, 1, sizeof *run->host_loss);
  run->host_gradient_measures = arena_take(a, c, n, sizeof *run->host_gradient_measures);
  run->host_update_measures = arena_take(a, c, n, sizeof *run->host_update_measures);
}

bool run_take_host(struct run *run, enum run_purpose purpose, struct error *e) {
  struct arena a = arena_measure();
  lay_out_host(run, &a, purpose);
  const size_t bytes = a.used;
  run->host = run->device->k->allocate_host(run->device, bytes, e);
  if (!run->host) return error_context(e, "host memory for a batch of %" PRId64 " tokens", run->tokens);
  a = arena_over(run->host, bytes);
  lay_out_host(run, &a, purpose);
  return true;
}

void run_release_host(struct run *run) {
  if (run->host) run->device->k->release_host(run->device, run->host);
  run->host = NULL;
}

/* Open MPI binds each of two ranks to a core unless it is told otherwise: an 8B model is then made for minutes. */
static void warn_if_bound(const struct run *run) {
  const int own = threads_available(), host = threads_of_host(), ranks = comm_local_world(run->comm);
  if (run->rank == 0 && ranks > 1 && own * ranks * 2 <= host)
    log_warning("each of this host's %d ranks may run on %d of its %d processors: mpirun --bind-to none, or --map-by numa, gives them more", ranks, own, host);
}

static bool open_model(struct run *run, enum run_purpose purpose, struct error *e) {
  run->threads = (int)run->config.run.threads;
  if (run->threads == 0) {
    run->threads = threads_available() / comm_local_world(run->comm);
    if (run->threads < 1) run->threads = 1;
    warn_if_bound(run);
  }
  run->device = device_open_rank(run->config.run.backend, run->threads, comm_local_rank(run->comm), e);
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
    return error_hint(e, "`fp4d plan` shows where it goes; a smaller train.local_batch, train.recompute: boundaries or all need less");
  }
  run->arena = arena_over(run->memory, bytes);
  if (!run_lay_out(run, purpose, e)) return false;
  if (run->arena.exhausted)
    return error_set(e, ERROR_INTERNAL, "the memory plan (%zu bytes) is smaller than the layout", bytes);
  return run_take_host(run, purpose, e);
}

static bool open_stream(struct run *run, const char *path, struct stream **stream, struct data_order *order,
                        struct error *e) {
  const struct config *c = &run->config;
  *stream = stream_open(path, (int32_t)c->model.shape.vocab_size, e);
  if (!*stream || !data_order_make(order, *stream, c->train.seq_len, (uint64_t)c->data.seed, e)) return false;
  order->boundary = c->data.boundary;
  return true;
}

static bool open_data(struct run *run, enum run_purpose purpose, struct error *e) {
  const struct config *c = &run->config;
  if (purpose == RUN_TRAIN && !open_stream(run, c->data.train, &run->train, &run->train_order, e)) return false;
  run->train_order.shuffle_samples = c->data.shuffle_samples;
  run->train_order.skip = c->data.skip;
  run->train_order.n_skips = (int)c->data.n_skips;
  if (purpose != RUN_GENERATE && c->data.validation[0] &&
      !open_stream(run, c->data.validation, &run->validation, &run->validation_order, e))
    return false;
  if (purpose == RUN_TRAIN && run->validation && !evaluate_has_samples(run, c->validation.samples, e)) return false;
  if (purpose == RUN_EVAL && !run->validation)
    return error_set(e, ERROR_CONFIG, "data.validation names no stream to evaluate on");
  return true;
}

bool run_open(struct run *run, const struct config *config, bool loaded, enum run_purpose purpose, struct error *e) {
  memset(run, 0, sizeof *run);
  struct error joining = {0};
  if (loaded) comm_start_limit(config->limits.start_s);
  run->comm = comm_open(loaded ? (int)config->run.ranks : 0, &joining);
  if (!run->comm) {
    if (loaded) *e = joining;
    return false;
  }
  run->rank = comm_rank(run->comm);
  run->world = comm_world(run->comm);
  struct comm_limits limits;
  config_default_limits(&limits);
  if (loaded) limits = config->limits;
  comm_enter(run->comm, purpose == RUN_TRAIN ? COMM_START : COMM_UNTIMED, "start", -1);
  const bool watched = run->world == 1 || comm_watch(run->comm, &limits, &joining);
  if (loaded && !watched) *e = joining;
  if (!comm_agree(run->comm, loaded && watched, e)) goto failed;

  run->config = *config;
  log_setup(run->rank, run->world, run->config.log.level);

  run->config_text = config_dump(&run->config);
  if (!comm_agree(run->comm, run->config_text != NULL || error_set(e, ERROR_SYSTEM, "out of memory"), e)) goto failed;
  run->config_hash = hash_bytes(run->config_text, strlen(run->config_text));
  if (!same_configuration(run, e)) goto failed;
  if (purpose == RUN_GENERATE && run->world > 1) {
    error_set(e, ERROR_USAGE, "this command runs in one process, %d were started", run->world);
    goto failed;
  }

  if (purpose == RUN_TRAIN && indexing_is_wanted(&run->config)) {
    comm_enter(run->comm, COMM_UNTIMED, "index", -1);
    if (!indexing_make_in_world(&run->config, run->comm, e)) goto failed;
    comm_enter(run->comm, COMM_START, "start", -1);
  }
  bool good = divide_batch(run, purpose, e) && open_data(run, purpose, e) && open_model(run, purpose, e);
  if (!comm_agree(run->comm, good, e) || !same_streams(run, e)) goto failed;
  if (run->world > 1 && !compare_devices(run, e)) goto failed;
  if (purpose == RUN_TRAIN && !shards_open(run, e)) goto failed;

  detector_open(&run->divergence.loss, run->config.divergence.window);
  detector_open(&run->divergence.grad_norm, run->config.divergence.window);
  return true;

failed:
  if (run->rank != 0) e->message[0] = e->hint[0] = 0; /* rank 0 speaks for all */
  return false;
}

static void close_run(struct run *run) {
  shards_close(run);
  if (run->model) model_destroy(run->model);
  run_release_host(run);
  if (run->memory) run->device->k->release(run->device, run->memory);
  if (run->device) run->device->k->close(run->device);
  if (run->train) stream_close(run->train);
  if (run->validation) stream_close(run->validation);
  free(run->config_text);
  if (run->comm) comm_close(run->comm);
  memset(run, 0, sizeof *run);
}

int run_leave(struct run *run, bool good, struct error *e) {
  if (good) {
    close_run(run);
    return ERROR_NONE;
  }
  /* A broken world is this rank's own news: the others may be waiting. */
  const bool alone = run->comm && run->world > 1 && (e->code == ERROR_COMMUNICATION || comm_is_broken(run->comm));
  if (e->message[0] && (run->rank == 0 || alone)) {
    if (e->code == ERROR_PREEMPTED)
      log_info("%s (%s)", e->message, e->hint);
    else
      log_failure(e);
  }
  if (alone) comm_abort(run->comm, e->code);
  close_run(run);
  return (int)e->code;
}

enum { PIECE = 1 << 20 };

/* Bytes [0, n) at `source` on the device of rank `owner` (-1: every rank has them), fed on all ranks. */
static bool feed(struct run *run, struct hash_state *state, char *piece, const char *source, size_t n, int owner, struct error *e) {
  const struct kernels *k = run->device->k;
  bool good = true;
  for (size_t at = 0; good && at < n; at += PIECE) {
    const size_t bytes = n - at < PIECE ? n - at : PIECE;
    if (owner < 0 || owner == run->rank) {
      k->download(run->device, piece, source + at, bytes);
      good = k->synchronize(run->device, e);
    }
    if (owner >= 0) good = comm_agree(run->comm, good, e) && comm_broadcast(run->comm, piece, (int64_t)bytes, owner, e);
    hash_feed(state, piece, bytes);
  }
  return good;
}

/* The master of a parameter: every rank has its rows. */
static bool feed_master(struct run *run, struct hash_state *state, char *piece, int i, struct error *e) {
  const struct param *p = model_param(run->model, i);
  const char *own = (const char *)(model_master(run->model) + model_param_share(run->model, i)->offset);
  bool good = true;
  for (int r = 0; good && r < run->world; r++) {
    const int64_t rows = share_row(p->rows, p->cols, r + 1, run->world) - share_row(p->rows, p->cols, r, run->world);
    good = feed(run, state, piece, own, (size_t)(rows * p->cols) * sizeof(float), r, e);
  }
  return good;
}

bool run_parameter_hash(struct run *run, struct hash *out, struct error *e) {
  char *piece = malloc(PIECE);
  struct hash_state *state = piece ? hash_open() : NULL;
  bool good = comm_agree(run->comm, state != NULL || error_set(e, ERROR_SYSTEM, "out of memory"), e);
  if (good && model_master(run->model))
    for (int i = 0; good && i < model_param_number(run->model); i++) good = feed_master(run, state, piece, i, e);
  else if (good)
    good = feed(run, state, piece, model_params(run->model),
                (size_t)model_param_elements(run->model) * dtype_bytes(run->config.train.param_dtype), -1, e);
  if (state) *out = hash_close(state);
  free(piece);
  return comm_agree(run->comm, good, e);
}

struct micro_batch run_upload(struct run *run, const int32_t *inputs, const int32_t *targets, const int32_t *starts) {
  const struct kernels *k = run->device->k;
  const size_t bytes = (size_t)run->tokens * sizeof *inputs;
  k->upload(run->device, run->inputs, inputs, bytes);
  k->upload(run->device, run->targets, targets, bytes);
  if (starts) k->upload(run->device, run->starts, starts, bytes);
  return (struct micro_batch){.inputs = run->inputs, .targets = run->targets, .starts = starts ? run->starts : NULL};
}

void run_documents_text(const struct config *c, char text[RUN_DOCUMENTS_TEXT]) {
  snprintf(text, RUN_DOCUMENTS_TEXT, "attention %s; a target that begins one %s",
           c->data.attention == DATA_ATTENTION_DOCUMENT ? "within each" : "across them, to the whole sample",
           c->data.boundary == DATA_BOUNDARY_MASK ? "does not count" : "counts as any");
}

/* Is `word` the second of the two?  NULL: no. */
static bool choose(const char *flag, const char *word, const char *first, const char *second, bool *is_second, struct error *e) {
  *is_second = word && strcmp(word, second) == 0;
  return !word || *is_second || strcmp(word, first) == 0 || error_set(e, ERROR_USAGE, "%s %s: %s or %s is wanted", flag, word, second, first);
}

bool run_set_parity(struct run *run, const struct parity_arguments *a, struct error *e) {
  bool before, fp32;
  const bool good = choose("--norm-cast", a->norm_cast, "after", "before", &before, e) &&
                    choose("--rope-angles", a->rope_angles, "exact", "fp32", &fp32, e);
  if (good) {
    run->parity.norm_cast = before ? NORM_CAST_BEFORE : NORM_CAST_AFTER;
    run->parity.rope_angles = fp32 ? ROPE_ANGLES_FP32 : ROPE_ANGLES_EXACT;
  }
  return comm_agree(run->comm, good && model_set_parity(run->model, &run->parity, e), e);
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
