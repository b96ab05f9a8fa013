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

/* A block's scale: E4M3's code of 0 <= t (infinity: 448), as e4m3_encode, and its value. */
struct nvfp4_scale {
  uint32_t code;
  float value;
};

/* Without a choice, of which the compiler makes two ways.  t + 2^20 times t's octave (of t below
 * 2^-6: 2^-6) has t in steps of eighths of it as its last bits; codes are those steps and 8
 * more an octave. */
CODES_INLINE struct nvfp4_scale nvfp4_scale_of(float t) {
  const uint32_t a = f32_bits(t), most = 0x43E00000u, least = 0x3C800000u;
  const uint32_t u = a < most ? a : most, large = ((u > least ? u : least) & 0x7F800000u) + (20u << 23);
  const float sum = f32_from_bits(u) + f32_from_bits(large);
  return (struct nvfp4_scale){f32_bits(sum) - large + (large >> 20) - (141u << 3), sum - f32_from_bits(large)};
}

/* e, or 0 where the scale is. */
CODES_INLINE float nvfp4_encode_factor(float value, float decode) {
  const uint32_t e = f32_bits(1.0f / (value * decode)), most = f32_bits(FLT_MAX);
  return f32_from_bits((e < most ? e : most) & (0u - (f32_bits(value) != 0)));
}

/* Four or six (nvfp4_four_or_six.c): scales and encode factors of a panel's blocks. */
void nvfp4_four_or_six(uint8_t *scale, float *encode, const uint16_t *amax, const uint16_t *bits,
                       const struct panel *p, const struct nvfp4_factor *f, bool tiled, enum view view);

#endif
