/* Rank files: a line is BASE64 SPACE RANK; the ranks are 0 to lines - 1, in any order.
 * (tiktoken's .tiktoken files, Meta's tokenizer.model) */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/vocabulary.h"

/* 0 to 63, or -1. */
static int digit_of(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Standard base64 with its padding; -1 where it is not that. */
static int64_t decode_base64(const char *text, int64_t n, unsigned char *out) {
  int64_t used = 0;
  if (n == 0 || n % 4 != 0) return -1;
  for (int64_t i = 0; i < n; i += 4) {
    const int pads = i + 4 < n ? 0 : text[n - 1] != '=' ? 0 : text[n - 2] != '=' ? 1 : 2;
    uint32_t group = 0;
    for (int k = 0; k < 4; k++) {
      const int digit = k >= 4 - pads ? 0 : digit_of(text[i + k]);
      if (digit < 0) return -1;
      group = group << 6 | (uint32_t)digit;
    }
    if (pads > 0 && group & ((1u << 8 * pads) - 1)) return -1; /* bits that no byte has */
    for (int k = 0; k < 3 - pads; k++) out[used++] = (unsigned char)(group >> (16 - 8 * k));
  }
  return used;
}

/* A decimal number that ends the line; -1: it is none. */
static int64_t read_rank(const char *s, const char *end) {
  int64_t rank = 0;
  if (s == end || end - s > 9 || (*s == '0' && end - s > 1)) return -1;
  for (; s < end; s++) {
    if (*s < '0' || *s > '9') return -1;
    rank = 10 * rank + (*s - '0');
  }
  return rank;
}

/* `most`: ranks are below it. */
static bool read_line(struct vocabulary *v, const char *line, const char *end, int64_t most, struct error *e) {
  const char *space = memchr(line, ' ', (size_t)(end - line));
  unsigned char token[TOKEN_BYTES + 3];
  if (!space) return error_set(e, ERROR_DATA, "no line of a rank file (BASE64 SPACE RANK)");
  if ((space - line) / 4 * 3 > TOKEN_BYTES + 2) return error_set(e, ERROR_DATA, "the token is longer than %d bytes", TOKEN_BYTES);
  const int64_t n = decode_base64(line, space - line, token);
  if (n <= 0) return error_set(e, ERROR_DATA, "the token is not base64");
  const int64_t rank = read_rank(space + 1, end);
  if (rank < 0) return error_set(e, ERROR_DATA, "the rank is not a decimal number");
  if (rank >= most) return error_set(e, ERROR_DATA, "rank %" PRId64 " in a file that is too short to have all ranks below it", rank);
  return vocabulary_add(v, rank, token, n, TOKEN_TEXT, e);
}

bool vocabulary_read_ranks(struct vocabulary *v, const char *path, const char *text, int64_t bytes, struct error *e) {
  const char *end = text + bytes;
  const int64_t shortest = (int64_t)sizeof "AA== 0"; /* of a line; its newline in the place of the zero */
  int64_t lines = 0;
  for (const char *line = text; line < end;) {
    const char *newline = memchr(line, '\n', (size_t)(end - line)), *stop = newline ? newline : end;
    lines++;
    if (!read_line(v, line, stop, bytes / shortest + 1, e)) {
      error_context(e, "%s:%" PRId64, path, lines);
      if (lines == 1) error_hint(e, "a tokenizer is \"bytes\", a rank file (tiktoken's, Llama 3's) or a byte-level BPE tokenizer.json");
      return false;
    }
    line = stop + 1;
  }
  if (v->n != lines)
    return error_set(e, ERROR_DATA, "%s: %" PRId64 " lines, but ranks up to %d: some are missing", path, lines, v->n - 1);
  v->ranked = v->whole_first = v->limits = true;
  return vocabulary_cut(v, vocabulary_llama3, (int64_t)strlen(vocabulary_llama3), false, e) && vocabulary_add_specials(v, e);
}
