#include "checkpoints/hdf5.h"

#include <errno.h>
#include <hdf5.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoints/sink.h"

/* ---- the library ---------------------------------------------------------- */

static pthread_once_t library_once = PTHREAD_ONCE_INIT;
static hid_t bf16_type = H5I_INVALID_HID;

/* IEEE single cut to its upper half: sign 15, exponent 14-7, mantissa 6-0. */
static hid_t make_bf16_type(void) {
  hid_t t = H5Tcopy(H5T_IEEE_F32LE);
  if (t < 0 || H5Tset_fields(t, 15, 7, 8, 0, 7) < 0 || H5Tset_offset(t, 0) < 0 || H5Tset_precision(t, 16) < 0 ||
      H5Tset_size(t, 2) < 0 || H5Tset_ebias(t, 127) < 0)
    return H5I_INVALID_HID;
  return t;
}

static void open_library(void) {
  /* Lustre, NFS and GPFS mounts without flock refuse HDF5's locks; a run's
   * folder is guarded by its own lock. */
  setenv("HDF5_USE_FILE_LOCKING", "FALSE", 0);
  if (H5open() < 0) return;
  H5Eset_auto2(H5E_DEFAULT, NULL, NULL); /* errors are reported by us */
  bf16_type = make_bf16_type();
}

static bool library(struct error *e) {
  pthread_once(&library_once, open_library);
  return bf16_type >= 0 || error_set(e, ERROR_CHECKPOINT, "the HDF5 library does not start");
}

/* The innermost message of HDF5's error stack. */
static herr_t innermost(unsigned n, const H5E_error2_t *entry, void *context) {
  if (n == 0 && entry->desc) snprintf(context, 256, "%s", entry->desc);
  return 0;
}

static bool hdf5_failed(struct error *e, const char *doing, const char *path) {
  char text[256] = "no reason given";
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, innermost, text);
  return error_set(e, ERROR_CHECKPOINT, "%s %s: HDF5: %s", doing, path, text);
}

static hid_t type_of(enum dtype d) { return d == DTYPE_BF16 ? bf16_type : H5T_IEEE_F32LE; }

/* ---- writing -------------------------------------------------------------- */

static bool write_attribute(hid_t dataset, const char *name, int64_t value) {
  hid_t space = H5Screate(H5S_SCALAR);
  hid_t attribute = H5Acreate2(dataset, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
  bool good = attribute >= 0 && H5Awrite(attribute, H5T_NATIVE_INT64, &value) >= 0;
  if (attribute >= 0) H5Aclose(attribute);
  H5Sclose(space);
  return good;
}

static bool write_slice(hid_t file, hid_t link, const struct tensor_slice *s) {
  hsize_t shape[2] = {(hsize_t)s->rows, (hsize_t)s->cols};
  hid_t space = H5Screate_simple(2, shape, NULL);
  hid_t dataset = H5Dcreate2(file, s->name, type_of(s->dtype), space, link, H5P_DEFAULT, H5P_DEFAULT);
  bool good = dataset >= 0 && H5Dwrite(dataset, type_of(s->dtype), H5S_ALL, H5S_ALL, H5P_DEFAULT, s->data) >= 0 &&
              write_attribute(dataset, "global_rows", s->global_rows) && write_attribute(dataset, "cols", s->cols) &&
              write_attribute(dataset, "first_row", s->first_row) && write_attribute(dataset, "dtype", s->dtype);
  if (dataset >= 0) good = H5Dclose(dataset) >= 0 && good;
  H5Sclose(space);
  return good;
}

bool hdf5_write(const char *path, const struct tensor_slice *slices, int n, struct error *e) {
  if (!library(e)) return false;
  hid_t access = H5Pcreate(H5P_FILE_ACCESS), link = H5Pcreate(H5P_LINK_CREATE);
  int failure;
  H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
  H5Pset_create_intermediate_group(link, 1);
  hid_t file = sink_set(access, &failure) ? H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, access) : H5I_INVALID_HID;
  bool good = file >= 0 || hdf5_failed(e, "cannot create", path);
  for (int i = 0; good && failure == 0 && i < n; i++)
    good = write_slice(file, link, &slices[i]) || hdf5_failed(e, "cannot write", path);
  if (file >= 0 && H5Fclose(file) < 0 && good) good = hdf5_failed(e, "cannot close", path);
  H5Pclose(link);
  H5Pclose(access);
  if (failure == 0) return good;
  errno = failure; /* what the disk said; HDF5 knows nothing of it */
  return error_errno(e, ERROR_CHECKPOINT, "cannot write %s", path);
}

