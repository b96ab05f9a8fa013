/* Reading a rank's file: threads fetch chunks one at a time and decompress side by side. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "checkpoints/chunk.h"
#include "checkpoints/hdf5_parts.h"
#include "checkpoints/store.h"
#include "checkpoints/zstd_filter.h"

struct hdf5_file {
  hid_t file;
  char path[1024];
  struct tensor_slice *slices;
  int64_t *chunk_rows; /* of slice i; 0: not our chunks, HDF5's pipeline reads it */
  int n, room;
  struct threads *threads;
  struct chunk_coder **coders; /* one a worker */
  int n_coders;
};

/* The object whose attribute is asked for; closed by H5Oclose. */
static hid_t object_of(const struct hdf5_file *f, int i) {
  return i < 0 ? H5Oopen(f->file, "/", H5P_DEFAULT) : H5Oopen(f->file, f->slices[i].name, H5P_DEFAULT);
}

bool hdf5_number(const struct hdf5_file *f, int i, const char *name, int64_t *value) {
  hid_t object = object_of(f, i);
  bool good = object >= 0 && H5Aexists(object, name) > 0 && hdf5_read_number(object, name, value);
  if (object >= 0) H5Oclose(object);
  return good;
}

bool hdf5_text(const struct hdf5_file *f, int i, const char *name, char *text, int size) {
  hid_t object = object_of(f, i), type = hdf5_text_type();
  hid_t attribute = object >= 0 && H5Aexists(object, name) > 0 ? H5Aopen(object, name, H5P_DEFAULT) : H5I_INVALID_HID;
  char *found = NULL;
  bool good = attribute >= 0 && hdf5_one_value(attribute) && H5Aread(attribute, type, &found) >= 0 && found && strlen(found) < (size_t)size;
  if (good) snprintf(text, (size_t)size, "%s", found);
  H5free_memory(found);
  if (attribute >= 0) H5Aclose(attribute);
  if (type >= 0) H5Tclose(type);
  if (object >= 0) H5Oclose(object);
  return good;
}

/* ---- what is in it --------------------------------------------------------- */

/* Rows of a chunk where the dataset is under shuffle and zstd, as we write it; else 0. */
static int64_t our_chunk_rows(hid_t dataset, const struct tensor_slice *s) {
  hid_t list = H5Dget_create_plist(dataset);
  hsize_t chunk[2] = {0, 0};
  unsigned flags, config, values[8];
  size_t n = 8;
  int64_t rows = 0;
  if (list >= 0 && H5Pget_layout(list) == H5D_CHUNKED && H5Pget_chunk(list, 2, chunk) == 2 && H5Pget_nfilters(list) == 2 &&
      H5Pget_filter2(list, 0, &flags, &n, values, 0, NULL, &config) == H5Z_FILTER_SHUFFLE && n >= 1 && values[0] == dtype_bytes(s->dtype)) {
    n = 8;
    if (H5Pget_filter2(list, 1, &flags, &n, values, 0, NULL, &config) == ZSTD_FILTER && chunk[1] == (hsize_t)s->cols && chunk[0] > 0 &&
        chunk[0] <= (hsize_t)s->rows)
      rows = (int64_t)chunk[0];
  }
  if (list >= 0) H5Pclose(list);
  return rows;
}

static bool describe_dataset(hid_t dataset, struct tensor_slice *s) {
  int64_t dtype;
  hsize_t shape[2];
  hid_t space = H5Dget_space(dataset);
  bool good = space >= 0 && H5Sget_simple_extent_ndims(space) == 2 && H5Sget_simple_extent_dims(space, shape, NULL) == 2 &&
              hdf5_read_number(dataset, "global_rows", &s->global_rows) && hdf5_read_number(dataset, "cols", &s->cols) &&
              hdf5_read_number(dataset, "first_row", &s->first_row) && hdf5_read_number(dataset, "dtype", &dtype) &&
              (dtype == DTYPE_F32 || dtype == DTYPE_BF16);
  if (space >= 0) H5Sclose(space);
  if (!good) return false;
  s->dtype = (enum dtype)dtype;
  hid_t type = H5Dget_type(dataset);
  good = type >= 0 && H5Tget_class(type) == H5T_FLOAT && H5Tget_size(type) == dtype_bytes(s->dtype);
  if (type >= 0) H5Tclose(type);
  if (!good || shape[0] > INT64_MAX || shape[1] > INT64_MAX || s->global_rows < 0) return false;
  s->rows = (int64_t)shape[0];
  int64_t elements, bytes; /* of the whole tensor: then no product of these overflows */
  return s->cols == (int64_t)shape[1] && s->first_row >= 0 && s->first_row <= s->global_rows - s->rows &&
         checked_mul(s->global_rows, s->cols, &elements) && checked_mul(elements, (int64_t)sizeof(double), &bytes);
}

