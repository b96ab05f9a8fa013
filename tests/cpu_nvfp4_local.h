/* CTA-local NVFP4 for tests: operands, a literal model, element by element, and sources. */
#ifndef FP4D_TESTS_CPU_NVFP4_LOCAL_H
#define FP4D_TESTS_CPU_NVFP4_LOCAL_H

#include <float.h>

#include "kernels/cpu/whole.h"
#include "kernels/hadamard.h"
#include "kernels/nvfp4_local.h"
#include "tests/cpu_literal.h"

enum { F = SCALE_LOCAL_FAITHFUL, P2 = SCALE_LOCAL_POW2 };
static const int RULES[2] = {F, P2};

static inline struct encoding local(int rule, enum block_geometry block, enum rounding rounding, enum hadamard h) {
  return (struct encoding){FORMAT_NVFP4_LOCAL, block, (enum scale_rule)rule, rounding, h, 0};
}
static inline struct encoding plain_local(int rule) { return local(rule, BLOCK_1X16, ROUND_NEAREST, HADAMARD_NONE); }

/* ---- operands --------------------------------------------------------------------- */

enum { GUARD = 16 };

/* Memory holds 0xA5 before, and 16 bytes behind each array must still do so.
 * Scale padding is cleared by whoever calls the rule. */
static inline struct operand operand_new(struct encoding e, enum view view, int64_t rows, int64_t cols, int64_t strip,
                                  int64_t segment) {
  struct operand o = {.encoding = e, .view = view, .rows = rows, .cols = cols, .strip = strip, .segment = segment};
  const size_t codes = (size_t)operand_code_bytes(&e, rows, cols), scales = (size_t)operand_scale_bytes(&e, rows, cols);
  const size_t outer = (size_t)operand_outer_count(&o) * sizeof(float);
  o.codes = test_memory(codes + GUARD);
  o.scales = test_memory(scales + GUARD);
  o.outer = test_memory(outer + GUARD);
  memset(o.codes, 0xA5, codes + GUARD);
  memset(o.scales, 0, scales);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols / 16; c++) o.scales[operand_scale_offset(r, c, cols / 16)] = 0xA5;
  memset(o.scales + scales, 0xA5, GUARD);
  memset(o.outer, 0xA5, outer + GUARD);
  return o;
}
static inline void operand_end(struct operand *o) {
  const size_t codes = (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols);
  const size_t scales = (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols);
  const uint8_t *behind = (const uint8_t *)(o->outer + operand_outer_count(o));
  for (int i = 0; i < GUARD; i++) CHECK(o->codes[codes + (size_t)i] == 0xA5 && o->scales[scales + (size_t)i] == 0xA5 && behind[i] == 0xA5);
  free(o->codes);
  free(o->scales);
  free(o->outer);
}

static inline float outer_at(const struct operand *o, int64_t r, int64_t c) {
  const int64_t strip = o->strip > 0 ? r / o->strip : 0, segment = o->segment > 0 ? c / o->segment : 0;
  return o->outer[strip * (o->segment > 0 ? ceil_div(o->cols, o->segment) : 1) + segment];
}
static inline double decoded(const struct operand *o, int64_t r, int64_t c) {
  return (double)e2m1_decode(code_at(o, r, c)) * (double)e4m3_decode(scale_at(o, r, c / 16)) * (double)outer_at(o, r, c);
}
static inline bool same_operand(const struct operand *a, const struct operand *b) {
  return memcmp(a->codes, b->codes, (size_t)operand_code_bytes(&a->encoding, a->rows, a->cols)) == 0 &&
         memcmp(a->scales, b->scales, (size_t)operand_scale_bytes(&a->encoding, a->rows, a->cols)) == 0 &&
         memcmp(a->outer, b->outer, (size_t)operand_outer_count(a) * sizeof(float)) == 0;
}

/* What whole_quantise does for one view. */
static inline void quantise_by(struct cpu_device *d, struct panel_rule rule, const struct matrix *m) {
  const bool by_rows = rule.o->view == VIEW_ROW;
  nvfp4_local_amaxes(d, by_rows ? rule.o : NULL, by_rows ? NULL : rule.o, m);
  nvfp4_local_quantise(d, &rule, m);
  if (rule.visit) panels_visit(d, &rule, 1, m);
}

