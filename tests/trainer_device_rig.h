/* The program on a device of which a test has replaced operations: linked with
 * --wrap=device_open_rank.  The test includes this before the program and gives the two
 * functions that are named first. */
#ifndef FP4D_TESTS_TRAINER_DEVICE_RIG_H
#define FP4D_TESTS_TRAINER_DEVICE_RIG_H

#include <stdlib.h>

#include "kernels/kernels.h"

/* Replaces operations of the device's table. */
static void replace(struct kernels *k);
/* At the process' end. */
static void tell(void);

static const struct kernels *real; /* the device's own */

struct device *__real_device_open_rank(const char *backend, int threads, int local_rank, struct error *e);
struct device *__wrap_device_open_rank(const char *backend, int threads, int local_rank, struct error *e);

struct device *__wrap_device_open_rank(const char *backend, int threads, int local_rank, struct error *e) {
  static struct kernels replaced;
  struct device *d = __real_device_open_rank(backend, threads, local_rank, e);
  if (!d) return NULL;
  real = d->k;
  replaced = *real;
  replace(&replaced);
  d->k = &replaced;
  atexit(tell);
  return d;
}

#endif
