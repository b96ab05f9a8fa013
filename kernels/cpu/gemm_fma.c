/* Micro-kernels of the contraction in FP32: the even and odd chains of
 * kernels/cpu/gemm.h, one per lane of a vector register.
 *
 * A tile of mr x nr outputs keeps both chains of every output in registers for
 * a group of 32; the running sums stay in the nearest cache and are touched
 * once a group.  The fused multiply-add is named explicitly in each body, so the
 * bits are the same in all of them.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define UNROLL _Pragma("GCC unroll 16")

/* One body: `VECTOR` of `LANES` floats, `SET(x)` in every lane, `FMA(a, b, c)`
 * = a * b + c rounded once; MR x (NV * LANES) outputs. */
#define GEMM_BODY(NAME, TARGET, VECTOR, LANES, SET, FMA, MR, NV)                                           \
  TARGET static void NAME##_run(float *acc, const void *first, const void *second, int64_t groups) {       \
    const float *a = first, *b = second;                                                                   \
    for (int64_t g = 0; g < groups; g++) {                                                                 \
      VECTOR even[MR][NV], odd[MR][NV], x[NV];                                                             \
      UNROLL for (int i = 0; i < MR; i++) {                                                                \
        UNROLL for (int v = 0; v < NV; v++) even[i][v] = odd[i][v] = SET(0.0f);                            \
      }                                                                                                    \
      for (int pair = 0; pair < CONTRACT_GROUP / 2; pair++) {                                              \
        UNROLL for (int v = 0; v < NV; v++) memcpy(&x[v], b + v * LANES, sizeof x[v]);                     \
        UNROLL for (int i = 0; i < MR; i++) {                                                              \
          VECTOR y = SET(a[i]);                                                                            \
          UNROLL for (int v = 0; v < NV; v++) even[i][v] = FMA(y, x[v], even[i][v]);                       \
        }                                                                                                  \
        UNROLL for (int v = 0; v < NV; v++) memcpy(&x[v], b + (NV + v) * LANES, sizeof x[v]);              \
        UNROLL for (int i = 0; i < MR; i++) {                                                              \
          VECTOR y = SET(a[MR + i]);                                                                       \
          UNROLL for (int v = 0; v < NV; v++) odd[i][v] = FMA(y, x[v], odd[i][v]);                         \
        }                                                                                                  \
        a += 2 * MR;                                                                                       \
        b += 2 * NV * LANES;                                                                               \
      }                                                                                                    \
      UNROLL for (int i = 0; i < MR; i++) {                                                                \
        UNROLL for (int v = 0; v < NV; v++) {                                                              \
          float *to = acc + i * GEMM_TILE_COLS + v * LANES;                                                    \
          VECTOR sum;                                                                                      \
          memcpy(&sum, to, sizeof sum);                                                                    \
          sum = sum + (even[i][v] + odd[i][v]);                                                            \
          memcpy(to, &sum, sizeof sum);                                                                    \
        }                                                                                                  \
      }                                                                                                    \
    }                                                                                                      \
  }                                                                                                        \
  static int NAME##_pack_first(void *panels, const struct operand *o, int64_t row, int64_t rows, int64_t k, \
                               int64_t cols) {                                                             \
    gemm_pack_f32(panels, MR, o, row, rows, k, cols);                                                      \
    return 255;                                                                                            \
  }                                                                                                        \
  static int NAME##_pack_second(void *panels, const struct operand *o, int64_t row, int64_t rows, int64_t k, \
                                int64_t cols) {                                                            \
    gemm_pack_f32(panels, (NV) * (LANES), o, row, rows, k, cols);                                          \
    return 255;                                                                                            \
  }

#define GEMM_KERNEL(NAME, LABEL, MR, NR)                                                                   \
  {.name = LABEL, .mr = MR, .nr = NR, .chunk = 8, .element_bytes = sizeof(float), .usable = NAME##_usable,    \
   .pack_first = NAME##_pack_first, .pack_second = NAME##_pack_second, .run = NAME##_run}

#if defined(__x86_64__)
GEMM_BODY(avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512_set1_ps, _mm512_fmadd_ps, 6, 2)
GEMM_BODY(avx2, __attribute__((target("avx2,fma"))), __m256, 8, _mm256_set1_ps, _mm256_fmadd_ps, 3, 2)

static bool avx512_usable(void) { return __builtin_cpu_supports("avx512f"); }
static bool avx2_usable(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#elif defined(__aarch64__)
#define NEON_FMA(a, b, c) vfmaq_f32(c, a, b)
GEMM_BODY(neon, , float32x4_t, 4, vdupq_n_f32, NEON_FMA, 6, 2)

static bool neon_usable(void) { return true; }
#endif

/* Any machine, one output at a time. */
#define PLAIN_SET(x) (x)
GEMM_BODY(plain, , float, 1, PLAIN_SET, __builtin_fmaf, 4, 4)

static bool plain_usable(void) { return true; }

static const struct gemm_kernel kernels[] = {
#if defined(__x86_64__)
    GEMM_KERNEL(avx512, "avx512-fma", 6, 32),
    GEMM_KERNEL(avx2, "avx2-fma", 3, 16),
#elif defined(__aarch64__)
    GEMM_KERNEL(neon, "neon-fma", 6, 8),
#endif
    GEMM_KERNEL(plain, "plain-fma", 4, 4),
};

const struct gemm_kernel *gemm_fma_kernel(int index) {
  return index >= 0 && index < (int)(sizeof kernels / sizeof kernels[0]) ? &kernels[index] : NULL;
}
