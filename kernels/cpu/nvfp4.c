/* NVFP4 with one FP32 factor a view, in Transformer Engine's order of operations.
 *
 *   A  = largest magnitude of the view, after its transform, by bit pattern
 *   S  = min(2688 / A, FLT_MAX),  1 where A is 0 or not finite      2688 = 448 * 6
 *   m  = S * (1/6),  D = 1 / S
 *   per block (1x16, or a 16x16 tile) with largest magnitude a:
 *   sc = E4M3 of min(a * m, FLT_MAX), nearest, saturating
 *   e  = min(1 / (sc * D), FLT_MAX)
 *   code = E2M1 of x * e, nearest or stochastic
 * A code decodes to  code * sc * A / 2688;  outer is A.
 *
 * Where sc is 0 all codes are 0.  (Literally e is then FLT_MAX and what is not
 * zero gets code +-7: it decodes to zero all the same.)  Where A is infinite or
 * NaN, outer is too (the NaN 7fc00000): everything decodes to what is not finite;
 * min(NaN, FLT_MAX) is FLT_MAX, so that no scale is NaN, and a NaN has code 7.
 */
#include <float.h>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/codes.h"
#include "kernels/cpu/nvfp4.h"

enum { BLOCK = 16, BLOCKS = PANEL_BLOCKS_MOST, BITS_INFINITE = 0x7F80 };

struct nvfp4_factor nvfp4_factor_of(uint16_t amax, float reach) {
  struct nvfp4_factor f = {.encode = 1.0f, .outer = bf16_decode(amax > BITS_INFINITE ? 0x7FC0 : amax)};
  if (amax != 0 && amax < BITS_INFINITE) {
    const float s = reach / f.outer;
    f.encode = s < FLT_MAX ? s : FLT_MAX;
  }
  f.decode = 1.0f / f.encode;
  return f;
}

/* Scales and encode factors of a panel's blocks. */
CPU_CLONES static void scales_of(uint8_t *restrict scale, float *restrict encode, const uint16_t *restrict amax,
                                 const struct nvfp4_factor *f) {
  const float m = f->encode * (1.0f / 6.0f), decode = f->decode;
  for (int i = 0; i < BLOCKS; i++) {
    const struct nvfp4_scale sc = nvfp4_scale_of(bf16_decode(amax[i]) * m);
    scale[i] = (uint8_t)sc.code;
    encode[i] = nvfp4_encode_factor(sc.value, decode);
  }
}

/* As the other view's, where each tile's scale stands already. */
static void scales_as(struct panel_blocks *b, const struct operand *done, const struct panel *p, float decode) {
  for (int64_t c = 0; c < p->cols; c += BLOCK)
    for (int64_t r = 0; r < p->rows; r += BLOCK) {
      const int64_t at = operand_scale_offset(p->first_col + c, (p->first_row + r) / BLOCK, done->cols / BLOCK);
      const uint8_t scale = done->scales[at];
      const float encode = nvfp4_encode_factor(e4m3_decode(scale), decode);
      for (int64_t i = c / BLOCK * PANEL_ROWS + r, end = i + BLOCK; i < end; i++) {
        b->scale[i] = scale;
        b->encode[i] = encode;
      }
    }
}

static void visit(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                  struct quantise_counts *counts, struct ahead *ahead) {
  const struct encoding *e = &rule->o->encoding;
  struct panel_blocks b = {.amax = {0}};
  uint16_t field[PANEL_ELEMENTS];
  const bool tiled = e->block == BLOCK_2D16;
  blocks_amax(b.amax, bits, p, BLOCK, tiled);
  if (rule->done)
    scales_as(&b, rule->done, p, rule->factor.decode);
  else if (e->scale == SCALE_TENSOR_4OVER6)
    nvfp4_four_or_six(b.scale, b.encode, b.amax, bits, p, &rule->factor, tiled, rule->o->view);
  else
    scales_of(b.scale, b.encode, b.amax, &rule->factor);
  if (rule->draw) blocks_draw(field, rule->o, p, rule->draw);
  blocks_write(rule->o, p, bits, BLOCK, &b, rule->draw ? field : NULL, counts, ahead);
}

void nvfp4_quantise(struct cpu_device *d, struct panel_rule *rule, const struct matrix *source) {
  (void)d, (void)source;
  const float reach = rule->o->encoding.scale == SCALE_TENSOR_4OVER6 ? NVFP4_REACH_4OVER6 : NVFP4_REACH;
  CPU_REQUIRE(operand_outer_count(rule->o) == 1, "one factor a view");
  rule->factor = nvfp4_factor_of(rule->amax, reach);
  rule->o->outer[0] = rule->factor.outer;
  rule->visit = visit;
}
