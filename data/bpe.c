/* Byte-level BPE: tables of tokens and of pairs, and merging. */
#include "data/bpe.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
  SHORT = 15,       /* bytes of a token that is its own key */
  ARRAY = 64,       /* bytes of a piece that is merged in an array; a longer one in a heap */
  CACHED = 2 * SHORT, /* bytes of a piece whose ids are remembered, */
  CACHED_IDS = 23,  /* and their number: an entry is two cache lines, the common ones need the first alone */
  CACHE_BITS = 15,
  FILTER_BITS = 22  /* half a megabyte: in the second-level cache */
};

/* Up to 15 bytes and their number. No key has high = 0. */
struct key {
  uint64_t low, high;
};

struct short_slot {
  struct key key;
  int32_t id;
};

struct long_slot {
  uint32_t tag;
  int32_t id; /* -1: free */
};

struct pair_value {
  int32_t rank, merged;
};

#define FREE_PAIR UINT64_MAX
#define NO_RANK INT32_MAX

struct bpe {
  struct short_slot *short_slot;
  struct long_slot *long_slot;
  uint64_t *pair;                /* left << 32 | right; FREE_PAIR */
  struct pair_value *pair_value; /* of the slots of `pair` */
  uint64_t *pair_filter;         /* a bit that is not set: no such pair, which is what most look-ups end with */
  int short_shift, pair_shift; /* 64 - log2 of the slots */
  uint32_t long_mask;
  bool whole_first;
  int32_t byte[256];
  char *text; /* of the long tokens, for comparison */
  int64_t *at;
  int32_t *bytes;
};

struct cached {
  struct key key, more; /* the first 15 bytes and the length; what follows */
  int32_t n, id[CACHED_IDS];
};

struct bpe_scratch {
  struct cached cache[1 << CACHE_BITS]; /* pieces merged before */
  uint64_t *heap;                       /* rank << 32 | position */
  uint32_t *next, *previous;
  int64_t room; /* of next and previous; the heap has twice as much */
};

/* ---- keys and look-ups ------------------------------------------------------------- */

static inline uint64_t mask_of(int64_t bytes) { return bytes >= 8 ? UINT64_MAX : (UINT64_C(1) << (8 * bytes)) - 1; }

static inline struct key key_of(const unsigned char *s, int64_t n, const unsigned char *readable) {
  struct key k = {0, 0};
  if (readable - s >= 16) {
    memcpy(&k.low, s, 8);
    memcpy(&k.high, s + 8, 8);
  } else {
    unsigned char copy[16] = {0};
    memcpy(copy, s, (size_t)n);
    memcpy(&k.low, copy, 8);
    memcpy(&k.high, copy + 8, 8);
  }
  k.low &= mask_of(n);
  k.high = n > 8 ? k.high & mask_of(n - 8) : 0;
  k.high |= (uint64_t)n << 56;
  return k;
}

static inline uint64_t spread(struct key k) {
  const uint64_t h = (k.low ^ (k.low >> 29)) * 0x9e3779b97f4a7c15u + (k.high ^ (k.high >> 31)) * 0xc2b2ae3d27d4eb4fu;
  return (h ^ (h >> 32)) * 0x94d049bb133111ebu;
}

static inline uint64_t spread_pair(uint64_t pair) {
  const uint64_t h = pair * 0x9e3779b97f4a7c15u;
  return (h ^ (h >> 32)) * 0x94d049bb133111ebu;
}

static inline int32_t find_short(const struct bpe *b, struct key k, uint64_t h) {
  const uint64_t mask = (UINT64_C(1) << (64 - b->short_shift)) - 1;
  for (uint64_t i = h >> b->short_shift;; i = (i + 1) & mask) {
    const struct short_slot *s = b->short_slot + i;
    if (s->key.low == k.low && s->key.high == k.high) return s->id;
    if (s->key.high == 0) return -1;
  }
}

