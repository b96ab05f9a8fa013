/* Errors as values.
 *
 * A function that can fail returns bool (true = done) or a pointer and fills a
 * `struct error *` given by its caller: what failed, on what, and what to do.
 * Nobody but `main` exits.  The code is the exit code that the program ends
 * with, so a fault keeps one name from where it is found to the shell.
 */
#ifndef FP4D_BASE_ERROR_H
#define FP4D_BASE_ERROR_H

#include <stdbool.h>

/* Exit codes (documented in docs/operations.md).  The numbers follow BSD
 * sysexits.h where it has a fitting one; they never change meaning. */
enum error_code {
  ERROR_NONE = 0,           /* done */
  ERROR_USAGE = 64,         /* unknown command, flag or argument */
  ERROR_DATA = 65,          /* corpus, token stream or tokenizer unusable */
  ERROR_DEVICE = 69,        /* backend or device absent, in a fault, or it cannot execute what is asked */
  ERROR_INTERNAL = 70,      /* a defect of fp4d itself */
  ERROR_SYSTEM = 71,        /* memory, threads, a file outside the kinds named here */
  ERROR_CHECKPOINT = 74,    /* checkpoint absent, damaged or not writable */
  ERROR_PREEMPTED = 75,     /* stopped by a signal after a complete checkpoint: start again to go on */
  ERROR_COMMUNICATION = 76, /* launch, MPI or NCCL failed, or a rank died or stalled */
  ERROR_CONFIG = 78,        /* configuration wrong */
  ERROR_DIVERGED = 80       /* a divergence policy said halt */
};

struct error {
  enum error_code code;
  char message[4096]; /* what failed, on what (file, key, line, rank) */
  char hint[512];    /* what to do; may be empty */
};

/* Fills *e with a code and a printf-style message, clears the hint; returns
 * false so that `return error_set(...)` reads well.  `e` may be NULL. */
bool error_set(struct error *e, enum error_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Adds the hint to an error already set; returns false. */
bool error_hint(struct error *e, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts "CONTEXT: " before the message of an error already set; returns false. */
bool error_context(struct error *e, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Like error_set, with ": " and strerror(errno) after the message. */
bool error_errno(struct error *e, enum error_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The short name of a code ("config", "data", …), for records and messages. */
const char *error_code_name(enum error_code code);

#endif
