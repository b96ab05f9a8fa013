#include "checkpoints/store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/manifest.h"

enum error_code store_fault(int number) {
  static const int ours[] = {EACCES, EPERM, EMFILE, ENFILE, ENOMEM, EINTR, EAGAIN, ESTALE, ETIMEDOUT, ENOTCONN};
  for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
    if (number == ours[i]) return ERROR_SYSTEM;
  return ERROR_CHECKPOINT;
}

bool store_path_fits(const char *path, struct error *e) {
  enum { LONGEST_NAME = 64 };
  const size_t length = strlen(path);
  return length < STORE_PATH - LONGEST_NAME ||
         error_set(e, ERROR_CHECKPOINT, "the path %.60s... has %zu bytes, at most %d are accepted", path, length,
                   STORE_PATH - LONGEST_NAME - 1);
}

void store_step_path(const char *folder, int64_t update, char path[STORE_PATH]) {
  snprintf(path, STORE_PATH, "%s/step-%08" PRId64, folder, update);
}

void store_temporary_path(const char *folder, int64_t update, char path[STORE_PATH]) {
  snprintf(path, STORE_PATH, "%s/step-%08" PRId64 ".tmp", folder, update);
}

/* "step-00000007" -> 7; -1 for every name that store_step_path does not make. */
static int64_t step_of(const char *name) {
  if (strncmp(name, "step-", 5) != 0) return -1;
  long long n = strtoll(name + 5, NULL, 10);
  char made[64];
  snprintf(made, sizeof made, "step-%08lld", n);
  return n >= 0 && strcmp(name, made) == 0 ? n : -1;
}

static int ascending(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* Calls each(folder, name) for every entry; absent folder: none. */
static bool scan(const char *folder, bool (*each)(void *context, const char *name, struct error *e), void *context,
                 struct error *e) {
  DIR *d = opendir(folder);
  if (!d) return errno == ENOENT || error_errno(e, ERROR_CHECKPOINT, "cannot read %s", folder);
  bool good = true;
  for (;;) {
    errno = 0;
    const struct dirent *entry = readdir(d);
    if (!entry) {
      if (errno != 0) good = error_errno(e, ERROR_CHECKPOINT, "cannot read %s", folder);
      break;
    }
    good = each(context, entry->d_name, e);
    if (!good) break;
  }
  closedir(d);
  return good;
}

struct listing {
  int64_t *updates;
  int n, room;
};

static bool list_entry(void *context, const char *name, struct error *e) {
  struct listing *l = context;
  int64_t step = step_of(name);
  if (step < 0) return true;
  if (l->n == l->room) {
    int room = l->room ? 2 * l->room : 16;
    int64_t *more = realloc(l->updates, (size_t)room * sizeof *more);
    if (!more) return error_set(e, ERROR_SYSTEM, "out of memory");
    l->updates = more;
    l->room = room;
  }
  l->updates[l->n++] = step;
  return true;
}

bool store_list(const char *folder, int64_t **updates, int *n, struct error *e) {
  struct listing l = {0};
  bool good = scan(folder, list_entry, &l, e);
  if (good && l.n > 0) qsort(l.updates, (size_t)l.n, sizeof *l.updates, ascending);
  if (!good) {
    free(l.updates);
    l = (struct listing){0};
  }
  *updates = l.updates;
  *n = l.n;
  return good;
}

/* A checkpoint of the same update is already there (a run went back and came here
 * again), on a file system that cannot exchange two names: it steps aside and goes
 * when the new one is in place. */
static bool step_aside(const char *folder, int64_t update, char aside[STORE_PATH], struct error *e) {
  char path[STORE_PATH];
  store_step_path(folder, update, path);
  snprintf(aside, STORE_PATH, "%s/replaced-%08" PRId64 ".tmp", folder, update);
  if (rename(path, aside) == 0) return true;
  aside[0] = 0;
  return errno == ENOENT || error_errno(e, ERROR_CHECKPOINT, "cannot replace %s", path);
}

bool store_latest_dangles(const char *folder, char target[STORE_PATH]) {
  char latest[STORE_PATH];
  snprintf(latest, sizeof latest, "%s/latest", folder);
  ssize_t n = readlink(latest, target, STORE_PATH - 1);
  if (n < 0 || file_exists(latest)) return false;
  target[n] = 0;
  return true;
}

/* `latest` is for people.  Where it cannot be a link (a file system without them, a
 * folder of that name from a copy that followed it) that is worth a warning, and the
 * checkpoints are none the worse for it. */
static void point_latest(const char *folder, int64_t update) {
  char link[STORE_PATH], latest[STORE_PATH], target[64];
  struct error e;
  snprintf(target, sizeof target, "step-%08" PRId64, update);
  snprintf(link, sizeof link, "%s/latest.tmp", folder);
  snprintf(latest, sizeof latest, "%s/latest", folder);
  bool good = file_remove_tree(link, ERROR_CHECKPOINT, &e);
  if (good && (symlink(target, link) != 0 || rename(link, latest) != 0)) {
    good = error_errno(&e, ERROR_CHECKPOINT, "cannot point %s at %s", latest, target);
    unlink(link);
  }
  if (!good || !file_sync_folder(folder, ERROR_CHECKPOINT, &e)) log_warning("%s", e.message);
}

/* Gives `temporary` the name `path`; aside: where what had it before is now, or "". */
static bool put_in_place(const char *folder, int64_t update, const char *temporary, const char *path, char aside[STORE_PATH], struct error *e) {
  aside[0] = 0;
  if (rename(temporary, path) == 0) return true;
  const bool taken = errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR;
  if (taken && renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_EXCHANGE) == 0) { /* at no time is there none */
    snprintf(aside, STORE_PATH, "%s", temporary);
    return true;
  }
  if (!taken) return error_errno(e, ERROR_CHECKPOINT, "cannot rename %s to %s", temporary, path);
  if (!step_aside(folder, update, aside, e)) return false;
  if (rename(temporary, path) == 0) return true;
  error_errno(e, ERROR_CHECKPOINT, "cannot rename %s to %s", temporary, path);
  if (aside[0] && rename(aside, path) != 0) log_warning("cannot rename %s to %s: %s", aside, path, strerror(errno));
  return false;
}

