/* 13-grams of the validation side as a set, and how many a text shares with it. */
#include "data/overlap.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "data/stream_file.h"
#include "data/words.h"

enum { FIRST_SLOTS = 1 << 12, BATCH = 64 };

struct overlap {
  uint64_t *slots; /* hashes; 0: free */
  uint64_t *met;   /* a bit a slot, set by overlap_count */
  int64_t n_slots, limit; /* a power of two; bytes */
  struct overlap_side side;
};

/* Called with up to BATCH hashes of 13-grams; false ends the walk. */
typedef bool take_grams(void *context, const uint64_t *grams, int count);

struct walk {
  struct words words;
  unsigned char window[8 * OVERLAP_WORDS]; /* hashes of the last words, oldest first */
  int64_t n_words;
  uint64_t grams[BATCH];
  int waiting;
};

static bool walk_words(struct walk *w, const uint64_t *hashes, int count, take_grams *take, void *context) {
  for (int i = 0; i < count; i++) {
    memmove(w->window, w->window + 8, sizeof w->window - 8);
    store_u64(w->window + sizeof w->window - 8, hashes[i]);
    if (++w->n_words < OVERLAP_WORDS) continue;
    uint64_t gram = hash_word(w->window, sizeof w->window, 0);
    w->grams[w->waiting++] = gram ? gram : 1;
    if (w->waiting < BATCH) continue;
    if (!take(context, w->grams, BATCH)) return false;
    w->waiting = 0;
  }
  return true;
}

/* All 13-grams of a text. */
static bool walk_text(const void *text, int64_t bytes, take_grams *take, void *context) {
  struct walk w = {.n_words = 0};
  uint64_t hashes[WORDS_ROOM];
  const unsigned char *t = text;
  for (int64_t at = 0; at < bytes; at += WORDS_FEED) {
    int64_t n = bytes - at < WORDS_FEED ? bytes - at : WORDS_FEED;
    if (!walk_words(&w, hashes, words_feed(&w.words, t + at, n, hashes), take, context)) return false;
  }
  return walk_words(&w, hashes, words_end(&w.words, hashes), take, context) && take(context, w.grams, w.waiting);
}

/* The slot that holds `gram`, or the free one where it belongs. */
static int64_t find_slot(const uint64_t *slots, int64_t n_slots, uint64_t gram) {
  int64_t i = (int64_t)(gram & (uint64_t)(n_slots - 1));
  while (slots[i] && slots[i] != gram) i = (i + 1) & (n_slots - 1);
  return i;
}

static int64_t set_bytes(int64_t n_slots) { return n_slots * 8 + n_slots / 8; }

/* Takes the set's grams over to `n_slots` slots. */
static bool grow(struct overlap *o, int64_t n_slots, struct error *e) {
  if (set_bytes(n_slots) > o->limit) {
    error_set(e, ERROR_DATA, "the set of validation 13-grams needs %" PRId64 " bytes for more than %" PRId64 " of them, and %" PRId64 " are allowed",
              set_bytes(n_slots), o->side.distinct, o->limit);
    return error_hint(e, "raise data.prepare_memory, hold out less text, or set data.overlap_report to false");
  }
  uint64_t *slots = calloc((size_t)n_slots, sizeof *slots), *met = calloc((size_t)n_slots / 64, sizeof *met);
  if (!slots || !met) {
    free(slots);
    free(met);
    return error_set(e, ERROR_SYSTEM, "out of memory for a set of %" PRId64 " 13-grams (%" PRId64 " bytes)", n_slots / 2, set_bytes(n_slots));
  }
  for (int64_t i = 0; i < o->n_slots; i++)
    if (o->slots[i]) slots[find_slot(slots, n_slots, o->slots[i])] = o->slots[i];
  free(o->slots);
  free(o->met);
  o->slots = slots;
  o->met = met;
  o->n_slots = n_slots;
  return true;
}

struct overlap *overlap_open(int64_t limit, struct error *e) {
  struct overlap *o = calloc(1, sizeof *o);
  if (!o) {
    error_set(e, ERROR_SYSTEM, "out of memory for a set of 13-grams");
    return NULL;
  }
  o->limit = limit;
  if (!grow(o, FIRST_SLOTS, e)) {
    overlap_close(o);
    return NULL;
  }
  return o;
}

void overlap_close(struct overlap *o) {
  if (!o) return;
  free(o->slots);
  free(o->met);
  free(o);
}

struct adding {
  struct overlap *set;
  struct error *error;
};

static bool add_grams(void *context, const uint64_t *grams, int count) {
  const struct adding *a = context;
  struct overlap *o = a->set;
  for (int i = 0; i < count; i++) {
    int64_t at = find_slot(o->slots, o->n_slots, grams[i]);
    if (o->slots[at]) continue;
    if (2 * (o->side.distinct + 1) > o->n_slots) {
      if (!grow(o, 2 * o->n_slots, a->error)) return false;
      at = find_slot(o->slots, o->n_slots, grams[i]);
    }
    o->slots[at] = grams[i];
    o->side.distinct++;
  }
  o->side.grams += count;
  return true;
}

bool overlap_add(struct overlap *o, const void *text, int64_t bytes, struct error *e) {
  struct adding a = {o, e};
  o->side.documents++;
  return walk_text(text, bytes, add_grams, &a);
}

struct counting {
  const struct overlap *set;
  int64_t grams, shared;
};

static bool count_grams(void *context, const uint64_t *grams, int count) {
  struct counting *c = context;
  const struct overlap *o = c->set;
  for (int i = 0; i < count; i++) __builtin_prefetch(o->slots + (grams[i] & (uint64_t)(o->n_slots - 1)));
  for (int i = 0; i < count; i++) {
    int64_t at = find_slot(o->slots, o->n_slots, grams[i]);
    if (!o->slots[at]) continue;
    uint64_t bit = (uint64_t)1 << at % 64;
    if (!(__atomic_load_n(o->met + at / 64, __ATOMIC_RELAXED) & bit)) __atomic_fetch_or(o->met + at / 64, bit, __ATOMIC_RELAXED);
    c->shared++;
  }
  c->grams += count;
  return true;
}

bool overlap_count(const struct overlap *o, const void *text, int64_t bytes, struct overlap_total *total) {
  struct counting c = {.set = o};
  walk_text(text, bytes, count_grams, &c);
  overlap_total_add(total, &(struct overlap_total){1, c.shared > 0, c.grams, c.shared});
  return c.shared > 0;
}

void overlap_total_add(struct overlap_total *sum, const struct overlap_total *more) {
  sum->documents += more->documents;
  sum->touched += more->touched;
  sum->grams += more->grams;
  sum->shared += more->shared;
}

struct overlap_side overlap_side(const struct overlap *o) {
  struct overlap_side side = o->side;
  for (int64_t i = 0; i < o->n_slots / 64; i++) side.met += __builtin_popcountll(o->met[i]);
  return side;
}
