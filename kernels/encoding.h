/* Encodings: how a contraction's operand is written, as data.
 *
 * An encoding names a number format, the group of elements that shares a
 * scale, the rule that makes the scale, how codes are rounded and which
 * orthogonal transform precedes them.  Routes (model/route.h) are made of
 * encodings; backends say which ones they execute.
 */
#ifndef FP4D_KERNELS_ENCODING_H
#define FP4D_KERNELS_ENCODING_H

#include <stdbool.h>
#include <stdint.h>

enum format {
  FORMAT_F32 = 1,
  FORMAT_BF16 = 2,
  FORMAT_E4M3 = 3,
  FORMAT_E5M2 = 4,
  FORMAT_MXFP4 = 5,        /* E2M1 codes, E8M0 scales of 32 */
  FORMAT_NVFP4 = 6,        /* E2M1 codes, E4M3 scales of 16, one FP32 factor a tensor */
  FORMAT_NVFP4_LOCAL = 7   /* the same with FP32 factors per strip of rows (CTA-local) */
};

enum block_geometry {
  BLOCK_NONE = 0,
  BLOCK_1X16 = 1,
  BLOCK_1X32 = 2,
  BLOCK_2D16 = 3, /* 16x16 tiles: row and column views decode alike */
  BLOCK_2D32 = 4
};

enum scale_rule {
  SCALE_NONE = 0,
  SCALE_MX_ENCODE = 1,    /* s = 2^ceil(log2 amax), codes of 6 z / s: nothing clips */
  SCALE_MX_DECODE = 2,    /* s = 2^floor(log2 amax) */
  SCALE_MX_FLOOR = 3,     /* OCP MX v1.0 */
  SCALE_MX_ADAPTIVE = 4,  /* encode, halved when amax/s < 0.87: 2D weight tiles */
  SCALE_TENSOR = 5,       /* NVFP4, E4M3, E5M2: amax of the whole view (Transformer Engine's order) */
  SCALE_LOCAL_FAITHFUL = 6, /* LC-F: outer factors amax/448, block scales rounded twice */
  SCALE_LOCAL_POW2 = 7,     /* LC-P2: outer factors powers of two, folded exactly */
  SCALE_ROW = 8,            /* E4M3, E5M2: amax of each row of the view */
  SCALE_TENSOR_4OVER6 = 9   /* as SCALE_TENSOR; each block takes 6 or 4 as its largest code, by error */
};

enum rounding { ROUND_NEAREST = 0, ROUND_STOCHASTIC = 1 };

enum hadamard { HADAMARD_NONE = 0, HADAMARD_PLAIN_16 = 1, HADAMARD_SIGNED_16 = 2, HADAMARD_SIGNED_32 = 3 };

struct encoding {
  enum format format;
  enum block_geometry block;
  enum scale_rule scale;
  enum rounding rounding;
  enum hadamard hadamard; /* applied along the contraction axis */
  int32_t strip;          /* FORMAT_NVFP4_LOCAL: rows that share an outer factor (a route constant); else 0 */
};

/* Formats that are plain arrays of numbers (no codes, no scales). */
static inline bool encoding_is_plain(const struct encoding *e) {
  return e->format == FORMAT_F32 || e->format == FORMAT_BF16;
}

/* Elements along the contraction that share a block scale: 32, 16, or 0 where
 * the format has no block scales. */
int64_t encoding_block_cols(const struct encoding *e);

bool encoding_equal(const struct encoding *a, const struct encoding *b);

/* "mxfp4/2d32/adaptive", "mxfp4/1x32/encode/sr", "bf16": what records and the
 * start-up table print.  Always whole and unambiguous. Returns text. */
char *encoding_text(const struct encoding *e, char *text, int size);
#define ENCODING_TEXT 64

#endif
