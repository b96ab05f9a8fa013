/* hadamard_transform (kernels/hadamard.h) of rows side by side: element i of 16 of them is
 * one vector, so a butterfly is one addition and one subtraction.
 *
 * Of 32 rows of BF16 the even ones are one vector, the odd ones another: halves of 32 bits,
 * of which a shift or a mask makes numbers, and which are put together again likewise.
 */
#ifndef FP4D_KERNELS_CPU_TRANSFORM_H
#define FP4D_KERNELS_CPU_TRANSFORM_H

#include <stdbool.h>
#include <string.h>

#include "kernels/formats.h"
#include "kernels/hadamard.h"

#define TRANSFORM_INLINE static inline __attribute__((always_inline))

enum { TRANSFORM_LANES = 16, TRANSFORM_ROWS = 2 * TRANSFORM_LANES, TRANSFORM_WIDEST = 32 };

typedef uint32_t bit_lanes __attribute__((vector_size(4 * TRANSFORM_LANES)));
typedef int32_t int_lanes __attribute__((vector_size(4 * TRANSFORM_LANES)));
typedef float lanes __attribute__((vector_size(4 * TRANSFORM_LANES)));

/* Of two numbers below 2^31, all bits where the first is larger: the sign of (second -
 * first).  Not by a comparison: where vectors are narrower than these, the compiler
 * makes one for each element. */
#define ABOVE(FIRST, SECOND) ((bit_lanes)((int_lanes)((SECOND) - (FIRST)) >> 31))

/* BF16 in the high halves: as bf16_encode, but all NaNs are one, where there may be some: which of
 * several an addition keeps differs between machines.  The low halves are anything. */
TRANSFORM_INLINE void encode_lanes(bit_lanes *to, const lanes *x, bool nans) {
  const bit_lanes u = (bit_lanes)*x, rounded = u + 0x7FFFu + (u >> 16 & 1u);
  *to = rounded;
  if (!nans) return;
  const bit_lanes nan = ABOVE(u & 0x7FFFFFFFu, 0x7F800000u);
  *to = (rounded & ~nan) | (0x7FC00000u & nan);
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

/* Of n elements of 32 rows, `stride` apart in `from`: those of the even rows or the odd ones. */
TRANSFORM_INLINE void decode_half(lanes x[TRANSFORM_WIDEST], const uint16_t *from, int64_t stride, int n, bool with_signs,
                                  bool odd) {
#pragma GCC unroll 32
  for (int i = 0; i < n; i++) {
    const uint32_t flip = with_signs && (HADAMARD_SIGNS >> (i % 16) & 1u) == 0 ? 0x80008000u : 0;
    bit_lanes pairs;
    memcpy(&pairs, from + i * stride, sizeof pairs);
    pairs ^= flip;
    x[i] = (lanes)(odd ? pairs & 0xFFFF0000u : pairs << 16);
  }
}

/* The transform's sums, not scaled, but for the last butterflies: elements n / 2 apart
 * are still to be added and subtracted. */
TRANSFORM_INLINE void transform_most(lanes x[TRANSFORM_WIDEST], int n) {
  butterflies(x, n, 1);
  butterflies(x, n, 2);
  butterflies(x, n, 4);
  if (n == 32) butterflies(x, n, 8);
}

#endif
