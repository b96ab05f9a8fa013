/* The contraction against its definition, written out one output at a time;
 * against float64; on data where every order is exact; and over instruction
 * sets, threads, and values at the ends of the FP32 range. */
#include <math.h>
#include <stdlib.h>

#include "base/hash.h"
#include "base/philox.h"
#include "kernels/cpu/cpu.h"
#include "tests/test.h"

static struct cpu_device device;

static void open_device(int threads) {
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

static uint32_t draw(void) {
  struct philox_block counter = {{draws++, 0, 0, 0}};
  return philox4x32_10(20240607, counter).word[0];
}

static int64_t draw_below(int64_t n) { return (int64_t)(draw() % (uint32_t)n); }
static float draw_float(void) { return (float)(int32_t)draw() * 0x1p-31f; }

static float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

/* The kinds of data. */
enum data { UNIFORM, CANCELLING, WIDE, TINY, HUGE_VALUES, NONFINITE, SUBNORMAL, INTEGER, DATA_KINDS };

/* A float of a kind that BF16 holds. */
static float draw_value(enum data kind) {
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

struct test_operand {
  struct operand o;
  float *values; /* [rows][cols] */
};

/* The scale's place, from the layout's description in kernels.h. */
static int64_t scale_place(int64_t r, int64_t c, int64_t scale_cols) {
  int64_t tile = r / 128 * ((scale_cols + 3) / 4) + c / 4;
  return tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

static struct test_operand make_operand(enum format format, enum view view, enum scale_rule rule, int64_t rows,
                                        int64_t cols, enum data kind) {
  struct test_operand t = {.o = {.encoding = {.format = format}, .view = view, .rows = rows, .cols = cols}};
  t.values = malloc((size_t)(rows * cols) * sizeof(float));
  if (format == FORMAT_MXFP4) {
    static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    int64_t scale_cols = cols / 32;
    t.o.encoding.block = rule == SCALE_MX_ADAPTIVE ? BLOCK_2D32 : BLOCK_1X32;
    t.o.encoding.scale = rule;
    t.o.codes = malloc((size_t)(rows * cols / 2));
    t.o.scales = calloc((size_t)((rows + 127) / 128 * ((scale_cols + 3) / 4) * 512), 1);
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < scale_cols; c++) {
        int64_t b = kind == INTEGER ? 127 + draw_below(2) : kind == TINY ? 40 + draw_below(40)
                    : kind == SUBNORMAL ? draw_below(3) : kind == HUGE_VALUES ? 185 + draw_below(10)
                    : kind == NONFINITE ? 252 + draw_below(4) : kind == WIDE ? 107 + draw_below(40)
                    : 122 + draw_below(8);
        t.o.scales[scale_place(r, c, scale_cols)] = (uint8_t)b;
        float scale = b == 255 ? NAN : ldexpf(1, (int)b - 127);
        for (int64_t j = 0; j < 32; j += 2) {
          uint8_t byte = (uint8_t)draw();
          int64_t at = r * cols + c * 32 + j;
          t.o.codes[at / 2] = byte;
          for (int h = 0; h < 2; h++) {
            int code = byte >> (4 * h) & 15;
            t.values[at + h] = (code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7]) * scale;
          }
        }
      }
    }
    return t;
  }
  t.o.codes = malloc((size_t)(rows * cols) * (format == FORMAT_BF16 ? 2 : 4));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) {
      float x = draw_value(kind);
      if (format == FORMAT_F32 && kind != INTEGER && x == x) x *= 1 + draw_float() * 0x1p-12f;
      /* Sums that cancel: half of the elements repeat, negated, an earlier one of their row. */
      if (kind == CANCELLING && c > 0 && draw_below(2)) x = -t.values[r * cols + draw_below(c)];
      t.values[r * cols + c] = x;
      int64_t at = view == VIEW_COLUMN ? c * rows + r : r * cols + c;
      if (format == FORMAT_BF16) {
        uint16_t h = (uint16_t)(bits_of(x) >> 16);
        memcpy(t.o.codes + 2 * at, &h, 2);
      } else {
        memcpy(t.o.codes + 4 * at, &x, 4);
      }
    }
  return t;
}

static void free_operand(struct test_operand *t) {
  free(t->o.codes);
  free(t->o.scales);
  free(t->values);
}

/* ---- the definition --------------------------------------------------------- */

