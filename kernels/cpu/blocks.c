/* Panels of FP4 blocks: amax, random fields, codes. */
#include "kernels/cpu/blocks.h"

#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/codes.h"

enum { BLOCK = 16, QUAD = 4, LANES = PANEL_ROWS, PLACES = PANEL_COLS / BLOCK, BITS_INFINITE = 0x7F80 };

/* ---- amax -------------------------------------------------------------------------- */

CPU_CLONES static void join_pairs(uint16_t *amax, int64_t pairs) {
  for (int64_t g = 0; g < pairs; g++)
    for (int r = 0; r < LANES; r++) {
      const uint16_t a = amax[2 * g * LANES + r], b = amax[(2 * g + 1) * LANES + r];
      amax[g * LANES + r] = a > b ? a : b;
    }
}

CPU_CLONES static void join_tiles(uint16_t *amax, int64_t tiles) {
  for (int64_t t = 0; t < tiles; t++, amax += BLOCK) {
    uint16_t m = 0;
    for (int r = 0; r < BLOCK; r++) m = amax[r] > m ? amax[r] : m;
    for (int r = 0; r < BLOCK; r++) amax[r] = m;
  }
}

void blocks_amax(uint16_t *amax, const uint16_t *bits, const struct panel *p, int block, bool tiled) {
  uint16_t of_16[PANEL_BLOCKS_MOST];
  uint16_t *to = block == BLOCK ? amax : of_16;
  panel_amax_of_16(to, bits, p->cols / BLOCK);
  if (tiled) join_tiles(to, p->cols / BLOCK * (LANES / BLOCK));
  if (block == BLOCK) return;
  join_pairs(of_16, p->cols / block);
  memcpy(amax, of_16, (size_t)(p->cols / block) * LANES * sizeof *amax);
}

/* ---- random fields ---------------------------------------------------------------- */

/* Where a panel's calls stand: words 0, 1 and 3 of a counter are a sum of what its
 * row and what its place gives. */
struct calls {
  uint32_t row[3][LANES], place[3][PLACES];
};

CPU_CLONES static void draw_places(uint16_t *field, const struct calls *c, int64_t places, const struct draw *draw) {
  enum { AT_ONCE = CODES_CALLS / LANES };
  for (int64_t g = 0; g < places; g += AT_ONCE) { /* the last of an odd number gets fields that nobody reads */
    uint32_t at[3][CODES_CALLS], word[QUAD][CODES_CALLS];
    for (int w = 0; w < 3; w++)
      for (int k = 0; k < AT_ONCE; k++)
        for (int r = 0; r < LANES; r++) at[w][k * LANES + r] = c->row[w][r] + c->place[w][g + k];
    codes_draw(word, at[0], at[1], at[2], draw);
    for (int k = 0; k < AT_ONCE; k++)
      for (int j = 0; j < QUAD; j++, field += QUAD * LANES) codes_spread(field, word[j] + k * LANES, LANES);
  }
}

void blocks_draw(uint16_t *field, const struct operand *o, const struct panel *p, const struct draw *draw) {
  const int64_t places = p->cols / BLOCK;
  const bool by_rows = o->view == VIEW_ROW; /* then a row is a token, else a place is 16 tokens of a sample */
  struct calls c = {{{0}}, {{0}}};
  for (int64_t i = 0; i < (by_rows ? p->rows : places); i++) {
    const int64_t token = by_rows ? p->first_row + i : p->first_col + i * BLOCK;
    const int64_t sample = token / draw->seq_len, position = token % draw->seq_len;
    const int64_t index = by_rows ? (position * o->cols + p->first_col) / BLOCK
                                  : p->first_row * (draw->seq_len / BLOCK) + position / BLOCK;
    const struct philox_block at =
        philox_counter(draw->update, draw->first_sample + (uint64_t)sample, draw->layer, draw->operand, (uint32_t)index);
    for (int w = 0; w < 3; w++) *(by_rows ? &c.row[w][i] : &c.place[w][i]) = at.word[w == 2 ? 3 : w];
  }
  for (int64_t g = 0; by_rows && g < places; g++) c.place[0][g] = (uint32_t)g;
  for (int64_t r = 0; !by_rows && r < p->rows; r++) c.row[0][r] = (uint32_t)(r * (draw->seq_len / BLOCK));
  draw_places(field, &c, places, draw);
}

/* ---- codes ---------------------------------------------------------------------------- */

/* A panel's counts, at most 128 a lane. */
struct lanes {
  uint32_t saturated[LANES];
  uint16_t underflowed[LANES];
};

/* Words of four codes of one place. `stochastic` is a constant where this is
 * inlined: a choice by `field` would be made in every lane. */
