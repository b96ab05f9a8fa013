/* Which checkpoint: what a path means, and the same one on every rank. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "checkpoints/store.h"
#include "trainer/state_parts.h"

void state_folder(const char *run_folder, char *text, int size) {
  snprintf(text, (size_t)size, "%s/checkpoints", run_folder);
}

/* What a path means: a step, or the folder of steps that it is or holds. */
struct place {
  int64_t step;
  char folder[STORE_PATH + 64];
};

static void look(const char *path, struct place *p) {
  char manifest[STORE_PATH + 64];
  snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
  p->step = file_exists(manifest);
  state_folder(path, p->folder, sizeof p->folder);
  if (p->step || !file_exists(p->folder)) snprintf(p->folder, sizeof p->folder, "%s", path);
}

/* On all ranks of c, as rank 0 sees it; c NULL: alone. */
static struct checkpoint *find(struct comm *c, const char *path, struct error *e) {
  struct place p = {0};
  if (!store_path_fits(path, e)) return NULL;
  if (!c || comm_rank(c) == 0) look(path, &p);
  if (c && !comm_broadcast(c, &p, sizeof p, 0, e)) return NULL;
  if (p.step) return checkpoint_open_together(c, p.folder, true, e);
  e->code = ERROR_NONE;
  struct checkpoint *k = checkpoint_open_newest_together(c, p.folder, e);
  if (!k && e->code == ERROR_NONE) error_set(e, ERROR_CHECKPOINT, "there is no checkpoint in %s", path);
  return k;
}

struct checkpoint *state_find(const char *path, struct error *e) { return find(NULL, path, e); }

struct checkpoint *state_find_together(struct run *run, const char *path, struct error *e) { return find(run->comm, path, e); }

bool state_choose(struct run *run, enum resume_kind kind, const char *path, struct checkpoint **out, struct error *e) {
  char folder[1024], steps[256] = "";
  state_folder(run->config.run.folder, folder, sizeof folder);
  *out = NULL;
  if (run->rank == 0) checkpoint_list(folder, steps, sizeof steps);
  if (kind == RESUME_PATH) {
    *out = checkpoint_open_together(run->comm, path, true, e);
    if (!*out && steps[0]) error_hint(e, "%s holds: %s", folder, steps);
    return *out != NULL;
  }
  if (kind == RESUME_AUTO) {
    e->code = ERROR_NONE;
    *out = checkpoint_open_newest_together(run->comm, folder, e);
    return *out != NULL || e->code == ERROR_NONE;
  }
  if (steps[0]) {
    error_set(e, ERROR_CONFIG, "--resume none, but %s holds checkpoints: %s", folder, steps);
    error_hint(e, "choose another run.folder, or remove that one");
  }
  return comm_agree(run->comm, !steps[0], e);
}
