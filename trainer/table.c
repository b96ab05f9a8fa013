#include "trainer/table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct table table_new(int cols) { return (struct table){.cols = cols}; }

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
  vsnprintf(t->cell[t->cells++], TABLE_CELL, format, arguments);
  va_end(arguments);
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
