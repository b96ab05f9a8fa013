/* One rank's HDF5 file of tensor slices.
 *
 * Each slice is a dataset under its name ("/param/layers.0.attention.wq.weight")
 * of [rows, cols], with attributes global_rows, cols, first_row and dtype.  BF16 is a
 * custom 16-bit float type that h5py reads as float32.  Files are written with
 * version bounds (V110, V110): one that was not closed refuses to open.
 */
#ifndef FP4D_CHECKPOINTS_HDF5_H
#define FP4D_CHECKPOINTS_HDF5_H

#include "checkpoints/checkpoint.h"

/* Writes, closes and fsyncs PATH. */
bool hdf5_write(const char *path, const struct tensor_slice *slices, int n, struct error *e);

struct hdf5_file; /* opened for reading; opaque */
struct hdf5_file *hdf5_open(const char *path, struct error *e);
void hdf5_close(struct hdf5_file *f);

int hdf5_slice_count(const struct hdf5_file *f);
const struct tensor_slice *hdf5_slice(const struct hdf5_file *f, int i); /* data NULL */

/* Reads rows [first, first + rows) of slice i (counted inside the slice). */
bool hdf5_read(struct hdf5_file *f, int i, int64_t first, int64_t rows, void *data, struct error *e);

#endif
