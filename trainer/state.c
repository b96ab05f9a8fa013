/* Tensors of a run in and out of a checkpoint. */
#include "trainer/state_parts.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/log.h"
#include "checkpoints/chunk.h"
#include "kernels/formats.h"
#include "trainer/changes.h"
#include "trainer/match.h"

enum { SLICE_KINDS = 4 };

/* A kind of tensor: its prefix in the file and where it is: in a flat buffer, or
 * the rows that this rank owns alone. */
struct tensor_kind {
  const char *prefix;
  enum dtype dtype;
  char *buffer; /* device */
  bool own;
};

/* The kinds that a checkpoint of this run holds.  Where an FP32 master exists
 * the BF16 parameters are its rounding and are not stored. */
static int tensor_kinds(const struct run *run, struct tensor_kind kinds[SLICE_KINDS]) {
  struct model *m = run->model;
  int n = 0;
  if (model_master(m))
    kinds[n++] = (struct tensor_kind){"master", DTYPE_F32, (char *)model_master(m), true};
  else
    kinds[n++] = (struct tensor_kind){"param", run->config.train.param_dtype, model_params(m), false};
  kinds[n++] = (struct tensor_kind){"adam_m", DTYPE_F32, (char *)model_adam_m(m), true};
  kinds[n++] = (struct tensor_kind){"adam_v", DTYPE_F32, (char *)model_adam_v(m), true};
  return n;
}

static struct tensor_slice slice_of(const struct param *p, const char *prefix, enum dtype dtype) {
  struct tensor_slice s = {.dtype = dtype, .global_rows = p->rows, .cols = p->cols, .rows = p->rows};
  snprintf(s.name, sizeof s.name, "%s/%s", prefix, p->name);
  return s;
}

static struct tensor_slice own_slice(const struct param *p, const struct param_share *own, const char *prefix, enum dtype dtype) {
  struct tensor_slice s = slice_of(p, prefix, dtype);
  s.first_row = own->first_row;
  s.rows = own->rows;
  return s;
}

static size_t slice_bytes(const struct tensor_slice *s) {
  return (size_t)(s->rows * s->cols) * dtype_bytes(s->dtype);
}

/* ---- saving --------------------------------------------------------------- */

struct state {
  struct tensor_slice *slices;
  const char **device; /* where slice i comes from */
  int n;
  char *staging;
  struct device *owner;    /* of staging */
  struct threads *threads; /* that compress */
  struct checkpoint_saver *saver;
};

/* Threads that compress: checkpoint.threads, or half of those that compute. */
static int compressors(const struct config *c, int threads) {
  enum { MOST = 8 };
  if (c->checkpoint.compression != CHECKPOINT_ZSTD) return 1;
  if (c->checkpoint.threads > 0) return (int)c->checkpoint.threads;
  return threads < 2 ? 1 : threads / 2 < MOST ? threads / 2 : MOST;
}

int64_t state_compressing_bytes(const struct config *c, int threads) {
  if (c->checkpoint.compression != CHECKPOINT_ZSTD) return 0;
  return compressors(c, threads) * (int64_t)chunk_coder_bytes(CHUNK_BYTES);
}

static bool open_saver(struct state *s, struct run *run, struct error *e) {
  const struct config *c = &run->config;
  char folder[1024];
  s->threads = threads_create(compressors(c, run->threads), e);
  if (!s->threads) return false;
  const struct checkpoint_policy policy = {(int)c->checkpoint.keep, c->checkpoint.keep_every, c->checkpoint.compression, s->threads};
  state_folder(c->run.folder, folder, sizeof folder);
  s->saver = checkpoint_saver_open(run->comm, folder, &policy, c->checkpoint.async, e);
  return s->saver != NULL;
}

enum { TOUCHED = 16 << 20 };

struct touching {
  char *bytes;
  int64_t n;
};

static void touch_piece(void *context, int64_t index, int worker) {
  (void)worker;
  const struct touching *t = context;
  const int64_t first = index * TOUCHED, left = t->n - first;
  memset(t->bytes + first, 0, (size_t)(left < TOUCHED ? left : TOUCHED));
}

/* The system finds pages when they are first written: at the start, not while a first save holds training up. */
static bool touch(char *bytes, size_t n, int threads, struct error *e) {
  struct threads *t = threads_create(threads, e);
  if (!t) return false;
  threads_run(t, ceil_div((int64_t)n, TOUCHED), touch_piece, &(struct touching){bytes, (int64_t)n});
  threads_destroy(t);
  return true;
}

