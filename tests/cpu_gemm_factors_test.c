/* What stands around a contraction's sums: every code and scale, outer factors
 * along rows and columns, segments, constants, the addend. */
#include "kernels/cpu/gemm.h"
#include "tests/cpu_gemm_rig.h"

static void contract(struct matrix *out, const struct test_operand *a, const struct test_operand *b,
                     const struct matrix *add) {
  cpu_contract(&device.device, out, &a->o, &b->o, add);
}

/* BF16 [n, n] that leaves the other operand's columns as outputs. */
static struct test_operand identity(int64_t n) {
  struct test_operand t = make_operand(BF16_ROW, n, n, UNIFORM);
  uint16_t bits[2] = {0, 0x3f80};
  for (int64_t i = 0; i < n * n; i++) {
    bool one = i / n == i % n;
    memcpy(t.o.codes + 2 * i, &bits[one], 2);
    t.values[i] = one;
  }
  return t;
}

static void check_values(const char *label, const struct test_operand *t, const struct matrix *out) {
  for (int64_t i = 0; i < out->rows * out->cols; i++) {
    float got = read_element(out, i), x = t->values[i];
    /* What is not finite makes NaN of the rest of its row. */
    for (int64_t c = 0; c < out->cols; c++)
      if (c != i % out->cols && !isfinite(t->values[i / out->cols * out->cols + c])) x = NAN;
    if (x == x ? got != x : got == got) FAIL("%s %s: element %" PRId64 " is %g, not %g", label, cpu_isa_name(), i, (double)got, (double)x);
  }
}

/* Row r of the operand has scale r and all sixteen codes, or byte r. */
TEST(every_code_and_scale) {
  open_device(1);
  static const int of[] = {LOCAL_ROW, LOCAL_COLUMN, E4M3_ROW, E4M3_COLUMN, E5M2_ROW};
  struct test_operand unit = identity(16);
  for (int i = 0; i < 5; i++) {
    struct test_operand t = make_strips(of[i], 256, 16, 0, 0, UNIFORM);
    t.o.outer[0] = 1;
    for (int r = 0; r < 256; r++) {
      if (t.o.scales) t.o.scales[scale_place(r, 0, 1)] = (uint8_t)r;
      for (int c = 0; c < 16; c++) {
        if (t.o.scales) {
          t.o.codes[(r * 16 + c) / 2] = (uint8_t)(c / 2 * 2 | (c / 2 * 2 + 1) << 4);
          t.values[r * 16 + c] = value_of_code(c) * value_of_byte(FORMAT_E4M3, r);
        } else {
          int byte = c == r % 16 ? r : 0;
          t.o.codes[r * 16 + c] = (uint8_t)byte;
          t.values[r * 16 + c] = value_of_byte(t.o.encoding.format, byte);
        }
      }
    }
    for (int isa = 0; isa < ISAS; isa++) {
      if (!cpu_isa_choose(isas[isa], NULL)) continue;
      struct matrix out = make_matrix(DTYPE_F32, 256, 16, 1);
      contract(&out, &t, &unit, NULL);
      check_values("first", &t, &out);
      free(out.data);
      out = make_matrix(DTYPE_F32, 16, 256, 1);
      contract(&out, &unit, &t, NULL);
      struct matrix turned = make_matrix(DTYPE_F32, 256, 16, 1);
      for (int64_t j = 0; j < 256 * 16; j++) ((float *)turned.data)[j] = read_element(&out, j % 16 * 256 + j / 16);
      check_values("second", &t, &turned);
      free(out.data);
      free(turned.data);
    }
    free_operand(&t);
  }
  cpu_isa_choose(NULL, NULL);
  free_operand(&unit);
}

static void check_strips(int ka, int kb, int64_t m, int64_t n, int64_t k, int64_t strip_a, int64_t strip_b,
                         int64_t segment_a, int64_t segment_b, enum data data) {
  struct test_operand a = make_strips(ka, m, k, strip_a, segment_a, data), b = make_strips(kb, n, k, strip_b, segment_b, data);
  char label[128];
  snprintf(label, sizeof label, "kinds %d x %d, strips %d x %d, segments %d x %d, data %d", ka, kb, (int)strip_a, (int)strip_b,
           (int)segment_a, (int)segment_b, (int)data);
  check_pair(label, &a, &b, draw_below(2) ? DTYPE_F32 : DTYPE_BF16, (enum add_mode)draw_below(ADD_MODES));
  free_operand(&a);
  free_operand(&b);
}

/* Factors change inside tiles of outputs, and where tiles meet. */
TEST(strips_inside_tiles) {
  static const int64_t strips[] = {1, 2, 5, 16, 33, 64, 96, 128, 256};
  open_device(2);
  for (int i = 0; i < 9; i++) {
    check_strips(E4M3_ROW + i % 8, E4M3_ROW + i * 3 % 8, 131, 150, 32, strips[i], strips[8 - i], 0, 0, UNIFORM);
    check_strips(NV_ROW + i % 5, i % 7, 200, 70, 32, strips[i], 0, 0, 0, UNIFORM);
    check_strips(i % 7, LOCAL_ROW + i % 2, 5, 262, 32, 0, strips[i], 0, 0, UNIFORM);
  }
}

