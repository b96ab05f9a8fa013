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

enum { BLOCK = 16, BLOCKS = PANEL_BLOCKS_MOST, PAIRS = PANEL_ROWS / 2 };

/* step: what a code of 1 decodes to. */
struct candidate {
  uint32_t code[BLOCKS];
  float value[BLOCKS], encode[BLOCKS], step[BLOCKS], error[BLOCKS];
};

/* Of q = 0 or 2^-114 <= q < infinity a product, corrected once by its remainder, is
 * the quotient, bit for bit. */
CODES_INLINE float over_reach(float q, bool far) {
  const float inverse = 1.0f / NVFP4_REACH_4OVER6, near = q * inverse;
  return far ? q / NVFP4_REACH_4OVER6 : f32_fma(f32_fma(-NVFP4_REACH_4OVER6, near, q), inverse, near);
}

/* base: (a / 6) S */
CODES_INLINE void scale_candidate(struct candidate *restrict c, const float *restrict base,
                                  const struct nvfp4_factor *f, float more, bool far) {
  for (int i = 0; i < BLOCKS; i++) {
    const struct nvfp4_scale sc = nvfp4_scale_of(base[i] * more);
    c->code[i] = sc.code;
    c->value[i] = sc.value;
    c->encode[i] = nvfp4_encode_factor(sc.value, f->decode);
    c->step[i] = over_reach(sc.value * f->outer, far);
  }
}

/* Of a magnitude x.  q sc A has 14 bits, and where nothing is too small or too large for
 * that ("far"), the quotient's step is rounded once for every q: q is 1, 2 or 4 times
 * 1/2, 1 or 3/2.  Times a power of two is exact; and a third of a number of few bits is
 * rounded by a third of its last place, so that 3/2 times it is that number's half to
 * within half a place: a tie at most, and the half is the even one. */
CODES_INLINE float error_of(float x, const struct candidate *c, int64_t b, float outer, bool far) {
  const float q = codes_nearest_value(x * c->encode[b]);
  const float decoded = far ? over_reach(q * c->value[b] * outer, far) : q * c->step[b];
  return f32_from_bits(f32_bits(decoded - x) & 0x7FFFFFFFu);
}

/* Magnitudes do: the codes of -x are those of x with the sign.  Both candidates of two
 * rows at once. */
CODES_INLINE void sum_errors(struct candidate *restrict six, struct candidate *restrict four,
                             const uint16_t *restrict bits, int64_t places, float outer, bool far) {
  for (int64_t g = 0; g < places; g++)
    for (int r = 0; r < PAIRS; r++) {
      const int64_t b = g * PANEL_ROWS + 2 * r;
      float sum[4] = {0, 0, 0, 0};
#pragma GCC unroll 16
      for (int i = 0; i < BLOCK; i++) {
        const uint32_t a = codes_pair(bits, (g * BLOCK + i) * PAIRS + r) & CODES_BOTH(0x7FFF);
        const float x = codes_first(a), y = codes_second(a);
        sum[0] = sum[0] + error_of(x, six, b, outer, far);
        sum[1] = sum[1] + error_of(y, six, b + 1, outer, far);
        sum[2] = sum[2] + error_of(x, four, b, outer, far);
        sum[3] = sum[3] + error_of(y, four, b + 1, outer, far);
      }
      six->error[b] = sum[0], six->error[b + 1] = sum[1];
      four->error[b] = sum[2], four->error[b + 1] = sum[3];
    }
}

CODES_INLINE void try_both(struct candidate *six, struct candidate *four, const uint16_t *amax, const uint16_t *bits,
                           int64_t places, const struct nvfp4_factor *f, bool far) {
  float base[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) base[i] = bf16_decode(amax[i]) / 6.0f * f->encode;
  scale_candidate(six, base, f, 1.0f, far);
  scale_candidate(four, base, f, 1.5f, far);
  sum_errors(six, four, bits, places, f->outer, far);
}

CPU_CLONES static void try_near(struct candidate *six, struct candidate *four, const uint16_t *amax,
                                const uint16_t *bits, int64_t places, const struct nvfp4_factor *f) {
  try_both(six, four, amax, bits, places, f, false);
}

CPU_CLONES static void try_far(struct candidate *six, struct candidate *four, const uint16_t *amax,
                               const uint16_t *bits, int64_t places, const struct nvfp4_factor *f) {
  try_both(six, four, amax, bits, places, f, true);
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
  const bool near = f->outer > 0x1p-100f && f->outer < 0x1p+100f;
  (near ? try_near : try_far)(&six, &four, amax, bits, places, f);
  if (tiled) {
    sum_tiles(six.error, places * (PANEL_ROWS / BLOCK));
    sum_tiles(four.error, places * (PANEL_ROWS / BLOCK));
  }
  choose(scale, encode, &six, &four, places * PANEL_ROWS);
}
