/* MXFP4 1x32 blocks in panels: of a transformed view, with a scale that may clip,
 * or rounded stochastically (a strip's, from emission).
 *
 *   a    = largest magnitude of the block, after the transform's rounding to BF16
 *   byte = by the rule (kernels/formats.h)
 *   code = E2M1 of 6 x / 2^(byte - 127);  SCALE_MX_FLOOR: of x / 2^(byte - 127)
 * and the value is code * 2^(byte - 127) / 6;  SCALE_MX_FLOOR: without the 6.
 *
 * A block of zeros has byte 0 and codes 0; a NaN or an infinity makes byte 254,
 * whose larger codes decode to infinity, and a NaN has code 7.
 */
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/mxfp4.h"
#include "kernels/formats.h"

enum { BLOCK = 32, BLOCKS = PANEL_ELEMENTS / BLOCK };

CPU_CLONES static void scales_of(uint8_t *restrict byte, float *restrict encode, const uint16_t *restrict amax,
                                 enum scale_rule rule) {
  for (int i = 0; i < BLOCKS; i++) {
    const uint32_t a = amax[i];
    const uint32_t b = rule == SCALE_MX_FLOOR    ? mxfp4_scale_floor(a)
                       : rule == SCALE_MX_DECODE ? mxfp4_scale_decode(a)
                                                 : mxfp4_scale_encode(a);
    const float coefficient = rule == SCALE_MX_FLOOR ? mxfp4_coefficient_floor(b) : mxfp4_coefficient(b);
    byte[i] = (uint8_t)b;
    encode[i] = a == 0 ? 0.0f : coefficient;
  }
}

static void visit(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                  struct quantise_counts *counts, struct ahead *ahead) {
  struct panel_blocks b = {.amax = {0}};
  uint16_t field[PANEL_ELEMENTS];
  blocks_amax(b.amax, bits, p, BLOCK, false);
  scales_of(b.scale, b.encode, b.amax, rule->o->encoding.scale);
  if (rule->draw) blocks_draw(field, rule->o, p, rule->draw);
  blocks_write(rule->o, p, bits, BLOCK, &b, rule->draw ? field : NULL, counts, ahead);
}

void mxfp4_draw_rows(const struct operand *row, const struct mxfp4_piece *p, const struct draw *draw,
                     struct quantise_counts *counts) {
  const struct matrix strip = {.data = (void *)(uintptr_t)p->bits, .dtype = DTYPE_BF16, .rows = p->rows, .cols = p->stride};
  for (int64_t col = 0; col < p->cols; col += PANEL_COLS) {
    const int64_t cols = p->cols - col < PANEL_COLS ? p->cols - col : PANEL_COLS;
    const int64_t left = p->cols - col - cols;
    struct ahead ahead =
        ahead_of(p->bits + col + cols, p->stride, p->rows, left < PANEL_COLS ? left : PANEL_COLS, AHEAD_PANEL);
    uint16_t bits[PANEL_ELEMENTS];
    panels_load(bits, &strip, VIEW_ROW, HADAMARD_NONE, &(struct panel){0, p->rows, col, cols});
    visit(&(struct panel_rule){.o = row, .draw = draw}, bits, &(struct panel){p->first_row, p->rows, p->first_col + col, cols}, counts,
          &ahead);
  }
  panel_finish();
}

void mxfp4_whole_quantise(struct cpu_device *d, struct panel_rule *rule, const struct matrix *source) {
  (void)d, (void)source;
  CPU_REQUIRE(!rule->done, "tiles are made by strips");
  rule->visit = visit;
}