struct state *state_open(struct run *run, struct error *e) {
  struct tensor_kind kinds[SLICE_KINDS];
  const int n_kinds = tensor_kinds(run, kinds), n_params = model_param_number(run->model);
  struct state *s = calloc(1, sizeof *s);
  if (s) s->slices = calloc((size_t)(n_kinds * n_params), sizeof *s->slices);
  if (s) s->device = calloc((size_t)(n_kinds * n_params), sizeof *s->device);
  if (!s || !s->slices || !s->device) goto failed;

  size_t bytes = 0;
  for (int k = 0; k < n_kinds; k++)
    for (int i = 0; i < n_params; i++) {
      const struct param *p = model_param(run->model, i);
      const struct param_share *own = model_param_share(run->model, i);
      const struct tensor_slice slice = own_slice(p, own, kinds[k].prefix, kinds[k].dtype);
      if (slice.rows == 0) continue;
      const int64_t at = kinds[k].own ? own->offset : p->offset + slice.first_row * p->cols;
      s->slices[s->n] = slice;
      s->device[s->n++] = kinds[k].buffer + (size_t)at * dtype_bytes(slice.dtype);
      bytes += slice_bytes(&slice);
    }
  s->owner = run->device;
  s->staging = run->device->k->allocate_host(run->device, bytes ? bytes : 1, e);
  if (!s->staging) {
    error_context(e, "the checkpoint staging buffer");
    state_close(s);
    return NULL;
  }
  if (!touch(s->staging, bytes, run->threads, e)) {
    state_close(s);
    return NULL;
  }
  char *at = s->staging;
  for (int i = 0; i < s->n; at += slice_bytes(&s->slices[i++])) s->slices[i].data = at;
  if (open_saver(s, run, e)) return s;
  state_close(s);
  return NULL;

failed:
  state_close(s);
  error_set(e, ERROR_SYSTEM, "out of memory for the list of a checkpoint's tensors");
  return NULL;
}

void state_close(struct state *s) {
  if (!s) return;
  checkpoint_saver_close(s->saver); /* first: its thread reads the others */
  threads_destroy(s->threads);
  free(s->slices);
  free(s->device);
  if (s->staging) s->owner->k->release_host(s->owner, s->staging);
  free(s);
}

bool state_save(struct state *s, struct run *run, struct error *e) {
  for (int i = 0; i < s->n; i++)
    run->device->k->download(run->device, s->slices[i].data, s->device[i], slice_bytes(&s->slices[i]));
  bool good = run->device->k->synchronize(run->device, e);
  char *meta = good ? state_meta(run) : NULL;
  if (good && !meta) good = error_set(e, ERROR_SYSTEM, "out of memory");
  good = comm_agree(run->comm, good, e) && checkpoint_saver_begin(s->saver, run->update, s->slices, s->n, meta, e);
  free(meta);
  return good;
}

struct checkpoint_saver *state_saver(struct state *s) { return s->saver; }

/* ---- restoring ------------------------------------------------------------ */

static float element(const void *data, enum dtype dtype, int64_t i) {
  if (dtype == DTYPE_F32) return ((const float *)data)[i];
  return bf16_decode(((const uint16_t *)data)[i]);
}

/* No update leaves such values (non-finite gradients touch nothing), but one that is there
 * would make the next update's parameters NaN before anything is seen.  A second moment may
 * have overflowed: its parameter then stands still. */
static bool sound(const struct checkpoint *k, const struct tensor_slice *s, bool second_moment, struct error *e) {
  const int64_t n = s->rows * s->cols;
  for (int64_t i = 0; i < n; i++) {
    const float x = element(s->data, s->dtype, i);
    if (second_moment ? x >= 0 : isfinite(x)) continue;
    error_set(e, ERROR_CHECKPOINT, "checkpoint %s: element %" PRId64 " of %s is %g", checkpoint_path(k), s->first_row * s->cols + i, s->name,
              (double)x);
    return error_hint(e, "an earlier step may be sound: --resume PATH");
  }
  return true;
}

