/* CTA-local NVFP4 on the CPU against a literal model, element by element. */
#include "tests/cpu_nvfp4_local.h"

/* ---- against the model ------------------------------------------------------------------ */

TEST(golden_block) {
  static const uint16_t x16[16] = {0xc032, 0xc01a, 0xc002, 0x3eac, 0xbfa6, 0xbf6d, 0xbf0e, 0xbe3d,
                                   0x3e3d, 0x3f0e, 0x3f6d, 0x3fa6, 0x3fd5, 0x4002, 0x401a, 0x4032};
  struct cpu_device d = device_of(1);
  for (int column = 0; column < 2; column++)
    for (int with_larger = 0; with_larger < 2; with_larger++) {
      /* x16 in one chunk; a value 2^5 times its amax in the next */
      struct matrix m = column ? source_new(144, 1) : source_new(1, 144);
      uint16_t *z = m.data;
      memcpy(z, x16, sizeof x16);
      if (with_larger) z[130] = (uint16_t)(x16[15] + (5 << 7));
      struct operand o = quantised(&d, &m, plain_local(P2), column ? VIEW_COLUMN : VIEW_ROW, 0, 0, NULL, NULL);
      for (int i = 0; i < 16; i++) CHECK_EQ_I64("0123456789abcdef"[code_at(&o, 0, i)], "ffe1dca912456677"[i]);
      CHECK_EQ_I64(scale_at(&o, 0, 0), with_larger ? 0x4F : 0x77);
      CHECK(o.outer[0] == (with_larger ? 0x1p-4f : 0x1p-9f));
      CHECK_EQ_I64(o.codes[0], 0xff);
      CHECK_EQ_I64(o.codes[1], 0x1e); /* element 2 in the low nibble */
      operand_end(&o);
      free(m.data);
    }
  device_end(&d);
}

struct shape {
  int64_t rows, cols; /* of the source */
  int64_t row_strip, row_segment, column_strip, column_segment;
};

static void check_shape(struct cpu_device *d, const struct shape *x, int rule, int kind) {
  struct matrix m = source_new(x->rows, x->cols);
  for (int64_t i = 0; i < x->rows * x->cols; i++) ((uint16_t *)m.data)[i] = value_of_kind(kind, 5000);
  struct draw draw = {.seed = (uint64_t)next() << 32 | next(), .update = next() % 1000, .first_sample = next(),
                      .seq_len = 1 + next() % 40, .layer = 3, .operand = 2};
  for (int rounding = 0; rounding < 2 && x->cols % 16 == 0; rounding++) {
    struct quantise_counts counts = {0};
    struct operand o = quantised(d, &m, local(rule, BLOCK_1X16, (enum rounding)rounding, HADAMARD_NONE), VIEW_ROW,
                                 x->row_strip, x->row_segment, &draw, &counts);
    const struct quantise_counts want = check_operand(&o, &m, &draw);
    check_counts(&counts, &want);
    operand_end(&o);
  }
  for (int h = HADAMARD_NONE; h <= HADAMARD_SIGNED_32; h++) {
    if (x->rows % (h == HADAMARD_SIGNED_32 ? 32 : 16) || (h == HADAMARD_SIGNED_32 && x->column_segment % 32)) continue;
    struct quantise_counts counts = {0};
    struct operand o = quantised(d, &m, local(rule, BLOCK_1X16, ROUND_NEAREST, (enum hadamard)h), VIEW_COLUMN,
                                 x->column_strip, x->column_segment, NULL, &counts);
    const struct quantise_counts want = check_operand(&o, &m, NULL);
    check_counts(&counts, &want);
    operand_end(&o);
  }
  free(m.data);
}

TEST(against_the_model) {
  static const struct shape shapes[] = {
      {1, 16, 0, 0, 0, 0},       {3, 48, 128, 0, 128, 0},     {16, 32, 0, 16, 16, 0},   {32, 144, 128, 48, 128, 16},
      {272, 160, 256, 80, 0, 0}, {144, 272, 128, 0, 256, 48}, {48, 400, 0, 208, 208, 0}, {130, 16, 128, 0, 0, 0},
  };
  struct cpu_device d = device_of(2);
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int kind = 0; kind < KINDS; kind++) check_shape(&d, &shapes[s], RULES[(size_t)kind % 2 ^ s % 2], kind);
  device_end(&d);
}

