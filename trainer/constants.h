/* The constants of a run's arithmetic that are not in its configuration's
 * words, or would change it silently: part of every checkpoint, so that
 * neither another program nor another seed goes on with a run under another
 * definition.  Only those that the run uses are there. */
#ifndef FP4D_TRAINER_CONSTANTS_H
#define FP4D_TRAINER_CONSTANTS_H

#include <jansson.h>

#include "trainer/config.h"

/* The object "route_constants" of a checkpoint's meta (docs/formats.md). */
json_t *constants_make(const struct config *c);

/* False with *e = ERROR_CHECKPOINT, naming each constant of `saved` (NULL: none)
 * that this run uses with another value. */
bool constants_check(const json_t *saved, const struct config *c, struct error *e);

#endif
