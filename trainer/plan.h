/* What a run will need and what it could reach, without a GPU. */
#ifndef FP4D_TRAINER_PLAN_H
#define FP4D_TRAINER_PLAN_H

#include <stdio.h>

#include "trainer/config.h"
#include "trainer/machine.h"

/* The share of an update of the rank that has most of it, at the roofline, in seconds. */
struct plan_time {
  int64_t passes;   /* micro-batches */
  double linears;   /* the blocks' contractions, each at its formats' rate */
  double attention; /* causal half, at the BF16 rate */
  double head;
  double recompute; /* the linears' fprop again; boundaries: their X again, memory-bound */
  double optimizer; /* memory-bound: the state of its rows read and written once */
  double reduce;    /* gradients reduce-scattered and parameters gathered, in their types, over the slower link */
  double total;     /* computing, then the optimizer; sums hidden behind the backward, copies behind the forward, as far as they fit */
  double tokens_per_second; /* of the whole job */
  double mfu;               /* BF16 MFU, causal convention */
};

/* False where there are more `gpus` than micro-batches, or train.accumulation says another number of these for each. */
bool plan_time(const struct config *c, const struct machine *m, int64_t gpus, struct plan_time *out);

/* The largest extents of a run on one rank. */
struct extent plan_extent(const struct config *c);

/* Elements of the largest tensor that one of its linears has: X, W, Y. */
int64_t plan_largest_tensor(const struct extent *x);

/* Bytes of a checkpoint's tensors (before compression). */
int64_t plan_checkpoint_bytes(const struct config *c);

/* Device memory of the last of `ranks` ranks (no rank has more) by category, laid out by the code that a run uses, and
 * what the device holds of it itself (kernels.h: own_bytes). No GPU need be there. */
bool plan_memory(const struct config *c, int threads, int64_t ranks, struct arena *out, int64_t *own, struct error *e);

/* Prints everything. `machine` NULL: gb200 and h200. `gpus` 0: 1 … 72. */
bool plan_print(FILE *out, const struct config *c, const struct machine *machine, int64_t gpus, struct error *e);

#endif
