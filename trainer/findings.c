#include "trainer/findings.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LINE = 640, MOST = 50 };

static void add_line(struct findings *p, struct origin at, const char *key, const char *words, size_t length) {
  char line[LINE], place[300] = "";
  if (at.set)
    snprintf(place, sizeof place, "--set%s", key ? " " : ": ");
  else if (at.file && at.line > 0)
    snprintf(place, sizeof place, "%.240s:%d:%d: ", at.file, at.line, at.column);
  else if (at.file)
    snprintf(place, sizeof place, "%.240s: ", at.file);
  int n = snprintf(line, sizeof line, "%s%.80s%s%.*s", place, key ? key : "", key ? ": " : "", (int)length, words);
  if (n < 0) return;
  size_t size = (size_t)n < sizeof line ? (size_t)n : sizeof line - 1;
  p->count++;
  if (p->hidden > 0 || p->count > MOST || p->used + size + 2 > sizeof p->text) {
    p->hidden++;
    return;
  }
  if (p->used) p->text[p->used++] = '\n';
  memcpy(p->text + p->used, line, size);
  p->used += size;
  p->text[p->used] = 0;
}

void findings_add(struct findings *p, struct origin at, const char *key, const char *format, ...) {
  char words[4096];
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(words, sizeof words, format, arguments);
  va_end(arguments);
  if (n < 0) words[0] = 0;
  for (const char *w = words;;) {
    size_t length = strcspn(w, "\n");
    if (length > 0) add_line(p, at, key, w, length);
    if (w[length] == 0) break;
    w += length + 1;
  }
}

bool findings_report(const struct findings *p, struct error *e) {
  if (p->count == 0) return true;
  if (p->hidden > 0)
    return error_set(e, ERROR_CONFIG, "%s\nand %d more problem%s", p->text, p->hidden, p->hidden > 1 ? "s" : "");
  return error_set(e, ERROR_CONFIG, "%s", p->text);
}

char *text_quote(const char *text, char out[QUOTED]) {
  size_t n = 0;
  const size_t room = QUOTED - 8; /* an escape, "…'" and the zero */
  out[n++] = '\'';
  for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
    if (n >= room - 4) {
      while (n > 1 && ((unsigned char)out[n - 1] & 0xC0) == 0x80) n--; /* not inside a character */
      if (n > 1 && ((unsigned char)out[n - 1] & 0xC0) == 0xC0) n--;
      memcpy(out + n, "...", 3);
      n += 3;
      break;
    }
    if (*c < 0x20 || *c == 0x7F)
      n += (size_t)snprintf(out + n, 5, "\\x%02X", *c);
    else
      out[n++] = (char)*c;
  }
  out[n++] = '\'';
  out[n] = 0;
  return out;
}
