/* Encodings as text, and their equality. */
#include "kernels/encoding.h"

#include <stdio.h>

static const char *format_word(enum format f) {
  switch (f) {
    case FORMAT_F32: return "fp32";
    case FORMAT_BF16: return "bf16";
    case FORMAT_E4M3: return "e4m3";
    case FORMAT_E5M2: return "e5m2";
    case FORMAT_MXFP4: return "mxfp4";
    case FORMAT_NVFP4: return "nvfp4";
    case FORMAT_NVFP4_LOCAL: return "nvfp4-local";
  }
  return "unknown-format";
}

static const char *block_word(enum block_geometry b) {
  switch (b) {
    case BLOCK_NONE: return "";
    case BLOCK_1X16: return "/1x16";
    case BLOCK_1X32: return "/1x32";
    case BLOCK_2D16: return "/2d16";
    case BLOCK_2D32: return "/2d32";
  }
  return "/unknown-block";
}

static const char *scale_word(enum scale_rule s) {
  switch (s) {
    case SCALE_NONE: return "";
    case SCALE_MX_ENCODE: return "/encode";
    case SCALE_MX_DECODE: return "/decode";
    case SCALE_MX_FLOOR: return "/floor";
    case SCALE_MX_ADAPTIVE: return "/adaptive";
    case SCALE_TENSOR: return "/tensor";
    case SCALE_LOCAL_FAITHFUL: return "/faithful";
    case SCALE_LOCAL_POW2: return "/pow2";
    case SCALE_ROW: return "/row";
    case SCALE_TENSOR_4OVER6: return "/4over6";
  }
  return "/unknown-scale";
}

static const char *hadamard_word(enum hadamard h) {
  switch (h) {
    case HADAMARD_NONE: return "";
    case HADAMARD_PLAIN_16: return "/plain-16";
    case HADAMARD_SIGNED_16: return "/signed-16";
    case HADAMARD_SIGNED_32: return "/signed-32";
  }
  return "/unknown-hadamard";
}

int64_t encoding_block_cols(const struct encoding *e) {
  switch (e->format) {
    case FORMAT_MXFP4: return 32;
    case FORMAT_NVFP4:
    case FORMAT_NVFP4_LOCAL: return 16;
    case FORMAT_F32:
    case FORMAT_BF16:
    case FORMAT_E4M3:
    case FORMAT_E5M2: return 0;
  }
  return 0;
}

bool encoding_equal(const struct encoding *a, const struct encoding *b) {
  return a->format == b->format && a->block == b->block && a->scale == b->scale && a->rounding == b->rounding &&
         a->hadamard == b->hadamard && a->strip == b->strip;
}

char *encoding_text(const struct encoding *e, char *text, int size) {
  if (size <= 0) return text;
  char strip[24] = "";
  if (e->strip > 0) snprintf(strip, sizeof strip, "/strip%d", (int)e->strip);
  snprintf(text, (size_t)size, "%s%s%s%s%s%s", format_word(e->format), block_word(e->block), scale_word(e->scale), strip,
           e->rounding == ROUND_STOCHASTIC ? "/sr" : "", hadamard_word(e->hadamard));
  return text;
}
