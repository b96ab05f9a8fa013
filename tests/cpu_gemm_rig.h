/* What the tests of the contraction share: operands of every kind beside the
 * numbers they mean, and the definition, written out one output at a time. */
#ifndef FP4D_TESTS_CPU_GEMM_RIG_H
#define FP4D_TESTS_CPU_GEMM_RIG_H

#include <math.h>
#include <stdlib.h>

#include "base/philox.h"
#include "kernels/cpu/cpu.h"
#include "tests/test.h"

static struct cpu_device device;

static inline void open_device(int threads) {
  struct error e;
  if (device.threads) threads_destroy(device.threads);
  free(device.scratch);
  device.threads = threads_create(threads, &e);
  device.scratch_bytes = cpu_contract_scratch_bytes(NULL, threads);
  device.scratch = malloc((size_t)device.scratch_bytes);
  if (!device.threads || !device.scratch) abort();
}

/* ---- random numbers -------------------------------------------------------- */

static uint32_t draws;

static inline uint32_t draw(void) {
  struct philox_block counter = {{draws++, 0, 0, 0}};
  return philox4x32_10(20240607, counter).word[0];
}

static inline int64_t draw_below(int64_t n) { return (int64_t)(draw() % (uint32_t)n); }
static inline float draw_float(void) { return (float)(int32_t)draw() * 0x1p-31f; }

static inline float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

/* The kinds of data. */
enum data { UNIFORM, CANCELLING, WIDE, TINY, HUGE_VALUES, NONFINITE, SUBNORMAL, INTEGER, DATA_KINDS };

/* A float of a kind that BF16 holds. */
static inline float draw_value(enum data kind) {
  float x = of_bits(bits_of(draw_float()) & 0xffff0000u);
  switch (kind) {
    case WIDE: return ldexpf(x, (int)draw_below(40) - 20);
    case TINY: return ldexpf(x, -50 - (int)draw_below(30));
    case HUGE_VALUES: return ldexpf(x, 60 + (int)draw_below(8));
    case NONFINITE:
      switch (draw_below(40)) {
        case 0: return INFINITY;
        case 1: return -INFINITY;
        case 2: return of_bits(0x7fc10000u | (draw() & 0x803f0000u));
        default: return x;
      }
    case SUBNORMAL: return draw_below(4) ? x : of_bits(draw() & 0x807f0000u);
    case INTEGER: return (float)(draw_below(17) - 8);
    default: return draw_below(10) ? x : draw_below(2) ? 0.0f : -0.0f;
  }
}

/* ---- operands: packed bytes and, beside them, the numbers they mean -------- */

/* What an operand can be. */
static const struct kind {
  enum format format;
  enum view view;
  enum block_geometry block;
  enum scale_rule scale;
  int divisor; /* of code * scale * outer */
  int block_cols;
} kinds[] = {{FORMAT_F32, VIEW_ROW, BLOCK_NONE, SCALE_NONE, 1, 1},
             {FORMAT_F32, VIEW_COLUMN, BLOCK_NONE, SCALE_NONE, 1, 1},
             {FORMAT_BF16, VIEW_ROW, BLOCK_NONE, SCALE_NONE, 1, 1},
             {FORMAT_BF16, VIEW_COLUMN, BLOCK_NONE, SCALE_NONE, 1, 1},
             {FORMAT_MXFP4, VIEW_ROW, BLOCK_1X32, SCALE_MX_ENCODE, 6, 32},
             {FORMAT_MXFP4, VIEW_COLUMN, BLOCK_2D32, SCALE_MX_ADAPTIVE, 6, 32},
             {FORMAT_MXFP4, VIEW_ROW, BLOCK_1X32, SCALE_MX_FLOOR, 1, 32},
             {FORMAT_E4M3, VIEW_ROW, BLOCK_NONE, SCALE_TENSOR, 1, 1},
             {FORMAT_E4M3, VIEW_COLUMN, BLOCK_NONE, SCALE_ROW, 1, 1},
             {FORMAT_E5M2, VIEW_ROW, BLOCK_NONE, SCALE_ROW, 1, 1},
             {FORMAT_NVFP4, VIEW_ROW, BLOCK_1X16, SCALE_TENSOR, 2688, 16},
             {FORMAT_NVFP4, VIEW_COLUMN, BLOCK_2D16, SCALE_TENSOR, 2688, 16},
             {FORMAT_NVFP4, VIEW_ROW, BLOCK_1X16, SCALE_TENSOR_4OVER6, 1536, 16},
             {FORMAT_NVFP4_LOCAL, VIEW_ROW, BLOCK_1X16, SCALE_LOCAL_FAITHFUL, 1, 16},
             {FORMAT_NVFP4_LOCAL, VIEW_COLUMN, BLOCK_2D16, SCALE_LOCAL_POW2, 1, 16}};
