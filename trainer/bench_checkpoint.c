/* bench checkpoint: a state like a trained model's, saved beside the caller and loaded.
 *
 * Tensors have the shape that a rank of 32 has of an 8B model's widest matrices; their
 * numbers are nearly normal (masters), smaller (first moments) and squared (second moments), so
 * that they compress as a run's do.  The state is made in the staging buffer, once.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/threads.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/store.h"
#include "trainer/bench.h"
#include "trainer/bench_samples.h"
#include "trainer/plan.h"
#include "trainer/record.h"

enum { TENSOR_COLS = 4096, TENSOR_ROWS = 448 };

struct storing {
  struct comm *comm;
  struct threads *threads;
  enum checkpoint_compression compression;
  char folder[STORE_PATH];
  struct tensor_slice *slices; /* this rank's rows */
  int n;
  struct bench_samples *samples;
  char *staging;
  int64_t update;
  /* of the last save */
  double stall;
  struct checkpoint_saved saved;
};

static enum bench_kind kind_of(int i) { return (enum bench_kind)(i % BENCH_KINDS); }

static bool save(struct storing *s, struct error *e) {
  const struct checkpoint_policy policy = {.keep = 1, .compression = s->compression, .threads = s->threads};
  struct checkpoint_saver *saver = checkpoint_saver_open(s->comm, s->folder, &policy, true, e);
  if (!comm_agree(s->comm, saver != NULL, e)) return false;
  const double t0 = clock_seconds();
  for (int i = 0; i < s->n; i++) bench_samples_fill(s->samples, kind_of(i), i, &s->slices[i]);
  bool done = false, good = checkpoint_saver_begin(saver, ++s->update, s->slices, s->n, "{}", e);
  s->stall = clock_seconds() - t0;
  while (good && !done) {
    checkpoint_saver_wait(saver);
    good = checkpoint_saver_advance(saver, &done, &s->saved, e);
  }
  checkpoint_saver_close(saver);
  return good;
}

static bool load(void *context, struct error *e) {
  struct storing *s = context;
  char path[STORE_PATH];
  store_step_path(s->folder, s->update, path);
  struct checkpoint *k = checkpoint_open(path, false, e);
  const bool good = k && checkpoint_read(k, s->slices, s->n, e);
  checkpoint_close(k);
  return comm_agree(s->comm, good, e);
}

/* What all ranks do before a resume. */
static bool verify(void *context, struct error *e) {
  struct storing *s = context;
  char path[STORE_PATH];
  store_step_path(s->folder, s->update, path);
  struct checkpoint *k = checkpoint_open_together(s->comm, path, true, e);
  checkpoint_close(k);
  return k != NULL;
}

static double peak_gigabytes(void) {
  struct rusage usage;
  return getrusage(RUSAGE_SELF, &usage) == 0 ? (double)usage.ru_maxrss * 1024 * 1e-9 : 0;
}

static void row(const struct bench *b, const struct storing *s, const char *operation, const struct bench_seconds *t) {
  const double bytes = (double)s->saved.tensor_bytes, ratio = (double)s->saved.file_bytes / bytes;
  const char *compression = s->compression == CHECKPOINT_ZSTD ? "zstd" : "store";
  json_t *o = json_object();
  record_text(o, "operation", operation);
  record_text(o, "compression", compression);
  record_integer(o, "bytes", s->saved.tensor_bytes);
  record_integer(o, "file_bytes", s->saved.file_bytes);
  record_integer(o, "world", comm_world(b->comm));
  record_real(o, "bytes_per_second", bytes / t->median);
  record_real(o, "stall_seconds", s->stall);
  record_real(o, "peak_bytes", peak_gigabytes() * 1e9);
  bench_row(b, o, t, "%-6s %-38s %9.3f s %8.3f GB/s   ratio %.3f, peak memory %.2f GB", compression, operation, t->median,
            bytes / t->median * 1e-9, ratio, peak_gigabytes());
}

static bool measure(const struct bench *b, struct storing *s, enum checkpoint_compression compression, struct error *e) {
  double seconds[64], stalls[64];
  int n = 0;
  s->compression = compression;
  for (; n < (int)b->a.repeat && n < 64; n++) {
    if (!save(s, e)) return false;
    seconds[n] = s->saved.seconds;
    stalls[n] = s->stall;
    if (!comm_broadcast(s->comm, &seconds[n], sizeof seconds[n], 0, e)) return false;
  }
  const struct bench_seconds stall = bench_median(stalls, n), whole = bench_median(seconds, n);
  row(b, s, "stall: copy into the staging buffer", &stall);
  row(b, s, "save: write, sync, digest, publish", &whole);
  struct bench_seconds t;
  memset(s->slices[0].data, 0, TENSOR_COLS * sizeof(float)); /* what was saved comes back */
  if (!bench_measure(b, 1, load, s, &t, e)) return false;
  row(b, s, "load", &t);
  bool same = true;
  for (int i = 0; same && i < s->n; i++) same = bench_samples_equal(s->samples, kind_of(i), i, &s->slices[i]);
  if (!comm_agree(s->comm, same || error_set(e, ERROR_INTERNAL, "what was loaded is not what was saved"), e)) return false;
  if (!bench_measure(b, 1, verify, s, &t, e)) return false;
  row(b, s, "open: every digest compared", &t);
  return true;
}

