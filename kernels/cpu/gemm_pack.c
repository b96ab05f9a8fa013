/* Packing an operand into FP32 panels for the micro-kernels.
 *
 * Rows are decoded, a piece at a time, into a small buffer that stays in the
 * nearest cache, and transposed in 4 x 4 blocks; rows in FP32 are transposed
 * where they stand.  A plain operand stored transposed needs neither: its rows
 * already run along the panel.
 */
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/formats.h"

enum { MX_BLOCK = 32, PIECE = 128, WIDEST_PANEL = 32 };

CPU_CLONES static void widen_bf16(float *restrict values, const uint8_t *restrict source, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint16_t h;
    memcpy(&h, source + 2 * i, sizeof h);
    values[i] = bf16_decode(h);
  }
}

/* n plain elements that stand together, from element `first` of the source. */
static void load_plain(float *values, const struct operand *o, int64_t first, int64_t n) {
  if (o->encoding.format == FORMAT_F32)
    memcpy(values, o->codes + 4 * first, (size_t)n * sizeof(float));
  else
    widen_bf16(values, o->codes + 2 * first, n);
}

/* Elements [k, k + n) of a row of an MXFP4 operand; k and n are multiples of 32. */
static void load_mxfp4(float *values, const struct operand *o, int64_t row, int64_t k, int64_t n) {
  const uint8_t *codes = o->codes + (row * o->cols + k) / 2;
  int64_t scale_cols = o->cols / MX_BLOCK;
  for (int64_t block = 0; block < n / MX_BLOCK; block++) {
    uint32_t byte = o->scales[operand_scale_offset(row, k / MX_BLOCK + block, scale_cols)];
    float table[16];
    for (uint32_t c = 0; c < 16; c++) table[c] = mxfp4_decode(c, byte);
    for (int j = 0; j < MX_BLOCK / 2; j++) {
      values[2 * j] = table[codes[j] & 15];
      values[2 * j + 1] = table[codes[j] >> 4];
    }
    codes += MX_BLOCK / 2;
    values += MX_BLOCK;
  }
}

typedef float float4 __attribute__((vector_size(16)));
typedef int32_t index4 __attribute__((vector_size(16)));

static inline float4 load4(const float *p) {
  float4 v;
  memcpy(&v, p, sizeof v);
  return v;
}

/* panel[k * width + r] = rows[r * stride + k] for r < count <= 4, k < n (a multiple of 4). */
static inline void transpose4(float *panel, int width, const float *rows, int64_t stride, int64_t n, int count) {
  const float *r1 = rows + (count > 1 ? stride : 0), *r2 = rows + (count > 2 ? 2 * stride : 0),
              *r3 = rows + (count > 3 ? 3 * stride : 0);
  size_t bytes = (size_t)count * sizeof(float);
  for (int64_t k = 0; k < n; k += 4) {
    float4 a = load4(rows + k), b = load4(r1 + k), c = load4(r2 + k), d = load4(r3 + k);
    float4 ab_low = __builtin_shuffle(a, b, (index4){0, 4, 1, 5}), ab_high = __builtin_shuffle(a, b, (index4){2, 6, 3, 7});
    float4 cd_low = __builtin_shuffle(c, d, (index4){0, 4, 1, 5}), cd_high = __builtin_shuffle(c, d, (index4){2, 6, 3, 7});
    float4 t[4] = {__builtin_shuffle(ab_low, cd_low, (index4){0, 1, 4, 5}),
                   __builtin_shuffle(ab_low, cd_low, (index4){2, 3, 6, 7}),
                   __builtin_shuffle(ab_high, cd_high, (index4){0, 1, 4, 5}),
                   __builtin_shuffle(ab_high, cd_high, (index4){2, 3, 6, 7})};
    for (int i = 0; i < 4; i++) memcpy(panel + (k + i) * width, &t[i], bytes);
  }
}

static void transpose(float *panel, int width, const float *rows, int64_t stride, int64_t n) {
  int r = 0;
  for (; r + 4 <= width; r += 4) transpose4(panel + r, width, rows + r * stride, stride, n, 4);
  if (width - r == 3) transpose4(panel + r, width, rows + r * stride, stride, n, 3);
  if (width - r == 2) transpose4(panel + r, width, rows + r * stride, stride, n, 2);
  if (width - r == 1) transpose4(panel + r, width, rows + r * stride, stride, n, 1);
}

/* One panel of an operand whose rows are contiguous. */
static void pack_rows(float *panel, int width, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                      int64_t cols) {
  float buffer[WIDEST_PANEL * PIECE];
  for (int64_t done = 0; done < cols; done += PIECE) {
    int64_t n = cols - done < PIECE ? cols - done : PIECE, whole = round_up(n, CONTRACT_GROUP);
    int64_t first = row * o->cols + k + done;
    if (o->encoding.format == FORMAT_F32 && rows == width && n == whole) {
      transpose(panel + done * width, width, (const float *)(const void *)o->codes + first, o->cols, n);
      continue;
    }
    for (int64_t r = 0; r < width; r++) {
      float *values = buffer + r * PIECE;
      int64_t filled = r < rows ? n : 0;
      if (filled && o->encoding.format == FORMAT_MXFP4)
        load_mxfp4(values, o, row + r, k + done, n);
      else if (filled)
        load_plain(values, o, first + r * o->cols, n);
      memset(values + filled, 0, (size_t)(whole - filled) * sizeof(float));
    }
    transpose(panel + done * width, width, buffer, PIECE, whole);
  }
}

/* One column of a strip: `width` values to each of `count` panels `stride` apart. */
static inline __attribute__((always_inline)) void spread(float *to, int64_t stride, const float *values, int64_t count,
                                                         int width) {
  for (int64_t p = 0; p < count; p++) memcpy(to + p * stride, values + p * width, (size_t)width * sizeof(float));
}

/* A whole strip of a plain operand stored transposed. */
static void pack_columns(float *panels, int width, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                         int64_t cols) {
  int64_t whole = round_up(cols, CONTRACT_GROUP), count = ceil_div(rows, width);
  float values[GEMM_TILE_ROWS] = {0}; /* zero beyond `rows` */
  for (int64_t i = 0; i < whole; i++) {
    if (i < cols)
      load_plain(values, o, (k + i) * o->rows + row, rows);
    else if (i == cols)
      memset(values, 0, sizeof values);
    float *to = panels + i * width;
    int64_t stride = whole * width;
    switch (width) { /* a known width makes the copies plain moves */
      case 6: spread(to, stride, values, count, 6); break;
      case 32: spread(to, stride, values, count, 32); break;
      default: spread(to, stride, values, count, width); break;
    }
  }
}

void gemm_pack_f32(float *panels, int width, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                   int64_t cols) {
  if (encoding_is_plain(&o->encoding) && o->view == VIEW_COLUMN) {
    pack_columns(panels, width, o, row, rows, k, cols);
    return;
  }
  int64_t whole = round_up(cols, CONTRACT_GROUP);
  for (int64_t r = 0; r < rows; r += width)
    pack_rows(panels + r * whole, width, o, row + r, rows - r < width ? rows - r : width, k, cols);
}
