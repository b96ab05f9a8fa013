/* One rank's HDF5 file of tensor slices.
 *
 * Each slice is a dataset under its name ("/param/layers.0.attention.wq.weight")
 * of [rows, cols], with attributes global_rows, cols, first_row and dtype.  BF16 is a
 * custom 16-bit float type that h5py reads as float32.  Files are written with
 * version bounds (V110, V110): one that was not closed refuses to open.
 *
 * CHECKPOINT_ZSTD cuts a dataset into chunks of whole rows (chunk.h) under HDF5's shuffle
 * and filter 32015 (zstd, each frame with its checksum); CHECKPOINT_STORE leaves it
 * contiguous.  Both are read, and whatever else HDF5's own filters can undo.
 */
#ifndef FP4D_CHECKPOINTS_HDF5_H
#define FP4D_CHECKPOINTS_HDF5_H

#include "base/threads.h"
#include "checkpoints/checkpoint.h"

struct hdf5_options {
  enum checkpoint_compression compression;
  struct threads *threads; /* that compress; NULL: the caller does.  A chunk a thread is in memory. */
};

/* Writes, closes and fsyncs PATH; the first compressed, by the calling thread. */
bool hdf5_write(const char *path, const struct tensor_slice *slices, int n, struct error *e);
bool hdf5_write_with(const char *path, const struct hdf5_options *o, const struct tensor_slice *slices, int n, struct error *e);

/* The same piece by piece, with attributes of one's own. */
struct hdf5_attribute {
  const char *name;
  const char *text; /* NULL: `number` */
  int64_t number;
};

struct hdf5_writer; /* opaque */
struct hdf5_writer *hdf5_create(const char *path, struct error *e); /* CHECKPOINT_STORE */
struct hdf5_writer *hdf5_create_with(const char *path, const struct hdf5_options *o, struct error *e);
/* A slice with n more attributes; s NULL: attributes of the file itself. */
bool hdf5_add(struct hdf5_writer *w, const struct tensor_slice *s, const struct hdf5_attribute *attributes, int n,
              struct error *e);
/* n slices, compressed side by side. */
bool hdf5_add_all(struct hdf5_writer *w, const struct tensor_slice *slices, int n, struct error *e);
/* Closes and fsyncs; frees w in any case. False where that or anything before it failed. */
bool hdf5_finish(struct hdf5_writer *w, struct error *e);

struct hdf5_file; /* opened for reading; opaque */
struct hdf5_file *hdf5_open(const char *path, struct error *e);
void hdf5_close(struct hdf5_file *f);

/* Threads that decompress; NULL (at first): the caller alone. They are the caller's. */
void hdf5_use_threads(struct hdf5_file *f, struct threads *threads);

int hdf5_slice_count(const struct hdf5_file *f);
const struct tensor_slice *hdf5_slice(const struct hdf5_file *f, int i); /* data NULL */

/* An attribute of slice i, or of the file (i = -1). False where there is none of this type. */
bool hdf5_number(const struct hdf5_file *f, int i, const char *name, int64_t *value);
bool hdf5_text(const struct hdf5_file *f, int i, const char *name, char *text, int size);

/* Is slice i compressed, and what does it take in the file? */
bool hdf5_compressed(const struct hdf5_file *f, int i, int64_t *bytes);

/* Reads rows [first, first + rows) of slice i (counted inside the slice). */
bool hdf5_read(struct hdf5_file *f, int i, int64_t first, int64_t rows, void *data, struct error *e);

#endif
