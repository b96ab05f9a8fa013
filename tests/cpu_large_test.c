/* Operands of more than 2^31 elements.  Sizes and places always; kernels on 2^31 + 256
 * elements where FP4D_TEST_LARGE is set, since they take a few seconds and 2 GB: sources
 * are mapped and hardly touched, so pages of zeros cost nothing. */
#include <stdlib.h>
#include <sys/mman.h>

#include "tests/cpu_device.h"

#define ROWS (((int64_t)1 << 23) + 1)
enum { COLS = 256, TOUCHED = 5, OUTPUTS = 3 };

static const struct encoding MX = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_STOCHASTIC, HADAMARD_NONE, 0};

/* Rows that are not zero: around 2^30 and 2^31 elements, and 2^31 bytes of BF16. */
static const int64_t touched[TOUCHED] = {0, (1 << 22) - 1, 1 << 22, (1 << 23) - 1, 1 << 23};

/* ---- sizes and places ------------------------------------------------------------- */

TEST(sizes) {
  const int64_t big = (int64_t)1 << 20; /* [2^20, 2^20] */
  struct encoding e = MX;
  CHECK_EQ_I64(operand_code_bytes(&e, big, big), (int64_t)1 << 39);
  CHECK_EQ_I64(operand_scale_bytes(&e, big, big), (int64_t)1 << 35);
  CHECK_EQ_I64(operand_code_bytes(&e, ROWS, COLS), ((int64_t)1 << 30) + 128);
  CHECK_EQ_I64(operand_scale_bytes(&e, ROWS, COLS), (ROWS + 127) * 8);
  CHECK_EQ_I64(operand_scale_offset(big - 1, big / 32 - 1, big / 32), ((int64_t)1 << 35) - 1);
  e = (struct encoding){FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0};
  CHECK_EQ_I64(operand_scale_bytes(&e, big, big), (int64_t)1 << 36);
  CHECK_EQ_I64(operand_scale_offset(big - 1, big / 16 - 1, big / 16), ((int64_t)1 << 36) - 1);
  e = (struct encoding){.format = FORMAT_E4M3, .scale = SCALE_ROW};
  CHECK_EQ_I64(operand_code_bytes(&e, big, big), (int64_t)1 << 40);
  struct operand o = {.encoding = e, .rows = (int64_t)3 << 31, .cols = 64, .strip = 1};
  CHECK_EQ_I64(operand_outer_count(&o), (int64_t)3 << 31);
  e = (struct encoding){.format = FORMAT_F32};
  CHECK_EQ_I64(operand_code_bytes(&e, big, big), (int64_t)1 << 42);
  struct matrix m = {.data = &o, .dtype = DTYPE_BF16, .rows = (int64_t)1 << 33, .cols = 256};
  struct operand column = operand_of_matrix(&m, VIEW_COLUMN);
  CHECK_EQ_I64(column.cols, (int64_t)1 << 33);
}

/* ---- kernels ------------------------------------------------------------------------ */

static struct device *device;

static void *map(int64_t bytes) {
  void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    printf("not ok memory: %lld bytes cannot be mapped\n", (long long)bytes);
    exit(1);
  }
  return p;
}

static struct matrix source(void) {
  struct matrix m = {map(ROWS * COLS * 2), DTYPE_BF16, ROWS, COLS};
  for (int k = 0; k < TOUCHED; k++)
    for (int64_t c = 0; c < COLS; c++) test_set(&m, touched[k] * COLS + c, test_uniform(3 + (uint64_t)k, c) - 0.5);
  return m;
}

/* Row r of the source alone, with the same draws: a sample is a row. */
static void compare_row(const struct matrix *z, const struct operand *o, const struct matrix *product,
                        const struct operand *weights, int64_t r) {
  struct matrix one = {(uint16_t *)z->data + r * COLS, DTYPE_BF16, 1, COLS}, y = test_matrix(DTYPE_F32, 1, OUTPUTS);
  uint8_t codes[COLS / 2], scales[128 * 8];
  struct operand alone = {.encoding = MX, .rows = 1, .cols = COLS, .codes = codes, .scales = scales};
  device->k->quantise(device, &(struct emission){.row = &alone, .draw = {.seed = 9, .first_sample = (uint64_t)r, .seq_len = 1}}, &one);
  device->k->contract(device, &y, &alone, weights, NULL);
  double a[COLS], b[COLS];
  operand_decode(&alone, 0, a);
  operand_decode(o, r, b);
  if (memcmp(a, b, sizeof a) != 0) FAIL("row %lld is quantised otherwise than alone", (long long)r);
  if (memcmp(y.data, (float *)product->data + r * OUTPUTS, OUTPUTS * sizeof(float)) != 0)
    FAIL("row %lld is contracted otherwise than alone", (long long)r);
  free(y.data);
}

