/* The end of a contraction's sums: outer factors, segments, addend, rounding. */
#include "base/checked.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/formats.h"

bool gemm_has_outer(const struct encoding *e) {
  switch (e->format) {
    case FORMAT_E4M3:
    case FORMAT_E5M2:
    case FORMAT_NVFP4:
    case FORMAT_NVFP4_LOCAL: return true;
    case FORMAT_F32:
    case FORMAT_BF16:
    case FORMAT_MXFP4: return false;
  }
  return false;
}

/* What codes times scales times outer stand above the value. */
static double divisor(const struct encoding *e) {
  switch (e->format) {
    case FORMAT_MXFP4: return e->scale == SCALE_MX_FLOOR ? 1 : 6;
    case FORMAT_NVFP4: return e->scale == SCALE_TENSOR_4OVER6 ? 6 * 256 : 6 * 448;
    case FORMAT_F32:
    case FORMAT_BF16:
    case FORMAT_E4M3:
    case FORMAT_E5M2:
    case FORMAT_NVFP4_LOCAL: return 1;
  }
  return 1;
}

float gemm_constant(const struct encoding *a, const struct encoding *b) {
  return (float)(1.0 / (divisor(a) * divisor(b)));
}

/* The outer factors of `rows` rows at column k. */
static void load_outer(float *outer, const struct operand *o, int64_t row, int64_t rows, int64_t k) {
  bool has = gemm_has_outer(&o->encoding);
  int64_t segments = o->segment > 0 ? o->cols / o->segment : 1, segment = o->segment > 0 ? k / o->segment : 0;
  for (int64_t r = 0; r < rows; r++) {
    int64_t strip = o->strip > 0 ? (row + r) / o->strip : 0;
    outer[r] = has ? o->outer[strip * segments + segment] : 1.0f;
  }
}

CPU_CLONES static void scale(float *totals, const float *sums, const float *of_row, const float *of_col,
                             float constant, int64_t rows, int64_t cols, bool first) {
  for (int64_t r = 0; r < rows; r++, totals += GEMM_TILE_COLS, sums += GEMM_TILE_COLS) {
    float outer = of_row[r];
    if (first)
      for (int64_t i = 0; i < cols; i++) totals[i] = sums[i] * ((outer * of_col[i]) * constant);
    else
      for (int64_t i = 0; i < cols; i++) totals[i] = totals[i] + sums[i] * ((outer * of_col[i]) * constant);
  }
}

void gemm_end_segment(float *totals, const float *sums, const struct operand *a, const struct operand *b, int64_t row,
                      int64_t col, int64_t k, int64_t rows, int64_t cols, bool first) {
  float of_row[GEMM_TILE_ROWS], of_col[GEMM_TILE_COLS];
  load_outer(of_row, a, row, rows, k);
  load_outer(of_col, b, col, cols, k);
  scale(totals, sums, of_row, of_col, gemm_constant(&a->encoding, &b->encoding), rows, cols, first);
}

CPU_CLONES static void add_row(float *restrict values, const float *restrict addend, int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] = values[i] + addend[i];
}

CPU_CLONES static void make_one_nan(float *values, int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] = values[i] == values[i] ? values[i] : f32_from_bits(0x7FC00000u);
}

void gemm_write(struct matrix *out, const struct matrix *add, float *totals, int64_t row, int64_t col, int64_t rows,
                int64_t cols) {
  float addend[GEMM_TILE_COLS];
  for (int64_t r = 0; r < rows; r++, totals += GEMM_TILE_COLS) {
    int64_t at = (row + r) * out->cols + col;
    if (add) {
      cpu_load(addend, add, at, cols);
      add_row(totals, addend, cols);
    }
    make_one_nan(totals, cols);
    cpu_store(out, at, totals, cols);
  }
}
