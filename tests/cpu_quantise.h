/* What tests of quantisers share: sources of every kind of value, operands
 * with guarded memory, a view and its random fields written out literally. */
#ifndef FP4D_TESTS_CPU_QUANTISE_H
#define FP4D_TESTS_CPU_QUANTISE_H

#include "base/checked.h"
#include "kernels/hadamard.h"
#include "tests/cpu_device.h"
#include "tests/random.h"

enum { QUANTISE_KINDS = 10, QUANTISE_FINITE_KINDS = 8 };

/* A BF16 of one of several kinds; the last two have NaNs and infinities. */
static inline uint16_t quantise_value(int kind) {
  const double g = normal();
  switch (kind) {
    case 0: return bf16_encode((float)g);
    case 1: return bf16_encode((float)(g * 1e-12));
    case 2: return (uint16_t)((next() & 0x8000) | (0x7C00 + next() % 0x380)); /* huge */
    case 3: return (uint16_t)((next() & 0x8000) | (next() & 0xFF));           /* subnormal */
    case 4: return (uint16_t)(next() & 0x8000);                                        /* zeros */
    case 5: return bf16_encode((float)(g * exp(4 * normal())));
    case 6: return bf16_encode((float)ldexp(1 + .5 * (next() % 2), (int)(next() % 40) - 20));
    case 7: return (uint16_t)(next() % 40 ? next() & 0x8000 : bf16_encode((float)g));
    case 8: return (uint16_t)(next() % 300 ? bf16_encode((float)g) : 0x7F80 | (next() & 0x8040));
    default: return (uint16_t)next();
  }
}

static inline struct matrix quantise_source(int64_t rows, int64_t cols, int kind) {
  struct matrix m = test_matrix(DTYPE_BF16, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) ((uint16_t *)m.data)[i] = quantise_value(kind);
  return m;
}

/* ---- operands: 0xA5 everywhere before, and in 16 bytes behind each array after ---- */

enum { QUANTISE_GUARD = 16 };

static inline void *quantise_guarded(size_t bytes) {
  void *p = test_memory(bytes + QUANTISE_GUARD);
  memset(p, 0xA5, bytes + QUANTISE_GUARD);
  return p;
}

static inline void quantise_release(void *p, size_t bytes) {
  for (size_t i = 0; i < QUANTISE_GUARD; i++) CHECK(((uint8_t *)p)[bytes + i] == 0xA5);
  free(p);
}

static inline size_t quantise_code_bytes(const struct operand *o) {
  return (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols);
}
static inline size_t quantise_scale_bytes(const struct operand *o) {
  return (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols);
}
static inline size_t quantise_outer_bytes(const struct operand *o) {
  return (size_t)operand_outer_count(o) * sizeof(float);
}

static inline struct operand quantise_operand(struct encoding e, enum view view, int64_t source_rows,
                                              int64_t source_cols) {
  struct operand o = {.encoding = e, .view = view};
  o.rows = view == VIEW_ROW ? source_rows : source_cols;
  o.cols = view == VIEW_ROW ? source_cols : source_rows;
  o.strip = e.scale == SCALE_ROW ? 1 : 0;
  o.codes = quantise_guarded(quantise_code_bytes(&o));
  o.scales = quantise_guarded(quantise_scale_bytes(&o));
  if (operand_outer_count(&o) > 0) o.outer = quantise_guarded(quantise_outer_bytes(&o));
  return o;
}

static inline void quantise_drop(struct operand *o) {
  quantise_release(o->codes, quantise_code_bytes(o));
  quantise_release(o->scales, quantise_scale_bytes(o));
  if (o->outer) quantise_release(o->outer, quantise_outer_bytes(o));
}

static inline bool quantise_same(const struct operand *a, const struct operand *b) {
  return memcmp(a->codes, b->codes, quantise_code_bytes(a)) == 0 &&
         memcmp(a->scales, b->scales, quantise_scale_bytes(a)) == 0 &&
         (!a->outer || memcmp(a->outer, b->outer, quantise_outer_bytes(a)) == 0);
}

static inline uint32_t quantise_code(const struct operand *o, int64_t r, int64_t c) {
  return (uint32_t)o->codes[r * (o->cols / 2) + c / 2] >> (c % 2 ? 4 : 0) & 15u;
}

/* The tiled layout in other words than the library's. */
static inline uint32_t quantise_scale(const struct operand *o, int64_t r, int64_t g, int64_t block) {
  const int64_t tiles_across = (o->cols / block + 3) / 4;
  const uint8_t *tile = o->scales + 512 * (r / 128 * tiles_across + g / 4);
  return tile[16 * (r % 32) + 4 * (r / 32 % 4) + g % 4];
}

/* How many padding scales are not zero. */
static inline int64_t quantise_padding(const struct operand *o, int64_t block) {
  int64_t wrong = 0;
  for (int64_t r = 0; r < round_up(o->rows, 128); r++)
    for (int64_t g = 0; g < round_up(o->cols / block, 4); g++)
      if (r >= o->rows || g >= o->cols / block) wrong += quantise_scale(o, r, g, block) != 0;
  return wrong;
}