static int32_t find_long(const struct bpe *b, const unsigned char *s, int64_t n) {
  const uint64_t h = hash_bytes(s, (size_t)n).low;
  const uint32_t tag = (uint32_t)(h >> 32);
  for (uint32_t i = (uint32_t)h & b->long_mask;; i = (i + 1) & b->long_mask) {
    const struct long_slot *slot = b->long_slot + i;
    if (slot->id < 0) return -1;
    if (slot->tag == tag && b->bytes[slot->id] == n && memcmp(b->text + b->at[slot->id], s, (size_t)n) == 0) return slot->id;
  }
}

static int32_t find(const struct bpe *b, const unsigned char *s, int64_t n) {
  if (n > SHORT) return n > TOKEN_BYTES ? -1 : find_long(b, s, n);
  const struct key k = key_of(s, n, s);
  return find_short(b, k, spread(k));
}

/* The rank of a pair and the token that it makes; NO_RANK where it makes none. */
static inline int32_t find_pair(const struct bpe *b, int32_t left, int32_t right, int32_t *merged) {
  const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right, h = spread_pair(pair);
  const uint64_t bit = h & ((1 << FILTER_BITS) - 1);
  if (!(b->pair_filter[bit >> 6] >> (bit & 63) & 1)) return NO_RANK;
  const uint64_t mask = (UINT64_C(1) << (64 - b->pair_shift)) - 1;
  for (uint64_t i = h >> b->pair_shift;; i = (i + 1) & mask) {
    if (b->pair[i] == pair) {
      *merged = b->pair_value[i].merged;
      return b->pair_value[i].rank;
    }
    if (b->pair[i] == FREE_PAIR) return NO_RANK;
  }
}

/* ---- making the tables --------------------------------------------------------------- */

/* log2 of slots that are at most half full. */
static int bits_for(int64_t entries) {
  int bits = 4;
  while ((INT64_C(1) << bits) < 2 * entries) bits++;
  return bits;
}

