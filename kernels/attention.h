/* Attention in few bits: how each of its tensors is written, number by number.
 *
 * The operator is that of the training route of "Hardware-Aware FP4
 * FlashAttention-4": NVFP4 scores, P and V in E4M3, gradients through E5M2 dO and
 * E4M3 P and dS; and of its diverging control, P and V in MXFP4.
 * kernels/cpu/attention.h has the sums and their order.
 *
 *   Q, K  NVFP4: of 16 columns with largest magnitude a, scale = E4M3(a / 6),
 *         code = E2M1(x * (1 / scale)), 0 with the sign of x where the scale is 0.  A block below
 *         6 * 2^-10 vanishes, one beyond 2688 saturates.
 *   Q, K, V  E4M3 of 4 x; saturates beyond 112.
 *   V     MXFP4 by 32 tokens of a feature: a = 2^f n, 1 <= n < 2, scale = 2^f, or
 *         2^(f+1) where n >= 1.203125; code = E2M1(6 x / scale).  *The scale of a
 *         block knows tokens that its first queries may not see*: the format
 *         breaks causality by as much as a scale says.
 *   P     E4M3 of 2^t, t = log2 of p before it is normalised, at most 8.  Scores beyond
 *         2^24 leave whole numbers of rounding error in t: 2^t is at most 448, in the sum too,
 *         and where the sum is below 1/2, codes having vanished, the row is NaN.
 *   P     MXFP4 by 32 keys of a query: t_max the largest t, e = floor(t_max + raise),
 *         x = (t - e) + log2 6, code = E2M1(2^x), or E2M1(max(0, slope x + offset));
 *         p = code 2^e / 6.  raise: 1 - log2 1.25 with 2^x, 0 with the affine map,
 *         each the one that the published errors have.
 *   dO    E5M2 (or E4M3) of 4 L dO, L a power of two: given, or that which brings the
 *         largest magnitude of a sample's kv head (all heads of its group) into
 *         [4, 8), as in a standard normal, but from 2^-100 to 2^100: what that does
 *         not bring there saturates or vanishes.  Gradients of a mean loss are too
 *         small for a constant lift: at 1e-5 every dS is 0.
 *   P     of the backward: E4M3 of 2^v = 256 P, v = s kappa + 8 - log2(e) lse, at most 8.
 *   dS    E4M3 of (256 P) (16 L (dP - D)) (scale / 16) = 256 L scale dS.
 *
 * Lifts are powers of two: taken off again, every number is what it would be
 * without them but where a format ends.
 *
 * What is not finite stays so: a K16 block has the scale NaN, an E4M3 or E5M2 code
 * is NaN, an MXFP4 block has byte 254 (infinity or 0).
 *
 * Static inline, in the common subset of C17, C++ and CUDA.
 */
#ifndef FP4D_KERNELS_ATTENTION_H
#define FP4D_KERNELS_ATTENTION_H

#include "kernels/elementary.h"
#include "kernels/formats.h"

#define ATTENTION_LIFT 4.0f           /* of Q, K, V and, times L, dO */
#define ATTENTION_P_MOST 448.0f       /* P's largest code in E4M3: its sum takes no more of it either */
#define ATTENTION_L_LEAST 0.5f        /* of that sum, which is 1 and more */
#define ATTENTION_LIFT_P_LOG2 8.0f    /* of the backward's P, and with it dS */
#define ATTENTION_GRADIENT 0x1p-10f   /* times 1 / L: takes 256 and 4 off dQ, dK and dV */
#define ATTENTION_LAZY 8.0f           /* the maximum moves when it is this far behind, in log2 */
#define ATTENTION_LOG2_6 0x1.4ae00ep+1f
#define ATTENTION_RAISE_EXP2 0x1.5b2c3ep-1f /* 1 - log2 1.25 */
#define ATTENTION_RAISE_AFFINE 0.0f

enum { ATTENTION_K16 = 16, ATTENTION_MX = 32 };

