/* Learning a rank file: byte pair encoding's merges from text.
 *
 * Sennrich et al. 2016 (arXiv:1508.07909) over the bytes of the pieces that Llama
 * 3's pattern makes: again and again the pair of tokens that stands most often
 * side by side becomes a token.  Counts are of distinct pieces times how often
 * they occur, and only those that a merge touches are counted anew.  Of equally
 * frequent pairs the one of the lower ids is taken: the same text gives the same
 * file, in whatever order it came.
 */
#ifndef FP4D_DATA_BPE_TRAIN_H
#define FP4D_DATA_BPE_TRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct bpe_trainer; /* opaque */

struct bpe_trainer *bpe_trainer_open(struct error *e);
void bpe_trainer_close(struct bpe_trainer *t);

/* Learns from text[0..bytes), valid UTF-8.  Pieces longer than BPE_TRAIN_PIECE bytes are left out: they are rules and
 * encoded data, not words. */
enum { BPE_TRAIN_PIECE = 256 };
bool bpe_trainer_feed(struct bpe_trainer *t, const void *text, int64_t bytes, struct error *e);

/* The rank file of a vocabulary of `vocab_size` ids, the specials that follow the ranks
 * included (at least 258: 256 bytes and two specials): malloc'ed text.  ERROR_DATA where
 * the text has no more pairs that occur twice, saying how many ids it is good for. */
bool bpe_trainer_ranks(struct bpe_trainer *t, int32_t vocab_size, char **text, int64_t *bytes, struct error *e);

/* Distinct pieces, and all of them. */
void bpe_trainer_counts(const struct bpe_trainer *t, int64_t *distinct, int64_t *pieces);

#endif
