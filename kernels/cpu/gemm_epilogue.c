/* The end of a contraction's sums: outer factors, segments, addend, rounding. */
#include <string.h>

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

float gemm_constant(const struct encoding *a, const struct encoding *b) {
  return (float)(1.0 / (operand_divisor(a) * operand_divisor(b)));
}

/* What multiplies the sums of a tile: (of_row[r] * of_col[c]) * constant. */
struct factors {
  float of_row[GEMM_TILE_ROWS], of_col[GEMM_TILE_COLS], constant;
};

/* The outer factors of `rows` rows in column k, a strip after the other. */
static void load_outer(float *outer, const struct operand *o, int64_t row, int64_t rows, int64_t k) {
  bool has = gemm_has_outer(&o->encoding);
  int64_t segments = o->segment > 0 ? o->cols / o->segment : 1, segment = o->segment > 0 ? k / o->segment : 0;
  for (int64_t r = 0, end; r < rows; r = end) {
    int64_t strip = has && o->strip > 0 ? (row + r) / o->strip : 0;
    end = has && o->strip > 0 ? (strip + 1) * o->strip - row : rows;
    if (end > rows) end = rows;
    float x = has ? o->outer[strip * segments + segment] : 1.0f;
    for (int64_t i = r; i < end; i++) outer[i] = x;
  }
}

static void load_factors(struct factors *f, const struct operand *a, const struct operand *b, const struct gemm_place *p) {
  load_outer(f->of_row, a, p->row, p->rows, p->k);
  load_outer(f->of_col, b, p->col, p->cols, p->k);
  for (int64_t i = p->cols; i < GEMM_TILE_COLS; i++) f->of_col[i] = 0;
  f->constant = gemm_constant(&a->encoding, &b->encoding);
}

/* t of the definition for a row, and the earlier segments' before it. */
static inline __attribute__((always_inline)) void end_row(float *values, const float *earlier, const float *sums,
                                                          const struct factors *f, float of_row) {
  if (earlier)
    for (int i = 0; i < GEMM_TILE_COLS; i++) values[i] = earlier[i] + sums[i] * ((of_row * f->of_col[i]) * f->constant);
  else
    for (int i = 0; i < GEMM_TILE_COLS; i++) values[i] = sums[i] * ((of_row * f->of_col[i]) * f->constant);
}

CPU_CLONES static void end_rows(float *totals, const float *sums, const struct factors *f, int64_t rows, bool first) {
  for (int64_t r = 0; r < rows; r++, totals += GEMM_TILE_COLS, sums += GEMM_TILE_COLS) {
    float values[GEMM_TILE_COLS];
    end_row(values, first ? NULL : totals, sums, f, f->of_row[r]);
    memcpy(totals, values, sizeof values);
  }
}

void gemm_end_segment(float *totals, const float *sums, const struct operand *a, const struct operand *b,
                      const struct gemm_place *p, bool first) {
  struct factors f;
  load_factors(&f, a, b, p);
  end_rows(totals, sums, &f, p->rows, first);
}

static inline float with_one_nan(float x) { return x == x ? x : f32_from_bits(0x7FC00000u); }

CPU_CLONES static void write_rows(struct matrix *out, const struct matrix *add, const float *totals, const float *sums,
                                  const struct factors *f, const struct gemm_place *p) {
  for (int64_t r = 0; r < p->rows; r++) {
    int64_t at = (p->row + r) * out->cols + p->col;
    float values[GEMM_TILE_COLS];
    end_row(values, totals ? totals + r * GEMM_TILE_COLS : NULL, sums + r * GEMM_TILE_COLS, f, f->of_row[r]);
    if (add && add->dtype == DTYPE_F32) {
      const float *addend = (const float *)add->data + at;
      for (int64_t i = 0; i < p->cols; i++) values[i] = values[i] + addend[i];
    } else if (add) {
      const uint16_t *addend = (const uint16_t *)add->data + at;
      for (int64_t i = 0; i < p->cols; i++) values[i] = values[i] + bf16_decode(addend[i]);
    }
    if (out->dtype == DTYPE_F32) {
      float *to = (float *)out->data + at;
      for (int64_t i = 0; i < p->cols; i++) to[i] = with_one_nan(values[i]);
    } else {
      uint16_t *to = (uint16_t *)out->data + at;
      for (int64_t i = 0; i < p->cols; i++) to[i] = bf16_encode(with_one_nan(values[i]));
    }
  }
}

void gemm_write(struct matrix *out, const struct matrix *add, const float *totals, const float *sums,
                const struct operand *a, const struct operand *b, const struct gemm_place *p) {
  struct factors f;
  load_factors(&f, a, b, p);
  write_rows(out, add, totals, sums, &f, p);
}
