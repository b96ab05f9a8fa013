/* Writing a rank's file: threads compress, and write in turn.
 *
 * The chunks of all slices are one list of tasks.  A thread compresses a chunk, waits
 * until those before it are in the file, and writes it: one thread at a time is inside
 * HDF5, a chunk a thread is in memory, and the file does not depend on how many there are.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoints/chunk.h"
#include "checkpoints/hdf5_parts.h"
#include "checkpoints/sink.h"
#include "checkpoints/zstd_filter.h"

struct hdf5_writer {
  hid_t file;
  hid_t group; /* how groups are made: without times, as all here, so that equal state makes equal files */
  struct hdf5_options options;
  struct chunk_coder **coders; /* one a worker */
  int n_coders;
  int failure; /* the disk's first errno */
  bool broken;
  char path[1024];
};

struct hdf5_writer *hdf5_create_with(const char *path, const struct hdf5_options *o, struct error *e) {
  if (!hdf5_library(e)) return NULL;
  struct hdf5_writer *w = calloc(1, sizeof *w);
  if (!w) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  snprintf(w->path, sizeof w->path, "%s", path);
  w->options = *o;
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  hid_t creation = H5Pcreate(H5P_FILE_CREATE);
  w->group = H5Pcreate(H5P_GROUP_CREATE);
  const bool set = H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110) >= 0 && sink_set(access, &w->failure) &&
                   H5Pset_obj_track_times(creation, false) >= 0 && H5Pset_obj_track_times(w->group, false) >= 0;
  w->file = set ? H5Fcreate(path, H5F_ACC_TRUNC, creation, access) : H5I_INVALID_HID;
  H5Pclose(creation);
  H5Pclose(access);
  if (w->file >= 0) return w;
  hdf5_failed(e, "cannot create", path);
  w->broken = true;
  hdf5_finish(w, e);
  return NULL;
}

struct hdf5_writer *hdf5_create(const char *path, struct error *e) {
  return hdf5_create_with(path, &(struct hdf5_options){CHECKPOINT_STORE, NULL}, e);
}

/* ---- one dataset ----------------------------------------------------------------- */

static bool compressed(const struct hdf5_writer *w, const struct tensor_slice *s) {
  return w->options.compression == CHECKPOINT_ZSTD && s->rows > 0 && s->cols > 0;
}

static int64_t rows_of_chunk(const struct tensor_slice *s) {
  return chunk_rows(s->rows, (size_t)s->cols * dtype_bytes(s->dtype));
}

/* How its elements lie in the file: contiguous, or chunked under shuffle and zstd. */
static hid_t creation(const struct hdf5_writer *w, const struct tensor_slice *s) {
  hid_t list = H5Pcreate(H5P_DATASET_CREATE);
  const unsigned level = CHUNK_LEVEL;
  if (list >= 0) H5Pset_obj_track_times(list, false);
  if (list < 0 || !compressed(w, s)) return list;
  const hsize_t chunk[2] = {(hsize_t)rows_of_chunk(s), (hsize_t)s->cols};
  if (H5Pset_chunk(list, 2, chunk) >= 0 && H5Pset_fill_time(list, H5D_FILL_TIME_NEVER) >= 0 && H5Pset_shuffle(list) >= 0 &&
      H5Pset_filter(list, ZSTD_FILTER, H5Z_FLAG_MANDATORY, 1, &level) >= 0)
    return list;
  H5Pclose(list);
  return H5I_INVALID_HID;
}

static bool write_attributes(hid_t object, const struct hdf5_attribute *attributes, int n) {
  bool good = true;
  for (int i = 0; good && i < n; i++) {
    const struct hdf5_attribute *a = &attributes[i];
    good = a->text ? hdf5_write_text(object, a->name, a->text) : hdf5_write_number(object, a->name, a->number);
  }
  return good;
}

/* "a" and "a/b" of "a/b/c". */
static bool make_groups(struct hdf5_writer *w, const char *name) {
  char path[sizeof((struct tensor_slice *)0)->name];
  for (const char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
    if (slash == name) continue;
    snprintf(path, sizeof path, "%.*s", (int)(slash - name), name);
    if (H5Lexists(w->file, path, H5P_DEFAULT) > 0) continue;
    hid_t group = H5Gcreate2(w->file, path, H5P_DEFAULT, w->group, H5P_DEFAULT);
    if (group < 0) return false;
    H5Gclose(group);
  }
  return true;
}

