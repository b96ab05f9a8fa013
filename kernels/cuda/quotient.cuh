/* Quotients and roots with fewer instructions where their arguments are of ordinary size:
 * the bits of `/` and f32_sqrt.  Callers keep arguments and results away from overflow and
 * so far from subnormal numbers that every remainder (2^-48 of its numerator) is exact.
 */
#ifndef FP4D_KERNELS_CUDA_QUOTIENT_CUH
#define FP4D_KERNELS_CUDA_QUOTIENT_CUH

#include "kernels/cuda/rows.cuh"

/* x / b, correctly rounded, by inverse = 1 / b, correctly rounded, of b in (0, 1]: after
 * the first correction q is one of the two neighbours of the quotient, and from such a one
 * the second gives the nearest (Markstein, "Computation of elementary functions on the IBM
 * RISC System/6000 processor", theorem 4). */
CUDA_INLINE float divide(float x, float b, float inverse) {
  float q = x * inverse;
  q = f32_fma(f32_fma(-q, b, x), inverse, q);
  return f32_fma(f32_fma(-q, b, x), inverse, q);
}

/* x / y and the root of x, correctly rounded: what the compiler makes of `/` and of a root, by
 * the hardware's approximations and the same corrections, without its branches. */
CUDA_INLINE float reciprocal(float y) {
#ifdef FP4D_CUDA_MODEL
  return 1.0f / y;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
  return f32_fma(r, f32_fma(-y, r, 1.0f), r);
#endif
}
CUDA_INLINE float quotient(float x, float y) { return divide(x, y, reciprocal(y)); }

/* With the first correction alone: x / y of such x and y of which a test of all has shown it. */
CUDA_INLINE float quotient_once(float x, float y) {
  const float r = reciprocal(y), q = x * r;
  return f32_fma(f32_fma(-q, y, x), r, q);
}
CUDA_INLINE float root(float x) {
#ifdef FP4D_CUDA_MODEL
  return f32_sqrt(x);
#else
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  const float s = x * r;
  return x == 0.0f ? x : f32_fma(f32_fma(-s, s, x), 0.5f * r, s);
#endif
}

#endif
