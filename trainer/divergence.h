/* Divergence: is this update still training?
 *
 * A detector keeps the last `window` accepted values and judges the next one by
 * its z-score.  Values of an update that is not applied (skipped, halted, not
 * finite) never enter the window, so one bad update cannot hide the next.  The
 * window is part of a checkpoint.
 */
#ifndef FP4D_TRAINER_DIVERGENCE_H
#define FP4D_TRAINER_DIVERGENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "trainer/config.h"

enum { DETECTOR_WINDOW = 1024 };

struct detector {
  double value[DETECTOR_WINDOW]; /* ring of accepted values */
  int64_t window;                /* its length, <= DETECTOR_WINDOW */
  int64_t count;                 /* accepted so far */
};

void detector_open(struct detector *d, int64_t window);

/* z-score of x against the window; 0 while the window is not full, +inf when x
 * is not finite.  A window without spread counts as spread 1e-12 of its mean. */
double detector_score(const struct detector *d, double x);

void detector_accept(struct detector *d, double x);

struct divergence {
  struct detector loss, grad_norm;
};

/* What was seen in one update, the same on every rank. */
struct update_signals {
  double loss, grad_norm;
  int64_t nonfinite;       /* elements of the summed gradients */
  char nonfinite_where[128]; /* first parameter that has one */
  struct quantise_counts attention[ATTENTION_TENSORS]; /* of all ranks; no elements where there are no codes */
};

/* "q", "k", "v", "p", "do", "ds" */
const char *attention_tensor_name(enum attention_tensor t);

enum verdict { VERDICT_APPLY, VERDICT_SKIP, VERDICT_HALT };

struct judgement {
  enum verdict verdict;
  double loss_z, grad_norm_z;
  char reason[256]; /* empty where nothing was wrong */
};

/* Judges an update by the configured policies and lets good values into the
 * windows. A non-finite loss or gradient is never applied. */
void divergence_judge(struct divergence *d, const struct config *c, const struct update_signals *s,
                      struct judgement *out);

#endif
