/* The fixed trees of kernels/reduce.h, fast: bit-identical, vectorised. */
#ifndef FP4D_KERNELS_CPU_REDUCE_H
#define FP4D_KERNELS_CPU_REDUCE_H

#include "kernels/reduce.h"

/* reduce_pairs over the first `used` lanes (the others count as +0), 0 <= used <= 1024.
 * lanes[REDUCE_LANES] is overwritten. */
float cpu_reduce_lanes(float *lanes, int64_t used);
double cpu_reduce_lanes_f64(double *lanes, int64_t used);

float cpu_reduce_sum(const float *x, int64_t n);
float cpu_reduce_dot(const float *a, const float *b, int64_t n);

/* The column sum's second half: x[strips][stride], columns [0, cols); the
 * result is x[0][..]; x is overwritten. */
void cpu_reduce_strips(float *x, int64_t strips, int64_t stride, int64_t cols);

#endif
