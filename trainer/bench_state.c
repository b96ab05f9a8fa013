/* bench checkpoint CONFIG --ranks N: the configuration's whole training state, cut for N
 * ranks, written and read by this one process a rank after the other.
 *
 * Memory holds one rank's share, the disk all files (--files: of the first so many ranks; the
 * checkpoint's tensors then end with their rows).  Every file is synced and measured as in training,
 * the folder published, every digest compared, every rank's share read back and compared with
 * what was written.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/threads.h"
#include "checkpoints/store.h"
#include "comm/share.h"
#include "trainer/bench.h"
#include "trainer/bench_samples.h"
#include "trainer/record.h"

/* By the clock, and of all threads: a busy machine lengthens the first alone. */
struct cost {
  double seconds, processor;
};

struct streaming {
  const struct config *config;
  struct bench_samples *samples;
  struct threads *threads;
  struct param *params;
  int n_params;
  int64_t ranks, files;
  int64_t tensor_bytes; /* of all files */
  char folder[STORE_PATH];
  char *staging;
  struct tensor_slice *slices; /* of one rank */
  int n;
  /* of one compression */
  struct cost stall, save, open, load;
  int64_t file_bytes;
};

static double processor_seconds(const struct rusage *u) {
  return (double)u->ru_utime.tv_sec + (double)u->ru_stime.tv_sec + 1e-6 * ((double)u->ru_utime.tv_usec + (double)u->ru_stime.tv_usec);
}

static struct cost cost_now(void) {
  struct rusage usage;
  return (struct cost){clock_seconds(), getrusage(RUSAGE_SELF, &usage) == 0 ? processor_seconds(&usage) : 0};
}

static void cost_add(struct cost *to, struct cost since) {
  const struct cost now = cost_now();
  to->seconds += now.seconds - since.seconds;
  to->processor += now.processor - since.processor;
}

/* ---- a rank's share ------------------------------------------------------------------- */

static enum dtype stored(const struct streaming *s, enum bench_kind kind) {
  return kind == BENCH_PARAM && !s->config->train.master ? s->config->train.param_dtype : DTYPE_F32;
}

/* Rows of a parameter before rank r, as state.c deals them out. */
static int64_t rows_before(const struct streaming *s, const struct param *p, int64_t r) {
  return share_row(p->rows, p->cols, (int)r, (int)s->ranks);
}

/* Lists the slices of rank r, in the staging buffer where there is one; gives their bytes. */
static int64_t take_rank(struct streaming *s, int64_t r) {
  const char *const prefixes[BENCH_KINDS] = {s->config->train.master ? "master" : "param", "adam_m", "adam_v"};
  int64_t bytes = 0;
  s->n = 0;
  for (int kind = 0; kind < BENCH_KINDS; kind++)
    for (int i = 0; i < s->n_params; i++) {
      const struct param *p = &s->params[i];
      struct tensor_slice t = {.dtype = stored(s, (enum bench_kind)kind), .global_rows = rows_before(s, p, s->files), .cols = p->cols,
                               .first_row = rows_before(s, p, r)};
      t.rows = rows_before(s, p, r + 1) - t.first_row;
      if (t.rows == 0) continue;
      snprintf(t.name, sizeof t.name, "%s/%s", prefixes[kind], p->name);
      if (s->staging) t.data = s->staging + bytes;
      bytes += t.rows * t.cols * (int64_t)dtype_bytes(t.dtype);
      s->slices[s->n++] = t;
    }
  return bytes;
}

static enum bench_kind kind_of(const struct tensor_slice *t) {
  return strncmp(t->name, "adam_m", 6) == 0 ? BENCH_ADAM_M : strncmp(t->name, "adam_v", 6) == 0 ? BENCH_ADAM_V : BENCH_PARAM;
}

/* ---- the disk --------------------------------------------------------------------------- */

