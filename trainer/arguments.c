#include "trainer/arguments.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/findings.h"
#include "trainer/suggest.h"

/* Takes all positional words that are left. */
static bool is_open_ended(const struct argument *a) { return a->type == ARGUMENT_WORDS || a->type == ARGUMENT_OPTIONAL_WORDS; }

static bool is_positional(const struct argument *a) {
  return a->type == ARGUMENT_WORD || a->type == ARGUMENT_OPTIONAL_WORD || is_open_ended(a);
}

static bool usage(struct error *e, const char *command) {
  e->code = ERROR_USAGE;
  return error_hint(e, "`fp4d help %s` shows what it takes", command);
}

static bool append(struct argument_list *list, const char *name, const char *text, struct error *e) {
  if (list->n == ARGUMENT_LIST) return error_set(e, ERROR_USAGE, "more than %d times %s", ARGUMENT_LIST, name);
  list->item[list->n++] = text;
  return true;
}

static bool store(const struct argument *a, const char *text, void *target, struct error *e) {
  char *at = (char *)target + a->offset, *end, shown[QUOTED];
  switch (a->type) {
    case ARGUMENT_WORD:
    case ARGUMENT_OPTIONAL_WORD:
    case ARGUMENT_TEXT:
      if (*text == 0) return error_set(e, ERROR_USAGE, "%s is empty", a->name);
      memcpy(at, &text, sizeof text);
      return true;
    case ARGUMENT_WORDS:
    case ARGUMENT_OPTIONAL_WORDS:
    case ARGUMENT_REPEATED:
      return append((struct argument_list *)(void *)at, a->name, text, e);
    case ARGUMENT_FLAG: {
      bool yes = true;
      memcpy(at, &yes, sizeof yes);
      return true;
    }
    case ARGUMENT_INTEGER: {
      errno = 0;
      long long value = strtoll(text, &end, 10);
      bool digits = text[0] == '-' || (text[0] >= '0' && text[0] <= '9');
      if (!digits || *end || end == text || errno || value < a->low || value > a->high)
        return error_set(e, ERROR_USAGE, "%s %s: an integer %" PRId64 " .. %" PRId64 " is wanted", a->name,
                         text_quote(text, shown), a->low, a->high);
      int64_t number = value;
      memcpy(at, &number, sizeof number);
      return true;
    }
    case ARGUMENT_NUMBER: {
      double number = strtod(text, &end);
      bool decimal = *text && text[strspn(text, "+-.0123456789eE")] == 0;
      if (!decimal || *end || end == text || !isfinite(number))
        return error_set(e, ERROR_USAGE, "%s %s: a number is wanted", a->name, text_quote(text, shown));
      memcpy(at, &number, sizeof number);
      return true;
    }
  }
  return false;
}

static const struct argument *find_flag(const struct argument *rows, const char *word, size_t length) {
  for (const struct argument *a = rows; a->name; a++)
    if (!is_positional(a) && strlen(a->name) == length && strncmp(a->name, word, length) == 0) return a;
  return NULL;
}

static bool unknown_flag(const struct argument *rows, const char *command, const char *word, struct error *e) {
  char shown[QUOTED];
  struct suggestion near = {word, NULL, 0};
  for (const struct argument *a = rows; a->name; a++)
    if (!is_positional(a)) suggest_offer(&near, a->name);
  text_quote(word, shown);
  if (near.best)
    error_set(e, ERROR_USAGE, "%s: unknown flag %s; did you mean %s?", command, shown, near.best);
  else
    error_set(e, ERROR_USAGE, "%s: unknown flag %s", command, shown);
  return usage(e, command);
}

bool arguments_parse(const struct argument *rows, int argc, char **argv, void *target, struct error *e) {
  const char *command = argv[0];
  const struct argument *next = rows; /* the positional row that comes next */
  bool flags = true, taken = false;   /* `taken`: the open-ended row has one */
  char shown[QUOTED];
  for (int i = 1; i < argc; i++) {
    const char *word = argv[i];
    if (flags && strcmp(word, "--") == 0) {
      flags = false;
    } else if (flags && word[0] == '-' && word[1] != 0) {
      size_t length = strcspn(word, "=");
      const char *value = word[length] == '=' ? word + length + 1 : NULL;
      const struct argument *a = find_flag(rows, word, length);
      if (!a) {
        snprintf(shown, sizeof shown, "%.*s", (int)length, word);
        return unknown_flag(rows, command, shown, e);
      }
      if (a->type == ARGUMENT_FLAG && value) {
        error_set(e, ERROR_USAGE, "%s: %s takes no value", command, a->name);
        return usage(e, command);
      }
      if (a->type != ARGUMENT_FLAG && !value) {
        if (i + 1 == argc) {
          error_set(e, ERROR_USAGE, "%s: %s wants a value (%s)", command, a->name, a->value);
          return usage(e, command);
        }
        value = argv[++i];
      }
      if (!store(a, value, target, e)) return error_context(e, "%s", command) || usage(e, command);
    } else {
      while (next->name && !is_positional(next)) next++;
      if (!next->name) {
        error_set(e, ERROR_USAGE, "%s: one argument too many: %s", command, text_quote(word, shown));
        return usage(e, command);
      }
      if (!store(next, word, target, e)) return error_context(e, "%s", command) || usage(e, command);
      if (is_open_ended(next))
        taken = true;
      else
        next++;
    }
  }
  for (; next->name; next++)
    if (next->type == ARGUMENT_WORD || (next->type == ARGUMENT_WORDS && !taken)) {
      error_set(e, ERROR_USAGE, "%s: %s is missing (%s)", command, next->name, next->help);
      return usage(e, command);
    }
  for (const struct argument *a = rows; a->name; a++) {
    const char *text;
    if (!a->needed) continue;
    memcpy(&text, (const char *)target + a->offset, sizeof text);
    if (text) continue;
    error_set(e, ERROR_USAGE, "%s: %s is missing (%s)", command, a->name, a->help);
    return usage(e, command);
  }
  return true;
}

/* "--set key=value", "CONFIG" */
static int spell(const struct argument *a, char *text, size_t size) {
  return snprintf(text, size, "%s%s%s", a->name, a->value ? " " : "", a->value ? a->value : "");
}

void arguments_synopsis(const struct argument *rows, FILE *out) {
  char text[80];
  for (const struct argument *a = rows; a->name; a++) {
    spell(a, text, sizeof text);
    bool must = a->type == ARGUMENT_WORD || a->type == ARGUMENT_WORDS || a->needed;
    bool more = is_open_ended(a) || a->type == ARGUMENT_REPEATED;
    fprintf(out, " %s%s%s%s", must ? "" : "[", text, must ? "" : "]", more ? "..." : "");
  }
}

/* A bar would end a table's cell. */
static void write_cell(const char *text, FILE *out) {
  for (; *text; text++) {
    if (*text == '|') fputc('\\', out);
    fputc(*text, out);
  }
}

void arguments_describe(const struct argument *rows, FILE *out, bool markdown) {
  char text[80];
  for (const struct argument *a = rows; a->name; a++) {
    spell(a, text, sizeof text);
    if (!markdown) {
      fprintf(out, "  %-24s %s\n", text, a->help);
      continue;
    }
    fputs("| `", out);
    write_cell(text, out);
    fputs("` | ", out);
    write_cell(a->help, out);
    fputs(" |\n", out);
  }
}