/* A pair's segments: of one operand, the same of both, different ones of both. */
TEST(segments) {
  open_device(2);
  for (int kb = 0; kb < KINDS; kb++) {
    for (int ka = E4M3_ROW; ka < KINDS; ka++) {
      check_strips(ka, kb, 7, 18, 192, 3, 5, 96, 0, UNIFORM);
      if (has_outer(kb)) check_strips(kb, ka, 18, 7, 128, 0, 1, 64, 32, CANCELLING);
    }
    for (int ka = NV_ROW; ka < KINDS; ka++) { /* groups restart in the middle of an MX block */
      check_strips(ka, kb, 6, 11, 288, 0, 0, 48, 0, UNIFORM);
      check_strips(kb, ka, 11, 6, 96, 0, 1, 0, 16, UNIFORM);
    }
  }
  check_strips(LOCAL_ROW, NV_COLUMN, 5, 9, 480, 1, 1, 80, 96, UNIFORM);
  for (int data = UNIFORM; data < DATA_KINDS; data++) check_strips(LOCAL_ROW, E5M2_ROW, 7, 5, 128, 1, 1, 64, 0, (enum data)data);
}

/* Segments longer than a slice of k, and more tiles than one. */
TEST(long_segments) {
  open_device(3);
  check_strips(LOCAL_ROW, LOCAL_COLUMN, 5, 6, 2 * 2080, 1, 0, 2080, 0, UNIFORM);
  check_strips(BF16_COLUMN, NV_COLUMN, 3, 5, 2 * 2064, 0, 0, 0, 2064, UNIFORM);
  check_strips(E4M3_ROW, F32_ROW, 5, 2, 2 * 1056, 1, 0, 1056, 0, UNIFORM);
  check_strips(LOCAL_ROW, MX_COLUMN, 100, 130, 64, 16, 0, 32, 0, UNIFORM);
  check_strips(E5M2_ROW, LOCAL_ROW, 970, 2, 96, 1, 0, 32, 0, UNIFORM);
}

TEST(zero_outers_give_zeros) {
  open_device(1);
  for (int ka = E4M3_ROW; ka < KINDS; ka++) {
    struct test_operand a = make_strips(ka, 20, 64, 5, 0, HUGE_VALUES), b = make_operand(BF16_ROW, 9, 64, UNIFORM);
    for (int i = 0; i < 4; i++) a.o.outer[i] = i % 2 ? 0.0f : 0.75f;
    struct matrix out = make_matrix(DTYPE_F32, 20, 9, 1);
    contract(&out, &a, &b, NULL);
    for (int64_t i = 0; i < 20 * 9; i++) CHECK((read_element(&out, i) == 0) == (i / 9 / 5 % 2 == 1));
    free(out.data);
    free_operand(&a);
    free_operand(&b);
  }
}

/* Computed apart: FP32 nearest to the exact fractions. */
TEST(constants) {
  static const struct {
    int a, b;
    uint32_t bits;
  } of[] = {{F32_ROW, BF16_ROW, 0x3f800000}, {MX_ROW, MX_COLUMN, 0x3ce38e39}, {MX_ROW, BF16_ROW, 0x3e2aaaab},
           {MX_FLOOR, E4M3_ROW, 0x3f800000}, {MX_FLOOR, MX_COLUMN, 0x3e2aaaab},
           {E4M3_ROW, E5M2_ROW, 0x3f800000}, {NV_ROW, NV_COLUMN, 0x34149b93}, {NV_ROW, F32_ROW, 0x39c30c31},
           {NV_ROW, MX_ROW, 0x38820821}, {NV_4OVER6, NV_4OVER6, 0x34e38e39},
           {NV_4OVER6, NV_ROW, 0x34820821}, {NV_4OVER6, E5M2_ROW, 0x3a2aaaab},
           {NV_4OVER6, MX_ROW, 0x38e38e39}, {LOCAL_ROW, LOCAL_COLUMN, 0x3f800000},
           {LOCAL_ROW, MX_ROW, 0x3e2aaaab}, {LOCAL_ROW, NV_ROW, 0x39c30c31}};
  for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
    const struct kind *a = &kinds[of[i].a], *b = &kinds[of[i].b];
    struct encoding ea = {.format = a->format, .block = a->block, .scale = a->scale};
    struct encoding eb = {.format = b->format, .block = b->block, .scale = b->scale};
    CHECK_EQ_I64(bits_of(gemm_constant(&ea, &eb)), of[i].bits);
    CHECK_EQ_I64(bits_of(gemm_constant(&eb, &ea)), of[i].bits);
  }
}

