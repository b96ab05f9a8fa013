/* Which encodings the CPU executes, and the end of a defect. */
#include <stdlib.h>

#include "base/log.h"
#include "kernels/cpu/cpu.h"
#include "kernels/formats.h"

static const char *refuse_tile(const struct encoding *e) {
  if (e->rounding != ROUND_NEAREST) return "2D tiles are rounded to nearest only";
  if (e->hadamard != HADAMARD_NONE) return "2D tiles take no transform: both views would not decode alike";
  return NULL;
}

static const char *refuse_draws(const struct encoding *e, enum view view) {
  return e->rounding == ROUND_STOCHASTIC && view == VIEW_COLUMN ? "a column view is rounded to nearest only (draws belong to rows)" : NULL;
}

static const char *refuse_mxfp4(const struct encoding *e, enum view view) {
  switch (e->block) {
    case BLOCK_1X32:
      if (e->scale != SCALE_MX_ENCODE && e->scale != SCALE_MX_DECODE && e->scale != SCALE_MX_FLOOR)
        return "1x32 blocks are scaled by the encode, decode or floor rule";
      return refuse_draws(e, view);
    case BLOCK_2D32:
      if (e->scale != SCALE_MX_ADAPTIVE) return "2D tiles are executable with the adaptive scale rule only";
      return refuse_tile(e);
    case BLOCK_NONE:
    case BLOCK_1X16:
    case BLOCK_2D16: break;
  }
  return "MXFP4 has blocks of 1x32 or tiles of 32x32";
}

static const char *refuse_nvfp4(const struct encoding *e) {
  const bool four_over_six = e->scale == SCALE_TENSOR_4OVER6;
  if (e->scale != SCALE_TENSOR && !four_over_six) return "NVFP4 is scaled by tensor, with or without four over six";
  if (four_over_six && e->hadamard != HADAMARD_NONE) return "four over six takes no transform";
  if (four_over_six && e->rounding != ROUND_NEAREST) return "four over six is rounded to nearest only";
  switch (e->block) {
    case BLOCK_1X16: return NULL;
    case BLOCK_2D16: return refuse_tile(e);
    case BLOCK_NONE:
    case BLOCK_1X32:
    case BLOCK_2D32: break;
  }
  return "NVFP4 has blocks of 1x16 or tiles of 16x16";
}

static const char *refuse_fp8(const struct encoding *e) {
  if (e->block != BLOCK_NONE) return "FP8 has no blocks";
  if (e->scale != SCALE_TENSOR && e->scale != SCALE_ROW) return "FP8 is scaled by tensor or by row";
  if (e->rounding != ROUND_NEAREST) return "FP8 is rounded to nearest only";
  return NULL;
}

static const char *refuse_nvfp4_local(const struct encoding *e, enum view view) {
  if (e->scale != SCALE_LOCAL_FAITHFUL && e->scale != SCALE_LOCAL_POW2)
    return "CTA-local NVFP4 is scaled by the faithful or the pow2 rule";
  if (e->strip < 0 || e->strip % 128 != 0) return "a strip is a multiple of 128 rows";
  switch (e->block) {
    case BLOCK_1X16: return refuse_draws(e, view);
    case BLOCK_2D16: return refuse_tile(e);
    case BLOCK_NONE:
    case BLOCK_1X32:
    case BLOCK_2D32: break;
  }
  return "NVFP4 has blocks of 1x16 or tiles of 16x16";
}

const char *cpu_refuse_encoding(const struct device *d, const struct encoding *e, enum view view) {
  (void)d;
  switch (e->rounding) {
    case ROUND_NEAREST:
    case ROUND_STOCHASTIC: break;
    default: return "unknown rounding";
  }
  if (e->hadamard > HADAMARD_SIGNED_32) return "unknown transform";
  if (e->strip != 0 && e->format != FORMAT_NVFP4_LOCAL) return "only CTA-local NVFP4 has strips";
  switch (e->format) {
    case FORMAT_F32:
    case FORMAT_BF16:
      if (e->block != BLOCK_NONE || e->scale != SCALE_NONE) return "a plain format has no blocks and no scales";
      if (e->rounding != ROUND_NEAREST) return "a plain format is rounded to nearest only";
      if (e->hadamard != HADAMARD_NONE) return "a plain format takes no transform";
      return NULL;
    case FORMAT_MXFP4: return refuse_mxfp4(e, view);
    case FORMAT_E4M3:
    case FORMAT_E5M2: return refuse_fp8(e);
    case FORMAT_NVFP4: return refuse_nvfp4(e);
    case FORMAT_NVFP4_LOCAL: return refuse_nvfp4_local(e, view);
  }
  return "unknown format";
}

static bool attention_map_valid(const struct attention_formats *f) {
  return f->p_slope >= 0.0f && f->p_slope < 0x1p100f && f->p_offset > -0x1p100f && f->p_offset < 0x1p100f;
}

static bool attention_lift_valid(const struct attention_formats *f) {
  uint32_t u = f32_bits(f->d_out_lift), e = u >> 23;
  return u == 0u || ((u & 0x7FFFFFu) == 0u && e >= 27u && e <= 227u);
}

const char *cpu_refuse_attention(const struct device *d, const struct attention_formats *f, enum attention_part part,
                                 const struct attention_shape *s) {
  (void)d;
  const bool packed = (part == ATTENTION_PART_QK && f->qk == FORMAT_NVFP4) || (part == ATTENTION_PART_PV && f->pv == FORMAT_MXFP4);
  if (packed && s->head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  switch (part) {
    case ATTENTION_PART_QK:
      return f->qk == FORMAT_E4M3 || f->qk == FORMAT_NVFP4 ? NULL : "Q and K are bf16, e4m3 or nvfp4";
    case ATTENTION_PART_PV:
      if (f->pv == FORMAT_E4M3) return NULL;
      if (f->pv != FORMAT_MXFP4) return "P and V are bf16, e4m3 or mxfp4";
      return attention_map_valid(f) ? NULL : "the map of P has a negative or infinite number";
    case ATTENTION_PART_D_OUT:
      if (f->d_out != FORMAT_E5M2 && f->d_out != FORMAT_E4M3) return "dO is bf16, e5m2 or e4m3";
      return attention_lift_valid(f) ? NULL : "the lift of dO is not a power of two from 2^-100 to 2^100";
    case ATTENTION_PARTS: break;
  }
  return "unknown part of attention";
}

void cpu_defect(const char *function, const char *what) {
  log_error("defect in %s: %s", function, what);
  abort();
}
