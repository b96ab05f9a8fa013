/* MinHash signatures of documents. */
#include "data/minhash.h"

#include <pthread.h>
#include <string.h>

#include "base/clones.h"
#include "base/hash.h"
#include "data/stream_file.h"

enum { LANES = 16, BATCH = sizeof ((struct minhash *)0)->shingles / sizeof(uint64_t) };
typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));
_Static_assert(MINHASH_HASHES % LANES == 0, "positions are whole vectors");

static lanes family_a[MINHASH_HASHES / LANES], family_b[MINHASH_HASHES / LANES];

static void make_family(void) {
  for (int i = 0; i < MINHASH_HASHES; i++) {
    unsigned char bytes[16] = "minhash";
    store_u64(bytes + 8, (uint64_t)i);
    struct hash h = hash_bytes(bytes, sizeof bytes);
    family_a[i / LANES][i % LANES] = (uint32_t)h.low | 1;
    family_b[i / LANES][i % LANES] = (uint32_t)h.high | 1;
  }
}

void minhash_begin(struct minhash *m) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_family);
  m->words = (struct words){0};
  m->n_words = 0;
  m->n_shingles = 0;
  memset(m->smallest, 255, sizeof m->smallest);
}

/* Takes the waiting shingles into the minima, a vector of positions at a time. */
CLONES static void take_shingles(struct minhash *m) {
  for (int v = 0; v < MINHASH_HASHES / LANES; v++) {
    lanes a = family_a[v], b = family_b[v], smallest;
    memcpy(&smallest, m->smallest + v * LANES, sizeof smallest);
    for (int i = 0; i < m->n_shingles; i++) {
      lanes h = a * (uint32_t)m->shingles[i] + b * (uint32_t)(m->shingles[i] >> 32);
      lanes less = (lanes)(h < smallest);
      smallest = (h & less) | (smallest & ~less);
    }
    memcpy(m->smallest + v * LANES, &smallest, sizeof smallest);
  }
  m->n_shingles = 0;
}

/* `last` is in order of the words, its first `n` count. */
static void add_shingle(struct minhash *m, int n) {
  unsigned char bytes[8 * MINHASH_SHINGLE];
  for (int i = 0; i < n; i++) store_u64(bytes + 8 * i, m->last[i]);
  m->shingles[m->n_shingles++] = hash_word(bytes, (size_t)(8 * n), 0);
  if (m->n_shingles == BATCH) take_shingles(m);
}

static void add_words(struct minhash *m, const uint64_t *hashes, int count) {
  for (int i = 0; i < count; i++) {
    if (m->n_words < MINHASH_SHINGLE) {
      m->last[m->n_words++] = hashes[i];
      if (m->n_words < MINHASH_SHINGLE) continue;
    } else {
      memmove(m->last, m->last + 1, sizeof m->last - sizeof m->last[0]);
      m->last[MINHASH_SHINGLE - 1] = hashes[i];
    }
    add_shingle(m, MINHASH_SHINGLE);
  }
}

void minhash_feed(struct minhash *m, const void *text, int64_t bytes) {
  uint64_t hashes[WORDS_ROOM];
  const unsigned char *t = text;
  for (int64_t at = 0; at < bytes; at += WORDS_FEED) {
    int64_t take = bytes - at < WORDS_FEED ? bytes - at : WORDS_FEED;
    add_words(m, hashes, words_feed(&m->words, t + at, take, hashes));
  }
}

void minhash_end(struct minhash *m, struct minhash_signature *s) {
  uint64_t last;
  add_words(m, &last, words_end(&m->words, &last));
  if (m->n_words && m->n_words < MINHASH_SHINGLE) add_shingle(m, (int)m->n_words);
  take_shingles(m);
  for (int i = 0; i < MINHASH_HASHES; i++) s->position[i] = (uint16_t)m->smallest[i];
}

void minhash_sign(const void *text, int64_t bytes, struct minhash_signature *s) {
  struct minhash m;
  minhash_begin(&m);
  minhash_feed(&m, text, bytes);
  minhash_end(&m, s);
}

uint64_t minhash_band_key(const struct minhash_signature *s, int band) {
  return hash_word(s->position + band * MINHASH_ROWS, sizeof(uint16_t) * MINHASH_ROWS, (uint64_t)band);
}
