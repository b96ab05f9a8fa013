/* Text as a sequence of normalised words: what near-duplicates and overlaps
 * are looked for in.
 *
 * A word is a run of bytes other than ASCII white space (space, \t \n \v \f
 * \r); A-Z become a-z; every other byte, NUL and invalid UTF-8 too, stays as it
 * is.  A word is known by 64 bits: XXH3-64 of its bytes, or, where it is longer
 * than WORDS_PIECE bytes, of its pieces of that length one after the other,
 * each seeded with the hash before it (the first with 0).
 */
#ifndef FP4D_DATA_WORDS_H
#define FP4D_DATA_WORDS_H

#include <stdbool.h>
#include <stdint.h>

enum {
  WORDS_PIECE = 256,
  WORDS_FEED = 4096,              /* bytes that words_feed takes at a time */
  WORDS_ROOM = WORDS_FEED / 2 + 1 /* words that may end in them */
};

/* Begins zeroed; holds the word that the text so far may end in. */
struct words {
  uint64_t hash;
  int used; /* bytes of `piece` */
  bool inside;
  unsigned char piece[WORDS_PIECE];
};

/* Takes the next `bytes` <= WORDS_FEED of the text and writes the hashes of
 * the words that are whole by now; returns their count.  Where a text is cut
 * between calls makes no difference. */
int words_feed(struct words *w, const void *text, int64_t bytes, uint64_t out[WORDS_ROOM]);

/* The last word, when the text ends inside one; returns 0 or 1. */
int words_end(struct words *w, uint64_t *out);

#endif
