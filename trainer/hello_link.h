/* A hello of what moves device memory between ranks, by one rank alone: a world of one is
 * joined, numbers are sent to itself, summed and gathered, and the world is aborted. */
#ifndef FP4D_TRAINER_HELLO_LINK_H
#define FP4D_TRAINER_HELLO_LINK_H

#include "kernels/kernels.h"

/* `d` has links, and no link open.  False with *e: what failed, or did not come back within
 * limit_s (of a step; the abort has three seconds, as in training).  *stuck: a thread of this
 * process still stands in the library with the device, which is not to be used or closed any
 * more; the process leaves by comm_abort, whose end waits for nobody. */
bool hello_link(struct device *d, double limit_s, bool *stuck, struct error *e);

#endif
