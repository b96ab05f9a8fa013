/* The random words of stochastic rounding, for many places at once.
 *
 * Philox's 32x32-bit products are most of what a draw costs.  AVX-512 has an
 * instruction for eight of them that compilers do not take (they take the product of
 * 64 bits, three times as slow), so it is asked for by name.
 */
#ifndef FP4D_KERNELS_CPU_DRAW_H
#define FP4D_KERNELS_CPU_DRAW_H

#include "kernels/kernels.h"

enum { DRAW_CALLS = 64 };

/* Words 0, 1 and 3 of each call's counter; word 2 is the update. */
struct draw_places {
  uint32_t word[3][DRAW_CALLS];
};

/* Word w of call i, philox4x32_10 by draw->seed, to word[w][i]. */
void draw_words(uint32_t word[4][DRAW_CALLS], const struct draw_places *at, const struct draw *draw);

/* The same without what one processor has: what the other is tested against. */
void draw_words_portable(uint32_t word[4][DRAW_CALLS], const struct draw_places *at, const struct draw *draw);

#endif
