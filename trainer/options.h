/* The options of a run: one table a section, one row a key.
 *
 * A row says everything about its key: where the value lies, type, range,
 * default, unit, help.  Parsing, --set, the resolved dump, `help config` and
 * docs/config.md all walk these rows, so they cannot disagree.
 */
#ifndef FP4D_TRAINER_OPTIONS_H
#define FP4D_TRAINER_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "trainer/config.h"
#include "trainer/findings.h"

/* A route as written, still in words; trainer/config_route.c makes it a struct route. */
enum { ROUTE_WORD = 64 };

struct span_draft {
  char layers[ROUTE_WORD], fprop_x[ROUTE_WORD], fprop_w[ROUTE_WORD], dgrad_dy[ROUTE_WORD], dgrad_w[ROUTE_WORD],
      wgrad_x[ROUTE_WORD], wgrad_dy[ROUTE_WORD], hadamard[ROUTE_WORD], sites[ROUTE_WORD];
  struct origin at;
};

struct route_draft {
  bool mapping; /* false: `name` is a table row's and the rest is not used */
  char name[ROUTE_WORD], attention_qk[ROUTE_WORD], attention_pv[ROUTE_WORD], attention_d_out[ROUTE_WORD];
  char head[ROUTE_WORD];        /* one word, or "" where it is a mapping: */
  double p_slope, p_offset, d_out_lift;
  struct span_draft head_parts; /* (layers and sites are not used) */
  double forward_tail;
  enum dtype activations;
  struct span_draft span[ROUTE_SPANS];
  int n_spans;
};

enum option_type {
  OPTION_INTEGER, /* int64_t in [low, high] */
  OPTION_NUMBER,  /* double */
  OPTION_BOOL,    /* bool */
  OPTION_WORD,    /* an enum's value by name */
  OPTION_CHOICE,  /* char[]: one of the words */
  OPTION_TEXT,    /* char[] */
  OPTION_TEXTS,   /* config.data.sources: a list of texts */
  OPTION_NONE,    /* bool, made false by the only value `none`; its mapping makes it true */
  OPTION_SPANS,   /* route.linears: a list of mappings */
  OPTION_ROUTE    /* route: a name or a mapping */
};

struct option_word {
  const char *word;
  int value;
};

struct option {
  const char *key; /* dots are nested mappings: "rope_scaling.factor".  A text that is also the name of a
                      mapping ("head") is "" where the mapping is given */
  enum option_type type;
  size_t offset, size;       /* in the section's struct */
  int64_t low, high;         /* OPTION_INTEGER */
  double lower, upper;       /* OPTION_NUMBER; infinite = no bound */
  bool lower_open, upper_open;
  const struct option_word *words; /* ends with a NULL word */
  bool name_like;            /* OPTION_TEXT: letters, digits, '.', '_', '-' only */
  bool path_like;            /* with name_like: '/' and ':' too */
  const char *fallback;      /* default, written as a user would; NULL: none */
  const char *fallback_words; /* how a default comes about that is not a constant */
  const char *unit, *help;
};

/* What `offset` counts from. */
enum option_base { OPTION_OF_CONFIG, OPTION_OF_ROUTE, OPTION_OF_SPAN };

struct option_section {
  const char *name; /* "" for keys at the top level */
  const char *title;
  enum option_base base;
  const struct option *rows;
  int n_rows;
};

/* In the order of documentation and dump; the last two are the parts of a
 * route mapping ("route") and of an entry of its linears ("route.linears[]"). */
extern const struct option_section option_sections[];
extern const int option_section_number;
enum { OPTION_ROWS = 32, OPTION_SECTIONS = 16 }; /* more than any section has, more than there are */

const struct option_section *option_section(const char *name); /* NULL: none */
const struct option *option_find(const struct option_section *s, const char *key);

/* Reads a value as text into base + offset. False: *why says what is wrong, as
 * words that follow "KEY: " (nothing is stored). Not for OPTION_SPANS. */
enum { OPTION_WHY = 320 };
bool option_parse(const struct option *o, void *base, const char *text, char why[OPTION_WHY]);

/* Appends one more item to an OPTION_TEXTS value / empties it. */
bool option_texts_add(const struct option *o, void *base, const char *text, char why[OPTION_WHY]);
void option_texts_clear(const struct option *o, void *base);

/* Writes the value as YAML that option_parse reads back to the same. */
void option_write(const struct option *o, const void *base, FILE *out);
void option_write_text(const char *text, FILE *out); /* in double quotes */

/* "integer", "number", "one of: a, b" …; "1 .. 4096", "> 0", "" where any. */
void option_type_text(const struct option *o, char *text, size_t size);
void option_range_text(const struct option *o, char *text, size_t size);

/* All sections as plain text or Markdown. */
void options_print(FILE *out, bool markdown);

#endif
