#include "checkpoints/hdf5.h"

#include <errno.h>
#include <hdf5.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "checkpoints/sink.h"
#include "checkpoints/store.h"

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

static bool write_attribute(hid_t object, const char *name, int64_t value) {
  hid_t space = H5Screate(H5S_SCALAR);
  hid_t attribute = H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
  bool good = attribute >= 0 && H5Awrite(attribute, H5T_NATIVE_INT64, &value) >= 0;
  if (attribute >= 0) H5Aclose(attribute);
  H5Sclose(space);
  return good;
}

/* Text as h5py writes and reads it: UTF-8 of variable length. */
static hid_t text_type(void) {
  hid_t type = H5Tcopy(H5T_C_S1);
  if (type >= 0 && H5Tset_size(type, H5T_VARIABLE) >= 0 && H5Tset_cset(type, H5T_CSET_UTF8) >= 0) return type;
  return H5I_INVALID_HID;
}

static bool write_text(hid_t object, const char *name, const char *text) {
  hid_t space = H5Screate(H5S_SCALAR), type = text_type();
  hid_t attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
  bool good = attribute >= 0 && H5Awrite(attribute, type, &text) >= 0;
  if (attribute >= 0) H5Aclose(attribute);
  if (type >= 0) H5Tclose(type);
  H5Sclose(space);
  return good;
}

static bool write_attributes(hid_t object, const struct hdf5_attribute *attributes, int n) {
  bool good = true;
  for (int i = 0; good && i < n; i++) {
    const struct hdf5_attribute *a = &attributes[i];
    good = a->text ? write_text(object, a->name, a->text) : write_attribute(object, a->name, a->number);
  }
  return good;
}

struct hdf5_writer {
  hid_t file, link;
  int failure; /* the disk's first errno */
  bool broken;
  char path[1024];
};

struct hdf5_writer *hdf5_create(const char *path, struct error *e) {
  if (!library(e)) return NULL;
  struct hdf5_writer *w = calloc(1, sizeof *w);
  if (!w) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  snprintf(w->path, sizeof w->path, "%s", path);
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  w->link = H5Pcreate(H5P_LINK_CREATE);
  const bool set = H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110) >= 0 &&
                   H5Pset_create_intermediate_group(w->link, 1) >= 0 && sink_set(access, &w->failure);
  w->file = set ? H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, access) : H5I_INVALID_HID;
  H5Pclose(access);
  if (w->file >= 0) return w;
  hdf5_failed(e, "cannot create", path);
  w->broken = true;
  hdf5_finish(w, e);
  return NULL;
}

bool hdf5_add(struct hdf5_writer *w, const struct tensor_slice *s, const struct hdf5_attribute *attributes, int n,
              struct error *e) {
  if (w->broken || w->failure) return false; /* said already, or by hdf5_finish */
  bool good;
  if (s) {
    hsize_t shape[2] = {(hsize_t)s->rows, (hsize_t)s->cols};
    hid_t space = H5Screate_simple(2, shape, NULL);
    hid_t dataset = H5Dcreate2(w->file, s->name, type_of(s->dtype), space, w->link, H5P_DEFAULT, H5P_DEFAULT);
    good = dataset >= 0 && H5Dwrite(dataset, type_of(s->dtype), H5S_ALL, H5S_ALL, H5P_DEFAULT, s->data) >= 0 &&
           write_attribute(dataset, "global_rows", s->global_rows) && write_attribute(dataset, "cols", s->cols) &&
           write_attribute(dataset, "first_row", s->first_row) && write_attribute(dataset, "dtype", s->dtype) &&
           write_attributes(dataset, attributes, n);
    if (dataset >= 0) good = H5Dclose(dataset) >= 0 && good;
    H5Sclose(space);
  } else {
    good = write_attributes(w->file, attributes, n);
  }
  if (good) return true;
  w->broken = true;
  return hdf5_failed(e, "cannot write", w->path);
}

bool hdf5_finish(struct hdf5_writer *w, struct error *e) {
  bool good = !w->broken;
  if (w->file >= 0 && H5Fclose(w->file) < 0 && good) good = hdf5_failed(e, "cannot close", w->path);
  if (w->link >= 0) H5Pclose(w->link);
  errno = w->failure; /* what the disk said; HDF5 knows nothing of it */
  if (w->failure) good = error_errno(e, ERROR_CHECKPOINT, "cannot write %s", w->path);
  free(w);
  return good;
}

bool hdf5_write(const char *path, const struct tensor_slice *slices, int n, struct error *e) {
  struct hdf5_writer *w = hdf5_create(path, e);
  if (!w) return false;
  for (int i = 0; i < n && hdf5_add(w, &slices[i], NULL, 0, e); i++) continue;
  return hdf5_finish(w, e);
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

/* The object whose attribute is asked for; closed by H5Oclose. */
static hid_t object_of(const struct hdf5_file *f, int i) {
  return i < 0 ? H5Oopen(f->file, "/", H5P_DEFAULT) : H5Oopen(f->file, f->slices[i].name, H5P_DEFAULT);
}

bool hdf5_number(const struct hdf5_file *f, int i, const char *name, int64_t *value) {
  hid_t object = object_of(f, i);
  bool good = object >= 0 && H5Aexists(object, name) > 0 && read_attribute(object, name, value);
  if (object >= 0) H5Oclose(object);
  return good;
}

bool hdf5_text(const struct hdf5_file *f, int i, const char *name, char *text, int size) {
  hid_t object = object_of(f, i), type = text_type();
  hid_t attribute = object >= 0 && H5Aexists(object, name) > 0 ? H5Aopen(object, name, H5P_DEFAULT) : H5I_INVALID_HID;
  char *found = NULL;
  bool good = attribute >= 0 && H5Aread(attribute, type, &found) >= 0 && found && strlen(found) < (size_t)size;
  if (good) snprintf(text, (size_t)size, "%s", found);
  H5free_memory(found);
  if (attribute >= 0) H5Aclose(attribute);
  if (type >= 0) H5Tclose(type);
  if (object >= 0) H5Oclose(object);
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
  if (shape[0] > INT64_MAX || shape[1] > INT64_MAX || s->global_rows < 0) return false;
  s->rows = (int64_t)shape[0];
  int64_t elements, bytes; /* of the whole tensor: then no product of these overflows */
  return s->cols == (int64_t)shape[1] && s->first_row >= 0 && s->first_row <= s->global_rows - s->rows &&
         checked_mul(s->global_rows, s->cols, &elements) && checked_mul(elements, (int64_t)sizeof(double), &bytes);
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
