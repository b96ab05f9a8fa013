/* Operands made from the whole result: panels and transforms, MXFP4's other
 * rules, and where producers keep the result meanwhile. */
#include "kernels/cpu/whole.h"
#include "tests/cpu_quantise.h"

static const struct encoding H32 = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_SIGNED_32, 0};
static const struct encoding H16 = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_SIGNED_16, 0};
static const struct encoding DECODE = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_DECODE, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding DECODE_SR = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_DECODE, ROUND_STOCHASTIC, HADAMARD_NONE, 0};
static const struct encoding FLOOR = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_FLOOR, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding FLOOR_SR = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_FLOOR, ROUND_STOCHASTIC, HADAMARD_PLAIN_16, 0};
static const struct encoding FLOOR_PLAIN = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_FLOOR, ROUND_NEAREST, HADAMARD_PLAIN_16, 0};
static const struct encoding MX = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding MX_SR = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_STOCHASTIC, HADAMARD_NONE, 0};
static const struct encoding NV = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_STOCHASTIC, HADAMARD_NONE, 0};
static const struct encoding NV_H16 = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_STOCHASTIC, HADAMARD_SIGNED_16, 0};
static const struct encoding FP8 = {FORMAT_E5M2, BLOCK_NONE, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0};

static struct device *dev[3];

/* ---- panels ------------------------------------------------------------------------------ */

static uint16_t at_panel(const uint16_t *bits, int64_t r, int64_t c) {
  return bits[r / PANEL_ROWS * PANEL_ELEMENTS + c * PANEL_ROWS + r % PANEL_ROWS];
}

TEST(panels) {
  static const int64_t shapes[][2] = {{32, 32}, {64, 160}, {96, 37}, {5, 416}, {288, 16}, {128, 128}, {160, 1}};
  int64_t wrong = 0;
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int kind = 0; kind < QUANTISE_KINDS; kind++)
      for (int h = HADAMARD_NONE; h <= HADAMARD_SIGNED_32; h++)
        for (int v = 0; v < 2; v++) {
          struct matrix z = quantise_source(shapes[s][0], shapes[s][1], kind);
          struct operand o = {.view = (enum view)v};
          o.encoding.hadamard = (enum hadamard)h;
          o.rows = v ? z.cols : z.rows;
          o.cols = v ? z.rows : z.cols;
          if (o.cols % 32 == 0) {
            uint16_t *view = quantise_view(&o, &z), bits[PANELS_MOST * PANEL_ELEMENTS];
            uint32_t amax = 0;
            const int64_t most = (1 + (int64_t)(test_uniform(s, kind) * PANELS_MOST)) * PANEL_ROWS;
            for (int64_t r = 0; r < o.rows; r += most)
              for (int64_t c = 0; c < o.cols; c += PANEL_COLS) {
                const int64_t rows = o.rows - r < most ? o.rows - r : most;
                const int64_t cols = o.cols - c < PANEL_COLS ? o.cols - c : PANEL_COLS;
                panels_load(bits, &z, o.view, o.encoding.hadamard, &(struct panel){r, rows, c, cols});
                for (int64_t i = 0; i < round_up(rows, PANEL_ROWS); i++)
                  for (int64_t j = 0; j < cols; j++)
                    wrong += i < rows ? at_panel(bits, i, j) != view[(r + i) * o.cols + c + j]
                                      : (at_panel(bits, i, j) & 0x7FFF) != 0;
              }
            amax = quantise_amax(view, o.rows * o.cols);
            uint16_t found[2] = {0};
            view_amaxes(cpu_of(dev[1]), v ? NULL : &o, v ? &o : NULL, &z, found);
            wrong += found[v] != amax || found[!v] != 0;
            free(view);
          }
          free(z.data);
        }
  CHECK_EQ_I64(wrong, 0);
}