static bool no_memory(struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory for a tokenizer's tables"); }

/* false: the same bytes are there already. */
static bool put_token(struct bpe *b, const unsigned char *s, int32_t n, int32_t id) {
  if (find(b, s, n) >= 0) return false;
  if (n <= SHORT) {
    const struct key k = key_of(s, n, s);
    const uint64_t mask = (UINT64_C(1) << (64 - b->short_shift)) - 1;
    uint64_t i = spread(k) >> b->short_shift;
    while (b->short_slot[i].key.high) i = (i + 1) & mask;
    b->short_slot[i] = (struct short_slot){k, id};
    return true;
  }
  const uint64_t h = hash_bytes(s, (size_t)n).low;
  uint32_t i = (uint32_t)h & b->long_mask;
  while (b->long_slot[i].id >= 0) i = (i + 1) & b->long_mask;
  b->long_slot[i] = (struct long_slot){(uint32_t)(h >> 32), id};
  return true;
}

static bool make_tokens(struct bpe *b, const struct vocabulary *v, struct error *e) {
  int64_t longs = 0, shorts = 0;
  for (int32_t id = 0; id < v->n; id++)
    if (v->token[id].kind == TOKEN_TEXT) (void)(v->token[id].bytes > SHORT ? longs++ : shorts++);
  const int short_bits = bits_for(shorts), long_bits = bits_for(longs);
  b->short_shift = 64 - short_bits;
  b->long_mask = (UINT32_C(1) << long_bits) - 1;
  b->short_slot = calloc((size_t)1 << short_bits, sizeof *b->short_slot);
  b->long_slot = malloc(((size_t)1 << long_bits) * sizeof *b->long_slot);
  b->text = malloc((size_t)v->text_used + 1);
  b->at = malloc((size_t)(v->n + 1) * sizeof *b->at);
  b->bytes = malloc((size_t)(v->n + 1) * sizeof *b->bytes);
  if (!b->short_slot || !b->long_slot || !b->text || !b->at || !b->bytes) return no_memory(e);
  for (uint32_t i = 0; i <= b->long_mask; i++) b->long_slot[i].id = -1;
  if (v->text_used) memcpy(b->text, v->text, (size_t)v->text_used);
  for (int32_t id = 0; id < v->n; id++) {
    const struct vocabulary_token *t = v->token + id;
    b->at[id] = t->at;
    b->bytes[id] = t->bytes;
    if (t->kind != TOKEN_TEXT) continue;
    const unsigned char *s = (const unsigned char *)b->text + t->at;
    if (!put_token(b, s, t->bytes, id)) return error_set(e, ERROR_DATA, "ids %d and %d are the same token", find(b, s, t->bytes), id);
  }
  for (int i = 0; i < 256; i++) {
    const unsigned char byte = (unsigned char)i;
    b->byte[i] = find(b, &byte, 1);
    if (b->byte[i] < 0) return error_set(e, ERROR_DATA, "no token is the single byte 0x%02x: not a whole byte-level vocabulary", i);
  }
  return true;
}

struct pairs {
  struct vocabulary_merge *merge;
  int32_t *rank;
  int64_t n, room;
};

static bool add_pair(struct pairs *p, int32_t left, int32_t right, int32_t merged, int32_t rank) {
  if (p->n == p->room) {
    const int64_t room = p->room ? 2 * p->room : 4096;
    struct vocabulary_merge *merge = realloc(p->merge, (size_t)room * sizeof *merge);
    if (merge) p->merge = merge;
    int32_t *ranks = merge ? realloc(p->rank, (size_t)room * sizeof *ranks) : NULL;
    if (!ranks) return false;
    p->rank = ranks;
    p->room = room;
  }
  p->merge[p->n] = (struct vocabulary_merge){left, right, merged};
  p->rank[p->n++] = rank;
  return true;
}

/* Of a ranked vocabulary: every way to make a token of two others. */
static bool derive_pairs(const struct bpe *b, const struct vocabulary *v, struct pairs *p) {
  for (int32_t id = 0; id < v->n; id++) {
    if (v->token[id].kind != TOKEN_TEXT) continue;
    const unsigned char *s = (const unsigned char *)b->text + v->token[id].at;
    const int32_t n = v->token[id].bytes;
    for (int32_t cut = 1; cut < n; cut++) {
      const int32_t left = find(b, s, cut);
      const int32_t right = left < 0 ? -1 : find(b, s + cut, n - cut);
      if (right >= 0 && !add_pair(p, left, right, id, id)) return false;
    }
  }
  return true;
}

static bool given_pairs(const struct vocabulary *v, struct pairs *p) {
  for (int64_t i = 0; i < v->n_merges; i++)
    if (!add_pair(p, v->merge[i].left, v->merge[i].right, v->merge[i].merged, (int32_t)i)) return false;
  return true;
}

static bool make_pairs(struct bpe *b, const struct vocabulary *v, struct error *e) {
  struct pairs p = {0};
  if (v->n_merges >= NO_RANK) return error_set(e, ERROR_DATA, "%" PRId64 " merges are too many", v->n_merges);
  bool good = v->ranked ? derive_pairs(b, v, &p) : given_pairs(v, &p);
  const int bits = bits_for(p.n);
  b->pair_shift = 64 - bits;
  b->pair = malloc(((size_t)1 << bits) * sizeof *b->pair);
  b->pair_value = malloc(((size_t)1 << bits) * sizeof *b->pair_value);
  b->pair_filter = calloc((1 << FILTER_BITS) / 64, sizeof *b->pair_filter);
  good = good && b->pair && b->pair_value && b->pair_filter;
  for (int64_t i = 0; good && i < INT64_C(1) << bits; i++) b->pair[i] = FREE_PAIR;
  const uint64_t mask = (UINT64_C(1) << bits) - 1;
  for (int64_t i = 0; good && i < p.n; i++) {
    const uint64_t pair = (uint64_t)(uint32_t)p.merge[i].left << 32 | (uint32_t)p.merge[i].right, h = spread_pair(pair);
    const uint64_t bit = h & ((1 << FILTER_BITS) - 1);
    uint64_t slot = h >> b->pair_shift;
    while (b->pair[slot] != FREE_PAIR && b->pair[slot] != pair) slot = (slot + 1) & mask;
    /* Of a pair that is given twice the last counts, as in Hugging Face's map of merges. */
    b->pair[slot] = pair;
    b->pair_value[slot] = (struct pair_value){p.rank[i], p.merge[i].merged};
    b->pair_filter[bit >> 6] |= UINT64_C(1) << (bit & 63);
  }
  free(p.merge);
  free(p.rank);
  return good || no_memory(e);
}

struct bpe *bpe_create(const struct vocabulary *v, struct error *e) {
  struct bpe *b = calloc(1, sizeof *b);
  if (!b) {
    no_memory(e);
    return NULL;
  }
  b->whole_first = v->whole_first;
  if (make_tokens(b, v, e) && make_pairs(b, v, e)) return b;
  bpe_destroy(b);
  return NULL;
}

void bpe_destroy(struct bpe *b) {
  if (!b) return;
  free(b->short_slot);
  free(b->long_slot);
  free(b->pair);
  free(b->pair_value);
  free(b->pair_filter);
  free(b->text);
  free(b->at);
  free(b->bytes);
  free(b);
}

struct bpe_scratch *bpe_scratch_create(struct error *e) {
  struct bpe_scratch *s = calloc(1, sizeof *s);
  if (!s) no_memory(e);
  return s;
}

void bpe_scratch_destroy(struct bpe_scratch *s) {
  if (!s) return;
  free(s->heap);
  free(s->next);
  free(s->previous);
  free(s);
}

/* ---- merging --------------------------------------------------------------------------- */

/* id[0..n) in place, n <= ARRAY. rank[i] is that of the pair (i, i + 1). */
static int64_t merge_array(const struct bpe *b, int32_t *id, int64_t n) {
  int32_t rank[ARRAY], merged[ARRAY] = {0};
  for (int64_t i = 0; i + 1 < n; i++) rank[i] = find_pair(b, id[i], id[i + 1], merged + i);
  while (n > 1) {
    int64_t best = 0;
    for (int64_t i = 1; i + 1 < n; i++)
      if (rank[i] < rank[best]) best = i;
    if (rank[best] == NO_RANK) break;
    id[best] = merged[best];
    n--;
    for (int64_t i = best + 1; i < n; i++) id[i] = id[i + 1];
    for (int64_t i = best + 1; i + 1 < n; i++) {
      rank[i] = rank[i + 1];
      merged[i] = merged[i + 1];
    }
    if (best > 0) rank[best - 1] = find_pair(b, id[best - 1], id[best], merged + best - 1);
    if (best + 1 < n) rank[best] = find_pair(b, id[best], id[best + 1], merged + best);
  }
  return n;
}

static void sift_down(uint64_t *heap, int64_t n, int64_t i) {
  const uint64_t x = heap[i];
  for (int64_t child; (child = 2 * i + 1) < n; i = child) {
    if (child + 1 < n && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= x) break;
    heap[i] = heap[child];
  }
  heap[i] = x;
}

static void sift_up(uint64_t *heap, int64_t i) {
  const uint64_t x = heap[i];
  for (int64_t parent; i > 0 && heap[parent = (i - 1) / 2] > x; i = parent) heap[i] = heap[parent];
  heap[i] = x;
}

static bool reserve(struct bpe_scratch *s, int64_t n) {
  if (n <= s->room) return true;
  free(s->heap);
  free(s->next);
  free(s->previous);
  s->room = 0;
  /* A merge takes one entry and adds at most two, and there are at most n - 1 merges. */
  s->heap = malloc((size_t)(2 * n) * sizeof *s->heap);
  s->next = malloc((size_t)n * sizeof *s->next);
  s->previous = malloc((size_t)n * sizeof *s->previous);
  if (!s->heap || !s->next || !s->previous) return false;
  s->room = n;
  return true;
}

#define NOWHERE UINT32_MAX

/* id[0..n) in place: a list of the parts and a heap of the pairs.  A pair that has changed
 * since it was put on the heap has another rank now, or its left part is gone (id -1). */
static int64_t merge_heap(const struct bpe *b, struct bpe_scratch *s, int32_t *id, int64_t n) {
  if (!reserve(s, n)) return -1;
  int64_t pairs = 0;
  int32_t merged = -1;
  for (int64_t i = 0; i < n; i++) {
    s->next[i] = i + 1 < n ? (uint32_t)(i + 1) : NOWHERE;
    s->previous[i] = i > 0 ? (uint32_t)(i - 1) : NOWHERE;
    const int32_t rank = i + 1 < n ? find_pair(b, id[i], id[i + 1], &merged) : NO_RANK;
    if (rank != NO_RANK) s->heap[pairs++] = (uint64_t)(uint32_t)rank << 32 | (uint64_t)i;
  }
  for (int64_t i = pairs / 2 - 1; i >= 0; i--) sift_down(s->heap, pairs, i);
  while (pairs > 0) {
    const uint64_t top = s->heap[0];
    const uint32_t at = (uint32_t)top, right = s->next[at];
    s->heap[0] = s->heap[--pairs];
    if (pairs > 0) sift_down(s->heap, pairs, 0);
    if (id[at] < 0 || right == NOWHERE) continue;
    if (find_pair(b, id[at], id[right], &merged) != (int32_t)(top >> 32)) continue;
    id[at] = merged;
    id[right] = -1;
    const uint32_t after = s->next[right], before = s->previous[at];
    s->next[at] = after;
    if (after != NOWHERE) s->previous[after] = at;
    const uint32_t changed[2] = {before, after != NOWHERE ? at : NOWHERE};
    for (int k = 0; k < 2; k++) {
      if (changed[k] == NOWHERE) continue;
      const int32_t rank = find_pair(b, id[changed[k]], id[s->next[changed[k]]], &merged);
      if (rank == NO_RANK) continue;
      s->heap[pairs] = (uint64_t)(uint32_t)rank << 32 | changed[k];
      sift_up(s->heap, pairs++);
    }
  }
  int64_t left = 0;
  for (int64_t i = 0; i < n; i++)
    if (id[i] >= 0) id[left++] = id[i];
  return left;
}

void bpe_prepare(const struct bpe *b, const struct bpe_scratch *s, const unsigned char *at, int64_t bytes, const unsigned char *readable,
                 struct bpe_piece *p) {
  const struct key k = key_of(at, bytes < SHORT ? bytes : SHORT, readable);
  *p = (struct bpe_piece){.at = at, .bytes = bytes, .low = k.low, .high = k.high, .hash = spread(k)};
  if (bytes <= SHORT && b->whole_first) __builtin_prefetch(b->short_slot + (p->hash >> b->short_shift));
  if (bytes > SHORT && bytes <= CACHED) p->hash ^= spread(key_of(at + SHORT, bytes - SHORT, readable)) * 0xd6e8feb86659fd93u;
  __builtin_prefetch(s->cache + (p->hash >> (64 - CACHE_BITS)));
}

/* A piece that is one token, its id; else -1. */
static inline int32_t find_whole(const struct bpe *b, const struct bpe_piece *p) {
  if (!b->whole_first) return -1;
  return p->bytes <= SHORT ? find_short(b, (struct key){p->low, p->high}, p->hash) : find(b, p->at, p->bytes);
}

int64_t bpe_encode(const struct bpe *b, struct bpe_scratch *s, const struct bpe_piece *p, const unsigned char *readable, int32_t *ids) {
  if ((ids[0] = find_whole(b, p)) >= 0) return 1;
  struct cached *c = s->cache + (p->hash >> (64 - CACHE_BITS));
  struct key more = {0, 0};
  if (p->bytes <= CACHED) {
    if (p->bytes > SHORT) more = key_of(p->at + SHORT, p->bytes - SHORT, readable);
    if (c->key.low == p->low && c->key.high == p->high && c->more.low == more.low && c->more.high == more.high) {
      for (int32_t i = 0; i < c->n; i++) ids[i] = c->id[i];
      return c->n;
    }
  }
  for (int64_t i = 0; i < p->bytes; i++) ids[i] = b->byte[p->at[i]];
  const int64_t n = p->bytes <= ARRAY ? merge_array(b, ids, p->bytes) : merge_heap(b, s, ids, p->bytes);
  if (p->bytes <= CACHED && n <= CACHED_IDS) {
    *c = (struct cached){.key = {p->low, p->high}, .more = more, .n = (int32_t)n};
    for (int32_t i = 0; i < c->n; i++) c->id[i] = ids[i];
  }
  return n;
}
