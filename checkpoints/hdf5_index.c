#include "checkpoints/hdf5_index.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "checkpoints/hdf5_parts.h"
#include "checkpoints/sink.h"

struct hdf5_index {
  hid_t file, links;
  int failure; /* the disk's first errno */
  char path[1024];
  /* the tensor that is being mapped */
  const struct tensor_slice *whole;
  hid_t space, creation;
};

struct hdf5_index *hdf5_index_create(const char *path, struct error *e) {
  if (!hdf5_library(e)) return NULL;
  struct hdf5_index *x = calloc(1, sizeof *x);
  if (!x) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  snprintf(x->path, sizeof x->path, "%s", path);
  x->space = x->creation = H5I_INVALID_HID;
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  x->links = H5Pcreate(H5P_LINK_CREATE);
  const bool set = H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110) >= 0 && sink_set(access, &x->failure) &&
                   H5Pset_create_intermediate_group(x->links, 1) >= 0;
  x->file = set ? H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, access) : H5I_INVALID_HID;
  H5Pclose(access);
  if (x->file >= 0) return x;
  hdf5_failed(e, "cannot create", path);
  hdf5_index_finish(x, false, e);
  return NULL;
}

bool hdf5_index_begin(struct hdf5_index *x, const struct tensor_slice *whole, struct error *e) {
  const hsize_t shape[2] = {(hsize_t)whole->rows, (hsize_t)whole->cols};
  const uint32_t nan_f32 = 0x7fc00000;
  const uint16_t nan_bf16 = 0x7fc0;
  x->whole = whole;
  x->space = H5Screate_simple(2, shape, NULL);
  x->creation = H5Pcreate(H5P_DATASET_CREATE);
  const void *nan = whole->dtype == DTYPE_BF16 ? (const void *)&nan_bf16 : &nan_f32;
  return (x->space >= 0 && x->creation >= 0 && H5Pset_fill_value(x->creation, hdf5_type(whole->dtype), nan) >= 0) ||
         hdf5_failed(e, "cannot write", x->path);
}

bool hdf5_index_map(struct hdf5_index *x, const char *source, const struct tensor_slice *s, struct error *e) {
  const hsize_t start[2] = {(hsize_t)s->first_row, 0}, shape[2] = {(hsize_t)s->rows, (hsize_t)s->cols};
  char inside[sizeof s->name + 1];
  snprintf(inside, sizeof inside, "/%s", s->name);
  hid_t theirs = H5Screate_simple(2, shape, NULL);
  const bool good = theirs >= 0 && H5Sselect_hyperslab(x->space, H5S_SELECT_SET, start, NULL, shape, NULL) >= 0 &&
                    H5Pset_virtual(x->creation, x->space, source, inside, theirs) >= 0;
  if (theirs >= 0) H5Sclose(theirs);
  return good || hdf5_failed(e, "cannot write", x->path);
}

static void forget_tensor(struct hdf5_index *x) {
  if (x->space >= 0) H5Sclose(x->space);
  if (x->creation >= 0) H5Pclose(x->creation);
  x->space = x->creation = H5I_INVALID_HID;
}

bool hdf5_index_end(struct hdf5_index *x, struct error *e) {
  H5Sselect_all(x->space);
  hid_t set = H5Dcreate2(x->file, x->whole->name, hdf5_type(x->whole->dtype), x->space, x->links, x->creation, H5P_DEFAULT);
  const bool good = set >= 0 && H5Dclose(set) >= 0;
  forget_tensor(x);
  return good || hdf5_failed(e, "cannot write", x->path);
}

bool hdf5_index_finish(struct hdf5_index *x, bool good, struct error *e) {
  forget_tensor(x);
  if (x->links >= 0) H5Pclose(x->links);
  if (x->file >= 0 && H5Fclose(x->file) < 0 && good) good = hdf5_failed(e, "cannot close", x->path);
  errno = x->failure;
  if (x->failure) good = error_errno(e, ERROR_CHECKPOINT, "cannot write %s", x->path);
  if (!good && x->file >= 0) unlink(x->path);
  free(x);
  return good;
}
