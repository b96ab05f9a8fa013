/* Number formats, bit for bit: E2M1, E4M3, E5M2, E8M0, BF16 and MXFP4's scale.
 *
 * Static inline, in the common subset of C17, C++ and CUDA, so that every
 * backend encodes alike.  Only integer operations and exact or correctly
 * rounded FP32 additions, products and quotients are used; a device that
 * flushes subnormals gives the same codes except where that is said.
 *
 * Rules are those of the PTX `cvt` instructions (PTX ISA, "cvt"), saturating
 * to the largest finite value; the code tables those of the OCP Microscaling
 * Formats specification v1.0 and the OCP 8-bit Floating Point specification.
 */
#ifndef FP4D_KERNELS_FORMATS_H
#define FP4D_KERNELS_FORMATS_H

#include <stdint.h>
#include <string.h>

#include "base/philox.h"

FP4D_INLINE uint32_t f32_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

FP4D_INLINE float f32_from_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

/* ---- BF16: the high half of an FP32 -------------------------------------- */

FP4D_INLINE float bf16_decode(uint16_t h) { return f32_from_bits((uint32_t)h << 16); }

/* Nearest even; overflow gives infinity; a NaN stays one (made quiet). */
FP4D_INLINE uint16_t bf16_encode(float x) {
  uint32_t u = f32_bits(x);
  uint32_t rounded = (u + 0x7FFFu + (u >> 16 & 1u)) >> 16;
  return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? (u >> 16 | 0x40u) : rounded);
}

/* Stochastic: a 16-bit field is added to the 16 bits that go, then they are
 * cut off (away from zero with probability dropped/65536 for a uniform field). */
FP4D_INLINE uint16_t bf16_encode_stochastic(float x, uint32_t field) {
  uint32_t u = f32_bits(x);
  uint32_t rounded = (u + (field & 0xFFFFu)) >> 16;
  return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? (u >> 16 | 0x40u) : rounded);
}

/* ---- E2M1: 0 0.5 1 1.5 2 3 4 6; bit 3 is the sign ------------------------- */

FP4D_INLINE float e2m1_decode(uint32_t code) {
  uint32_t m = code & 7u;
  /* subnormal 0.5; else the two exponent bits and one fraction bit in FP32's places */
  uint32_t u = m == 0u ? 0u : m == 1u ? 0x3F000000u : ((m << 22) + 0x3F000000u);
  return f32_from_bits(u | (code & 8u) << 28);
}

/* Nearest even, saturating: |x| > 6 and infinities give +-6, any NaN +6. */
FP4D_INLINE uint32_t e2m1_encode(float x) {
  uint32_t u = f32_bits(x);
  float a = f32_from_bits(u & 0x7FFFFFFFu);
  uint32_t m = (uint32_t)(a > 0.25f) + (uint32_t)(a >= 0.75f) + (uint32_t)(a > 1.25f) + (uint32_t)(a >= 1.75f) +
               (uint32_t)(a > 2.5f) + (uint32_t)(a >= 3.5f) + (uint32_t)(a > 5.0f);
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? 7u : (m | (u >> 28 & 8u));
}

/* Stochastic, the contract of `cvt.rs.satfinite.e2m1x4`: a 16-bit field is
 * added at the top of the significand bits that go, then they are cut off.
 * |x| >= 6 gives +-6, any NaN +6; an FP32 subnormal gives a signed zero. */
FP4D_INLINE uint32_t e2m1_encode_stochastic(float x, uint32_t field) {
  uint32_t u = f32_bits(x), a = u & 0x7FFFFFFFu, r = field & 0xFFFFu, m;
  if (a > 0x7F800000u) return 7u;
  uint32_t e = a >> 23;
  if (a >= 0x40C00000u) { /* 6 and above */
    m = 7u;
  } else if (e >= 127u) { /* one fraction bit stays, 22 go */
    m = ((a + (r << 6)) >> 22) - 252u;
  } else if (e > 109u) { /* steps of 0.5: a has (133 - e) bits below 2^-17 */
    m = (((a & 0x7FFFFFu) | 0x800000u) >> (133u - e)) + r;
    m >>= 16;
  } else { /* below 2^-17 no field reaches the next code */
    m = 0u;
  }
  return m | (u >> 28 & 8u);
}

