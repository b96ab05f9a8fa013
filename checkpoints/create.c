/* A checkpoint of one file, tensor by tensor. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/hdf5.h"
#include "checkpoints/manifest.h"
#include "checkpoints/store.h"

struct checkpoint_writer {
  char folder[STORE_PATH], temporary[STORE_PATH], path[STORE_PATH + 64];
  int64_t update;
  struct manifest_file file;
  struct hdf5_writer *hdf5;
  bool unsaid; /* the disk failed, and hdf5_finish will say so */
};

struct checkpoint_writer *checkpoint_create(const char *folder, int64_t update, struct error *e) {
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
  snprintf(w->folder, sizeof w->folder, "%s", folder);
  snprintf(w->file.name, sizeof w->file.name, "rank-%05d.h5", 0);
  store_temporary_path(folder, update, w->temporary);
  snprintf(w->path, sizeof w->path, "%s/%s", w->temporary, w->file.name);
  const bool good = file_make_folder(folder, ERROR_CHECKPOINT, e) && store_clean(folder, e) &&
                    file_make_folder(w->temporary, ERROR_CHECKPOINT, e);
  if (good) w->hdf5 = hdf5_create(w->path, e);
  if (w->hdf5) return w;
  checkpoint_finish(w, NULL, e);
  return NULL;
}

bool checkpoint_add(struct checkpoint_writer *w, const struct tensor_slice *whole, struct error *e) {
  e->code = ERROR_NONE;
  const bool good = hdf5_add(w->hdf5, whole, NULL, 0, e);
  w->unsaid = !good && e->code == ERROR_NONE;
  return good;
}

bool checkpoint_finish(struct checkpoint_writer *w, const char *meta, struct error *e) {
  struct error giving_up;
  bool good = meta != NULL;
  if (w->hdf5) good = hdf5_finish(w->hdf5, good || w->unsaid ? e : &giving_up) && good;
  if (good) {
    char *copy = strdup(meta);
    struct manifest m = {.update = w->update, .files = &w->file, .n_files = 1, .meta = copy};
    good = copy ? manifest_measure(w->path, &w->file, e) && manifest_write(w->temporary, &m, e) && store_publish(w->folder, w->update, e)
                : error_set(e, ERROR_SYSTEM, "out of memory");
    free(copy);
  }
  if (!good && file_exists(w->temporary) && !file_remove_tree(w->temporary, ERROR_CHECKPOINT, &giving_up))
    log_warning("%s", giving_up.message);
  free(w);
  return good;
}
