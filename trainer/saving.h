/* The loop's checkpoints: begun, looked after, waited for, recorded.
 *
 * A save is called saved, and is on record, when it is durable on every rank and
 * published: after a later update than its own where checkpoint.async lets
 * training go on meanwhile.  One save is under way at a time; the next one waits.
 */
#ifndef FP4D_TRAINER_SAVING_H
#define FP4D_TRAINER_SAVING_H

#include "trainer/record.h"
#include "trainer/run.h"
#include "trainer/state.h"

struct saving {
  struct run *run;
  struct state *state;
  struct record_file *records; /* NULL on every rank but 0 */
  int64_t saved, begun;        /* updates of the newest published checkpoint and of the newest begun; -1 none */
  double stall;                /* seconds that training has waited for the save under way */
  double began;                /* clock */
  bool slow;                   /* said that it takes longer than limits.save_s */
};

/* After updates the state is that of a checkpoint already. */
void saving_open(struct saving *s, struct run *run, struct state *state, struct record_file *records);

/* Begins the save of run->update, unless it is saved or being saved.  Waits for one that
 * is under way.  All ranks.  False: not saved (reported), by ERROR_CHECKPOINT, or the world
 * is broken. */
bool saving_begin(struct saving *s, struct error *e);

/* A bit that ranks combine by or: is this one at work? */
int64_t saving_busy(struct saving *s);

/* Goes on with what is under way where no rank is at work. All ranks. */
bool saving_poll(struct saving *s, bool busy, struct error *e);

/* Until nothing is under way. All ranks. */
bool saving_finish(struct saving *s, struct error *e);

/* May the run go on after a save that failed with *e? */
bool saving_tolerates(const struct saving *s, const struct error *e);

#endif
