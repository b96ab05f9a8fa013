/* Saving: see checkpoint.h for the order of publication. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/hdf5.h"
#include "checkpoints/manifest.h"
#include "checkpoints/store.h"

/* More than `keep` may be there (it was lowered, or steps could not be removed), and they
 * may be what fills the disk.  They go, or stay: it does not touch the new one. */
static void prune(const char *folder, int keep) {
  struct error e;
  if (!store_prune(folder, keep, &e)) log_warning("%s", e.message);
}

/* Rank 0 makes the empty temporary folder that all ranks write into. */
static bool prepare(struct comm *c, const char *folder, const char *temporary, int keep, struct error *e) {
  bool good = true;
  if (comm_rank(c) == 0) {
    good = file_make_folder(folder, ERROR_CHECKPOINT, e) && store_clean(folder, e);
    if (good) prune(folder, keep);
    good = good && file_make_folder(temporary, ERROR_CHECKPOINT, e);
  }
  return comm_agree(c, good, e);
}

static bool write_rank_file(struct comm *c, const char *temporary, const struct tensor_slice *slices, int n,
                            struct manifest_file *mine, struct error *e) {
  char path[STORE_PATH + 64];
  snprintf(mine->name, sizeof mine->name, "rank-%05d.h5", comm_rank(c));
  snprintf(path, sizeof path, "%s/%s", temporary, mine->name);
  bool good = hdf5_write(path, slices, n, e) && manifest_measure(path, mine, e);
  return comm_agree(c, good, e);
}

static bool publish(struct comm *c, const char *folder, const char *temporary, int64_t update,
                    struct manifest_file *files, const char *meta, int keep, struct error *e) {
  bool good = true;
  if (comm_rank(c) == 0) {
    char *copy = strdup(meta);
    struct manifest m = {.update = update, .files = files, .n_files = comm_world(c), .meta = copy};
    good = copy ? manifest_write(temporary, &m, e) && store_publish(folder, update, e)
                : error_set(e, ERROR_SYSTEM, "out of memory");
    free(copy);
    if (good) prune(folder, keep);
  }
  return comm_agree(c, good, e);
}

bool checkpoint_save(struct comm *c, const char *folder, int64_t update, const struct tensor_slice *slices,
                     int n_slices, const char *meta, int keep, struct error *e) {
  char temporary[STORE_PATH];
  struct manifest_file mine = {0}, *files = calloc((size_t)comm_world(c), sizeof *files);
  store_temporary_path(folder, update, temporary);
  bool good = comm_agree(c, files != NULL || error_set(e, ERROR_SYSTEM, "out of memory"), e) &&
              prepare(c, folder, temporary, keep, e) && write_rank_file(c, temporary, slices, n_slices, &mine, e) &&
              comm_gather_all(c, files, &mine, sizeof mine, e) &&
              publish(c, folder, temporary, update, files, meta, keep, e);
  free(files);
  if (!good && comm_rank(c) == 0) {
    struct error cleaning;
    if (file_exists(temporary) && !file_remove_tree(temporary, ERROR_CHECKPOINT, &cleaning))
      log_warning("%s", cleaning.message);
  }
  return good;
}
