/* Values of options: from text, to text.
 *
 * Numbers follow YAML 1.2's core schema without its surprises: no octal, no
 * hexadecimal, no infinity, no separators; an integer may be written 1e6 or
 * 1.5e3 when that is exact.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/options.h"
#include "trainer/suggest.h"

static bool no(char why[OPTION_WHY], const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool no(char why[OPTION_WHY], const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (vsnprintf(why, OPTION_WHY, format, arguments) < 0) why[0] = 0;
  va_end(arguments);
  return false;
}

/* ---- numbers ------------------------------------------------------------ */

/* sign digits [. digits] [e sign digits], as written. */
struct decimal {
  bool negative;
  const char *whole, *fraction;
  int n_whole, n_fraction;
  long exponent;
};

static int digits(const char *s) { return (int)strspn(s, "0123456789"); }

static bool decimal_scan(const char *s, struct decimal *d) {
  *d = (struct decimal){0};
  if (*s == '+' || *s == '-') d->negative = *s++ == '-';
  d->whole = s;
  d->n_whole = digits(s);
  s += d->n_whole;
  if (*s == '.') {
    d->fraction = ++s;
    d->n_fraction = digits(s);
    s += d->n_fraction;
  }
  if (d->n_whole + d->n_fraction == 0) return false;
  if (*s == 'e' || *s == 'E') {
    const char *exponent = ++s;
    if (*s == '+' || *s == '-') s++;
    int n = digits(s);
    if (n == 0) return false;
    d->exponent = n > 6 ? (*exponent == '-' ? -999999 : 999999) : strtol(exponent, NULL, 10);
    s += n;
  }
  return *s == 0;
}

/* What is written is no number: says why, where a known habit is behind it. */
static bool not_number(const char *text, const char *wanted, char why[OPTION_WHY]) {
  char shown[QUOTED];
  text_quote(text, shown);
  const char *s = text + (*text == '+' || *text == '-');
  if (*text == 0 || strcmp(text, "~") == 0 || strcmp(text, "null") == 0) return no(why, "has no value; %s is wanted", wanted);
  if (s[0] == '0' && (s[1] == 'x' || s[1] == 'X' || s[1] == 'o' || s[1] == 'O' || s[1] == 'b' || s[1] == 'B') && s[2])
    return no(why, "%s is not decimal; only decimal numbers are accepted", shown);
  if (strcasecmp(s, ".inf") == 0 || strcasecmp(s, "inf") == 0 || strcasecmp(s, "infinity") == 0 ||
      strcasecmp(s, ".nan") == 0 || strcasecmp(s, "nan") == 0)
    return no(why, "%s is not accepted; a finite number is wanted", shown);
  if (digits(s) > 0 && s[strspn(s, "0123456789_,")] == 0)
    return no(why, "%s is not a number; write it without separators", shown);
  return no(why, "%s is not a number; %s is wanted", shown, wanted);
}

/* 010 is eight to YAML 1.1 and ten to YAML 1.2. */
static bool leading_zero(const struct decimal *d) { return d->n_whole > 1 && d->whole[0] == '0'; }

static bool integer_parse(const struct option *o, const char *text, int64_t *out, char why[OPTION_WHY]) {
  struct decimal d;
  char shown[QUOTED], range[96];
  text_quote(text, shown);
  option_range_text(o, range, sizeof range);
  if (!decimal_scan(text, &d)) return not_number(text, "an integer", why);
  if (leading_zero(&d))
    return no(why, "%s begins with 0, which some read as octal; write the decimal number without it", shown);

  /* digits with the point moved by the exponent; behind it only zeros */
  long point = d.n_whole + d.exponent;
  int64_t value = 0;
  bool overflow = false, inexact = false, zero = true;
  int n = d.n_whole + d.n_fraction;
  for (int i = 0; i < n; i++) {
    int digit = (i < d.n_whole ? d.whole[i] : d.fraction[i - d.n_whole]) - '0';
    if (digit != 0) zero = false;
    if (i >= point)
      inexact |= digit != 0;
    else
      overflow |= __builtin_mul_overflow(value, (int64_t)10, &value) ||
                  __builtin_add_overflow(value, (int64_t)digit, &value);
  }
  for (long i = n; i < point && !zero && !overflow; i++) overflow |= __builtin_mul_overflow(value, (int64_t)10, &value);
  if (inexact) return no(why, "%s is not an integer", shown);
  if (overflow) return no(why, "%s does not fit 64 bits%s%s", shown, range[0] ? "; the range is " : "", range);
  if (d.negative) value = -value;
  if (value < o->low || value > o->high) return no(why, "%s is out of range: %s", shown, range);
  *out = value;
  return true;
}

