/* Loading: any slicing is read back into any other. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/hdf5.h"
#include "checkpoints/hdf5_index.h"
#include "checkpoints/manifest.h"
#include "checkpoints/store.h"
#include "checkpoints/verify.h"

struct checkpoint {
  char path[STORE_PATH];
  struct manifest manifest;
  struct hdf5_file **files; /* manifest.n_files */
  struct tensor_slice *tensors; /* distinct names */
  int n_tensors;
  struct threads *threads; /* that decompress; made by the first read */
};

static int by_name(const void *a, const void *b) {
  return strcmp(((const struct tensor_slice *)a)->name, ((const struct tensor_slice *)b)->name);
}

static int by_name_and_row(const void *a, const void *b) {
  const struct tensor_slice *x = a, *y = b;
  const int order = strcmp(x->name, y->name);
  return order ? order : (x->first_row > y->first_row) - (x->first_row < y->first_row);
}

/* The distinct tensors of all files.  Slices of one name must have one shape
 * and give each row once. */
static bool collect(struct checkpoint *k, struct error *e) {
  size_t total = 0;
  for (int i = 0; i < k->manifest.n_files; i++) total += (size_t)hdf5_slice_count(k->files[i]);
  k->tensors = calloc(total ? total : 1, sizeof *k->tensors);
  if (!k->tensors) return error_set(e, ERROR_SYSTEM, "out of memory");
  size_t n = 0;
  for (int i = 0; i < k->manifest.n_files; i++)
    for (int j = 0; j < hdf5_slice_count(k->files[i]); j++) k->tensors[n++] = *hdf5_slice(k->files[i], j);
  qsort(k->tensors, n, sizeof *k->tensors, by_name_and_row);
  for (size_t i = 0; i < n; k->n_tensors++) {
    struct tensor_slice whole = k->tensors[i];
    whole.first_row = whole.rows = 0;
    for (; i < n && strcmp(k->tensors[i].name, whole.name) == 0; i++) {
      const struct tensor_slice *s = &k->tensors[i];
      if (s->global_rows != whole.global_rows || s->cols != whole.cols || s->dtype != whole.dtype)
        return error_set(e, ERROR_CHECKPOINT, "%s: slices of %s disagree about its shape", k->path, s->name);
      if (s->first_row != whole.rows) break;
      whole.rows += s->rows;
    }
    const bool twice = i < n && strcmp(k->tensors[i].name, whole.name) == 0 && k->tensors[i].first_row < whole.rows;
    if (whole.rows != whole.global_rows || twice)
      return error_set(e, ERROR_CHECKPOINT, "%s: row %" PRId64 " of %s is %s", k->path, twice ? k->tensors[i].first_row : whole.rows,
                       whole.name, twice ? "there twice" : "missing");
    k->tensors[k->n_tensors] = whole;
  }
  return true;
}

/* ---- opening, together --------------------------------------------------------------- */

static bool speaks(const struct comm *c) { return !c || comm_rank(c) == 0; }

/* Rank 0's bytes on every rank. */
static bool share(struct comm *c, void *x, size_t bytes, struct error *e) { return !c || comm_broadcast(c, x, (int64_t)bytes, 0, e); }

/* True on every rank where `fault` is -1 on all.  Else *e on all is that of the smallest fault
 * (the number of a file), of equals the lowest rank's: *who. */
static bool settle(struct comm *c, int64_t fault, int *who, struct error *e) {
  *who = 0;
  if (!c || comm_world(c) == 1) return fault < 0;
  const int world = comm_world(c);
  double first = fault < 0 ? -INFINITY : -(double)(fault * world + comm_rank(c));
  struct error broken;
  if (!comm_max_f64(c, &first, 1, e)) return false;
  if (isinf(first)) return true;
  *who = (int)((int64_t)-first % world);
  if (!comm_broadcast(c, e, (int64_t)sizeof *e, *who, &broken)) *e = broken;
  return false;
}

static bool open_files(struct checkpoint *k, struct error *e) {
  k->files = calloc((size_t)k->manifest.n_files, sizeof *k->files);
  if (!k->files) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (int i = 0; i < k->manifest.n_files; i++) {
    char name[STORE_PATH + 80];
    snprintf(name, sizeof name, "%s/%s", k->path, k->manifest.files[i].name);
    k->files[i] = hdf5_open(name, e);
    if (!k->files[i]) return false;
  }
  return collect(k, e);
}