/* The transforms of 1..n, and of random numbers by the matrix itself. */
TEST(transforms) {
  static const float signed_16[] = {-15.5f, -7.5f, 7.5f, -.5f, 7.5f, -.5f, -15.5f, 8.5f,
                                    8.5f,   16.5f, 1.5f, 1.5f, 1.5f, -2.5f, 10.5f,  -17.5f};
  static const float plain_16[] = {34, -2, -4, 0, -8, 0, 0, 0, -16, 0, 0, 0, 0, 0, 0, 0};
  static const float signed_32[] = {-188, -60, 124, -4, 124, -4, -188, 68,   132, 260, 76,  12, 76,  -20, 148, -268,
                                    64,   0,   -64, 0,  -64, 0,  64,   -64,  -128, -64, 0, -64, 0,  -64, 128};
  struct matrix z = test_matrix(DTYPE_BF16, 32, 16);
  for (int i = 0; i < 32; i++)
    for (int c = 0; c < 16; c++) test_set(&z, i * 16 + c, c % 2 ? i + 1 : -(i + 1));
  uint16_t bits[PANEL_ELEMENTS];
  const struct panel all = {0, 16, 0, 32};
  for (int h = HADAMARD_PLAIN_16; h <= HADAMARD_SIGNED_32; h++) {
    panels_load(bits, &z, VIEW_COLUMN, (enum hadamard)h, &all);
    for (int i = 0; i < (h == HADAMARD_SIGNED_32 ? 23 : 16); i++) {
      const float want = h == HADAMARD_PLAIN_16    ? plain_16[i]
                         : h == HADAMARD_SIGNED_16 ? signed_16[i]
                                                   : signed_32[i] * 0.176776695f;
      CHECK_EQ_I64(at_panel(bits, 1, i), bf16_encode(want));
      CHECK_EQ_I64(at_panel(bits, 0, i), bf16_encode(0.0f - want));
    }
  }
  /* y_i = sum_j (-1)^popcount(i & j) s_j x_j / sqrt(n) */
  struct matrix x = quantise_source(32, 16, 0);
  for (int h = HADAMARD_PLAIN_16; h <= HADAMARD_SIGNED_32; h++) {
    const int n = h == HADAMARD_SIGNED_32 ? 32 : 16;
    panels_load(bits, &x, VIEW_COLUMN, (enum hadamard)h, &all);
    for (int r = 0; r < 16; r++)
      for (int i = 0; i < 32; i++) {
        double y = 0;
        for (int j = i / n * n; j < i / n * n + n; j++) {
          const bool minus = (0x2817 >> j % 16 & 1) == 0 && h != HADAMARD_PLAIN_16;
          y += test_get(&x, j * 16 + r) * (minus != (__builtin_popcount((unsigned)((i % n) & (j % n))) % 2 == 1) ? -1 : 1);
        }
        y /= sqrt(n);
        if (fabs((double)bf16_decode(at_panel(bits, r, i)) - y) > 0x1p-8 * fabs(y) + 1e-6)
          FAIL("h %d (%d, %d): %g, expected %g", h, r, i, (double)bf16_decode(at_panel(bits, r, i)), y);
      }
  }
  free(x.data);
  free(z.data);
}

/* ---- MXFP4 --------------------------------------------------------------------------------- */

/* The scale by floating-point logarithms of exact powers. */
static int model_byte(uint32_t amax, enum scale_rule rule) {
  if (amax == 0) return 0;
  if (amax >= 0x7F80) return 254;
  int e;
  const double m = frexp((double)bf16_decode((uint16_t)amax), &e); /* m in [1/2, 1) */
  int b = 127 + (rule == SCALE_MX_ENCODE && m == .5 ? e - 1 : rule == SCALE_MX_ENCODE ? e : e - 1);
  if (rule == SCALE_MX_FLOOR) return b - 2 < 0 ? 0 : b - 2;
  return b < 2 ? 2 : b > 254 ? 254 : b;
}

static struct quantise_counts check_operand(const struct operand *o, const struct matrix *source,
                                            const struct draw *draw) {
  const struct encoding *e = &o->encoding;
  uint16_t *view = quantise_view(o, source);
  const int64_t n = o->rows * o->cols;
  const double six = e->scale == SCALE_MX_FLOOR ? 1 : 6;
  struct quantise_counts want = {.elements = n, .blocks = n / 32, .amax = quantise_finite_amax(view, n)};
  int64_t wrong = quantise_padding(o, 32);
  for (int64_t r = 0; r < o->rows; r++)
    for (int64_t g = 0; g < o->cols / 32; g++) {
      const uint16_t *x = view + r * o->cols + g * 32;
      const uint32_t amax = quantise_amax(x, 32);
      const int b = model_byte(amax, e->scale);
      wrong += quantise_scale(o, r, g, 32) != (uint32_t)b;
      want.zero_blocks += amax == 0;
      for (int64_t i = 0; i < 32; i++) {
        const double t = (double)bf16_decode(x[i]) * six / ldexp(1, b - 127);
        uint32_t code = e->rounding == ROUND_STOCHASTIC
                            ? e2m1_encode_stochastic((float)t, quantise_field(o, r, g * 32 + i, draw))
                            : e2m1_encode((float)t);
        if (amax == 0) code = 0;
        wrong += quantise_code(o, r, g * 32 + i) != code;
        want.saturated += amax != 0 && !(fabs(t) <= 6);
        want.underflowed += (x[i] & 0x7FFF) != 0 && (code & 7) == 0;
      }
    }
  CHECK_EQ_I64(wrong, 0);
  free(view);
  return want;
}

