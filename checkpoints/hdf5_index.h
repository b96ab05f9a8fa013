/* An HDF5 file of virtual datasets over other files' slices; NaN where a source is missing. */
#ifndef FP4D_CHECKPOINTS_HDF5_INDEX_H
#define FP4D_CHECKPOINTS_HDF5_INDEX_H

#include "checkpoints/hdf5.h"

struct hdf5_index; /* opaque */
struct hdf5_index *hdf5_index_create(const char *path, struct error *e);

/* One tensor: begin (name, dtype and whole shape), a map for each slice, end. */
bool hdf5_index_begin(struct hdf5_index *x, const struct tensor_slice *whole, struct error *e);
bool hdf5_index_map(struct hdf5_index *x, const char *source, const struct tensor_slice *slice, struct error *e);
bool hdf5_index_end(struct hdf5_index *x, struct error *e);

/* Closes and fsyncs; what is not good is removed.  Frees x in any case. */
bool hdf5_index_finish(struct hdf5_index *x, bool good, struct error *e);

#endif
