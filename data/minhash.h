/* Near-duplicates by MinHash over word 5-grams, in 14 bands of 8 (the numbers
 * of FineWeb, Penedo et al. 2024; method: Broder 1997; banding: Leskovec et al.,
 * Mining of Massive Datasets, 3.4).
 *
 * A document's shingles are its sequences of 5 consecutive normalised words
 * (data/words.h); a shorter one has a single shingle, all of its words.  A
 * shingle's hash x is XXH3-64 over the 64-bit hashes of its words, little
 * endian.  Position i of the signature comes from the smallest value over all
 * shingles of
 *
 *   a_i * (x mod 2^32) + b_i * (x >> 32)   mod 2^32,
 *
 * a universal family over the two halves: (b_i, a_i) are the low 32 bits of the
 * (high, low) words of XXH3-128("minhash\0", u64 i), both made odd.  Of the
 * minimum its low 16 bits are kept: two documents agree there by chance once in
 * 65536.  P(equal position) is then the Jaccard similarity J of the two sets of
 * shingles, and two documents share one band or more with probability
 * 1 - (1 - J^8)^14: .1 % at J = .3, 5 % at .5, 56 % at .7, 77 % at .75, 99.9 % at .9.
 *
 * Everything is a function of the documents and their order alone: threads
 * change nothing.
 */
#ifndef FP4D_DATA_MINHASH_H
#define FP4D_DATA_MINHASH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/threads.h"
#include "data/words.h"

enum { MINHASH_BANDS = 14, MINHASH_ROWS = 8, MINHASH_HASHES = MINHASH_BANDS * MINHASH_ROWS, MINHASH_SHINGLE = 5 };

struct minhash_signature { /* 224 bytes */
  uint16_t position[MINHASH_HASHES];
};

/* A document of any length, in pieces: begin, feed…, end.  Fixed size (about
 * 9 KB), no allocation; any number at a time in any threads. */
struct minhash {
  struct words words;
  uint64_t last[MINHASH_SHINGLE]; /* hashes of the words before */
  int64_t n_words;
  int n_shingles;
  uint64_t shingles[512]; /* hashes, not yet in `smallest` */
  uint32_t smallest[MINHASH_HASHES];
};
void minhash_begin(struct minhash *m);
void minhash_feed(struct minhash *m, const void *text, int64_t bytes);
/* A text without a word has all positions 65535 and is like no other text. */
void minhash_end(struct minhash *m, struct minhash_signature *s);

/* All three at once. */
void minhash_sign(const void *text, int64_t bytes, struct minhash_signature *s);

/* The estimate of J: equal positions / 112; 0 where a text has no words. */
double minhash_similarity(const struct minhash_signature *a, const struct minhash_signature *b);

/* XXH3-64 of the band's 8 positions (little endian), seeded with `band`. */
uint64_t minhash_band_key(const struct minhash_signature *s, int band);

struct minhash_groups {
  int64_t groups;   /* of two documents or more */
  int64_t dropped;  /* documents that do not survive: members of groups but for one each */
  int64_t compared; /* pairs of signatures that were held against `threshold` */
};

/* Bytes that minhash_group holds for n documents while it runs: 24 a document
 * and 271 KB.  Beside these qsort holds 16 a document of the buckets that are
 * being sorted: 1/512 of the documents a thread where keys are spread as hashes are. */
int64_t minhash_group_bytes(int64_t n);

/* Groups near-duplicates among n signatures; bit i of survivors[] (word i / 64,
 * bit i % 64; (n + 63) / 64 words) tells whether document i survives, which of
 * every group only the lowest does.
 *
 * In each band, documents are sorted by (key, ordinal).  Of those that share a
 * key, each is joined to the first representative with similarity >= threshold,
 * or becomes a representative itself (32 of a key at most); with threshold 0
 * all of them are joined without a look.  What is joined directly or through
 * others is one group.  `t` NULL: the calling thread alone.  False with
 * ERROR_SYSTEM when memory is short. */
bool minhash_group(const struct minhash_signature *s, int64_t n, double threshold, struct threads *t, uint64_t *survivors,
                   struct minhash_groups *done, struct error *e);

#endif