/* *elsewhere: rank 0 has nothing against it, but another rank could not open it. */
static struct checkpoint *open_step_files(struct comm *c, const char *path, bool verify, bool *elsewhere, struct error *e) {
  int who, reader;
  *elsewhere = false;
  if (!store_path_fits(path, e)) return NULL; /* here as there */
  struct checkpoint *k = calloc(1, sizeof *k);
  bool good = k != NULL || error_set(e, ERROR_SYSTEM, "out of memory");
  if (k) snprintf(k->path, sizeof k->path, "%s", path);
  good = settle(c, good && manifest_read(path, false, &k->manifest, e) ? -1 : 0, &who, e);
  if (good && verify)
    good = settle(c, verify_share(path, &k->manifest, c ? comm_rank(c) : 0, c ? comm_world(c) : 1, c ? comm_local_world(c) : 1, e), &reader, e);
  if (good) good = settle(c, open_files(k, e) ? -1 : 0, &who, e);
  if (good) return k;
  *elsewhere = who > 0;
  if (*elsewhere) error_context(e, "rank %d", who);
  checkpoint_close(k);
  return NULL;
}

struct checkpoint *checkpoint_open_together(struct comm *c, const char *path, bool verify, struct error *e) {
  bool elsewhere;
  return open_step_files(c, path, verify, &elsewhere, e);
}

struct checkpoint *checkpoint_open(const char *path, bool verify, struct error *e) {
  return checkpoint_open_together(NULL, path, verify, e);
}

/* The step of FOLDER that is named after `update`. */
static struct checkpoint *open_step(struct comm *c, const char *folder, int64_t update, bool *elsewhere, struct error *e) {
  char path[STORE_PATH];
  store_step_path(folder, update, path);
  struct checkpoint *k = open_step_files(c, path, true, elsewhere, e);
  if (!k || k->manifest.update == update) return k;
  error_set(e, ERROR_CHECKPOINT, "%s holds update %" PRId64 ": it was renamed or copied", path, k->manifest.update);
  checkpoint_close(k);
  return NULL;
}

/* What rank 0 lists. */
static bool list_together(struct comm *c, const char *folder, int64_t **updates, int *n, struct error *e) {
  int who;
  *updates = NULL;
  *n = 0;
  if (!settle(c, !speaks(c) || store_list(folder, updates, n, e) ? -1 : 0, &who, e) || !share(c, n, sizeof *n, e)) return false;
  if (!speaks(c)) *updates = malloc((size_t)*n * sizeof **updates + 1);
  return settle(c, *n == 0 || *updates || error_set(e, ERROR_SYSTEM, "out of memory") ? -1 : 0, &who, e) &&
         (*n == 0 || share(c, *updates, (size_t)*n * sizeof **updates, e));
}

static bool listed(int64_t update, const int64_t *updates, int n) {
  for (int i = n - 1; i >= 0 && updates[i] >= update; i--)
    if (updates[i] == update) return true;
  return false;
}

/* Has the run a step now that was not there when `was` were listed?  (The last of them may be no
 * step of it: a copy under a later name.) */
static bool is_overtaken(struct comm *c, const char *folder, const int64_t *was, int n_was, bool *overtaken, struct error *e) {
  int64_t *updates;
  int n;
  struct error ignored;
  *overtaken = false;
  if (speaks(c) && store_list(folder, &updates, &n, &ignored)) {
    for (int i = n - 1; i >= 0 && !*overtaken; i--) *overtaken = !listed(updates[i], was, n_was);
    free(updates);
  }
  return share(c, overtaken, sizeof *overtaken, e);
}

/* One look.  A living run removes old steps once a newer one stands: where one cannot be
 * opened and a newer one has come, *overtaken, and the look says nothing. */
static struct checkpoint *look_for_newest(struct comm *c, const char *folder, bool *overtaken, struct error *e) {
  int64_t *updates;
  int n;
  struct checkpoint *k = NULL;
  struct error newest = {0};
  bool good = list_together(c, folder, &updates, &n, e);
  for (int i = n - 1; good && i >= 0; i--) {
    struct error damage;
    bool elsewhere;
    k = open_step(c, folder, updates[i], &elsewhere, &damage);
    if (k) break;
    good = is_overtaken(c, folder, updates, n, overtaken, e);
    if (!good) break;
    if (*overtaken || elsewhere || damage.code != ERROR_CHECKPOINT) { /* not ERROR_CHECKPOINT: this process cannot read it now */
      *e = damage;
      if (elsewhere)
        error_hint(e, "it is not passed over: rank 0 has nothing against it; do all hosts see the same folder?");
      else if (!*overtaken)
        error_hint(e, "it is not passed over: it may be whole; see to this and start again");
      good = false;
      break;
    }
    if (speaks(c)) log_warning("checkpoint passed over: %s", damage.message);
    if (i == n - 1) newest = damage;
  }
  free(updates);
  if (k || !good) return k;
  if (n > 0) {
    error_set(e, ERROR_CHECKPOINT, "%s holds no whole checkpoint; the newest: %s", folder, newest.message);
    error_hint(e, "move the folder away to start from the beginning");
  } else {
    e->code = ERROR_NONE;
  }
  return NULL;
}

