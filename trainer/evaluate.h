/* Evaluation on the fixed validation stream: mean NLL, how sure it is, and where
 * it comes from.
 *
 * The first `samples` samples of the stream's order are taken in micro-batches from
 * its start, whole ones on a rank, and every sum runs in the order of samples.  So
 * the bits are the same on every call and for any number of ranks and threads; for
 * any local batch too where no operand's scale spans samples (docs/numerics.md).
 */
#ifndef FP4D_TRAINER_EVALUATE_H
#define FP4D_TRAINER_EVALUATE_H

#include <jansson.h>

#include "trainer/run.h"

/* Sums over counted targets. */
struct nll {
  double sum;
  int64_t targets;
};
double nll_mean(const struct nll *n); /* NaN of no target */

struct evaluation {
  int64_t samples;
  struct nll all;
  struct nll source[STREAM_SOURCES]; /* by the source of the target's document */
  /* Over the samples with a target: the standard error of their means' mean (NaN of fewer than two), and all's mean
   * less and more 1.96 of it, which a normal mean leaves one time in 20. */
  double standard_error, low, high;
};

int64_t evaluate_samples(const struct run *run, int64_t wanted);                         /* 0: all there are */
bool evaluate_has_samples(const struct run *run, int64_t wanted, struct error *e); /* false: ERROR_DATA */

/* Evaluates on the first `samples` >= 1 samples of the validation stream; sequence[samples] (may be NULL) gets each one's sums. */
bool evaluate_run(struct run *run, int64_t samples, struct nll *sequence, struct evaluation *out, struct error *e);

/* "2.3456 +- 0.0123"; of one sequence, which has no standard error, "2.3456". */
void evaluate_text(const struct evaluation *v, int digits, char *text, int size);
/* "few 2.3456, many 2.3321"; "" where the stream has one source. */
void evaluate_sources_text(const struct run *run, const struct evaluation *v, int digits, char *text, int size);
/* loss, standard_error, interval_95 (null of one sequence), samples, targets and sources, as records have them. */
void evaluate_record(const struct run *run, const struct evaluation *v, json_t *object);

#endif
