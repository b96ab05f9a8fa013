/* A list of problems in one error: one line each, as many as fit. */
#ifndef FP4D_MODEL_PROBLEMS_H
#define FP4D_MODEL_PROBLEMS_H

#include "base/error.h"

struct problems {
  struct error *error; /* may be NULL */
  enum error_code code;
  int found, left_out;
};

/* Adds a line. The first one sets the error; those that do not fit are counted. */
void problems_add(struct problems *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* True when there is none; else the error is complete. */
bool problems_none(const struct problems *p);

#endif
