/* Byte-level BPE: a piece of text to token ids.
 *
 * Merging takes the adjacent pair of the lowest rank, the leftmost of equals,
 * until no pair merges (Sennrich et al. 2016, arXiv:1508.07909).  Short pieces
 * look for it in an array; long ones keep a heap, so a piece of n bytes costs
 * O(n log n) whatever is in it.
 */
#ifndef FP4D_DATA_BPE_H
#define FP4D_DATA_BPE_H

#include "data/vocabulary.h"

struct bpe;         /* opaque; read-only once made */
struct bpe_scratch; /* opaque; a thread's */

/* Tables of v, which may be freed after it.  ERROR_DATA without the file's name. */
struct bpe *bpe_create(const struct vocabulary *v, struct error *e);
void bpe_destroy(struct bpe *b);

struct bpe_scratch *bpe_scratch_create(struct error *e);
void bpe_scratch_destroy(struct bpe_scratch *s);

enum { BPE_PIECE = 1 << 30 }; /* bytes of the longest piece */

/* A piece that is going to be encoded.  The tables are larger than the caches near a
 * processor, so the memory that it needs is asked for some pieces ahead. */
struct bpe_piece {
  const unsigned char *at;
  int64_t bytes;
  uint64_t low, high, hash; /* for bpe_encode */
};

/* Makes p of at[0..bytes), 0 < bytes <= BPE_PIECE.  `readable` >= at + bytes ends the memory
 * that may be read: loads are whole words where it lets them be. */
void bpe_prepare(const struct bpe *b, const struct bpe_scratch *s, const unsigned char *at, int64_t bytes, const unsigned char *readable,
                 struct bpe_piece *p);

/* Its ids to ids (room for p->bytes of them); returns their number, -1 when out of memory. */
int64_t bpe_encode(const struct bpe *b, struct bpe_scratch *s, const struct bpe_piece *p, const unsigned char *readable, int32_t *ids);

#endif
