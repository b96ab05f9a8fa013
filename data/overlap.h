/* Overlap of texts in 13-grams: how much of validation was seen in training.
 *
 * A 13-gram is 13 consecutive normalised words (data/words.h) of one document;
 * a document of fewer words has none.  It is known by XXH3-64 over the 64-bit
 * hashes of its words, little endian.  The set of all 13-grams of the
 * validation side is kept exactly (open addressing; no Bloom filter), so the
 * only false finds are equal 64-bit hashes: set size / 2^64 for each 13-gram
 * looked up, 10^-12 for a set of 17 million.
 *
 * Use: overlap_open, overlap_add for every validation document, then
 * overlap_count for training documents in any threads and order: counts and
 * totals are sums, hence the same whatever the threads do.
 */
#ifndef FP4D_DATA_OVERLAP_H
#define FP4D_DATA_OVERLAP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

enum { OVERLAP_WORDS = 13 };

struct overlap; /* opaque */

/* `limit`: bytes that the set may take.  A distinct 13-gram takes 16 to 33
 * bytes, 49 for a moment while the set grows. */
struct overlap *overlap_open(int64_t limit, struct error *e);
void overlap_close(struct overlap *o);

/* Adds a validation document; one thread at a time.  ERROR_DATA when the set
 * would grow past the limit. */
bool overlap_add(struct overlap *o, const void *text, int64_t bytes, struct error *e);

/* Of documents: each 13-gram counts as often as it stands there. */
struct overlap_total {
  int64_t documents, touched; /* all; with one shared 13-gram or more */
  int64_t grams, shared;      /* 13-grams; those that stand on the validation side too */
};

/* Adds a training document to `total`; true if it shares a 13-gram.  Any
 * number of threads, each with its own total, after the last overlap_add. */
bool overlap_count(const struct overlap *o, const void *text, int64_t bytes, struct overlap_total *total);
void overlap_total_add(struct overlap_total *sum, const struct overlap_total *more);

/* The validation side: distinct 13-grams, and those that overlap_count met so far. */
struct overlap_side {
  int64_t documents, grams, distinct, met;
};
struct overlap_side overlap_side(const struct overlap *o);

#endif
