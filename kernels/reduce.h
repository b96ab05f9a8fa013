/* The fixed trees: in which order sums are taken.
 *
 * Floating-point sums depend on their order, so every backend takes these:
 *
 *   Row sum (FP32).  Element i of a row belongs to lane i mod 1024.  A lane
 *   starts at +0 and takes its elements ascending, each by one fma (sums of
 *   products) or one add.  Then neighbours 2j and 2j+1 are added, level by
 *   level, until one is left.  A row shorter than 1024 is as if padded with
 *   +0: a lane is never -0, so what is not there changes nothing.
 *     A thread block that loads 8 consecutive elements a thread has the first
 *   three levels in one thread's registers, the next five in a warp.
 *
 *   Column sum (FP32).  Rows are cut into strips of 32.  A strip starts at +0
 *   and takes its rows ascending; strips are then added by the same neighbour
 *   tree over the strip's number (the last of an odd count passes through).
 *
 *   Long sum (FP64): over arrays that have no rows.  Elements are cut into
 *   chunks of 65536; inside a chunk the row tree, in FP64; chunks are added
 *   ascending, from +0.
 *
 * These scalar functions are the definition; backends have fast twins
 * (kernels/cpu/reduce.c) that are tested against them.
 */
#ifndef FP4D_KERNELS_REDUCE_H
#define FP4D_KERNELS_REDUCE_H

#include <stdint.h>

#include "kernels/elementary.h"

#define REDUCE_LANES 1024
#define REDUCE_STRIP 32
#define REDUCE_CHUNK 65536

/* The neighbour tree over x[0..n), n >= 1; x is overwritten. */
FP4D_INLINE float reduce_pairs(float *x, int64_t n) {
  for (; n > 1; n = (n + 1) / 2) {
    for (int64_t j = 0; j < n / 2; j++) x[j] = x[2 * j] + x[2 * j + 1];
    if (n % 2) x[n / 2] = x[n - 1];
  }
  return x[0];
}

FP4D_INLINE double reduce_pairs_f64(double *x, int64_t n) {
  for (; n > 1; n = (n + 1) / 2) {
    for (int64_t j = 0; j < n / 2; j++) x[j] = x[2 * j] + x[2 * j + 1];
    if (n % 2) x[n / 2] = x[n - 1];
  }
  return x[0];
}

/* Sum of x[0..n). */
FP4D_INLINE float reduce_row_sum(const float *x, int64_t n) {
  float lanes[REDUCE_LANES];
  for (int l = 0; l < REDUCE_LANES; l++) lanes[l] = 0.0f;
  for (int64_t i = 0; i < n; i++) lanes[i % REDUCE_LANES] = lanes[i % REDUCE_LANES] + x[i];
  return reduce_pairs(lanes, REDUCE_LANES);
}

/* Sum of a[i] b[i]. */
FP4D_INLINE float reduce_row_dot(const float *a, const float *b, int64_t n) {
  float lanes[REDUCE_LANES];
  for (int l = 0; l < REDUCE_LANES; l++) lanes[l] = 0.0f;
  for (int64_t i = 0; i < n; i++) lanes[i % REDUCE_LANES] = f32_fma(a[i], b[i], lanes[i % REDUCE_LANES]);
  return reduce_pairs(lanes, REDUCE_LANES);
}

/* Sums of x[i] and of x[i]^2 of an array of any length, in FP64. */
FP4D_INLINE double reduce_long_sum(const float *x, int64_t n) {
  double sum = 0.0, lanes[REDUCE_LANES];
  for (int64_t first = 0; first < n; first += REDUCE_CHUNK) {
    for (int l = 0; l < REDUCE_LANES; l++) lanes[l] = 0.0;
    for (int64_t i = first; i < n && i < first + REDUCE_CHUNK; i++)
      lanes[i % REDUCE_LANES] = lanes[i % REDUCE_LANES] + (double)x[i];
    sum = sum + reduce_pairs_f64(lanes, REDUCE_LANES);
  }
  return sum;
}

FP4D_INLINE double reduce_long_sum_squares(const float *x, int64_t n) {
  double sum = 0.0, lanes[REDUCE_LANES];
  for (int64_t first = 0; first < n; first += REDUCE_CHUNK) {
    for (int l = 0; l < REDUCE_LANES; l++) lanes[l] = 0.0;
    for (int64_t i = first; i < n && i < first + REDUCE_CHUNK; i++)
      lanes[i % REDUCE_LANES] = f64_fma((double)x[i], (double)x[i], lanes[i % REDUCE_LANES]);
    sum = sum + reduce_pairs_f64(lanes, REDUCE_LANES);
  }
  return sum;
}

#endif
