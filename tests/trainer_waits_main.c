/* The program on a device that keeps its promises no earlier than it must
 * (trainer_device_rig.h's).  What is downloaded is there at the next synchronize and rubbish
 * before; what is uploaded must until then be what it was.  At the end it tells how often
 * the host waited, and asked for memory.
 *
 *   FP4D_TEST_FAULT="R N"   rank R's device is in a fault from its N-th synchronize on */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "tests/trainer_device_rig.h"
#include "trainer/main.c"

enum { MOST = 4096 };

struct copy {
  void *to;         /* of a download */
  const void *from; /* of an upload */
  void *bytes;      /* what a download will bring */
  size_t n;
  struct hash was; /* of what was uploaded */
};

static struct copy pending[MOST];
static int n_pending;
static long waits, allocations;

static struct copy *add(size_t bytes) {
  if (n_pending == MOST) {
    fprintf(stderr, "more than %d copies are under way\n", MOST);
    abort();
  }
  pending[n_pending] = (struct copy){.n = bytes};
  return &pending[n_pending++];
}

static void upload(struct device *d, void *to, const void *from, size_t bytes) {
  struct copy *c = add(bytes);
  c->from = from;
  c->was = hash_bytes(from, bytes);
  real->upload(d, to, from, bytes);
}

static void download(struct device *d, void *to, const void *from, size_t bytes) {
  struct copy *c = add(bytes);
  c->to = to;
  c->bytes = malloc(bytes ? bytes : 1);
  if (!c->bytes) abort();
  real->download(d, c->bytes, from, bytes);
  memset(to, 0xFF, bytes);
}

static bool in_fault(void) {
  const char *text = getenv("FP4D_TEST_FAULT"), *here = getenv("OMPI_COMM_WORLD_RANK");
  int rank;
  long number;
  return text && sscanf(text, "%d %ld", &rank, &number) == 2 && rank == (here ? atoi(here) : 0) && waits + 1 >= number;
}

static bool synchronize(struct device *d, struct error *e) {
  if (in_fault()) return error_set(e, ERROR_DEVICE, "the device is in a fault");
  for (int i = 0; i < n_pending; i++) {
    const struct copy *c = &pending[i];
    if (c->from && !hash_equal(c->was, hash_bytes(c->from, c->n))) {
      fprintf(stderr, "%zu bytes that were being uploaded were written over\n", c->n);
      abort();
    }
    if (c->to) memcpy(c->to, c->bytes, c->n);
    free(c->bytes);
  }
  n_pending = 0;
  waits++;
  return real->synchronize(d, e);
}

static void *allocate(struct device *d, size_t bytes, struct error *e) {
  allocations++;
  return real->allocate(d, bytes, e);
}

static void *allocate_host(struct device *d, size_t bytes, struct error *e) {
  allocations++;
  return real->allocate_host(d, bytes, e);
}

static void tell(void) { printf("the host waited %ld times, and asked for memory %ld times\n", waits, allocations); }

static void replace(struct kernels *k) {
  k->upload = upload;
  k->download = download;
  k->synchronize = synchronize;
  k->allocate = allocate;
  k->allocate_host = allocate_host;
}