static void check_shape(int64_t rows, int64_t cols, int kind) {
  static const struct encoding *pairs[][2] = {
      {&H32, &H32}, {&H16, &H16}, {&DECODE, &DECODE}, {&DECODE_SR, &FLOOR}, {&FLOOR, &FLOOR_PLAIN}, {&FLOOR_SR, &H32}};
  struct matrix z = quantise_source(rows, cols, kind);
  struct draw draw = {.seed = next(), .seq_len = 1 + next() % 70, .operand = 3, .layer = 2};
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    struct quantise_counts counts[2] = {{0}}, want;
    struct operand row = {0}, column = {0};
    struct emission out = {.counts = counts, .draw = draw};
    if (z.cols % 32 == 0) row = quantise_operand(*pairs[i][0], VIEW_ROW, z.rows, z.cols), out.row = &row;
    if (z.rows % 32 == 0) column = quantise_operand(*pairs[i][1], VIEW_COLUMN, z.rows, z.cols), out.column = &column;
    cpu_quantise(dev[i % 3], &out, &z);
    if (out.row) {
      want = check_operand(&row, &z, &draw);
      quantise_check_counts(&counts[VIEW_ROW], &want);
      quantise_drop(&row);
    }
    if (out.column) {
      want = check_operand(&column, &z, &draw);
      quantise_check_counts(&counts[VIEW_COLUMN], &want);
      quantise_drop(&column);
    }
  }
  free(z.data);
}

TEST(mxfp4_against_the_model) {
  static const int64_t shapes[][2] = {{1, 32}, {32, 64}, {64, 288}, {96, 33}, {160, 160}, {17, 544}, {288, 5}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int kind = 0; kind < QUANTISE_KINDS; kind++) check_shape(shapes[s][0], shapes[s][1], kind);
}

/* Of many panels and scale tiles; either axis whole, at times both. */
TEST(large_shapes) {
  for (int i = 0; i < 12; i++) {
    int64_t rows = test_size(37, i, 5000);
    if (i % 3) rows = round_up(rows, 32);
    const int64_t cols = test_size(38, i, 60000 / rows);
    check_shape(rows, i % 3 == 1 ? cols : round_up(cols, 32), (int)(next() % QUANTISE_KINDS));
  }
}

TEST(golden_group) {
  static const uint16_t y32[32] = {0x3f10, 0x3fcd, 0x3ff1, 0x3fa4, 0x3da2, 0xbf95, 0xbfee, 0xbfd7,
                                   0xbf36, 0x3f18, 0x3fcf, 0x3ff1, 0x3fa1, 0x3d41, 0xbf98, 0xbfef,
                                   0xbfd5, 0xbf2e, 0x3f1f, 0x3fd1, 0x3ff0, 0x3f9e, 0x3c78, 0xbf9b,
                                   0xbfef, 0xbfd3, 0xbf27, 0x3f27, 0x3fd3, 0x3fef, 0x3f9b, 0xbc8a};
  const char *codes = "47771effd47770effd47760effd57768";
  struct matrix z = test_matrix(DTYPE_BF16, 1, 32);
  memcpy(z.data, y32, sizeof y32);
  struct operand o = quantise_operand(FLOOR, VIEW_ROW, 1, 32);
  cpu_quantise(dev[0], &(struct emission){.row = &o}, &z);
  CHECK_EQ_I64(quantise_scale(&o, 0, 0, 32), 125);
  for (int i = 0; i < 32; i++) CHECK_EQ_I64("0123456789abcdef"[quantise_code(&o, 0, i)], codes[i]);
  double values[32];
  operand_decode(&o, 0, values);
  CHECK(values[0] == .5 && values[1] == 1.5 && values[2] == 1.5); /* code * 1/4 */
  quantise_drop(&o);
  free(z.data);
}

TEST(error_energies) {
  enum { R = 512, C = 1024 };
  struct matrix z = quantise_source(R, C, 0);
  static const struct {
    const struct encoding *as;
    double relative, gain;
  } of[] = {{&FLOOR, .1150, .979}, {&DECODE, .1809, .913}};
  for (size_t i = 0; i < 2; i++) {
    struct operand o = quantise_operand(*of[i].as, VIEW_ROW, R, C);
    cpu_quantise(dev[1], &(struct emission){.row = &o}, &z);
    const struct quantise_error e = quantise_error_of(&o, &z);
    CHECK_CLOSE(e.relative, of[i].relative, .0012);
    CHECK_CLOSE(e.gain, of[i].gain, .0015);
    quantise_drop(&o);
  }
  free(z.data);
}

