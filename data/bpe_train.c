/* Learning a rank file. */
#include "data/bpe_train.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "data/pieces.h"
#include "data/utf8.h"
#include "data/vocabulary.h"

/* Distinct strings of bytes, numbered in order of arrival. */
struct strings {
  struct string {
    int64_t at, count;
    int32_t bytes;
  } * string;
  int64_t n, room;
  char *pool;
  int64_t used, pool_room;
  int64_t *slot; /* number + 1; 0: free */
  int64_t slots; /* a power of two */
};

struct bpe_trainer {
  struct pieces *pieces;
  struct pieces_scratch *scratch;
  struct strings words;
  int64_t taken; /* pieces, each time */
};

static bool no_memory(struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory learning a vocabulary"); }

/* Makes room for `need` elements of `size` bytes. */
static bool reserve(void *array, int64_t *room, int64_t need, size_t size) {
  if (need <= *room) return true;
  int64_t larger = *room ? 2 * *room : 16;
  if (larger < need) larger = need;
  void *old;
  memcpy(&old, array, sizeof old);
  void *grown = realloc(old, (size_t)larger * size);
  if (!grown) return false;
  memcpy(array, &grown, sizeof grown);
  *room = larger;
  return true;
}

/* ---- strings ----------------------------------------------------------------------------- */

static void strings_free(struct strings *s) {
  free(s->string);
  free(s->pool);
  free(s->slot);
  *s = (struct strings){0};
}

/* Where the string is or would be. */
static int64_t strings_slot(const struct strings *s, const char *bytes, int32_t n) {
  int64_t i = (int64_t)hash_bytes(bytes, (size_t)n).low & (s->slots - 1);
  for (; s->slot[i]; i = (i + 1) & (s->slots - 1)) {
    const struct string *one = s->string + s->slot[i] - 1;
    if (one->bytes == n && memcmp(s->pool + one->at, bytes, (size_t)n) == 0) break;
  }
  return i;
}

static bool strings_widen(struct strings *s) {
  const int64_t slots = s->slots ? 2 * s->slots : 1024;
  int64_t *slot = calloc((size_t)slots, sizeof *slot);
  if (!slot) return false;
  free(s->slot);
  s->slot = slot;
  s->slots = slots;
  for (int64_t i = 0; i < s->n; i++) s->slot[strings_slot(s, s->pool + s->string[i].at, s->string[i].bytes)] = i + 1;
  return true;
}

/* The number of the string, which is added with count 0 where it is new; -1: out of memory. */
static int64_t strings_add(struct strings *s, const char *bytes, int32_t n) {
  if (2 * (s->n + 1) > s->slots && !strings_widen(s)) return -1;
  const int64_t i = strings_slot(s, bytes, n);
  if (s->slot[i]) return s->slot[i] - 1;
  if (!reserve(&s->string, &s->room, s->n + 1, sizeof *s->string) || !reserve(&s->pool, &s->pool_room, s->used + n, 1)) return -1;
  memcpy(s->pool + s->used, bytes, (size_t)n);
  s->string[s->n] = (struct string){.at = s->used, .bytes = n};
  s->used += n;
  s->slot[i] = ++s->n;
  return s->n - 1;
}

/* ---- text --------------------------------------------------------------------------------- */

struct bpe_trainer *bpe_trainer_open(struct error *e) {
  struct bpe_trainer *t = calloc(1, sizeof *t);
  struct vocabulary v = {0};
  if (!t) {
    no_memory(e);
    return NULL;
  }
  const bool good = vocabulary_cut(&v, vocabulary_llama3, (int64_t)strlen(vocabulary_llama3), false, e) && (t->pieces = pieces_create(&v, e)) &&
                    (t->scratch = pieces_scratch_create(t->pieces, e));
  vocabulary_free(&v);
  if (good) return t;
  bpe_trainer_close(t);
  return NULL;
}

void bpe_trainer_close(struct bpe_trainer *t) {
  if (!t) return;
  pieces_destroy(t->pieces);
  pieces_scratch_destroy(t->scratch);
  strings_free(&t->words);
  free(t);
}

static bool count_piece(void *context, const unsigned char *piece, int64_t bytes, struct error *e) {
  struct bpe_trainer *t = context;
  t->taken++;
  if (bytes > BPE_TRAIN_PIECE) return true;
  const int64_t word = strings_add(&t->words, (const char *)piece, (int32_t)bytes);
  if (word < 0) return no_memory(e);
  t->words.string[word].count++;
  return true;
}

bool bpe_trainer_feed(struct bpe_trainer *t, const void *text, int64_t bytes, struct error *e) {
  const int64_t good = utf8_valid(text, bytes);
  if (good < bytes) return error_set(e, ERROR_DATA, "byte %" PRId64 " of a text is not UTF-8", good);
  return pieces_walk(t->pieces, t->scratch, text, bytes, count_piece, t, e);
}

void bpe_trainer_counts(const struct bpe_trainer *t, int64_t *distinct, int64_t *pieces) {
  *distinct = t->words.n;
  *pieces = t->taken;
}

/* ---- learning -------------------------------------------------------------------------------- */

struct pair {
  int32_t left, right;
  int64_t count;
  int32_t *word; /* those that may have it */
  int64_t words, room;
};

struct candidate {
  int64_t count; /* when it was offered */
  int32_t left, right;
  int64_t pair;
};

struct learning {
  const struct strings *words;
  struct strings tokens; /* token id = number */
  int32_t *ids;          /* of all words, one after the other; a word's begin where its bytes do */
  int32_t *length;       /* ids of a word */
  int32_t *looked;       /* the merge that looked at the word last */
  struct pair *pair;
  int64_t pairs, pair_room;
  int64_t *slot; /* pair number + 1 */
  int64_t slots;
  struct candidate *heap;
  int64_t candidates, heap_room;
  int64_t *changed; /* pairs that the merge made more frequent */
  int64_t changes, changed_room;
};

static void learning_free(struct learning *l) {
  for (int64_t i = 0; i < l->pairs; i++) free(l->pair[i].word);
  strings_free(&l->tokens);
  free(l->ids);
  free(l->length);
  free(l->looked);
  free(l->pair);
  free(l->slot);
  free(l->heap);
  free(l->changed);
}

static int64_t pair_slot(const struct learning *l, int32_t left, int32_t right) {
  const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
  int64_t i = (int64_t)(key * 0x9e3779b97f4a7c15u >> 20) & (l->slots - 1);
  for (; l->slot[i]; i = (i + 1) & (l->slots - 1)) {
    const struct pair *p = l->pair + l->slot[i] - 1;
    if (p->left == left && p->right == right) break;
  }
  return i;
}

/* The number of the pair, made where it is new; -1: out of memory. */
static int64_t pair_of(struct learning *l, int32_t left, int32_t right) {
  if (2 * (l->pairs + 1) > l->slots) {
    const int64_t slots = l->slots ? 2 * l->slots : 4096;
    int64_t *slot = calloc((size_t)slots, sizeof *slot);
    if (!slot) return -1;
    free(l->slot);
    l->slot = slot;
    l->slots = slots;
    for (int64_t i = 0; i < l->pairs; i++) l->slot[pair_slot(l, l->pair[i].left, l->pair[i].right)] = i + 1;
  }
  const int64_t i = pair_slot(l, left, right);
  if (l->slot[i]) return l->slot[i] - 1;
  if (!reserve(&l->pair, &l->pair_room, l->pairs + 1, sizeof *l->pair)) return -1;
  l->pair[l->pairs] = (struct pair){.left = left, .right = right};
  l->slot[i] = ++l->pairs;
  return l->pairs - 1;
}

/* More frequent, then lower ids. */
static bool before(const struct candidate *a, const struct candidate *b) {
  if (a->count != b->count) return a->count > b->count;
  return a->left != b->left ? a->left < b->left : a->right < b->right;
}

static bool offer(struct learning *l, int64_t pair) {
  const struct pair *p = l->pair + pair;
  if (p->count < 2) return true;
  if (!reserve(&l->heap, &l->heap_room, l->candidates + 1, sizeof *l->heap)) return false;
  const struct candidate c = {p->count, p->left, p->right, pair};
  int64_t i = l->candidates++;
  for (int64_t parent; i > 0 && before(&c, l->heap + (parent = (i - 1) / 2)); i = parent) l->heap[i] = l->heap[parent];
  l->heap[i] = c;
  return true;
}

static struct candidate take_first(struct learning *l) {
  const struct candidate first = l->heap[0], last = l->heap[--l->candidates];
  int64_t i = 0;
  for (int64_t child; (child = 2 * i + 1) < l->candidates; i = child) {
    if (child + 1 < l->candidates && before(l->heap + child + 1, l->heap + child)) child++;
    if (!before(l->heap + child, &last)) break;
    l->heap[i] = l->heap[child];
  }
  l->heap[i] = last;
  return first;
}

/* Adds `times` to the pairs of a word.  `fresh` >= 0: pairs with that token get the word and are noted as changed. */
static bool count_word(struct learning *l, int32_t word, int64_t times, int32_t fresh) {
  const int32_t *id = l->ids + l->words->string[word].at;
  for (int32_t i = 0; i + 1 < l->length[word]; i++) {
    const int64_t number = pair_of(l, id[i], id[i + 1]);
    if (number < 0) return false;
    struct pair *p = l->pair + number;
    p->count += times;
    if (id[i] != fresh && id[i + 1] != fresh) continue;
    if (p->words > 0 && p->word[p->words - 1] == word) continue;
    if (!reserve(&p->word, &p->room, p->words + 1, sizeof *p->word)) return false;
    p->word[p->words++] = word;
    if (!reserve(&l->changed, &l->changed_room, l->changes + 1, sizeof *l->changed)) return false;
    l->changed[l->changes++] = number;
  }
  return true;
}

/* Puts `merged` in the place of left, right in a word. */
static void rewrite_word(struct learning *l, int32_t word, int32_t left, int32_t right, int32_t merged) {
  int32_t *id = l->ids + l->words->string[word].at, n = 0;
  for (int32_t i = 0; i < l->length[word]; i++) {
    const bool both = id[i] == left && i + 1 < l->length[word] && id[i + 1] == right;
    id[n++] = both ? merged : id[i];
    i += both;
  }
  l->length[word] = n;
}

static bool merge(struct learning *l, int64_t pair, int32_t merged, int32_t number) {
  const int32_t left = l->pair[pair].left, right = l->pair[pair].right;
  l->changes = 0;
  for (int64_t i = 0; i < l->pair[pair].words; i++) {
    const int32_t word = l->pair[pair].word[i];
    const int64_t times = l->words->string[word].count;
    if (l->looked[word] == number) continue;
    l->looked[word] = number;
    if (!count_word(l, word, -times, -1)) return false;
    rewrite_word(l, word, left, right, merged);
    if (!count_word(l, word, times, merged)) return false;
  }
  free(l->pair[pair].word);
  l->pair[pair].word = NULL;
  l->pair[pair].words = l->pair[pair].room = 0;
  for (int64_t i = 0; i < l->changes; i++)
    if (!offer(l, l->changed[i])) return false;
  return true;
}

static bool begin(struct learning *l) {
  const struct strings *w = l->words;
  l->ids = malloc((size_t)(w->used + 1) * sizeof *l->ids);
  l->length = malloc((size_t)(w->n + 1) * sizeof *l->length);
  l->looked = calloc((size_t)(w->n + 1), sizeof *l->looked);
  if (!l->ids || !l->length || !l->looked || w->n > INT32_MAX) return false;
  for (int i = 0; i < 256; i++) {
    const char byte = (char)(unsigned char)i;
    if (strings_add(&l->tokens, &byte, 1) != i) return false;
  }
  for (int64_t i = 0; i < w->used; i++) l->ids[i] = (unsigned char)w->pool[i];
  for (int32_t word = 0; word < (int32_t)w->n; word++) {
    l->length[word] = w->string[word].bytes;
    if (!count_word(l, word, w->string[word].count, -1)) return false;
  }
  /* Which words have a pair: after the pairs are known, so that each list is made at once. */
  for (int32_t word = 0; word < (int32_t)w->n; word++) {
    const int32_t *id = l->ids + w->string[word].at;
    for (int32_t i = 0; i + 1 < l->length[word]; i++) {
      struct pair *p = l->pair + pair_of(l, id[i], id[i + 1]);
      if (p->words > 0 && p->word[p->words - 1] == word) continue;
      if (!reserve(&p->word, &p->room, p->words + 1, sizeof *p->word)) return false;
      p->word[p->words++] = word;
    }
  }
  for (int64_t i = 0; i < l->pairs; i++)
    if (!offer(l, i)) return false;
  return true;
}

/* Tokens until there are `ranks`.  A merge may make a token that other merges made before: then it is that one. */
static bool learn(struct learning *l, int32_t ranks, struct error *e) {
  if (!begin(l)) return no_memory(e);
  for (int32_t number = 1; l->tokens.n < ranks; number++) {
    if (l->candidates == 0)
      return error_set(e, ERROR_DATA, "the text has no more pairs that occur twice: it is enough for %" PRId64 " ids", l->tokens.n + 2);
    const struct candidate c = take_first(l);
    if (l->pair[c.pair].count != c.count) {
      number--;
      if (!offer(l, c.pair)) return no_memory(e);
      continue;
    }
    char both[2 * BPE_TRAIN_PIECE];
    const struct string left = l->tokens.string[c.left], right = l->tokens.string[c.right];
    memcpy(both, l->tokens.pool + left.at, (size_t)left.bytes);
    memcpy(both + left.bytes, l->tokens.pool + right.at, (size_t)right.bytes);
    const int64_t merged = strings_add(&l->tokens, both, left.bytes + right.bytes);
    if (merged < 0 || !merge(l, c.pair, (int32_t)merged, number)) return no_memory(e);
  }
  return true;
}

/* ---- the file ---------------------------------------------------------------------------------- */

static void write_base64(FILE *out, const unsigned char *s, int32_t n) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (int32_t i = 0; i < n; i += 3) {
    const uint32_t group = (uint32_t)s[i] << 16 | (i + 1 < n ? (uint32_t)s[i + 1] << 8 : 0) | (i + 2 < n ? s[i + 2] : 0u);
    for (int k = 0; k < 4; k++) fputc(i + k > n ? '=' : digits[group >> (18 - 6 * k) & 63], out);
  }
}

bool bpe_trainer_ranks(struct bpe_trainer *t, int32_t vocab_size, char **text, int64_t *bytes, struct error *e) {
  const int32_t ranks = vocabulary_ranks(vocab_size);
  *text = NULL;
  if (ranks < 256) return error_set(e, ERROR_USAGE, "a rank file cannot have %d ids: at least 258, and not 128002", vocab_size);
  struct learning l = {.words = &t->words};
  size_t size = 0;
  bool good = learn(&l, ranks, e);
  FILE *out = good ? open_memstream(text, &size) : NULL;
  if (good && !out) good = no_memory(e);
  for (int32_t id = 0; good && id < ranks; id++) {
    const struct string *token = l.tokens.string + id;
    write_base64(out, (const unsigned char *)l.tokens.pool + token->at, token->bytes);
    fprintf(out, " %d\n", id);
  }
  if (out && (ferror(out) | fclose(out)) && good) good = no_memory(e);
  learning_free(&l);
  if (!good) {
    free(*text);
    *text = NULL;
  }
  *bytes = (int64_t)size;
  return good;
}
