#include "trainer/hello_link.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "kernels/link.h"

enum { NUMBERS = 1 << 16 };
#define ABORT_S 3
#define GRACE_S 1 /* for a step to say itself that it is late, where the library comes back from its calls */

enum step { STEP_JOIN, STEP_SEND, STEP_GATHER, STEP_CHECK, STEP_ABORT };
static const char *const step_names[] = {"joining a world of one", "a send to itself", "an all-gather", "a copy to the host", "its abort"};

struct hello {
  struct device *device;
  const struct links *k;
  struct link *link;
  float *memory; /* numbers, their copy, staging */
  double limit_s;
  _Atomic double since; /* the step began */
  atomic_int step;
  bool good;
  struct error error;
};

static void enter(struct hello *h, enum step step) {
  atomic_store(&h->since, clock_seconds());
  atomic_store(&h->step, (int)step);
}

static bool too_late(enum step step, double limit_s, struct error *e) {
  error_set(e, ERROR_COMMUNICATION, "NCCL: %s takes longer than %g s", step_names[step], limit_s);
  return error_hint(e, "NCCL_DEBUG=INFO has the library say more");
}

/* Rests; whether the step is late. */
static bool late(const struct hello *h, struct error *e) {
  nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
  if (clock_seconds() - atomic_load(&h->since) < h->limit_s) return false;
  too_late((enum step)atomic_load(&h->step), h->limit_s, e);
  return true;
}

static bool launched(const struct hello *h, struct error *e) {
  for (;;) {
    const enum link_state s = h->k->state(h->link, e);
    if (s != LINK_BUSY) return s == LINK_IDLE;
    if (late(h, e)) return false;
  }
}

static bool come(const struct hello *h, struct error *e) {
  for (bool computed, done;;) {
    if (!h->k->look(h->link, 0, &computed, &done, e)) return false;
    if (done) return true;
    if (late(h, e)) return false;
  }
}

static bool exchange(struct hello *h, struct error *e) {
  const struct links *k = h->k;
  struct link *l = h->link;
  float *copy = h->memory + NUMBERS, *staging = h->memory + 2 * (size_t)NUMBERS;
  const int64_t begin[2] = {0, NUMBERS};
  const struct link_transfer t = {0, DTYPE_F32, h->memory, staging, NUMBERS, NUMBERS};
  const struct link_sum s = {copy, staging, NUMBERS, NUMBERS, DTYPE_F32};
  const struct link_gather g = {copy, DTYPE_F32, begin};
  enter(h, STEP_SEND);
  k->ready(l, 0);
  if (!k->begin(l, 0, e) || !k->transfer(l, 0, &t, 1, e) || !launched(h, e) || !k->sum(l, 0, &s, 1, e) || !k->end(l, 0, e) || !come(h, e))
    return false;
  k->follow(l, 0);
  enter(h, STEP_GATHER);
  k->ready(l, 0);
  if (!k->begin(l, 0, e) || !k->gather(l, &g, 1, e) || !launched(h, e) || !k->end(l, 0, e) || !come(h, e)) return false;
  k->follow(l, 0);
  return true;
}

static bool in_memory(struct hello *h, struct error *e) {
  static float out[NUMBERS], back[NUMBERS];
  const struct kernels *k = h->device->k;
  for (int i = 0; i < NUMBERS; i++) out[i] = (float)i - 3.5f;
  k->upload(h->device, h->memory, out, sizeof out);
  if (!exchange(h, e)) return false;
  enter(h, STEP_CHECK);
  k->download(h->device, back, h->memory + NUMBERS, sizeof back);
  if (!k->synchronize(h->device, e)) return false;
  for (int i = 0; i < NUMBERS; i++)
    if (back[i] != out[i]) return error_set(e, ERROR_COMMUNICATION, "number %d came back as %g, it was %g", i, (double)back[i], (double)out[i]);
  return true;
}

static void *run(void *argument) {
  struct hello *h = argument;
  struct error *e = &h->error;
  char id[LINK_ID_BYTES];
  h->link = h->k->make_id(id, e) ? h->k->open(h->device, id, 0, 1, 1, e) : NULL;
  h->good = h->link && launched(h, e) && in_memory(h, e);
  enter(h, STEP_ABORT);
  if (h->link) h->k->close(h->link, false);
  return NULL;
}

/* Until the thread has ended, or stands in a step for too long: false with *e. */
static bool ended(struct hello *h, pthread_t thread, struct error *e) {
  for (;;) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100000000;
    if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, until.tv_sec++;
    if (pthread_timedjoin_np(thread, NULL, &until) != ETIMEDOUT) return true;
    const enum step step = (enum step)atomic_load(&h->step);
    const double limit_s = step == STEP_ABORT ? ABORT_S : h->limit_s + GRACE_S;
    if (clock_seconds() - atomic_load(&h->since) < limit_s) continue;
    if (step != STEP_ABORT || h->good) return too_late(step, step == STEP_ABORT ? ABORT_S : h->limit_s, e);
    *e = h->error; /* complete before the abort began */
    return error_context(e, "its abort takes longer than %d s, after", ABORT_S);
  }
}

bool hello_link(struct device *d, double limit_s, bool *stuck, struct error *e) {
  struct hello *h = calloc(1, sizeof *h);
  pthread_t thread;
  *stuck = false;
  if (!h) return error_set(e, ERROR_SYSTEM, "out of memory");
  h->device = d;
  h->k = d->k->links;
  h->limit_s = limit_s;
  h->memory = d->k->allocate(d, 3 * sizeof(float) * NUMBERS, e); /* on this thread, whose device it is */
  enter(h, STEP_JOIN);
  const int made = h->memory ? pthread_create(&thread, NULL, run, h) : 0;
  bool good = h->memory && (made == 0 || error_set(e, ERROR_SYSTEM, "NCCL's thread cannot be made: %s", strerror(made)));
  if (good && !ended(h, thread, e)) {
    *stuck = true; /* with what h points at */
    return false;
  }
  if (good && !h->good) *e = h->error;
  good = good && h->good;
  if (h->memory) d->k->release(d, h->memory);
  free(h);
  return good;
}
