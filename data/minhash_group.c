/* Groups of near-duplicates: what bands find, joined.
 *
 * A band at a time: (key, document) pairs are spread over buckets by the key's
 * first bits, buckets are sorted and looked through by all threads, and what
 * belongs together is joined by one.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/minhash.h"

enum {
  BUCKET_BITS = 9,
  BUCKETS = 1 << BUCKET_BITS,
  SLICES = 64, /* of the documents, for counting and spreading */
  REPRESENTATIVES = 32
};

struct pair {
  uint64_t key;
  int64_t document;
};

struct grouping {
  const struct minhash_signature *signatures;
  int64_t n;
  double threshold;
  int band;
  struct pair *pairs;
  int64_t *parent;            /* of a document; a root is the lowest of its group */
  int64_t *place;             /* [SLICES][BUCKETS]: counts, then where the next pair goes */
  int64_t end[BUCKETS];       /* of each bucket's pairs */
  int64_t compared[BUCKETS];
};

static bool has_words(const struct minhash_signature *s) {
  for (int i = 0; i < MINHASH_HASHES; i++)
    if (s->position[i] != 65535) return true;
  return false;
}

double minhash_similarity(const struct minhash_signature *a, const struct minhash_signature *b) {
  int equal = 0;
  for (int i = 0; i < MINHASH_HASHES; i++) equal += a->position[i] == b->position[i];
  return has_words(a) ? equal / (double)MINHASH_HASHES : 0;
}

int64_t minhash_group_bytes(int64_t n) {
  return (int64_t)sizeof(struct grouping) + n * (int64_t)(sizeof(struct pair) + sizeof(int64_t)) +
         (int64_t)sizeof(int64_t) * SLICES * BUCKETS;
}

static int64_t slice_first(const struct grouping *g, int64_t slice) {
  int64_t more = g->n % SLICES;
  return slice * (g->n / SLICES) + (slice < more ? slice : more);
}

static void count_slice(void *context, int64_t slice, int worker) {
  struct grouping *g = context;
  (void)worker;
  int64_t *count = g->place + slice * BUCKETS;
  memset(count, 0, BUCKETS * sizeof *count);
  for (int64_t d = slice_first(g, slice); d < slice_first(g, slice + 1); d++)
    if (has_words(g->signatures + d)) count[minhash_band_key(g->signatures + d, g->band) >> (64 - BUCKET_BITS)]++;
}

/* Counts become places: bucket after bucket, slice after slice within it. */
static void lay_out(struct grouping *g) {
  int64_t at = 0;
  for (int b = 0; b < BUCKETS; b++) {
    for (int s = 0; s < SLICES; s++) {
      int64_t count = g->place[s * BUCKETS + b];
      g->place[s * BUCKETS + b] = at;
      at += count;
    }
    g->end[b] = at;
  }
}

static void spread_slice(void *context, int64_t slice, int worker) {
  struct grouping *g = context;
  (void)worker;
  int64_t *place = g->place + slice * BUCKETS;
  for (int64_t d = slice_first(g, slice); d < slice_first(g, slice + 1); d++)
    if (has_words(g->signatures + d)) {
      uint64_t key = minhash_band_key(g->signatures + d, g->band);
      g->pairs[place[key >> (64 - BUCKET_BITS)]++] = (struct pair){key, d};
    }
}

static int by_key(const void *x, const void *y) {
  const struct pair *a = x, *b = y;
  if (a->key != b->key) return a->key < b->key ? -1 : 1;
  return (a->document > b->document) - (a->document < b->document);
}

