/* "Four over six": each block takes the better of two scales.
 *
 * As nvfp4.c with 1536 for 2688, but for the block scale.  In Transformer
 * Engine's order of operations:
 *   b   = (a / 6) S
 *   sc6 = E4M3 of min(b, 448): the largest element has code 6
 *   sc4 = E4M3 of min(b * 1.5, 448): it has code 4
 *   error of either = sum of |((q * sc) * A) / 1536 - x|,  q the nearest codes
 * and sc4 where its error is smaller, else sc6.  Sums are in FP32, over the 16
 * elements of a row in order; those of a tile's 16 rows (of the source, for
 * either view) are added in pairs 8 rows apart, then 4, 2 and 1.  (Cook et al.,
 * "Four Over Six".)
 */
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/nvfp4.h"
#include "kernels/elementary.h"

enum { BLOCK = 16, BLOCKS = PANEL_BLOCKS_MOST };

struct candidate {
  uint32_t code[BLOCKS];
  float value[BLOCKS], encode[BLOCKS], error[BLOCKS];
};

/* base: (a / 6) S */
CODES_INLINE void scale_candidate(struct candidate *restrict c, const float *restrict base, float decode, float more) {
  for (int i = 0; i < BLOCKS; i++) {
    const float b = base[i] * more;
    c->code[i] = nvfp4_scale_code(b < 448.0f ? b : 448.0f);
    c->value[i] = nvfp4_scale_value(c->code[i]);
    c->encode[i] = nvfp4_encode_factor(c->code[i], decode);
  }
}

/* Of q = 0 or 2^-114 <= q < infinity a product, corrected once by its remainder, is
 * the quotient, bit for bit. */
CODES_INLINE float over_reach(float q, bool far) {
  const float inverse = 1.0f / NVFP4_REACH_4OVER6, near = q * inverse;
  return far ? q / NVFP4_REACH_4OVER6 : f32_fma(f32_fma(-NVFP4_REACH_4OVER6, near, q), inverse, near);
}

/* Magnitudes do: the codes of -x are those of x with the sign. */
CODES_INLINE void sum_errors(struct candidate *restrict c, const uint16_t *restrict bits, int64_t places, float outer,
                             bool far) {
  for (int64_t g = 0; g < places; g++)
    for (int r = 0; r < PANEL_ROWS; r++) {
      const int64_t b = g * PANEL_ROWS + r;
      float sum = 0.0f;
#pragma GCC unroll 16
      for (int i = 0; i < BLOCK; i++) {
        const float x = bf16_decode(bits[(g * BLOCK + i) * PANEL_ROWS + r] & 0x7FFF);
        const float q = codes_nearest_value(x * c->encode[b]) * c->value[b] * outer;
        sum = sum + f32_from_bits(f32_bits(over_reach(q, far) - x) & 0x7FFFFFFFu);
      }
      c->error[b] = sum;
    }
}

CPU_CLONES static void try_both(struct candidate *six, struct candidate *four, const uint16_t *amax,
                                const uint16_t *bits, int64_t places, const struct nvfp4_factor *f) {
  float base[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) base[i] = bf16_decode(amax[i]) / 6.0f * f->encode;
  scale_candidate(six, base, f->decode, 1.0f);
  scale_candidate(four, base, f->decode, 1.5f);
  if (f->outer > 0x1p-100f && f->outer < 0x1p+100f) {
    sum_errors(six, bits, places, f->outer, false);
    sum_errors(four, bits, places, f->outer, false);
  } else {
    sum_errors(six, bits, places, f->outer, true);
    sum_errors(four, bits, places, f->outer, true);
  }
}

CPU_CLONES static void choose(uint8_t *restrict scale, float *restrict encode, const struct candidate *six,
                              const struct candidate *four, int64_t blocks) {
  for (int64_t i = 0; i < blocks; i++) {
    const bool smaller = four->error[i] < six->error[i];
    scale[i] = (uint8_t)(smaller ? four->code[i] : six->code[i]);
    encode[i] = smaller ? four->encode[i] : six->encode[i];
  }
}

/* Every row of a tile gets the tile's sum. */
static void sum_tiles(float *error, int64_t tiles) {
  for (int64_t t = 0; t < tiles; t++, error += BLOCK) {
    for (int apart = BLOCK / 2; apart > 0; apart /= 2)
      for (int r = 0; r < apart; r++) error[r] = error[r] + error[r + apart];
    for (int r = 1; r < BLOCK; r++) error[r] = error[0];
  }
}

void nvfp4_four_or_six(uint8_t *scale, float *encode, const uint16_t *amax, const uint16_t *bits,
                       const struct panel *p, const struct nvfp4_factor *f, bool tiled, enum view view) {
  struct candidate six, four;
  uint16_t turned[PANEL_ELEMENTS];
  const int64_t places = p->cols / BLOCK;
  if (tiled && view == VIEW_COLUMN) { /* rows of the source are summed */
    panel_turn_tiles(turned, bits, p->cols);
    bits = turned;
  }
  try_both(&six, &four, amax, bits, places, f);
  if (tiled) {
    sum_tiles(six.error, places * (PANEL_ROWS / BLOCK));
    sum_tiles(four.error, places * (PANEL_ROWS / BLOCK));
  }
  choose(scale, encode, &six, &four, places * PANEL_ROWS);
}