/* ---- where the result stands ------------------------------------------------------------------ */

/* A producer's operands are those of its plain result, whether or not that is
 * kept, in either type, beside operands made by strips. */
static void check_producers(struct device *d, struct device *one, int64_t rows, int64_t cols) {
  static const struct encoding *pairs[][2] = {{&NV, &NV_H16}, {&MX_SR, &H32}, {&NV, &MX}, {&FP8, &FP8}, {&DECODE, NULL}};
  const struct draw draw = {.seed = 5, .update = 3, .first_sample = 9, .seq_len = 32, .layer = 2, .operand = 1};
  for (int t = 0; t < 2; t++)
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
      for (int with_plain = 0; with_plain < 2; with_plain++) {
        const enum dtype type = test_types[t];
        struct matrix gate_up = test_random(type, rows, 2 * cols, 3 + i, 2.0), plain = test_matrix(type, rows, cols);
        struct operand o[4];
        for (int k = 0; k < 4; k++) {
          const struct encoding *as = pairs[i][k / 2] ? pairs[i][k / 2] : &MX;
          o[k] = quantise_operand(*as, k / 2 ? VIEW_COLUMN : VIEW_ROW, rows, cols);
        }
        struct quantise_counts got[2] = {{0}}, want[2] = {{0}};
        const bool columns = pairs[i][1] != NULL;
        struct emission out = {.plain = with_plain ? &plain : NULL, .row = &o[0], .column = columns ? &o[2] : NULL,
                               .draw = draw, .counts = got};
        cpu_swiglu_forward(d, &out, &gate_up);
        cpu_swiglu_forward(one, &(struct emission){.plain = &plain}, &gate_up);
        struct emission from = {.row = &o[1], .column = columns ? &o[3] : NULL, .draw = draw, .counts = want};
        cpu_quantise(one, &from, &plain);
        CHECK(quantise_same(&o[0], &o[1]) && quantise_same(&o[2], &o[3]));
        for (int v = 0; v < (columns ? 2 : 1); v++) quantise_check_counts(&got[v], &want[v]);
        CHECK_EQ_I64(got[VIEW_ROW].elements, rows * cols);
        for (int k = 0; k < 4; k++) quantise_drop(&o[k]);
        free(gate_up.data);
        free(plain.data);
      }
}

TEST(producers) { check_producers(dev[2], dev[0], 64, 160); }

/* Of many strips, in scratch for just this shape. */
TEST(large_producers) {
  for (int i = 0; i < 6; i++) {
    const int64_t rows = round_up(test_size(41, i, 3000), 32), cols = round_up(test_size(42, i, 40000 / rows), 32);
    const struct extent x = {.tokens = rows, .head_chunk = 1, .attention = {1, rows, 1, 1, 1}, .hidden_size = 1,
                             .ffn_size = cols, .vocab_size = 1};
    struct device *d = test_device(1 + i % 3, &x), *one = test_device(1, &x);
    check_producers(d, one, rows, cols);
    test_device_close(d);
    test_device_close(one);
  }
}

/* Column sums of the gain's gradient stand in the scratch beside the result. */
TEST(gains_and_operands) {
  enum { ROWS = 96, COLS = 64 };
  struct matrix dy = test_random(DTYPE_BF16, ROWS, COLS, 1, 1.0), x = test_random(DTYPE_BF16, ROWS, COLS, 2, 1.0);
  struct matrix gain = test_random(DTYPE_BF16, 1, COLS, 3, 1.0), dx = test_matrix(DTYPE_BF16, ROWS, COLS);
  struct matrix with = test_matrix(DTYPE_F32, 1, COLS), without = test_matrix(DTYPE_F32, 1, COLS);
  float rstd[ROWS];
  for (int i = 0; i < ROWS; i++) rstd[i] = 1 + .01f * (float)i;
  struct operand row = quantise_operand(NV, VIEW_ROW, ROWS, COLS), column = quantise_operand(NV_H16, VIEW_COLUMN, ROWS, COLS);
  struct emission out = {.row = &row, .column = &column, .draw = {.seq_len = 32}};
  cpu_add_rmsnorm_backward(dev[2], &out, &with, &dy, NULL, &x, rstd, &gain);
  cpu_add_rmsnorm_backward(dev[0], &(struct emission){.plain = &dx}, &without, &dy, NULL, &x, rstd, &gain);
  CHECK(test_same(&with, &without));
  free(with.data), free(without.data);
  quantise_drop(&row);
  quantise_drop(&column);
  free(dy.data), free(x.data), free(gain.data), free(dx.data);
}

