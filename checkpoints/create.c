/* A checkpoint that one process writes, tensor by tensor. */
#include <stdlib.h>
#include <stdio.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/rank_files.h"

struct checkpoint_writer {
  char folder[STORE_PATH];
  int64_t update;
  struct rank_files files;
};

struct checkpoint_writer *checkpoint_create(const char *folder, int64_t update, enum checkpoint_compression compression,
                                            struct threads *threads, struct error *e) {
  if (!store_path_fits(folder, e)) return NULL;
  char steps[256];
  checkpoint_list(folder, steps, sizeof steps);
  if (steps[0]) {
    error_set(e, ERROR_CHECKPOINT, "%s holds checkpoints already: %s", folder, steps);
    error_hint(e, "give another folder");
    return NULL;
  }
  struct checkpoint_writer *w = calloc(1, sizeof *w);
  if (!w) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  w->update = update;
  w->files.options = (struct hdf5_options){compression, threads};
  snprintf(w->folder, sizeof w->folder, "%s", folder);
  store_temporary_path(folder, update, w->files.folder);
  if (file_make_folder(folder, ERROR_CHECKPOINT, e) && store_clean(folder, e) && file_make_folder(w->files.folder, ERROR_CHECKPOINT, e) &&
      rank_files_next(&w->files, e))
    return w;
  checkpoint_finish(w, NULL, e);
  return NULL;
}

bool checkpoint_add(struct checkpoint_writer *w, const struct tensor_slice *slices, int n, struct error *e) {
  return rank_files_add(&w->files, slices, n, e);
}

bool checkpoint_next_rank(struct checkpoint_writer *w, struct error *e) { return rank_files_next(&w->files, e); }

bool checkpoint_finish(struct checkpoint_writer *w, const char *meta, struct error *e) {
  struct error cleaning;
  const bool good = rank_files_end(&w->files, w->update, meta, e) && store_publish(w->folder, w->update, e);
  if (!good && file_exists(w->files.folder) && !file_remove_tree(w->files.folder, ERROR_CHECKPOINT, &cleaning))
    log_warning("%s", cleaning.message);
  free(w);
  return good;
}