static hid_t make_dataset(struct hdf5_writer *w, const struct tensor_slice *s) {
  const hsize_t shape[2] = {(hsize_t)s->rows, (hsize_t)s->cols};
  hid_t space = H5Screate_simple(2, shape, NULL), list = creation(w, s);
  hid_t dataset = list >= 0 && make_groups(w, s->name) ? H5Dcreate2(w->file, s->name, hdf5_type(s->dtype), space, H5P_DEFAULT, list, H5P_DEFAULT) : H5I_INVALID_HID;
  if (list >= 0) H5Pclose(list);
  if (space >= 0) H5Sclose(space);
  if (dataset < 0) return dataset;
  if (hdf5_write_number(dataset, "global_rows", s->global_rows) && hdf5_write_number(dataset, "cols", s->cols) &&
      hdf5_write_number(dataset, "first_row", s->first_row) && hdf5_write_number(dataset, "dtype", s->dtype))
    return dataset;
  H5Dclose(dataset);
  return H5I_INVALID_HID;
}

/* ---- chunks in turn ---------------------------------------------------------------- */

struct turns {
  struct hdf5_writer *w;
  const struct tensor_slice *slices;
  int64_t *first; /* chunk number that slice i begins with; [n] is the number of all */
  int n;
  const struct hdf5_attribute *attributes;
  int n_attributes;
  pthread_mutex_t lock;
  pthread_cond_t moved;
  int64_t turn; /* chunks up to here are written */
  hid_t dataset; /* of the slice whose turn it is */
  bool failed;
  struct error error;
};

static int slice_of(const struct turns *t, int64_t chunk) {
  int low = 0, high = t->n; /* first[low] <= chunk < first[high] */
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (t->first[middle] <= chunk)
      low = middle;
    else
      high = middle;
  }
  return low;
}

static bool write_chunk(struct turns *t, int i, int64_t row, bool first, bool last, const void *packed, size_t bytes) {
  struct hdf5_writer *w = t->w;
  const struct tensor_slice *s = &t->slices[i];
  const hsize_t at[2] = {(hsize_t)row, 0};
  if (!hdf5_library(&t->error)) return false;
  if (first) t->dataset = make_dataset(w, s);
  bool good = t->dataset >= 0 && (!first || write_attributes(t->dataset, t->attributes, t->n_attributes)) &&
              H5Dwrite_chunk(t->dataset, H5P_DEFAULT, 0, at, bytes, packed) >= 0;
  if (!good) {
    hdf5_failed(&t->error, "cannot write", w->path);
    error_context(&t->error, "tensor %s", s->name);
  }
  if (t->dataset >= 0 && (last || !good)) {
    if (H5Dclose(t->dataset) < 0 && good) good = hdf5_failed(&t->error, "cannot write", w->path);
    t->dataset = H5I_INVALID_HID;
  }
  return good;
}

static void chunk_task(void *context, int64_t chunk, int worker) {
  struct turns *t = context;
  const int i = slice_of(t, chunk);
  const struct tensor_slice *s = &t->slices[i];
  const size_t element = dtype_bytes(s->dtype);
  const int64_t most = rows_of_chunk(s), row = (chunk - t->first[i]) * most;
  const int64_t rows = s->rows - row < most ? s->rows - row : most;
  const void *packed = NULL;
  size_t bytes = 0;
  struct error error;
  pthread_mutex_lock(&t->lock);
  const bool wanted = !t->failed && t->w->failure == 0;
  pthread_mutex_unlock(&t->lock);
  const bool coded = wanted && chunk_encode(t->w->coders[worker], (const char *)s->data + (size_t)(row * s->cols) * element, rows * s->cols,
                                            most * s->cols, element, &packed, &bytes, &error);
  pthread_mutex_lock(&t->lock);
  while (t->turn != chunk) pthread_cond_wait(&t->moved, &t->lock);
  if (!t->failed && wanted && !coded) {
    t->error = error;
    t->failed = true;
  }
  if (coded && !t->failed) t->failed = !write_chunk(t, i, row, row == 0, chunk + 1 == t->first[i + 1], packed, bytes);
  t->turn++;
  pthread_cond_broadcast(&t->moved);
  pthread_mutex_unlock(&t->lock);
}

static bool make_coders(struct hdf5_writer *w, struct error *e) {
  const int n = w->options.threads ? threads_count(w->options.threads) : 1;
  if (!w->coders) w->coders = calloc((size_t)n, sizeof(struct chunk_coder *));
  if (!w->coders) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (; w->n_coders < n; w->n_coders++)
    if (!(w->coders[w->n_coders] = chunk_coder_open())) return error_set(e, ERROR_SYSTEM, "out of memory");
  return true;
}

