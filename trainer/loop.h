/* The update loop.
 *
 *   load -> forward/backward (x accumulation) -> reduce -> judge -> step -> record
 *        -> [validate] -> [checkpoint: begin, or go on with (trainer/saving.h)] -> next, or leave
 *
 * Everything that decides (verdicts, signals, when to stop) is computed from
 * values that are equal on every rank, so all ranks take the same way.
 */
#ifndef FP4D_TRAINER_LOOP_H
#define FP4D_TRAINER_LOOP_H

#include "trainer/record.h"
#include "trainer/run.h"
#include "trainer/state.h"

/* Trains from run->update + 1 to the configured end.  `records` is NULL on
 * every rank but 0.  False with *e: code ERROR_PREEMPTED after a stop request
 * and its checkpoint, ERROR_DIVERGED, or whatever failed. */
bool loop_train(struct run *run, struct state *state, struct record_file *records, struct error *e);

#endif
