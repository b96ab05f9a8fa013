/* Panels of FP4 blocks: amax, random fields, codes. */
#include "kernels/cpu/blocks.h"

#include <string.h>

#include "kernels/cpu/codes.h"

enum { BLOCK = 16, LANES = 16, ROW_BLOCKS = PANEL_COLS / BLOCK, CALLS = PANEL_ELEMENTS / BLOCK, BITS_INFINITE = 0x7F80 };

CODES_INLINE uint16_t amax_of_16(const uint16_t *z) {
  uint16_t m = 0;
  for (int i = 0; i < BLOCK; i++) {
    const uint16_t a = z[i] & 0x7FFF;
    m = a > m ? a : m;
  }
  return m;
}

CPU_CLONES static void amax_of_row(uint16_t *restrict amax, const uint16_t *restrict z, int64_t blocks) {
  for (int64_t g = 0; g < blocks; g++) amax[g] = amax_of_16(z + g * BLOCK);
}

void blocks_amax(uint16_t *amax, const uint16_t *bits, const struct panel *p, int block, bool tiled) {
  const int64_t merged = block / BLOCK, row_blocks = ROW_BLOCKS / merged;
  uint16_t of_16[ROW_BLOCKS];
  for (int64_t r = 0; r < p->rows; r++) {
    amax_of_row(of_16, bits + r * PANEL_COLS, p->cols / BLOCK);
    for (int64_t g = 0; g < p->cols / block; g++) {
      uint16_t a = of_16[g * merged];
      if (merged == 2 && of_16[g * 2 + 1] > a) a = of_16[g * 2 + 1];
      amax[r * row_blocks + g] = a;
    }
  }
  if (!tiled) return;
  for (int64_t g = 0; g < p->cols / block; g++) {
    uint16_t a = 0;
    for (int64_t r = 0; r < p->rows; r++) a = amax[r * row_blocks + g] > a ? amax[r * row_blocks + g] : a;
    for (int64_t r = 0; r < p->rows; r++) amax[r * row_blocks + g] = a;
  }
}

/* ---- random fields ---------------------------------------------------------------- */

CPU_CLONES static void draw_calls(uint16_t *field, const struct codes_calls *c, const struct draw *draw) {
  uint32_t word[4 * CALLS], pair[8 * CALLS];
  codes_draw(word, c, CALLS / 2, CALLS / 2, draw);
  codes_spread(pair, word, 4 * CALLS);
  memcpy(field, pair, sizeof pair);
}

void blocks_draw(uint16_t *field, const struct operand *o, const struct panel *p, const struct draw *draw) {
  uint32_t c0[CALLS] = {0}, c1[CALLS] = {0}, c3[CALLS] = {0};
  const int64_t calls = p->cols / BLOCK;
  for (int64_t r = 0; r < p->rows; r++)
    for (int64_t g = 0; g < calls; g++) {
      const int64_t row = p->first_row + r, col = p->first_col + g * BLOCK;
      const int64_t token = o->view == VIEW_ROW ? row : col;
      const int64_t sample = token / draw->seq_len, position = token % draw->seq_len;
      const int64_t index = o->view == VIEW_ROW ? (position * o->cols + col) / BLOCK
                                                : row * (draw->seq_len / BLOCK) + position / BLOCK;
      const struct philox_block at = philox_counter(draw->update, draw->first_sample + (uint64_t)sample, draw->layer,
                                                    draw->operand, (uint32_t)index);
      c0[r * ROW_BLOCKS + g] = at.word[0];
      c1[r * ROW_BLOCKS + g] = at.word[1];
      c3[r * ROW_BLOCKS + g] = at.word[3];
    }
  draw_calls(field, &(struct codes_calls){c0, c1, c3}, draw);
}

/* ---- codes ---------------------------------------------------------------------------- */

struct lanes {
  uint32_t saturated[LANES];
  uint16_t underflowed[LANES]; /* a panel's: at most 128 each */
};

