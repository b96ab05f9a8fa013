/* The files of a checkpoint that one process writes: a rank's after another's, then the manifest. */
#ifndef FP4D_CHECKPOINTS_RANK_FILES_H
#define FP4D_CHECKPOINTS_RANK_FILES_H

#include "checkpoints/hdf5.h"
#include "checkpoints/manifest.h"
#include "checkpoints/store.h"

struct rank_files {
  char folder[STORE_PATH]; /* there already; the caller publishes or removes it */
  struct hdf5_options options;
  struct manifest_file *files; /* begun so far */
  int n;
  struct hdf5_writer *open; /* the last of them, or NULL */
  bool unsaid;              /* the disk failed, and closing the file will say so */
};

/* Makes the file that is open durable, and begins the next rank's. */
bool rank_files_next(struct rank_files *f, struct error *e);

/* Slices of the rank whose file is open, compressed side by side. */
bool rank_files_add(struct rank_files *f, const struct tensor_slice *slices, int n, struct error *e);

/* The last file, and the manifest; with meta NULL gives up after an error that *e holds
 * already or gets now.  Frees what f holds in any case. */
bool rank_files_end(struct rank_files *f, int64_t update, const char *meta, struct error *e);

#endif
