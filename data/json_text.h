/* One text of a JSON object: what a line of .jsonl holds under a key.
 *
 * The whole line is parsed (RFC 8259; also NaN, Infinity and -Infinity, which
 * Python writes); of a key that comes twice the last counts, as in Python. */
#ifndef FP4D_DATA_JSON_TEXT_H
#define FP4D_DATA_JSON_TEXT_H

#include <stdbool.h>
#include <stdint.h>

enum { JSON_DEPTH = 512 }; /* nesting above it is refused */

struct json_text {
  char *text;     /* where the value goes; as long as the line suffices */
  int64_t length; /* of the value */
  int64_t lone;   /* \u escapes of half a surrogate pair: each is U+FFFD in the text */
  /* After a failure: what is wrong, and before which byte of the line. */
  const char *problem;
  int64_t at;
};

/* False: `problem` says why.  Escapes are decoded; bytes from 0x80 up go through as they are. */
bool json_text_find(const char *line, int64_t length, const char *key, struct json_text *out);

#endif
