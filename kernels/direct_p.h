/* Direct-P: attention without a causal mask whose P is made in E2M1 straight from
 * the scores ("Hardware-Aware FP4 FlashAttention-4", its inference operator).
 *
 * Q and K are NVFP4 (blocks of 16 columns), V MXFP4 (32 tokens of a feature, cutoff
 * 1.203125): kernels/attention.h.  kernels/cpu/direct_p.h has the sums and their order.
 *
 * Of a query, with scores s_j = q . k_j, everything in log2:
 *   a    = 0, or the largest s_j of the anchor: `anchor` rows of K, number
 *          floor(i keys / anchor) for i = 0, 1, ...
 *   t_j  = (s_j - a) kappa - margin: exact at the anchor's largest, whose exponent
 *          a rounding error would else take to the next
 * Of 32 keys, t_max the largest t:
 *   e    = floor, ceil or round (to nearest even) of t_max;  byte u = e + 127
 *   with a guard, u = max(u, lift + 1), before anything is made with e
 *   x_j  = (t_j - e) + log2 6
 *   code = E2M1(max(0, slope x + offset)), of native pairs E2M1(2^x); 6 at most
 *   published: the codes and the byte u - lift;  p_j = code 2^e / 6
 * u < 1: the block is zero, byte 0.  A byte beyond 254, or any NaN among the scores:
 * byte 255, and the query's output and normaliser are NaN.
 *
 * The denominator is made of the codes: L = sum of 2^(byte - 127) (c / 6), c the sum of
 * a block's codes, an integer of halves.  *In this order*: 2^(byte - 127) / 6 is
 * subnormal at byte 1, and a device that flushes loses a whole block by it, where
 * c / 6 is 1 and more for a block whose largest code is 6.  2^-lift leaves O = (sum of
 * p v) / L, and is put back into the log normaliser: lse = ln 2 (a kappa + margin + log2 L + lift).
 *
 * The guard is for logits beyond what exponents span: margin M lowers every t, so a
 * score may exceed the anchor's by M + 127; lift L leaves sums of such blocks L octaves
 * before they overflow; and the anchor's own block stands at byte 127 - M - L, which must
 * be 1 at least.  The report has (110, 16) and (112, 14), which leave no octave beneath
 * the anchor: every block below it takes the anchor's exponent and loses its small
 * probabilities.  Where softmax is so sharp that a guard is needed, those hardly matter.
 *
 * The report's kernels fold four K16 scales of Q and K into one of 64 columns, chosen
 * offline.  Here that is an operand like any other: four neighbouring scales are equal.
 *
 * Inference alone: nothing is saved from which a backward could be made.
 * Static inline, in the common subset of C17, C++ and CUDA.
 */
#ifndef FP4D_KERNELS_DIRECT_P_H
#define FP4D_KERNELS_DIRECT_P_H

#include "kernels/attention.h"

enum direct_p_exponent { DIRECT_P_FLOOR, DIRECT_P_CEIL, DIRECT_P_ROUND };

enum {
  DIRECT_P_BLOCK = ATTENTION_MX, /* keys of a scale */
  DIRECT_P_GROUP = 64            /* keys of a publication: what one contraction takes */
};

struct direct_p {
  float slope, offset; /* A and B of the report: 1.50, 1.20; 1.60, 0.95 fitted to Wan */
  enum direct_p_exponent exponent;
  uint32_t native; /* bit p: keys 2p and 2p + 1 of every block take 2^x */
  int64_t anchor;  /* rows of K; 0: a = 0.  As many as keys, or more: a is the row's maximum */
  int32_t margin, lift; /* 0, 0: no guard */
};

/* No reference, no exponential. */
FP4D_INLINE struct direct_p direct_p_fast(void) {
  struct direct_p p = {1.5f, 1.2f, DIRECT_P_FLOOR, 0u, 0, 0, 0};
  return p;
}

/* Every fourth pair by 2^x, 32 rows of K as the reference. */
FP4D_INLINE struct direct_p direct_p_accurate(void) {
  struct direct_p p = {1.5f, 1.2f, DIRECT_P_FLOOR, 0x1111u, 32, 0, 0};
  return p;
}

/* The same for extreme logits: 128 rows, and the guard (110, 16). */
FP4D_INLINE struct direct_p direct_p_guarded(void) {
  struct direct_p p = {1.5f, 1.2f, DIRECT_P_FLOOR, 0x1111u, 128, 110, 16};
  return p;
}

/* NULL, or what is wrong with it. */
FP4D_INLINE const char *direct_p_refuse(const struct direct_p *p) {
  if (!(p->slope > 0.0f) || !attention_finite(p->slope) || !attention_finite(p->offset))
    return "the slope must be positive, and both constants finite";
  if (p->native > 0xFFFFu) return "a block has 16 pairs";
  if (p->anchor < 0) return "the anchor cannot have fewer than 0 rows";
  if (p->margin < 0 || p->lift < 0 || p->margin + p->lift > 126) return "margin and lift must be 0 or more and together at most 126";
  if (p->anchor == 0 && (p->margin | p->lift) != 0) return "a guard needs an anchor";
  return (const char *)0;
}

/* The row of K that is number i of an anchor of n <= keys rows. */
FP4D_INLINE int64_t direct_p_anchor_row(int64_t i, int64_t n, int64_t keys) { return i * keys / n; }

/* The larger of two; a NaN is larger than anything. */
FP4D_INLINE float direct_p_larger(float a, float b) { return b > a || b != b ? b : a; }

/* u for the largest t, as a number: at least `lowest` (lift + 1, or 0: a zero block), at
 * most 255, which a NaN also gives. */
FP4D_INLINE float direct_p_byte(float t_max, enum direct_p_exponent rule, float lowest) {
  float t = t_max > -200.0f ? t_max : -200.0f; /* NaN: -200 */
  t = t < 200.0f ? t : 200.0f;
  float n = (t + F32_ROUNDER) - F32_ROUNDER;
  n = rule == DIRECT_P_FLOOR && n > t ? n - 1.0f : rule == DIRECT_P_CEIL && n < t ? n + 1.0f : n;
  n = n + 127.0f;
  n = n > lowest ? n : lowest;
  return n > 254.0f || t_max != t_max ? 255.0f : n;
}

/* 2^(byte - 127) as published: 0 of byte 0, NaN of byte 255. */
FP4D_INLINE float direct_p_scale(uint32_t byte) { return f32_from_bits(byte == 255u ? 0x7FC00000u : byte << 23); }

/* c / 6 from the sum of a block's codes in halves; times its scale, L's term. */
FP4D_INLINE float direct_p_sum(uint32_t halves) { return ((float)halves * 0.5f) / 6.0f; }

#endif
