/* Logging: one line, one rank, on standard error.
 *
 * Lines look like "[r3] warning: text"; the rank prefix is left out when the
 * world is one process.  A line is written with one write(2), so ranks that
 * share a terminal do not mix inside it.  Thread-safe.
 */
#ifndef FP4D_BASE_LOG_H
#define FP4D_BASE_LOG_H

#include "base/error.h"

enum log_level { LOG_ERROR = 0, LOG_WARNING = 1, LOG_INFO = 2, LOG_DEBUG = 3 };

/* Names the rank that this process speaks for, and how much is printed
 * (lines above `level` are dropped).  Before the call: rank 0 of 1, LOG_INFO. */
void log_setup(int rank, int world, enum log_level level);

void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)
#define log_warning(...) log_line(LOG_WARNING, __VA_ARGS__)
#define log_info(...) log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)

/* Prints an error: "error: MESSAGE (HINT)"; a message of several lines (a list
 * of problems) as one such line each.  An error without a message prints
 * nothing: another rank has said it. */
void log_failure(const struct error *e);

#endif
