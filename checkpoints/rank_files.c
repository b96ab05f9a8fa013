#include "checkpoints/rank_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void path_of(const struct rank_files *f, char path[STORE_PATH + 64]) {
  snprintf(path, STORE_PATH + 64, "%s/%s", f->folder, f->files[f->n - 1].name);
}

/* Closes the open file; `good`: nothing has failed so far. */
static bool end_file(struct rank_files *f, bool good, struct error *e) {
  char path[STORE_PATH + 64];
  struct error giving_up;
  if (!f->open) return good;
  const bool closed = hdf5_finish(f->open, good || f->unsaid ? e : &giving_up);
  f->open = NULL;
  path_of(f, path);
  return good && closed && manifest_measure(path, &f->files[f->n - 1], e);
}

bool rank_files_next(struct rank_files *f, struct error *e) {
  char path[STORE_PATH + 64];
  if (!end_file(f, true, e)) return false;
  struct manifest_file *grown = realloc(f->files, (size_t)(f->n + 1) * sizeof *grown);
  if (!grown) return error_set(e, ERROR_SYSTEM, "out of memory");
  f->files = grown;
  memset(&f->files[f->n], 0, sizeof *f->files);
  manifest_file_name(f->n, &f->files[f->n]);
  f->n++;
  path_of(f, path);
  f->open = hdf5_create_with(path, &f->options, e);
  return f->open != NULL;
}

bool rank_files_add(struct rank_files *f, const struct tensor_slice *slices, int n, struct error *e) {
  e->code = ERROR_NONE;
  const bool good = hdf5_add_all(f->open, slices, n, e);
  f->unsaid = !good && e->code == ERROR_NONE;
  return good;
}

bool rank_files_end(struct rank_files *f, int64_t update, const char *meta, struct error *e) {
  bool good = end_file(f, meta != NULL, e);
  if (good) {
    char *copy = strdup(meta);
    const struct manifest m = {.update = update, .files = f->files, .n_files = f->n, .meta = copy};
    good = copy ? manifest_write(f->folder, &m, e) : error_set(e, ERROR_SYSTEM, "out of memory");
    free(copy);
  }
  free(f->files);
  f->files = NULL;
  f->n = 0;
  return good;
}
