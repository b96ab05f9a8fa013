#include "model/problems.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Room kept for the last line, "… and N more". */
enum { LINE = 512, LAST_LINE = 32 };

void problems_add(struct problems *p, const char *format, ...) {
  char line[LINE];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);

  p->found++;
  if (!p->error) return;
  if (p->found == 1) {
    error_set(p->error, p->code, "%s", line);
    return;
  }
  char *message = p->error->message;
  size_t used = strlen(message);
  if (p->left_out || used + 1 + strlen(line) + LAST_LINE >= sizeof p->error->message) {
    if (p->left_out) used = (size_t)(strrchr(message, '\n') - message);
    p->left_out++;
    (void)snprintf(message + used, sizeof p->error->message - used, "\n... and %d more", p->left_out);
    return;
  }
  (void)snprintf(message + used, sizeof p->error->message - used, "\n%s", line);
}

bool problems_none(const struct problems *p) { return p->found == 0; }
