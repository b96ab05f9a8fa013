/* Philox calls side by side (kernels/cpu/draw.h), portable and for AVX-512. */
#include "kernels/cpu/draw.h"

#include "base/clones.h"

enum { ROUNDS = 10 };

#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define WEYL_0 0x9E3779B9u
#define WEYL_1 0xBB67AE85u

/* philox4x32_10 written out, so that calls run in lanes, and the two halves between
 * each other (a chain of 20 products waits on each). */
CLONES void draw_words_portable(uint32_t word[restrict 4][DRAW_CALLS], const struct draw_places *at,
                                const struct draw *draw) {
  for (int i = 0, j = DRAW_CALLS / 2; i < DRAW_CALLS / 2; i++, j++) {
    uint32_t a0 = at->word[0][i], a1 = at->word[1][i], a2 = draw->update, a3 = at->word[2][i];
    uint32_t b0 = at->word[0][j], b1 = at->word[1][j], b2 = draw->update, b3 = at->word[2][j];
    uint32_t k0 = (uint32_t)draw->seed, k1 = (uint32_t)(draw->seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < ROUNDS; round++) {
      const uint64_t p0 = (uint64_t)MULTIPLIER_0 * a0, p1 = (uint64_t)MULTIPLIER_1 * a2;
      const uint64_t q0 = (uint64_t)MULTIPLIER_0 * b0, q1 = (uint64_t)MULTIPLIER_1 * b2;
      a0 = (uint32_t)(p1 >> 32) ^ a1 ^ k0, a1 = (uint32_t)p1;
      b0 = (uint32_t)(q1 >> 32) ^ b1 ^ k0, b1 = (uint32_t)q1;
      a2 = (uint32_t)(p0 >> 32) ^ a3 ^ k1, a3 = (uint32_t)p0;
      b2 = (uint32_t)(q0 >> 32) ^ b3 ^ k1, b3 = (uint32_t)q0;
      k0 += WEYL_0;
      k1 += WEYL_1;
    }
    word[0][i] = a0, word[1][i] = a1, word[2][i] = a2, word[3][i] = a3;
    word[0][j] = b0, word[1][j] = b1, word[2][j] = b2, word[3][j] = b3;
  }
}

#if defined(__x86_64__)
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f")))

/* Eight calls, each word in the low half of 64 bits.  What comes to stand in the high
 * half is never read: the product takes low halves, sums of bits keep them apart. */
struct eight {
  __m512i x[4];
};

WIDE static inline __attribute__((always_inline)) void turn(struct eight *s, __m512i k0, __m512i k1) {
  const __m512i p0 = _mm512_mul_epu32(s->x[0], _mm512_set1_epi64(MULTIPLIER_0));
  const __m512i p1 = _mm512_mul_epu32(s->x[2], _mm512_set1_epi64(MULTIPLIER_1));
  s->x[0] = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p1, 32), s->x[1]), k0);
  s->x[2] = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), s->x[3]), k1);
  s->x[1] = p1;
  s->x[3] = p0;
}

/* The same by the product of 32-bit halves, which no loop makes the compiler take. */
WIDE static void draw_words_avx512(uint32_t word[restrict 4][DRAW_CALLS], const struct draw_places *at,
                                   const struct draw *draw) {
  const __m512i update = _mm512_set1_epi64(draw->update);
  for (int i = 0; i < DRAW_CALLS; i += 16) { /* of 16 calls the even ones, and the odd ones */
    const __m512i c0 = _mm512_loadu_si512(at->word[0] + i), c1 = _mm512_loadu_si512(at->word[1] + i);
    const __m512i c3 = _mm512_loadu_si512(at->word[2] + i);
    struct eight even = {{c0, c1, update, c3}};
    struct eight odd = {{_mm512_srli_epi64(c0, 32), _mm512_srli_epi64(c1, 32), update, _mm512_srli_epi64(c3, 32)}};
    uint32_t k0 = (uint32_t)draw->seed, k1 = (uint32_t)(draw->seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < ROUNDS; round++, k0 += WEYL_0, k1 += WEYL_1) {
      const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
      turn(&even, key0, key1);
      turn(&odd, key0, key1);
    }
    for (int w = 0; w < 4; w++)
      _mm512_storeu_si512(word[w] + i, _mm512_mask_blend_epi32(0xAAAA, even.x[w], _mm512_slli_epi64(odd.x[w], 32)));
  }
}

void draw_words(uint32_t word[restrict 4][DRAW_CALLS], const struct draw_places *at, const struct draw *draw) {
  if (__builtin_cpu_supports("avx512f"))
    draw_words_avx512(word, at, draw);
  else
    draw_words_portable(word, at, draw);
}
#else
void draw_words(uint32_t word[restrict 4][DRAW_CALLS], const struct draw_places *at, const struct draw *draw) {
  draw_words_portable(word, at, draw);
}
#endif
