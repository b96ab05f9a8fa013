/* bench loader, checkpoint, collectives: what moves data. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/store.h"
#include "data/loader.h"
#include "trainer/bench.h"
#include "trainer/plan.h"
#include "trainer/record.h"

/* ---- loader -------------------------------------------------------------------- */

struct loading {
  const struct config *config;
  int64_t first, samples; /* of the run */
  bool documents;         /* starts, and targets across documents masked */
  struct stream *stream;  /* open, its blocks checked; NULL: opened each time */
};

/* All of it through the loader, as one rank's updates of global_batch samples. */
static bool read_samples(const struct loading *l, const struct stream *s, struct error *e) {
  const struct config *c = l->config;
  struct data_order o;
  if (!data_order_make(&o, s, c->train.seq_len, (uint64_t)c->data.seed, e)) return false;
  o.boundary = l->documents ? DATA_BOUNDARY_MASK : DATA_BOUNDARY_PREDICT;
  const int64_t share = c->train.global_batch < l->samples ? c->train.global_batch : l->samples;
  const struct loader_plan plan = {
      .order = &o, .first = l->first, .share = share, .stride = share, .updates = l->samples / share, .documents = l->documents};
  struct loader *loader = loader_open(&plan, &loader_memory_plain, e);
  bool good = loader != NULL;
  double waited;
  for (int64_t u = 0; good && u < plan.updates; u++) good = loader_next(loader, &waited, e) != NULL;
  loader_close(loader);
  return good;
}

static bool load(void *context, struct error *e) {
  struct loading *l = context;
  if (l->stream) return read_samples(l, l->stream, e);
  struct stream *s = stream_open(l->config->data.train, (int32_t)l->config->model.shape.vocab_size, e);
  const bool good = s && read_samples(l, s, e);
  stream_close(s);
  return good;
}

static bool loader_row(const struct bench *b, struct loading *l, const char *name, struct error *e) {
  struct bench_seconds s;
  if (!bench_measure(b, 1, load, l, &s, e)) return false;
  const double samples = (double)l->samples / s.median, tokens = samples * (double)l->config->train.seq_len;
  json_t *o = json_object();
  record_text(o, "order", name);
  record_integer(o, "samples", l->samples);
  record_integer(o, "seq_len", l->config->train.seq_len);
  record_real(o, "samples_per_second", samples);
  record_real(o, "tokens_per_second", tokens);
  bench_row(b, o, &s, "%-38s %12.0f samples/s %14.3e tokens/s", name, samples, tokens);
  return true;
}

bool bench_loader(struct bench *b, struct error *e) {
  const struct config *c = b->config;
  struct loading l = {.config = c};
  struct data_order o;
  struct stream *s = stream_open(c->data.train, (int32_t)c->model.shape.vocab_size, e);
  bool good = s && data_order_make(&o, s, c->train.seq_len, (uint64_t)c->data.seed, e);
  if (good) {
    const int64_t epoch = data_order_epoch_samples(&o), most = (1 << 24) / c->train.seq_len + 1, batch = c->train.global_batch;
    l.samples = epoch < most ? epoch : most;
    if (l.samples > batch) l.samples = l.samples / batch * batch; /* whole updates */
    bench_title(b, "%s: %" PRId64 " samples of %" PRId64 " tokens an epoch, %" PRId64 " read at a time by the loader's thread, hashed; the file is in the page cache",
                c->data.train, epoch, c->train.seq_len, l.samples);
    good = loader_row(b, &l, "epoch 0, opened anew, blocks checked", e);
    l.stream = s;
    good = good && loader_row(b, &l, "epoch 0", e);
    l.first = epoch;
    good = good && loader_row(b, &l, "epoch 1 (permuted)", e);
    l.documents = true;
    good = good && loader_row(b, &l, "epoch 1, starts and masked boundaries", e);
  }
  stream_close(s);
  return good;
}

/* ---- checkpoint ------------------------------------------------------------------ */

enum { TENSOR_COLS = 4096 };

struct storing {
  struct comm *comm;
  char folder[STORE_PATH];
  struct tensor_slice slice; /* this rank's rows */
  int64_t update;
};

static bool store(void *context, struct error *e) {
  struct storing *s = context;
  return checkpoint_save(s->comm, s->folder, ++s->update, &s->slice, 1, "{}", 1, e);
}

static bool restore(void *context, struct error *e) {
  struct storing *s = context;
  char path[STORE_PATH];
  store_step_path(s->folder, s->update, path);
  struct checkpoint *k = checkpoint_open(path, false, e);
  const bool good = k && checkpoint_read(k, &s->slice, 1, e);
  checkpoint_close(k);
  return comm_agree(s->comm, good, e);
}

/* What rank 0 does before a resume. */
static bool verify(void *context, struct error *e) {
  struct storing *s = context;
  bool good = true;
  if (comm_rank(s->comm) == 0) {
    char path[STORE_PATH];
    store_step_path(s->folder, s->update, path);
    struct checkpoint *k = checkpoint_open(path, true, e);
    good = k != NULL;
    checkpoint_close(k);
  }
  return comm_agree(s->comm, good, e);
}

static bool storage_row(const struct bench *b, struct storing *s, const char *name, bool (*body)(void *, struct error *),
                        struct error *e) {
  struct bench_seconds t;
  const double bytes = (double)s->slice.global_rows * TENSOR_COLS * sizeof(float);
  if (!bench_measure(b, 1, body, s, &t, e)) return false;
  json_t *o = json_object();
  record_text(o, "operation", name);
  record_integer(o, "bytes", (int64_t)bytes);
  record_integer(o, "world", comm_world(b->comm));
  record_real(o, "bytes_per_second", bytes / t.median);
  bench_row(b, o, &t, "%-44s %10.3f s  %8.3f GB/s", name, t.median, bytes / t.median * 1e-9);
  return true;
}