/* Others may be using it: a sixteenth stays free. */
static bool check_room(const struct streaming *s, const char *folder, int64_t wanted, struct error *e) {
  struct statvfs disk;
  if (statvfs(folder, &disk) != 0) return error_errno(e, ERROR_SYSTEM, "cannot examine %s", folder);
  const int64_t unit = (int64_t)disk.f_frsize, room = (int64_t)disk.f_bavail * unit, kept = (int64_t)disk.f_blocks / 16 * unit;
  if (wanted <= room - kept) return true;
  const int64_t fit = room > kept ? (room - kept) / (s->tensor_bytes / s->files + 1) : 0;
  error_set(e, ERROR_SYSTEM, "bench checkpoint: up to %.1f GB are to be written, %s has %.1f GB free, of which %.1f GB (a sixteenth of it) stay free",
            (double)wanted * 1e-9, folder, (double)room * 1e-9, (double)kept * 1e-9);
  return error_hint(e, "--files %" PRId64 " would fit", fit);
}

/* ---- writing and reading --------------------------------------------------------------- */

static bool write_rank(struct streaming *s, struct checkpoint_writer *w, int64_t r, struct error *e) {
  const int64_t bytes = take_rank(s, r);
  if (!check_room(s, s->folder, bytes, e)) return false;
  struct cost since = cost_now();
  for (int i = 0; i < s->n; i++) bench_samples_fill(s->samples, kind_of(&s->slices[i]), r * s->n + i, &s->slices[i]);
  cost_add(&s->stall, since);
  since = cost_now();
  const bool good = (r == 0 || checkpoint_next_rank(w, e)) && checkpoint_add(w, s->slices, s->n, e);
  cost_add(&s->save, since);
  return good;
}

static bool write_state(struct streaming *s, enum checkpoint_compression compression, struct error *e) {
  s->stall = s->save = s->open = s->load = (struct cost){0, 0};
  struct checkpoint_writer *w = checkpoint_create(s->folder, 1, compression, s->threads, e);
  bool good = w != NULL;
  for (int64_t r = 0; good && r < s->files; r++) good = write_rank(s, w, r, e);
  const struct cost since = cost_now();
  if (w) good = checkpoint_finish(w, good ? "{}" : NULL, e) && good;
  cost_add(&s->save, since);
  return good;
}

static bool read_rank(struct streaming *s, struct checkpoint *k, int64_t r, struct error *e) {
  memset(s->staging, 0, (size_t)take_rank(s, r));
  const struct cost since = cost_now();
  if (!checkpoint_read(k, s->slices, s->n, e)) return false;
  cost_add(&s->load, since);
  for (int i = 0; i < s->n; i++)
    if (!bench_samples_equal(s->samples, kind_of(&s->slices[i]), r * s->n + i, &s->slices[i]))
      return error_set(e, ERROR_INTERNAL, "rank %" PRId64 ": what was read of %s is not what was written", r, s->slices[i].name);
  return true;
}

/* ---- figures ------------------------------------------------------------------------------ */

static void row(const struct bench *b, const struct streaming *s, enum checkpoint_compression compression, const char *operation, struct cost cost,
                int64_t bytes) {
  struct rusage usage;
  const double peak = getrusage(RUSAGE_SELF, &usage) == 0 ? (double)usage.ru_maxrss * 1024 : 0;
  const char *word = compression == CHECKPOINT_ZSTD ? "zstd" : "store";
  const struct bench_seconds once = {cost.seconds, cost.seconds, cost.seconds};
  json_t *o = json_object();
  record_text(o, "operation", operation);
  record_text(o, "compression", word);
  record_integer(o, "ranks", s->ranks);
  record_integer(o, "files", s->files);
  record_integer(o, "bytes", bytes);
  record_integer(o, "file_bytes", s->file_bytes);
  record_real(o, "bytes_per_second", (double)bytes / cost.seconds);
  record_real(o, "processor_seconds", cost.processor);
  record_real(o, "peak_bytes", peak);
  bench_row(b, o, &once, "%-6s %-46s %9.3f s %8.3f GB/s  %9.3f processor s   ratio %.3f, peak memory %.2f GB", word, operation, cost.seconds,
            (double)bytes / cost.seconds * 1e-9, cost.processor, (double)s->file_bytes / (double)s->tensor_bytes, peak * 1e-9);
}