/* A fresh operand of a source. */
static inline struct operand quantised(struct cpu_device *d, const struct matrix *m, struct encoding e, enum view view,
                                int64_t strip, int64_t segment, const struct draw *draw,
                                struct quantise_counts *counts) {
  struct operand o = view == VIEW_ROW ? operand_new(e, view, m->rows, m->cols, strip, segment)
                                      : operand_new(e, view, m->cols, m->rows, strip, segment);
  quantise_by(d, (struct panel_rule){.o = &o, .draw = e.rounding == ROUND_STOCHASTIC ? draw : NULL, .counts = counts}, m);
  return o;
}

/* ---- the model ----------------------------------------------------------------------- */

static inline double e4m3_value(int byte) { return byte < 8 ? byte * 0x1p-9 : ldexp(8 + byte % 8, byte / 8 - 10); }

/* Nearest, ties to the even byte, 448 at most. */
static inline int model_scale(double x) {
  int low = 0;
  while (low < 0x7E && e4m3_value(low + 1) <= x) low++;
  if (low == 0x7E) return low;
  const double middle = (e4m3_value(low) + e4m3_value(low + 1)) / 2;
  return low + (x > middle || (x == middle && low % 2));
}

static inline int model_exponent(double a) { /* the smallest E with a <= 2688 2^E */
  int e = -160;
  while (a > ldexp(2688, e)) e++;
  return e;
}

/* The view's elements after the transform, as BF16. */
static inline uint16_t *view_of(const struct matrix *m, const struct operand *o) {
  uint16_t *z = test_memory((size_t)(o->rows * o->cols) * sizeof *z);
  const uint16_t *source = m->data;
  const int width = hadamard_width(o->encoding.hadamard);
  for (int64_t r = 0; r < o->rows; r++) {
    for (int64_t c = 0; c < o->cols; c++)
      z[r * o->cols + c] = o->view == VIEW_ROW ? source[r * m->cols + c] : source[c * m->cols + r];
    for (int64_t c = 0; width && c < o->cols; c += width) {
      float x[32];
      for (int i = 0; i < width; i++) x[i] = bf16_decode(z[r * o->cols + c + i]);
      hadamard_transform(x, o->encoding.hadamard);
      for (int i = 0; i < width; i++) {
        const uint16_t bits = bf16_encode(x[i]);
        z[r * o->cols + c + i] = (bits & 0x7FFF) > 0x7F80 ? 0x7FC0 : bits;
      }
    }
  }
  return z;
}

static inline int amax_of(const uint16_t *z, int64_t stride, int64_t rows, int64_t cols) {
  int amax = 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) {
      const int a = z[r * stride + c] & 0x7FFF;
      amax = a > amax ? a : amax;
    }
  return amax;
}
static inline float finite_value(int amax) { return bf16_decode((uint16_t)(amax < 0x7F80 ? amax : 0x7F7F)); }

static inline int64_t smallest(int64_t a, int64_t b) { return a < b ? a : b; }

/* What the definition says of one block of a chunk: its scale before folding and,
 * for elements, the float that E2M1 gets. A chunk of the everyday range is
 * written as the definition is, with A = 2^E; elsewhere A is divided out first. */
struct model_chunk {
  int rule, exponent;
  float g, s;
};
static inline struct model_chunk model_chunk(int rule, int amax) {
  const float a = finite_value(amax);
  struct model_chunk c = {.rule = rule};
  if (rule == P2) {
    c.exponent = model_exponent((double)a);
    c.g = (float)ldexp(1, c.exponent);
  } else {
    c.g = a / 448.0f;
    c.s = fminf(448.0f / a, FLT_MAX);
  }
  return c;
}
static inline bool everyday(const struct model_chunk *c) { return c->exponent > -60 && c->exponent < 60; }
static inline int model_block_scale(const struct model_chunk *c, int amax) {
  const float m = finite_value(amax);
  if (c->rule == F) return model_scale((double)(m * (c->s * (1.0f / 6.0f))));
  if (everyday(c)) return model_scale((double)(m * (1.0f / 6.0f) * (float)ldexp(1, -c->exponent)));
  return model_scale((double)((float)ldexp((double)m, -c->exponent) * (1.0f / 6.0f)));
}
static inline float model_scaled(const struct model_chunk *c, float z, int scale) {
  const float sc = (float)e4m3_value(scale);
  if (c->rule == F || everyday(c)) return z * fminf(1.0f / (sc * c->g), FLT_MAX);
  return (float)ldexp((double)z, -c->exponent) * (1.0f / sc);
}

