/* A pool of worker threads over one shared counter of tasks.
 *
 * A loop is announced by raising `generation`; workers watch it for a few
 * microseconds (only where every worker can have a processor of its own), then
 * sleep on a condition variable.  A worker joins a loop through `gate`, which
 * the caller shuts once the tasks are handed out: it waits for those inside
 * only, never for a sleeper, and a loop's fields change while nobody is inside.
 */
#include "base/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SPIN_ROUNDS 200 /* a few microseconds of pause instructions */
#define GATE_OPEN (1 << 24) /* added to the number of workers inside */
#define CACHE_LINE 128

struct worker {
  struct threads *pool;
  int number;
  pthread_t thread;
};

struct threads {
  int count, spin;
  int started; /* extra threads that exist */
  /* The current loop; written by the caller while the gate is shut. */
  void (*task)(void *context, int64_t index, int worker);
  void *context;
  int64_t n;
  _Alignas(CACHE_LINE) atomic_int_fast64_t next;
  _Alignas(CACHE_LINE) atomic_uint generation;
  atomic_bool stop; /* looked at after each change of `generation` */
  _Alignas(CACHE_LINE) atomic_int gate;
  pthread_mutex_t mutex;
  pthread_cond_t begin, end;
  struct worker *workers;
};

static inline void cpu_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

int threads_of_host(void) {
  long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? (int)online : 1;
}

int threads_available(void) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    int n = CPU_COUNT(&set);
    if (n > 0) return n;
  }
  return threads_of_host(); /* more processors than a cpu_set_t holds */
}

static void take_tasks(struct threads *t, int worker) {
  for (;;) {
    int64_t i = atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed);
    if (i >= t->n) return;
    t->task(t->context, i, worker);
  }
}

/* False when the loop is already over. */
static bool gate_enter(struct threads *t) {
  int gate = atomic_load_explicit(&t->gate, memory_order_relaxed);
  while (gate >= GATE_OPEN)
    if (atomic_compare_exchange_weak_explicit(&t->gate, &gate, gate + 1, memory_order_acquire,
                                              memory_order_relaxed))
      return true;
  return false;
}

static void *worker_main(void *argument) {
  struct worker *self = argument;
  struct threads *t = self->pool;
  unsigned seen = 0;
  for (;;) {
    unsigned now = seen;
    for (int i = 0; i < t->spin; i++) {
      now = atomic_load_explicit(&t->generation, memory_order_acquire);
      if (now != seen) break;
      cpu_pause();
    }
    if (now == seen) {
      pthread_mutex_lock(&t->mutex);
      while ((now = atomic_load_explicit(&t->generation, memory_order_acquire)) == seen)
        pthread_cond_wait(&t->begin, &t->mutex);
      pthread_mutex_unlock(&t->mutex);
    }
    seen = now;
    if (atomic_load_explicit(&t->stop, memory_order_relaxed)) return NULL;
    if (!gate_enter(t)) continue;
    take_tasks(t, self->number);
    if (atomic_fetch_sub_explicit(&t->gate, 1, memory_order_acq_rel) == 1) {
      /* Shut, and this was the last inside: the caller may be asleep. */
      pthread_mutex_lock(&t->mutex);
      pthread_cond_signal(&t->end);
      pthread_mutex_unlock(&t->mutex);
    }
  }
}

/* Wakes every extra worker. */
static void announce(struct threads *t) {
  pthread_mutex_lock(&t->mutex);
  atomic_fetch_add_explicit(&t->generation, 1, memory_order_release);
  pthread_cond_broadcast(&t->begin);
  pthread_mutex_unlock(&t->mutex);
}

struct threads *threads_create(int count, struct error *e) {
  if (count < 1) {
    error_set(e, ERROR_INTERNAL, "thread pool of %d threads", count);
    return NULL;
  }
  struct threads *t = aligned_alloc(CACHE_LINE, sizeof *t);
  if (!t) {
    error_set(e, ERROR_SYSTEM, "out of memory for a thread pool");
    return NULL;
  }
  memset(t, 0, sizeof *t);
  t->count = count;
  t->spin = count <= threads_available() ? SPIN_ROUNDS : 0;
  atomic_init(&t->next, 0);
  atomic_init(&t->generation, 0);
  atomic_init(&t->gate, 0);
  atomic_init(&t->stop, false);
  t->workers = calloc((size_t)count, sizeof *t->workers);
  if (!t->workers) {
    free(t);
    error_set(e, ERROR_SYSTEM, "out of memory for a pool of %d threads", count);
    return NULL;
  }
  int failed = pthread_mutex_init(&t->mutex, NULL);
  if (!failed && (failed = pthread_cond_init(&t->begin, NULL))) pthread_mutex_destroy(&t->mutex);
  if (!failed && (failed = pthread_cond_init(&t->end, NULL))) {
    pthread_cond_destroy(&t->begin);
    pthread_mutex_destroy(&t->mutex);
  }
  if (failed) {
    error_set(e, ERROR_SYSTEM, "thread pool: %s", strerror(failed));
    free(t->workers);
    free(t);
    return NULL;
  }
  for (int i = 1; i < count; i++) {
    struct worker *w = &t->workers[i];
    *w = (struct worker){.pool = t, .number = i};
    failed = pthread_create(&w->thread, NULL, worker_main, w);
    if (failed) {
      error_set(e, ERROR_SYSTEM, "cannot start thread %d of %d: %s", i + 1, count, strerror(failed));
      error_hint(e, "use fewer threads, or raise the limit on processes (ulimit -u)");
      threads_destroy(t);
      return NULL;
    }
    t->started++;
  }
  return t;
}

void threads_destroy(struct threads *t) {
  if (!t) return;
  atomic_store_explicit(&t->stop, true, memory_order_relaxed);
  announce(t);
  for (int i = 1; i <= t->started; i++) pthread_join(t->workers[i].thread, NULL);
  pthread_cond_destroy(&t->end);
  pthread_cond_destroy(&t->begin);
  pthread_mutex_destroy(&t->mutex);
  free(t->workers);
  free(t);
}

int threads_count(const struct threads *t) { return t->count; }

void threads_run(struct threads *t, int64_t n, void (*task)(void *context, int64_t index, int worker),
                 void *context) {
  if (t->started == 0 || n <= 1) {
    for (int64_t i = 0; i < n; i++) task(context, i, 0);
    return;
  }
  t->task = task;
  t->context = context;
  t->n = n;
  atomic_store_explicit(&t->next, 0, memory_order_relaxed);
  atomic_store_explicit(&t->gate, GATE_OPEN, memory_order_release);
  announce(t);
  take_tasks(t, 0);
  atomic_fetch_sub_explicit(&t->gate, GATE_OPEN, memory_order_acq_rel);
  for (int i = 0; i <= t->spin; i++) {
    if (atomic_load_explicit(&t->gate, memory_order_acquire) == 0) return;
    cpu_pause();
  }
  pthread_mutex_lock(&t->mutex);
  while (atomic_load_explicit(&t->gate, memory_order_acquire) != 0) pthread_cond_wait(&t->end, &t->mutex);
  pthread_mutex_unlock(&t->mutex);
}
