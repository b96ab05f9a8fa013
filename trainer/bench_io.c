/* bench loader, collectives: what moves data. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "comm/exchange.h"
#include "data/loader.h"
#include "trainer/bench.h"
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

/* ---- collectives ------------------------------------------------------------------- */

enum { ROW = 64 }; /* elements; every number of them here is its multiple */

struct summing {
  struct comm *comm;
  float *x, *copy;
  int64_t n;
};

/* An update's: sums into their owners' rows, which then go to all. */
static bool sum(void *context, struct error *e) {
  const struct summing *s = context;
  const struct comm_part part = {s->x, s->n / ROW, ROW, DTYPE_F32};
  return comm_finish(s->comm, comm_reduce_scatter_begin(s->comm, &part, 1), e) &&
         comm_finish(s->comm, comm_all_gather_begin(s->comm, &part, 1), e);
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
  const struct comm_device host = {device_open("cpu", 1, e), NULL, 0};
  if (!comm_agree(b->comm, host.device != NULL, e)) return false;
  const int64_t most = (b->a.megabytes ? b->a.megabytes : 64) << 18; /* elements */
  struct summing s = {.comm = b->comm, .x = calloc((size_t)most, sizeof(float)), .copy = calloc((size_t)most, sizeof(float))};
  bool good = comm_agree(b->comm, (s.x && s.copy) || error_set(e, ERROR_SYSTEM, "out of memory"), e);
  good = good && comm_exchange_open(b->comm, &host, 1, e);
  if (good) bench_title(b, "%s\n  reduce-scatter, then all-gather: every rank ends with the FP32 sum, taken in rank order\n  %12s %12s %14s %14s %14s", comm_topology(b->comm), "bytes", "ms", "GB/s", "bus GB/s", "copy GB/s");
  for (int64_t n = 1024; good && n <= most; n = n < most && 16 * n > most ? most : 16 * n) {
    struct bench_seconds t, c;
    s.n = n;
    const int times = n < 1 << 18 ? 20 : 1;
    good = bench_measure(b, times, sum, &s, &t, e) && bench_measure(b, times, copy, &s, &c, e);
    if (!good) break;
    const double bytes = (double)n * sizeof(float), rate = bytes / t.median, bus = rate * 2 * (world - 1) / world;
    json_t *o = json_object();
    record_text(o, "operation", "reduce-scatter, all-gather");
    record_integer(o, "world", world);
    record_integer(o, "bytes", n * (int64_t)sizeof(float));
    record_real(o, "bytes_per_second", rate);
    record_real(o, "bus_bytes_per_second", bus); /* what a ring moves over each link: 2 (n-1)/n of it */
    record_real(o, "copy_bytes_per_second", bytes / c.median);
    bench_row(b, o, &t, "%12" PRId64 " %12.4f %14.3f %14.3f %14.3f", n * (int64_t)sizeof(float), t.median * 1e3, rate * 1e-9, bus * 1e-9,
              bytes / c.median * 1e-9);
  }
  comm_exchange_close(b->comm);
  host.device->k->close(host.device);
  free(s.x);
  free(s.copy);
  return good;
}
