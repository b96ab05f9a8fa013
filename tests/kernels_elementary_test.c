/* Elementary functions against libm in a wider type, and their bits. */
#include "kernels/elementary.h"

#include <math.h>

#include "tests/test.h"

/* |got - want| in units of the last place of `want` in FP32. */
static double ulps_f32(float got, double want) {
  if (isnan(want)) return isnan(got) ? 0.0 : INFINITY;
  if (fabs(want) >= 0x1.ffffffp127) return isinf(got) && (got > 0) == (want > 0) ? 0.0 : INFINITY;
  int e;
  frexp(want, &e);
  if (e < -125) e = -125;
  return fabs((double)got - want) / ldexp(1.0, e - 24);
}

static double ulps_f64(double got, long double want) {
  int e;
  frexpl(want, &e);
  if (e < -1021) e = -1021;
  return (double)(fabsl((long double)got - want) / ldexpl(1.0L, e - 53));
}

static double want_sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }
static double want_silu(double x) { return x * want_sigmoid(x); }

/* The worst error over every 4093rd bit pattern of either sign. */
static double sweep(float (*f)(float), double (*want)(double), uint32_t from, uint32_t to) {
  double worst = 0;
  for (uint64_t u = from; u <= to; u += 4093) {
    float x = f32_from_bits((uint32_t)u);
    double d = ulps_f32(f(x), want((double)x));
    if (d > worst) worst = d;
  }
  return worst;
}

#define POSITIVE 0u, 0x7F800000u
#define NEGATIVE 0x80000000u, 0xFF800000u

static void check_bound(const char *name, double worst, double bound) {
  if (!(worst <= bound)) FAIL("%s: %.3f ulp, bound %.3f", name, worst, bound);
}

TEST(f32_against_libm) {
  check_bound("exp2 +", sweep(f32_exp2, exp2, POSITIVE), 0.9);
  check_bound("exp2 -", sweep(f32_exp2, exp2, NEGATIVE), 0.9);
  check_bound("exp +", sweep(f32_exp, exp, POSITIVE), 1.0);
  check_bound("exp -", sweep(f32_exp, exp, NEGATIVE), 1.0);
  check_bound("log", sweep(f32_log, log, POSITIVE), 0.9);
  check_bound("log2", sweep(f32_log2, log2, POSITIVE), 1.2);
  check_bound("sigmoid +", sweep(f32_sigmoid, want_sigmoid, POSITIVE), 2.5);
  check_bound("sigmoid -", sweep(f32_sigmoid, want_sigmoid, NEGATIVE), 2.5);
  check_bound("silu +", sweep(f32_silu, want_silu, 0u, 0x7F7FFFFFu), 3.0);
  check_bound("silu -", sweep(f32_silu, want_silu, 0x80000000u, f32_bits(-87.0f)), 3.5);
  for (float x = -87.0f; x > -200.0f; x -= 0.013f) CHECK_CLOSE(f32_silu(x), want_silu((double)x), 1e-43 - 3e-7 * want_silu((double)x));
}

TEST(f32_dense_where_it_is_used) {
  double exp_worst = 0, exp2_worst = 0, log_worst = 0, log2_worst = 0;
  for (int i = -400000; i <= 400000; i++) {
    float x = (float)i * 0x1p-18f * 1.0009765f;
    exp2_worst = fmax(exp2_worst, ulps_f32(f32_exp2(x), exp2((double)x)));
    float y = (float)i * 2.6e-4f; /* to +-104 */
    exp_worst = fmax(exp_worst, ulps_f32(f32_exp(y), exp((double)y)));
    float z = 1.0f + (float)i * 0x1p-20f;
    log_worst = fmax(log_worst, ulps_f32(f32_log(z), log((double)z)));
    log2_worst = fmax(log2_worst, ulps_f32(f32_log2(z), log2((double)z)));
  }
  check_bound("exp2", exp2_worst, 0.9);
  check_bound("exp", exp_worst, 1.0);
  check_bound("log", log_worst, 0.9);
  check_bound("log2", log2_worst, 1.2);
}

