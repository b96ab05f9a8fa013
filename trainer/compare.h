/* Runs against the first of them, at exactly shared updates. */
#ifndef FP4D_TRAINER_COMPARE_H
#define FP4D_TRAINER_COMPARE_H

#include <stdint.h>

#include "base/error.h"

struct compare {
  const char *const *runs; /* folders or files of records; the first is what the others are compared with */
  int n;
  bool allow_unmatched;
  int64_t every;        /* updates between columns; 0: about ten columns */
  const char *markdown; /* also written there; NULL: nowhere */
};

/* Prints tables on standard output.  ERROR_DATA where initial parameters,
 * training stream or the batch of a shared update differ, each named, unless
 * allow_unmatched: then they are warned of. */
bool compare_runs(const struct compare *c, struct error *e);

#endif
