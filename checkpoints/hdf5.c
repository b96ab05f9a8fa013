/* The HDF5 library: how it is started, its types, its errors, attributes. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "checkpoints/hdf5_parts.h"
#include "checkpoints/zstd_filter.h"

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
  H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
  /* Our filter is here; a broken plugin in the system's folder must not be looked at. */
  if (H5PLset_loading_state(0) < 0 || H5Zregister(&zstd_filter) < 0) return;
  bf16_type = make_bf16_type();
}

bool hdf5_library(struct error *e) {
  pthread_once(&library_once, open_library);
  if (bf16_type < 0) return error_set(e, ERROR_CHECKPOINT, "the HDF5 library does not start");
  H5Eset_auto2(H5E_DEFAULT, NULL, NULL); /* each thread has an error stack of its own */
  return true;
}

static herr_t innermost(unsigned n, const H5E_error2_t *entry, void *context) {
  if (n == 0 && entry->desc) snprintf(context, 256, "%s", entry->desc);
  return 0;
}

bool hdf5_failed(struct error *e, const char *doing, const char *path) {
  char text[256] = "no reason given";
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, innermost, text);
  return error_set(e, ERROR_CHECKPOINT, "%s %s: HDF5: %s", doing, path, text);
}

hid_t hdf5_type(enum dtype d) { return d == DTYPE_BF16 ? bf16_type : H5T_IEEE_F32LE; }

/* Text as h5py writes and reads it: UTF-8 of variable length. */
hid_t hdf5_text_type(void) {
  hid_t type = H5Tcopy(H5T_C_S1);
  if (type >= 0 && H5Tset_size(type, H5T_VARIABLE) >= 0 && H5Tset_cset(type, H5T_CSET_UTF8) >= 0) return type;
  return H5I_INVALID_HID;
}

bool hdf5_write_number(hid_t object, const char *name, int64_t value) {
  hid_t space = H5Screate(H5S_SCALAR);
  hid_t attribute = H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
  bool good = attribute >= 0 && H5Awrite(attribute, H5T_NATIVE_INT64, &value) >= 0;
  if (attribute >= 0) H5Aclose(attribute);
  H5Sclose(space);
  return good;
}

bool hdf5_write_text(hid_t object, const char *name, const char *text) {
  hid_t space = H5Screate(H5S_SCALAR), type = hdf5_text_type();
  hid_t attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
  bool good = attribute >= 0 && H5Awrite(attribute, type, &text) >= 0;
  if (attribute >= 0) H5Aclose(attribute);
  if (type >= 0) H5Tclose(type);
  H5Sclose(space);
  return good;
}

bool hdf5_one_value(hid_t attribute) {
  hid_t space = H5Aget_space(attribute);
  const bool one = space >= 0 && H5Sget_simple_extent_npoints(space) == 1;
  if (space >= 0) H5Sclose(space);
  return one;
}

bool hdf5_read_number(hid_t object, const char *name, int64_t *value) {
  hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
  bool good = attribute >= 0 && hdf5_one_value(attribute) && H5Aread(attribute, H5T_NATIVE_INT64, value) >= 0;
  if (attribute >= 0) H5Aclose(attribute);
  return good;
}
