/* Errors as values: filling, extending and naming them. */
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void fill(struct error *e, enum error_code code, const char *format, va_list arguments) {
  e->code = code;
  e->hint[0] = 0;
  if (vsnprintf(e->message, sizeof e->message, format, arguments) < 0) e->message[0] = 0;
}

bool error_set(struct error *e, enum error_code code, const char *format, ...) {
  if (!e) return false;
  va_list arguments;
  va_start(arguments, format);
  fill(e, code, format, arguments);
  va_end(arguments);
  return false;
}

bool error_hint(struct error *e, const char *format, ...) {
  if (!e) return false;
  va_list arguments;
  va_start(arguments, format);
  if (vsnprintf(e->hint, sizeof e->hint, format, arguments) < 0) e->hint[0] = 0;
  va_end(arguments);
  return false;
}

bool error_context(struct error *e, const char *format, ...) {
  if (!e) return false;
  char message[sizeof e->message];
  memcpy(message, e->message, sizeof message);
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(e->message, sizeof e->message, format, arguments);
  va_end(arguments);
  if (length < 0) length = 0;
  size_t at = (size_t)length < sizeof e->message ? (size_t)length : sizeof e->message - 1;
  size_t room = sizeof e->message - 1 - at;
  size_t separator = room < 2 ? room : 2;
  memcpy(e->message + at, ": ", separator);
  at += separator;
  room -= separator;
  size_t rest = strlen(message);
  if (rest > room) rest = room;
  memcpy(e->message + at, message, rest);
  e->message[at + rest] = 0;
  return false;
}

bool error_errno(struct error *e, enum error_code code, const char *format, ...) {
  int number = errno;
  if (!e) return false;
  va_list arguments;
  va_start(arguments, format);
  fill(e, code, format, arguments);
  va_end(arguments);
  char reason[128];
  const char *text = strerror_r(number, reason, sizeof reason);
  size_t at = strlen(e->message);
  snprintf(e->message + at, sizeof e->message - at, ": %s", text);
  errno = number;
  return false;
}

const char *error_code_name(enum error_code code) {
  switch (code) {
    case ERROR_NONE: return "none";
    case ERROR_USAGE: return "usage";
    case ERROR_DATA: return "data";
    case ERROR_DEVICE: return "device";
    case ERROR_INTERNAL: return "internal";
    case ERROR_SYSTEM: return "system";
    case ERROR_CHECKPOINT: return "checkpoint";
    case ERROR_PREEMPTED: return "preempted";
    case ERROR_COMMUNICATION: return "communication";
    case ERROR_CONFIG: return "config";
    case ERROR_DIVERGED: return "diverged";
  }
  return "unknown";
}