/* ---- Q, K, V ------------------------------------------------------------- */

/* amax: BF16 bits without sign. */
FP4D_INLINE uint32_t attention_k16_scale(uint32_t amax) {
  return amax >= 0x7F80u ? 0x7Fu : e4m3_encode(bf16_decode((uint16_t)amax) / 6.0f);
}

/* What x is multiplied with to be a code: 0 for the scale 0. */
FP4D_INLINE float attention_k16_factor(uint32_t scale) { return scale == 0u ? 0.0f : 1.0f / e4m3_decode(scale); }

FP4D_INLINE int attention_finite(float x) { return (f32_bits(x) & 0x7FFFFFFFu) < 0x7F800000u; }

FP4D_INLINE uint32_t attention_e4m3(float x, float lift) { return attention_finite(x) ? e4m3_encode(x * lift) : 0x7Fu; }
FP4D_INLINE uint32_t attention_e5m2(float x, float lift) { return attention_finite(x) ? e5m2_encode(x * lift) : 0x7Fu; }

/* E8M0 byte of a block of V; codes are those of x * mxfp4_coefficient(byte). */
FP4D_INLINE uint32_t attention_v_scale(uint32_t amax) {
  uint32_t e = (amax >> 7) + ((amax & 0x7Fu) >= 26u ? 1u : 0u); /* 26 / 128 = 0.203125 */
  if (amax == 0u) return 0u;
  return e < 2u ? 2u : e > 254u ? 254u : e;
}

/* ---- P in MXFP4 ---------------------------------------------------------- */

/* e for the largest t of a block; below -126 the block is zero. */
FP4D_INLINE float attention_p_exponent(float t_max, float raise) {
  float t = (t_max > -200.0f ? t_max : -200.0f) + raise;
  float n = (t + F32_ROUNDER) - F32_ROUNDER;
  return n > t ? n - 1.0f : n;
}

/* 2^e; 0 for a zero block. */
FP4D_INLINE float attention_p_scale(float e) {
  return e < -126.0f ? 0.0f : f32_from_bits((uint32_t)((int32_t)e + 127) << 23);
}

/* What E2M1 rounds. */
FP4D_INLINE float attention_p_exp2(float t, float e) { return f32_exp2((t - e) + ATTENTION_LOG2_6); }
FP4D_INLINE float attention_p_affine(float t, float e, float slope, float offset) {
  float y = f32_fma(slope, (t - e) + ATTENTION_LOG2_6, offset);
  return y > 0.0f ? y : 0.0f;
}

/* ---- gradients ------------------------------------------------------------ */

/* L for the largest magnitude; NaN for one that is not finite. */
FP4D_INLINE float attention_d_out_lift(uint32_t amax) {
  int32_t e = 129 - (int32_t)(amax >> 7); /* 2 - floor(log2 amax) */
  if (amax >= 0x7F80u) return F32_NAN;
  if (amax == 0u) return 1.0f;
  return f32_from_bits((uint32_t)((e < -100 ? -100 : e > 100 ? 100 : e) + 127) << 23);
}

FP4D_INLINE float attention_d_stat(float d) { return -4.0f * d; }
FP4D_INLINE float attention_l_stat(float lse) { return f32_fma(lse, -0x1.715476p+0f, ATTENTION_LIFT_P_LOG2); }

/* 256 P, before it is rounded to E4M3. */
FP4D_INLINE float attention_p_lifted(float s, float kappa, float l_stat) {
  float v = f32_fma(s, kappa, l_stat);
  return f32_exp2(v > ATTENTION_LIFT_P_LOG2 ? ATTENTION_LIFT_P_LOG2 : v);
}

/* 256 L scale dS, before it is rounded; p: the rounded 256 P, dp: of the codes, 16 L dP. */
FP4D_INLINE float attention_ds_lifted(float p, float dp, float d_stat, float scale) {
  return p * (dp + d_stat) * (scale * 0.0625f);
}

#endif
