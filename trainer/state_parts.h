/* What the files of a run's state share (state*.c only). */
#ifndef FP4D_TRAINER_STATE_PARTS_H
#define FP4D_TRAINER_STATE_PARTS_H

#include "trainer/state.h"

/* The meta text of a checkpoint of this run (state_meta.c); malloc'ed, NULL: out of memory. */
char *state_meta(const struct run *run);

/* Which checkpoint a start goes on from (state_find.c): all ranks together, the same.  *out NULL and true: a fresh start. */
bool state_choose(struct run *run, enum resume_kind kind, const char *path, struct checkpoint **out, struct error *e);

#endif