enum {
  F32_ROW, F32_COLUMN, BF16_ROW, BF16_COLUMN, MX_ROW, MX_COLUMN, MX_FLOOR, E4M3_ROW, E4M3_COLUMN, E5M2_ROW, NV_ROW,
  NV_COLUMN, NV_4OVER6, LOCAL_ROW, LOCAL_COLUMN, KINDS
};

static inline bool has_outer(int kind) { return kind >= E4M3_ROW; }

struct test_operand {
  struct operand o;
  float *values;  /* [rows][cols], before outer factors */
  double divisor;
};

/* The scale's place, from the layout's description in kernels.h. */
static inline int64_t scale_place(int64_t r, int64_t c, int64_t scale_cols) {
  int64_t tile = r / 128 * ((scale_cols + 3) / 4) + c / 4;
  return tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

/* An 8-bit float with `fraction` bits of fraction; bias 7 or 15. */
static inline float value_of_byte(enum format format, int byte) {
  int fraction = format == FORMAT_E4M3 ? 3 : 2, bias = format == FORMAT_E4M3 ? 7 : 15;
  int e = (byte & 0x7f) >> fraction, m = byte & ((1 << fraction) - 1);
  float x = e ? ldexpf((float)(m + (1 << fraction)), e - bias - fraction) : ldexpf((float)m, 1 - bias - fraction);
  if (format == FORMAT_E4M3 && (byte & 0x7f) == 0x7f) x = NAN;
  if (format == FORMAT_E5M2 && e == 31) x = m ? NAN : INFINITY;
  return byte & 0x80 ? -x : x;
}

static inline float value_of_code(int code) {
  static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

static inline int draw_e8m0(enum data kind) {
  switch (kind) {
    case INTEGER: return 127 + (int)draw_below(2);
    case TINY: return 40 + (int)draw_below(40);
    case SUBNORMAL: return (int)draw_below(3);
    case HUGE_VALUES: return 185 + (int)draw_below(10);
    case NONFINITE: return 252 + (int)draw_below(4);
    case WIDE: return 107 + (int)draw_below(40);
    default: return 122 + (int)draw_below(8);
  }
}

static inline int draw_e4m3_scale(enum data kind) {
  switch (kind) {
    case INTEGER: return 0x38 + 8 * (int)draw_below(4); /* 1, 2, 4, 8 */
    case TINY: return (int)draw_below(12);
    case SUBNORMAL: return (int)draw_below(8);
    case HUGE_VALUES: return 0x70 + (int)draw_below(15);
    case NONFINITE: return draw_below(10) ? 0x38 : 0x7f;
    case WIDE: return (int)draw_below(0x7f);
    default: return 0x28 + (int)draw_below(0x20);
  }
}

static inline int draw_byte(enum format format, enum data kind) {
  for (;;) {
    int byte = (int)(draw() & 0xff);
    float x = value_of_byte(format, byte);
    bool fits = kind == NONFINITE ? draw_below(4) || !isfinite(x)
                : kind == INTEGER ? fabsf(x) <= 8 && x == rintf(x)
                : kind == SUBNORMAL ? (byte & 0x7f) < 8
                : kind == TINY      ? fabsf(x) < 0x1p-4f
                : kind == HUGE_VALUES ? fabsf(x) > 16 && isfinite(x)
                                      : isfinite(x);
    if (fits) return byte;
  }
}

static inline float draw_outer(enum scale_rule rule, enum data kind) {
  if (draw_below(12) == 0) return 0;
  int power = (int)draw_below(9) - 4;
  if (rule == SCALE_LOCAL_POW2 || kind == INTEGER) return ldexpf(1, power);
  float x = ldexpf(1 + fabsf(draw_float()), power);
  if (kind == NONFINITE && draw_below(6) == 0) return INFINITY;
  return kind == TINY ? x * 0x1p-60f : kind == HUGE_VALUES ? x * 0x1p62f : kind == SUBNORMAL ? x * 0x1p-130f : x;
}

static inline void fill_codes(struct test_operand *t, enum data kind) {
  bool mx = t->o.encoding.format == FORMAT_MXFP4;
  int64_t rows = t->o.rows, cols = t->o.cols, block = mx ? 32 : 16, scale_cols = cols / block;
  t->o.codes = malloc((size_t)(rows * cols / 2));
  t->o.scales = calloc((size_t)((rows + 127) / 128 * ((scale_cols + 3) / 4) * 512), 1);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < scale_cols; c++) {
      int b = mx ? draw_e8m0(kind) : draw_e4m3_scale(kind);
      t->o.scales[scale_place(r, c, scale_cols)] = (uint8_t)b;
      float scale = !mx ? value_of_byte(FORMAT_E4M3, b) : b == 255 ? NAN : ldexpf(1, b - 127);
      for (int64_t j = 0; j < block; j += 2) {
        uint8_t byte = (uint8_t)draw();
        int64_t at = r * cols + c * block + j;
        t->o.codes[at / 2] = byte;
        for (int h = 0; h < 2; h++) t->values[at + h] = value_of_code(byte >> (4 * h) & 15) * scale;
      }
    }
}

static inline void fill_bytes(struct test_operand *t, enum data kind) {
  int64_t cols = t->o.cols, n = t->o.rows * cols;
  t->o.codes = malloc((size_t)n);
  for (int64_t at = 0; at < n; at++) {
    int byte = draw_byte(t->o.encoding.format, kind);
    if (kind == CANCELLING && at % cols > 0 && draw_below(2)) byte = t->o.codes[at - at % cols + draw_below(at % cols)] ^ 0x80;
    t->o.codes[at] = (uint8_t)byte;
    t->values[at] = value_of_byte(t->o.encoding.format, byte);
  }
}

static inline void fill_plain(struct test_operand *t, enum data kind) {
  enum format format = t->o.encoding.format;
  int64_t rows = t->o.rows, cols = t->o.cols;
  t->o.codes = malloc((size_t)(rows * cols) * (format == FORMAT_BF16 ? 2 : 4));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) {
      float x = draw_value(kind);
      if (format == FORMAT_F32 && kind != INTEGER && x == x) x *= 1 + draw_float() * 0x1p-12f;
      /* Sums that cancel: half of the elements repeat, negated, an earlier one of their row. */
      if (kind == CANCELLING && c > 0 && draw_below(2)) x = -t->values[r * cols + draw_below(c)];
      t->values[r * cols + c] = x;
      int64_t at = t->o.view == VIEW_COLUMN ? c * rows + r : r * cols + c;
      if (format == FORMAT_BF16) {
        uint16_t h = (uint16_t)(bits_of(x) >> 16);
        memcpy(t->o.codes + 2 * at, &h, 2);
      } else {
        memcpy(t->o.codes + 4 * at, &x, 4);
      }
    }
}