/* 1 x 1 contractions of one product, sum 1: the outputs are factors alone. */
static float factor_of(float amax_a, float amax_b, float sum, const float *addend) {
  struct test_operand a = make_strips(NV_ROW, 1, 16, 0, 0, UNIFORM), b = make_strips(NV_ROW, 1, 16, 0, 0, UNIFORM);
  memset(a.o.codes, 0, 8);
  memset(b.o.codes, 0, 8);
  a.o.codes[0] = b.o.codes[0] = 2; /* 1 */
  a.o.scales[0] = 0x38;
  b.o.scales[0] = (uint8_t)(sum == 1 ? 0x38 : 0x44); /* 3 */
  a.o.outer[0] = amax_a;
  b.o.outer[0] = amax_b;
  float r = 0;
  struct matrix out = {&r, DTYPE_F32, 1, 1}, add = {(float[]){addend ? *addend : 0}, DTYPE_F32, 1, 1};
  contract(&out, &a, &b, addend ? &add : NULL);
  free_operand(&a);
  free_operand(&b);
  return r;
}

/* Factors whose product depends on its order, and sums that depend on roundings
 * between: each of them is found, and the documented order is the one taken. */
TEST(order_of_factors) {
  open_device(1);
  volatile float constant = (float)(1.0 / (2688.0 * 2688.0));
  int other_product = 0, early_sum = 0, fused = 0;
  for (int i = 0; i < 200; i++) {
    volatile float x = 1 + fabsf(draw_float()), y = 1 + fabsf(draw_float()), addend = draw_float() * 0x1p-20f;
    volatile float xy = x * y, factor = xy * constant, y_first = y * constant, other = x * y_first;
    volatile float t = 3 * factor, r = t + addend, xy3 = 3 * xy, early = xy3 * constant;
    CHECK_EQ_I64(bits_of(factor_of(x, y, 1, NULL)), bits_of(factor));
    CHECK_EQ_I64(bits_of(factor_of(x, y, 3, NULL)), bits_of(t));
    CHECK_EQ_I64(bits_of(factor_of(x, y, 3, &(float){addend})), bits_of(r));
    other_product += other != factor;
    early_sum += early != t;
    fused += fmaf(3, factor, addend) != r;
  }
  CHECK(other_product > 20 && early_sum > 20 && fused > 20);
}

/* One NaN scale reaches its row and no other. */
TEST(nan_scales_and_outers) {
  open_device(1);
  for (int i = 0; i < ISAS; i++) {
    if (!cpu_isa_choose(isas[i], NULL)) continue;
    for (int kind = MX_ROW; kind < KINDS; kind++) {
      struct test_operand a = make_strips(kind, 40, 96, 1, 0, UNIFORM), b = make_operand(BF16_ROW, 3, 96, UNIFORM);
      int64_t block = kinds[kind].block_cols;
      if (block > 1) a.o.scales[scale_place(33, 2, 96 / block)] = block == 32 ? 255 : 0x7f;
      else a.o.codes[33 * 96 + 77] = 0xff;
      if (has_outer(kind)) a.o.outer[35] = NAN;
      struct matrix out = make_matrix(DTYPE_BF16, 40, 3, 1);
      contract(&out, &a, &b, NULL);
      for (int64_t j = 0; j < 40 * 3; j++) {
        uint16_t bits = ((uint16_t *)out.data)[j];
        bool expected = j / 3 == 33 || (has_outer(kind) && j / 3 == 35);
        CHECK_EQ_I64(bits == 0x7fc0, expected);
      }
      free(out.data);
      free_operand(&a);
      free_operand(&b);
    }
  }
  cpu_isa_choose(NULL, NULL);
}

/* An FP32 addend is added before the one rounding to BF16. */
TEST(fp32_addends) {
  open_device(1);
  struct test_operand a = make_operand(BF16_ROW, 1, 1, UNIFORM), b = make_operand(BF16_ROW, 1, 1, UNIFORM);
  uint16_t one = 0x3f80, r = 0;
  memcpy(a.o.codes, &one, 2);
  memcpy(b.o.codes, &one, 2);
  float addend = 0x1p-8f + 0x1p-20f; /* 1 + it is just above half way to the next BF16 */
  struct matrix out = {&r, DTYPE_BF16, 1, 1}, add = {&addend, DTYPE_F32, 1, 1};
  contract(&out, &a, &b, &add);
  CHECK_EQ_I64(r, 0x3f81);
  addend = 0x1p-8f;
  contract(&out, &a, &b, &add);
  CHECK_EQ_I64(r, 0x3f80);
  free_operand(&a);
  free_operand(&b);
}

int main(void) {
  RUN(every_code_and_scale);
  RUN(strips_inside_tiles);
  RUN(segments);
  RUN(long_segments);
  RUN(zero_outers_give_zeros);
  RUN(constants);
  RUN(order_of_factors);
  RUN(nan_scales_and_outers);
  RUN(fp32_addends);
  threads_destroy(device.threads);
  free(device.scratch);
  return test_report();
}