/* The four 16-bit fields that one 32-bit random word gives to elements 0..3 in
 * memory order: lo, bitreverse(lo), hi, bitreverse(hi), where bytes 2 and 0 of
 * the word make lo and bytes 3 and 1 make hi (operands f, e, b, a of the
 * instruction). */
FP4D_INLINE void stochastic_fields(uint32_t word, uint32_t field[4]) {
  uint32_t v = word;
  v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
  v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
  v = (v >> 4 & 0x0F0F0F0Fu) | (v & 0x0F0F0F0Fu) << 4; /* every byte reversed */
  field[0] = (word >> 8 & 0xFF00u) | (word & 0xFFu);
  field[1] = (v & 0xFFu) << 8 | (v >> 16 & 0xFFu);
  field[2] = (word >> 16 & 0xFF00u) | (word >> 8 & 0xFFu);
  field[3] = (v & 0xFF00u) | (v >> 24);
}

/* ---- E4M3 (finite only: 448 largest, 0x7F and 0xFF NaN) ------------------- */

FP4D_INLINE float e4m3_decode(uint32_t code) {
  uint32_t e = code >> 3 & 15u, m = code & 7u, sign = (code & 0x80u) << 24;
  if ((code & 0x7Fu) == 0x7Fu) return f32_from_bits(sign | 0x7FC00000u);
  if (e == 0u) {
    float subnormal = (float)m * 0.001953125f; /* m 2^-9 */
    return f32_from_bits(f32_bits(subnormal) | sign);
  }
  return f32_from_bits(sign | (e + 120u) << 23 | m << 20);
}

/* Nearest even, saturating: beyond 448 and infinities +-448, NaN 0x7F. */
FP4D_INLINE uint32_t e4m3_encode(float x) {
  uint32_t u = f32_bits(x), a = u & 0x7FFFFFFFu, sign = u >> 24 & 0x80u, m;
  if (a > 0x7F800000u) return 0x7Fu;
  if (a >= 0x43E00000u) {
    m = 0x7Eu;
  } else if (a < 0x3C800000u) { /* below 2^-6: 16384 has a last place of 2^-9 */
    m = f32_bits(f32_from_bits(a) + 16384.0f) - 0x46800000u;
  } else {
    m = ((a + 0x7FFFFu + (a >> 20 & 1u)) >> 20) - (120u << 3);
  }
  return m | sign;
}

/* The value of x's code, without the code: x is rounded to steps of 1/8 of its
 * octave, from 2^-6 down of 2^-9. A NaN stays one. */
FP4D_INLINE float e4m3_round(float x) {
  uint32_t u = f32_bits(x), a = u & 0x7FFFFFFFu, m = a < 0x43E00000u ? a : 0x43E00000u;
  float large = f32_from_bits(((m > 0x3C800000u ? m : 0x3C800000u) & 0x7F800000u) + (20u << 23));
  float value = (f32_from_bits(m) + large) - large;
  return a > 0x7F800000u ? x : f32_from_bits(f32_bits(value) | (u & 0x80000000u));
}

/* ---- E5M2 (57344 largest finite, 0x7C infinity) --------------------------- */

FP4D_INLINE float e5m2_decode(uint32_t code) {
  uint32_t e = code >> 2 & 31u, m = code & 3u, sign = (code & 0x80u) << 24;
  if (e == 31u) return f32_from_bits(sign | (m != 0u ? 0x7FC00000u : 0x7F800000u));
  if (e == 0u) {
    float subnormal = (float)m * 0.0000152587890625f; /* m 2^-16 */
    return f32_from_bits(f32_bits(subnormal) | sign);
  }
  return f32_from_bits(sign | (e + 112u) << 23 | m << 21);
}

/* Nearest even, saturating: beyond 57344 and infinities +-57344, NaN 0x7F. */
FP4D_INLINE uint32_t e5m2_encode(float x) {
  uint32_t u = f32_bits(x), a = u & 0x7FFFFFFFu, sign = u >> 24 & 0x80u, m;
  if (a > 0x7F800000u) return 0x7Fu;
  if (a >= 0x47600000u) {
    m = 0x7Bu;
  } else if (a < 0x38800000u) { /* below 2^-14: 128 has a last place of 2^-16 */
    m = f32_bits(f32_from_bits(a) + 128.0f) - 0x43000000u;
  } else {
    m = ((a + 0xFFFFFu + (a >> 21 & 1u)) >> 21) - (112u << 2);
  }
  return m | sign;
}

