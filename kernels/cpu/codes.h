/* What the FP4 quantisers share, as lanes for the vectoriser: E2M1 codes of FP32
 * values, packing, the random fields of stochastic rounding.
 *
 * Each gives the bits of its scalar definition in kernels/formats.h.
 */
#ifndef FP4D_KERNELS_CPU_CODES_H
#define FP4D_KERNELS_CPU_CODES_H

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

/* Nearest even.  Added to 2^22, 2^23 and 2^24, t is rounded to steps of 1/2, 1
 * and 2: codes are 2t below 2, t + 2 below 4, t/2 + 4 above, each the smallest
 * of the three where it holds. */
CODES_INLINE uint32_t codes_nearest(float t) {
  t = codes_clamp(t);
  const uint32_t halves = f32_bits(t + 0x1p22f) - 0x4A800000u;
  const uint32_t ones = f32_bits(t + 0x1p23f) - (0x4B000000u - 2u);
  const uint32_t twos = f32_bits(t + 0x1p24f) - (0x4B800000u - 4u);
  const uint32_t low = halves < ones ? halves : ones;
  return low < twos ? low : twos;
}

/* The value of that code: t is rounded to steps of 1/2, 1 or 2 by its octave. */
CODES_INLINE float codes_nearest_value(float t) {
  const uint32_t u = f32_bits(codes_clamp(t)), one = 0x3F800000u;
  const float large = f32_from_bits(((u > one ? u : one) & 0x7F800000u) + (22u << 23));
  return (f32_from_bits(u) + large) - large;
}

/* Stochastic: t in steps of codes, 16 bits behind the point, and the field is carried
 * into the code or not.  Below 2 a step is 1/2; from 2 on the code and what goes of
 * it are bits of t.  There the first is the larger of the two, and below 2 it is at
 * most 4. */
CODES_INLINE uint16_t codes_stochastic(float t, uint16_t field) {
  t = codes_clamp(t);
  const uint32_t fixed = (uint32_t)(int32_t)(t * 0x1p17f);
  int32_t floating = (int32_t)(f32_bits(t) >> 6) - (252 << 16);
  floating = floating < 4 << 16 ? 4 << 16 : floating;
  const uint32_t steps = fixed < (uint32_t)floating ? fixed : (uint32_t)floating;
  return (uint16_t)((steps + field) >> 16);
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