CODES_INLINE void encode_place(uint16_t *restrict word, const uint16_t *restrict z, const float *restrict encode,
                               const uint16_t *restrict sign, const uint16_t *restrict field, bool stochastic,
                               struct lanes *restrict lanes) {
  for (int q = 0; q < BLOCK; q += QUAD)
    for (int r = 0; r < LANES; r++) {
      uint32_t saturated = 0;
      uint16_t underflowed = 0, codes = 0;
#pragma GCC unroll 4
      for (int i = 0; i < QUAD; i++) {
        const uint16_t x = z[(q + i) * LANES + r], a = x & 0x7FFF;
        const uint16_t number = (uint16_t) - (a <= BITS_INFINITE);
        const float t = bf16_decode(a) * encode[r];
        const uint16_t m = stochastic ? codes_stochastic(t, field[(q + i) * LANES + r]) : (uint16_t)codes_nearest(t);
        saturated += f32_bits(t) > f32_bits(6.0f);
        underflowed = (uint16_t)(underflowed + ((a != 0) & (m == 0)));
        codes = (uint16_t)(codes | (m | (x >> 12 & sign[r] & number)) << 4 * i);
      }
      word[q / QUAD * LANES + r] = codes;
      lanes->saturated[r] += saturated;
      lanes->underflowed[r] = (uint16_t)(lanes->underflowed[r] + underflowed);
    }
}

/* `merged` places have one block. */
CPU_CLONES static void encode_nearest(uint16_t *word, const uint16_t *z, int64_t places, int merged, const float *encode,
                                      const uint16_t *sign, struct lanes *lanes) {
  for (int64_t g = 0; g < places; g++) {
    const int64_t b = g / merged * LANES, first = g * BLOCK * LANES;
    encode_place(word + first / QUAD, z + first, encode + b, sign + b, z, false, lanes); /* fields are not read */
  }
}

CPU_CLONES static void encode_stochastic(uint16_t *word, const uint16_t *z, int64_t places, int merged,
                                         const float *encode, const uint16_t *sign, const uint16_t *field,
                                         struct lanes *lanes) {
  for (int64_t g = 0; g < places; g++) {
    const int64_t b = g / merged * LANES, first = g * BLOCK * LANES;
    encode_place(word + first / QUAD, z + first, encode + b, sign + b, field + first, true, lanes);
  }
}

/* Bytes of each row side by side, in fours. */
CPU_CLONES static void join_fours(uint8_t *restrict four, const uint8_t *restrict scale, int64_t fours) {
  for (int64_t g = 0; g < fours; g++)
    for (int r = 0; r < LANES; r++)
      for (int k = 0; k < 4; k++) four[(g * LANES + r) * 4 + k] = scale[(g * 4 + k) * LANES + r];
}

/* Scale bytes stand in fours, 512 bytes apart (a panel may begin within one); rows
 * 16 apart, those that are 32 apart 4. */
static void write_scales(const struct operand *o, const struct panel *p, int block, const uint8_t *scale) {
  const int64_t n = p->cols / block, first = p->first_col / block, tile = ceil_div(o->cols / block, 4) * 512;
  const int64_t whole = first % 4 == 0 ? n / 4 : 0; /* fours */
  uint8_t four[PANEL_BLOCKS_MOST];
  join_fours(four, scale, whole);
  for (int64_t r = 0; r < p->rows; r++) {
    const int64_t row = p->first_row + r;
    uint8_t *to = o->scales + row / 128 * tile + row % 32 * 16 + row % 128 / 32 * 4;
    for (int64_t g = 0; g < whole; g++) memcpy(to + (first / 4 + g) * 512, four + (g * LANES + r) * 4, 4);
    for (int64_t g = 4 * whole; g < n; g++) to[(first + g) / 4 * 512 + (first + g) % 4] = scale[g * LANES + r];
  }
}

/* Signs' masks; counts and largest magnitude from what is known of the blocks. */
CPU_CLONES static uint16_t examine(uint16_t *restrict sign, const struct panel_blocks *b, int64_t blocks, int64_t rows,
                                   int64_t *zero_blocks) {
  uint16_t largest = 0, zero = 0;
  for (int64_t g = 0; g < blocks; g++)
    for (int r = 0; r < LANES; r++) {
      const int64_t i = g * LANES + r;
      sign[i] = b->encode[i] == 0.0f ? 0 : 8;
      zero = (uint16_t)(zero + ((b->encode[i] == 0.0f) & (r < rows)));
      largest = b->amax[i] > largest ? b->amax[i] : largest;
    }
  *zero_blocks += zero;
  return largest;
}

void blocks_write(const struct operand *o, const struct panel *p, const uint16_t *bits, int block,
                  const struct panel_blocks *b, const uint16_t *field, struct quantise_counts *counts) {
  struct lanes lanes = {{0}, {0}};
  uint16_t word[PANEL_ELEMENTS / QUAD], sign[PANEL_BLOCKS_MOST];
  uint8_t *codes = o->codes + p->first_row * (o->cols / 2) + p->first_col / 2;
  const int64_t blocks = p->cols / block, places = p->cols / BLOCK;
  for (int64_t r = 0; r < p->rows; r++) __builtin_prefetch(codes + r * (o->cols / 2), 1); /* lines far apart */
  const uint16_t amax = examine(sign, b, blocks, p->rows, &counts->zero_blocks);
  if (field)
    encode_stochastic(word, bits, places, block / BLOCK, b->encode, sign, field, &lanes);
  else
    encode_nearest(word, bits, places, block / BLOCK, b->encode, sign, &lanes);
  panel_store(codes, o->cols / 2, p->rows, word, p->cols / QUAD);
  write_scales(o, p, block, b->scale);
  for (int r = 0; r < LANES; r++) {
    counts->saturated += lanes.saturated[r];
    counts->underflowed += lanes.underflowed[r];
  }
  counts->elements += p->rows * p->cols;
  counts->blocks += p->rows * blocks;
  panel_count_amax(counts, amax, bits, p);
}
