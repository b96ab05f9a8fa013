/* Panels of FP4 blocks: what the rules of E2M1 formats share once each block
 * has its scale and its encode factor.
 *
 * A panel has PANEL_COLS / block blocks a row; blocks of the arrays below stand
 * at [place * PANEL_ROWS + row], rows side by side as elements do.
 */
#ifndef FP4D_KERNELS_CPU_BLOCKS_H
#define FP4D_KERNELS_CPU_BLOCKS_H

#include "kernels/cpu/whole.h"

enum { PANEL_BLOCKS_MOST = PANEL_ELEMENTS / 16 };

/* amax[] of the panel's blocks, as BF16 bits; `tiled`: of 16 rows together, the same for each. */
void blocks_amax(uint16_t *amax, const uint16_t *bits, const struct panel *p, int block, bool tiled);

/* The random fields of a panel, field[c * PANEL_ROWS + r]. */
void blocks_draw(uint16_t *field, const struct operand *o, const struct panel *p, const struct draw *draw);

struct panel_blocks {
  uint16_t amax[PANEL_BLOCKS_MOST];
  uint8_t scale[PANEL_BLOCKS_MOST];
  float encode[PANEL_BLOCKS_MOST];
};

/* Writes the panel's codes, E2M1 of x * encode[block], and its scale bytes.
 * Where encode is 0 all codes are 0, whatever the signs; a NaN has code 7.
 * Asks for what is ahead once every 16 columns.  field: NULL rounds to nearest.  Counts everything: a block that is not encoded
 * is a zero block. */
void blocks_write(const struct operand *o, const struct panel *p, const uint16_t *bits, int block,
                  const struct panel_blocks *b, const uint16_t *field, struct quantise_counts *counts,
                  struct ahead *ahead);

#endif
