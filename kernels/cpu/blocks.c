/* Panels of FP4 blocks: amax, random fields, codes. */
#include "kernels/cpu/blocks.h"

#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/codes.h"
#include "kernels/cpu/draw.h"

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

enum { AT_ONCE = DRAW_CALLS / LANES };

CPU_CLONES static void gather(struct draw_places *at, const struct calls *c, int64_t place) {
  for (int w = 0; w < 3; w++)
    for (int k = 0; k < AT_ONCE; k++)
      for (int r = 0; r < LANES; r++) at->word[w][k * LANES + r] = c->row[w][r] + c->place[w][place + k];
}

CPU_CLONES static void spread(uint16_t *field, uint32_t word[QUAD][DRAW_CALLS]) {
  for (int k = 0; k < AT_ONCE; k++)
    for (int j = 0; j < QUAD; j++, field += QUAD * LANES) codes_spread(field, word[j] + k * LANES, LANES);
}

static void draw_all(uint16_t *field, const struct calls *c, int64_t places, const struct draw *draw) {
  for (int64_t g = 0; g < places; g += AT_ONCE) { /* the last of an odd number gets fields that nobody reads */
    struct draw_places at;
    uint32_t word[QUAD][DRAW_CALLS];
    gather(&at, c, g);
    draw_words(word, &at, draw);
    spread(field + g * BLOCK * LANES, word);
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
  draw_all(field, &c, places, draw);
}

/* ---- codes ---------------------------------------------------------------------------- */

/* Two rows side by side are a pair. */
enum { PAIRS = LANES / 2, SIGN = 8 };

/* A panel's counts: at most 256 a pair; those that underflow in eighths, 128 a half. */
struct lanes {
  uint32_t saturated[PAIRS], underflowed[PAIRS];
};

/* Codes of a pair of magnitudes. `stochastic` is a constant where this is inlined: a choice
 * by `field` would be made in every lane. */
CODES_INLINE uint32_t encode_pair(float even, float odd, uint32_t field, bool stochastic) {
  if (stochastic) return (codes_steps(even) + (field & 0xFFFFu)) >> 16 | ((codes_steps(odd) + (field >> 16)) & 0xFFFF0000u);
  return (codes_nearest(even) & 0xFFFFu) | codes_nearest(odd) << 16;
}

/* Words of four codes of one place; no NaN of z has a sign. */
CODES_INLINE void encode_place(uint16_t *restrict word, const uint16_t *restrict z, const float *restrict encode,
                               const uint16_t *restrict sign, const uint16_t *restrict field, bool stochastic,
                               struct lanes *restrict lanes) {
  float even[PAIRS], odd[PAIRS];
  for (int r = 0; r < PAIRS; r++) even[r] = encode[2 * r], odd[r] = encode[2 * r + 1];
  for (int q = 0; q < BLOCK; q += QUAD)
    for (int r = 0; r < PAIRS; r++) {
      uint32_t saturated = 0, underflowed = 0, codes = 0;
#pragma GCC unroll 4
      for (int i = 0; i < QUAD; i++) {
        const int64_t at = (q + i) * PAIRS + r;
        const uint32_t x = codes_pair(z, at), a = x & CODES_BOTH(0x7FFF);
        const float t = codes_first(a) * even[r], u = codes_second(a) * odd[r];
        const uint32_t m = encode_pair(t, u, stochastic ? codes_pair(field, at) : 0, stochastic);
        saturated = f32_bits(t) > f32_bits(6.0f) ? saturated + 1 : saturated;
        saturated = f32_bits(u) > f32_bits(6.0f) ? saturated + 1 : saturated;
        underflowed += ((a + CODES_BOTH(0x7FFF)) >> 12 & ~(m + CODES_BOTH(7))) & CODES_BOTH(SIGN);
        codes |= (m | (x >> 12 & codes_pair(sign, r))) << 4 * i;
      }
      memcpy(word + q / QUAD * LANES + 2 * r, &codes, sizeof codes);
      lanes->saturated[r] += saturated;
      lanes->underflowed[r] += underflowed;
    }
}

/* What a panel's codes are made from. */
struct encode_job {
  uint16_t *word;
  const uint16_t *bits, *sign, *field;
  const float *encode;
  int64_t places;
  int merged; /* places that have one block */
  uint8_t *codes;
  int64_t row_bytes, rows; /* of codes to be asked for: 0 where they are streamed */
  struct ahead *ahead;
};

/* Rows of codes are far apart: those that the words will go to are asked for, a few
 * between one place and the next. */
CODES_INLINE void encode_places(const struct encode_job *j, bool stochastic, struct lanes *lanes) {
  const int64_t ask = LANES / PLACES;
  for (int64_t g = 0; g < j->places; g++) {
    const int64_t b = g / j->merged * LANES, first = g * BLOCK * LANES;
    for (int64_t r = g * ask; r < (g + 1) * ask && r < j->rows; r++) __builtin_prefetch(j->codes + r * j->row_bytes, 1);
    ahead_ask(j->ahead);
    encode_place(j->word + first / QUAD, j->bits + first, j->encode + b, j->sign + b,
                 stochastic ? j->field + first : j->bits, stochastic, lanes);
  }
}

CPU_CLONES static void encode_nearest(const struct encode_job *j, struct lanes *lanes) { encode_places(j, false, lanes); }

CPU_CLONES static void encode_stochastic(const struct encode_job *j, struct lanes *lanes) {
  encode_places(j, true, lanes);
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

/* NaNs have code 7, whatever their signs. */
static void clear_signs_of_nans(uint16_t *to, const uint16_t *bits, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = (bits[i] & 0x7FFF) > BITS_INFINITE ? bits[i] & 0x7FFF : bits[i];
}

/* Signs' masks; counts and largest magnitude from what is known of the blocks. */
CPU_CLONES static uint16_t examine(uint16_t *restrict sign, const struct panel_blocks *b, int64_t blocks, int64_t rows,
                                   int64_t *zero_blocks) {
  uint16_t largest = 0, zero = 0;
  for (int64_t g = 0; g < blocks; g++)
    for (int r = 0; r < LANES; r++) {
      const int64_t i = g * LANES + r;
      sign[i] = b->encode[i] == 0.0f ? 0 : SIGN;
      zero = (uint16_t)(zero + ((b->encode[i] == 0.0f) & (r < rows)));
      largest = b->amax[i] > largest ? b->amax[i] : largest;
    }
  *zero_blocks += zero;
  return largest;
}

void blocks_write(const struct operand *o, const struct panel *p, const uint16_t *bits, int block,
                  const struct panel_blocks *b, const uint16_t *field, struct quantise_counts *counts,
                  struct ahead *ahead) {
  struct lanes lanes = {{0}, {0}};
  uint16_t word[PANEL_ELEMENTS / QUAD], sign[PANEL_BLOCKS_MOST], numbers[PANEL_ELEMENTS];
  uint8_t *codes = o->codes + p->first_row * (o->cols / 2) + p->first_col / 2;
  const int64_t blocks = p->cols / block, places = p->cols / BLOCK;
  const bool stream = panel_streams(o);
  const uint16_t amax = examine(sign, b, blocks, p->rows, &counts->zero_blocks);
  if (amax > BITS_INFINITE) {
    clear_signs_of_nans(numbers, bits, p->cols * LANES);
    bits = numbers;
  }
  const struct encode_job job = {word,         bits,  sign,        field,  b->encode, places,
                                 block / BLOCK, codes, o->cols / 2, stream ? 0 : p->rows, ahead};
  (field ? encode_stochastic : encode_nearest)(&job, &lanes);
  panel_store(codes, o->cols / 2, p->rows, word, p->cols / QUAD, stream);
  write_scales(o, p, block, b->scale);
  for (int r = 0; r < PAIRS; r++) {
    counts->saturated += lanes.saturated[r];
    counts->underflowed += (lanes.underflowed[r] >> 16) / SIGN + (lanes.underflowed[r] & 0xFFFF) / SIGN;
  }
  counts->elements += p->rows * p->cols;
  counts->blocks += p->rows * blocks;
  panel_count_amax(counts, amax, bits, p);
}