struct checkpoint *checkpoint_open_newest_together(struct comm *c, const char *folder, struct error *e) {
  enum { LOOKS = 1000 };
  if (!store_path_fits(folder, e)) return NULL;
  char gone[STORE_PATH];
  if (speaks(c) && store_latest_dangles(folder, gone)) log_warning("%s/latest points at %s, which is not there", folder, gone);
  struct checkpoint *k = NULL;
  bool overtaken = true;
  for (int look = 0; overtaken && look < LOOKS; look++) {
    overtaken = false;
    k = look_for_newest(c, folder, &overtaken, e);
  }
  return k;
}

struct checkpoint *checkpoint_open_newest(const char *folder, struct error *e) { return checkpoint_open_newest_together(NULL, folder, e); }

const char *checkpoint_path(const struct checkpoint *k) { return k->path; }
int64_t checkpoint_update(const struct checkpoint *k) { return k->manifest.update; }
const char *checkpoint_meta(const struct checkpoint *k) { return k->manifest.meta; }
int checkpoint_tensor_count(const struct checkpoint *k) { return k->n_tensors; }
const struct tensor_slice *checkpoint_tensor(const struct checkpoint *k, int i) { return &k->tensors[i]; }

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static bool same_tensor(const struct checkpoint *k, const struct tensor_slice *want, struct error *e) {
  const struct tensor_slice *have = k->n_tensors > 0 ? bsearch(want, k->tensors, (size_t)k->n_tensors, sizeof *want, by_name) : NULL;
  if (!have) return error_set(e, ERROR_CHECKPOINT, "%s holds no tensor %s", k->path, want->name);
  if (want->first_row < 0 || want->rows < 0 || want->first_row > want->global_rows - want->rows)
    return error_set(e, ERROR_INTERNAL, "rows %" PRId64 " + %" PRId64 " asked for of the %" PRId64 " of %s", want->first_row,
                     want->rows, want->global_rows, want->name);
  if (have->global_rows != want->global_rows || have->cols != want->cols || have->dtype != want->dtype) {
    error_set(e, ERROR_CHECKPOINT, "%s: %s is [%" PRId64 ", %" PRId64 "] %s, the model wants [%" PRId64 ", %" PRId64 "] %s",
              k->path, want->name, have->global_rows, have->cols, dtype_name(have->dtype), want->global_rows, want->cols,
              dtype_name(want->dtype));
    return error_hint(e, "the checkpoint is of another model or another train.param_dtype");
  }
  return true;
}

/* Reads the rows of `want` that each file has. */
static bool read_slice(struct checkpoint *k, const struct tensor_slice *want, struct error *e) {
  for (int i = 0; i < k->manifest.n_files; i++)
    for (int j = 0; j < hdf5_slice_count(k->files[i]); j++) {
      const struct tensor_slice *s = hdf5_slice(k->files[i], j);
      if (strcmp(s->name, want->name) != 0) continue;
      const int64_t first = larger(s->first_row, want->first_row);
      const int64_t end = smaller(s->first_row + s->rows, want->first_row + want->rows);
      if (first >= end) continue;
      char *to = (char *)want->data + (size_t)((first - want->first_row) * want->cols) * dtype_bytes(want->dtype);
      if (!hdf5_read(k->files[i], j, first - s->first_row, end - first, to, e)) return false;
    }
  return true;
}

/* Threads that decompress. Where none can be made the caller does it alone. */
static void take_threads(struct checkpoint *k) {
  enum { MOST = 8 }; /* a file system seldom delivers more than these can take */
  const int available = threads_available(), n = available < MOST ? available : MOST;
  struct error ignored;
  if (k->threads || n == 1) return;
  k->threads = threads_create(n, &ignored);
  for (int i = 0; i < k->manifest.n_files; i++) hdf5_use_threads(k->files[i], k->threads);
}

