/* The micro-batches of an update, with what ranks exchange going on beside them.
 *
 *   first forward:  before each unit's weights are read, the copies of its rows that the last
 *                   optimizer step began have come, and its operands are made anew
 *   last backward:  once each unit's gradients are complete, their sum over ranks begins
 *   after it:       until every sum is done
 *
 * The phase `reduce` of the timeline is what is left of the exchanges: the time in which
 * this rank's device stands still for one.  Operands of weights are the optimizer's time.
 */
#ifndef FP4D_TRAINER_PASSES_H
#define FP4D_TRAINER_PASSES_H

#include "data/loader.h"
#include "trainer/run.h"
#include "trainer/timeline.h"

struct passes {
  struct run *run;
  int64_t first; /* updates that were done before: the next one has the limits of a start */
  struct timeline time;
  bool failed; /* in the midst of a pass, with this error */
  struct error failure;
};

/* Listens to the model, over the device's events. */
bool passes_open(struct passes *p, struct run *run, struct error *e);
/* Nobody listens to the model any more. */
void passes_close(struct passes *p);

/* Where this rank stands, for its timeline and for the watchdog. */
void passes_enter(struct passes *p, enum phase phase);

/* Losses and gradients of this rank's samples of an update, gradients summed over ranks into the rows
 * that each owns.  Nothing here waits for the device: run->host_loss and the model's signals are there,
 * and own's memory may be written, once it has been synchronized.  The loss is the mean over `targets`,
 * those of all ranks.  All ranks.  False: a broken world (comm.h). */
bool passes_compute(struct passes *p, const struct loader_batch *own, int64_t targets, struct error *e);

#endif
