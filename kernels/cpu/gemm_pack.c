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

enum { HALF_GROUP = CONTRACT_GROUP / 2, PIECE = 128, WIDEST_PANEL = 32 };

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

typedef uint32_t bits8 __attribute__((vector_size(32)));
typedef float float8 __attribute__((vector_size(32)));

/* n elements of E2M1 codes, with a scale for each 16 of them: e2m1_decode, eight at once. */
CPU_CLONES static void decode_codes(float *restrict values, const uint8_t *restrict codes, const float *restrict scales,
                                    int64_t n) {
  for (int64_t i = 0; i < n; i += 8) {
    const uint8_t *from = codes + i / 2;
    uint32_t eight = from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
    bits8 code = eight >> (bits8){0, 4, 8, 12, 16, 20, 24, 28}, magnitude = code & 7;
    bits8 nonzero = (bits8)(magnitude > 0), normal = (bits8)(magnitude > 1);
    bits8 bits = ((magnitude << 22) + 0x3F000000u) & nonzero & (normal | 0xFF800000u);
    float8 x = (float8)(bits | (code & 8) << 28) * scales[i / HALF_GROUP];
    memcpy(values + i, &x, sizeof x);
  }
}

CPU_CLONES static void decode_e4m3(float *restrict values, const uint8_t *restrict codes, int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] = e4m3_decode(codes[i]);
}

CPU_CLONES static void decode_e5m2(float *restrict values, const uint8_t *restrict codes, int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] = e5m2_decode(codes[i]);
}

/* Elements [k, k + n) of a row of E2M1 codes; k and n are multiples of 16, n is at most PIECE. */
static void load_codes(float *values, const struct operand *o, int64_t row, int64_t k, int64_t n) {
  bool mx = o->encoding.format == FORMAT_MXFP4;
  int64_t block = mx ? CONTRACT_GROUP : HALF_GROUP;
  float scales[PIECE / HALF_GROUP];
  for (int64_t i = 0; i < n / HALF_GROUP; i++) {
    uint32_t byte = o->scales[operand_scale_offset(row, (k + i * HALF_GROUP) / block, o->cols / block)];
    scales[i] = mx ? e8m0_decode(byte) : e4m3_decode(byte);
  }
  decode_codes(values, o->codes + (row * o->cols + k) / 2, scales, n);
}

/* Elements [k, k + n) of a row that is contiguous. */
static void load_row(float *values, const struct operand *o, int64_t row, int64_t k, int64_t n) {
  int64_t first = row * o->cols + k;
  switch (o->encoding.format) {
    case FORMAT_F32:
    case FORMAT_BF16: load_plain(values, o, first, n); break;
    case FORMAT_E4M3: decode_e4m3(values, o->codes + first, n); break;
    case FORMAT_E5M2: decode_e5m2(values, o->codes + first, n); break;
    case FORMAT_MXFP4:
    case FORMAT_NVFP4:
    case FORMAT_NVFP4_LOCAL: load_codes(values, o, row, k, n); break;
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
    if (o->encoding.format == FORMAT_F32 && rows == width && n == whole) {
      transpose(panel + done * width, width, (const float *)(const void *)o->codes + row * o->cols + k + done, o->cols, n);
      continue;
    }
    for (int64_t r = 0; r < width; r++) {
      float *values = buffer + r * PIECE;
      int64_t filled = r < rows ? n : 0;
      if (filled) load_row(values, o, row + r, k + done, n);
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