bool checkpoint_read(struct checkpoint *k, const struct tensor_slice *slices, int n_slices, struct error *e) {
  take_threads(k);
  for (int i = 0; i < n_slices; i++)
    if (!same_tensor(k, &slices[i], e) || !read_slice(k, &slices[i], e)) return false;
  return true;
}

void checkpoint_bytes(const struct checkpoint *k, int64_t *tensors, int64_t *files) {
  *tensors = *files = 0;
  for (int i = 0; i < k->n_tensors; i++) *tensors += k->tensors[i].rows * k->tensors[i].cols * (int64_t)dtype_bytes(k->tensors[i].dtype);
  for (int i = 0; i < k->manifest.n_files; i++) *files += k->manifest.files[i].bytes;
}

void checkpoint_close(struct checkpoint *k) {
  if (!k) return;
  for (int i = 0; k->files && i < k->manifest.n_files; i++) hdf5_close(k->files[i]);
  free(k->files);
  threads_destroy(k->threads);
  free(k->tensors);
  manifest_free(&k->manifest);
  free(k);
}

/* ---- for analysis ------------------------------------------------------------------ */

/* HDF5 reads the name of a virtual dataset's source as a format: "%%" is a percent sign. */
static bool double_percents(const char *path, char to[STORE_PATH]) {
  int n = 0;
  for (const char *p = path; *p && n < STORE_PATH - 2; p++) {
    to[n++] = *p;
    if (*p == '%') to[n++] = '%';
  }
  to[n] = 0;
  return n < STORE_PATH - 2;
}

/* Where the rank files of PATH are for somebody who looks from FILE's folder. */
static bool way_to_files(const char *path, const char *file, char way[STORE_PATH], struct error *e) {
  char own[PATH_MAX], beside[PATH_MAX], folder[STORE_PATH] = ".";
  const char *slash = strrchr(file, '/');
  if (slash) snprintf(folder, sizeof folder, "%.*s", slash == file ? 1 : (int)(slash - file), file);
  if (!realpath(path, own)) return error_errno(e, store_fault(errno), "cannot examine %s", path);
  if (!realpath(folder, beside)) return error_errno(e, store_fault(errno), "cannot examine %s", folder);
  way[0] = 0;
  if (strcmp(own, beside) == 0) return true;
  if (!double_percents(own, way)) return error_set(e, ERROR_CHECKPOINT, "the path %.60s... is too long", own);
  strcat(way, "/");
  return true;
}

static bool map_tensor(struct checkpoint *k, struct hdf5_index *x, int tensor, const char *way, struct error *e) {
  const struct tensor_slice *whole = &k->tensors[tensor];
  if (!hdf5_index_begin(x, whole, e)) return false;
  for (int i = 0; i < k->manifest.n_files; i++)
    for (int j = 0; j < hdf5_slice_count(k->files[i]); j++) {
      const struct tensor_slice *s = hdf5_slice(k->files[i], j);
      char source[STORE_PATH + 64];
      if (strcmp(s->name, whole->name) != 0 || s->rows == 0) continue;
      snprintf(source, sizeof source, "%s%s", way, k->manifest.files[i].name);
      if (!hdf5_index_map(x, source, s, e)) return false;
    }
  return hdf5_index_end(x, e);
}

bool checkpoint_index(struct checkpoint *k, const char *file, struct error *e) {
  char way[STORE_PATH];
  if (!store_path_fits(file, e) || !way_to_files(k->path, file, way, e)) return false;
  if (file_exists(file)) return error_set(e, ERROR_CHECKPOINT, "%s is there already", file);
  struct hdf5_index *x = hdf5_index_create(file, e);
  bool good = x != NULL;
  for (int i = 0; good && i < k->n_tensors; i++) good = map_tensor(k, x, i, way, e);
  if (x) good = hdf5_index_finish(x, good, e);
  return good;
}

bool checkpoint_set_aside(const char *folder, int64_t update, struct error *e) {
  return store_set_aside(folder, update, e);
}

void checkpoint_list(const char *folder, char *text, int size) {
  int64_t *updates;
  int n;
  struct error ignored;
  text[0] = 0;
  if (!store_list(folder, &updates, &n, &ignored)) return;
  for (int i = 0, at = 0; i < n && at < size; i++)
    at += snprintf(text + at, (size_t)(size - at), "%sstep-%08" PRId64, i ? ", " : "", updates[i]);
  free(updates);
}