TEST(f32_special_values) {
  const float inf = F32_INFINITY;
  CHECK(isnan(f32_exp2(F32_NAN)) && isnan(f32_exp(F32_NAN)) && isnan(f32_log(F32_NAN)) && isnan(f32_log2(F32_NAN)));
  CHECK(isnan(f32_exp(-F32_NAN)) && isnan(f32_sigmoid(F32_NAN)) && isnan(f32_silu(F32_NAN)));
  CHECK(isnan(f32_exp2(f32_from_bits(0x7F800001u))) && isnan(f32_exp2(f32_from_bits(0xFFFFFFFFu))));
  CHECK(f32_exp2(inf) == inf && f32_exp2(-inf) == 0.0f && f32_exp(inf) == inf && f32_exp(-inf) == 0.0f);
  CHECK(f32_exp2(0.0f) == 1.0f && f32_exp2(-0.0f) == 1.0f && f32_exp(0.0f) == 1.0f && f32_exp(-0.0f) == 1.0f);
  for (int n = -149; n <= 127; n++) {
    CHECK(f32_exp2((float)n) == ldexpf(1.0f, n));
    CHECK(f32_log2(ldexpf(1.0f, n)) == (float)n);
  }
  CHECK(f32_exp2(128.0f) == inf && f32_exp2(-150.0f) == 0.0f && f32_exp2(-149.5f) == 0x1p-149f);
  CHECK(f32_log(0.0f) == -inf && f32_log2(-0.0f) == -inf && f32_log(inf) == inf && f32_log2(inf) == inf);
  CHECK(isnan(f32_log(-1.0f)) && isnan(f32_log2(-inf)) && f32_log(1.0f) == 0.0f);
  CHECK(f32_sigmoid(0.0f) == 0.5f && f32_sigmoid(inf) == 1.0f && f32_sigmoid(-inf) == 0.0f);
  CHECK(f32_silu(0.0f) == 0.0f && f32_silu(inf) == inf && isnan(f32_silu(-inf)));
}

TEST(f64_logarithm_and_exponential) {
  double log_worst = 0, exp2_worst = 0;
  for (int i = 0; i < 40000; i++) {
    double x = ldexp(1.0 + (double)i / 39999.7, i % 2100 - 1074);
    if (isfinite(x) && x != 1.0) log_worst = fmax(log_worst, ulps_f64(f64_log(x), logl((long double)x)));
    double near = 0.5 + i * 2.7e-5;
    if (near != 1.0) log_worst = fmax(log_worst, ulps_f64(f64_log(near), logl((long double)near)));
    double y = -1075.0 + i * 0.05247;
    if (y < 1024) exp2_worst = fmax(exp2_worst, ulps_f64(f64_exp2(y), exp2l((long double)y)));
  }
  check_bound("log", log_worst, 1.0);
  check_bound("exp2", exp2_worst, 1.0);
  CHECK(f64_log(1.0) == 0.0 && f64_log(0.0) == -INFINITY && isnan(f64_log(-1.0)) && isnan(f64_log((double)NAN)));
  CHECK(f64_log(INFINITY) == INFINITY && f64_exp2(INFINITY) == INFINITY && f64_exp2(-INFINITY) == 0.0);
  CHECK(f64_exp2(0.0) == 1.0 && f64_exp2(-1074.0) == 0x1p-1074 && f64_exp2(1023.0) == 0x1p1023);
  CHECK(f64_exp2(1024.0) == INFINITY && isnan(f64_exp2((double)NAN)));
}

TEST(f64_sine_and_cosine) {
  double worst = 0;
  for (int i = -20000; i <= 20000; i++) {
    /* all scales up to 2^20, and close to multiples of pi/2 */
    double x[3] = {i * 52.42871, i * 1.5707963267948966, (double)i / 9973.0};
    for (int j = 0; j < 3; j++) {
      double s, c;
      f64_sin_cos(x[j], &s, &c);
      worst = fmax(worst, ulps_f64(s, sinl((long double)x[j])));
      worst = fmax(worst, ulps_f64(c, cosl((long double)x[j])));
    }
  }
  check_bound("sin, cos", worst, 1.5);
  double s, c;
  f64_sin_cos(0.0, &s, &c);
  CHECK(s == 0.0 && c == 1.0);
  f64_sin_cos(0x1p20, &s, &c);
  CHECK_CLOSE(s, (double)sinl(0x1p20L), 1e-16);
  CHECK_CLOSE(c, (double)cosl(0x1p20L), 1e-16);
}