static float sum_of_definition(const float *a, const float *b, int64_t k) {
  float acc = 0;
  for (int64_t group = 0; group < k; group += 32) {
    float even = 0, odd = 0;
    for (int64_t i = group; i < group + 32; i += 2) {
      even = fmaf(i < k ? a[i] : 0, i < k ? b[i] : 0, even);
      odd = fmaf(i + 1 < k ? a[i + 1] : 0, i + 1 < k ? b[i + 1] : 0, odd);
    }
    acc = acc + (even + odd);
  }
  return acc;
}

static float read_element(const struct matrix *m, int64_t i) {
  if (m->dtype == DTYPE_F32) return ((const float *)m->data)[i];
  return of_bits((uint32_t)((const uint16_t *)m->data)[i] << 16);
}

/* BF16 by exact arithmetic in double: the neighbour that is nearest, ties to even. */
static uint16_t round_to_bf16(float x) {
  if (isnan(x)) return 0x7fc0;
  uint32_t low = bits_of(x) & 0xffff0000u;
  if (isinf(x) || bits_of(x) == low) return (uint16_t)(low >> 16);
  uint32_t high = low + 0x10000u;
  double of_low = fabs((double)of_bits(low)), of_high = isinf(of_bits(high)) ? 0x1p128 : fabs((double)of_bits(high));
  double below = fabs((double)x) - of_low, above = of_high - fabs((double)x);
  bool up = above < below || (above == below && (low >> 16 & 1));
  return (uint16_t)((up ? high : low) >> 16);
}

/* All sums of a contraction; the caller frees them. */
static float *sums_of_definition(const struct test_operand *a, const struct test_operand *b) {
  int64_t k = a->o.cols;
  float *sums = malloc((size_t)(a->o.rows * b->o.rows) * sizeof(float));
  for (int64_t i = 0; i < a->o.rows; i++)
    for (int64_t j = 0; j < b->o.rows; j++)
      sums[i * b->o.rows + j] = sum_of_definition(a->values + i * k, b->values + j * k, k);
  return sums;
}

