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

/* ---- E2M1 magnitudes of t >= 0 (a NaN is above 6) ---------------------------- */

/* Nearest even.  Added to 2^22, 2^23 and 2^24, t is rounded to steps of 1/2, 1
 * and 2: codes are 2t below 2, t + 2 below 4, t/2 + 4 above, each the smallest
 * of the three where it holds. */
CODES_INLINE uint32_t codes_nearest(float t) {
  t = t < 6.0f ? t : 6.0f;
  const uint32_t halves = f32_bits(t + 0x1p22f) - 0x4A800000u;
  const uint32_t ones = f32_bits(t + 0x1p23f) - (0x4B000000u - 2u);
  const uint32_t twos = f32_bits(t + 0x1p24f) - (0x4B800000u - 4u);
  const uint32_t low = halves < ones ? halves : ones;
  return low < twos ? low : twos;
}

/* Stochastic.  Below 2 the steps are 1/2, and the sum of floor(t 2^17) and the
 * field has the code on top; from 2 on the sum of t's bits and the field at the
 * top of the 22 that go has it.  There the first is the larger of the two, and
 * below 2 it is at most 4. */
CODES_INLINE uint32_t codes_stochastic(float t, uint32_t field) {
  t = t < 6.0f ? t : 6.0f;
  const int32_t fixed = ((int32_t)(t * 0x1p17f) + (int32_t)field) >> 16;
  int32_t floating = (int32_t)((f32_bits(t) + (field << 6)) >> 22) - 252;
  floating = floating < 4 ? 4 : floating;
  return (uint32_t)(fixed < floating ? fixed : floating);
}

/* One code in 16 bits; as pairs they pack two a byte. n is even. */
CODES_INLINE void codes_pack(uint8_t *restrict out, const uint16_t *restrict code, int64_t n) {
  for (int64_t i = 0; i < n / 2; i++) out[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
}

/* ---- random fields -------------------------------------------------------------- */

/* Where Philox calls stand, but for the update, which all share. */
struct codes_calls {
  uint32_t *c0, *c1, *c3;
};

/* Random words of calls 0..calls-1 and second..second+calls-1: philox4x32_10
 * written out, so that calls run side by side in lanes, and those of the two
 * halves between each other (a chain of 20 products waits on each). */
CODES_INLINE void codes_draw(uint32_t *restrict word, const struct codes_calls *c, int64_t calls, int64_t second,
                             const struct draw *draw) {
  const uint32_t *restrict c0 = c->c0, *restrict c1 = c->c1, *restrict c3 = c->c3;
  for (int64_t i = 0; i < calls; i++) {
    uint32_t a0 = c0[i], a1 = c1[i], a2 = draw->update, a3 = c3[i];
    uint32_t b0 = c0[second + i], b1 = c1[second + i], b2 = draw->update, b3 = c3[second + i];
    uint32_t k0 = (uint32_t)draw->seed, k1 = (uint32_t)(draw->seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
      const uint64_t p0 = (uint64_t)0xD2511F53u * a0, p1 = (uint64_t)0xCD9E8D57u * a2;
      const uint64_t q0 = (uint64_t)0xD2511F53u * b0, q1 = (uint64_t)0xCD9E8D57u * b2;
      a0 = (uint32_t)(p1 >> 32) ^ a1 ^ k0;
      b0 = (uint32_t)(q1 >> 32) ^ b1 ^ k0;
      a1 = (uint32_t)p1;
      b1 = (uint32_t)q1;
      a2 = (uint32_t)(p0 >> 32) ^ a3 ^ k1;
      b2 = (uint32_t)(q0 >> 32) ^ b3 ^ k1;
      a3 = (uint32_t)p0;
      b3 = (uint32_t)q0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    uint32_t *restrict w = word + 4 * i, *restrict v = word + 4 * (second + i);
    w[0] = a0, w[1] = a1, w[2] = a2, w[3] = a3;
    v[0] = b0, v[1] = b1, v[2] = b2, v[3] = b3;
  }
}

/* stochastic_fields of many words: pair[2 * words], each two fields in element
 * order, the first in the low half: a half of the word with its reverse above. */
CODES_INLINE void codes_spread(uint32_t *restrict pair, const uint32_t *restrict word, int64_t words) {
  for (int64_t i = 0; i < words; i++) {
    uint32_t w = word[i], v = w;
    v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
    v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
    v = (v >> 4 & 0x0F0F0F0Fu) | (v & 0x0F0F0F0Fu) << 4;
    pair[2 * i] = (w & 0xFFu) | (w >> 8 & 0xFF00u) | v << 24 | (v & 0xFF0000u);
    pair[2 * i + 1] = (w >> 8 & 0xFFu) | (w >> 16 & 0xFF00u) | (v & 0xFF00u) << 16 | (v >> 8 & 0xFF0000u);
  }
}

#endif
