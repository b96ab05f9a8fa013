/* How a producer runs on the CPU: rows computed in FP32 and rounded while they
 * are in the nearest cache, emitted strip by strip.
 *
 * Scratch, from the device's beginning:
 *   shared   what all strips read or write together (gains, column sums)
 *   then for each worker:
 *   values   the strip, [CPU_STRIP][cols] FP32
 *   rows     the operation's own rows
 *   emission cpu_emit_scratch_bytes(cols)
 * then the result in BF16, where an operand is made from it (kernels/cpu/whole.h)
 */
#ifndef FP4D_KERNELS_CPU_PRODUCER_H
#define FP4D_KERNELS_CPU_PRODUCER_H

#include "kernels/cpu/cpu.h"

struct producer {
  const struct emission *out;
  enum dtype type;    /* activation type: values are rounded to it, then emitted */
  int64_t rows, cols; /* of the result */
  /* Computes row `row` of the result into values[cols]; a strip's rows come
   * ascending.  `scratch` has `row_floats` floats of the worker. */
  void (*compute)(const void *op, int64_t row, float *values, float *scratch, float *shared);
  const void *op;
  int64_t row_floats, shared_floats;
};

/* Runs all strips; out->counts (if any) is added to. */
void cpu_produce(struct device *d, const struct producer *p);

/* The shared part: what stands there before cpu_produce is there in it and after. */
float *cpu_producer_shared(struct device *d);

#endif
