/* UTF-8: which bytes are text, and what stands for those that are not. */
#ifndef FP4D_DATA_UTF8_H
#define FP4D_DATA_UTF8_H

#include <stdint.h>

/* Bytes of the longest prefix of text[0..bytes) that is whole, valid UTF-8
 * (no surrogates, no overlong forms, nothing above U+10FFFF); `bytes` when all is. */
int64_t utf8_valid(const void *text, int64_t bytes);

/* The policy "replace": each maximal subpart of an ill-formed sequence (Unicode
 * 3.9, U+FFFD substitution; what Python's errors="replace" and WHATWG's decoders
 * do) becomes U+FFFD.  utf8_repaired_size gives the bytes that utf8_repair writes
 * to `out` (which must not overlap text) and counts the replacements. */
int64_t utf8_repaired_size(const void *text, int64_t bytes, int64_t *replacements);
int64_t utf8_repair(const void *text, int64_t bytes, char *out);

/* The character that begins at s in valid UTF-8; *length is its bytes, 1 to 4. */
static inline uint32_t utf8_character(const unsigned char *s, int *length) {
  *length = s[0] < 0x80 ? 1 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
  uint32_t c = *length == 1 ? s[0] : s[0] & (0x7fu >> *length);
  for (int i = 1; i < *length; i++) c = c << 6 | (s[i] & 0x3fu);
  return c;
}

#endif
