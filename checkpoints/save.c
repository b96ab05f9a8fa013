/* Saving: see checkpoint.h for the order of publication and who does what. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/hdf5.h"
#include "checkpoints/manifest.h"
#include "checkpoints/store.h"

enum stage { STAGE_NONE, STAGE_WRITE, STAGE_PUBLISH };

/* What a rank tells the others about its file. */
struct part {
  struct manifest_file file;
  int64_t tensor_bytes;
};

struct checkpoint_saver {
  struct comm *comm;
  char folder[STORE_PATH], temporary[STORE_PATH];
  struct checkpoint_policy policy;

  /* The save that is under way. */
  enum stage stage; /* of the caller's thread: the same on every rank */
  int64_t update;
  const struct tensor_slice *slices;
  int n_slices;
  char *meta;
  struct part mine, *parts; /* [world] */
  double began, ended;
  bool good; /* of the work; *error tells why not */
  struct error error;

  /* The thread. */
  bool apart, busy, leave;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
};

/* ---- the work: no communication ----------------------------------------------------- */

/* More than `keep` may be there (it was lowered, or steps could not be removed), and they
 * may be what fills the disk.  They go, or stay: it does not touch the new one. */
static void prune(const struct checkpoint_saver *s) {
  struct error e;
  if (!store_prune(s->folder, s->policy.keep, s->policy.keep_every, &e)) log_warning("%s", e.message);
}

static bool write_rank_file(struct checkpoint_saver *s, struct error *e) {
  char path[STORE_PATH + 64];
  const struct hdf5_options options = {s->policy.compression, s->policy.threads};
  memset(&s->mine, 0, sizeof s->mine);
  manifest_file_name(comm_rank(s->comm), &s->mine.file);
  snprintf(path, sizeof path, "%s/%s", s->temporary, s->mine.file.name);
  for (int i = 0; i < s->n_slices; i++)
    s->mine.tensor_bytes += s->slices[i].rows * s->slices[i].cols * (int64_t)dtype_bytes(s->slices[i].dtype);
  return hdf5_write_with(path, &options, s->slices, s->n_slices, e) && manifest_measure(path, &s->mine.file, e);
}

static bool publish(struct checkpoint_saver *s, struct error *e) {
  const int world = comm_world(s->comm);
  struct manifest_file *files = calloc((size_t)world, sizeof *files);
  if (!files) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (int r = 0; r < world; r++) files[r] = s->parts[r].file;
  const struct manifest m = {.update = s->update, .files = files, .n_files = world, .meta = s->meta};
  const bool good = manifest_write(s->temporary, &m, e) && store_publish(s->folder, s->update, e);
  free(files);
  s->ended = clock_seconds();
  if (good) prune(s);
  return good;
}

static void work(struct checkpoint_saver *s) {
  s->good = s->stage == STAGE_WRITE ? write_rank_file(s, &s->error) : publish(s, &s->error);
}

/* ---- the thread ----------------------------------------------------------------------- */