static bool number_parse(const struct option *o, const char *text, double *out, char why[OPTION_WHY]) {
  struct decimal d;
  char shown[QUOTED], range[96];
  text_quote(text, shown);
  option_range_text(o, range, sizeof range);
  if (!decimal_scan(text, &d)) return not_number(text, "a number", why);
  if (leading_zero(&d)) return no(why, "%s begins with 0, which some read as octal; write it without", shown);
  errno = 0;
  double value = strtod(text, NULL);
  if (isinf(value)) return no(why, "%s is too large for a double; the range is %s", shown, range);
  if (errno == ERANGE) return no(why, "%s is too small for a double; write 0 if that is meant", shown);
  if (value < o->lower || value > o->upper || (o->lower_open && value <= o->lower) ||
      (o->upper_open && value >= o->upper))
    return no(why, "%s is out of range: %s", shown, range);
  *out = value == 0 ? 0 : value; /* no negative zero */
  return true;
}

/* FIRST-LAST or one number. */
static bool range_parse(const struct option *o, const char *text, int64_t out[2], char why[OPTION_WHY]) {
  char part[2][24], shown[QUOTED];
  const size_t first = strspn(text, "0123456789"), dash = text[first] == '-', last = strlen(text + first + dash);
  text_quote(text, shown);
  if (first == 0 || (!dash && last > 0) || (dash && last == 0) || first >= sizeof part[0] || last >= sizeof part[1])
    return no(why, "%s is neither FIRST-LAST nor a number", shown);
  snprintf(part[0], sizeof part[0], "%.*s", (int)first, text);
  snprintf(part[1], sizeof part[1], "%s", dash ? text + first + 1 : part[0]);
  for (int i = 0; i < 2; i++)
    if (!integer_parse(o, part[i], &out[i], why)) return false;
  if (out[0] > out[1]) return no(why, "%s: the first is above the last", shown);
  return true;
}

/* ---- words and texts ----------------------------------------------------- */

static bool bool_parse(const char *text, bool *out, char why[OPTION_WHY]) {
  char shown[QUOTED];
  if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0) {
    *out = text[0] == 't';
    return true;
  }
  static const char *const yes[] = {"yes", "on", "y", "1", "true", NULL}, *const none[] = {"no", "off", "n", "0", "false", NULL};
  const char *meant = NULL;
  for (int i = 0; yes[i]; i++)
    if (strcasecmp(text, yes[i]) == 0) meant = "true";
  for (int i = 0; none[i]; i++)
    if (strcasecmp(text, none[i]) == 0) meant = "false";
  text_quote(text, shown);
  if (meant) return no(why, "%s is not accepted; write %s", shown, meant);
  return no(why, "%s is neither true nor false", shown);
}

static const struct option_word *word_find(const struct option *o, const char *text, char why[OPTION_WHY]) {
  struct suggestion near = {text, NULL, 0};
  char all[160] = "", shown[QUOTED];
  for (const struct option_word *w = o->words; w->word; w++) {
    if (strcmp(w->word, text) == 0) return w;
    suggest_offer(&near, w->word);
    size_t n = strlen(all);
    snprintf(all + n, sizeof all - n, "%s%s", n ? ", " : "", w->word);
  }
  text_quote(text, shown);
  if (near.best)
    no(why, "%s is not one of: %s; did you mean %s?", shown, all, near.best);
  else
    no(why, "%s is not one of: %s", shown, all);
  return NULL;
}

/* Length of the UTF-8 character at s; 0 where there is none. */
static int utf8_length(const unsigned char *s) {
  if (s[0] < 0x80) return 1;
  int n = s[0] >= 0xC2 && s[0] <= 0xDF ? 2 : (s[0] & 0xF0) == 0xE0 ? 3 : s[0] >= 0xF0 && s[0] <= 0xF4 ? 4 : 0;
  for (int i = 1; i < n; i++)
    if ((s[i] & 0xC0) != 0x80) return 0;
  if (n == 3 && ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F))) return 0;
  if (n == 4 && ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F))) return 0;
  return n;
}

