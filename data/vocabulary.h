/* What a tokenizer's file says, before tables are made of it: tokens by id,
 * merges, the patterns that cut text into pieces. */
#ifndef FP4D_DATA_VOCABULARY_H
#define FP4D_DATA_VOCABULARY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"

enum token_kind {
  TOKEN_NONE,   /* the id names nothing */
  TOKEN_TEXT,   /* made by merging bytes */
  TOKEN_ADDED,  /* found in the text before it is cut into pieces, always */
  TOKEN_SPECIAL /* the same, only where the caller asks for it */
};

enum {
  TOKEN_BYTES = 4096,         /* the longest token */
  VOCABULARY_IDS = 16777216,  /* the most ids (model.vocab_size ends there) */
  VOCABULARY_PATTERNS = 8
};

struct vocabulary_token {
  int64_t at; /* in vocabulary.text */
  int32_t bytes;
  enum token_kind kind;
};

struct vocabulary_merge {
  int32_t left, right, merged;
};

struct vocabulary_pattern {
  char *regex;
  bool drop_gaps; /* what no match covers is left out; else it is a piece */
};

struct vocabulary {
  char *text;
  int64_t text_used, text_room;
  struct vocabulary_token *token; /* [n] by id */
  int32_t n, room;
  struct vocabulary_merge *merge; /* in order of priority */
  int64_t n_merges, merge_room;
  bool ranked;      /* no merges: any two tokens that make one merge, the lowest id first */
  bool whole_first; /* a piece that is a token is taken without merging */
  bool limits;      /* Meta's lengths: data/tokenizer.c */
  int32_t bos, eos; /* -1: none */
  struct vocabulary_pattern pattern[VOCABULARY_PATTERNS]; /* applied one after the other, each to the pieces of the last */
  int n_patterns;
};

/* The pattern of Llama 3's text, cl100k's too. */
extern const char vocabulary_llama3[];

/* Makes `id` a token.  False: out of memory (ERROR_SYSTEM), or an id out of range or taken
 * (ERROR_DATA, without the place: the reader adds it). */
bool vocabulary_add(struct vocabulary *v, int64_t id, const void *bytes, int64_t n, enum token_kind kind, struct error *e);
bool vocabulary_merge(struct vocabulary *v, int32_t left, int32_t right, int32_t merged, struct error *e);
bool vocabulary_cut(struct vocabulary *v, const char *regex, int64_t n, bool drop_gaps, struct error *e);
void vocabulary_free(struct vocabulary *v);

/* Of all that decides ids. False: out of memory. */
bool vocabulary_digest(const struct vocabulary *v, struct hash *digest, struct error *e);

/* Readers of whole files: text[bytes] with a zero after it; `path` is for messages. */
bool vocabulary_read_ranks(struct vocabulary *v, const char *path, const char *text, int64_t bytes, struct error *e);
bool vocabulary_read_json(struct vocabulary *v, const char *path, const char *text, int64_t bytes, struct error *e);

/* Adds what follows n ranks: Llama 3's 256 specials after its 128,000, two (begin and end of text) after any other. */
bool vocabulary_add_specials(struct vocabulary *v, struct error *e);
/* Ranks of the rank file that has `ids` ids with its specials; -1: none has. */
int32_t vocabulary_ranks(int32_t ids);

#endif