/* ---- E8M0: 2^(code - 127), no zero, 255 NaN ------------------------------- */

FP4D_INLINE float e8m0_decode(uint32_t code) {
  return f32_from_bits(code == 255u ? 0x7FC00000u : code == 0u ? 0x00400000u : code << 23);
}

/* The exponent of the smallest power of two >= |x|; saturates at 254, zero
 * gives 0, NaN 255. */
FP4D_INLINE uint32_t e8m0_encode_up(float x) {
  uint32_t a = f32_bits(x) & 0x7FFFFFFFu, e = a >> 23, m = a & 0x7FFFFFu;
  if (a > 0x7F800000u) return 255u;
  if (e == 0u) return m > 0x400000u ? 1u : 0u;
  return e >= 254u ? 254u : (e + (m != 0u ? 1u : 0u));
}

/* The exponent of the largest power of two <= |x| (the exponent field);
 * infinity gives 254, NaN 255. */
FP4D_INLINE uint32_t e8m0_encode_floor(float x) {
  uint32_t a = f32_bits(x) & 0x7FFFFFFFu, e = a >> 23;
  if (a > 0x7F800000u) return 255u;
  return e >= 254u ? 254u : e;
}

/* ---- MXFP4: E2M1 codes of 6 z / s, s = 2^(byte - 127), but for one rule ------- */
/* Values are BF16; amax is the largest of a group as BF16 bits without sign,
 * compared as integers, so an infinity or NaN in the group makes byte 254. */

/* Encode rule: s is the smallest power of two >= amax, so nothing clips while
 * amax <= 2^127.  Byte 0 is a group of zeros (its codes are 0); bytes are
 * otherwise 2..254, so that 6/s is a finite FP32. */
FP4D_INLINE uint32_t mxfp4_scale_encode(uint32_t amax) {
  uint32_t e = (amax >> 7) + ((amax & 0x7Fu) != 0u ? 1u : 0u);
  if (amax == 0u) return 0u;
  return e < 2u ? 2u : e > 254u ? 254u : e;
}

/* Decode rule: the largest such power of two; the elements above it clip. */
FP4D_INLINE uint32_t mxfp4_scale_decode(uint32_t amax) {
  uint32_t e = amax >> 7;
  if (amax == 0u) return 0u;
  return e < 2u ? 2u : e > 254u ? 254u : e;
}

/* The rule of OCP MX v1.0: codes of z / s, s = 2^(floor(log2 amax) - 2), from
 * 2^-127 on; a value is code * s, *without* the sixth.  Byte 0 is also a group
 * of zeros; an infinity or NaN makes byte 254. */
FP4D_INLINE uint32_t mxfp4_scale_floor(uint32_t amax) {
  uint32_t e = amax >> 7;
  return e > 254u ? 254u : e < 2u ? 0u : e - 2u;
}

/* 1 / s of that rule. */
FP4D_INLINE float mxfp4_coefficient_floor(uint32_t byte) {
  return f32_from_bits(byte == 254u ? 0x00400000u : (254u - byte) << 23);
}

#define MX_ADAPTIVE_THRESHOLD 0.87f

/* Adaptive rule for 2D weight tiles: half that scale when amax / s < 0.87
 * (the quotient is exact). */
FP4D_INLINE uint32_t mxfp4_scale_adaptive(uint32_t amax) {
  uint32_t byte = mxfp4_scale_encode(amax);
  if (byte > 2u && bf16_decode((uint16_t)amax) / e8m0_decode(byte) < MX_ADAPTIVE_THRESHOLD) byte--;
  return byte;
}

/* 6 / s = 1.5 * 2^(129 - byte), for bytes 2..254. */
FP4D_INLINE float mxfp4_coefficient(uint32_t byte) { return f32_from_bits((256u - byte) << 23 | 0x400000u); }

/* *Six times* the value of a code, exactly: code * s (the value itself by
 * mxfp4_scale_floor).  A contraction of two
 * such operands is multiplied by 1/36 once, at its end.  (Infinite for codes
 * above 1.5 under byte 254, which amax > 2^126 alone makes.) */
FP4D_INLINE float mxfp4_decode(uint32_t code, uint32_t byte) { return e2m1_decode(code) * e8m0_decode(byte); }

#endif
