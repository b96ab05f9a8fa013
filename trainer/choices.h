/* What a library chose for a run's contractions: an object of its records, "contractions"
 * (docs/formats.md), and what a resume finds changed in it. */
#ifndef FP4D_TRAINER_CHOICES_H
#define FP4D_TRAINER_CHOICES_H

#include <jansson.h>

#include "kernels/kernels.h"

/* Contractions so far: choices by them.  NULL: the backend's library chooses nothing. */
json_t *choices_object(const struct device *d);

/* Warns of contractions that both have with other choices; either may be NULL. */
void choices_compare(const json_t *before, const json_t *now);

#endif
