/* Elementary functions of our own: the same bits on every machine.
 *
 * Only + - * /, correctly rounded sqrt and fma, comparisons and integer
 * operations on bit patterns are used, in a written order, so a compiler
 * without contraction (-ffp-contract=off, nvcc --fmad=false) has no freedom
 * left.  C17, C++ and device code compile this one source.  FP32 functions
 * have no branches and no tables, so loops over them vectorise.
 *
 * A NaN in gives a NaN out; which NaN is not defined.  Polynomial and rational
 * coefficients are fits of our own (relative minimax; coefficients rounded one
 * at a time, the later ones refitted).  The errors stated are the largest seen
 * by tests/kernels_elementary_test.c, in units in the last place (ulp).
 */
#ifndef FP4D_KERNELS_ELEMENTARY_H
#define FP4D_KERNELS_ELEMENTARY_H

#include <stdint.h>
#include <string.h>

#include "kernels/formats.h" /* f32_bits, f32_from_bits */

/* ---- what they are made of ---------------------------------------------- */
#ifdef __CUDA_ARCH__
FP4D_INLINE float f32_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FP4D_INLINE float f32_sqrt(float x) { return __fsqrt_rn(x); }
FP4D_INLINE double f64_fma(double a, double b, double c) { return __fma_rn(a, b, c); }
FP4D_INLINE double f64_sqrt(double x) { return __dsqrt_rn(x); }
#else
FP4D_INLINE float f32_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FP4D_INLINE float f32_sqrt(float x) { return __builtin_sqrtf(x); }
FP4D_INLINE double f64_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
FP4D_INLINE double f64_sqrt(double x) { return __builtin_sqrt(x); }
#endif

