/* XXH3-128: published check values, streaming, the order-independent sum. */
#include <stdlib.h>

#include "base/hash.h"
#include "base/philox.h"
#include "tests/test.h"

static void check_text(struct hash h, const char *expected) {
  char text[HASH_TEXT];
  hash_text(h, text);
  CHECK_STR(text, expected);
}

TEST(known_answers) {
  /* As `xxhsum -H128` and python-xxhash print them. */
  check_text(hash_bytes("", 0), "99aa06d3014798d86001c324468d497f");
  check_text(hash_bytes("a", 1), "a96faf705af16834e6c632b61e964e1f");
  check_text(hash_bytes("abc", 3), "06b05ab6733a618578af5f94892f3950");
}

TEST(streaming_equals_whole) {
  enum { BYTES = 100003 };
  unsigned char *data = malloc(BYTES);
  CHECK(data != NULL);
  if (!data) return;
  for (uint32_t i = 0; i < BYTES; i++) data[i] = (unsigned char)(i * 2654435761u >> 24);
  for (uint32_t length = 0; length < BYTES; length = length * 3 + 1) {
    struct hash_state *s = hash_open();
    CHECK(s != NULL);
    if (!s) break;
    uint32_t at = 0, step = 1;
    while (at < length) {
      uint32_t n = step < length - at ? step : length - at;
      hash_feed(s, data + at, n);
      at += n;
      step = step * 5 % 8191 + 1;
    }
    hash_feed(s, NULL, 0);
    CHECK(hash_equal(hash_close(s), hash_bytes(data, length)));
  }
  free(data);
}

TEST(sum_ignores_order) {
  struct hash h[64], forward = {0, 0}, backward = {0, 0};
  for (uint32_t i = 0; i < 64; i++) h[i] = hash_bytes(&i, sizeof i);
  for (int i = 0; i < 64; i++) forward = hash_sum(forward, h[i]);
  for (int i = 63; i >= 0; i--) backward = hash_sum(backward, h[i]);
  CHECK(hash_equal(forward, backward));
  struct hash halves = {0, 0}, odd = {0, 0};
  for (int i = 0; i < 64; i += 2) halves = hash_sum(halves, h[i]);
  for (int i = 1; i < 64; i += 2) odd = hash_sum(odd, h[i]);
  CHECK(hash_equal(hash_sum(halves, odd), forward));
  /* The carry crosses from the low word. */
  struct hash one = hash_sum((struct hash){.high = 1, .low = UINT64_MAX}, (struct hash){.high = 2, .low = 2});
  CHECK(hash_equal(one, (struct hash){.high = 4, .low = 1}));
}

TEST(text_and_equality) {
  check_text((struct hash){.high = 0x0123456789abcdef, .low = 0xfedcba9876543210},
             "0123456789abcdeffedcba9876543210");
  CHECK(!hash_equal((struct hash){1, 2}, (struct hash){1, 3}));
  struct hash h = {7, 7};
  CHECK(hash_parse("0123456789abcdeffedcba9876543210", &h) && hash_equal(h, (struct hash){0x0123456789abcdef, 0xfedcba9876543210}));
  static const char *const wrong[] = {NULL, "", "0123456789abcdeffedcba987654321", "0123456789abcdeffedcba98765432100", "0123456789Abcdeffedcba9876543210",
                                      "0123456789abcdef fedcba9876543210", "-123456789abcdeffedcba9876543210", "0x23456789abcdeffedcba9876543210"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) CHECK(!hash_parse(wrong[i], &h));
  CHECK(hash_equal(h, (struct hash){0x0123456789abcdef, 0xfedcba9876543210})); /* as it was */
  CHECK(!hash_equal((struct hash){0, 2}, (struct hash){1, 2}));
}

int main(void) {
  RUN(known_answers);
  RUN(streaming_equals_whole);
  RUN(sum_ignores_order);
  RUN(text_and_equality);
  return test_report();
}
