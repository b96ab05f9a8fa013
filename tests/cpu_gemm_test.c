/* The contraction against its definition; against float64; on data where every
 * order is exact; and over instruction sets, threads, and values at the ends of
 * the FP32 range. */
#include "base/hash.h"
#include "tests/cpu_gemm_rig.h"

/* A third of the pairs with each number of threads. */
TEST(every_pair_is_the_definition) {
  for (int threads = 1; threads <= 3; threads++) {
    open_device(threads);
    for (int ka = 0; ka < KINDS; ka++)
      for (int kb = (threads + ka) % 3; kb < KINDS; kb += 3)
        pair_of_kinds(ka, kb, 1 + draw_below(30), 1 + draw_below(35), 1 + draw_below(100), UNIFORM,
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
  for (int ka = BF16_ROW; ka < KINDS; ka++)
    for (int kb = BF16_ROW; kb < KINDS; kb++) {
      pair_of_data(ka, kb, 10, 17, 64, SUBNORMAL, HUGE_VALUES, DTYPE_F32, ADD_NONE);
      pair_of_data(ka, kb, 17, 10, 48, HUGE_VALUES, SUBNORMAL, DTYPE_F32, ADD_NONE);
      pair_of_data(ka, kb, 10, 10, 32, SUBNORMAL, NONFINITE, DTYPE_BF16, ADD_NONE);
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
    struct test_operand a = make_operand(BF16_ROW, 1, 64, UNIFORM);
    struct test_operand b = make_operand(BF16_ROW, 1, 64, UNIFORM);
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
    pair_of_kinds(NV_ROW + i % 5, E4M3_ROW + i / 2 % 8, m, n, k, UNIFORM, DTYPE_F32, ADD_F32);
    pair_of_kinds(E4M3_ROW + i % 3, BF16_ROW + i, m, n, k, CANCELLING, DTYPE_BF16, ADD_F32);
  }
}

/* A last slice of k that is shallower than the others, or a segment's, under several
 * strips of either operand: sums kept between slices stay with their tile. */
TEST(slices_of_unequal_depth) {
  enum { M = 97, N = 200 };
  open_device(2);
  pair_of_kinds(F32_ROW, F32_COLUMN, M, N, 1024 + 40, UNIFORM, DTYPE_F32, ADD_NONE);
  pair_of_kinds(BF16_COLUMN, BF16_ROW, M, N, 2048 + 33, UNIFORM, DTYPE_F32, ADD_NONE);
  pair_of_kinds(NV_ROW, MX_COLUMN, M, N, 2048 + 64, UNIFORM, DTYPE_BF16, ADD_F32);
  struct test_operand a = make_strips(LOCAL_ROW, M, 2 * 2080, 16, 0, UNIFORM);
  struct test_operand b = make_strips(LOCAL_COLUMN, N, 2 * 2080, 0, 2080, UNIFORM);
  check_pair("segments of unequal slices", &a, &b, DTYPE_F32, ADD_NONE);
  free_operand(&a);
  free_operand(&b);
}

/* Shapes and kinds at random, of many strips, blocks, slices and segments: some outputs of each. */
TEST(large_shapes) {
  for (int round = 0; round < 5; round++) {
    open_device(1 + round % 3);
    int ka = (int)draw_below(KINDS), kb = (int)draw_below(KINDS);
    int64_t m = 1 + draw_below(300), n = 1 + draw_below(500), k = 64 * (1 + draw_below(70));
    struct test_operand a = make_operand(ka, m, k, UNIFORM);
    struct test_operand b = make_strips(kb, n, k, 0, has_outer(kb) && draw_below(2) && k % 128 == 0 ? k / 2 : 0, UNIFORM);
    struct matrix out = make_matrix(DTYPE_F32, m, n, 1);
    cpu_contract(&device.device, &out, &a.o, &b.o, NULL);
    for (int sample = 0; sample < 300; sample++) {
      int64_t i = draw_below(m), j = draw_below(n);
      float expected = total_of_definition(&a, &b, i, j), got = read_element(&out, i * n + j);
      if (bits_of(expected) == bits_of(got)) continue;
      FAIL("kinds %d x %d [%" PRId64 ",%" PRId64 "] of %" PRId64 "x%" PRId64 "x%" PRId64 ": %g, expected %g", ka, kb, i, j, m, n,
           k, (double)got, (double)expected);
      break;
    }
    free(out.data);
    free_operand(&a);
    free_operand(&b);
  }
}

/* More rows than one block of packed panels holds. */
TEST(blocks) {
  open_device(2);
  pair_of_kinds(0, 3, 970, 2, 1030, UNIFORM, DTYPE_F32, ADD_NONE);
  pair_of_kinds(1, 2, 970, 2, 900, UNIFORM, DTYPE_F32, ADD_NONE);
  pair_of_kinds(NV_ROW, MX_COLUMN, 2, 1030, 2080, UNIFORM, DTYPE_F32, ADD_NONE);
}

/* Values that AMX would flush stand in the last slice of k only, so sums begin
 * on one kernel and end on another. */
TEST(subnormals_late_in_k) {
  open_device(2);
  enum { M = 34, N = 7, K = 4200 };
  struct test_operand a = make_operand(BF16_ROW, M, K, UNIFORM);
  struct test_operand b = make_operand(BF16_ROW, N, K, UNIFORM);
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
    struct test_operand a = make_operand(kind, m, k, CANCELLING);
    struct test_operand b = make_operand(kind, n, k, UNIFORM);
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
        double factor = (double)outer_at(&a.o, i, 0) * (double)outer_at(&b.o, j, 0) / (a.divisor * b.divisor);
        /* 16 steps of a chain, one sum of the two, k / 32 running sums, the factor's products. */
        double bound = (double)(16 + 1 + k / 32 + 4) * 0x1p-24 * magnitude * factor;
        CHECK_CLOSE(read_element(&out, i * n + j), sum * factor, bound);
      }
    free(out.data);
    free_operand(&a);
    free_operand(&b);
  }
}

