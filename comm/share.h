/* Who has what: of a tensor contiguous rows for each rank, of an update contiguous micro-batches.
 *
 * A rank keeps the optimizer's state of its rows, sums their gradients and
 * writes them into checkpoints. */
#ifndef FP4D_COMM_SHARE_H
#define FP4D_COMM_SHARE_H

#include <stdint.h>

/* The first row of `rank` in a tensor [rows, cols] that `world` ranks share; of rank
 * `world`: rows.  Its rows end where the next rank's begin, and may be none.  Where
 * cols is no multiple of 8 they begin at multiples of 8 rows, so that every share
 * begins at a multiple of 8 elements: 16 bytes of BF16, one draw of AdamW's. */
static inline int64_t share_row(int64_t rows, int64_t cols, int rank, int world) {
  if (rank == world) return rows;
  const int64_t row = rows / world * rank + rows % world * rank / world; /* rows * rank / world, without overflow */
  return cols % 8 == 0 ? row : row / 8 * 8;
}

/* The first of an update's `n` micro-batches that `rank` computes; of rank `world`: n.  Where
 * ranks do not divide n the first n % world have one more than the others. */
static inline int64_t share_micro_batch(int64_t n, int64_t rank, int64_t world) {
  const int64_t more = n % world;
  return n / world * rank + (rank < more ? rank : more);
}

/* The most of an update's `n` micro-batches that one of `world` ranks computes: rank 0's. */
static inline int64_t share_micro_batches_most(int64_t n, int64_t world) { return share_micro_batch(n, 1, world); }

#endif
