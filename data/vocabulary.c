/* Vocabularies: growing them, their digest, the specials of rank files. */
#include "data/vocabulary.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char vocabulary_llama3[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
    "\\s+(?!\\S)|\\s+";

static bool no_memory(struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory reading a vocabulary"); }

static int64_t larger(int64_t room, int64_t need) {
  int64_t r = room ? 2 * room : 1024;
  return r < need ? need : r;
}

/* Tokens up to `id` exist. */
static bool reach(struct vocabulary *v, int32_t id) {
  if (id >= v->room) {
    const int32_t room = (int32_t)larger(v->room, (int64_t)id + 1);
    struct vocabulary_token *token = realloc(v->token, (size_t)room * sizeof *token);
    if (!token) return false;
    v->token = token;
    v->room = room;
  }
  while (v->n <= id) v->token[v->n++] = (struct vocabulary_token){.kind = TOKEN_NONE};
  return true;
}

bool vocabulary_add(struct vocabulary *v, int64_t id, const void *bytes, int64_t n, enum token_kind kind, struct error *e) {
  if (id < 0 || id >= VOCABULARY_IDS)
    return error_set(e, ERROR_DATA, "id %" PRId64 " is not in 0 to %d", id, VOCABULARY_IDS - 1);
  if (n < 1 || n > TOKEN_BYTES)
    return error_set(e, ERROR_DATA, "the token of id %" PRId64 " has %" PRId64 " bytes, not 1 to %d", id, n, TOKEN_BYTES);
  if (id < v->n && v->token[id].kind != TOKEN_NONE) return error_set(e, ERROR_DATA, "id %" PRId64 " is given twice", id);
  if (v->text_used + n > v->text_room) {
    const int64_t room = larger(v->text_room, v->text_used + n);
    char *text = realloc(v->text, (size_t)room);
    if (!text) return no_memory(e);
    v->text = text;
    v->text_room = room;
  }
  if (!reach(v, (int32_t)id)) return no_memory(e);
  memcpy(v->text + v->text_used, bytes, (size_t)n);
  v->token[id] = (struct vocabulary_token){.at = v->text_used, .bytes = (int32_t)n, .kind = kind};
  v->text_used += n;
  return true;
}

bool vocabulary_merge(struct vocabulary *v, int32_t left, int32_t right, int32_t merged, struct error *e) {
  if (v->n_merges == v->merge_room) {
    const int64_t room = larger(v->merge_room, v->n_merges + 1);
    struct vocabulary_merge *merge = realloc(v->merge, (size_t)room * sizeof *merge);
    if (!merge) return no_memory(e);
    v->merge = merge;
    v->merge_room = room;
  }
  v->merge[v->n_merges++] = (struct vocabulary_merge){left, right, merged};
  return true;
}

bool vocabulary_cut(struct vocabulary *v, const char *regex, int64_t n, bool drop_gaps, struct error *e) {
  if (v->n_patterns == VOCABULARY_PATTERNS)
    return error_set(e, ERROR_DATA, "more than %d patterns, one after the other", VOCABULARY_PATTERNS);
  char *copy = malloc((size_t)n + 1);
  if (!copy) return no_memory(e);
  memcpy(copy, regex, (size_t)n);
  copy[n] = 0;
  v->pattern[v->n_patterns++] = (struct vocabulary_pattern){.regex = copy, .drop_gaps = drop_gaps};
  return true;
}

void vocabulary_free(struct vocabulary *v) {
  free(v->text);
  free(v->token);
  free(v->merge);
  for (int i = 0; i < v->n_patterns; i++) free(v->pattern[i].regex);
  *v = (struct vocabulary){0};
}

bool vocabulary_digest(const struct vocabulary *v, struct hash *digest, struct error *e) {
  struct hash_state *h = hash_open();
  if (!h) return no_memory(e);
  const int32_t head[] = {1 /* of this way to hash */, v->n, v->ranked, v->whole_first, v->limits, v->bos, v->eos, v->n_patterns};
  hash_feed(h, head, sizeof head);
  for (int i = 0; i < v->n_patterns; i++) {
    const char drop = v->pattern[i].drop_gaps;
    hash_feed(h, v->pattern[i].regex, strlen(v->pattern[i].regex) + 1);
    hash_feed(h, &drop, 1);
  }
  for (int32_t id = 0; id < v->n; id++) {
    const int32_t row[] = {v->token[id].kind, v->token[id].bytes};
    hash_feed(h, row, sizeof row);
    if (v->token[id].bytes) hash_feed(h, v->text + v->token[id].at, (size_t)v->token[id].bytes);
  }
  for (int64_t i = 0; i < v->n_merges; i++) {
    const int32_t row[] = {v->merge[i].left, v->merge[i].right, v->merge[i].merged};
    hash_feed(h, row, sizeof row);
  }
  *digest = hash_close(h);
  return true;
}

/* ---- specials of a rank file ------------------------------------------------------- */

enum { LLAMA3_RANKS = 128000, LLAMA3_SPECIALS = 256, SPECIALS = 2 };

/* Llama 3's name of special i; those of 3.1 stand for the same ids. */
static void llama3_special(int i, char name[64]) {
  static const char *const named[] = {[0] = "begin_of_text", [1] = "end_of_text", [6] = "start_header_id", [7] = "end_header_id", [9] = "eot_id"};
  if (i < 10 && named[i])
    snprintf(name, 64, "<|%s|>", named[i]);
  else
    snprintf(name, 64, "<|reserved_special_token_%d|>", i < 6 ? i - 2 : i < 9 ? i - 4 : i - 5);
}

int32_t vocabulary_ranks(int32_t ids) {
  if (ids == LLAMA3_RANKS + LLAMA3_SPECIALS) return LLAMA3_RANKS;
  return ids < 256 + SPECIALS || ids == LLAMA3_RANKS + SPECIALS ? -1 : ids - SPECIALS;
}

bool vocabulary_add_specials(struct vocabulary *v, struct error *e) {
  const int32_t ranks = v->n;
  const int specials = ranks == LLAMA3_RANKS ? LLAMA3_SPECIALS : SPECIALS;
  v->bos = ranks;
  v->eos = ranks + 1;
  for (int i = 0; i < specials; i++) {
    char name[64];
    llama3_special(i, name);
    if (!vocabulary_add(v, ranks + i, name, (int64_t)strlen(name), TOKEN_SPECIAL, e)) return false;
  }
  return true;
}