static void *saver_main(void *argument) {
  struct checkpoint_saver *s = argument;
  pthread_mutex_lock(&s->lock);
  for (;;) {
    while (!s->busy && !s->leave) pthread_cond_wait(&s->changed, &s->lock);
    if (!s->busy) break;
    pthread_mutex_unlock(&s->lock);
    work(s);
    pthread_mutex_lock(&s->lock);
    s->busy = false;
    pthread_cond_broadcast(&s->changed);
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

static void start(struct checkpoint_saver *s, enum stage stage) {
  s->stage = stage;
  if (!s->apart) {
    work(s);
    return;
  }
  pthread_mutex_lock(&s->lock);
  s->busy = true;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

bool checkpoint_saver_under_way(const struct checkpoint_saver *s) { return s->stage != STAGE_NONE; }

bool checkpoint_saver_busy(struct checkpoint_saver *s) {
  pthread_mutex_lock(&s->lock);
  const bool busy = s->busy;
  pthread_mutex_unlock(&s->lock);
  return busy;
}

void checkpoint_saver_wait(struct checkpoint_saver *s) {
  pthread_mutex_lock(&s->lock);
  while (s->busy) pthread_cond_wait(&s->changed, &s->lock);
  pthread_mutex_unlock(&s->lock);
}

/* ---- together --------------------------------------------------------------------------- */

struct checkpoint_saver *checkpoint_saver_open(struct comm *c, const char *folder, const struct checkpoint_policy *p, bool apart,
                                               struct error *e) {
  if (!store_path_fits(folder, e)) return NULL;
  struct checkpoint_saver *s = calloc(1, sizeof *s);
  if (s) s->parts = calloc((size_t)comm_world(c), sizeof *s->parts);
  if (!s || !s->parts) {
    free(s);
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  s->comm = c;
  s->policy = *p;
  snprintf(s->folder, sizeof s->folder, "%s", folder);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  const int failed = apart ? pthread_create(&s->thread, NULL, saver_main, s) : 0;
  s->apart = apart && !failed;
  if (!failed) return s;
  error_set(e, ERROR_SYSTEM, "cannot start the thread that saves checkpoints: %s", strerror(failed));
  checkpoint_saver_close(s);
  return NULL;
}

/* Rank 0 makes the empty temporary folder that all ranks write into. */
static bool prepare(struct checkpoint_saver *s, struct error *e) {
  bool good = true;
  if (comm_rank(s->comm) == 0) {
    good = file_make_folder(s->folder, ERROR_CHECKPOINT, e) && store_clean(s->folder, e);
    if (good) prune(s);
    good = good && file_make_folder(s->temporary, ERROR_CHECKPOINT, e);
  }
  return comm_agree(s->comm, good, e);
}

/* No save is under way any more; a failed one leaves nothing. */
static bool over(struct checkpoint_saver *s, bool good) {
  struct error cleaning;
  s->stage = STAGE_NONE;
  free(s->meta);
  s->meta = NULL;
  if (!good && comm_rank(s->comm) == 0 && file_exists(s->temporary) && !file_remove_tree(s->temporary, ERROR_CHECKPOINT, &cleaning))
    log_warning("%s", cleaning.message);
  return good;
}

bool checkpoint_saver_begin(struct checkpoint_saver *s, int64_t update, const struct tensor_slice *slices, int n_slices,
                            const char *meta, struct error *e) {
  s->began = clock_seconds();
  s->update = update;
  s->slices = slices;
  s->n_slices = n_slices;
  s->meta = strdup(meta);
  store_temporary_path(s->folder, update, s->temporary);
  const bool good = comm_agree(s->comm, s->meta != NULL || error_set(e, ERROR_SYSTEM, "out of memory"), e) && prepare(s, e);
  if (!good) return over(s, false);
  start(s, STAGE_WRITE);
  return true;
}

bool checkpoint_saver_advance(struct checkpoint_saver *s, bool *done, struct checkpoint_saved *out, struct error *e) {
  *done = true;
  bool good = s->good;
  if (!good) *e = s->error;
  if (!comm_agree(s->comm, good, e)) return over(s, false);
  if (s->stage == STAGE_WRITE) {
    if (!comm_gather_all(s->comm, s->parts, &s->mine, sizeof s->mine, e)) return over(s, false);
    *done = false;
    s->good = true;
    if (comm_rank(s->comm) == 0)
      start(s, STAGE_PUBLISH);
    else
      s->stage = STAGE_PUBLISH;
    return true;
  }
  *out = (struct checkpoint_saved){.update = s->update, .seconds = s->ended - s->began};
  for (int r = 0; r < comm_world(s->comm); r++) {
    out->tensor_bytes += s->parts[r].tensor_bytes;
    out->file_bytes += s->parts[r].file.bytes;
  }
  return over(s, true);
}

void checkpoint_saver_close(struct checkpoint_saver *s) {
  if (!s) return;
  if (s->apart) {
    pthread_mutex_lock(&s->lock);
    s->leave = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
  }
  pthread_cond_destroy(&s->changed);
  pthread_mutex_destroy(&s->lock);
  free(s->meta);
  free(s->parts);
  free(s);
}

bool checkpoint_save(struct comm *c, const char *folder, int64_t update, const struct tensor_slice *slices,
                     int n_slices, const char *meta, int keep, struct error *e) {
  const struct checkpoint_policy policy = {.keep = keep};
  struct checkpoint_saver *s = checkpoint_saver_open(c, folder, &policy, false, e);
  bool done = false, good = comm_agree(c, s != NULL, e) && checkpoint_saver_begin(s, update, slices, n_slices, meta, e);
  struct checkpoint_saved saved;
  while (good && !done) good = checkpoint_saver_advance(s, &done, &saved, e);
  checkpoint_saver_close(s);
  return good;
}