static inline void quantise_check_counts(const struct quantise_counts *got, const struct quantise_counts *want) {
  CHECK_EQ_I64(got->elements, want->elements);
  CHECK_EQ_I64(got->saturated, want->saturated);
  CHECK_EQ_I64(got->underflowed, want->underflowed);
  CHECK_EQ_I64(got->blocks, want->blocks);
  CHECK_EQ_I64(got->zero_blocks, want->zero_blocks);
  if (got->amax != want->amax) FAIL("amax %g, expected %g", (double)got->amax, (double)want->amax);
}

/* ---- a view, literally ------------------------------------------------------------- */

/* [o->rows][o->cols], the transform applied group by group. */
static inline uint16_t *quantise_view(const struct operand *o, const struct matrix *source) {
  const uint16_t *z = source->data;
  const int width = hadamard_width(o->encoding.hadamard);
  uint16_t *view = test_memory((size_t)(o->rows * o->cols) * sizeof *view);
  for (int64_t r = 0; r < o->rows; r++) {
    uint16_t *row = view + r * o->cols;
    for (int64_t c = 0; c < o->cols; c++)
      row[c] = o->view == VIEW_ROW ? z[r * source->cols + c] : z[c * source->cols + r];
    for (int64_t c = 0; width && c < o->cols; c += width) {
      float x[32];
      for (int i = 0; i < width; i++) x[i] = bf16_decode(row[c + i]);
      hadamard_transform(x, o->encoding.hadamard);
      for (int i = 0; i < width; i++) row[c + i] = isnan(x[i]) ? 0x7FC0 : bf16_encode(x[i]);
    }
  }
  return view;
}

/* The largest magnitude's pattern. */
static inline uint32_t quantise_amax(const uint16_t *view, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; i++)
    if ((view[i] & 0x7FFFu) > amax) amax = view[i] & 0x7FFFu;
  return amax;
}

static inline float quantise_finite_amax(const uint16_t *view, int64_t n) {
  float amax = 0;
  for (int64_t i = 0; i < n; i++) {
    const float a = bf16_decode(view[i] & 0x7FFF);
    if (a < INFINITY && a > amax) amax = a;
  }
  return amax;
}

/* The 16-bit field of element (r, c) of the view: kernels.h in other words. */
static inline uint32_t quantise_field(const struct operand *o, int64_t r, int64_t c, const struct draw *draw) {
  const bool row = o->view == VIEW_ROW;
  const int64_t token = row ? r : c, sample = token / draw->seq_len, position = token - sample * draw->seq_len;
  const int64_t block = row ? (position * o->cols + c) / 16 : r * (draw->seq_len / 16) + position / 16;
  const struct philox_block counter =
      philox_counter(draw->update, draw->first_sample + (uint64_t)sample, draw->layer,
                     draw->operand + (row ? 0 : DRAW_COLUMN), (uint32_t)block);
  uint32_t field[4];
  stochastic_fields(philox4x32_10(draw->seed, counter).word[c % 16 / 4], field);
  return field[c % 4];
}

/* ---- errors ------------------------------------------------------------------------ */

struct quantise_error {
  double relative, gain;
};

/* Of an operand without a transform, against its BF16 source. */
static inline struct quantise_error quantise_error_of(const struct operand *o, const struct matrix *source) {
  uint16_t *view = quantise_view(o, source);
  double *values = test_memory((size_t)o->cols * sizeof *values), error = 0, power = 0, cross = 0;
  for (int64_t r = 0; r < o->rows; r++) {
    operand_decode(o, r, values);
    for (int64_t c = 0; c < o->cols; c++) {
      const double x = (double)bf16_decode(view[r * o->cols + c]);
      error += (values[c] - x) * (values[c] - x);
      power += x * x;
      cross += values[c] * x;
    }
  }
  free(values);
  free(view);
  return (struct quantise_error){sqrt(error / power), cross / power};
}

/* Hash of what an operand holds. */
static inline uint64_t quantise_hash(const struct operand *o) {
  uint64_t h = test_hash(TEST_HASH_START, o->codes, quantise_code_bytes(o), 1);
  h = test_hash(h, o->scales, quantise_scale_bytes(o), 1);
  return o->outer ? test_hash(h, o->outer, quantise_outer_bytes(o) / sizeof(float), sizeof(float)) : h;
}

/* A source without libm, for bits that are to be the same on every machine. */
static inline struct matrix quantise_fixed_source(int64_t rows, int64_t cols) {
  struct matrix m = test_matrix(DTYPE_BF16, rows, cols);
  uint32_t x = 12345;
  for (int64_t i = 0; i < rows * cols; i++) {
    x = x * 1664525u + 1013904223u;
    ((uint16_t *)m.data)[i] = (uint16_t)((x >> 16 & 0x807F) | (0x3800 + (x >> 8 & 15) * 0x80));
  }
  return m;
}

#endif