static bool write_compressed(struct hdf5_writer *w, const struct tensor_slice *slices, int n, const struct hdf5_attribute *attributes,
                             int n_attributes, struct error *e) {
  struct turns t = {.w = w, .slices = slices, .n = n, .attributes = attributes, .n_attributes = n_attributes, .dataset = H5I_INVALID_HID};
  t.first = calloc((size_t)n + 1, sizeof *t.first);
  if (!t.first || !make_coders(w, e)) {
    free(t.first);
    return error_set(e, ERROR_SYSTEM, "out of memory");
  }
  for (int i = 0; i < n; i++) {
    const int64_t most = rows_of_chunk(&slices[i]);
    t.first[i + 1] = t.first[i] + (slices[i].rows + most - 1) / most;
  }
  pthread_mutex_init(&t.lock, NULL);
  pthread_cond_init(&t.moved, NULL);
  if (w->options.threads)
    threads_run(w->options.threads, t.first[n], chunk_task, &t);
  else
    for (int64_t i = 0; i < t.first[n]; i++) chunk_task(&t, i, 0);
  if (t.dataset >= 0) H5Dclose(t.dataset); /* left open where the disk had failed */
  pthread_cond_destroy(&t.moved);
  pthread_mutex_destroy(&t.lock);
  free(t.first);
  if (t.failed && e) *e = t.error;
  return !t.failed;
}

static bool write_contiguous(struct hdf5_writer *w, const struct tensor_slice *s, const struct hdf5_attribute *attributes, int n,
                             struct error *e) {
  hid_t dataset = make_dataset(w, s);
  bool good = dataset >= 0 && H5Dwrite(dataset, hdf5_type(s->dtype), H5S_ALL, H5S_ALL, H5P_DEFAULT, s->data) >= 0 &&
              write_attributes(dataset, attributes, n);
  if (dataset >= 0) good = H5Dclose(dataset) >= 0 && good;
  return good || hdf5_failed(e, "cannot write", w->path);
}

/* ---- the file ------------------------------------------------------------------------ */

static bool add(struct hdf5_writer *w, const struct tensor_slice *slices, int n, const struct hdf5_attribute *attributes, int n_attributes,
                struct error *e) {
  if (w->broken || w->failure) return false; /* said already, or by hdf5_finish */
  bool good = hdf5_library(e);
  for (int i = 0; good && i < n && !w->failure;) {
    int end = i;
    while (end < n && compressed(w, &slices[end])) end++;
    good = end > i ? write_compressed(w, slices + i, end - i, attributes, n_attributes, e)
                   : write_contiguous(w, &slices[i], attributes, n_attributes, e);
    i = end > i ? end : i + 1;
  }
  w->broken = !good;
  return good;
}

bool hdf5_add_all(struct hdf5_writer *w, const struct tensor_slice *slices, int n, struct error *e) {
  return add(w, slices, n, NULL, 0, e);
}

bool hdf5_add(struct hdf5_writer *w, const struct tensor_slice *s, const struct hdf5_attribute *attributes, int n,
              struct error *e) {
  if (s) return add(w, s, 1, attributes, n, e);
  if (w->broken || w->failure) return false;
  if (hdf5_library(e) && write_attributes(w->file, attributes, n)) return true;
  w->broken = true;
  return hdf5_failed(e, "cannot write", w->path);
}

bool hdf5_finish(struct hdf5_writer *w, struct error *e) {
  bool good = !w->broken;
  if (w->file >= 0 && H5Fclose(w->file) < 0 && good) good = hdf5_failed(e, "cannot close", w->path);
  if (w->group >= 0) H5Pclose(w->group);
  errno = w->failure; /* what the disk said; HDF5 knows nothing of it */
  if (w->failure) good = error_errno(e, ERROR_CHECKPOINT, "cannot write %s", w->path);
  for (int i = 0; i < w->n_coders; i++) chunk_coder_close(w->coders[i]);
  free(w->coders);
  free(w);
  return good;
}

bool hdf5_write_with(const char *path, const struct hdf5_options *o, const struct tensor_slice *slices, int n, struct error *e) {
  struct hdf5_writer *w = hdf5_create_with(path, o, e);
  if (!w) return false;
  hdf5_add_all(w, slices, n, e);
  return hdf5_finish(w, e);
}

bool hdf5_write(const char *path, const struct tensor_slice *slices, int n, struct error *e) {
  return hdf5_write_with(path, &(struct hdf5_options){CHECKPOINT_ZSTD, NULL}, slices, n, e);
}
