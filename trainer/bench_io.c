/* bench loader: samples from a token stream. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
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