/* An FP32 matrix is rounded to BF16 once, for strips and for the whole alike. */
TEST(matrices_in_fp32) {
  enum { ROWS = 96, COLS = 160 };
  struct matrix wide = test_random(DTYPE_F32, ROWS, COLS, 8, 1.0), half = test_matrix(DTYPE_BF16, ROWS, COLS);
  struct matrix plain = test_matrix(DTYPE_BF16, ROWS, COLS);
  for (int i = 0; i < ROWS * COLS; i++) test_set(&half, i, test_get(&wide, i));
  struct operand o[4] = {quantise_operand(NV, VIEW_ROW, ROWS, COLS), quantise_operand(NV, VIEW_ROW, ROWS, COLS),
                         quantise_operand(H32, VIEW_COLUMN, ROWS, COLS), quantise_operand(H32, VIEW_COLUMN, ROWS, COLS)};
  const struct draw draw = {.seed = 1, .seq_len = 48};
  cpu_quantise(dev[0], &(struct emission){.row = &o[0], .column = &o[2], .draw = draw}, &half);
  for (int with_plain = 0; with_plain < 2; with_plain++) {
    memset(o[1].codes, 0, quantise_code_bytes(&o[1]));
    cpu_quantise(dev[2], &(struct emission){.plain = with_plain ? &plain : NULL, .row = &o[1], .column = &o[3], .draw = draw},
                 &wide);
    CHECK(quantise_same(&o[0], &o[1]) && quantise_same(&o[2], &o[3]));
  }
  CHECK(test_same(&plain, &half));
  for (int k = 0; k < 4; k++) quantise_drop(&o[k]);
  free(wide.data), free(half.data), free(plain.data);
}

TEST(wanted) {
  struct operand o = {.encoding = MX_SR};
  CHECK(!whole_wanted(NULL) && !whole_wanted(&o));
  static const struct encoding *whole[] = {&H32, &H16, &DECODE, &FLOOR, &NV, &FP8};
  for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
    o.encoding = *whole[i];
    CHECK(whole_wanted(&o));
    CHECK(!cpu_refuse_encoding(NULL, &o.encoding, VIEW_ROW));
  }
  o.encoding = (struct encoding){.format = FORMAT_BF16};
  CHECK(!whole_wanted(&o));
  CHECK(cpu_refuse_encoding(NULL, &DECODE_SR, VIEW_COLUMN) != NULL);
}

TEST(bits_of_every_machine) {
  struct matrix z = quantise_fixed_source(160, 416);
  static const struct {
    const struct encoding *as;
    enum view view;
    uint64_t hash;
  } of[] = {{&H32, VIEW_COLUMN, 0x6a794d5b77457f24u},
            {&FLOOR_SR, VIEW_ROW, 0x4960d169ba1c1353u},
            {&DECODE, VIEW_COLUMN, 0x871199db45dbf1d7u}};
  for (size_t i = 0; i < sizeof of / sizeof of[0]; i++)
    for (int threads = 0; threads < 3; threads++) {
      struct operand o = quantise_operand(*of[i].as, of[i].view, 160, 416);
      struct emission out = {.draw = {.seed = 42, .update = 7, .first_sample = 11, .seq_len = 50, .layer = 2, .operand = 3}};
      *(of[i].view == VIEW_ROW ? &out.row : &out.column) = &o;
      cpu_quantise(dev[threads], &out, &z);
      CHECK_HASH(quantise_hash(&o), of[i].hash);
      quantise_drop(&o);
    }
  free(z.data);
}

int main(void) {
  const struct extent x = {.tokens = 96, .head_chunk = 16, .attention = {1, 96, 2, 2, 32}, .hidden_size = 160,
                           .ffn_size = 160, .vocab_size = 64};
  for (int i = 0; i < 3; i++) dev[i] = test_device(i + 1, &x);
  RUN(panels);
  RUN(transforms);
  RUN(mxfp4_against_the_model);
  RUN(golden_group);
  RUN(error_energies);
  RUN(producers);
  RUN(large_producers);
  RUN(gains_and_operands);
  RUN(matrices_in_fp32);
  RUN(wanted);
  RUN(bits_of_every_machine);
  RUN(large_shapes);
  for (int i = 0; i < 3; i++) test_device_close(dev[i]);
  return test_report();
}
