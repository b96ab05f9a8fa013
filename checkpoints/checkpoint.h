/* Checkpoints: run state as global tensor slices in HDF5, published whole.
 *
 * FOLDER/step-00000007/rank-00000.h5 …, manifest.json; FOLDER/latest -> step-00000007.
 *
 * Publishing (every arrow durable before the next begins):
 *   step-N.tmp/rank-*.h5 closed and fsynced -> barrier -> manifest.json (sizes and
 *   XXH3-128 of every file) written, fsynced -> folder renamed to step-N ->
 *   parent fsynced -> `latest` replaced by rename.
 * A folder without a manifest whose files all match is not a checkpoint.
 *
 * The digest of a file is taken by reading it again, out of the page cache: HDF5
 * writes the head of a file last, so it cannot be taken while the file is written.
 */
#ifndef FP4D_CHECKPOINTS_CHECKPOINT_H
#define FP4D_CHECKPOINTS_CHECKPOINT_H

#include <stdint.h>

#include "base/error.h"
#include "base/threads.h"
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

enum checkpoint_compression { CHECKPOINT_ZSTD, CHECKPOINT_STORE };

/* How a run saves and what it keeps. */
struct checkpoint_policy {
  int keep;           /* the newest whole ones; 0: all */
  int64_t keep_every; /* and those whose update is a multiple of it; 0: none */
  enum checkpoint_compression compression;
  struct threads *threads; /* that compress; NULL: the thread that writes does */
};

/* Saves; every rank calls it with its own slices (together covering every
 * tensor) and the same `update` and `meta` (JSON text: config, seeds, samples
 * and tokens consumed, digests, …).  Keeps the newest `keep` checkpoints (0 =
 * all).  On failure nothing is published, temporaries are removed, older
 * checkpoints stay.  Compressed, by this thread. */
bool checkpoint_save(struct comm *c, const char *folder, int64_t update, const struct tensor_slice *slices,
                     int n_slices, const char *meta, int keep, struct error *e);

/* The same by one process, slice by slice and one rank's file after another: memory holds
 * what is being written.  A FOLDER that has steps already is refused.  `threads` compress;
 * NULL: the caller does. */
struct checkpoint_writer; /* opaque */
struct checkpoint_writer *checkpoint_create(const char *folder, int64_t update, enum checkpoint_compression compression,
                                            struct threads *threads, struct error *e);
/* Into rank 0's file; after n calls of checkpoint_next_rank, which makes the one before durable,
 * into rank n's. */
bool checkpoint_add(struct checkpoint_writer *w, const struct tensor_slice *slices, int n, struct error *e);
bool checkpoint_next_rank(struct checkpoint_writer *w, struct error *e);
/* Publishes; with meta NULL gives up, after an error that *e holds already or gets now.
 * Frees w in any case; what is not published is removed. */
bool checkpoint_finish(struct checkpoint_writer *w, const char *meta, struct error *e);

/* The same while the caller goes on with something else.
 *
 *   begin -> [busy on some rank ...] -> advance -> [busy ...] -> advance: done
 *
 * A thread writes this rank's file and makes it durable; then, on rank 0, another
 * stage publishes (manifest, rename, `latest`) and removes what is not kept.  The
 * thread never communicates: all ranks call begin and advance together, advance
 * only while no rank is busy (they find that out by a sum of their own). */
struct checkpoint_saver;

struct checkpoint_saved {
  int64_t update;
  int64_t tensor_bytes, file_bytes; /* of all ranks */
  double seconds;                   /* from begin until it was published, on rank 0 */
};

/* `apart`: a thread of its own works; else begin and advance do. */
struct checkpoint_saver *checkpoint_saver_open(struct comm *c, const char *folder, const struct checkpoint_policy *p, bool apart,
                                               struct error *e);

/* Begins a save; `slices` and what they point at must stay as they are until it is
 * done.  None may be under way. */
bool checkpoint_saver_begin(struct checkpoint_saver *s, int64_t update, const struct tensor_slice *slices, int n_slices,
                            const char *meta, struct error *e);
bool checkpoint_saver_under_way(const struct checkpoint_saver *s); /* the same answer on every rank */
bool checkpoint_saver_busy(struct checkpoint_saver *s);            /* this rank */
void checkpoint_saver_wait(struct checkpoint_saver *s);            /* until this rank is not busy */

/* The next stage, or the end: *done, with *out. False (the same on every rank): the
 * save failed and is over; nothing of it is left. */
bool checkpoint_saver_advance(struct checkpoint_saver *s, bool *done, struct checkpoint_saved *out, struct error *e);

/* Waits for this rank's work; a save that is under way is not published. */
void checkpoint_saver_close(struct checkpoint_saver *s);

struct checkpoint; /* an opened one; opaque */

/* Opens PATH (a step folder).  Checks manifest, sizes, that the slices make up
 * every tensor and, with `verify`, the hash of every file. */
struct checkpoint *checkpoint_open(const char *path, bool verify, struct error *e);

/* The newest whole checkpoint of FOLDER, verified; damaged ones are passed
 * over with a warning that names them.  NULL with e->code ERROR_NONE when the
 * folder holds none at all; NULL with an error when it holds only damaged ones. */
struct checkpoint *checkpoint_open_newest(const char *folder, struct error *e);

/* The same by all ranks together, each with its own handle: each verifies its share of the
 * files, and all have the same answer, in the words of one process (of several damaged files the
 * first is named).  Rank 0 looks into the folder and logs.  c NULL: this process alone. */
struct checkpoint *checkpoint_open_together(struct comm *c, const char *path, bool verify, struct error *e);
struct checkpoint *checkpoint_open_newest_together(struct comm *c, const char *folder, struct error *e);

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

/* The bytes of all tensors, and those of the files that hold them. */
void checkpoint_bytes(const struct checkpoint *k, int64_t *tensors, int64_t *files);

/* Writes it again as the step folder OUT, which must not be there, cut for `ranks` ranks;
 * the meta text stays.  Memory holds one rank's slice of a tensor. */
bool checkpoint_reshard(struct checkpoint *k, const char *out, int ranks, enum checkpoint_compression compression, struct error *e);

/* Writes FILE, an HDF5 file of virtual datasets: whole tensors that lead into the rank
 * files (by paths relative to FILE where it lies in the step's folder, else absolute).
 * Where a rank file is not to be found a reader gets NaN, so it is for looking at alone:
 * nothing here reads it. */
bool checkpoint_index(struct checkpoint *k, const char *file, struct error *e);

/* A run goes on from `update`: checkpoints of later updates in FOLDER (damaged
 * ones that were passed over, or those of a run that was taken back) are renamed
 * to superseded-N, so that no later start takes them for its newest.  One rank
 * calls it, under the run folder's lock. */
bool checkpoint_set_aside(const char *folder, int64_t update, struct error *e);

/* Lists steps present in FOLDER into text ("step-3, step-6"), for errors. */
void checkpoint_list(const char *folder, char *text, int size);

#endif