/* Checks operand `o` of source m, chunk by chunk, and returns the counts. */
static inline struct quantise_counts check_operand(const struct operand *o, const struct matrix *m, const struct draw *draw) {
  struct quantise_counts n = {0};
  const int rule = (int)o->encoding.scale;
  const bool tiled = o->encoding.block == BLOCK_2D16;
  uint16_t *z = view_of(m, o);
  const int64_t cols = o->cols, strip = o->strip > 0 ? o->strip : o->rows, segment = o->segment > 0 ? o->segment : cols;
  int64_t wrong = 0;
  for (int64_t sr = 0; sr < o->rows; sr += strip)
    for (int64_t sc = 0; sc < cols; sc += segment) {
      const int64_t strip_rows = smallest(strip, o->rows - sr), segment_cols = smallest(segment, cols - sc);
      const int amax = amax_of(z + sr * cols + sc, cols, strip_rows, segment_cols);
      const float outer = outer_at(o, sr, sc);
      if (amax == 0) wrong += f32_bits(outer) != 0;
      else if (amax >= 0x7F80) wrong += !isnan(outer);
      else wrong += outer != model_chunk(rule, amax).g || !(outer > 0);
      for (int64_t r0 = sr; r0 < sr + strip_rows; r0 += 128)
        for (int64_t c0 = sc; c0 < sc + segment_cols; c0 += 128) {
          const int64_t r1 = smallest(r0 + 128, sr + strip_rows), c1 = smallest(c0 + 128, sc + segment_cols);
          const int chunk_amax = amax_of(z + r0 * cols + c0, cols, r1 - r0, c1 - c0);
          const struct model_chunk chunk = model_chunk(rule, chunk_amax ? chunk_amax : 1), all = model_chunk(rule, amax ? amax : 1);
          for (int64_t r = r0; r < r1; r++)
            for (int64_t c = c0; c < c1; c += 16) {
              const int a = tiled ? amax_of(z + r / 16 * 16 * cols + c, cols, 16, 16) : amax_of(z + r * cols + c, cols, 1, 16);
              const int scale = a ? model_block_scale(&chunk, a) : 0;
              const int folded = rule == P2 ? model_scale(ldexp(e4m3_value(scale), chunk.exponent - all.exponent))
                                            : model_scale((double)((float)e4m3_value(scale) * (chunk.g / all.g)));
              wrong += scale_at(o, r, c / 16) != (uint32_t)folded;
              n.blocks++;
              n.zero_blocks += folded == 0;
              for (int64_t i = c; i < c + 16; i++) {
                const uint16_t bits = z[r * cols + i];
                const float value = bf16_decode(bits);
                const int field = o->encoding.rounding == ROUND_STOCHASTIC ? field_of(draw, r, i, cols) : -1;
                const float t = folded ? model_scaled(&chunk, fabsf(value), scale) : 0.0f;
                const uint32_t code = folded ? model_code((double)t, bits >> 15, field) : 0;
                wrong += code_at(o, r, i) != code;
                n.elements++;
                n.saturated += !(t <= 6);
                n.underflowed += (bits & 0x7FFF) && code % 8 == 0;
                if (isfinite(value) && fabsf(value) > n.amax) n.amax = fabsf(value);
              }
            }
        }
    }
  CHECK_EQ_I64(wrong, 0);
  free(z);
  /* padding is as it was */
  const int64_t all_rows = round_up(o->rows, 128), all_cols = round_up(cols / 16, 4);
  for (int64_t r = 0; r < all_rows; r++)
    for (int64_t c = 0; c < all_cols; c++)
      if (r >= o->rows || c >= cols / 16) CHECK(scale_at(o, r, c) == 0);
  return n;
}

/* ---- sources -------------------------------------------------------------------------- */

static inline struct matrix source_new(int64_t rows, int64_t cols) { return test_matrix(DTYPE_BF16, rows, cols); }
static inline struct matrix gaussian(int64_t rows, int64_t cols, double scale) {
  struct matrix m = source_new(rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) test_set(&m, i, normal() * scale);
  return m;
}
/* Every 128x128 chunk, in either view, has its own magnitude, 2^-spread..1. */
static inline struct matrix chunky(int64_t rows, int64_t cols, double spread) {
  struct matrix m = gaussian(rows, cols, 1);
  double magnitude[64];
  for (int i = 0; i < 64; i++) magnitude[i] = exp2(-spread * (i * 37 % 64) / 63);
  for (int64_t i = 0; i < rows * cols; i++)
    test_set(&m, i, test_get(&m, i) * magnitude[(i / cols / 128 * ceil_div(cols, 128) + i % cols / 128) % 64]);
  return m;
}

#endif
