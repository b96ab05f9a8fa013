/* The learning rate, and AdamW's bias corrections, as functions of the update number alone. */
#ifndef FP4D_TRAINER_SCHEDULE_H
#define FP4D_TRAINER_SCHEDULE_H

#include "trainer/config.h"

/* Learning rate of update `update` (1-based): linear warm-up over
 * warmup_updates (update w has lr * w / warmup), then
 *   constant  lr
 *   cosine    from lr to min_lr over decay_updates (0: to the last update)
 *   WSD       lr until the last decay_updates, then linearly to min_lr
 *             (warm-up, stable, decay). */
double schedule_lr(const struct config *c, int64_t update);

/* 1 - beta^t for beta in [0, 1): AdamW's bias correction. */
double schedule_bias(double beta, int64_t t);

#endif