static bool more_room(struct hdf5_file *f) {
  if (f->n < f->room) return true;
  const int room = f->room ? 2 * f->room : 64;
  struct tensor_slice *slices = realloc(f->slices, (size_t)room * sizeof *slices);
  if (slices) f->slices = slices;
  int64_t *rows = slices ? realloc(f->chunk_rows, (size_t)room * sizeof *rows) : NULL;
  if (!rows) return false;
  f->chunk_rows = rows;
  f->room = room;
  return true;
}

static herr_t visit(hid_t file, const char *name, const H5O_info_t *info, void *context) {
  struct hdf5_file *f = context;
  if (info->type != H5O_TYPE_DATASET) return 0;
  if (!more_room(f)) return -1;
  struct tensor_slice *s = &f->slices[f->n];
  memset(s, 0, sizeof *s);
  if (strlen(name) >= sizeof s->name) return -1;
  snprintf(s->name, sizeof s->name, "%s", name);
  hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
  bool good = dataset >= 0 && describe_dataset(dataset, s);
  if (good) f->chunk_rows[f->n] = our_chunk_rows(dataset, s);
  if (dataset >= 0) H5Dclose(dataset);
  if (!good) return -1;
  f->n++;
  return 0;
}

struct hdf5_file *hdf5_open(const char *path, struct error *e) {
  if (!hdf5_library(e)) return NULL;
  struct hdf5_file *f = calloc(1, sizeof *f);
  if (!f) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  snprintf(f->path, sizeof f->path, "%s", path);
  errno = 0;
  f->file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
  if (f->file < 0) {
    const int why = errno;
    hdf5_failed(e, "cannot open", path);
    if (store_fault(why) != ERROR_CHECKPOINT) {
      errno = why;
      error_errno(e, store_fault(why), "cannot open %s", path);
    }
    hdf5_close(f);
    return NULL;
  }
  if (H5Ovisit2(f->file, H5_INDEX_NAME, H5_ITER_INC, visit, f, H5O_INFO_BASIC) < 0) {
    error_set(e, ERROR_CHECKPOINT, "%s holds a dataset that is not a tensor slice of fp4d", path);
    hdf5_close(f);
    return NULL;
  }
  return f;
}

static void close_coders(struct hdf5_file *f) {
  for (int i = 0; i < f->n_coders; i++) chunk_coder_close(f->coders[i]);
  free(f->coders);
  f->coders = NULL;
  f->n_coders = 0;
}

void hdf5_close(struct hdf5_file *f) {
  if (!f) return;
  if (f->file >= 0) H5Fclose(f->file);
  close_coders(f);
  free(f->slices);
  free(f->chunk_rows);
  free(f);
}

void hdf5_use_threads(struct hdf5_file *f, struct threads *threads) {
  close_coders(f);
  f->threads = threads;
}

int hdf5_slice_count(const struct hdf5_file *f) { return f->n; }
const struct tensor_slice *hdf5_slice(const struct hdf5_file *f, int i) { return &f->slices[i]; }

bool hdf5_compressed(const struct hdf5_file *f, int i, int64_t *bytes) {
  hid_t dataset = H5Dopen2(f->file, f->slices[i].name, H5P_DEFAULT);
  *bytes = dataset >= 0 ? (int64_t)H5Dget_storage_size(dataset) : 0;
  if (dataset >= 0) H5Dclose(dataset);
  return f->chunk_rows[i] > 0;
}

/* ---- chunks ------------------------------------------------------------------ */

struct fetching {
  struct hdf5_file *f;
  const struct tensor_slice *s;
  hid_t dataset;
  int64_t chunk_rows, first, rows; /* wanted of the slice */
  char *data;
  pthread_mutex_t lock; /* around HDF5 */
  bool failed;
  struct error error;
};

/* The chunk that begins with `row` as it lies in the file; NULL with *e. */
static const void *fetch(struct fetching *t, struct chunk_coder *c, int64_t row, size_t most, size_t *bytes, struct error *e) {
  const hsize_t at[2] = {(hsize_t)row, 0};
  hsize_t stored = 0;
  uint32_t left_out = 0;
  if (!hdf5_library(e)) return NULL;
  if (H5Dget_chunk_storage_size(t->dataset, at, &stored) < 0) {
    hdf5_failed(e, "cannot read", t->f->path);
    return NULL;
  }
  if (stored == 0 || stored > most) {
    error_set(e, ERROR_CHECKPOINT, "cannot read %s: a chunk of %llu bytes", t->f->path, (unsigned long long)stored);
    return NULL;
  }
  void *room = chunk_room(c, (size_t)stored);
  if (!room) {
    error_set(e, ERROR_SYSTEM, "out of memory for a checkpoint's chunk");
    return NULL;
  }
  if (H5Dread_chunk(t->dataset, H5P_DEFAULT, at, &left_out, room) < 0 || left_out != 0) {
    hdf5_failed(e, "cannot read", t->f->path);
    return NULL;
  }
  *bytes = (size_t)stored;
  return room;
}

