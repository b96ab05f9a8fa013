/* Philox calls side by side: each is the generator's own call, on this processor and
 * without what it has. */
#include "kernels/cpu/draw.h"

#include "base/philox.h"
#include "tests/test.h"

static uint32_t any(uint64_t key, uint32_t i) { return philox4x32_10(key, philox_counter(9, 1, 2, 3, i)).word[i % 4]; }

static void check_call(uint32_t word[4][DRAW_CALLS], const struct draw_places *at, const struct draw *draw, int i) {
  const struct philox_block counter = {{at->word[0][i], at->word[1][i], draw->update, at->word[2][i]}};
  const struct philox_block want = philox4x32_10(draw->seed, counter);
  for (int w = 0; w < 4; w++)
    if (word[w][i] != want.word[w]) FAIL("call %d, word %d: %08x, not %08x", i, w, word[w][i], want.word[w]);
}

static void check(const struct draw_places *at, const struct draw *draw) {
  uint32_t word[4][DRAW_CALLS], portable[4][DRAW_CALLS];
  draw_words(word, at, draw);
  draw_words_portable(portable, at, draw);
  for (int i = 0; i < DRAW_CALLS; i++) {
    check_call(word, at, draw, i);
    check_call(portable, at, draw, i);
  }
}

TEST(calls_anywhere) {
  const uint64_t key = 20261130;
  uint32_t next = 0;
  for (int round = 0; round < 200; round++) {
    struct draw_places at;
    for (int i = 0; i < 3 * DRAW_CALLS; i++) at.word[i / DRAW_CALLS][i % DRAW_CALLS] = any(key, next++);
    struct draw draw = {.seed = any(key, next), .update = any(key, next + 1)};
    draw.seed = draw.seed << 32 | any(key, next + 2);
    next += 3;
    check(&at, &draw);
  }
}

/* Products and keys whose halves are full or empty. */
TEST(calls_at_the_ends) {
  static const uint32_t end[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
  enum { ENDS = sizeof end / sizeof end[0] };
  for (int s = 0; s < ENDS * ENDS; s++)
    for (int u = 0; u < ENDS; u++) {
      struct draw_places at;
      for (int i = 0; i < DRAW_CALLS; i++) {
        at.word[0][i] = end[i % ENDS];
        at.word[1][i] = end[i / ENDS % ENDS];
        at.word[2][i] = end[(i / ENDS / ENDS + i) % ENDS];
      }
      check(&at, &(struct draw){.seed = (uint64_t)end[s / ENDS] << 32 | end[s % ENDS], .update = end[u]});
    }
}

int main(void) {
  RUN(calls_anywhere);
  RUN(calls_at_the_ends);
  return test_report();
}