static void check_definition(const char *label, const struct matrix *out, int64_t k, const float *sums,
                             const float *addend, float factor) {
  int64_t wrong = 0;
  for (int64_t at = 0; at < out->rows * out->cols; at++) {
    float expected = sums[at] * factor;
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

enum add_mode { ADD_NONE, ADD_OUT, ADD_OTHER, ADD_MODES };

static struct matrix make_matrix(enum dtype dtype, int64_t rows, int64_t cols, float scale) {
  struct matrix m = {malloc((size_t)(rows * cols) * dtype_bytes(dtype)), dtype, rows, cols};
  for (int64_t i = 0; i < rows * cols; i++) {
    float x = draw_float() * scale;
    uint16_t h = (uint16_t)(bits_of(x) >> 16);
    if (dtype == DTYPE_F32) memcpy((char *)m.data + 4 * i, &x, 4);
    else memcpy((char *)m.data + 2 * i, &h, 2);
  }
  return m;
}

static float factor_of(const struct test_operand *a, const struct test_operand *b) {
  int n = (a->o.encoding.format == FORMAT_MXFP4) + (b->o.encoding.format == FORMAT_MXFP4);
  return n == 2 ? 1.0f / 36.0f : n == 1 ? 1.0f / 6.0f : 1.0f;
}

static void contract_and_check(const char *label, const struct test_operand *a, const struct test_operand *b,
                               const float *sums, enum dtype dtype, enum add_mode mode) {
  int64_t m = a->o.rows, n = b->o.rows;
  struct matrix out = make_matrix(dtype, m, n, 1), other = make_matrix(dtype, m, n, 1);
  const struct matrix *add = mode == ADD_OUT ? &out : mode == ADD_OTHER ? &other : NULL;
  float *addend = NULL;
  if (add) {
    addend = malloc((size_t)(m * n) * sizeof(float));
    for (int64_t i = 0; i < m * n; i++) addend[i] = read_element(add, i);
  }
  cpu_contract(&device.device, &out, &a->o, &b->o, add);
  check_definition(label, &out, a->o.cols, sums, addend, factor_of(a, b));
  free(addend);
  free(out.data);
  free(other.data);
}

/* What an operand can be. */
static const struct kind {
  enum format format;
  enum view view;
  enum scale_rule rule;
} kinds[] = {{FORMAT_F32, VIEW_ROW, SCALE_NONE},       {FORMAT_F32, VIEW_COLUMN, SCALE_NONE},
             {FORMAT_BF16, VIEW_ROW, SCALE_NONE},      {FORMAT_BF16, VIEW_COLUMN, SCALE_NONE},
             {FORMAT_MXFP4, VIEW_ROW, SCALE_MX_ENCODE}, {FORMAT_MXFP4, VIEW_COLUMN, SCALE_MX_ADAPTIVE}};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static const char *const isas[] = {"amx-bf16", "avx512-fma", "avx2-fma", "neon-fma", "plain-fma"};
enum { ISAS = sizeof isas / sizeof isas[0] };

static void check_pair(const char *label, const struct test_operand *a, const struct test_operand *b, enum dtype dtype,
                       enum add_mode mode) {
  float *sums = sums_of_definition(a, b);
  for (int i = 0; i < ISAS; i++)
    if (cpu_isa_choose(isas[i], NULL)) contract_and_check(label, a, b, sums, dtype, mode);
  cpu_isa_choose(NULL, NULL);
  free(sums);
}

static void pair_of_data(int ka, int kb, int64_t m, int64_t n, int64_t k, enum data data_a, enum data data_b,
                         enum dtype dtype, enum add_mode mode) {
  if (kinds[ka].format == FORMAT_MXFP4 || kinds[kb].format == FORMAT_MXFP4) k = (k + 31) / 32 * 32;
  struct test_operand a = make_operand(kinds[ka].format, kinds[ka].view, kinds[ka].rule, m, k, data_a);
  struct test_operand b = make_operand(kinds[kb].format, kinds[kb].view, kinds[kb].rule, n, k, data_b);
  char label[64];
  snprintf(label, sizeof label, "kinds %d x %d, data %d x %d", ka, kb, (int)data_a, (int)data_b);
  check_pair(label, &a, &b, dtype, mode);
  free_operand(&a);
  free_operand(&b);
}

static void pair_of_kinds(int ka, int kb, int64_t m, int64_t n, int64_t k, enum data data, enum dtype dtype,
                          enum add_mode mode) {
  pair_of_data(ka, kb, m, n, k, data, data, dtype, mode);
}

TEST(every_pair_is_the_definition) {
  for (int threads = 1; threads <= 3; threads++) {
    open_device(threads);
    for (int ka = 0; ka < KINDS; ka++)
      for (int kb = 0; kb < KINDS; kb++)
        pair_of_kinds(ka, kb, 1 + draw_below(40), 1 + draw_below(40), 1 + draw_below(100), UNIFORM,
                      draw_below(2) ? DTYPE_F32 : DTYPE_BF16, (enum add_mode)draw_below(ADD_MODES));
  }
}

TEST(values_at_the_ends_of_the_range) {
  open_device(2);
  for (int data = UNIFORM; data < DATA_KINDS; data++)
    for (int ka = 0; ka < KINDS; ka++)
      pair_of_kinds(ka, ka < 2 ? (int)draw_below(KINDS) : 2 + (int)draw_below(KINDS - 2), 1 + draw_below(30),
                    1 + draw_below(50), 1 + draw_below(100), (enum data)data, draw_below(2) ? DTYPE_F32 : DTYPE_BF16,
                    (enum add_mode)draw_below(ADD_MODES));
}

/* Subnormal elements whose products are not. */
TEST(subnormals_times_huge_values) {
  open_device(2);
  for (int ka = 2; ka < KINDS; ka++)
    for (int kb = 2; kb < KINDS; kb++) {
      pair_of_data(ka, kb, 20, 40, 64, SUBNORMAL, HUGE_VALUES, DTYPE_F32, ADD_NONE);
      pair_of_data(ka, kb, 40, 20, 64, HUGE_VALUES, SUBNORMAL, DTYPE_F32, ADD_NONE);
      pair_of_data(ka, kb, 20, 20, 64, SUBNORMAL, NONFINITE, DTYPE_BF16, ADD_NONE);
    }
}

static void set_bf16(struct test_operand *t, int64_t at, float x) {
  uint16_t h = (uint16_t)(bits_of(x) >> 16);
  t->values[at] = of_bits((uint32_t)h << 16);
  memcpy(t->o.codes + 2 * at, &h, 2);
}

/* 129 * 131 - 130 * 130 = -1: a difference of two products with the smallest
 * magnitude that their exponents allow, from above the subnormals to below. */
TEST(differences_around_the_smallest_normal) {
  open_device(1);
  for (int e = -130; e <= -122; e++) {
    struct test_operand a = make_operand(FORMAT_BF16, VIEW_ROW, SCALE_NONE, 1, 64, UNIFORM);
    struct test_operand b = make_operand(FORMAT_BF16, VIEW_ROW, SCALE_NONE, 1, 64, UNIFORM);
    for (int k = 0; k < 64; k++) {
      set_bf16(&a, k, 0);
      set_bf16(&b, k, 0);
    }
    set_bf16(&a, 6, ldexpf(129, e / 2));
    set_bf16(&b, 6, ldexpf(131, e - e / 2));
    set_bf16(&a, 40, ldexpf(-130, e / 2));
    set_bf16(&b, 40, ldexpf(130, e - e / 2));
    check_pair("difference", &a, &b, DTYPE_F32, ADD_NONE);
    float difference;
    struct matrix out = {&difference, DTYPE_F32, 1, 1};
    cpu_contract(&device.device, &out, &a.o, &b.o, NULL);
    CHECK_EQ_I64(bits_of(difference), bits_of(-ldexpf(1, e)));
    free_operand(&a);
    free_operand(&b);
  }
}

/* More than one strip of tiles and slice of k, and the smallest sizes. */
TEST(sizes) {
  static const int64_t sizes[][3] = {{1, 1, 1}, {1, 1, 33}, {97, 65, 31}, {100, 130, 40}, {3, 10, 4130}, {2, 3, 2049}};
  for (int i = 0; i < (int)(sizeof sizes / sizeof sizes[0]); i++) {
    int64_t m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
    open_device(1 + i % 3);
    pair_of_kinds(i % 2, 2 + i % 4, m, n, k, UNIFORM, DTYPE_F32, ADD_OUT);
    pair_of_kinds(2 + i % 2, 2 + i / 2 % 2, m, n, k, CANCELLING, DTYPE_BF16, ADD_OTHER);
    pair_of_kinds(4 + i % 2, 2 + i / 2 % 4, m, n, k, UNIFORM, DTYPE_F32, ADD_NONE);
  }
}

/* More rows than one block of packed panels holds. */
TEST(blocks) {
  open_device(2);
  pair_of_kinds(0, 3, 970, 2, 1030, UNIFORM, DTYPE_F32, ADD_NONE);
  pair_of_kinds(5, 4, 2, 1030, 2080, UNIFORM, DTYPE_F32, ADD_NONE);
  pair_of_kinds(1, 2, 970, 2, 900, UNIFORM, DTYPE_F32, ADD_NONE);
}

/* Values that AMX would flush stand in the last slice of k only, so sums begin
 * on one kernel and end on another. */
TEST(subnormals_late_in_k) {
  open_device(2);
  enum { M = 34, N = 7, K = 4200 };
  struct test_operand a = make_operand(FORMAT_BF16, VIEW_ROW, SCALE_NONE, M, K, UNIFORM);
  struct test_operand b = make_operand(FORMAT_BF16, VIEW_ROW, SCALE_NONE, N, K, UNIFORM);
  /* Columns before the last slice are zero in b, or the sums would hide subnormals. */
  for (int64_t i = 0; i < N; i++)
    for (int64_t k = 0; k < K; k++) set_bf16(&b, i * K + k, k < 4096 ? 0 : ldexpf(b.values[i * K + k], -122));
  check_pair("late subnormals", &a, &b, DTYPE_F32, ADD_NONE);
  free_operand(&a);
  free_operand(&b);
}

TEST(close_to_float64) {
  open_device(2);
  for (int kind = 0; kind < KINDS; kind++) {
    int64_t m = 9, n = 33, k = 1536;
    struct test_operand a = make_operand(kinds[kind].format, kinds[kind].view, kinds[kind].rule, m, k, CANCELLING);
    struct test_operand b = make_operand(kinds[kind].format, kinds[kind].view, kinds[kind].rule, n, k, UNIFORM);
    struct matrix out = make_matrix(DTYPE_F32, m, n, 1);
    cpu_contract(&device.device, &out, &a.o, &b.o, NULL);
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        double sum = 0, magnitude = 0;
        for (int64_t l = 0; l < k; l++) {
          double product = (double)a.values[i * k + l] * (double)b.values[j * k + l];
          sum += product;
          magnitude += fabs(product);
        }
        double factor = kinds[kind].format == FORMAT_MXFP4 ? 1.0 / 36 : 1;
        /* 16 steps of a chain, one sum of the two, k / 32 running sums, the factor. */
        double bound = (double)(16 + 1 + k / 32 + 2) * 0x1p-24 * magnitude * factor;
        CHECK_CLOSE(read_element(&out, i * n + j), sum * factor, bound);
      }
    free(out.data);
    free_operand(&a);
    free_operand(&b);
  }
}

/* Partial sums are integers below 2^24 quarter units: every order is exact, and
 * the factor is one rounding. */
TEST(integers_are_exact) {
  open_device(3);
  for (int kind = 0; kind < KINDS; kind++) {
    int64_t m = 5, n = 37, k = 4096;
    struct test_operand a = make_operand(kinds[kind].format, kinds[kind].view, kinds[kind].rule, m, k, INTEGER);
    struct test_operand b = make_operand(kinds[kind].format, kinds[kind].view, kinds[kind].rule, n, k, INTEGER);
    struct matrix out = make_matrix(DTYPE_F32, m, n, 1);
    cpu_contract(&device.device, &out, &a.o, &b.o, NULL);
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        int64_t sum = 0;
        for (int64_t l = 0; l < k; l++)
          sum += (int64_t)(a.values[i * k + l] * 2) * (int64_t)(b.values[j * k + l] * 2);
        CHECK_EQ_I64(bits_of(read_element(&out, i * n + j)), bits_of((float)sum * 0.25f * factor_of(&a, &b)));
      }
    free(out.data);
    free_operand(&a);
    free_operand(&b);
  }
}

