/* A checkpoint written again, for another number of ranks or in another compression. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/rank_files.h"
#include "comm/share.h"

static bool copy_slice(struct checkpoint *k, struct rank_files *f, const struct tensor_slice *whole, int rank, int ranks, struct error *e) {
  struct tensor_slice s = *whole;
  s.first_row = share_row(whole->global_rows, whole->cols, rank, ranks);
  s.rows = share_row(whole->global_rows, whole->cols, rank + 1, ranks) - s.first_row;
  if (s.rows == 0) return true;
  s.data = malloc((size_t)(s.rows * s.cols) * dtype_bytes(s.dtype) + 1);
  const bool good = s.data ? checkpoint_read(k, &s, 1, e) && rank_files_add(f, &s, 1, e) : error_set(e, ERROR_SYSTEM, "out of memory for %s", s.name);
  free(s.data);
  return good;
}

static bool write_ranks(struct checkpoint *k, struct rank_files *f, int ranks, struct error *e) {
  bool good = true;
  for (int r = 0; good && r < ranks; r++) {
    good = rank_files_next(f, e);
    for (int i = 0; good && i < checkpoint_tensor_count(k); i++) good = copy_slice(k, f, checkpoint_tensor(k, i), r, ranks, e);
  }
  return rank_files_end(f, checkpoint_update(k), good ? checkpoint_meta(k) : NULL, e);
}

static bool publish(const char *temporary, const char *out, struct error *e) {
  return file_sync_folder(temporary, ERROR_CHECKPOINT, e) &&
         (rename(temporary, out) == 0 || error_errno(e, ERROR_CHECKPOINT, "cannot rename %s to %s", temporary, out)) &&
         file_sync_parent(out, ERROR_CHECKPOINT, e);
}

/* Made by this process and no other: two would write into each other's files. */
static bool make_temporary(const char *path, struct error *e) {
  if (!file_make_parent(path, ERROR_CHECKPOINT, e)) return false;
  if (mkdir(path, 0777) == 0) return true;
  if (errno != EEXIST) return error_errno(e, ERROR_CHECKPOINT, "cannot make folder %s", path);
  error_set(e, ERROR_CHECKPOINT, "%s is there already", path);
  return error_hint(e, "where no other process is at work on it, it was left by one that died: remove it");
}

bool checkpoint_reshard(struct checkpoint *k, const char *out, int ranks, enum checkpoint_compression compression, struct error *e) {
  struct rank_files f = {.options = {.compression = compression}};
  size_t length = strlen(out);
  while (length > 1 && out[length - 1] == '/') length--; /* the temporary folder lies beside it, not in it */
  if (!store_path_fits(out, e)) return false;
  snprintf(f.folder, sizeof f.folder, "%.*s.tmp", (int)length, out);
  if (file_exists(out)) return error_set(e, ERROR_CHECKPOINT, "%s is there already", out);
  f.options.threads = threads_create(threads_available(), e);
  if (!f.options.threads || !make_temporary(f.folder, e)) {
    threads_destroy(f.options.threads);
    return false;
  }
  /* Asked again: another may have finished before this one had the name. */
  const bool good = (!file_exists(out) || error_set(e, ERROR_CHECKPOINT, "%s is there already", out)) && write_ranks(k, &f, ranks, e) && publish(f.folder, out, e);
  struct error cleaning;
  if (!good && file_exists(f.folder) && !file_remove_tree(f.folder, ERROR_CHECKPOINT, &cleaning)) log_warning("%s", cleaning.message);
  threads_destroy(f.options.threads);
  return good;
}