/* Leaves in each pair's key the document that it is to be joined to, or its own. */
static void look_through_bucket(void *context, int64_t bucket, int worker) {
  struct grouping *g = context;
  (void)worker;
  int64_t first = bucket ? g->end[bucket - 1] : 0, end = g->end[bucket], representative[REPRESENTATIVES];
  int count = 0;
  uint64_t key = 0;
  qsort(g->pairs + first, (size_t)(end - first), sizeof *g->pairs, by_key);
  g->compared[bucket] = 0;
  for (int64_t i = first; i < end; i++) {
    struct pair *p = &g->pairs[i];
    if (i == first || p->key != key) count = 0;
    key = p->key;
    int r = 0;
    for (; r < count && g->threshold > 0; r++) {
      g->compared[bucket]++;
      if (minhash_similarity(g->signatures + representative[r], g->signatures + p->document) >= g->threshold) break;
    }
    p->key = (uint64_t)(r < count ? representative[r] : p->document);
    if (r == count && count < (g->threshold > 0 ? REPRESENTATIVES : 1)) representative[count++] = p->document;
  }
}

static int64_t find_root(int64_t *parent, int64_t d) {
  while (parent[d] != d) {
    parent[d] = parent[parent[d]];
    d = parent[d];
  }
  return d;
}

/* The lower root stays one, so a root is its group's lowest document. */
static void join(int64_t *parent, int64_t a, int64_t b) {
  a = find_root(parent, a);
  b = find_root(parent, b);
  if (a < b)
    parent[b] = a;
  else
    parent[a] = b;
}

static void run(struct threads *t, int64_t n, void (*task)(void *, int64_t, int), void *context) {
  if (t)
    threads_run(t, n, task, context);
  else
    for (int64_t i = 0; i < n; i++) task(context, i, 0);
}

static void group_band(struct grouping *g, struct threads *t, struct minhash_groups *done) {
  run(t, SLICES, count_slice, g);
  lay_out(g);
  run(t, SLICES, spread_slice, g);
  run(t, BUCKETS, look_through_bucket, g);
  for (int64_t i = 0; i < g->end[BUCKETS - 1]; i++) join(g->parent, (int64_t)g->pairs[i].key, g->pairs[i].document);
  for (int b = 0; b < BUCKETS; b++) done->compared += g->compared[b];
}

/* With `survivors` clear; a root's group is counted when its second member is met. */
static void tell_survivors(struct grouping *g, uint64_t *survivors, struct minhash_groups *done) {
  for (int64_t d = 0; d < g->n; d++) {
    int64_t root = find_root(g->parent, d);
    if (root == d)
      survivors[d / 64] |= (uint64_t)1 << d % 64;
    else
      done->dropped++;
  }
  memset(g->pairs, 0, (size_t)g->n * sizeof *g->pairs);
  for (int64_t d = 0; d < g->n; d++) {
    int64_t root = find_root(g->parent, d);
    if (root != d && g->pairs[root].key++ == 0) done->groups++;
  }
}

bool minhash_group(const struct minhash_signature *s, int64_t n, double threshold, struct threads *t, uint64_t *survivors,
                   struct minhash_groups *done, struct error *e) {
  struct grouping *g = malloc(sizeof *g);
  size_t room = (size_t)(n ? n : 1);
  if (g) {
    *g = (struct grouping){.signatures = s, .n = n, .threshold = threshold};
    g->pairs = calloc(room, sizeof *g->pairs);
    g->parent = calloc(room, sizeof *g->parent);
    g->place = calloc((size_t)SLICES * BUCKETS, sizeof *g->place);
  }
  *done = (struct minhash_groups){0};
  bool ok = (g && g->pairs && g->parent && g->place) ||
            error_set(e, ERROR_SYSTEM, "out of memory for the groups of %" PRId64 " near-duplicate candidates (%" PRId64 " bytes)", n,
                      minhash_group_bytes(n));
  if (ok) {
    for (int64_t d = 0; d < n; d++) g->parent[d] = d;
    for (g->band = 0; g->band < MINHASH_BANDS; g->band++) group_band(g, t, done);
    memset(survivors, 0, (size_t)((n + 63) / 64) * sizeof *survivors);
    tell_survivors(g, survivors, done);
  }
  if (g) {
    free(g->pairs);
    free(g->parent);
    free(g->place);
  }
  free(g);
  return ok;
}
