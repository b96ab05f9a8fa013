#include "trainer/hello_link.h"

#include <time.h>

#include "base/clock.h"
#include "kernels/link.h"

enum { NUMBERS = 1 << 16 };
#define LIMIT_S 60

static void rest(void) { nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL); }

static bool late(double since, const char *what, struct error *e) {
  if (clock_seconds() - since < LIMIT_S) {
    rest();
    return false;
  }
  error_set(e, ERROR_COMMUNICATION, "%s takes longer than %d s", what, LIMIT_S);
  error_hint(e, "NCCL_DEBUG=INFO has the library say more");
  return true;
}

static bool launched(const struct links *k, struct link *l, const char *what, struct error *e) {
  const double since = clock_seconds();
  for (;;) {
    const enum link_state s = k->state(l, e);
    if (s != LINK_BUSY) return s == LINK_IDLE;
    if (late(since, what, e)) return false;
  }
}

static bool come(const struct links *k, struct link *l, struct error *e) {
  const double since = clock_seconds();
  for (bool computed, done;;) {
    if (!k->look(l, 0, &computed, &done, e)) return false;
    if (done) return true;
    if (late(since, "an exchange with itself", e)) return false;
  }
}

static bool exchange(const struct links *k, struct device *d, struct link *l, float *numbers, float *staging, struct error *e) {
  const int64_t begin[2] = {0, NUMBERS};
  const struct link_transfer t = {0, DTYPE_F32, numbers, staging, NUMBERS, NUMBERS};
  const struct link_sum s = {numbers + NUMBERS, staging, NUMBERS, NUMBERS, DTYPE_F32};
  const struct link_gather g = {numbers + NUMBERS, DTYPE_F32, begin};
  k->ready(l, 0);
  if (!k->begin(l, 0, e) || !k->transfer(l, 0, &t, 1, e) || !launched(k, l, "a send to itself", e) || !k->sum(l, 0, &s, 1, e) ||
      !k->end(l, 0, e) || !come(k, l, e))
    return false;
  k->follow(l, 0);
  k->ready(l, 0);
  if (!k->begin(l, 0, e) || !k->gather(l, &g, 1, e) || !launched(k, l, "an all-gather", e) || !k->end(l, 0, e) || !come(k, l, e)) return false;
  k->follow(l, 0);
  return d->k->synchronize(d, e);
}

static bool in_memory(const struct links *k, struct device *d, struct link *l, float *memory, struct error *e) {
  static float out[NUMBERS], back[NUMBERS];
  for (int i = 0; i < NUMBERS; i++) out[i] = (float)i - 3.5f;
  d->k->upload(d, memory, out, sizeof out);
  if (!exchange(k, d, l, memory, memory + 2 * (size_t)NUMBERS, e)) return false;
  d->k->download(d, back, memory + NUMBERS, sizeof back);
  if (!d->k->synchronize(d, e)) return false;
  for (int i = 0; i < NUMBERS; i++)
    if (back[i] != out[i]) return error_set(e, ERROR_COMMUNICATION, "number %d came back as %g, it was %g", i, (double)back[i], (double)out[i]);
  return true;
}

bool hello_link(struct device *d, struct error *e) {
  const struct links *k = d->k->links;
  char id[LINK_ID_BYTES];
  float *memory = d->k->allocate(d, 3 * sizeof(float) * NUMBERS, e);
  struct link *l = memory && k->make_id(id, e) ? k->open(d, id, 0, 1, 1, e) : NULL;
  const bool good = l && launched(k, l, "joining a world of one", e) && in_memory(k, d, l, memory, e);
  if (l) k->close(l, false);
  if (memory) d->k->release(d, memory);
  return good;
}