/* ---- reading -------------------------------------------------------------- */

struct hdf5_file {
  hid_t file;
  char path[1024];
  struct tensor_slice *slices;
  int n, room;
};

static bool read_attribute(hid_t dataset, const char *name, int64_t *value) {
  hid_t attribute = H5Aopen(dataset, name, H5P_DEFAULT);
  bool good = attribute >= 0 && H5Aread(attribute, H5T_NATIVE_INT64, value) >= 0;
  if (attribute >= 0) H5Aclose(attribute);
  return good;
}

static bool describe_dataset(hid_t dataset, struct tensor_slice *s) {
  int64_t dtype;
  hsize_t shape[2];
  hid_t space = H5Dget_space(dataset);
  bool good = space >= 0 && H5Sget_simple_extent_ndims(space) == 2 &&
              H5Sget_simple_extent_dims(space, shape, NULL) == 2 &&
              read_attribute(dataset, "global_rows", &s->global_rows) && read_attribute(dataset, "cols", &s->cols) &&
              read_attribute(dataset, "first_row", &s->first_row) && read_attribute(dataset, "dtype", &dtype) &&
              (dtype == DTYPE_F32 || dtype == DTYPE_BF16);
  if (space >= 0) H5Sclose(space);
  if (!good) return false;
  s->dtype = (enum dtype)dtype;
  s->rows = (int64_t)shape[0];
  return s->cols == (int64_t)shape[1] && s->first_row >= 0 && s->first_row <= s->global_rows - s->rows;
}

static herr_t visit(hid_t file, const char *name, const H5O_info_t *info, void *context) {
  struct hdf5_file *f = context;
  if (info->type != H5O_TYPE_DATASET) return 0;
  if (f->n == f->room) {
    int room = f->room ? 2 * f->room : 64;
    struct tensor_slice *more = realloc(f->slices, (size_t)room * sizeof *more);
    if (!more) return -1;
    f->slices = more;
    f->room = room;
  }
  struct tensor_slice *s = &f->slices[f->n];
  memset(s, 0, sizeof *s);
  if (strlen(name) >= sizeof s->name) return -1;
  snprintf(s->name, sizeof s->name, "%s", name);
  hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
  bool good = dataset >= 0 && describe_dataset(dataset, s);
  if (dataset >= 0) H5Dclose(dataset);
  if (!good) return -1;
  f->n++;
  return 0;
}

struct hdf5_file *hdf5_open(const char *path, struct error *e) {
  if (!library(e)) return NULL;
  struct hdf5_file *f = calloc(1, sizeof *f);
  if (!f) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  snprintf(f->path, sizeof f->path, "%s", path);
  f->file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
  if (f->file < 0) {
    hdf5_failed(e, "cannot open", path);
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

void hdf5_close(struct hdf5_file *f) {
  if (!f) return;
  if (f->file >= 0) H5Fclose(f->file);
  free(f->slices);
  free(f);
}

int hdf5_slice_count(const struct hdf5_file *f) { return f->n; }
const struct tensor_slice *hdf5_slice(const struct hdf5_file *f, int i) { return &f->slices[i]; }

bool hdf5_read(struct hdf5_file *f, int i, int64_t first, int64_t rows, void *data, struct error *e) {
  const struct tensor_slice *s = &f->slices[i];
  hsize_t start[2] = {(hsize_t)first, 0}, count[2] = {(hsize_t)rows, (hsize_t)s->cols};
  hid_t dataset = H5Dopen2(f->file, s->name, H5P_DEFAULT);
  hid_t in_file = dataset >= 0 ? H5Dget_space(dataset) : H5I_INVALID_HID;
  hid_t in_memory = H5Screate_simple(2, count, NULL);
  bool good = in_file >= 0 && in_memory >= 0 &&
              H5Sselect_hyperslab(in_file, H5S_SELECT_SET, start, NULL, count, NULL) >= 0 &&
              H5Dread(dataset, type_of(s->dtype), in_memory, in_file, H5P_DEFAULT, data) >= 0;
  if (!good) {
    hdf5_failed(e, "cannot read", f->path);
    error_context(e, "tensor %s", s->name);
  }
  if (in_memory >= 0) H5Sclose(in_memory);
  if (in_file >= 0) H5Sclose(in_file);
  if (dataset >= 0) H5Dclose(dataset);
  return good;
}
