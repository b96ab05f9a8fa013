/* Pre-tokenisation by PCRE2. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/pieces.h"

#include <inttypes.h>
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/utf8.h"

enum { JIT_STACK_FIRST = 32 << 10, JIT_STACK_MOST = 64 << 20 };

struct pieces {
  int n;
  struct {
    pcre2_code *code;
    bool jit, drop_gaps;
  } cut[VOCABULARY_PATTERNS];
};

struct pieces_scratch {
  pcre2_match_context *context;
  pcre2_jit_stack *stack;
  pcre2_match_data *found[VOCABULARY_PATTERNS];
};

static bool no_memory(struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory for a tokenizer's patterns"); }

/* ---- patterns of other engines ------------------------------------------------------- */

/* White_Space.  PCRE2's own \s under UCP has U+180E too, as Unicode before 6.3 had. */
static const char white_space[] = "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

static bool refuse(const char *regex, const char *at, const char *what, struct error *e) {
  return error_set(e, ERROR_DATA, "the pattern '%.200s' has at character %td %s, which engines read differently: not supported", regex,
                   at - regex + 1, what);
}

/* An escape at s[0] = '\\'; *s is moved to what follows it. */
static bool rewrite_escape(const char *regex, const char **s, bool in_class, FILE *out, struct error *e) {
  const char *at = *s, c = at[1];
  const char *end = at + 2;
  if (c == 's') {
    fprintf(out, in_class ? "%s" : "[%s]", white_space);
  } else if (c == 'S' && !in_class) {
    fprintf(out, "[^%s]", white_space);
  } else if (c == 'u' && strspn(end, "0123456789abcdefABCDEF") >= 4) {
    fprintf(out, "\\x{%.4s}", end);
    end += 4;
  } else if (c == 'p' || c == 'P' || (c == 'x' && *end == '{')) {
    end = *end == '{' ? strchr(end, '}') : *end ? end : NULL;
    if (!end) return refuse(regex, at, "an unfinished escape", e);
    end++;
    fprintf(out, "%.*s", (int)(end - at), at);
  } else if (c && (strchr("dDrntfx", c) || (c > ' ' && c < 0x7f && !((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'))))) {
    fprintf(out, "\\%c", c);
  } else {
    char what[32];
    snprintf(what, sizeof what, c > ' ' && c < 0x7f ? "\\%c" : "an escape", c);
    return refuse(regex, at, what, e);
  }
  *s = end;
  return true;
}

/* Rewrites regex for PCRE2. */
static bool rewrite(const char *regex, FILE *out, struct error *e) {
  static const char *const groups[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>", NULL};
  bool in_class = false;
  for (const char *s = regex; *s;) {
    if (*s == '\\') {
      if (!rewrite_escape(regex, &s, in_class, out, e)) return false;
      continue;
    }
    if (in_class) {
      if (*s == '[') return refuse(regex, s, "a class in a class", e);
      if (s[0] == s[1] && strchr("&-~", *s)) return refuse(regex, s, "an operation on classes", e);
      in_class = *s != ']';
    } else if (*s == '[') {
      in_class = true;
      const size_t n = s[1] == '^' ? 2 : 1;
      if (s[n] == ']') return refuse(regex, s, "a class that begins with ]", e);
      fprintf(out, "%.*s", (int)n, s);
      s += n;
      continue;
    } else if (*s == '^' || *s == '$') {
      return refuse(regex, s, *s == '^' ? "^" : "$", e);
    } else if (s[0] == '}' && s[1] == '+') {
      return refuse(regex, s, "}+", e);
    } else if (s[0] == '(' && (s[1] == '?' || s[1] == '*')) {
      bool known = false;
      for (int i = 0; groups[i]; i++) known |= strncmp(s, groups[i], strlen(groups[i])) == 0;
      if (!known) return refuse(regex, s, "a group of another kind", e);
    }
    fputc(*s++, out);
  }
  return true;
}

static char *rewritten(const char *regex, struct error *e) {
  char *text = NULL;
  size_t bytes;
  FILE *out = open_memstream(&text, &bytes);
  if (!out) {
    no_memory(e);
    return NULL;
  }
  bool good = rewrite(regex, out, e);
  if ((ferror(out) | fclose(out)) && good) good = no_memory(e);
  if (good) return text;
  free(text);
  return NULL;
}

/* ---- compiling --------------------------------------------------------------------------- */

static pcre2_code *compile(const char *regex, struct error *e) {
  char *text = rewritten(regex, e);
  if (!text) return NULL;
  int why;
  PCRE2_SIZE at;
  pcre2_code *code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED,
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_BACKSLASH_C, &why, &at, NULL);
  if (!code) {
    PCRE2_UCHAR words[256];
    pcre2_get_error_message(why, words, sizeof words);
    error_set(e, ERROR_DATA, "the pattern '%.200s' is not accepted at '%.40s': %s", regex, text + at, (const char *)words);
  }
  free(text);
  return code;
}

struct pieces *pieces_create(const struct vocabulary *v, struct error *e) {
  struct pieces *p = calloc(1, sizeof *p);
  if (!p) {
    no_memory(e);
    return NULL;
  }
  for (p->n = 0; p->n < v->n_patterns; p->n++) {
    pcre2_code *code = compile(v->pattern[p->n].regex, e);
    if (!code) {
      pieces_destroy(p);
      return NULL;
    }
    p->cut[p->n].code = code;
    /* Where no JIT is to be had (no executable memory), the interpreter finds the same, more slowly. */
    p->cut[p->n].jit = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0;
    p->cut[p->n].drop_gaps = v->pattern[p->n].drop_gaps;
  }
  return p;
}

void pieces_destroy(struct pieces *p) {
  if (!p) return;
  for (int i = 0; i < p->n; i++) pcre2_code_free(p->cut[i].code);
  free(p);
}

struct pieces_scratch *pieces_scratch_create(const struct pieces *p, struct error *e) {
  struct pieces_scratch *s = calloc(1, sizeof *s);
  bool good = s && (s->context = pcre2_match_context_create(NULL)) && (s->stack = pcre2_jit_stack_create(JIT_STACK_FIRST, JIT_STACK_MOST, NULL));
  if (good) pcre2_jit_stack_assign(s->context, NULL, s->stack);
  for (int i = 0; good && i < p->n; i++) good = (s->found[i] = pcre2_match_data_create(1, NULL)) != NULL;
  if (good) return s;
  pieces_scratch_destroy(s);
  no_memory(e);
  return NULL;
}

void pieces_scratch_destroy(struct pieces_scratch *s) {
  if (!s) return;
  for (int i = 0; i < VOCABULARY_PATTERNS; i++) pcre2_match_data_free(s->found[i]);
  pcre2_jit_stack_free(s->stack);
  pcre2_match_context_free(s->context);
  free(s);
}

/* ---- cutting ------------------------------------------------------------------------------- */

struct walk {
  const struct pieces *p;
  struct pieces_scratch *s;
  bool (*take)(void *context, const unsigned char *piece, int64_t bytes, struct error *e);
  void *context;
};

static bool walk(const struct walk *w, int level, const unsigned char *text, int64_t bytes, struct error *e);

static bool pass_on(const struct walk *w, int level, const unsigned char *piece, int64_t bytes, struct error *e) {
  return level + 1 < w->p->n ? walk(w, level + 1, piece, bytes, e) : w->take(w->context, piece, bytes, e);
}

static bool gave_up(int why, int64_t at, struct error *e) {
  PCRE2_UCHAR words[256];
  pcre2_get_error_message(why, words, sizeof words);
  return error_set(e, ERROR_DATA, "the tokenizer's pattern gave up at byte %" PRId64 " of a text: %s", at, (const char *)words);
}

/* Matches are anchored at the place reached; where none begins, or an empty one, the
 * character belongs to a gap between matches, which is a piece too. */
static bool walk(const struct walk *w, int level, const unsigned char *text, int64_t bytes, struct error *e) {
  pcre2_match_data *found = w->s->found[level];
  const pcre2_code *code = w->p->cut[level].code;
  const PCRE2_SIZE *range = pcre2_get_ovector_pointer(found);
  const bool jit = w->p->cut[level].jit, drop = w->p->cut[level].drop_gaps;
  int64_t at = 0, gap = 0;
  while (at < bytes) {
    const int rc = jit ? pcre2_jit_match(code, text, (PCRE2_SIZE)bytes, (PCRE2_SIZE)at, PCRE2_NO_UTF_CHECK, found, w->s->context)
                       : pcre2_match(code, text, (PCRE2_SIZE)bytes, (PCRE2_SIZE)at, PCRE2_NO_UTF_CHECK, found, w->s->context);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) return gave_up(rc, at, e);
    const int64_t end = rc < 0 ? at : (int64_t)range[1];
    if (end <= at) {
      int length;
      utf8_character(text + at, &length);
      at += length;
      continue;
    }
    if (gap < at && !drop && !pass_on(w, level, text + gap, at - gap, e)) return false;
    if (!pass_on(w, level, text + at, end - at, e)) return false;
    gap = at = end;
  }
  return gap == at || drop || pass_on(w, level, text + gap, at - gap, e);
}

bool pieces_walk(const struct pieces *p, struct pieces_scratch *s, const unsigned char *text, int64_t bytes,
                 bool (*take)(void *context, const unsigned char *piece, int64_t bytes, struct error *e), void *context,
                 struct error *e) {
  const struct walk w = {p, s, take, context};
  if (bytes == 0) return true;
  return p->n == 0 ? take(context, text, bytes, e) : walk(&w, 0, text, bytes, e);
}