static bool measure(const struct bench *b, struct streaming *s, enum checkpoint_compression compression, struct error *e) {
  char path[STORE_PATH];
  int64_t tensors;
  if (!write_state(s, compression, e)) return false;
  store_step_path(s->folder, 1, path);
  const struct cost since = cost_now();
  struct checkpoint *k = checkpoint_open(path, true, e);
  cost_add(&s->open, since);
  bool good = k != NULL;
  if (k) checkpoint_bytes(k, &tensors, &s->file_bytes);
  for (int64_t r = 0; good && r < s->files; r++) good = read_rank(s, k, r, e);
  checkpoint_close(k);
  struct error removing;
  if (!file_remove_tree(s->folder, ERROR_SYSTEM, &removing) && good) {
    *e = removing;
    good = false;
  }
  if (!good) return false;
  row(b, s, compression, "stall: copies into the staging buffer, all ranks'", s->stall, s->tensor_bytes);
  row(b, s, compression, "save: all ranks' files, synced; published", s->save, s->tensor_bytes);
  row(b, s, compression, "open: every digest compared", s->open, s->tensor_bytes);
  row(b, s, compression, "load: all ranks' shares", s->load, s->tensor_bytes);
  return true;
}

static bool prepare(const struct bench *b, struct streaming *s, const char *where, struct error *e) {
  s->config = b->config;
  s->ranks = b->a.ranks;
  s->files = b->a.files > 0 ? b->a.files : b->a.ranks;
  if (s->files > s->ranks) return error_set(e, ERROR_USAGE, "bench checkpoint: --files %" PRId64 " of --ranks %" PRId64, s->files, s->ranks);
  if (snprintf(s->folder, sizeof s->folder, "%s/bench-%ld", where, (long)getpid()) >= STORE_PATH - 64)
    return error_set(e, ERROR_USAGE, "bench checkpoint: the folder's path has %zu bytes, which is too long", strlen(where));
  s->n_params = params_number(&s->config->model.shape);
  s->params = calloc((size_t)s->n_params, sizeof *s->params);
  s->slices = calloc((size_t)(s->n_params * BENCH_KINDS), sizeof *s->slices);
  if (!s->params || !s->slices) return error_set(e, ERROR_SYSTEM, "out of memory");
  params_list(&s->config->model.shape, s->params);
  int64_t largest = 1;
  for (int64_t r = 0; r < s->files; r++) {
    const int64_t bytes = take_rank(s, r);
    if (s->n == 0) return error_set(e, ERROR_USAGE, "bench checkpoint: rank %" PRId64 " of %" PRId64 " has no row of any tensor", r, s->ranks);
    if (bytes > largest) largest = bytes;
    s->tensor_bytes += bytes;
  }
  const int64_t configured = s->config->run.threads;
  s->threads = threads_create(b->a.threads > 0 ? (int)b->a.threads : configured > 0 ? (int)configured : threads_available(), e);
  if (!s->threads || !(s->samples = bench_samples_open(e))) return false;
  if (!file_make_folder(where, ERROR_SYSTEM, e) || !check_room(s, where, largest, e)) return false;
  s->staging = malloc((size_t)largest);
  return s->staging || error_set(e, ERROR_SYSTEM, "no memory for a rank's share of %" PRId64 " bytes", largest);
}

bool bench_state(struct bench *b, struct error *e) {
  const char *where = b->a.folder ? b->a.folder : b->config->run.folder;
  struct streaming s = {0};
  bool good = prepare(b, &s, where, e);
  if (good) {
    bench_title(b, "%" PRId64 " parameters, a state of %.3f GB in the files of %" PRId64 " of %" PRId64 " ranks under %s; %d thread%s compress; each figure is of one time",
                model_config_param_count(&s.config->model.shape), (double)s.tensor_bytes * 1e-9, s.files, s.ranks, where, threads_count(s.threads),
                threads_count(s.threads) > 1 ? "s" : "");
    /* what zstd leaves of it is not known before: rank by rank it is looked whether there is room */
    good = measure(b, &s, CHECKPOINT_ZSTD, e) && check_room(&s, where, s.tensor_bytes, e) && measure(b, &s, CHECKPOINT_STORE, e);
  }
  struct error removing;
  if (s.folder[0] && file_exists(s.folder) && !file_remove_tree(s.folder, ERROR_SYSTEM, &removing) && good) {
    *e = removing;
    good = false;
  }
  threads_destroy(s.threads);
  bench_samples_close(s.samples);
  free(s.params);
  free(s.slices);
  free(s.staging);
  return good;
}