/* 32 products of code 6 by code 6 mean 1 by 1 where codes are those of 6 z / s. */
TEST(the_sixths_are_applied_once) {
  open_device(1);
  struct test_operand mx = make_operand(FORMAT_MXFP4, VIEW_ROW, SCALE_MX_ENCODE, 1, 4256, UNIFORM);
  struct test_operand plain = make_operand(FORMAT_F32, VIEW_ROW, SCALE_NONE, 1, 4256, UNIFORM);
  memset(mx.o.codes, 0x77, 4256 / 2);
  for (int c = 0; c < 4256 / 32; c++) mx.o.scales[scale_place(0, c, 4256 / 32)] = 127;
  for (int i = 0; i < 4256; i++) memcpy(plain.o.codes + 4 * i, &(float){1.0f}, 4);
  float sum = 1000;
  struct matrix out = {&sum, DTYPE_F32, 1, 1};
  cpu_contract(&device.device, &out, &mx.o, &mx.o, NULL);
  CHECK_CLOSE(sum, 4256, 4256 * 0x1p-23);
  cpu_contract(&device.device, &out, &mx.o, &plain.o, NULL);
  CHECK_CLOSE(sum, 4256, 4256 * 0x1p-23);
  cpu_contract(&device.device, &out, &plain.o, &mx.o, &out);
  CHECK_CLOSE(sum, 2 * 4256, 8 * 4256 * 0x1p-24);
  free_operand(&mx);
  free_operand(&plain);
}

