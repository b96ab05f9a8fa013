/* One text of a JSON object, by a parser that keeps nothing else. */
#include "data/json_text.h"

#include <string.h>

struct scanner {
  const unsigned char *at, *end, *begin;
  const char *problem;
};

static bool fail(struct scanner *s, const char *problem) {
  if (!s->problem) s->problem = problem;
  return false;
}

static void skip_blanks(struct scanner *s) {
  while (s->at < s->end && (*s->at == ' ' || *s->at == '\t' || *s->at == '\r' || *s->at == '\n')) s->at++;
}

static bool take(struct scanner *s, unsigned char c) {
  if (s->at == s->end || *s->at != c) return false;
  s->at++;
  return true;
}

static bool take_word(struct scanner *s, const char *word) {
  const size_t n = strlen(word);
  if ((size_t)(s->end - s->at) < n || memcmp(s->at, word, n) != 0) return false;
  s->at += n;
  return true;
}

/* ---- strings --------------------------------------------------------------- */

static int hex_digit(unsigned char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/* The four digits after \u at p; -1: they are not there. */
static int32_t hex4(const struct scanner *s, const unsigned char *p) {
  if (s->end - p < 4) return -1;
  int32_t value = 0;
  for (int i = 0; i < 4; i++) {
    const int digit = hex_digit(p[i]);
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

static unsigned char *put_utf8(unsigned char *out, uint32_t c) {
  if (c < 0x80) {
    *out++ = (unsigned char)c;
  } else if (c < 0x800) {
    *out++ = (unsigned char)(0xc0 | c >> 6);
    *out++ = (unsigned char)(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    *out++ = (unsigned char)(0xe0 | c >> 12);
    *out++ = (unsigned char)(0x80 | (c >> 6 & 0x3f));
    *out++ = (unsigned char)(0x80 | (c & 0x3f));
  } else {
    *out++ = (unsigned char)(0xf0 | c >> 18);
    *out++ = (unsigned char)(0x80 | (c >> 12 & 0x3f));
    *out++ = (unsigned char)(0x80 | (c >> 6 & 0x3f));
    *out++ = (unsigned char)(0x80 | (c & 0x3f));
  }
  return out;
}

/* After "\u": the character, of one escape or of a pair. */
static bool take_unicode(struct scanner *s, uint32_t *c, int64_t *lone) {
  const int32_t first = hex4(s, s->at);
  if (first < 0) return fail(s, "\\u wants four hexadecimal digits");
  s->at += 4;
  *c = (uint32_t)first;
  if (first < 0xd800 || first > 0xdfff) return true;
  if (first < 0xdc00 && s->end - s->at >= 6 && s->at[0] == '\\' && s->at[1] == 'u') {
    const int32_t second = hex4(s, s->at + 2);
    if (second >= 0xdc00 && second <= 0xdfff) {
      s->at += 6;
      *c = 0x10000 + (((uint32_t)first & 0x3ff) << 10 | ((uint32_t)second & 0x3ff));
      return true;
    }
  }
  *c = 0xfffd;
  ++*lone;
  return true;
}

/* One escape, after the backslash, to *out. */
static bool take_escape(struct scanner *s, unsigned char **out, int64_t *lone) {
  static const char letters[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
  if (s->at == s->end) return fail(s, "the string does not end");
  const unsigned char c = *s->at++;
  if (c == 'u') {
    uint32_t character;
    if (!take_unicode(s, &character, lone)) return false;
    *out = put_utf8(*out, character);
    return true;
  }
  const char *letter = c ? strchr(letters, c) : NULL;
  if (!letter) return fail(s, "an unknown escape");
  *(*out)++ = (unsigned char)values[letter - letters];
  return true;
}

static bool is_plain(unsigned char c) { return c >= 0x20 && c != '"' && c != '\\'; }

/* Past the bytes of a string that stand for themselves: eight at a time by the
 * test that finds a byte below 0x20, or equal to the quote or the backslash. */
static const unsigned char *skip_plain(const unsigned char *p, const unsigned char *end) {
  const uint64_t ones = 0x0101010101010101u, high = 0x8080808080808080u;
  while (end - p >= 8) {
    uint64_t w;
    memcpy(&w, p, 8);
    const uint64_t quote = w ^ ones * '"', slash = w ^ ones * '\\';
    if ((((w - ones * 0x20) & ~w) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash)) & high) break;
    p += 8;
  }
  while (p < end && is_plain(*p)) p++;
  return p;
}

/* A string, after its first quote.  out NULL: it is only passed over. */
static bool take_string(struct scanner *s, struct json_text *out) {
  unsigned char *to = out ? (unsigned char *)out->text : NULL, nowhere[8];
  int64_t lone = 0;
  for (;;) {
    const unsigned char *plain = s->at;
    s->at = skip_plain(s->at, s->end);
    if (to) {
      memcpy(to, plain, (size_t)(s->at - plain));
      to += s->at - plain;
    }
    if (s->at == s->end) return fail(s, "the string does not end");
    const unsigned char c = *s->at;
    if (c < 0x20) return fail(s, "a control character in a string");
    s->at++;
    if (c == '"') break;
    unsigned char *passed = nowhere;
    if (!take_escape(s, to ? &to : &passed, &lone)) return false;
  }
  if (out) {
    out->length = to - (unsigned char *)out->text;
    out->lone = lone;
  }
  return true;
}

/* A string, after its first quote: is it `key`? */
static bool take_key(struct scanner *s, const char *key, bool *same) {
  const size_t n = strlen(key);
  size_t matched = 0;
  *same = true;
  for (;;) {
    if (s->at == s->end) return fail(s, "the string does not end");
    unsigned char decoded[8], *end = decoded;
    int64_t lone = 0;
    const unsigned char c = *s->at;
    if (c < 0x20) return fail(s, "a control character in a string");
    s->at++;
    if (c == '"') break;
    if (c != '\\')
      *end++ = c;
    else if (!take_escape(s, &end, &lone))
      return false;
    for (const unsigned char *p = decoded; p < end; p++) {
      if (matched >= n || (unsigned char)key[matched] != *p || lone) *same = false;
      matched++;
    }
  }
  if (matched != n) *same = false;
  return true;
}

/* ---- other values ---------------------------------------------------------- */

static bool take_digits(struct scanner *s) {
  const unsigned char *from = s->at;
  while (s->at < s->end && *s->at >= '0' && *s->at <= '9') s->at++;
  return s->at > from || fail(s, "a digit is wanted");
}

static bool take_number(struct scanner *s) {
  const bool minus = take(s, '-');
  if (take_word(s, "Infinity")) return true;
  if (!minus && take_word(s, "NaN")) return true;
  if (!take(s, '0') && !take_digits(s)) return false;
  if (take(s, '.') && !take_digits(s)) return false;
  if (take(s, 'e') || take(s, 'E')) {
    if (!take(s, '+')) take(s, '-');
    return take_digits(s);
  }
  return true;
}

static bool take_scalar(struct scanner *s) {
  if (s->at == s->end) return fail(s, "a value is missing");
  switch (*s->at) {
    case '"': s->at++; return take_string(s, NULL);
    case 't': return take_word(s, "true") || fail(s, "no value begins like this");
    case 'f': return take_word(s, "false") || fail(s, "no value begins like this");
    case 'n': return take_word(s, "null") || fail(s, "no value begins like this");
    case 'I':
    case 'N':
    case '-':
    case '0': case '1': case '2': case '3': case '4':
    case '5': case '6': case '7': case '8': case '9': return take_number(s);
    default: return fail(s, "no value begins like this");
  }
}

/* The key and the colon before a member's value. */
static bool take_name(struct scanner *s, const char *key, bool *same) {
  skip_blanks(s);
  if (!take(s, '"')) return fail(s, "a key in quotes is wanted");
  if (!take_key(s, key, same)) return false;
  skip_blanks(s);
  if (!take(s, ':')) return fail(s, "a colon is wanted after the key");
  skip_blanks(s);
  return true;
}

/* Any value, passed over; the kinds of the containers that are open lie in `open`. */
static bool pass_value(struct scanner *s) {
  char open[JSON_DEPTH];
  int depth = 0;
  for (;;) {
    skip_blanks(s);
    bool begun = false, same;
    if (s->at < s->end && (*s->at == '{' || *s->at == '[')) {
      if (depth == JSON_DEPTH) return fail(s, "nested too deep");
      open[depth++] = (char)*s->at++;
      skip_blanks(s);
      const char close = open[depth - 1] == '{' ? '}' : ']';
      begun = !take(s, (unsigned char)close);
      if (begun && open[depth - 1] == '{' && !take_name(s, "", &same)) return false;
      if (!begun) depth--;
    } else if (!take_scalar(s)) {
      return false;
    }
    while (!begun && depth > 0) { /* a value has ended: what comes after it in its container? */
      skip_blanks(s);
      if (take(s, ',')) {
        if (open[depth - 1] == '{' && !take_name(s, "", &same)) return false;
        begun = true;
      } else if (take(s, open[depth - 1] == '{' ? '}' : ']')) {
        depth--;
      } else {
        return fail(s, open[depth - 1] == '{' ? "a comma or } is wanted" : "a comma or ] is wanted");
      }
    }
    if (depth == 0) return true;
  }
}

/* The members of the outermost object.  *found: 0 absent, 1 a text, -1 something else. */
static bool take_members(struct scanner *s, const char *key, struct json_text *out, int *found) {
  skip_blanks(s);
  if (take(s, '}')) return true;
  for (;;) {
    bool same;
    if (!take_name(s, key, &same)) return false;
    if (same && take(s, '"')) {
      *found = 1;
      if (!take_string(s, out)) return false;
    } else {
      if (same) *found = -1;
      if (!pass_value(s)) return false;
    }
    skip_blanks(s);
    if (take(s, '}')) return true;
    if (!take(s, ',')) return fail(s, "a comma or } is wanted");
  }
}

bool json_text_find(const char *line, int64_t length, const char *key, struct json_text *out) {
  const unsigned char *begin = (const unsigned char *)line;
  struct scanner s = {.at = begin, .begin = begin, .end = begin + length};
  int found = 0;
  skip_blanks(&s);
  bool ok = take(&s, '{') ? take_members(&s, key, out, &found) : fail(&s, "the line is no JSON object");
  if (ok) skip_blanks(&s);
  if (ok && s.at != s.end) ok = fail(&s, "something follows the object");
  out->at = s.at - begin;
  if (ok && found == 0) ok = fail(&s, "the key is absent");
  if (ok && found < 0) ok = fail(&s, "the key's value is not a text");
  out->problem = s.problem;
  return ok;
}
