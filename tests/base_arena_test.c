/* Arenas: measuring and laying out agree; a request that does not fit is
 * refused.  Checked arithmetic beside them: both guard sizes. */
#include <stdlib.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/philox.h"
#include "tests/test.h"

#define REQUESTS 200

struct request {
  enum arena_category category;
  int64_t count;
  size_t size;
};

static void make_requests(struct request r[REQUESTS]) {
  for (uint32_t i = 0; i < REQUESTS; i++) {
    struct philox_block b = philox4x32_10(7, (struct philox_block){{i, 0, 0, 0}});
    r[i].category = (enum arena_category)(b.word[0] % ARENA_CATEGORY_COUNT);
    r[i].count = b.word[1] % 5 == 0 ? 0 : b.word[1] % 1999;
    r[i].size = 1 + b.word[2] % 17;
  }
}

TEST(measured_equals_real) {
  struct request r[REQUESTS];
  make_requests(r);
  struct arena measure = arena_measure();
  for (int i = 0; i < REQUESTS; i++)
    CHECK(arena_take(&measure, r[i].category, r[i].count, r[i].size) == NULL);
  CHECK(!measure.exhausted);

  char *block = aligned_alloc(ARENA_ALIGNMENT, measure.used);
  CHECK(block != NULL);
  if (!block) return;
  struct arena real = arena_over(block, measure.used);
  char *end = block; /* of the last allocation: none overlaps another */
  for (int i = 0; i < REQUESTS; i++) {
    char *p = arena_take(&real, r[i].category, r[i].count, r[i].size);
    if (r[i].count == 0) {
      CHECK(p == NULL);
      continue;
    }
    CHECK(p >= end);
    CHECK_EQ_I64((p - block) % ARENA_ALIGNMENT, 0);
    end = p + (size_t)r[i].count * r[i].size;
    CHECK(end <= block + measure.used);
    memset(p, i, (size_t)r[i].count * r[i].size);
  }
  CHECK(!real.exhausted);
  CHECK_EQ_I64(real.used, measure.used);
  size_t sum = 0;
  for (int c = 0; c < ARENA_CATEGORY_COUNT; c++) {
    CHECK_EQ_I64(real.by_category[c], measure.by_category[c]);
    sum += real.by_category[c];
  }
  CHECK_EQ_I64(sum, real.used);
  free(block);
}

TEST(exhaustion) {
  char *block = aligned_alloc(ARENA_ALIGNMENT, 1024);
  CHECK(block != NULL);
  if (!block) return;
  struct arena a = arena_over(block, 1024);
  CHECK(arena_take(&a, ARENA_MASTER, 256, 3) == block);
  CHECK(arena_take(&a, ARENA_MASTER, 257, 1) == NULL);
  CHECK(a.exhausted);
  CHECK_EQ_I64(a.used, 768);
  CHECK_EQ_I64(a.by_category[ARENA_MASTER], 768);
  a = arena_over(block, 1024);
  CHECK(arena_take(&a, ARENA_HEAD, 1024, 1) == block);
  CHECK(!a.exhausted);
  free(block);
}

TEST(overflow) {
  struct arena a = arena_measure();
  CHECK(arena_take(&a, ARENA_HEAD, INT64_MAX, 8) == NULL && a.exhausted);
  a = arena_measure();
  CHECK(arena_take(&a, ARENA_HEAD, -1, 1) == NULL && a.exhausted);
  a = arena_measure();
  arena_take(&a, ARENA_HEAD, INT64_MAX / 4, 4);
  CHECK(!a.exhausted);
  arena_take(&a, ARENA_HEAD, INT64_MAX / 4, 4);
  arena_take(&a, ARENA_HEAD, INT64_MAX / 4, 4);
  CHECK(a.exhausted);
}

TEST(names) {
  for (int c = 0; c < ARENA_CATEGORY_COUNT; c++) {
    const char *name = arena_category_name((enum arena_category)c);
    CHECK(strcmp(name, "unknown") != 0);
    for (int d = 0; d < c; d++) CHECK(strcmp(name, arena_category_name((enum arena_category)d)) != 0);
  }
  CHECK_STR(arena_category_name(ARENA_ADAM_M), "adam_m");
}

TEST(checked_arithmetic) {
  int64_t out = 0;
  CHECK(checked_add(INT64_MAX - 1, 1, &out) && out == INT64_MAX);
  CHECK(!checked_add(INT64_MAX, 1, &out));
  CHECK(!checked_add(INT64_MIN, -1, &out));
  CHECK(checked_mul(INT64_C(3037000499), INT64_C(3037000499), &out) && out == INT64_C(9223372030926249001));
  CHECK(!checked_mul(INT64_C(3037000500), INT64_C(3037000500), &out));
  CHECK(!checked_mul(INT64_MIN, -1, &out));
  CHECK(checked_div_exact(84, 7, &out) && out == 12);
  CHECK(!checked_div_exact(85, 7, &out));
  CHECK(!checked_div_exact(84, 0, &out));
  CHECK(!checked_div_exact(84, -7, &out));
  CHECK_EQ_I64(round_up(0, 16), 0);
  CHECK_EQ_I64(round_up(1, 16), 16);
  CHECK_EQ_I64(round_up(16, 16), 16);
  CHECK_EQ_I64(round_up(17, 16), 32);
  CHECK_EQ_I64(ceil_div(0, 3), 0);
  CHECK_EQ_I64(ceil_div(7, 3), 3);
  CHECK_EQ_I64(ceil_div(9, 3), 3);
}

int main(void) {
  RUN(measured_equals_real);
  RUN(exhaustion);
  RUN(overflow);
  RUN(names);
  RUN(checked_arithmetic);
  return test_report();
}
