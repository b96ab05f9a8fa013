/* What ranks exchange of a run's state: gradients are summed into the rows that each
 * rank owns, whose parameters alone it updates; then it gets the others' rows.
 *
 * By units of the model (model.h), beside the computation (comm/exchange.h): sums begin
 * while the last backward of an update goes on below, and copies end while the next
 * forward goes on above.  All ranks begin the same in the same order.  In a world of one
 * nothing is exchanged, and every call returns at once. */
#ifndef FP4D_TRAINER_SHARDS_H
#define FP4D_TRAINER_SHARDS_H

#include "trainer/run.h"

/* For a model that trains, laid out in its memory.  All ranks, in agreement. */
bool shards_open(struct run *run, struct error *e);
/* Waits for what is under way; before the model's memory is released. */
void shards_close(struct run *run);

/* Begins the sum of a unit's gradients over ranks, which are complete. */
void shards_begin_sum(struct run *run, int unit);

/* Until every sum that was begun is done on this rank. */
bool shards_finish_sums(struct run *run, struct error *e);

/* Begins to copy a unit's updated rows to all ranks. */
void shards_begin_copy(struct run *run, int unit);

/* Until the unit's newest copy is done on this rank. */
bool shards_finish_copy(struct run *run, int unit, struct error *e);

/* Before anything but a forward reads parameters: until every copy is done on this rank
 * and the operands of all weights are made of what came. */
bool shards_settle(struct run *run, struct error *e);

#endif
