#include "data/loader.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/clock.h"

enum { SLOTS = LOADER_AHEAD + 1, LINE = 64 };

struct loader {
  struct loader_plan plan;
  struct loader_memory memory;
  void *bytes;
  struct loader_batch slot[SLOTS]; /* update u is in slot u % SLOTS */

  pthread_t thread;
  bool started;
  atomic_bool stop;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  /* Under the lock. */
  int64_t read;  /* updates whose samples are there */
  int64_t taken; /* updates handed out; the last one's slot is in use */
  bool failed;   /* update `read` could not be read */
  struct error error;
};

static void *plain_allocate(void *context, size_t bytes, struct error *e) {
  (void)context;
  void *p = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
  if (!p) error_set(e, ERROR_SYSTEM, "out of memory for %zu bytes of samples", bytes);
  return p;
}

static void plain_release(void *context, void *p) {
  (void)context;
  free(p);
}

const struct loader_memory loader_memory_plain = {plain_allocate, plain_release, NULL};

/* ---- memory ------------------------------------------------------------------ */

/* Gives a slot its arrays from *at on; with `at` NULL it only counts. */
static int64_t lay_out(struct loader_batch *b, char *at, int64_t tokens, bool documents) {
  const int64_t ids = round_up(tokens * (int64_t)sizeof(int32_t), LINE);
  if (at) {
    b->inputs = (int32_t *)(void *)at;
    b->targets = (int32_t *)(void *)(at + ids);
    b->starts = documents ? (int32_t *)(void *)(at + 2 * ids) : NULL;
    b->source = (uint8_t *)(at + (documents ? 3 : 2) * ids);
  }
  return (documents ? 3 : 2) * ids + round_up(tokens, LINE);
}

int64_t loader_bytes(int64_t share, int64_t seq_len, bool documents) {
  return SLOTS * lay_out(NULL, NULL, share * seq_len, documents);
}

/* ---- the thread ---------------------------------------------------------------- */

static bool read_update(struct loader *l, int64_t update, struct loader_batch *b, struct error *e) {
  const struct loader_plan *p = &l->plan;
  const int64_t seq = p->order->seq_len;
  b->first = p->first + update * p->stride;
  b->hash = (struct hash){0, 0};
  memset(b->targets_of, 0, sizeof b->targets_of);
  memset(b->tokens_of, 0, sizeof b->tokens_of);
  for (int64_t i = 0; i < p->share && !atomic_load(&l->stop); i++) {
    const int64_t at = i * seq;
    const struct data_sample s = {b->inputs + at, b->targets + at, b->starts ? b->starts + at : NULL, b->source + at};
    if (!data_sample(p->order, b->first + i, &s, e)) return false;
    b->hash = hash_sum(b->hash, data_sample_hash(b->first + i, s.inputs, s.targets, seq));
    for (int64_t t = 0; t < seq; t++) {
      b->tokens_of[s.source[t]]++;
      b->targets_of[s.source[t]] += s.targets[t] >= 0;
    }
  }
  return true;
}

static void *read_ahead(void *context) {
  struct loader *l = context;
  bool good = true;
  pthread_mutex_lock(&l->lock);
  while (good && l->read < l->plan.updates && !atomic_load(&l->stop)) {
    const int64_t update = l->read;
    if (update > l->taken + LOADER_AHEAD - 1) { /* its slot is in use */
      pthread_cond_wait(&l->changed, &l->lock);
      continue;
    }
    pthread_mutex_unlock(&l->lock);
    struct error e = {0};
    good = read_update(l, update, &l->slot[update % SLOTS], &e);
    pthread_mutex_lock(&l->lock);
    if (good) {
      l->read++;
    } else {
      l->failed = true;
      l->error = e;
    }
    pthread_cond_broadcast(&l->changed);
  }
  pthread_mutex_unlock(&l->lock);
  return NULL;
}

/* ---- the caller's side ------------------------------------------------------------ */

/* Signals are the main thread's. */
static bool start_thread(struct loader *l, struct error *e) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int status = pthread_create(&l->thread, NULL, read_ahead, l);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  l->started = status == 0;
  return l->started || error_set(e, ERROR_SYSTEM, "cannot start the loader's thread: %s", strerror(status));
}

struct loader *loader_open(const struct loader_plan *p, const struct loader_memory *memory, struct error *e) {
  struct loader *l = calloc(1, sizeof *l);
  if (!l) {
    error_set(e, ERROR_SYSTEM, "out of memory for the loader");
    return NULL;
  }
  l->plan = *p;
  l->memory = *memory;
  pthread_mutex_init(&l->lock, NULL);
  pthread_cond_init(&l->changed, NULL);
  l->bytes = memory->allocate(memory->context, (size_t)loader_bytes(p->share, p->order->seq_len, p->documents), e);
  if (l->bytes) {
    char *at = l->bytes;
    for (int i = 0; i < SLOTS; i++) at += lay_out(&l->slot[i], at, p->share * p->order->seq_len, p->documents);
    if (start_thread(l, e)) return l;
  }
  loader_close(l);
  return NULL;
}

const struct loader_batch *loader_next(struct loader *l, double *waited, struct error *e) {
  const double began = clock_seconds();
  const struct loader_batch *b = NULL;
  pthread_mutex_lock(&l->lock);
  l->taken++; /* the one before is free */
  pthread_cond_broadcast(&l->changed);
  while (l->read < l->taken && !l->failed && l->taken <= l->plan.updates) pthread_cond_wait(&l->changed, &l->lock);
  if (l->read >= l->taken) {
    b = &l->slot[(l->taken - 1) % SLOTS];
  } else {
    if (l->failed)
      *e = l->error;
    else
      error_set(e, ERROR_INTERNAL, "the loader was opened for %lld updates", (long long)l->plan.updates);
    l->taken--;
  }
  pthread_mutex_unlock(&l->lock);
  *waited = clock_seconds() - began;
  return b;
}

void loader_close(struct loader *l) {
  if (!l) return;
  if (l->started) {
    pthread_mutex_lock(&l->lock);
    atomic_store(&l->stop, true);
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
  }
  pthread_mutex_destroy(&l->lock);
  pthread_cond_destroy(&l->changed);
  if (l->bytes) l->memory.release(l->memory.context, l->bytes);
  free(l);
}