bool store_publish(const char *folder, int64_t update, struct error *e) {
  char temporary[STORE_PATH], path[STORE_PATH], aside[STORE_PATH];
  store_temporary_path(folder, update, temporary);
  store_step_path(folder, update, path);
  if (!file_sync_folder(temporary, ERROR_CHECKPOINT, e)) return false;
  if (!put_in_place(folder, update, temporary, path, aside, e)) return false;
  if (!file_sync_folder(folder, ERROR_CHECKPOINT, e)) return false;
  struct error cleaning; /* the new one stands; the next save tries again */
  if (aside[0] && !file_remove_tree(aside, ERROR_CHECKPOINT, &cleaning)) log_warning("%s", cleaning.message);
  point_latest(folder, update);
  return true;
}

/* A step under another's name is none: nothing is given up in its favour. */
static bool looks_whole(const char *path, int64_t update) {
  struct manifest m;
  struct error ignored;
  if (!manifest_read(path, false, &m, &ignored)) return false;
  const bool own = m.update == update;
  manifest_free(&m);
  return own;
}

static bool remove_step(const char *path, struct error *e) {
  char manifest[STORE_PATH + 16];
  if (unlink(path) == 0) return true; /* a link: what it leads to is somebody's archive */
  snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
  if (unlink(manifest) != 0 && errno != ENOENT) return error_errno(e, ERROR_CHECKPOINT, "cannot remove %s", manifest);
  return file_remove_tree(path, ERROR_CHECKPOINT, e);
}

bool store_prune(const char *folder, int keep, int64_t keep_every, struct error *e) {
  if (keep <= 0) return true;
  int64_t *updates;
  int n, kept = 0;
  if (!store_list(folder, &updates, &n, e)) return false;
  bool good = true;
  for (int i = n - 1; good && i >= 0; i--) {
    char path[STORE_PATH];
    store_step_path(folder, updates[i], path);
    if (kept < keep)
      kept += looks_whole(path, updates[i]);
    else if (keep_every <= 0 || updates[i] % keep_every != 0)
      good = remove_step(path, e);
  }
  free(updates);
  return good;
}

/* A free name for a step that no longer counts. */
static bool superseded_path(const char *folder, int64_t update, char path[STORE_PATH], struct error *e) {
  for (int i = 1; i < 1000; i++) {
    if (i == 1)
      snprintf(path, STORE_PATH, "%s/superseded-%08" PRId64, folder, update);
    else
      snprintf(path, STORE_PATH, "%s/superseded-%08" PRId64 ".%d", folder, update, i);
    if (!file_exists(path)) return true;
  }
  return error_set(e, ERROR_CHECKPOINT, "%s holds too many superseded checkpoints of update %" PRId64, folder, update);
}

bool store_set_aside(const char *folder, int64_t update, struct error *e) {
  int64_t *updates;
  int n, moved = 0;
  if (!store_list(folder, &updates, &n, e)) return false;
  bool good = true;
  char path[STORE_PATH], aside[STORE_PATH];
  for (int i = 0; good && i < n; i++) {
    if (updates[i] <= update) continue;
    store_step_path(folder, updates[i], path);
    good = superseded_path(folder, updates[i], aside, e) &&
           (rename(path, aside) == 0 || error_errno(e, ERROR_CHECKPOINT, "cannot rename %s to %s", path, aside));
    if (good) log_warning("%s no longer counts: set aside as %s", path, aside);
    moved++;
  }
  free(updates);
  if (!good || moved == 0) return good;
  store_step_path(folder, update, path);
  if (file_exists(path)) {
    point_latest(folder, update);
    return true;
  }
  snprintf(path, sizeof path, "%s/latest", folder);
  if (unlink(path) != 0 && errno != ENOENT) log_warning("cannot remove %s: %s", path, strerror(errno));
  return file_sync_folder(folder, ERROR_CHECKPOINT, e);
}

static bool clean_entry(void *context, const char *name, struct error *e) {
  const char *folder = context;
  const size_t n = strlen(name);
  if (n < 4 || strcmp(name + n - 4, ".tmp") != 0) return true;
  char path[STORE_PATH];
  if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
    return error_set(e, ERROR_CHECKPOINT, "the path of %s in %s is too long", name, folder);
  return file_remove_tree(path, ERROR_CHECKPOINT, e);
}

bool store_clean(const char *folder, struct error *e) {
  char copy[STORE_PATH];
  snprintf(copy, sizeof copy, "%s", folder);
  return scan(folder, clean_entry, copy, e);
}
