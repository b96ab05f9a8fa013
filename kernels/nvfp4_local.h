/* CTA-local NVFP4: the scalar arithmetic of its two forms.
 *
 * An operand is cut into chunks of 128x128.  A chunk is encoded from its own
 * amax alone, so a streaming producer needs nothing but the chunk; then the
 * block scales of a strip of chunks are folded to one outer factor, which is
 * constant along the contraction and leaves it:
 *
 *   element = code * folded block scale * outer
 *
 * SCALE_LOCAL_FAITHFUL ("LC-F", the report's): a = chunk amax, N = 448
 *   g = a/N, S = min(N/a, FLT_MAX); per block of amax m: scale = E4M3(m (S fl(1/6))),
 *   code = E2M1(z min(1/(scale g), FLT_MAX)); outer = largest g of the strip,
 *   folded scale = E4M3(scale (g/outer)): rounded twice.
 * SCALE_LOCAL_POW2 ("LC-P2"): E = ceil(log2(a/2688)), exactly, from bits
 *   scale = E4M3((m 2^-E) fl(1/6)), code = E2M1((z 2^-E) (1/scale)); outer =
 *   2^(largest E of the strip), folded scale = E4M3(scale 2^-(Emax - E)): exact
 *   until it is below 2^-6.  Multiplying every element by a power of two
 *   changes the outer factor and nothing else.
 *
 * Codes are E2M1 to nearest or stochastic (kernels/formats.h).  A block whose
 * folded scale is 0 has codes 0, whatever the signs.
 *
 * Amaxes are BF16 bits without sign, compared as integers: one that is not
 * finite stands for itself in the maximum and for 0x7F7F in the arithmetic,
 * NaNs have code 7, infinities +-7, and their strip's outer factor is NaN.
 *
 * Static inline, in the common subset of C17, C++ and CUDA; FP32 without
 * contraction or flushing.
 */
#ifndef FP4D_KERNELS_NVFP4_LOCAL_H
#define FP4D_KERNELS_NVFP4_LOCAL_H

#include "kernels/encoding.h"
#include "kernels/formats.h"

#define NVFP4_SIXTH (1.0f / 6.0f)
#define NVFP4_LARGEST 0x1.fffffep127f /* FLT_MAX */
#define NVFP4_LOCAL_TARGET 448.0f     /* N of LC-F */
#define NVFP4_LOCAL_POW2_TARGET 2688.0 /* N of LC-P2, the largest scale times the largest code; as bits in nvfp4_local_exponent */

enum { NVFP4_LOCAL_CHUNK = 128 };

/* 2^e exactly, e <= 127; 0 below the smallest subnormal. */
FP4D_INLINE float nvfp4_power(int e) {
  return f32_from_bits(e >= -126 ? (uint32_t)(e + 127) << 23 : e >= -149 ? 1u << (e + 149) : 0u);
}

FP4D_INLINE uint32_t nvfp4_finite(uint32_t amax) { return amax < 0x7F80u ? amax : 0x7F7Fu; }

/* ceil(log2(a / 2688)) of a finite amax > 0; 2688 = 1.3125 * 2^11. -144..117. */
FP4D_INLINE int nvfp4_local_exponent(uint32_t amax) {
  int exponent = (int)(amax >> 7) - 127;
  uint32_t fraction = amax;
  if (exponent == -127) /* a subnormal: fraction * 2^-133 */
    for (exponent = -126; fraction < 0x80u; exponent--) fraction <<= 1;
  return exponent - 11 + ((fraction & 0x7Fu) > 40u ? 1 : 0);
}

/* What the blocks of one chunk are encoded with. */
struct nvfp4_local_chunk {
  float unit[2];    /* z is multiplied by both first, exactly (two: 2^144 is no FP32) */
  float multiplier; /* block amax to block scale */
  float decode;     /* value of scale 1, in units */
};

/* amax > 0. */
FP4D_INLINE struct nvfp4_local_chunk nvfp4_local_chunk_of(enum scale_rule rule, uint32_t amax) {
  struct nvfp4_local_chunk c;
  if (rule == SCALE_LOCAL_POW2) {
    const int e = nvfp4_local_exponent(nvfp4_finite(amax));
    const int first = -e < 127 ? -e : 127;
    c.unit[0] = nvfp4_power(first);
    c.unit[1] = nvfp4_power(-e - first);
    c.multiplier = NVFP4_SIXTH;
    c.decode = 1.0f;
  } else {
    const float a = bf16_decode((uint16_t)nvfp4_finite(amax));
    const float s = NVFP4_LOCAL_TARGET / a;
    c.unit[0] = c.unit[1] = 1.0f;
    c.multiplier = (s < NVFP4_LARGEST ? s : NVFP4_LARGEST) * NVFP4_SIXTH;
    c.decode = a / NVFP4_LOCAL_TARGET;
  }
  return c;
}

/* The E4M3 byte of a block's scale, not folded. */
FP4D_INLINE uint32_t nvfp4_local_scale(const struct nvfp4_local_chunk *c, uint32_t block_amax) {
  const float m = bf16_decode((uint16_t)nvfp4_finite(block_amax));
  return e4m3_encode(m * c->unit[0] * c->unit[1] * c->multiplier);
}

/* What an element in units is multiplied by before E2M1. scale > 0, before it is folded. */
FP4D_INLINE float nvfp4_local_coefficient(const struct nvfp4_local_chunk *c, uint32_t scale) {
  const float e = 1.0f / (e4m3_decode(scale) * c->decode);
  return e < NVFP4_LARGEST ? e : NVFP4_LARGEST;
}

/* The outer factor of a strip of the given amax. */
FP4D_INLINE float nvfp4_local_outer(enum scale_rule rule, uint32_t strip_amax) {
  if (strip_amax == 0u) return 0.0f;
  if (strip_amax >= 0x7F80u) return f32_from_bits(0x7FC00000u);
  if (rule == SCALE_LOCAL_POW2) return nvfp4_power(nvfp4_local_exponent(strip_amax));
  return bf16_decode((uint16_t)strip_amax) / NVFP4_LOCAL_TARGET;
}

/* What a chunk's scales are multiplied by when they are folded to the strip's
 * outer factor: the factor it would have alone, in outers. chunk_amax > 0. */
FP4D_INLINE float nvfp4_local_fold(enum scale_rule rule, uint32_t chunk_amax, float outer) {
  const float own = nvfp4_local_outer(rule, nvfp4_finite(chunk_amax));
  return own / (outer == outer ? outer : nvfp4_local_outer(rule, 0x7F7Fu));
}

/* The folded E4M3 byte. */
FP4D_INLINE uint32_t nvfp4_local_folded(uint32_t scale, float fold) { return e4m3_encode(e4m3_decode(scale) * fold); }

#endif