/* Reads a slice into host memory. */
static bool read_slice(struct checkpoint *k, struct tensor_slice s, void *host, struct error *e) {
  s.data = host;
  return checkpoint_read(k, &s, 1, e) && sound(k, &s, strncmp(s.name, "adam_v/", 7) == 0, e);
}

/* The same of a whole tensor. */
static bool read_tensor(struct checkpoint *k, const struct param *p, const char *prefix, enum dtype dtype, void *host,
                        struct error *e) {
  return read_slice(k, slice_of(p, prefix, dtype), host, e);
}

/* Tensors of a kind. */
static int tensor_number(const struct checkpoint *k, const char *prefix) {
  const size_t length = strlen(prefix);
  int n = 0;
  for (int i = 0; i < checkpoint_tensor_count(k); i++) {
    const char *name = checkpoint_tensor(k, i)->name;
    n += strncmp(name, prefix, length) == 0 && name[length] == '/';
  }
  return n;
}

/* Every parameter is asked for by name; this finds those that nobody asks for. */
static bool nothing_more(const struct run *run, const struct checkpoint *k, const char *prefix, struct error *e) {
  const int stored = tensor_number(k, prefix), wanted = model_param_number(run->model);
  if (stored <= wanted) return true;
  error_set(e, ERROR_CHECKPOINT, "checkpoint %s holds %d parameters, the model has %d", checkpoint_path(k), stored, wanted);
  return error_hint(e, "it is of another model: compare model.n_layers and model.tied");
}

static int64_t largest_param(const struct run *run) {
  int64_t largest = 0;
  for (int i = 0; i < model_param_number(run->model); i++) {
    const struct param *p = model_param(run->model, i);
    if (p->rows * p->cols > largest) largest = p->rows * p->cols;
  }
  return largest;
}

static void round_to_bf16(uint16_t *to, const float *from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = bf16_encode(from[i]);
}

static void widen(float *to, const void *from, enum dtype dtype, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = element(from, dtype, i);
}

/* What is stored under "param": this run's type, or where any will do the files' own. */
static enum dtype param_stored(const struct run *run, const struct checkpoint *k, bool any) {
  for (int i = 0; any && i < checkpoint_tensor_count(k); i++)
    if (strncmp(checkpoint_tensor(k, i)->name, "param/", 6) == 0) return checkpoint_tensor(k, i)->dtype;
  return run->config.train.param_dtype;
}

/* Parameters from "param/…", or rounded from "master/…" where those are stored;
 * the master too where this run has one.  `any`: types that are not this run's are
 * converted (a master of BF16 parameters is the same numbers), else refused. */
static bool read_weights(struct run *run, struct checkpoint *k, bool any, struct error *e) {
  const struct kernels *ops = run->device->k;
  const enum dtype dtype = run->config.train.param_dtype, stored = param_stored(run, k, any);
  float *master = model_master(run->model);
  const bool stored_master = tensor_number(k, "master") > 0;
  if (!match_model(k, run->config_text, e)) return false;
  if (master && !stored_master && !any) {
    error_set(e, ERROR_CHECKPOINT, "checkpoint %s holds no FP32 master weights", checkpoint_path(k));
    return error_hint(e, "it was written with train.master: false; resume with the same");
  }
  if (stored_master && !master && model_gradients(run->model) && !any) {
    error_set(e, ERROR_CHECKPOINT, "checkpoint %s holds FP32 master weights, this run keeps none", checkpoint_path(k));
    return error_hint(e, "it was written with train.param_dtype: bf16 and train.master: true; resume with the same");
  }

  if (!nothing_more(run, k, stored_master ? "master" : "param", e)) return false;

  const size_t n = (size_t)largest_param(run);
  const bool through_wide = stored_master || any;
  float *wide = through_wide ? malloc(n * sizeof *wide) : NULL;
  char *host = malloc(n * sizeof(float));
  bool good = host && (wide || !through_wide);
  if (!good) error_set(e, ERROR_SYSTEM, "out of memory for the largest parameter");
  for (int i = 0; good && i < model_param_number(run->model); i++) {
    const struct param *p = model_param(run->model, i);
    const int64_t elements = p->rows * p->cols;
    char *to = (char *)model_params(run->model) + (size_t)p->offset * dtype_bytes(dtype);
    if (through_wide) {
      if (stored_master)
        good = read_tensor(k, p, "master", DTYPE_F32, wide, e);
      else if ((good = read_tensor(k, p, "param", stored, host, e)))
        widen(wide, host, stored, elements);
      const struct param_share *own = model_param_share(run->model, i);
      if (good && master)
        ops->upload(run->device, master + own->offset, wide + own->first_row * p->cols, (size_t)(own->rows * p->cols) * sizeof(float));
      if (good && dtype == DTYPE_BF16)
        round_to_bf16((uint16_t *)(void *)host, wide, elements);
      else if (good)
        memcpy(host, wide, (size_t)elements * sizeof(float));
    } else {
      good = read_tensor(k, p, "param", dtype, host, e);
    }
    if (good) ops->upload(run->device, to, host, (size_t)elements * dtype_bytes(dtype));
    if (good) good = ops->synchronize(run->device, e);
  }
  free(wide);
  free(host);
  return good;
}