TEST(quantise_and_contract) {
  struct matrix z = source(), w = test_random(DTYPE_BF16, OUTPUTS, COLS, 1, 1.0), y = {NULL, DTYPE_F32, ROWS, OUTPUTS};
  struct operand o = {.encoding = MX, .rows = ROWS, .cols = COLS}, weights = operand_of_matrix(&w, VIEW_ROW);
  struct quantise_counts counts[2] = {{0}};
  int64_t code_bytes = operand_code_bytes(&MX, ROWS, COLS), scale_bytes = operand_scale_bytes(&MX, ROWS, COLS);
  o.codes = map(code_bytes);
  o.scales = map(scale_bytes);
  y.data = map(ROWS * OUTPUTS * 4);
  device->k->quantise(device, &(struct emission){.row = &o, .counts = counts, .draw = {.seed = 9, .seq_len = 1}}, &z);
  device->k->contract(device, &y, &o, &weights, NULL);
  CHECK_EQ_I64(counts[VIEW_ROW].elements, ROWS * COLS);
  CHECK_EQ_I64(counts[VIEW_ROW].blocks, ROWS * COLS / 32);
  CHECK_EQ_I64(counts[VIEW_ROW].zero_blocks, (ROWS - TOUCHED) * COLS / 32);
  for (int k = 0; k < TOUCHED; k++) compare_row(&z, &o, &y, &weights, touched[k]);
  int64_t wrong = 0;
  for (int64_t r = 0, k = 0; r < ROWS; r++) {
    bool zero = k >= TOUCHED || r != touched[k];
    k += !zero;
    for (int64_t j = 0; j < OUTPUTS; j++) wrong += (((float *)y.data)[r * OUTPUTS + j] == 0) != zero;
  }
  CHECK_EQ_I64(wrong, 0);
  munmap(o.codes, (size_t)code_bytes);
  munmap(o.scales, (size_t)scale_bytes);
  munmap(y.data, (size_t)(ROWS * OUTPUTS * 4));
  munmap(z.data, (size_t)(ROWS * COLS * 2));
  free(w.data);
}

TEST(measure) {
  struct matrix z = source();
  struct measure m = {0};
  double want = 0, amax = 0;
  for (int k = 0; k < TOUCHED; k++)
    for (int64_t c = 0; c < COLS; c++) {
      double v = test_get(&z, touched[k] * COLS + c);
      want += v * v;
      amax = fmax(amax, fabs(v));
    }
  device->k->measure(device, &m, &z, 1);
  CHECK_CLOSE(m.sum_squares, want, 1e-9 * want);
  CHECK_CLOSE(m.amax, amax, 0);
  test_set(&z, ROWS * COLS - 1, NAN);
  m = (struct measure){0};
  device->k->measure(device, &m, &z, 1);
  CHECK_EQ_I64(m.nonfinite, 1);
  munmap(z.data, (size_t)(ROWS * COLS * 2));
}

/* A table of 2^31 + 256 elements, and its gradient. */
TEST(embedding) {
  struct matrix table = source(), x = test_matrix(DTYPE_BF16, TOUCHED, COLS);
  struct matrix dx = test_random(DTYPE_BF16, TOUCHED, COLS, 5, 1.0);
  struct matrix d_table = {map(ROWS * COLS * 4), DTYPE_F32, ROWS, COLS};
  int32_t tokens[TOUCHED];
  for (int k = 0; k < TOUCHED; k++) tokens[k] = (int32_t)touched[TOUCHED - 1 - k];
  device->k->embedding_forward(device, &x, &table, tokens);
  device->k->embedding_backward(device, &d_table, &dx, tokens);
  for (int k = 0; k < TOUCHED; k++)
    for (int64_t c = 0; c < COLS; c++) {
      CHECK(test_get(&x, k * COLS + c) == test_get(&table, tokens[k] * (int64_t)COLS + c));
      CHECK(test_get(&d_table, tokens[k] * (int64_t)COLS + c) == test_get(&dx, k * COLS + c));
    }
  munmap(d_table.data, (size_t)(ROWS * COLS * 4));
  munmap(table.data, (size_t)(ROWS * COLS * 2));
  free(x.data);
  free(dx.data);
}

int main(void) {
  RUN(sizes);
  if (!getenv("FP4D_TEST_LARGE")) {
    printf("ok kernels # skipped: FP4D_TEST_LARGE is not set\n");
    return test_report();
  }
  const struct extent x = {.tokens = 128, .head_chunk = 128, .hidden_size = COLS, .ffn_size = COLS, .vocab_size = COLS,
                           .attention = {.batch = 1, .seq_len = 128, .n_heads = 2, .n_kv_heads = 2, .head_dim = 32}};
  device = test_backend(2, &x);
  RUN(quantise_and_contract);
  RUN(measure);
  RUN(embedding);
  test_backend_close(device);
  return test_report();
}
