/* Logging: a line is made whole in memory, then written with one write(2). */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static _Atomic int log_rank = 0, log_world = 1, log_limit = LOG_INFO;

void log_setup(int rank, int world, enum log_level level) {
  atomic_store(&log_rank, rank);
  atomic_store(&log_world, world);
  atomic_store(&log_limit, (int)level);
}

/* snprintf's result as the number of characters really there. */
static size_t kept(int length, size_t room) {
  if (length < 0) return 0;
  return (size_t)length < room ? (size_t)length : room - 1;
}

void log_line(enum log_level level, const char *format, ...) {
  static const char *const names[] = {"error: ", "warning: ", "", "debug: "};
  if ((int)level > atomic_load(&log_limit) || (int)level < 0 || (int)level > LOG_DEBUG) return;
  int saved_errno = errno;
  char line[8192];
  size_t n = 0;
  if (atomic_load(&log_world) > 1)
    n += kept(snprintf(line, sizeof line, "[r%d] ", atomic_load(&log_rank)), sizeof line);
  n += kept(snprintf(line + n, sizeof line - n, "%s", names[level]), sizeof line - n);
  va_list arguments;
  va_start(arguments, format);
  size_t text = n;
  n += kept(vsnprintf(line + n, sizeof line - n - 1, format, arguments), sizeof line - n - 1);
  va_end(arguments);
  /* One line stays one line, and text, whatever a file name or a library put in it. */
  for (size_t i = text; i < n; i++) {
    const unsigned char c = (unsigned char)line[i], next = i + 1 < n ? (unsigned char)line[i + 1] : 0;
    if (c < ' ' || c == 0x7f) line[i] = ' ';
    if (c == 0xc2 && next >= 0x80 && next < 0xa0) line[i] = line[i + 1] = ' '; /* U+0080 to U+009F: control characters, too */
  }
  line[n++] = '\n';
  size_t done = 0;
  while (done < n) {
    ssize_t wrote = write(STDERR_FILENO, line + done, n - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) break; /* nowhere left to say so */
    done += (size_t)wrote;
  }
  errno = saved_errno;
}

void log_failure(const struct error *e) {
  for (const char *line = e->message; *line;) {
    size_t length = strcspn(line, "\n");
    const char *next = line + length + (line[length] == '\n');
    bool last = *next == 0;
    if (last && e->hint[0])
      log_line(LOG_ERROR, "%.*s (%s)", (int)length, line, e->hint);
    else
      log_line(LOG_ERROR, "%.*s", (int)length, line);
    line = next;
  }
}
