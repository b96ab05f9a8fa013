/* What the processor's fused multiply-add units can do at best: independent
 * chains in registers, nothing loaded or stored.  The denominator of `bench`. */
#include "base/clock.h"
#include "kernels/cpu/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Latency (4 cycles, more on some) times two units a cycle: 12 chains keep both busy. */
enum { CHAINS = 12, ROUNDS = 1 << 16 };

#define PEAK_BODY(NAME, TARGET, VECTOR, LANES, SET, FMA)                                \
  TARGET static double NAME(float *sink) {                                              \
    VECTOR chain[CHAINS], x = SET(1.0f), y = SET(0x1p-20f);                             \
    __asm__ volatile("" : "+g"(sink));                                                  \
    _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) chain[i] = SET((float)i); \
    for (int r = 0; r < ROUNDS; r++) {                                                  \
      _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) chain[i] = FMA(chain[i], x, y); \
    }                                                                                   \
    VECTOR sum = chain[0];                                                              \
    _Pragma("GCC unroll 12") for (int i = 1; i < CHAINS; i++) sum = sum + chain[i];     \
    __builtin_memcpy(sink, &sum, sizeof sum);                                           \
    return 2.0 * LANES * CHAINS * ROUNDS;                                               \
  }

#if defined(__x86_64__)
PEAK_BODY(peak_avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512_set1_ps, _mm512_fmadd_ps)
PEAK_BODY(peak_avx2, __attribute__((target("avx2,fma"))), __m256, 8, _mm256_set1_ps, _mm256_fmadd_ps)
#elif defined(__aarch64__)
#define NEON_FMA(a, b, c) vfmaq_f32(c, a, b)
PEAK_BODY(peak_neon, , float32x4_t, 4, vdupq_n_f32, NEON_FMA)
#endif
#if !defined(__aarch64__)
#define PLAIN_SET(x) (x)
PEAK_BODY(peak_plain, , float, 1, PLAIN_SET, __builtin_fmaf)
#endif

struct peak {
  double (*loop)(float *sink); /* FLOPs done */
  double flops[256];           /* by task */
};

static double (*best_loop(void))(float *) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return peak_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return peak_avx2;
#elif defined(__aarch64__)
  return peak_neon;
#endif
#if !defined(__aarch64__)
  return peak_plain;
#endif
}

static void peak_task(void *context, int64_t index, int worker) {
  struct peak *p = context;
  float sink[16];
  (void)worker;
  p->flops[index] = p->loop(sink);
}

double cpu_peak_fma(struct device *d) {
  struct threads *t = cpu_of(d)->threads;
  int n = threads_count(t);
  struct peak p = {.loop = best_loop()};
  if (n > 256) n = 256;
  double best = 0;
  for (int i = 0; i < 20; i++) { /* the first ones wake the cores up */
    double t0 = clock_seconds(), flops = 0;
    threads_run(t, n, peak_task, &p);
    t0 = clock_seconds() - t0;
    for (int j = 0; j < n; j++) flops += p.flops[j];
    if (flops / t0 > best) best = flops / t0;
  }
  return best;
}
