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
  int64_t n_spans;
};

enum option_type {
  OPTION_INTEGER, /* int64_t in [low, high] */
  OPTION_NUMBER,  /* double */
  OPTION_BOOL,    /* bool */
  OPTION_WORD,    /* an enum's value by name */
  OPTION_TEXT,    /* char[] */
  OPTION_NONE,    /* bool, made false by the only value `none`; its mapping makes it true */
  OPTION_RANGE,   /* int64_t[2]: FIRST-LAST, or one number for both */
  OPTION_NUMBERS, /* double[]: a list */
  OPTION_ENTRIES, /* an array of structs: a list of mappings, each with the keys of a section of its own */
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
  size_t count, each;        /* lists: where the int64_t number of items lies, bytes of an item */
  const char *entries;       /* OPTION_ENTRIES: the section of an item's keys */
  const char *single;        /* the key that an item gives which is no mapping; NULL: none */
  size_t origin;             /* where an item keeps its struct origin; 0: nowhere */
  const struct option_word *words; /* ends with a NULL word */
  bool name_like;            /* OPTION_TEXT: letters, digits, '.', '_', '-' only */
  bool path_like;            /* with name_like: '/' and ':' too */
  const char *fallback;      /* default, written as a user would; NULL: none */
  const char *fallback_words; /* how a default comes about that is not a constant */
  const char *unit, *help;
};

/* What `offset` counts from. */
enum option_base { OPTION_OF_CONFIG, OPTION_OF_ROUTE, OPTION_OF_ENTRY };

struct option_section {
  const char *name; /* "" for keys at the top level */
  const char *title;
  enum option_base base;
  const struct option *rows;
  int n_rows;
};

/* In the order of documentation and dump. Names that end with [] are of the entries of a list. */
extern const struct option_section option_sections[];
extern const int option_section_number;
enum { OPTION_ROWS = 32, OPTION_SECTIONS = 20 }; /* more than any section has, more than there are */

const struct option_section *option_section(const char *name); /* NULL: none */
const struct option *option_find(const struct option_section *s, const char *key);

/* Every default of a section, into its base; what has none is left as it is. */
void option_take_defaults(const struct option_section *s, void *base);

/* Reads a value as text into base + offset. False: *why says what is wrong, as
 * words that follow "KEY: " (nothing is stored, except of a list its items before the bad one). */
enum { OPTION_WHY = 320 };
bool option_parse(const struct option *o, void *base, const char *text, char why[OPTION_WHY]);

/* Lists (OPTION_NUMBERS, OPTION_ENTRIES; trainer/option_entries.c): empty one; append a number; append an entry
 * with its defaults (NULL: no room); all from text with commas, where an item may be a single value; write. */
void option_list_clear(const struct option *o, void *base);
bool option_number_add(const struct option *o, void *base, const char *text, char why[OPTION_WHY]);
void *option_entry_add(const struct option *o, void *base, char why[OPTION_WHY]);
bool option_list_parse(const struct option *o, void *base, const char *text, char why[OPTION_WHY]);
void option_list_write(const struct option *o, const void *base, FILE *out);

/* Writes the value as YAML that option_parse reads back to the same. */
void option_write(const struct option *o, const void *base, FILE *out);
void option_write_text(const char *text, FILE *out); /* in double quotes */

/* "integer", "number", "one of: a, b" …; "1 .. 4096", "> 0", "" where any. */
void option_type_text(const struct option *o, char *text, size_t size);
void option_range_text(const struct option *o, char *text, size_t size);

/* All sections as plain text or Markdown. */
void options_print(FILE *out, bool markdown);

#endif
