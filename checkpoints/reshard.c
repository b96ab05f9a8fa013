/* A checkpoint written again, for another number of ranks or in another compression. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/hdf5.h"
#include "checkpoints/manifest.h"
#include "checkpoints/store.h"
#include "comm/share.h"

static bool copy_slice(struct checkpoint *k, struct hdf5_writer *w, const struct tensor_slice *whole, int rank, int ranks, struct error *e) {
  struct tensor_slice s = *whole;
  s.first_row = share_row(whole->global_rows, whole->cols, rank, ranks);
  s.rows = share_row(whole->global_rows, whole->cols, rank + 1, ranks) - s.first_row;
  if (s.rows == 0) return true;
  s.data = malloc((size_t)(s.rows * s.cols) * dtype_bytes(s.dtype) + 1);
  const bool good = s.data ? checkpoint_read(k, &s, 1, e) && hdf5_add(w, &s, NULL, 0, e)
                           : error_set(e, ERROR_SYSTEM, "out of memory for %s", s.name);
  free(s.data);
  return good;
}

static bool write_rank(struct checkpoint *k, const char *folder, int rank, int ranks, const struct hdf5_options *o, struct manifest_file *file,
                       struct error *e) {
  char path[STORE_PATH + 64];
  snprintf(file->name, sizeof file->name, "rank-%05d.h5", rank);
  snprintf(path, sizeof path, "%s/%s", folder, file->name);
  struct hdf5_writer *w = hdf5_create_with(path, o, e);
  if (!w) return false;
  bool good = true;
  e->code = ERROR_NONE;
  for (int i = 0; good && i < checkpoint_tensor_count(k); i++) good = copy_slice(k, w, checkpoint_tensor(k, i), rank, ranks, e);
  struct error closing;
  const bool said = !good && e->code != ERROR_NONE; /* else the disk failed, and hdf5_finish says so */
  good = hdf5_finish(w, said ? &closing : e) && good;
  return good && manifest_measure(path, file, e);
}

static bool publish(struct checkpoint *k, const char *temporary, const char *out, struct manifest_file *files, int ranks, struct error *e) {
  char *meta = strdup(checkpoint_meta(k));
  const struct manifest m = {.update = checkpoint_update(k), .files = files, .n_files = ranks, .meta = meta};
  const bool good = (meta || error_set(e, ERROR_SYSTEM, "out of memory")) && manifest_write(temporary, &m, e) &&
                    file_sync_folder(temporary, ERROR_CHECKPOINT, e) &&
                    (rename(temporary, out) == 0 || error_errno(e, ERROR_CHECKPOINT, "cannot rename %s to %s", temporary, out)) &&
                    file_sync_parent(out, ERROR_CHECKPOINT, e);
  free(meta);
  return good;
}

bool checkpoint_reshard(struct checkpoint *k, const char *out, int ranks, enum checkpoint_compression compression, struct error *e) {
  char temporary[STORE_PATH];
  if (!store_path_fits(out, e)) return false;
  snprintf(temporary, sizeof temporary, "%s.tmp", out);
  if (file_exists(out)) return error_set(e, ERROR_CHECKPOINT, "%s is there already", out);
  if (file_exists(temporary)) {
    error_set(e, ERROR_CHECKPOINT, "%s is there already", temporary);
    return error_hint(e, "where no other process is at work on it, it was left by one that died: remove it");
  }
  struct threads *threads = threads_create(threads_available(), e);
  struct manifest_file *files = calloc((size_t)ranks, sizeof *files);
  bool good = threads && (files || error_set(e, ERROR_SYSTEM, "out of memory")) && file_make_folder(temporary, ERROR_CHECKPOINT, e);
  const struct hdf5_options options = {compression, threads};
  for (int r = 0; good && r < ranks; r++) good = write_rank(k, temporary, r, ranks, &options, &files[r], e);
  good = good && publish(k, temporary, out, files, ranks, e);
  struct error cleaning;
  if (!good && file_exists(temporary) && !file_remove_tree(temporary, ERROR_CHECKPOINT, &cleaning)) log_warning("%s", cleaning.message);
  free(files);
  threads_destroy(threads);
  return good;
}
