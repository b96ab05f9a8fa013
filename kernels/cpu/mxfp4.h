/* The MXFP4 group quantisers: what emission (kernels/cpu/emit.c) calls.
 *
 * Definition, for BF16 values z of a group whose largest magnitude is a:
 *   b = mxfp4_scale_encode(a), or mxfp4_scale_adaptive(a) for a 2D tile
 *   code = e2m1_encode(z * 6 * 2^(127 - b)), nearest or stochastic
 * A group of zeros of either sign has byte 0 and codes 0.  The largest
 * magnitude is taken over the bit patterns, so a NaN or an infinity makes
 * byte 254; then NaN gets code 7, infinities +-7, and what is finite is
 * encoded like anything else.  (Non-finite values are found by `measure`.)
 */
#ifndef FP4D_KERNELS_CPU_MXFP4_H
#define FP4D_KERNELS_CPU_MXFP4_H

#include "kernels/kernels.h"

/* Columns per call at most: the codes of a row of that many stand on the stack. */
enum { MXFP4_CHUNK = 256 };

/* A piece of a source: rows [first_row, first_row + rows) and columns
 * [first_col, first_col + cols) of [source_rows, source_cols], as BF16 bits
 * at bits[row * stride + col].  cols is a multiple of 32. */
struct mxfp4_piece {
  const uint16_t *bits;
  int64_t stride;
  int64_t first_row, rows, source_rows;
  int64_t first_col, cols, source_cols;
};

/* 1x32 groups along rows into the row operand, nearest; and with draws, by panels
 * (kernels/cpu/mxfp4_whole.c; at most 32 rows). */
void mxfp4_quantise_rows(const struct operand *row, const struct mxfp4_piece *p, struct quantise_counts *counts);
void mxfp4_draw_rows(const struct operand *row, const struct mxfp4_piece *p, const struct draw *draw,
                     struct quantise_counts *counts);

/* 1x32 groups along columns, nearest, into the column operand; 32 rows. */
void mxfp4_quantise_columns(const struct operand *column, const struct mxfp4_piece *p,
                            struct quantise_counts *counts);

/* 32x32 tiles, adaptive, nearest, into either or both; 32 rows. */
void mxfp4_quantise_tiles(const struct operand *row, const struct operand *column, const struct mxfp4_piece *p,
                          struct quantise_counts *row_counts, struct quantise_counts *column_counts);

#endif