/* Of many chunks, strips and, where the segments divide an axis, segments; either axis whole, at times both. */
TEST(large_shapes) {
  static const int64_t strips[] = {128, 256, 0, 384};
  for (int i = 0; i < 12; i++) {
    struct cpu_device d = device_of(1 + i % 3);
    struct shape x = {.rows = test_size(39, i, 5000), .row_strip = strips[i % 4], .column_strip = strips[(i + 1) % 4]};
    if (i % 3) x.rows = round_up(x.rows, 32);
    x.cols = test_size(40, i, 40000 / x.rows);
    if (i % 3 != 1) x.cols = round_up(x.cols, 32);
    if (x.cols % 96 == 0) x.row_segment = x.cols / 3;
    if (x.rows % 64 == 0) x.column_segment = x.rows / 2;
    check_shape(&d, &x, RULES[i % 2], (int)(next() % KINDS));
    device_end(&d);
  }
}

/* Row and column view of a weight made at once: the model, and one the other transposed. */
TEST(tiles) {
  static const int64_t shapes[][3] = {{16, 16, 0}, {272, 144, 0}, {96, 160, 48}, {288, 32, 144}};
  struct cpu_device d = device_of(2);
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int kind = 0; kind < KINDS; kind++)
      for (int f = 0; f < 2; f++) {
        const int64_t rows = shapes[s][0], cols = shapes[s][1], arm = shapes[s][2];
        const struct encoding e = local(RULES[f], BLOCK_2D16, ROUND_NEAREST, HADAMARD_NONE);
        struct matrix m = source_new(rows, cols);
        for (int64_t i = 0; i < rows * cols; i++) ((uint16_t *)m.data)[i] = value_of_kind(kind, 5000);
        struct operand row = operand_new(e, VIEW_ROW, rows, cols, arm, 0);
        struct operand column = operand_new(e, VIEW_COLUMN, cols, rows, 0, arm);
        struct quantise_counts counts[2] = {{0}};
        quantise_by(&d, (struct panel_rule){.o = &row, .counts = &counts[0]}, &m);
        quantise_by(&d, (struct panel_rule){.o = &column, .done = &row, .counts = &counts[1]}, &m);
        const struct quantise_counts want_row = check_operand(&row, &m, NULL), want_column = check_operand(&column, &m, NULL);
        check_counts(&counts[0], &want_row);
        check_counts(&counts[1], &want_column);
        int64_t different = 0;
        for (int64_t r = 0; r < rows; r++)
          for (int64_t c = 0; c < cols; c++)
            different += code_at(&row, r, c) != code_at(&column, c, r) ||
                         scale_at(&row, r, c / 16) != scale_at(&column, c, r / 16) ||
                         f32_bits(outer_at(&row, r, c)) != f32_bits(outer_at(&column, c, r));
        CHECK_EQ_I64(different, 0);
        /* either view alone is the same */
        struct operand alone = quantised(&d, &m, e, VIEW_COLUMN, 0, arm, NULL, NULL);
        CHECK(same_operand(&alone, &column));
        operand_end(&alone);
        operand_end(&row);
        operand_end(&column);
        free(m.data);
      }
  device_end(&d);
}

