/* hadamard_transform (kernels/hadamard.h) of 16 rows side by side: element i of
 * all of them is one vector, so a butterfly is one addition and one subtraction.
 */
#ifndef FP4D_KERNELS_CPU_TRANSFORM_H
#define FP4D_KERNELS_CPU_TRANSFORM_H

#include <stdbool.h>
#include <string.h>

#include "kernels/formats.h"
#include "kernels/hadamard.h"

#define TRANSFORM_INLINE static inline __attribute__((always_inline))

enum { TRANSFORM_LANES = 16, TRANSFORM_WIDEST = 32 };

typedef uint16_t half_lanes __attribute__((vector_size(2 * TRANSFORM_LANES)));
typedef uint32_t bit_lanes __attribute__((vector_size(4 * TRANSFORM_LANES)));
typedef int32_t int_lanes __attribute__((vector_size(4 * TRANSFORM_LANES)));
typedef float lanes __attribute__((vector_size(4 * TRANSFORM_LANES)));

/* Of two numbers below 2^31, all bits where the first is larger: the sign of (second -
 * first).  Not by a comparison: where vectors are narrower than these, the compiler
 * makes one for each element. */
#define ABOVE(FIRST, SECOND) ((bit_lanes)((int_lanes)((SECOND) - (FIRST)) >> 31))

TRANSFORM_INLINE void decode_lanes(lanes *to, const uint16_t *from, uint16_t flip) {
  half_lanes half;
  memcpy(&half, from, sizeof half);
  *to = (lanes)(__builtin_convertvector(half ^ flip, bit_lanes) << 16);
}

/* As bf16_encode, but all NaNs are one: which of several an addition keeps
 * differs between machines. */
TRANSFORM_INLINE void encode_lanes(uint16_t *to, const lanes *from) {
  const bit_lanes u = (bit_lanes)*from, nan = ABOVE(u & 0x7FFFFFFFu, 0x7F800000u);
  const bit_lanes rounded = (u + 0x7FFFu + (u >> 16 & 1u)) >> 16;
  const half_lanes half = __builtin_convertvector((rounded & ~nan) | (0x7FC0u & nan), half_lanes);
  memcpy(to, &half, sizeof half);
}

TRANSFORM_INLINE void butterflies(lanes *x, int n, int distance) {
#pragma GCC unroll 32
  for (int i = 0; i < n; i++)
    if ((i & distance) == 0) {
      const lanes low = x[i], high = x[i + distance];
      x[i] = low + high;
      x[i + distance] = low - high;
    }
}

/* The transform's sums, not scaled, of n elements that stand `stride` apart in `from`. */
TRANSFORM_INLINE void transform_sums(lanes x[TRANSFORM_WIDEST], const uint16_t *from, int64_t stride, int n, bool with_signs) {
#pragma GCC unroll 32
  for (int i = 0; i < n; i++)
    decode_lanes(&x[i], from + i * stride, with_signs && (HADAMARD_SIGNS >> (i % 16) & 1u) == 0 ? 0x8000 : 0);
  butterflies(x, n, 1);
  butterflies(x, n, 2);
  butterflies(x, n, 4);
  butterflies(x, n, 8);
  if (n == 32) butterflies(x, n, 16);
}

#endif
