/* What the FP4 quantisers share, as lanes for the vectoriser: E2M1 codes of FP32
 * values, packing, the random fields of stochastic rounding.
 *
 * Each gives the bits of its scalar definition in kernels/formats.h.
 */
#ifndef FP4D_KERNELS_CPU_CODES_H
#define FP4D_KERNELS_CPU_CODES_H

#include "kernels/elementary.h"
#include "kernels/formats.h"
#include "kernels/kernels.h"

#define CODES_INLINE static inline __attribute__((always_inline))

/* ---- E2M1 magnitudes of t >= 0 (a NaN is above 6) ------------------------------ */

/* t or 6.  As bits: of a comparison of floats the compiler makes two ways, and then
 * every lane goes both. */
CODES_INLINE float codes_clamp(float t) {
  const uint32_t u = f32_bits(t), six = 0x40C00000u;
  return f32_from_bits(u < six ? u : six);
}

/* Nearest even: the code in the low half, anything above it.  With M, t's octave (of t
 * below 1: 1), the last bits of t + 2^22 M are t in steps of 1/2, 1 or 2; codes are those
 * steps and 2 more an octave, which stand in M's exponent. Some even number of steps is
 * added that makes up for what else does. */
CODES_INLINE uint32_t codes_nearest(float t) {
  const uint32_t u = f32_bits(codes_clamp(t)), one = 0x3F800000u, octave = (u > one ? u : one) & 0x7F800000u;
  const float more = 0x1p22f + 0x1p-1f * (float)(0x10000 - (127 << 1));
  return f32_bits(f32_fma(f32_from_bits(octave), more, f32_from_bits(u))) + (octave >> 22);
}

/* The value of that code: t is rounded to steps of 1/2, 1 or 2 by its octave. */
CODES_INLINE float codes_nearest_value(float t) {
  const uint32_t u = f32_bits(codes_clamp(t)), one = 0x3F800000u;
  const float octave = f32_from_bits((u > one ? u : one) & 0x7F800000u);
  return f32_fma(octave, -0x1p22f, f32_fma(octave, 0x1p22f, f32_from_bits(u)));
}

/* ---- pairs ----------------------------------------------------------------------- */

/* Two elements side by side, the first in the low half of 32 bits.  A half shifted or masked
 * is the FP32 number itself, so nothing is widened, and what is done to codes is done to
 * two of them. */
#define CODES_BOTH(HALF) ((uint32_t)(HALF) * 0x10001u)

CODES_INLINE uint32_t codes_pair(const uint16_t *of, int64_t pair) {
  uint32_t w;
  memcpy(&w, of + 2 * pair, sizeof w);
  return w;
}
CODES_INLINE float codes_first(uint32_t magnitudes) { return f32_from_bits(magnitudes << 16); }
CODES_INLINE float codes_second(uint32_t magnitudes) { return f32_from_bits(magnitudes & 0xFFFF0000u); }

/* Stochastic: t in steps of codes, 16 bits behind the point, to which a field is added: the
 * code is what then stands before the point.  Below 2 a step is 1/2; from 2 on the code and
 * what goes of it are bits of t.  There the first is the larger of the two, and below 2 it is
 * at most 4. */
CODES_INLINE uint32_t codes_steps(float t) {
  t = codes_clamp(t);
  const uint32_t fixed = (uint32_t)(int32_t)(t * 0x1p17f);
  int32_t floating = (int32_t)(f32_bits(t) >> 6) - (252 << 16);
  floating = floating < 4 << 16 ? 4 << 16 : floating;
  return fixed < (uint32_t)floating ? fixed : (uint32_t)floating;
}

/* One code in 16 bits; as pairs they pack two a byte. n is even. */
CODES_INLINE void codes_pack(uint8_t *restrict out, const uint16_t *restrict code, int64_t n) {
  for (int64_t i = 0; i < n / 2; i++) out[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
}

/* ---- random fields -------------------------------------------------------------- */

/* stochastic_fields of n words: field k of word i to field[k * n + i].  With the bits
 * of every byte reversed, two bytes exchanged are the reverse of both. */
CODES_INLINE void codes_spread(uint16_t *restrict field, const uint32_t *restrict word, int n) {
  for (int i = 0; i < n; i++) {
    const uint16_t low = (uint16_t)word[i], high = (uint16_t)(word[i] >> 16);
    uint16_t v = low, w = high;
    v = (uint16_t)((v >> 1 & 0x5555) | (v & 0x5555) << 1), w = (uint16_t)((w >> 1 & 0x5555) | (w & 0x5555) << 1);
    v = (uint16_t)((v >> 2 & 0x3333) | (v & 0x3333) << 2), w = (uint16_t)((w >> 2 & 0x3333) | (w & 0x3333) << 2);
    v = (uint16_t)((v >> 4 & 0x0F0F) | (v & 0x0F0F) << 4), w = (uint16_t)((w >> 4 & 0x0F0F) | (w & 0x0F0F) << 4);
    field[i] = (uint16_t)(high << 8 | (low & 0xFF));
    field[n + i] = (uint16_t)(v << 8 | (w & 0xFF));
    field[2 * n + i] = (uint16_t)((high & 0xFF00) | low >> 8);
    field[3 * n + i] = (uint16_t)((v & 0xFF00) | w >> 8);
  }
}

#endif
