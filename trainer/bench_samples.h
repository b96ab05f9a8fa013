/* Numbers like a trained model's state, so that they compress as a run's do: parameters
 * nearly normal, first moments smaller, second moments squares. */
#ifndef FP4D_TRAINER_BENCH_SAMPLES_H
#define FP4D_TRAINER_BENCH_SAMPLES_H

#include "checkpoints/checkpoint.h"

enum bench_kind { BENCH_PARAM, BENCH_ADAM_M, BENCH_ADAM_V, BENCH_KINDS };

struct bench_samples; /* opaque */
struct bench_samples *bench_samples_open(struct error *e);
void bench_samples_close(struct bench_samples *s);

/* Fills slice->data, as training would copy it into the staging buffer: each `number` begins
 * at another place of the samples. */
void bench_samples_fill(const struct bench_samples *s, enum bench_kind kind, int64_t number, const struct tensor_slice *slice);

/* Does it hold what that fills in? */
bool bench_samples_equal(const struct bench_samples *s, enum bench_kind kind, int64_t number, const struct tensor_slice *slice);

#endif