/* Partial sums are integers below 2^24 quarter units (at most 36 * 8 * 8 * 4 a
 * product): every order is exact, and only factors are rounded. */
static void check_integers(int ka, int kb) {
  enum { M = 3, N = 9, K = 1024 };
  struct test_operand a = make_operand(ka, M, K, INTEGER), b = make_operand(kb, N, K, INTEGER);
  float constant = (float)(1.0 / (a.divisor * b.divisor));
  struct matrix out = make_matrix(DTYPE_F32, M, N, 1);
  cpu_contract(&device.device, &out, &a.o, &b.o, NULL);
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      int64_t sum = 0;
      for (int64_t l = 0; l < K; l++)
        sum += (int64_t)(a.values[i * K + l] * 2) * (int64_t)(b.values[j * K + l] * 2);
      float outer = outer_at(&a.o, i, 0) * outer_at(&b.o, j, 0), factor = outer * constant;
      CHECK_EQ_I64(bits_of(read_element(&out, i * N + j)), bits_of((float)sum * 0.25f * factor));
    }
  free(out.data);
  free_operand(&a);
  free_operand(&b);
}

TEST(integers_are_exact) {
  open_device(3);
  for (int ka = 0; ka < KINDS; ka++)
    for (int kb = 0; kb < KINDS; kb++) check_integers(ka, kb);
}

/* 32 products of code 6 by code 6 mean 1 by 1 where codes are those of 6 z / s. */
TEST(the_sixths_are_applied_once) {
  open_device(1);
  struct test_operand mx = make_operand(MX_ROW, 1, 4256, UNIFORM);
  struct test_operand plain = make_operand(F32_ROW, 1, 4256, UNIFORM);
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
  struct hash all = {0, 0}, plain_and_mx = {0, 0};
  for (int kind = 0; kind < KINDS; kind++) {
    struct test_operand a = make_operand(kind, 50, 160, CANCELLING);
    struct test_operand b = make_operand(kind, 71, 160, WIDE);
    struct matrix out = make_matrix(kind & 1 ? DTYPE_F32 : DTYPE_BF16, 50, 71, 1);
    cpu_contract(&device.device, &out, &a.o, &b.o, &out);
    struct hash h = hash_bytes(out.data, 50 * 71 * dtype_bytes(out.dtype));
    h.low += (uint64_t)kind;
    all = hash_sum(all, h);
    if (kind == MX_COLUMN) plain_and_mx = all;
    free(out.data);
    free_operand(&a);
    free_operand(&b);
  }
  char text[HASH_TEXT];
  hash_text(plain_and_mx, text);
  CHECK_STR(text, "9ba5e6275c15f06f879fa7ab4fda2cc9");
  hash_text(all, text);
  CHECK_STR(text, "7e5cc02deadfebf4cbdbee8440d9168a");
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
  RUN(slices_of_unequal_depth);
  RUN(large_shapes);
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
