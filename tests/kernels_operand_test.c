/* Operands of every format, decoded from bytes that were put where kernels.h says. */
#include <math.h>
#include <stdlib.h>

#include "kernels/kernels.h"
#include "tests/test.h"

/* The code tables as the specifications print them. */
static const double e2m1_table[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};

static double e4m3_value(int code) {
  const int e = code >> 3 & 15, m = code & 7;
  const double a = e ? ldexp(1 + m / 8.0, e - 7) : ldexp(m, -9);
  return code & 0x80 ? -a : a;
}

static double e5m2_value(int code) {
  const int e = code >> 2 & 31, m = code & 3;
  const double a = e ? ldexp(1 + m / 4.0, e - 15) : ldexp(m, -16);
  return code & 0x80 ? -a : a;
}

static uint32_t state = 1;
static uint32_t draw(uint32_t below) {
  state = state * 1664525u + 1013904223u;
  return (uint32_t)((uint64_t)(state >> 4) * below >> 28);
}

enum { MOST_ROWS = 130, MOST_COLS = 320 };
static uint8_t codes[MOST_ROWS * MOST_COLS * 4], scales[256 * 32];
static float outer[1024];
static double expected[MOST_ROWS][MOST_COLS], values[MOST_COLS];

static void check_rows(const struct operand *o, const char *what) {
  for (int64_t r = 0; r < o->rows; r++) {
    operand_decode(o, r, values);
    for (int64_t c = 0; c < o->cols; c++)
      if (fabs(values[c] - expected[r][c]) > 1e-15 * fabs(expected[r][c]))
        FAIL("%s [%d, %d]: %.17g, expected %.17g", what, (int)r, (int)c, values[c], expected[r][c]);
  }
}

/* Scale (r, c) by the tiled layout, written out from its picture: tiles of 128 x 4,
 * the rows of a tile in four columns of 32, four bytes each. */
static uint8_t *scale_at(int64_t r, int64_t c, int64_t scale_cols) {
  const int64_t tiles = (scale_cols + 3) / 4, tile = r / 128 * tiles + c / 4;
  return &scales[tile * 512 + r % 128 % 32 * 16 + r % 128 / 32 * 4 + c % 4];
}

static void packed(enum format format, int block, int64_t rows, int64_t cols, int64_t strip, int64_t segment) {
  struct operand o = {.encoding = {.format = format}, .rows = rows, .cols = cols, .codes = codes, .scales = scales,
                      .outer = format == FORMAT_MXFP4 ? NULL : outer, .strip = strip, .segment = segment};
  const int64_t height = strip ? strip : rows, width = segment ? segment : cols;
  memset(codes, 0, sizeof codes);
  for (int64_t i = 0; i < 1024; i++) outer[i] = (float)(i + 1) * 0.37f;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols / block; c++)
      *scale_at(r, c, cols / block) = (uint8_t)(format == FORMAT_MXFP4 ? 100 + draw(60) : draw(0x7F));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) {
      const uint32_t code = draw(16);
      codes[r * cols / 2 + c / 2] |= (uint8_t)(c % 2 ? code << 4 : code);
      const int scale = *scale_at(r, c / block, cols / block);
      double x = e2m1_table[code] * (format == FORMAT_MXFP4 ? ldexp(1, scale - 127) / 6 : e4m3_value(scale));
      if (o.outer) x *= (double)outer[r / height * ((cols + width - 1) / width) + c / width];
      if (format == FORMAT_NVFP4) x /= 2688;
      expected[r][c] = x;
    }
  char what[80];
  snprintf(what, sizeof what, "format %d, %d x %d, strip %d, segment %d", (int)format, (int)rows, (int)cols, (int)strip, (int)segment);
  check_rows(&o, what);
}

TEST(fp4) {
  packed(FORMAT_MXFP4, 32, 130, 288, 0, 0);
  packed(FORMAT_MXFP4, 32, 1, 32, 0, 0);
  packed(FORMAT_NVFP4, 16, 129, 304, 0, 0);
  packed(FORMAT_NVFP4_LOCAL, 16, 130, 256, 128, 0);
  packed(FORMAT_NVFP4_LOCAL, 16, 130, 256, 128, 128); /* two arms */
  packed(FORMAT_NVFP4_LOCAL, 16, 7, 320, 2, 64);
}

static void bytes(enum format format, int64_t rows, int64_t cols, int64_t strip) {
  struct operand o = {.encoding = {.format = format}, .rows = rows, .cols = cols, .codes = codes, .outer = outer, .strip = strip};
  for (int64_t i = 0; i < 1024; i++) outer[i] = (float)(i + 1) * 0.11f;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) {
      int code = (int)draw(256);
      if (format == FORMAT_E4M3 && (code & 0x7F) == 0x7F) code ^= 1;
      if (format == FORMAT_E5M2 && (code & 0x7F) >= 0x7C) code ^= 0x10;
      codes[r * cols + c] = (uint8_t)code;
      expected[r][c] = (format == FORMAT_E4M3 ? e4m3_value(code) : e5m2_value(code)) * (double)outer[strip ? r / strip : 0];
    }
  check_rows(&o, format == FORMAT_E4M3 ? "E4M3" : "E5M2");
}

TEST(fp8) {
  bytes(FORMAT_E4M3, 5, 33, 0);
  bytes(FORMAT_E4M3, 130, 300, 1);
  bytes(FORMAT_E5M2, 17, 20, 0);
  bytes(FORMAT_E5M2, 17, 320, 1);
}

TEST(plain) {
  enum { R = 5, C = 7 };
  float wide[R * C];
  uint16_t half[R * C];
  for (int i = 0; i < R * C; i++) {
    wide[i] = (float)i * 1.1f - 9;
    half[i] = (uint16_t)(0x3F80 + i); /* 1 + i / 128 */
  }
  struct matrix m = {wide, DTYPE_F32, R, C}, h = {half, DTYPE_BF16, R, C};
  struct operand row = operand_of_matrix(&m, VIEW_ROW), column = operand_of_matrix(&h, VIEW_COLUMN);
  CHECK(row.rows == R && row.cols == C && column.rows == C && column.cols == R);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) expected[r][c] = (double)wide[r * C + c];
  check_rows(&row, "fp32 rows");
  for (int r = 0; r < C; r++)
    for (int c = 0; c < R; c++) expected[r][c] = 1 + (c * C + r) / 128.0;
  check_rows(&column, "bf16 columns");
}

int main(void) {
  RUN(fp4);
  RUN(fp8);
  RUN(plain);
  return test_report();
}