/* As an operation: from FP32 as from BF16, padding cleared, both views at once. */
TEST(as_an_operation) {
  enum { ROWS = 80, COLS = 144 };
  struct cpu_device d = device_of(2);
  struct matrix m = gaussian(ROWS, COLS, 1), f32 = test_matrix(DTYPE_F32, ROWS, COLS);
  for (int64_t i = 0; i < ROWS * COLS; i++) test_set(&f32, i, test_get(&m, i));
  const struct draw draw = {.seed = 6, .seq_len = 20};
  const struct encoding pairs[2][2] = {
      {local(F, BLOCK_1X16, ROUND_STOCHASTIC, HADAMARD_NONE), local(F, BLOCK_1X16, ROUND_NEAREST, HADAMARD_SIGNED_16)},
      {local(P2, BLOCK_2D16, ROUND_NEAREST, HADAMARD_NONE), local(P2, BLOCK_2D16, ROUND_NEAREST, HADAMARD_NONE)}};
  for (int k = 0; k < 4; k++) {
    struct operand row = operand_new(pairs[k / 2][0], VIEW_ROW, ROWS, COLS, 0, 0);
    struct operand column = operand_new(pairs[k / 2][1], VIEW_COLUMN, COLS, ROWS, 0, 0);
    memset(row.scales, 0xA5, (size_t)operand_scale_bytes(&row.encoding, ROWS, COLS));
    memset(column.scales, 0xA5, (size_t)operand_scale_bytes(&column.encoding, COLS, ROWS));
    struct quantise_counts counts[2] = {{0}};
    const struct emission out = {.row = &row, .column = &column, .draw = draw, .counts = counts};
    cpu_quantise(&d.device, &out, k % 2 ? &f32 : &m);
    const struct quantise_counts want_row = check_operand(&row, &m, &draw), want_column = check_operand(&column, &m, NULL);
    check_counts(&counts[VIEW_ROW], &want_row);
    check_counts(&counts[VIEW_COLUMN], &want_column);
    operand_end(&row);
    operand_end(&column);
  }
  for (int view = VIEW_ROW; view <= VIEW_COLUMN; view++) {
    CHECK((cpu_refuse_encoding(&d.device, &pairs[0][0], (enum view)view) != NULL) == (view == VIEW_COLUMN));
    CHECK(!cpu_refuse_encoding(&d.device, &pairs[0][1], (enum view)view));
    CHECK(!cpu_refuse_encoding(&d.device, &pairs[1][0], (enum view)view));
  }
  free(m.data);
  free(f32.data);
  device_end(&d);
}

/* ---- the same bits on every machine ----------------------------------------------------------------- */

static uint64_t hash_operand(uint64_t h, const struct operand *o) {
  h = test_hash(h, o->codes, (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols), 1);
  h = test_hash(h, o->scales, (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols), 1);
  return test_hash(h, o->outer, (size_t)operand_outer_count(o), sizeof(float));
}

TEST(bits) {
  struct cpu_device d = device_of(2);
  struct matrix m = source_new(288, 272); /* integers alone: no libm */
  state = 12345;
  for (int64_t i = 0; i < m.rows * m.cols; i++) {
    const uint32_t u = next(), octave = (uint32_t)(i / 128 % 9);
    ((uint16_t *)m.data)[i] = (uint16_t)((u & 0x8000) | (u % 37 ? (118 + octave + (u >> 16) % 6) << 7 | (u & 0x7F) : 0));
  }
  const struct draw draw = {.seed = 21, .update = 8, .first_sample = 3, .seq_len = 96, .layer = 1, .operand = DRAW_DY_DOWN};
  uint64_t h = TEST_HASH_START;
  for (int f = 0; f < 2; f++) {
    const struct encoding all[4] = {plain_local(RULES[f]), local(RULES[f], BLOCK_1X16, ROUND_STOCHASTIC, HADAMARD_NONE),
                                    local(RULES[f], BLOCK_1X16, ROUND_NEAREST, HADAMARD_SIGNED_16),
                                    local(RULES[f], BLOCK_2D16, ROUND_NEAREST, HADAMARD_NONE)};
    for (int i = 0; i < 4; i++) {
      struct operand o = quantised(&d, &m, all[i], i == 2 ? VIEW_COLUMN : VIEW_ROW, i == 3 ? 0 : 128, 0, &draw, NULL);
      h = hash_operand(h, &o);
      operand_end(&o);
    }
  }
  CHECK_HASH(h, 0x48ea09f631998d33);
  free(m.data);
  device_end(&d);
}

int main(void) {
  RUN(golden_block);
  RUN(against_the_model);
  RUN(tiles);
  RUN(as_an_operation);
  RUN(bits);
  RUN(large_shapes);
  return test_report();
}