/* strip, segment: as in struct operand; read where the kind has outer factors. */
static inline struct test_operand make_strips(int kind, int64_t rows, int64_t cols, int64_t strip, int64_t segment,
                                              enum data data) {
  const struct kind *k = &kinds[kind];
  struct test_operand t = {.o = {.encoding = {.format = k->format, .block = k->block, .scale = k->scale},
                                 .view = k->view, .rows = rows, .cols = cols, .strip = strip, .segment = segment},
                           .divisor = k->divisor};
  t.values = malloc((size_t)(rows * cols) * sizeof(float));
  if (k->block_cols > 1) fill_codes(&t, data);
  else if (has_outer(kind)) fill_bytes(&t, data);
  else fill_plain(&t, data);
  if (has_outer(kind)) {
    int64_t n = (strip ? (rows + strip - 1) / strip : 1) * (segment ? cols / segment : 1);
    t.o.outer = malloc((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) t.o.outer[i] = draw_outer(k->scale, data);
  }
  return t;
}

static inline struct test_operand make_operand(int kind, int64_t rows, int64_t cols, enum data data) {
  static const int64_t strips[] = {0, 1, 3, 16, 128};
  return make_strips(kind, rows, cols, has_outer(kind) ? strips[draw_below(5)] : 0, 0, data);
}

static inline void free_operand(struct test_operand *t) {
  free(t->o.codes);
  free(t->o.scales);
  free(t->o.outer);
  free(t->values);
}

/* ---- the definition --------------------------------------------------------- */

/* Over columns [first, k). */
static inline float sum_of_definition(const float *a, const float *b, int64_t first, int64_t k) {
  float acc = 0;
  for (int64_t group = first; group < k; group += 32) {
    float even = 0, odd = 0;
    for (int64_t i = group; i < group + 32; i += 2) {
      even = fmaf(i < k ? a[i] : 0, i < k ? b[i] : 0, even);
      odd = fmaf(i + 1 < k ? a[i + 1] : 0, i + 1 < k ? b[i + 1] : 0, odd);
    }
    acc = acc + (even + odd);
  }
  return acc;
}

static inline float read_element(const struct matrix *m, int64_t i) {
  if (m->dtype == DTYPE_F32) return ((const float *)m->data)[i];
  return of_bits((uint32_t)((const uint16_t *)m->data)[i] << 16);
}

/* BF16 by exact arithmetic in double: the neighbour that is nearest, ties to even. */
static inline uint16_t round_to_bf16(float x) {
  if (isnan(x)) return 0x7fc0;
  uint32_t low = bits_of(x) & 0xffff0000u;
  if (isinf(x) || bits_of(x) == low) return (uint16_t)(low >> 16);
  uint32_t high = low + 0x10000u;
  double of_low = fabs((double)of_bits(low)), of_high = isinf(of_bits(high)) ? 0x1p128 : fabs((double)of_bits(high));
  double below = fabs((double)x) - of_low, above = of_high - fabs((double)x);
  bool up = above < below || (above == below && (low >> 16 & 1));
  return (uint16_t)((up ? high : low) >> 16);
}

static inline float outer_at(const struct operand *o, int64_t row, int64_t k) {
  if (!o->outer) return 1;
  int64_t segment = o->segment ? o->segment : o->cols;
  return o->outer[(o->strip ? row / o->strip : 0) * (o->cols / segment) + k / segment];
}

static inline int64_t segment_of(const struct operand *o, int64_t k) {
  return o->outer && o->segment ? k / o->segment : 0;
}

/* An output of a contraction before the addend. */
static inline float total_of_definition(const struct test_operand *a, const struct test_operand *b, int64_t i, int64_t j) {
  int64_t k = a->o.cols;
  float constant = (float)(1.0 / (a->divisor * b->divisor)), total = 0;
  for (int64_t first = 0, end; first < k; first = end) {
    for (end = first + 1; end < k; end++)
      if (segment_of(&a->o, end) != segment_of(&a->o, first) || segment_of(&b->o, end) != segment_of(&b->o, first)) break;
    float outer = outer_at(&a->o, i, first) * outer_at(&b->o, j, first), factor = outer * constant;
    float t = sum_of_definition(a->values + i * k, b->values + j * k, first, end) * factor;
    total = first == 0 ? t : total + t;
  }
  return total;
}

/* All of them; the caller frees them. */
static inline float *totals_of_definition(const struct test_operand *a, const struct test_operand *b) {
  float *totals = malloc((size_t)(a->o.rows * b->o.rows) * sizeof(float));
  for (int64_t i = 0; i < a->o.rows; i++)
    for (int64_t j = 0; j < b->o.rows; j++) totals[i * b->o.rows + j] = total_of_definition(a, b, i, j);
  return totals;
}

static inline void check_definition(const char *label, const struct matrix *out, int64_t k, const float *totals,
                                    const float *addend) {
  int64_t wrong = 0;
  for (int64_t at = 0; at < out->rows * out->cols; at++) {
    float expected = totals[at];
    if (addend) expected = expected + addend[at];
    uint32_t e = out->dtype == DTYPE_BF16 ? (uint32_t)round_to_bf16(expected) << 16
                 : isnan(expected)        ? 0x7fc00000u
                                          : bits_of(expected);
    uint32_t got = bits_of(read_element(out, at));
    if (e != got && wrong++ == 0)
      FAIL("%s %s [%" PRId64 ",%" PRId64 "] of %" PRId64 "x%" PRId64 "x%" PRId64 ": %08x, expected %08x", label,
           cpu_isa_name(), at / out->cols, at % out->cols, out->rows, out->cols, k, got, e);
  }
}

enum add_mode { ADD_NONE, ADD_OUT, ADD_OTHER, ADD_F32, ADD_MODES };

static inline struct matrix make_matrix(enum dtype dtype, int64_t rows, int64_t cols, float scale) {
  struct matrix m = {malloc((size_t)(rows * cols) * dtype_bytes(dtype)), dtype, rows, cols};
  for (int64_t i = 0; i < rows * cols; i++) {
    float x = draw_float() * scale;
    uint16_t h = (uint16_t)(bits_of(x) >> 16);
    if (dtype == DTYPE_F32) memcpy((char *)m.data + 4 * i, &x, 4);
    else memcpy((char *)m.data + 2 * i, &h, 2);
  }
  return m;
}

static inline void contract_and_check(const char *label, const struct test_operand *a, const struct test_operand *b,
                               const float *totals, enum dtype dtype, enum add_mode mode) {
  int64_t m = a->o.rows, n = b->o.rows;
  struct matrix out = make_matrix(dtype, m, n, 1), other = make_matrix(mode == ADD_F32 ? DTYPE_F32 : dtype, m, n, 1);
  const struct matrix *add = mode == ADD_OUT ? &out : mode == ADD_NONE ? NULL : &other;
  float *addend = NULL;
  if (add) {
    addend = malloc((size_t)(m * n) * sizeof(float));
    for (int64_t i = 0; i < m * n; i++) addend[i] = read_element(add, i);
  }
  cpu_contract(&device.device, &out, &a->o, &b->o, add);
  check_definition(label, &out, a->o.cols, totals, addend);
  free(addend);
  free(out.data);
  free(other.data);
}

static const char *const isas[] = {"amx-bf16", "avx512-fma", "avx2-fma", "neon-fma", "plain-fma"};
enum { ISAS = sizeof isas / sizeof isas[0] };

static inline void check_pair(const char *label, const struct test_operand *a, const struct test_operand *b, enum dtype dtype,
                       enum add_mode mode) {
  float *totals = totals_of_definition(a, b);
  for (int i = 0; i < ISAS; i++)
    if (cpu_isa_choose(isas[i], NULL)) contract_and_check(label, a, b, totals, dtype, mode);
  cpu_isa_choose(NULL, NULL);
  free(totals);
}

/* k, or the next number above it that is whole blocks of both. */
static inline int64_t whole_blocks(int ka, int kb, int64_t k) {
  int64_t block = kinds[ka].block_cols > kinds[kb].block_cols ? kinds[ka].block_cols : kinds[kb].block_cols;
  return (k + block - 1) / block * block;
}

static inline void pair_of_data(int ka, int kb, int64_t m, int64_t n, int64_t k, enum data data_a, enum data data_b,
                         enum dtype dtype, enum add_mode mode) {
  k = whole_blocks(ka, kb, k);
  struct test_operand a = make_operand(ka, m, k, data_a), b = make_operand(kb, n, k, data_b);
  char label[64];
  snprintf(label, sizeof label, "kinds %d x %d, data %d x %d", ka, kb, (int)data_a, (int)data_b);
  check_pair(label, &a, &b, dtype, mode);
  free_operand(&a);
  free_operand(&b);
}

static inline void pair_of_kinds(int ka, int kb, int64_t m, int64_t n, int64_t k, enum data data, enum dtype dtype,
                          enum add_mode mode) {
  pair_of_data(ka, kb, m, n, k, data, data, dtype, mode);
}

#endif
