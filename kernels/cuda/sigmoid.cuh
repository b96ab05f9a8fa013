/* f32_sigmoid of kernels/elementary.h with fewer instructions where its argument
 * is of ordinary size: the same bits. */
#ifndef FP4D_KERNELS_CUDA_SIGMOID_CUH
#define FP4D_KERNELS_CUDA_SIGMOID_CUH

#include "kernels/cuda/quotient.cuh"

/* e^-|x| is a normal number, also 2^-48 of it (not so for a NaN). */
CUDA_INLINE bool sigmoid_is_ordinary(float x) { return f32_from_bits(f32_bits(x) & 0x7FFFFFFFu) <= 50.0f; }

/* f32_exp of -87 <= a <= 0 without its limits, and with one exact product by 2^n in place of
 * two: n is added to the exponent.  The rounder's own bits leave a shift by 23. */
CUDA_INLINE float exp_ordinary(float a) {
  const float t = f32_fma(a, 0x1.715476p+0f, F32_ROUNDER);
  const float n = t - F32_ROUNDER;
  float r = f32_fma(a, 0x1.715476p+0f, -n);
  r = f32_fma(a, 0x1.4ae0c0p-26f, r);
  return f32_from_bits(f32_bits(f32_exp2_fraction(r)) + (f32_bits(t) << 23));
}

/* IS_BF16: x has a BF16's bits.  There are 33,938 such x.  With 1 / (1 + e) correctly rounded, or up
 * to 4 units of its last place from it before `reciprocal` corrects it, one correction gives all their
 * quotients.  But of 1 + e = 2 - 2^-23 the approximation itself must be correctly rounded: the compiler's
 * division has this need too.  tests/cuda_producers_test.cu compares all of them, on the GPU too. */
template <bool IS_BF16> CUDA_INLINE float sigmoid_ordinary(float x) {
  const float e = exp_ordinary(f32_from_bits(f32_bits(x) | 0x80000000u)), over = x < 0.0f ? e : 1.0f;
  return IS_BF16 ? quotient_once(over, 1.0f + e) : quotient(over, 1.0f + e);
}

#endif
