/* NVFP4 with one factor a view: what its two rules for block scales share. */
#ifndef FP4D_KERNELS_CPU_NVFP4_H
#define FP4D_KERNELS_CPU_NVFP4_H

#include <float.h>

#include "kernels/cpu/codes.h"
#include "kernels/cpu/whole.h"

/* What the view's amax is mapped to, in units of the block scale and the code. */
#define NVFP4_REACH 2688.0f        /* 448 * 6 */
#define NVFP4_REACH_4OVER6 1536.0f /* 256 * 6: a block may take 1.5 times its scale */

struct nvfp4_factor nvfp4_factor_of(uint16_t amax, float reach);

/* E4M3 of 0 <= t <= FLT_MAX, as e4m3_encode. */
CODES_INLINE uint32_t nvfp4_scale_code(float t) {
  const uint32_t a = f32_bits(t);
  const uint32_t small = f32_bits(t + 16384.0f) - 0x46800000u; /* below 2^-6 the last place is 2^-9 */
  const uint32_t large = ((a + 0x7FFFFu + (a >> 20 & 1u)) >> 20) - (120u << 3);
  const uint32_t code = a < 0x3C800000u ? small : large;
  return code < 0x7Eu ? code : 0x7Eu;
}

/* As e4m3_decode, of 0..0x7E. */
CODES_INLINE float nvfp4_scale_value(uint32_t code) {
  const float small = (float)(int32_t)code * 0x1p-9f;
  return code < 8u ? small : f32_from_bits((code << 20) + (120u << 23));
}

/* e, or 0 where the scale is. */
CODES_INLINE float nvfp4_encode_factor(uint32_t code, float decode) {
  const float e = 1.0f / (nvfp4_scale_value(code) * decode), most = e < FLT_MAX ? e : FLT_MAX;
  return code == 0 ? 0.0f : most;
}

/* Four or six (nvfp4_four_or_six.c): scales and encode factors of a panel's blocks. */
void nvfp4_four_or_six(uint8_t *scale, float *encode, const uint16_t *amax, const uint16_t *bits,
                       const struct panel *p, const struct nvfp4_factor *f, bool tiled, enum view view);

#endif
