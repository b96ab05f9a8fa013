#include "trainer/table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct table table_new(int cols) { return (struct table){.cols = cols}; }

void table_unsign_nan(char *text) {
  for (char *at = text; (at = strstr(at, "nan")) != NULL; at += 3) {
    const bool sign = at > text && (at[-1] == '-' || at[-1] == '+') && (at - 1 == text || at[-2] == ' ');
    if (sign && (at[3] == '\0' || at[3] == ' ' || at[3] == '%')) at[-1] = ' ';
  }
}

void table_add(struct table *t, const char *format, ...) {
  if (t->cells == t->room) {
    const int room = t->room ? 2 * t->room : 64;
    void *bigger = realloc(t->cell, (size_t)room * TABLE_CELL);
    t->failed |= bigger == NULL;
    if (!bigger) return;
    t->cell = bigger;
    t->room = room;
  }
  va_list arguments;
  va_start(arguments, format);
  char *cell = t->cell[t->cells++];
  vsnprintf(cell, TABLE_CELL, format, arguments);
  va_end(arguments);
  table_unsign_nan(cell);
  if (cell[0] == ' ') memmove(cell, cell + 1, strlen(cell));
}

static int width_of(const struct table *t, int col) {
  int most = 0;
  for (int i = col; i < t->cells; i += t->cols) {
    const int n = (int)strlen(t->cell[i]);
    if (n > most) most = n;
  }
  return most;
}

void table_print(const struct table *t, FILE *out, bool markdown) {
  for (int i = 0; i + t->cols <= t->cells; i += t->cols) {
    for (int c = 0; c < t->cols; c++) {
      const int width = width_of(t, c);
      fprintf(out, "%s%*s", markdown ? c ? " | " : "| " : "  ", c ? width : -width, t->cell[i + c]);
    }
    fputs(markdown ? " |\n" : "\n", out);
    for (int c = 0; markdown && i == 0 && c < t->cols; c++) fprintf(out, "%s%s", c ? " | " : "| ", c ? "--:" : ":--");
    if (markdown && i == 0) fputs(" |\n", out);
  }
}

void table_free(struct table *t) {
  free(t->cell);
  memset(t, 0, sizeof *t);
}