CODES_INLINE void encode_16(uint16_t *restrict code, const uint16_t *restrict z, float encode, bool stochastic,
                            const uint16_t *restrict field, struct lanes *restrict lanes) {
  const uint16_t sign = encode > 0.0f ? 8 : 0;
  for (int i = 0; i < LANES; i++) {
    const uint32_t a = z[i] & 0x7FFFu;
    const float t = bf16_decode((uint16_t)a) * encode;
    const uint32_t m = stochastic ? codes_stochastic(t, field[i]) : codes_nearest(t);
    lanes->saturated[i] += (uint32_t)!(t <= 6.0f);
    lanes->underflowed[i] = (uint16_t)(lanes->underflowed[i] + ((a != 0) & (m == 0)));
    code[i] = (uint16_t)(m | (a > BITS_INFINITE ? 0 : z[i] >> 12 & sign));
  }
}

CODES_INLINE void write_rows(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits, int block,
                             const float *encode, bool stochastic, const uint16_t *field, struct lanes *lanes) {
  const int halved = block == 2 * BLOCK;
  uint16_t code[PANEL_ELEMENTS]; /* all before the first is packed: loads soon after narrower stores wait */
  for (int64_t r = 0; r < p->rows; r++)
    for (int64_t g = 0; g < p->cols / BLOCK; g++) {
      const int64_t at = r * PANEL_COLS + g * BLOCK;
      encode_16(code + at, bits + at, encode[(r * ROW_BLOCKS + g) >> halved], stochastic, field + at, lanes);
    }
  for (int64_t r = 0; r < p->rows; r++) codes_pack(codes + r * row_bytes, code + r * PANEL_COLS, p->cols);
}

CPU_CLONES static void write_nearest(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits,
                                     int block, const float *encode, struct lanes *lanes) {
  write_rows(codes, row_bytes, p, bits, block, encode, false, bits, lanes);
}

CPU_CLONES static void write_stochastic(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits,
                                        int block, const float *encode, const uint16_t *field, struct lanes *lanes) {
  write_rows(codes, row_bytes, p, bits, block, encode, true, field, lanes);
}

/* Scale bytes stand in fours, 512 bytes apart; a segment may begin within one. */
static void write_scales(const struct operand *o, const struct panel *p, int block, const uint8_t *scale) {
  const int64_t n = p->cols / block, scale_cols = o->cols / block, first = p->first_col / block;
  for (int64_t r = 0; r < p->rows; r++) {
    uint8_t *to = o->scales + operand_scale_offset(p->first_row + r, first, scale_cols);
    const uint8_t *from = scale + r * (PANEL_COLS / block);
    if (first % 4 == 0 && n % 4 == 0)
      for (int64_t g = 0; g < n; g += 4) memcpy(to + g / 4 * 512, from + g, 4);
    else
      for (int64_t g = 0; g < n; g++) to[(first % 4 + g) / 4 * 512 + (first % 4 + g) % 4 - first % 4] = from[g];
  }
}

CPU_CLONES static int count_zeros(const float *x, int64_t stride, int64_t rows, int64_t cols) {
  int n = 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) n += x[r * stride + c] == 0.0f;
  return n;
}

void blocks_write(const struct operand *o, const struct panel *p, const uint16_t *bits, int block,
                  const uint8_t *scale, const float *encode, const uint16_t *field, struct quantise_counts *counts) {
  struct lanes lanes = {{0}, {0}};
  uint8_t *codes = o->codes + p->first_row * (o->cols / 2) + p->first_col / 2;
  if (field)
    write_stochastic(codes, o->cols / 2, p, bits, block, encode, field, &lanes);
  else
    write_nearest(codes, o->cols / 2, p, bits, block, encode, &lanes);
  write_scales(o, p, block, scale);
  for (int i = 0; i < LANES; i++) {
    counts->saturated += lanes.saturated[i];
    counts->underflowed += lanes.underflowed[i];
  }
  counts->elements += p->rows * p->cols;
  counts->blocks += p->rows * p->cols / block;
  counts->zero_blocks += count_zeros(encode, PANEL_COLS / block, p->rows, p->cols / block);
  panel_count_amax(counts, bits, p);
}