bool bench_checkpoint(struct bench *b, struct error *e) {
  const int rank = comm_rank(b->comm), world = comm_world(b->comm);
  const int64_t bytes = b->a.megabytes ? b->a.megabytes << 20 : b->config ? plan_checkpoint_bytes(b->config) : 64 << 20;
  const char *where = b->a.folder ? b->a.folder : b->config ? b->config->run.folder : ".";
  struct storing s = {.comm = b->comm};
  const int64_t rows = bytes / (TENSOR_COLS * (int64_t)sizeof(float)) + 1;
  const int length = snprintf(s.folder, sizeof s.folder, "%s/bench-%ld", where, (long)getpid());
  if (length < 0 || (size_t)length >= sizeof s.folder) /* the same words on every rank */
    return error_set(e, ERROR_USAGE, "bench checkpoint: the folder's path has %zu bytes, which is too long", strlen(where));
  if (!comm_broadcast(b->comm, s.folder, sizeof s.folder, 0, e)) return false;
  s.slice = (struct tensor_slice){.name = "bench/tensor", .dtype = DTYPE_F32, .global_rows = rows, .cols = TENSOR_COLS};
  s.slice.first_row = rows * rank / world;
  s.slice.rows = rows * (rank + 1) / world - s.slice.first_row;
  const size_t mine = (size_t)(s.slice.rows * TENSOR_COLS) * sizeof(float);
  float *data = malloc(mine + 1);
  for (size_t i = 0; data && i < mine / sizeof(float); i++) data[i] = (float)i * 1.1f;
  s.slice.data = data;
  bool good = comm_agree(b->comm, data != NULL || error_set(e, ERROR_SYSTEM, "no memory for %zu bytes", mine), e);
  if (good) {
    bench_title(b, "%.3f GB in %d file%s under %s, written durably (fsync)", (double)rows * TENSOR_COLS * 4e-9, world, world > 1 ? "s" : "", where);
    good = storage_row(b, &s, "save: write, sync, checksum, publish", store, e) && storage_row(b, &s, "load", restore, e) &&
           storage_row(b, &s, "verify checksums (rank 0 alone)", verify, e);
  }
  struct error removing;
  if (rank == 0 && !file_remove_tree(s.folder, ERROR_SYSTEM, &removing) && good) {
    *e = removing;
    good = false;
  }
  free(data);
  return comm_agree(b->comm, good, e);
}

/* ---- collectives ------------------------------------------------------------------- */

struct summing {
  struct comm *comm;
  float *x, *copy;
  int64_t n;
};

static bool sum(void *context, struct error *e) {
  struct summing *s = context;
  return comm_sum_f32(s->comm, s->x, s->n, e);
}

static bool copy(void *context, struct error *e) {
  struct summing *s = context;
  (void)e;
  memcpy(s->copy, s->x, (size_t)s->n * sizeof(float));
  __asm__ volatile("" : : "r"(s->copy) : "memory");
  return true;
}

bool bench_collectives(struct bench *b, struct error *e) {
  const int world = comm_world(b->comm);
  if (world == 1) {
    error_set(e, ERROR_USAGE, "bench collectives: a world of one has nothing to sum");
    return error_hint(e, "mpirun -np 2 fp4d bench collectives");
  }
  const int64_t most = (b->a.megabytes ? b->a.megabytes : 64) << 18; /* elements */
  struct summing s = {.comm = b->comm, .x = calloc((size_t)most, sizeof(float)), .copy = calloc((size_t)most, sizeof(float))};
  bool good = comm_agree(b->comm, (s.x && s.copy) || error_set(e, ERROR_SYSTEM, "out of memory"), e);
  if (good) bench_title(b, "%s\n  comm_sum_f32: every rank ends with the sum, in rank order\n  %12s %12s %14s %14s %14s", comm_topology(b->comm), "bytes", "ms", "GB/s", "bus GB/s", "copy GB/s");
  for (int64_t n = 1024; good && n <= most; n = n < most && 16 * n > most ? most : 16 * n) {
    struct bench_seconds t, c;
    s.n = n;
    const int times = n < 1 << 18 ? 20 : 1;
    good = bench_measure(b, times, sum, &s, &t, e) && bench_measure(b, times, copy, &s, &c, e);
    if (!good) break;
    const double bytes = (double)n * sizeof(float), rate = bytes / t.median, bus = rate * 2 * (world - 1) / world;
    json_t *o = json_object();
    record_text(o, "operation", "comm_sum_f32");
    record_integer(o, "world", world);
    record_integer(o, "bytes", n * (int64_t)sizeof(float));
    record_real(o, "bytes_per_second", rate);
    record_real(o, "bus_bytes_per_second", bus); /* what a ring moves over each link: 2 (n-1)/n of it */
    record_real(o, "copy_bytes_per_second", bytes / c.median);
    bench_row(b, o, &t, "%12" PRId64 " %12.4f %14.3f %14.3f %14.3f", n * (int64_t)sizeof(float), t.median * 1e3, rate * 1e-9, bus * 1e-9,
              bytes / c.median * 1e-9);
  }
  free(s.x);
  free(s.copy);
  return good;
}