/* One number for the bits of every machine. */
TEST(the_same_bits_everywhere) {
  open_device(2);
  draws = 1000000;
  struct hash all = {0, 0};
  for (int kind = 0; kind < KINDS; kind++) {
    struct test_operand a = make_operand(kinds[kind].format, kinds[kind].view, kinds[kind].rule, 50, 160, CANCELLING);
    struct test_operand b = make_operand(kinds[kind].format, kinds[kind].view, kinds[kind].rule, 71, 160, WIDE);
    struct matrix out = make_matrix(kind & 1 ? DTYPE_F32 : DTYPE_BF16, 50, 71, 1);
    cpu_contract(&device.device, &out, &a.o, &b.o, &out);
    struct hash h = hash_bytes(out.data, 50 * 71 * dtype_bytes(out.dtype));
    h.low += (uint64_t)kind;
    all = hash_sum(all, h);
    free(out.data);
    free_operand(&a);
    free_operand(&b);
  }
  char text[HASH_TEXT];
  hash_text(all, text);
  CHECK_STR(text, "9ba5e6275c15f06f879fa7ab4fda2cc9");
}

TEST(instruction_sets_have_names) {
  struct error e;
  CHECK(!cpu_isa_choose("mmx", &e));
  CHECK_EQ_I64(e.code, ERROR_DEVICE);
  CHECK(strstr(e.message, "mmx") != NULL);
  CHECK(cpu_isa_choose("portable", &e));
  CHECK(strcmp(cpu_isa_name(), "amx-bf16") != 0);
  CHECK(cpu_isa_choose("plain-fma", &e));
  CHECK_STR(cpu_isa_name(), "plain-fma");
  CHECK(cpu_isa_choose(NULL, &e));
  printf("# contractions run on %s\n", cpu_isa_name());
}

int main(void) {
  RUN(instruction_sets_have_names);
  RUN(every_pair_is_the_definition);
  RUN(values_at_the_ends_of_the_range);
  RUN(subnormals_times_huge_values);
  RUN(differences_around_the_smallest_normal);
  RUN(sizes);
  RUN(blocks);
  RUN(subnormals_late_in_k);
  RUN(close_to_float64);
  RUN(integers_are_exact);
  RUN(the_sixths_are_applied_once);
  RUN(the_same_bits_everywhere);
  threads_destroy(device.threads);
  free(device.scratch);
  return test_report();
}
