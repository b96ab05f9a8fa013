/* Panels of FP4 blocks: amax, random fields, codes. */
#include "kernels/cpu/blocks.h"

#include <string.h>

#include "kernels/cpu/codes.h"

enum { BLOCK = 16, LANES = 32, ROW_BLOCKS = PANEL_COLS / BLOCK, CALLS = PANEL_ELEMENTS / BLOCK, BITS_INFINITE = 0x7F80 };

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

/* A panel's counts, at most 128 a lane. */
struct lanes {
  uint32_t saturated[LANES];
  uint16_t underflowed[LANES];
};

/* n elements, 16 or LANES of them; blocks of 16 have the factors encode[0], encode[1]. */
CODES_INLINE void encode_lanes(uint16_t *restrict code, const uint16_t *restrict z, int n, const float encode[2],
                               const uint16_t *restrict field, struct lanes *restrict lanes) {
  float e[LANES];
  uint16_t sign[LANES];
  for (int b = 0; b < n; b += BLOCK)
    for (int i = b; i < b + BLOCK; i++) {
      e[i] = encode[b / BLOCK];
      sign[i] = encode[b / BLOCK] > 0.0f ? 8 : 0;
    }
  for (int i = 0; i < n; i++) {
    const uint16_t a = z[i] & 0x7FFF;
    const float t = bf16_decode(a) * e[i];
    const uint16_t m = (uint16_t)(field ? codes_stochastic(t, field[i]) : codes_nearest(t));
    lanes->saturated[i] += (uint32_t)!(t <= 6.0f);
    lanes->underflowed[i] = (uint16_t)(lanes->underflowed[i] + ((a != 0) & (m == 0)));
    code[i] = (uint16_t)(m | (a > BITS_INFINITE ? 0 : z[i] >> 12 & sign[i]));
  }
}

/* All codes first, then all packed: a vector read where narrower ones were just
 * written would wait for them.  `pairs`: blocks are of 32 elements. */
CODES_INLINE void write_rows(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits, int pairs,
                             const float *encode, const uint16_t *field, struct lanes *lanes) {
  uint16_t code[PANEL_ELEMENTS];
  for (int64_t r = 0; r < p->rows; r++) {
    const int64_t first = r * ROW_BLOCKS, end = first + p->cols / BLOCK;
    for (int64_t g = first; g + 1 < end; g += 2) {
      const float e[2] = {encode[g >> pairs], encode[(g + 1) >> pairs]};
      encode_lanes(code + g * BLOCK, bits + g * BLOCK, LANES, e, field ? field + g * BLOCK : NULL, lanes);
    }
    if ((end - first) % 2 != 0) {
      const int64_t g = end - 1;
      encode_lanes(code + g * BLOCK, bits + g * BLOCK, BLOCK, &encode[g >> pairs], field ? field + g * BLOCK : NULL,
                   lanes);
    }
  }
  for (int64_t r = 0; r < p->rows; r++) codes_pack(codes + r * row_bytes, code + r * PANEL_COLS, p->cols);
}

CPU_CLONES static void write_nearest(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits,
                                     int pairs, const float *encode, struct lanes *lanes) {
  write_rows(codes, row_bytes, p, bits, pairs, encode, NULL, lanes);
}

CPU_CLONES static void write_stochastic(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits,
                                        int pairs, const float *encode, const uint16_t *field, struct lanes *lanes) {
  write_rows(codes, row_bytes, p, bits, pairs, encode, field, lanes);
}

/* Scale bytes stand in fours, 512 bytes apart (a panel may begin within one); the
 * 16 rows of a panel 16 apart. */
static void write_scales(const struct operand *o, const struct panel *p, int block, const uint8_t *scale) {
  const int64_t n = p->cols / block, first = p->first_col / block, before = first % 4;
  uint8_t *to = o->scales + operand_scale_offset(p->first_row, first - before, o->cols / block);
  for (int64_t r = 0; r < p->rows; r++, to += 16, scale += PANEL_COLS / block) {
    int64_t g = 0;
    for (; before == 0 && g + 4 <= n; g += 4) memcpy(to + g / 4 * 512, scale + g, 4);
    for (; g < n; g++) to[(before + g) / 4 * 512 + (before + g) % 4] = scale[g];
  }
}

/* Counts and largest magnitude from what is known of the blocks. */
static void count_blocks(struct quantise_counts *counts, const uint16_t *bits, const struct panel *p, int block,
                         const uint16_t *amax, const float *encode) {
  uint16_t largest = 0;
  int zero = 0;
  for (int64_t r = 0; r < p->rows; r++)
    for (int64_t g = r * (PANEL_COLS / block); g < r * (PANEL_COLS / block) + p->cols / block; g++) {
      largest = amax[g] > largest ? amax[g] : largest;
      zero += encode[g] == 0.0f;
    }
  counts->blocks += p->rows * p->cols / block;
  counts->zero_blocks += zero;
  panel_count_amax(counts, largest, bits, p);
}

void blocks_write(const struct operand *o, const struct panel *p, const uint16_t *bits, int block,
                  const struct panel_blocks *b, const uint16_t *field, struct quantise_counts *counts) {
  struct lanes lanes = {{0}, {0}};
  uint8_t *codes = o->codes + p->first_row * (o->cols / 2) + p->first_col / 2;
  for (int64_t r = 0; r < p->rows; r++) __builtin_prefetch(codes + r * (o->cols / 2), 1); /* lines far apart */
  if (field)
    write_stochastic(codes, o->cols / 2, p, bits, block == 32, b->encode, field, &lanes);
  else
    write_nearest(codes, o->cols / 2, p, bits, block == 32, b->encode, &lanes);
  write_scales(o, p, block, b->scale);
  for (int i = 0; i < LANES; i++) {
    counts->saturated += lanes.saturated[i];
    counts->underflowed += lanes.underflowed[i];
  }
  counts->elements += p->rows * p->cols;
  count_blocks(counts, bits, p, block, b->amax, b->encode);
}