bool state_read_parameters(struct run *run, struct checkpoint *k, struct error *e) {
  if (!read_weights(run, k, state_imported(k), e)) return false;
  run_set_forward(run, checkpoint_update(k));
  model_refresh_weights(run->model);
  return true;
}

bool state_take_weights(struct run *run, const char *path, struct error *e) {
  struct checkpoint *k = state_find_together(run, path, e);
  if (!k) return false;
  const bool good = comm_agree(run->comm, read_weights(run, k, true, e), e);
  if (good && run->rank == 0) {
    match_warn(k, run->config_text);
    log_warning("weights of %s, update %" PRId64 ": the optimizer, the schedule and the data begin anew, at update 0", checkpoint_path(k),
                checkpoint_update(k));
  }
  checkpoint_close(k);
  return good;
}

static bool read_moments(struct run *run, struct checkpoint *k, struct error *e) {
  if (state_imported(k)) {
    const size_t bytes = (size_t)model_share_elements(run->model) * sizeof(float);
    run->device->k->clear(run->device, model_adam_m(run->model), bytes);
    run->device->k->clear(run->device, model_adam_v(run->model), bytes);
    return run->device->k->synchronize(run->device, e);
  }
  float *host = malloc((size_t)largest_param(run) * sizeof *host);
  if (!host) return error_set(e, ERROR_SYSTEM, "out of memory for the largest parameter");
  bool good = true;
  for (int kind = 0; good && kind < 2; kind++) {
    float *to = kind == 0 ? model_adam_m(run->model) : model_adam_v(run->model);
    for (int i = 0; good && i < model_param_number(run->model); i++) {
      const struct param_share *own = model_param_share(run->model, i);
      const struct tensor_slice s = own_slice(model_param(run->model, i), own, kind == 0 ? "adam_m" : "adam_v", DTYPE_F32);
      if (s.rows == 0) continue;
      good = read_slice(k, s, host, e);
      if (!good) break;
      run->device->k->upload(run->device, to + own->offset, host, slice_bytes(&s));
      good = run->device->k->synchronize(run->device, e);
    }
  }
  free(host);
  return good;
}

static void log_changes(const struct run *run, const struct checkpoint *k) {
  struct error none;
  char *saved = state_saved_config(k, &none);
  if (saved) changes_log(saved, run->config_text);
  free(saved);
}

static void say_restored(const struct run *run, const struct checkpoint *k) {
  if (state_imported(k)) {
    match_warn(k, run->config_text);
    log_info("began from the imported parameters of %s: new optimizer, schedule and data", checkpoint_path(k));
    return;
  }
  log_changes(run, k);
  log_info("resumed from %s at update %" PRId64, checkpoint_path(k), run->update);
}

bool state_restore(struct run *run, enum resume_kind kind, const char *path, bool *resumed, struct error *e) {
  struct checkpoint *k;
  *resumed = false;
  bool good = state_choose(run, kind, path, &k, e);
  if (k) {
    /* in the order, and the words, of `check` */
    good = good && comm_agree(run->comm, match_constants(k, &run->config, e) && match_model(k, run->config_text, e) &&
                                             match_precision(k, run->config_text, e) && state_read_counters(run, k, e) &&
                                             read_weights(run, k, state_imported(k), e) && read_moments(run, k, e), e);
    good = good && (!state_imported(k) || run_parameter_hash(run, &run->init_hash, e));
    if (good) {
      *resumed = true;
      model_refresh_weights(run->model);
      if (run->rank == 0) say_restored(run, k);
    }
    checkpoint_close(k);
  }
  return good;
}
