/* Every problem of a configuration, collected and reported at once. */
#ifndef FP4D_TRAINER_FINDINGS_H
#define FP4D_TRAINER_FINDINGS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

/* Where a value was written. */
struct origin {
  const char *file; /* NULL: nowhere in particular */
  int line, column; /* from 1; 0 = the file as a whole */
  bool set;         /* by --set; the rest does not count */
};

struct findings {
  int count;
  int hidden; /* of them, how many `text` has no room for */
  size_t used;
  char text[3900]; /* one line each; fits an error's message with the last line below */
};

/* Adds "FILE:LINE:COLUMN: KEY: words" (or "FILE: KEY: words", "--set KEY:
 * words"); `key` may be NULL. Words of several lines become as many problems. */
void findings_add(struct findings *p, struct origin at, const char *key, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* False with *e = ERROR_CONFIG holding all lines (and "and N more problems"
 * where there was no room) unless there were none. */
bool findings_report(const struct findings *p, struct error *e);

/* What a user wrote, for a message: in single quotes, shortened, unprintable
 * bytes as \xNN. Returns `out`. */
enum { QUOTED = 96 };
char *text_quote(const char *text, char out[QUOTED]);

#endif
