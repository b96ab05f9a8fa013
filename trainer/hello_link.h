/* A device's link says hello, in a world of one (for `fp4d doctor`). */
#ifndef FP4D_TRAINER_HELLO_LINK_H
#define FP4D_TRAINER_HELLO_LINK_H

#include "kernels/kernels.h"

/* Joins, has this rank send numbers to itself, sum and gather them, looks at them, and aborts the
 * world.  Each wait has a limit. */
bool hello_link(struct device *d, struct error *e);

#endif
