/* Checkpoints: run state as global tensor slices in HDF5, published whole.
 *
 * FOLDER/step-00000007/rank-00000.h5 …, manifest.json; FOLDER/latest -> step-00000007.
 *
 * Publishing (every arrow durable before the next begins):
 *   step-N.tmp/rank-*.h5 closed and fsynced -> barrier -> manifest.json (sizes and
 *   XXH3-128 of every file) written, fsynced -> folder renamed to step-N ->
 *   parent fsynced -> `latest` replaced by rename.
 * A folder without a manifest whose files all match is not a checkpoint.
 */
#ifndef FP4D_CHECKPOINTS_CHECKPOINT_H
#define FP4D_CHECKPOINTS_CHECKPOINT_H

#include <stdint.h>

#include "base/error.h"
#include "comm/comm.h"
#include "kernels/kernels.h"

/* A piece of a global tensor: rows [first_row, first_row + rows) of
 * global_rows x cols (a vector has cols 1 … its elements as rows). */
struct tensor_slice {
  char name[128]; /* "param/layers.0.attention.wq.weight", "adam_m/…", "master/…" */
  enum dtype dtype;
  int64_t global_rows, cols;
  int64_t first_row, rows;
  void *data; /* host memory, rows * cols elements */
};

/* Saves; every rank calls it with its own slices (together covering every
 * tensor) and the same `update` and `meta` (JSON text: config, seeds, samples
 * and tokens consumed, digests, …).  Keeps the newest `keep` checkpoints (0 =
 * all).  On failure nothing is published, temporaries are removed, older
 * checkpoints stay. */
bool checkpoint_save(struct comm *c, const char *folder, int64_t update, const struct tensor_slice *slices,
                     int n_slices, const char *meta, int keep, struct error *e);

/* The same by one process, tensor by tensor: memory holds the tensor that is being
 * written.  A FOLDER that has steps already is refused. */
struct checkpoint_writer; /* opaque */
struct checkpoint_writer *checkpoint_create(const char *folder, int64_t update, struct error *e);
bool checkpoint_add(struct checkpoint_writer *w, const struct tensor_slice *whole, struct error *e);
/* Publishes; with meta NULL gives up, after an error that *e holds already or gets now.
 * Frees w in any case; what is not published is removed. */
bool checkpoint_finish(struct checkpoint_writer *w, const char *meta, struct error *e);

struct checkpoint; /* an opened one; opaque */

/* Opens PATH (a step folder).  Checks manifest, sizes, that the slices make up
 * every tensor and, with `verify`, the hash of every file. */
struct checkpoint *checkpoint_open(const char *path, bool verify, struct error *e);

/* The newest whole checkpoint of FOLDER, verified; damaged ones are passed
 * over with a warning that names them.  NULL with e->code ERROR_NONE when the
 * folder holds none at all; NULL with an error when it holds only damaged ones. */
struct checkpoint *checkpoint_open_newest(const char *folder, struct error *e);

const char *checkpoint_path(const struct checkpoint *k);
int64_t checkpoint_update(const struct checkpoint *k);
const char *checkpoint_meta(const struct checkpoint *k); /* JSON text */
int checkpoint_tensor_count(const struct checkpoint *k);
/* Name, dtype and global shape of tensor i (data NULL). */
const struct tensor_slice *checkpoint_tensor(const struct checkpoint *k, int i);

/* Fills slices[i].data from the files, whatever slicing they were written
 * with.  A missing tensor, another shape or dtype is an error naming it. */
bool checkpoint_read(struct checkpoint *k, const struct tensor_slice *slices, int n_slices, struct error *e);
void checkpoint_close(struct checkpoint *k);

/* A run goes on from `update`: checkpoints of later updates in FOLDER (damaged
 * ones that were passed over, or those of a run that was taken back) are renamed
 * to superseded-N, so that no later start takes them for its newest.  One rank
 * calls it, under the run folder's lock. */
bool checkpoint_set_aside(const char *folder, int64_t update, struct error *e);

/* Lists steps present in FOLDER into text ("step-3, step-6"), for errors. */
void checkpoint_list(const char *folder, char *text, int size);

#endif