static bool prepare(const struct bench *b, struct storing *s, int64_t bytes, struct error *e) {
  const int rank = comm_rank(b->comm), world = comm_world(b->comm);
  const int64_t rows = (int64_t)TENSOR_ROWS * world, row_bytes = TENSOR_COLS * (int64_t)sizeof(float);
  const int64_t n = bytes / (rows * row_bytes) + 1;
  if (n > 1 << 20) return error_set(e, ERROR_USAGE, "bench checkpoint: %" PRId64 " bytes are too many", bytes);
  s->n = (int)n;
  s->slices = calloc((size_t)n, sizeof *s->slices);
  s->staging = malloc((size_t)(n * TENSOR_ROWS * row_bytes));
  const int configured = b->config ? (int)b->config->run.threads : 0;
  s->threads = threads_create(b->a.threads > 0 ? (int)b->a.threads : configured > 0 ? configured : threads_available(), e);
  if (!s->threads) return false;
  if (!s->slices || !s->staging) return error_set(e, ERROR_SYSTEM, "no memory for %" PRId64 " bytes", n * TENSOR_ROWS * row_bytes);
  for (int i = 0; i < s->n; i++) {
    struct tensor_slice *t = &s->slices[i];
    static const char *const kinds[BENCH_KINDS] = {"master", "adam_m", "adam_v"};
    *t = (struct tensor_slice){.dtype = DTYPE_F32, .global_rows = rows, .cols = TENSOR_COLS, .first_row = (int64_t)TENSOR_ROWS * rank, .rows = TENSOR_ROWS};
    snprintf(t->name, sizeof t->name, "%s/tensor-%06d", kinds[kind_of(i)], i / BENCH_KINDS);
    t->data = s->staging + (size_t)(i * (int64_t)TENSOR_ROWS * row_bytes);
  }
  s->samples = bench_samples_open(e);
  return s->samples != NULL;
}

/* One state in one process, or a part of a state in each. */
static bool check_ranks(const struct bench *b, struct error *e) {
  const struct bench_arguments *a = &b->a;
  if (a->ranks == 0) return a->files == 0 || error_set(e, ERROR_USAGE, "bench checkpoint: --files without --ranks");
  if (!b->config) return error_set(e, ERROR_USAGE, "bench checkpoint --ranks: CONFIG is missing, whose state it is");
  if (a->megabytes > 0) return error_set(e, ERROR_USAGE, "bench checkpoint: --megabytes with --ranks: the state has its size");
  return comm_world(b->comm) == 1 || error_set(e, ERROR_USAGE, "bench checkpoint --ranks runs in one process, %d were started", comm_world(b->comm));
}

bool bench_checkpoint(struct bench *b, struct error *e) {
  const int world = comm_world(b->comm);
  if (!check_ranks(b, e)) return false;
  if (b->a.ranks > 0) return bench_state(b, e);
  const int64_t bytes = b->a.megabytes ? b->a.megabytes << 20 : b->config ? plan_checkpoint_bytes(b->config) : 64 << 20;
  const char *where = b->a.folder ? b->a.folder : b->config ? b->config->run.folder : ".";
  struct storing s = {.comm = b->comm};
  const int length = snprintf(s.folder, sizeof s.folder, "%s/bench-%ld", where, (long)getpid());
  if (length < 0 || (size_t)length >= sizeof s.folder) /* the same words on every rank */
    return error_set(e, ERROR_USAGE, "bench checkpoint: the folder's path has %zu bytes, which is too long", strlen(where));
  if (!comm_broadcast(b->comm, s.folder, sizeof s.folder, 0, e)) return false;
  bool good = comm_agree(b->comm, prepare(b, &s, bytes, e), e);
  if (good) {
    bench_title(b, "%.3f GB, %d tensors, in %d file%s under %s; %d thread%s compress; loads come from the page cache where that holds them",
                (double)s.n * world * TENSOR_ROWS * TENSOR_COLS * 4e-9, s.n, world, world > 1 ? "s" : "", where, threads_count(s.threads),
                threads_count(s.threads) > 1 ? "s" : "");
    good = measure(b, &s, CHECKPOINT_ZSTD, e) && measure(b, &s, CHECKPOINT_STORE, e);
  }
  struct error removing;
  if (comm_rank(b->comm) == 0 && !file_remove_tree(s.folder, ERROR_SYSTEM, &removing) && good) {
    *e = removing;
    good = false;
  }
  threads_destroy(s.threads);
  bench_samples_close(s.samples);
  free(s.slices);
  free(s.staging);
  return comm_agree(b->comm, good, e);
}
