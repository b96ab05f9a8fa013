/* safetensors: the tensor files of Hugging Face, read and written tensor by tensor.
 *
 * A file is u64 N, N bytes of JSON, data.  The JSON begins with `{`, may end with
 * spaces and holds NAME: {"dtype", "shape", "data_offsets": [begin, end)} with offsets
 * into the data, and "__metadata__": text by text.  The data is what the tensors hold:
 * no byte belongs to none or to two of them.  (safetensors 0.8, its README.)
 *
 * A model is one file, model.safetensors, or several that model.safetensors.index.json
 * names: {"metadata": {"total_size"}, "weight_map": {NAME: FILE}}.
 */
#ifndef FP4D_CHECKPOINTS_SAFETENSORS_H
#define FP4D_CHECKPOINTS_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum { SAFETENSORS_DIMS = 8, SAFETENSORS_HEADER = 100000000 };

struct safetensors_tensor {
  char *name;
  const char *dtype; /* "F32", "BF16", …: the format's own word */
  int n_dims;
  int64_t shape[SAFETENSORS_DIMS];
  int64_t at, bytes; /* in its file, counted from the file's first byte */
  int file;
};

/* ---- reading ------------------------------------------------------------- */

struct safetensors; /* a model's tensors; opaque */

/* Opens the model in FOLDER.  Headers are read and checked whole (each fault is an
 * ERROR_CHECKPOINT that names the file and the offset or the tensor), and so are
 * index and shards against each other; of the data nothing is read. */
struct safetensors *safetensors_open(const char *folder, struct error *e);
void safetensors_close(struct safetensors *s);

int safetensors_count(const struct safetensors *s);
const struct safetensors_tensor *safetensors_tensor(const struct safetensors *s, int i); /* by name, ascending */
const struct safetensors_tensor *safetensors_find(const struct safetensors *s, const char *name); /* NULL: none */
const char *safetensors_path(const struct safetensors *s, const struct safetensors_tensor *t); /* of its file */

/* Bytes [first, first + bytes) of a tensor. */
bool safetensors_read(const struct safetensors *s, const struct safetensors_tensor *t, int64_t first, void *to,
                      size_t bytes, struct error *e);

/* ---- writing ------------------------------------------------------------- */

/* What a file will hold. */
struct safetensors_entry {
  const char *name; /* letters, digits, '.', '_' */
  const char *dtype;
  int n_dims;
  int64_t shape[2];
  int64_t bytes;
};

struct safetensors_writer; /* opaque */

/* Writes the header of a new file: entries in the order of their data.  Where that is
 * ascending by name it is the reference writer's order for tensors of one type, and so
 * are the bytes. */
struct safetensors_writer *safetensors_create(const char *path, const struct safetensors_entry *entries, int n,
                                              struct error *e);
/* The next bytes of the data. */
bool safetensors_put(struct safetensors_writer *w, const void *data, size_t bytes, struct error *e);
/* fsyncs and closes; frees w in any case.  False where anything failed, or bytes are missing. */
bool safetensors_finish(struct safetensors_writer *w, struct error *e);

#endif