FP4D_INLINE uint64_t f64_bits(double x) {
  uint64_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
FP4D_INLINE double f64_from_bits(uint64_t u) {
  double x;
  memcpy(&x, &u, sizeof x);
  return x;
}

#define F32_INFINITY f32_from_bits(0x7F800000u)
#define F32_NAN f32_from_bits(0x7FC00000u)
#define F64_INFINITY f64_from_bits(0x7FF0000000000000u)
#define F64_NAN f64_from_bits(0x7FF8000000000000u)

/* ---- FP32 exponentials -------------------------------------------------- */
/* 2^r for |r| <= 0.5. */
FP4D_INLINE float f32_exp2_fraction(float r) {
  float p = 0x1.417a5cp-13f;
  p = f32_fma(p, r, 0x1.5f0946p-10f);
  p = f32_fma(p, r, 0x1.3b2dd2p-7f);
  p = f32_fma(p, r, 0x1.c6af7ap-5f);
  p = f32_fma(p, r, 0x1.ebfbdcp-3f);
  p = f32_fma(p, r, 0x1.62e430p-1f);
  return f32_fma(p, r, 1.0f);
}

/* 2^r * 2^n for |r| <= 0.5 (a little more does no harm), -151 <= n <= 129:
 * the one rounding into subnormals happens in the last product. */
FP4D_INLINE float f32_exp2_core(float r, uint32_t n) {
  const float p = f32_exp2_fraction(r);
  /* n = low + high, each an exponent that a normal number has */
  uint32_t low = (uint32_t)((int32_t)n >> 1);
  uint32_t high = n - low;
  return p * f32_from_bits((low + 127u) << 23) * f32_from_bits((high + 127u) << 23);
}

/* Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits. */
#define F32_ROUNDER 0x1.8p23f

/* 2^x, within 0.9 ulp; rounds through subnormals to 0 and overflows to +inf. */
FP4D_INLINE float f32_exp2(float x) {
  x = x < -151.0f ? -151.0f : x;
  x = x > 129.0f ? 129.0f : x;
  float t = x + F32_ROUNDER;
  return f32_exp2_core(x - (t - F32_ROUNDER), f32_bits(t) - f32_bits(F32_ROUNDER));
}

/* e^x = 2^(x log2 e), log2 e in two parts; within 1 ulp. */
FP4D_INLINE float f32_exp(float x) {
  x = x < -104.5f ? -104.5f : x;
  x = x > 89.0f ? 89.0f : x;
  float t = f32_fma(x, 0x1.715476p+0f, F32_ROUNDER);
  float n = t - F32_ROUNDER;
  float r = f32_fma(x, 0x1.715476p+0f, -n);
  r = f32_fma(x, 0x1.4ae0c0p-26f, r);
  return f32_exp2_core(r, f32_bits(t) - f32_bits(F32_ROUNDER));
}

/* 1 / (1 + e^-x), small in relative error at both ends (within 2.5 ulp). */
FP4D_INLINE float f32_sigmoid(float x) {
  float e = f32_exp(f32_from_bits(f32_bits(x) | 0x80000000u)); /* e^-|x| <= 1 */
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* x * sigmoid(x), within 3.5 ulp where the sigmoid is a normal number
 * (x > -87), and there within 1e-43 besides.  -inf gives NaN (-inf * 0): a non-finite input stays seen. */
FP4D_INLINE float f32_silu(float x) { return x * f32_sigmoid(x); }

/* ---- FP32 logarithms ---------------------------------------------------- */
/* x = (1 + f) 2^e with sqrt(1/2) <= 1 + f < sqrt(2), for finite x > 0. */
FP4D_INLINE float f32_log_split(float x, float *e) {
  int small = x < 0x1p-126f;
  uint32_t u = f32_bits(small ? x * 0x1p25f : x);
  int32_t k = (int32_t)(u - 0x3F3504F3u) >> 23;
  *e = (float)(k - (small ? 25 : 0));
  return f32_from_bits(u - ((uint32_t)k << 23)) - 1.0f;
}

/* log(1 + f) - f on that range. */
FP4D_INLINE float f32_log1p_tail(float f) {
  float p = -0x1.38c968p-4f;
  p = f32_fma(p, f, 0x1.055eacp-3f);
  p = f32_fma(p, f, -0x1.0d8246p-3f);
  p = f32_fma(p, f, 0x1.22d930p-3f);
  p = f32_fma(p, f, -0x1.54728ap-3f);
  p = f32_fma(p, f, 0x1.99a01cp-3f);
  p = f32_fma(p, f, -0x1.000226p-2f);
  p = f32_fma(p, f, 0x1.555554p-2f);
  return f * f * f32_fma(p, f, -0.5f);
}

/* What a logarithm is outside (0, inf). */
FP4D_INLINE float f32_log_domain(float x, float inside) {
  float outside = x == 0.0f ? -F32_INFINITY : F32_NAN;
  return x > 0.0f ? (x < F32_INFINITY ? inside : x) : outside;
}

/* log x (natural), within 0.9 ulp. */
FP4D_INLINE float f32_log(float x) {
  float e;
  float f = f32_log_split(x, &e);
  float t = f32_fma(e, -0x1.05c610p-29f, f32_log1p_tail(f)); /* log 2 in two parts */
  return f32_log_domain(x, f32_fma(e, 0x1.62e430p-1f, f + t));
}

/* log2 x, within 1.2 ulp; powers of two exactly. */
FP4D_INLINE float f32_log2(float x) {
  float e;
  float f = f32_log_split(x, &e);
  float h = f * 0x1.715476p+0f; /* log2 e in two parts, products exact with their remainder */
  float low = f32_fma(f, 0x1.715476p+0f, -h);
  low = f32_fma(f, 0x1.4ae0c0p-26f, low);
  low = f32_fma(f32_log1p_tail(f), 0x1.715476p+0f, low);
  return f32_log_domain(x, (e + h) + low);
}

/* ---- double: tables and initial values ---------------------------------- */
/* Here speed matters little, so series are Taylor's with exact coefficients. */
#define F64_ROUNDER 0x1.8p52

/* log x (natural), within 1 ulp.  log(1+f) = 2 atanh(s), s = f / (2 + f). */
FP4D_INLINE double f64_log(double x) {
  if (!(x > 0.0)) return x == 0.0 ? -F64_INFINITY : F64_NAN;
  if (!(x < F64_INFINITY)) return x;
  int small = x < 0x1p-1022;
  uint64_t u = f64_bits(small ? x * 0x1p54 : x);
  int64_t k = (int64_t)(u - 0x3FE6A09E667F3BCDu) >> 52; /* above sqrt(1/2) */
  double e = (double)(k - (small ? 54 : 0));
  double f = f64_from_bits(u - ((uint64_t)k << 52)) - 1.0;
  double s = f / (2.0 + f), z = s * s;
  double r = 2.0 / 21;
  r = f64_fma(r, z, 2.0 / 19);
  r = f64_fma(r, z, 2.0 / 17);
  r = f64_fma(r, z, 2.0 / 15);
  r = f64_fma(r, z, 2.0 / 13);
  r = f64_fma(r, z, 2.0 / 11);
  r = f64_fma(r, z, 2.0 / 9);
  r = f64_fma(r, z, 2.0 / 7);
  r = f64_fma(r, z, 2.0 / 5);
  r = f64_fma(r, z, 2.0 / 3);
  r = r * z; /* log(1+f) = 2s + s r = f - s (f - r) */
  double t = f64_fma(e, 0x1.abc9e3b39803fp-56, -(s * (f - r)));
  return f64_fma(e, 0x1.62e42fefa39efp-1, f + t);
}

/* 2^x, within 1 ulp; rounds through subnormals to 0 and overflows to +inf. */
FP4D_INLINE double f64_exp2(double x) {
  if (x != x) return x;
  x = x < -1076.0 ? -1076.0 : x;
  x = x > 1025.0 ? 1025.0 : x;
  double t = x + F64_ROUNDER;
  double y = (x - (t - F64_ROUNDER)) * 0x1.62e42fefa39efp-1;
  double p = 1.0 / 6227020800.0;
  p = f64_fma(p, y, 1.0 / 479001600.0);
  p = f64_fma(p, y, 1.0 / 39916800.0);
  p = f64_fma(p, y, 1.0 / 3628800.0);
  p = f64_fma(p, y, 1.0 / 362880.0);
  p = f64_fma(p, y, 1.0 / 40320.0);
  p = f64_fma(p, y, 1.0 / 5040.0);
  p = f64_fma(p, y, 1.0 / 720.0);
  p = f64_fma(p, y, 1.0 / 120.0);
  p = f64_fma(p, y, 1.0 / 24.0);
  p = f64_fma(p, y, 1.0 / 6.0);
  p = f64_fma(p, y, 0.5);
  p = f64_fma(p, y, 1.0);
  p = f64_fma(p, y, 1.0);
  uint64_t n = f64_bits(t) - f64_bits(F64_ROUNDER);
  uint64_t low = (uint64_t)((int64_t)n >> 1);
  uint64_t high = n - low;
  return p * f64_from_bits((low + 1023u) << 52) * f64_from_bits((high + 1023u) << 52);
}

/* Sine and cosine for |x| <= 2^20, within 1.5 ulp.  n pi/2 is taken off with
 * pi/2 in three doubles; the first step is exact: x and n * high are multiples
 * of 2^-53 whose difference is below 1. */
FP4D_INLINE void f64_sin_cos(double x, double *sine, double *cosine) {
  double t = f64_fma(x, 0x1.45f306dc9c883p-1, F64_ROUNDER);
  double n = t - F64_ROUNDER;
  double r = f64_fma(n, -0x1.921fb54442d18p+0, x);
  r = f64_fma(n, -0x1.1a62633145c07p-54, r);
  r = f64_fma(n, 0x1.f1976b7ed8fbcp-110, r);
  double z = r * r;
  double s = 1.0 / 355687428096000.0;
  s = f64_fma(s, z, -1.0 / 1307674368000.0);
  s = f64_fma(s, z, 1.0 / 6227020800.0);
  s = f64_fma(s, z, -1.0 / 39916800.0);
  s = f64_fma(s, z, 1.0 / 362880.0);
  s = f64_fma(s, z, -1.0 / 5040.0);
  s = f64_fma(s, z, 1.0 / 120.0);
  s = f64_fma(s, z, -1.0 / 6.0);
  s = f64_fma(s * z, r, r);
  double c = 1.0 / 20922789888000.0;
  c = f64_fma(c, z, -1.0 / 87178291200.0);
  c = f64_fma(c, z, 1.0 / 479001600.0);
  c = f64_fma(c, z, -1.0 / 3628800.0);
  c = f64_fma(c, z, 1.0 / 40320.0);
  c = f64_fma(c, z, -1.0 / 720.0);
  c = f64_fma(c, z, 1.0 / 24.0);
  c = f64_fma(c, z, -0.5);
  c = f64_fma(c, z, 1.0);
  uint64_t quadrant = f64_bits(t) - f64_bits(F64_ROUNDER);
  double a = quadrant & 1u ? c : s, b = quadrant & 1u ? s : c;
  *sine = quadrant & 2u ? -a : a;
  *cosine = (quadrant + 1u) & 2u ? -b : b;
}

/* The x with P(normal <= x) = p; relative error below 1e-14 for every double
 * p in (0, 1) (near 1 it is p itself that is coarse).  -inf at 0, +inf at 1,
 * NaN outside.  The method of Wichura's AS 241 (Applied Statistics 37, 1988),
 * a rational function in each of three ranges, with a fit of our own. */
FP4D_INLINE double normal_quantile(double p) {
  double q = p - 0.5;
  if (q >= -0.425 && q <= 0.425) {
    double t = 0.425 * 0.425 - q * q;
    double a = 2468.94419509403059, b = 5150.7074768059537;
    a = f64_fma(a, t, 33014.1733025984949), b = f64_fma(b, t, 28403.528185052283);
    a = f64_fma(a, t, 66635.3530221047907), b = f64_fma(b, t, 38971.5277047894839);
    a = f64_fma(a, t, 45611.9503333696784), b = f64_fma(b, t, 21082.4914923137119);
    a = f64_fma(a, t, 13669.0599055479766), b = f64_fma(b, t, 5371.53587504507172);
    a = f64_fma(a, t, 1966.17289920844923), b = f64_fma(b, t, 685.440044071435203);
    a = f64_fma(a, t, 132.97557690628205), b = f64_fma(b, t, 42.2642948380136042);
    a = f64_fma(a, t, 3.38713287279636656), b = f64_fma(b, t, 1.0);
    return q * (a / b);
  }
  double tail = q < 0.0 ? p : 1.0 - p;
  if (!(tail > 0.0)) return tail == 0.0 ? (q < 0.0 ? -F64_INFINITY : F64_INFINITY) : F64_NAN;
  double r = f64_sqrt(-f64_log(tail)), a, b;
  if (r <= 5.0) {
    r -= 1.6;
    a = 0.000776401487344946225, b = 1.05018940658290958e-9;
    a = f64_fma(a, r, 0.0227813737853716031), b = f64_fma(b, r, 0.000548906466585552644);
    a = f64_fma(a, r, 0.242332233164523333), b = f64_fma(b, r, 0.0152372569711445076);
    a = f64_fma(a, r, 1.27273819648170813), b = f64_fma(b, r, 0.148435811997008415);
    a = f64_fma(a, r, 3.65233440198640912), b = f64_fma(b, r, 0.690919977815716434);
    a = f64_fma(a, r, 5.77357304440115009), b = f64_fma(b, r, 1.67811881614478532);
    a = f64_fma(a, r, 4.63167781013774772), b = f64_fma(b, r, 2.05413298468658549);
    a = f64_fma(a, r, 1.42343711074968358), b = f64_fma(b, r, 1.0);
  } else {
    r -= 5.0;
    a = 1.99819702861064161e-7, b = 2.00759506800117826e-15;
    a = f64_fma(a, r, 0.0000270056673739960491), b = f64_fma(b, r, 1.41292946221257244e-7);
    a = f64_fma(a, r, 0.00123931270116854151), b = f64_fma(b, r, 0.000018389768443090702);
    a = f64_fma(a, r, 0.0264854866518244118), b = f64_fma(b, r, 0.000784865851396223297);
    a = f64_fma(a, r, 0.296233522647914695), b = f64_fma(b, r, 0.0148521796903562022);
    a = f64_fma(a, r, 1.78370886727610292), b = f64_fma(b, r, 0.136811091387172487);
    a = f64_fma(a, r, 5.46230500916376292), b = f64_fma(b, r, 0.599609929115823257);
    a = f64_fma(a, r, 6.65790464350110375), b = f64_fma(b, r, 1.0);
  }
  return q < 0.0 ? -(a / b) : a / b;
}

#endif