static void fetch_task(void *context, int64_t index, int worker) {
  struct fetching *t = context;
  struct chunk_coder *c = t->f->coders[worker];
  const size_t element = dtype_bytes(t->s->dtype), row_bytes = (size_t)t->s->cols * element;
  const int64_t begin = (t->first / t->chunk_rows + index) * t->chunk_rows;
  const int64_t from = begin > t->first ? begin : t->first;
  const int64_t end = begin + t->chunk_rows < t->first + t->rows ? begin + t->chunk_rows : t->first + t->rows;
  size_t bytes = 0;
  struct error error;
  pthread_mutex_lock(&t->lock);
  const bool wanted = !t->failed;
  const void *packed = wanted ? fetch(t, c, begin, chunk_coder_bytes((size_t)t->chunk_rows * row_bytes), &bytes, &error) : NULL;
  pthread_mutex_unlock(&t->lock);
  if (!wanted) return;
  bool good = packed != NULL;
  if (good && !chunk_decode(c, packed, bytes, t->chunk_rows * t->s->cols, element, (from - begin) * t->s->cols, (end - from) * t->s->cols,
                            t->data + (size_t)(from - t->first) * row_bytes, &error)) {
    good = false;
    error_context(&error, "cannot read %s", t->f->path);
  }
  if (good) return;
  error_context(&error, "tensor %s, rows from %lld", t->s->name, (long long)(t->s->first_row + begin));
  pthread_mutex_lock(&t->lock);
  if (!t->failed) t->error = error;
  t->failed = true;
  pthread_mutex_unlock(&t->lock);
}

static bool make_coders(struct hdf5_file *f, struct error *e) {
  const int n = f->threads ? threads_count(f->threads) : 1;
  if (!f->coders) f->coders = calloc((size_t)n, sizeof(struct chunk_coder *));
  if (!f->coders) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (; f->n_coders < n; f->n_coders++)
    if (!(f->coders[f->n_coders] = chunk_coder_open())) return error_set(e, ERROR_SYSTEM, "out of memory");
  return true;
}

static bool read_chunks(struct hdf5_file *f, int i, hid_t dataset, int64_t first, int64_t rows, void *data, struct error *e) {
  struct fetching t = {.f = f, .s = &f->slices[i], .dataset = dataset, .chunk_rows = f->chunk_rows[i], .first = first, .rows = rows, .data = data};
  if (!make_coders(f, e)) return false;
  pthread_mutex_init(&t.lock, NULL);
  const int64_t n = (first + rows - 1) / t.chunk_rows - first / t.chunk_rows + 1;
  if (f->threads)
    threads_run(f->threads, n, fetch_task, &t);
  else
    for (int64_t j = 0; j < n; j++) fetch_task(&t, j, 0);
  pthread_mutex_destroy(&t.lock);
  if (t.failed && e) *e = t.error;
  return !t.failed;
}

static bool read_by_pipeline(struct hdf5_file *f, int i, hid_t dataset, int64_t first, int64_t rows, void *data, struct error *e) {
  const struct tensor_slice *s = &f->slices[i];
  hsize_t start[2] = {(hsize_t)first, 0}, count[2] = {(hsize_t)rows, (hsize_t)s->cols};
  hid_t in_file = H5Dget_space(dataset), in_memory = H5Screate_simple(2, count, NULL);
  bool good = in_file >= 0 && in_memory >= 0 && H5Sselect_hyperslab(in_file, H5S_SELECT_SET, start, NULL, count, NULL) >= 0 &&
              H5Dread(dataset, hdf5_type(s->dtype), in_memory, in_file, H5P_DEFAULT, data) >= 0;
  if (!good) {
    hdf5_failed(e, "cannot read", f->path);
    error_context(e, "tensor %s", s->name);
  }
  if (in_memory >= 0) H5Sclose(in_memory);
  if (in_file >= 0) H5Sclose(in_file);
  return good;
}

bool hdf5_read(struct hdf5_file *f, int i, int64_t first, int64_t rows, void *data, struct error *e) {
  const struct tensor_slice *s = &f->slices[i];
  if (!hdf5_library(e)) return false;
  if (rows == 0 || s->cols == 0) return true;
  hid_t dataset = H5Dopen2(f->file, s->name, H5P_DEFAULT);
  if (dataset < 0) {
    hdf5_failed(e, "cannot read", f->path);
    return error_context(e, "tensor %s", s->name);
  }
  const bool good = f->chunk_rows[i] > 0 ? read_chunks(f, i, dataset, first, rows, data, e)
                                         : read_by_pipeline(f, i, dataset, first, rows, data, e);
  H5Dclose(dataset);
  return good;
}
