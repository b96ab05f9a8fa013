/* Tables of text: aligned for people, or Markdown. */
#ifndef FP4D_TRAINER_TABLE_H
#define FP4D_TRAINER_TABLE_H

#include <stdbool.h>
#include <stdio.h>

enum { TABLE_CELL = 64 };

struct table {
  int cols, cells, room;
  char (*cell)[TABLE_CELL];
  bool failed; /* out of memory */
};

struct table table_new(int cols);
/* A NaN's sign tells nothing: in words "-nan" and "+nan" of a printed text it becomes a blank, so that
 * columns stay where they are. */
void table_unsign_nan(char *text);

/* The next cell, row by row; the first row is the head. */
void table_add(struct table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The first column to the left, the others to the right. */
void table_print(const struct table *t, FILE *out, bool markdown);
void table_free(struct table *t);

#endif
