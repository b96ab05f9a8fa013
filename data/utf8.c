/* UTF-8: validation and repair. */
#include "data/utf8.h"

#include <stdbool.h>
#include <string.h>

/* Bytes that the sequence beginning at s may have (0: no sequence begins so), and
 * the range of its second byte; every later byte is 80..BF. */
static int sequence(unsigned char lead, unsigned char *low, unsigned char *high) {
  *low = 0x80;
  *high = 0xbf;
  if (lead < 0x80) return 1;
  if (lead < 0xc2) return 0; /* a continuation byte, or overlong */
  if (lead < 0xe0) return 2;
  if (lead < 0xf0) {
    if (lead == 0xe0) *low = 0xa0;  /* overlong below */
    if (lead == 0xed) *high = 0x9f; /* surrogates above */
    return 3;
  }
  if (lead > 0xf4) return 0;
  if (lead == 0xf0) *low = 0x90;
  if (lead == 0xf4) *high = 0x8f; /* U+10FFFF is the last */
  return 4;
}

/* Bytes of s[0..left), left > 0, that belong together: a whole character (*good), or a
 * maximal subpart of an ill-formed one. */
static int64_t step(const unsigned char *s, int64_t left, bool *good) {
  unsigned char low, high;
  const int whole = sequence(s[0], &low, &high);
  *good = whole == 1;
  if (whole <= 1) return 1;
  for (int i = 1; i < whole; i++) {
    if (i >= left || s[i] < low || s[i] > high) return i;
    low = 0x80;
    high = 0xbf;
  }
  *good = true;
  return whole;
}

static int64_t ascii_run(const unsigned char *s, int64_t left) {
  int64_t i = 0;
  for (; left - i >= 8; i += 8) {
    uint64_t word;
    memcpy(&word, s + i, 8);
    if (word & 0x8080808080808080u) break;
  }
  while (i < left && s[i] < 0x80) i++;
  return i;
}

int64_t utf8_valid(const void *text, int64_t bytes) {
  const unsigned char *s = text;
  int64_t i = 0;
  while (i < bytes) {
    bool good = true;
    if (s[i] < 0x80) {
      i += ascii_run(s + i, bytes - i);
      continue;
    }
    const int64_t n = step(s + i, bytes - i, &good);
    if (!good) return i;
    i += n;
  }
  return bytes;
}

enum { REPLACEMENT_BYTES = 3 };
static const char replacement[] = "\xef\xbf\xbd";

int64_t utf8_repaired_size(const void *text, int64_t bytes, int64_t *replacements) {
  const unsigned char *s = text;
  int64_t size = bytes;
  *replacements = 0;
  for (int64_t i = 0; i < bytes;) {
    i += utf8_valid(s + i, bytes - i);
    if (i >= bytes) break;
    bool good;
    const int64_t n = step(s + i, bytes - i, &good);
    ++*replacements;
    size += REPLACEMENT_BYTES - n;
    i += n;
  }
  return size;
}

int64_t utf8_repair(const void *text, int64_t bytes, char *out) {
  const unsigned char *s = text;
  int64_t used = 0;
  for (int64_t i = 0; i < bytes;) {
    const int64_t whole = utf8_valid(s + i, bytes - i);
    memcpy(out + used, s + i, (size_t)whole);
    used += whole;
    i += whole;
    if (i >= bytes) break;
    bool good;
    i += step(s + i, bytes - i, &good);
    memcpy(out + used, replacement, REPLACEMENT_BYTES);
    used += REPLACEMENT_BYTES;
  }
  return used;
}
