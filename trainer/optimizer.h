/* One optimizer step over all parameters. */
#ifndef FP4D_TRAINER_OPTIMIZER_H
#define FP4D_TRAINER_OPTIMIZER_H

#include "trainer/run.h"

/* Norm and non-finite count of the summed gradients, of which every rank has its rows,
 * into *s: FP64 sum over parameters in their order, then over ranks in theirs.  Waits
 * for the device: all that was begun before is done.  All ranks, in agreement. */
bool optimizer_measure(struct run *run, struct update_signals *s, struct error *e);

struct step {
  double lr, clip_coefficient;
  double update_to_weight; /* norm of the change / norm of the weights */
};

/* Clips by global norm, applies AdamW as update run->applied + 1 to the rows that this
 * rank owns, waits for the device.  Copies of these rows to all ranks are then under way
 * and operands of weights are old: the next forward, or shards_settle, waits for the one and
 * refreshes the other.  All ranks, in agreement.  Skipped updates do not call it: they advance
 * the schedule and the data, not AdamW's bias correction. */
bool optimizer_step(struct run *run, int64_t update, double grad_norm, struct step *out, struct error *e);

#endif
