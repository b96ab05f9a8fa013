/* Long sums on the CPU: chunks over the workers, partial sums in chunk order
 * (kernels/reduce.h), in waves so that the scratch has a fixed size. */
#ifndef FP4D_KERNELS_CPU_LONGSUM_H
#define FP4D_KERNELS_CPU_LONGSUM_H

#include "kernels/cpu/cpu.h"
#include "kernels/reduce.h"

struct longsum_part {
  double sum[2];
  int64_t count;
  uint32_t largest;
};

enum { LONGSUM_WAVE = 1024, LONGSUM_SCRATCH_BYTES = LONGSUM_WAVE * (int)sizeof(struct longsum_part) };

/* chunk(op, first, n, part) for every chunk [first, first + n) of `elements`,
 * `part` being zero before; the result is sum: added ascending, count: added,
 * largest: the maximum. */
struct longsum_part cpu_longsum(struct device *d, int64_t elements, const void *op,
                                void (*chunk)(const void *op, int64_t first, int64_t n, struct longsum_part *part));

#endif
