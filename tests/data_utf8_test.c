/* UTF-8: held against Python's decoder (tests/golden/utf8_replace.txt). */
#include <stdlib.h>

#include "data/utf8.h"
#include "tests/test.h"

static int64_t from_hex(const char *hex, char *out) {
  int64_t n = 0;
  unsigned byte;
  for (; hex[0] != '-' && hex[0]; hex += 2) {
    sscanf(hex, "%2x", &byte);
    out[n++] = (char)(unsigned char)byte;
  }
  return n;
}

TEST(python) {
  FILE *in = fopen("tests/golden/utf8_replace.txt", "r");
  static char hex[2][4096], bytes[2048], expected[2048];
  int lines = 0, most;
  CHECK(in != NULL);
  while (in && fscanf(in, "%4095s %4095s %d", hex[0], hex[1], &most) == 3) {
    lines++;
    const int64_t n = from_hex(hex[0], bytes), size = from_hex(hex[1], expected);
    int64_t replacements;
    char *copy = malloc((size_t)n + 1), *out = malloc((size_t)size + 1); /* exact sizes, for the sanitizer */
    if (!copy || !out) abort();
    memcpy(copy, bytes, (size_t)n);
    char *text = realloc(copy, n ? (size_t)n : 1);
    CHECK_EQ_I64(utf8_repaired_size(text, n, &replacements), size);
    CHECK_EQ_I64(replacements, most);
    if (utf8_repaired_size(text, n, &replacements) == size) {
      CHECK_EQ_I64(utf8_repair(text, n, out), size);
      CHECK(memcmp(out, expected, (size_t)size) == 0);
      CHECK_EQ_I64(utf8_valid(out, size), size);
    }
    CHECK((utf8_valid(text, n) == n) == (most == 0));
    free(text);
    free(out);
  }
  if (in) fclose(in);
  CHECK_EQ_I64(lines, 600);
}

/* Every code point by itself: its length, its value, that all but surrogates are valid. */
TEST(every_character) {
  for (uint32_t c = 0; c <= 0x110000; c++) {
    unsigned char s[4];
    const int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    s[0] = (unsigned char)(n == 1 ? c : (0xf00u >> n & 0xff) | c >> 6 * (n - 1));
    for (int i = 1; i < n; i++) s[i] = (unsigned char)(0x80 | (c >> 6 * (n - 1 - i) & 63));
    const bool good = c < 0x110000 && !(c >= 0xd800 && c < 0xe000);
    if ((utf8_valid(s, n) == n) != good) FAIL("U+%04X", c);
    for (int cut = 1; cut < n; cut++)
      if (utf8_valid(s, cut) != 0) FAIL("U+%04X cut to %d", c, cut);
    int length;
    if (good && (utf8_character(s, &length) != c || length != n)) FAIL("U+%04X read", c);
  }
}

int main(void) {
  RUN(python);
  RUN(every_character);
  return test_report();
}
