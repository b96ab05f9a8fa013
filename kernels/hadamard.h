/* Orthogonal transforms of 16 or 32 consecutive elements of the contraction axis.
 *
 *   PLAIN_16   H x / 4                         H: Sylvester, entry (-1)^popcount(r & c)
 *   SIGNED_16  H D x / 4                       D: sign literal 0x2817, bit i set = +1, clear = -1
 *   SIGNED_32  H32 D' x / sqrt(32)             D': the same 16 signs in both halves
 *
 * Signs first, then butterflies of distance 1, 2, 4, 8 (, 16), FP32, then one
 * multiplication; both operands of a wgrad take the same transform, so their
 * product is unchanged.  Same arithmetic on every backend.
 */
#ifndef FP4D_KERNELS_HADAMARD_H
#define FP4D_KERNELS_HADAMARD_H

#include "base/philox.h"
#include "kernels/encoding.h"

#define HADAMARD_SIGNS 0x2817u
#define HADAMARD_SCALE_16 0.25f
#define HADAMARD_SCALE_32 0x1.6a09e6p-3f /* 1/sqrt(32), to nearest */

/* Elements that are transformed together: 0, 16 or 32. */
FP4D_INLINE int hadamard_width(enum hadamard h) {
  return h == HADAMARD_NONE ? 0 : h == HADAMARD_SIGNED_32 ? 32 : 16;
}

/* x[hadamard_width(h)] in place. */
FP4D_INLINE void hadamard_transform(float *x, enum hadamard h) {
  const int n = hadamard_width(h);
  if (h != HADAMARD_PLAIN_16)
    for (int i = 0; i < n; i++)
      if ((HADAMARD_SIGNS >> (i % 16) & 1u) == 0) x[i] = -x[i];
  for (int distance = 1; distance < n; distance *= 2)
    for (int i = 0; i < n; i++)
      if ((i & distance) == 0) {
        const float low = x[i], high = x[i + distance];
        x[i] = low + high;
        x[i + distance] = low - high;
      }
  const float scale = n == 32 ? HADAMARD_SCALE_32 : HADAMARD_SCALE_16;
  for (int i = 0; i < n; i++) x[i] = x[i] * scale;
}

#endif
