#include "checkpoints/verify.h"

#include <pthread.h>

#include "base/threads.h"

struct share {
  const char *folder;
  const struct manifest *manifest;
  int rank, world;
  pthread_mutex_t lock;
  int64_t first; /* damaged file so far, or -1 */
  struct error *error;
};

static void check_file(void *context, int64_t i, int worker) {
  struct share *s = context;
  const int64_t file = s->rank + i * s->world;
  struct error e;
  (void)worker;
  pthread_mutex_lock(&s->lock);
  const bool wanted = s->first < 0 || file < s->first; /* an earlier one's is the answer */
  pthread_mutex_unlock(&s->lock);
  if (!wanted || manifest_check(s->folder, &s->manifest->files[file], true, &e)) return;
  pthread_mutex_lock(&s->lock);
  if (s->first < 0 || file < s->first) {
    s->first = file;
    *s->error = e;
  }
  pthread_mutex_unlock(&s->lock);
}

int64_t verify_share(const char *folder, const struct manifest *m, int rank, int world, int local_world, struct error *e) {
  enum { MOST = 8 }; /* a file system seldom delivers more than these can take */
  struct share s = {.folder = folder, .manifest = m, .rank = rank, .world = world, .first = -1, .error = e};
  const int64_t files = m->n_files > rank ? (m->n_files - rank + world - 1) / world : 0;
  int threads = threads_available() / local_world;
  if (threads > MOST) threads = MOST;
  if (threads > files) threads = (int)files;
  struct error alone;
  struct threads *t = threads > 1 ? threads_create(threads, &alone) : NULL; /* none to be had: the caller does it */
  pthread_mutex_init(&s.lock, NULL);
  if (t)
    threads_run(t, files, check_file, &s);
  else
    for (int64_t i = 0; i < files; i++) check_file(&s, i, 0);
  pthread_mutex_destroy(&s.lock);
  threads_destroy(t);
  return s.first;
}
