#include "trainer/suggest.h"

#include <string.h>

enum { LONGEST = 64 };

static int least(int a, int b) { return a < b ? a : b; }

/* Edits (insert, delete, replace, swap neighbours) that turn a into b; words
 * longer than 64 bytes are compared by their first 64. */
static int distance_of(const char *a, const char *b) {
  int n = (int)strnlen(a, LONGEST), m = (int)strnlen(b, LONGEST);
  int row[3][LONGEST + 1]; /* distances of a's first i - 2, i - 1, i letters */
  int *before = row[0], *last = row[1], *now = row[2];
  memset(row, 0, sizeof row);
  for (int j = 0; j <= m; j++) last[j] = j;
  for (int i = 1; i <= n; i++) {
    now[0] = i;
    for (int j = 1; j <= m; j++) {
      int replaced = last[j - 1] + (a[i - 1] != b[j - 1]);
      now[j] = least(replaced, least(last[j], now[j - 1]) + 1);
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) now[j] = least(now[j], before[j - 2] + 1);
    }
    int *free_row = before;
    before = last;
    last = now;
    now = free_row;
  }
  return last[m];
}

void suggest_offer(struct suggestion *s, const char *candidate) {
  int length = (int)strnlen(s->word, LONGEST), near = length < 5 ? 1 : 1 + length / 4;
  int distance = distance_of(s->word, candidate);
  /* What was begun rightly and not finished is near as well ("--res"). */
  if (distance > near && length >= 3 && strncmp(s->word, candidate, (size_t)length) == 0) distance = near;
  if (distance > near || distance >= length || (s->best && distance >= s->distance)) return;
  s->best = candidate;
  s->distance = distance;
}
