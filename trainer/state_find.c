/* Which checkpoint: what a path means, and the same one on every rank. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "checkpoints/store.h"
#include "trainer/state_parts.h"

void state_folder(const char *run_folder, char *text, int size) {
  snprintf(text, (size_t)size, "%s/checkpoints", run_folder);
}

/* What rank 0 opened, for the others: its path, "" where there is none. */
static bool share(struct run *run, bool good, struct checkpoint **k, struct error *e) {
  char chosen[STORE_PATH] = "";
  if (!comm_agree(run->comm, good, e)) return false;
  if (*k) snprintf(chosen, sizeof chosen, "%s", checkpoint_path(*k));
  if (!comm_broadcast(run->comm, chosen, sizeof chosen, 0, e)) return false;
  if (run->rank != 0 && chosen[0]) {
    *k = checkpoint_open(chosen, false, e);
    good = *k != NULL;
  }
  return comm_agree(run->comm, good, e);
}

/* A living run may remove the step that rank 0 chose before the others have opened it.
 * Then there is a newer one and rank 0 chooses again, however often the run is faster; the
 * same choice twice is another reason, which no more looks would change. */
struct checkpoint *state_find_together(struct run *run, const char *path, struct error *e) {
  enum { LOOKS = 1000 };
  char chosen[STORE_PATH] = "";
  for (int i = 0; i < LOOKS; i++) {
    struct checkpoint *k = run->rank == 0 ? state_find(path, e) : NULL;
    int64_t another = k && strcmp(checkpoint_path(k), chosen) != 0;
    if (k) snprintf(chosen, sizeof chosen, "%s", checkpoint_path(k));
    struct error unheard;
    const bool shared = share(run, run->rank != 0 || k != NULL, &k, e);
    if (shared) return k;
    checkpoint_close(k);
    if (!comm_or_i64(run->comm, &another, 1, &unheard) || !another) break;
  }
  return NULL;
}

struct checkpoint *state_find(const char *path, struct error *e) {
  char inner[1200];
  if (!store_path_fits(path, e)) return NULL;
  snprintf(inner, sizeof inner, "%s/manifest.json", path);
  if (file_exists(inner)) return checkpoint_open(path, true, e);
  state_folder(path, inner, sizeof inner);
  e->code = ERROR_NONE;
  struct checkpoint *k = checkpoint_open_newest(file_exists(inner) ? inner : path, e);
  if (!k && e->code == ERROR_NONE) error_set(e, ERROR_CHECKPOINT, "there is no checkpoint in %s", path);
  return k;
}

/* Rank 0 chooses; the others open what it chose. */
bool state_choose(struct run *run, enum resume_kind kind, const char *path, struct checkpoint **out, struct error *e) {
  char folder[1024];
  state_folder(run->config.run.folder, folder, sizeof folder);
  *out = NULL;
  bool good = true;
  if (run->rank == 0) {
    char steps[256];
    checkpoint_list(folder, steps, sizeof steps);
    if (kind == RESUME_PATH) {
      *out = checkpoint_open(path, true, e);
      good = *out != NULL;
      if (!good && steps[0]) error_hint(e, "%s holds: %s", folder, steps);
    } else if (kind == RESUME_AUTO) {
      e->code = ERROR_NONE;
      *out = checkpoint_open_newest(folder, e);
      good = *out != NULL || e->code == ERROR_NONE;
    } else if (steps[0]) {
      good = error_set(e, ERROR_CONFIG, "--resume none, but %s holds checkpoints: %s", folder, steps);
      error_hint(e, "choose another run.folder, or remove that one");
    }
  }
  return share(run, good, out, e);
}
