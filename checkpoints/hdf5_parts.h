/* What the files of the HDF5 side share (hdf5*.c only). */
#ifndef FP4D_CHECKPOINTS_HDF5_PARTS_H
#define FP4D_CHECKPOINTS_HDF5_PARTS_H

#include <hdf5.h>

#include "checkpoints/hdf5.h"

/* Starts the library once, and keeps this thread's errors quiet: they are reported by us. */
bool hdf5_library(struct error *e);

/* "DOING PATH: HDF5: the innermost message of this thread's error stack". */
bool hdf5_failed(struct error *e, const char *doing, const char *path);

hid_t hdf5_type(enum dtype d);
hid_t hdf5_text_type(void); /* of variable length; the caller's to close */

/* An attribute may be an array, and H5Aread fills all of it. */
bool hdf5_one_value(hid_t attribute);

bool hdf5_write_number(hid_t object, const char *name, int64_t value);
bool hdf5_read_number(hid_t object, const char *name, int64_t *value);
bool hdf5_write_text(hid_t object, const char *name, const char *text);

#endif