/* P(normal <= x) for x <= 0, to long double accuracy. */
static long double lower_tail(double x) { return 0.5L * erfcl(-(long double)x / sqrtl(2.0L)); }

TEST(normal_quantile) {
  /* A 60-digit computation at these doubles. */
  static const double known[][2] = {{0.975, 1.9599639845400538556},
                                    {0.84134474606854292578, 0.99999999999999990574},
                                    {0.0013498980316300945267, -2.9999999999999999886},
                                    {0.25, -0.6744897501960817432},
                                    {0.075, -1.4395314709384559349},
                                    {1e-10, -6.3613409024040561991},
                                    {1e-100, -21.273453560965324294},
                                    {1e-300, -37.047096299361199237},
                                    {0x1p-1074, -38.467405617144346251}};
  for (unsigned i = 0; i < sizeof known / sizeof known[0]; i++)
    CHECK_CLOSE(normal_quantile(known[i][0]) / known[i][1], 1.0, 1e-14);
  CHECK(normal_quantile(0.5) == 0.0);
  CHECK(normal_quantile(0.0) == -INFINITY && normal_quantile(1.0) == INFINITY);
  CHECK(isnan(normal_quantile(-1e-9)) && isnan(normal_quantile(1.5)) && isnan(normal_quantile((double)NAN)));
  /* The distribution function takes it back: dp = phi(x) dx. */
  double previous = -INFINITY;
  for (int i = 1; i < 4000; i++) {
    double p = i < 2000 ? exp2(-1022.0 + i * 0.5105) : (double)(i - 1999) / 4002.0;
    double x = normal_quantile(p);
    long double back = lower_tail(x);
    long double density = expl(-0.5L * (long double)x * (long double)x) / sqrtl(6.283185307179586477L);
    long double dx = (back - (long double)p) / density;
    if (!(fabsl(dx) <= 2e-14L * fmaxl(1.0L, fabsl((long double)x)))) FAIL("p %a: off by %Lg", p, dx);
    if (i >= 2000) CHECK(normal_quantile(1.0 - p) + normal_quantile(1.0 - (1.0 - p)) == 0.0);
    if (i != 2000) CHECK(x > previous);
    previous = x;
  }
}

/* FNV-1a over bit patterns: the same on every machine and compiler. */
static uint64_t feed(uint64_t h, uint64_t bits) {
  for (int i = 0; i < 8; i++) h = (h ^ (bits >> (8 * i) & 0xFFu)) * 0x100000001B3u;
  return h;
}

TEST(bits_are_fixed) {
  uint64_t h = 0xCBF29CE484222325u;
  for (uint32_t i = 0; i < 60000; i++) {
    float x = (float)((double)i * 0.0035 - 104.9), y = f32_from_bits(i * 35993u % 0x7F800000u);
    h = feed(h, f32_bits(f32_exp2(x)));
    h = feed(h, f32_bits(f32_exp(x)));
    h = feed(h, f32_bits(f32_silu(x)));
    h = feed(h, f32_bits(f32_log(y)));
    h = feed(h, f32_bits(f32_log2(y)));
  }
  for (int i = 1; i < 6000; i++) {
    double s, c;
    f64_sin_cos(i * 173.77, &s, &c);
    h = feed(h, f64_bits(s));
    h = feed(h, f64_bits(c));
    h = feed(h, f64_bits(f64_log(i * 0.37)));
    h = feed(h, f64_bits(f64_exp2(i * 0.1 - 300.0)));
    h = feed(h, f64_bits(normal_quantile(i / 6000.0)));
  }
  if (h != 0x1ec0a18df9c2cd40u) FAIL("hash 0x%016" PRIx64, h);
}

int main(void) {
  RUN(f32_against_libm);
  RUN(f32_dense_where_it_is_used);
  RUN(f32_special_values);
  RUN(f64_logarithm_and_exponential);
  RUN(f64_sine_and_cosine);
  RUN(normal_quantile);
  RUN(bits_are_fixed);
  return test_report();
}