static bool text_check(const struct option *o, const char *text, size_t size, char why[OPTION_WHY]) {
  char shown[QUOTED];
  text_quote(text, shown);
  size_t length = strlen(text);
  if (length >= size) return no(why, "%s is %zu bytes long; at most %zu fit", shown, length, size - 1);
  for (const unsigned char *s = (const unsigned char *)text; *s;) {
    int n = utf8_length(s);
    if (n == 0) return no(why, "is not text in UTF-8");
    bool control = *s < 0x20 || *s == 0x7F || (n == 2 && s[0] == 0xC2 && s[1] < 0xA0) ||
                   (n == 3 && s[0] == 0xE2 && s[1] == 0x80 && (s[2] == 0xA8 || s[2] == 0xA9)) ||
                   (n == 3 && s[0] == 0xEF && ((s[1] == 0xBF && s[2] >= 0xBE) || (s[1] == 0xBB && s[2] == 0xBF)));
    if (control) return no(why, "%s holds a control character", shown);
    s += n;
  }
  if (o->name_like && length > 0) {
    bool odd = text[0] == '.' || text[0] == '-';
    for (const char *s = text; *s; s++)
      odd |= !((*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || (*s >= '0' && *s <= '9') || strchr("._-", *s) ||
               (o->path_like && (*s == '/' || *s == ':')));
    if (odd)
      return no(why, "%s: only letters, digits, '.', '_'%s and '-' are accepted, a letter or digit first", shown,
                o->path_like ? ", '/', ':'" : "");
  }
  return true;
}

static void text_store(char *to, size_t size, const char *text) {
  memset(to, 0, size);
  memcpy(to, text, strlen(text));
}

/* ---- by row --------------------------------------------------------------- */

bool option_parse(const struct option *o, void *base, const char *text, char why[OPTION_WHY]) {
  char *at = (char *)base + o->offset;
  char shown[QUOTED];
  switch (o->type) {
    case OPTION_INTEGER: {
      int64_t value = 0;
      if (!integer_parse(o, text, &value, why)) return false;
      memcpy(at, &value, sizeof value);
      return true;
    }
    case OPTION_NUMBER: {
      double value = 0;
      if (!number_parse(o, text, &value, why)) return false;
      memcpy(at, &value, sizeof value);
      return true;
    }
    case OPTION_BOOL: {
      bool value = false;
      if (!bool_parse(text, &value, why)) return false;
      memcpy(at, &value, sizeof value);
      return true;
    }
    case OPTION_WORD: {
      const struct option_word *w = word_find(o, text, why);
      if (!w) return false;
      unsigned value = (unsigned)w->value; /* enums are as wide as int here */
      _Static_assert(sizeof(enum schedule_kind) == sizeof value, "an enum is not as wide as int");
      memcpy(at, &value, sizeof value);
      return true;
    }
    case OPTION_TEXT:
      if (!text_check(o, text, o->size, why)) return false;
      text_store(at, o->size, text);
      return true;
    case OPTION_NONE: {
      if (strcmp(text, "none") != 0)
        return no(why, "%s: a mapping of its keys is wanted, or none", text_quote(text, shown));
      bool value = false;
      memcpy(at, &value, sizeof value);
      return true;
    }
    case OPTION_RANGE: {
      int64_t value[2];
      if (!range_parse(o, text, value, why)) return false;
      memcpy(at, value, sizeof value);
      return true;
    }
    case OPTION_NUMBERS:
    case OPTION_ENTRIES:
      return option_list_parse(o, base, text, why);
    case OPTION_ROUTE: { /* by name */
      struct route_draft *draft = base;
      struct option name = {.type = OPTION_TEXT, .size = sizeof draft->name, .name_like = true, .path_like = true};
      if (*text == 0) return no(why, "has no value; the name of a route or a mapping is wanted");
      if (!text_check(&name, text, sizeof draft->name, why)) return false;
      memset(draft, 0, sizeof *draft);
      text_store(draft->name, sizeof draft->name, text);
      return true;
    }
  }
  return no(why, "has an unknown type");
}

void option_write_text(const char *text, FILE *out) {
  fputc('"', out);
  for (; *text; text++) {
    if (*text == '"' || *text == '\\') fputc('\\', out);
    fputc(*text, out);
  }
  fputc('"', out);
}

/* The shortest decimal that reads back to the same double. */
static void write_double(double value, FILE *out) {
  char text[40];
  if (value == floor(value) && fabs(value) < 1e15) {
    fprintf(out, "%.0f", value);
    return;
  }
  for (int precision = 1; precision <= 17; precision++) {
    snprintf(text, sizeof text, "%.*g", precision, value);
    if (strtod(text, NULL) == value) break;
  }
  fputs(text, out);
}

void option_write(const struct option *o, const void *base, FILE *out) {
  const char *at = (const char *)base + o->offset;
  switch (o->type) {
    case OPTION_INTEGER: {
      int64_t value;
      memcpy(&value, at, sizeof value);
      fprintf(out, "%" PRId64, value);
      break;
    }
    case OPTION_NUMBER: {
      double value;
      memcpy(&value, at, sizeof value);
      write_double(value, out);
      break;
    }
    case OPTION_BOOL: {
      bool value;
      memcpy(&value, at, sizeof value);
      fputs(value ? "true" : "false", out);
      break;
    }
    case OPTION_WORD: {
      unsigned value;
      memcpy(&value, at, sizeof value);
      for (const struct option_word *w = o->words; w->word; w++)
        if ((unsigned)w->value == value) fputs(w->word, out);
      break;
    }
    case OPTION_TEXT:
      option_write_text(at, out);
      break;
    case OPTION_RANGE: {
      int64_t value[2];
      memcpy(value, at, sizeof value);
      fprintf(out, "\"%" PRId64 "-%" PRId64 "\"", value[0], value[1]);
      break;
    }
    case OPTION_NUMBERS:
    case OPTION_ENTRIES:
      option_list_write(o, base, out);
      break;
    case OPTION_NONE:
      fputs("none", out);
      break;
    case OPTION_ROUTE:
      break; /* config_dump.c writes routes */
  }
}

/* ---- described ------------------------------------------------------------ */

void option_type_text(const struct option *o, char *text, size_t size) {
  static const char *const names[] = {[OPTION_INTEGER] = "integer", [OPTION_NUMBER] = "number", [OPTION_BOOL] = "bool",
                                      [OPTION_WORD] = "word", [OPTION_TEXT] = "text",
                                      [OPTION_RANGE] = "range", [OPTION_NONE] = "mapping or none",
                                      [OPTION_NUMBERS] = "list of numbers", [OPTION_ENTRIES] = "list of mappings",
                                      [OPTION_ROUTE] = "name or mapping"};
  if (o->type == OPTION_ENTRIES && o->single)
    snprintf(text, size, "list of mappings or of their `%s`", o->single);
  else
    snprintf(text, size, "%s", names[o->type]);
}

void option_range_text(const struct option *o, char *text, size_t size) {
  text[0] = 0;
  if (o->type == OPTION_INTEGER) {
    if (o->high == INT64_MAX)
      snprintf(text, size, ">= %" PRId64, o->low);
    else
      snprintf(text, size, "%" PRId64 " .. %" PRId64, o->low, o->high);
  } else if (o->type == OPTION_NUMBER) {
    if (o->lower_open || o->upper_open)
      snprintf(text, size, "%s %g, %s %g", o->lower_open ? ">" : ">=", o->lower, o->upper_open ? "<" : "<=", o->upper);
    else
      snprintf(text, size, "%g .. %g", o->lower, o->upper);
  } else if (o->type == OPTION_BOOL) {
    snprintf(text, size, "true, false");
  } else if (o->type == OPTION_WORD) {
    for (const struct option_word *w = o->words; w->word; w++) {
      size_t n = strlen(text);
      snprintf(text + n, size - n, "%s%s", n ? ", " : "", w->word);
    }
  } else if (o->type == OPTION_TEXT) {
    snprintf(text, size, o->path_like ? "up to %zu letters, digits, . _ - / :" : o->name_like ? "up to %zu letters, digits, . _ -" : "up to %zu bytes",
             o->size - 1);
  } else if (o->type == OPTION_RANGE) {
    snprintf(text, size, "FIRST-LAST");
  } else if (o->type == OPTION_NUMBERS || o->type == OPTION_ENTRIES) {
    snprintf(text, size, "up to %zu", o->size / o->each);
  }
}
