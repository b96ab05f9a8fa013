/* MXFP4 quantisation on the CPU against a literal model, element by element. */
#include "base/hash.h"
#include "tests/cpu_literal.h"

static const struct encoding NEAREST = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding STOCHASTIC = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_STOCHASTIC, HADAMARD_NONE, 0};
static const struct encoding TILES = {FORMAT_MXFP4, BLOCK_2D32, SCALE_MX_ADAPTIVE, ROUND_NEAREST, HADAMARD_NONE, 0};

/* ---- operands -------------------------------------------------------------------- */

/* Memory holds 0xA5 before, and 16 bytes behind each array must still do so. */
static struct operand operand_new(struct encoding e, enum view view, int64_t rows, int64_t cols) {
  struct operand o = {.encoding = e, .view = view, .rows = rows, .cols = cols};
  size_t codes = (size_t)operand_code_bytes(&e, rows, cols), scales = (size_t)operand_scale_bytes(&e, rows, cols);
  o.codes = malloc(codes + 16);
  o.scales = malloc(scales + 16);
  memset(o.codes, 0xA5, codes + 16);
  memset(o.scales, 0xA5, scales + 16);
  return o;
}
static void operand_end(struct operand *o) {
  size_t codes = (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols);
  size_t scales = (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols);
  for (int i = 0; i < 16; i++) CHECK(o->codes[codes + (size_t)i] == 0xA5 && o->scales[scales + (size_t)i] == 0xA5);
  free(o->codes);
  free(o->scales);
}
static bool operands_equal(const struct operand *a, const struct operand *b) {
  return memcmp(a->codes, b->codes, (size_t)operand_code_bytes(&a->encoding, a->rows, a->cols)) == 0 &&
         memcmp(a->scales, b->scales, (size_t)operand_scale_bytes(&a->encoding, a->rows, a->cols)) == 0;
}

/* ---- the model -------------------------------------------------------------------- */

static int model_byte(const uint16_t *z, int64_t stride, int64_t n, int64_t lines, int64_t line_stride, bool adaptive) {
  uint32_t amax = 0;
  for (int64_t j = 0; j < lines; j++)
    for (int64_t i = 0; i < n; i++) {
      uint32_t a = z[i * stride + j * line_stride] & 0x7FFF;
      if (a > amax) amax = a;
    }
  if (amax == 0) return 0;
  if (amax >= 0x7F80) return 254;
  int e;
  double a = (double)bf16_decode((uint16_t)amax), m = frexp(a, &e);
  int b = (m == .5 ? e - 1 : e) + 127;
  b = b < 2 ? 2 : b > 254 ? 254 : b;
  return adaptive && b > 2 && a / ldexp(1, b - 127) < .87 ? b - 1 : b;
}

/* Checks operand `o` of the BF16 source z[rows][cols] and returns the counts. */
static struct quantise_counts check_operand(const struct operand *o, const uint16_t *z, int64_t rows, int64_t cols,
                                            const struct draw *draw) {
  struct quantise_counts n = {0};
  bool row = o->view == VIEW_ROW, tiled = o->encoding.block == BLOCK_2D32;
  int64_t along = row ? 1 : cols, across = row ? cols : 1; /* strides of the contraction and the other axis */
  int64_t wrong = 0;
  for (int64_t r = 0; r < o->rows; r++)
    for (int64_t g = 0; g < o->cols / 32; g++) {
      const uint16_t *group = z + r * across + g * 32 * along;
      int b = tiled ? model_byte(z + r / 32 * 32 * across + g * 32 * along, along, 32, 32, across, true)
                    : model_byte(group, along, 32, 1, 0, false);
      wrong += scale_at(o, r, g) != (uint32_t)b;
      n.blocks++;
      n.zero_blocks += b == 0;
      for (int64_t i = 0; i < 32; i++) {
        uint16_t bits = group[i * along];
        double a = fabs((double)bf16_decode(bits));
        int field = o->encoding.rounding == ROUND_STOCHASTIC ? field_of(draw, r, g * 32 + i, cols) : -1;
        double t = a * 6 / ldexp(1, b - 127);
        uint32_t code = b == 0 ? 0 : model_code(t, bits >> 15, field);
        wrong += code_at(o, r, g * 32 + i) != code;
        n.elements++;
        if (a > (double)n.amax && a < INFINITY) n.amax = (float)a;
        n.saturated += b != 0 && !(t <= 6);
        n.underflowed += a != 0 && code % 8 == 0;
      }
    }
  /* padding is zero */
  int64_t all_rows = round_up(o->rows, 128), all_cols = round_up(o->cols / 32, 4);
  for (int64_t r = 0; r < all_rows; r++)
    for (int64_t c = 0; c < all_cols; c++)
      if (r >= o->rows || c >= o->cols / 32) wrong += scale_at(o, r, c) != 0;
  (void)rows;
  CHECK_EQ_I64(wrong, 0);
  return n;
}

/* Quantises into fresh operands, checks them with the model, and drops them. */
static void check_source(struct cpu_device *d, const uint16_t *z, int64_t rows, int64_t cols, struct encoding row_as,
                         const struct encoding *column_as, const struct draw *draw) {
  struct operand row = operand_new(row_as, VIEW_ROW, rows, cols), column = {0};
  struct quantise_counts counts[2] = {{0}};
  struct matrix source = {.data = (void *)(uintptr_t)z, .dtype = DTYPE_BF16, .rows = rows, .cols = cols};
  struct emission out = {.row = &row, .draw = *draw, .counts = counts};
  if (column_as) {
    column = operand_new(*column_as, VIEW_COLUMN, cols, rows);
    out.column = &column;
  }
  cpu_quantise(&d->device, &out, &source);
  struct quantise_counts want = check_operand(&row, z, rows, cols, draw);
  check_counts(&counts[VIEW_ROW], &want);
  operand_end(&row);
  if (column_as) {
    want = check_operand(&column, z, rows, cols, draw);
    check_counts(&counts[VIEW_COLUMN], &want);
    operand_end(&column);
  }
}

/* ---- tests -------------------------------------------------------------------------- */

TEST(golden_group) {
  static const uint16_t y32[32] = {0x3f10, 0x3fcd, 0x3ff1, 0x3fa4, 0x3da2, 0xbf95, 0xbfee, 0xbfd7,
                                   0xbf36, 0x3f18, 0x3fcf, 0x3ff1, 0x3fa1, 0x3d41, 0xbf98, 0xbfef,
                                   0xbfd5, 0xbf2e, 0x3f1f, 0x3fd1, 0x3ff0, 0x3f9e, 0x3c78, 0xbf9b,
                                   0xbfef, 0xbfd3, 0xbf27, 0x3f27, 0x3fd3, 0x3fef, 0x3f9b, 0xbc8a};
  const char *codes = "36760dffc46760efec46760efec46768";
  struct cpu_device d = device_of(1);
  struct operand row = operand_new(NEAREST, VIEW_ROW, 1, 32), column = operand_new(NEAREST, VIEW_COLUMN, 32, 32);
  uint16_t square[32][32] = {{0}};
  for (int i = 0; i < 32; i++) square[i][7] = y32[i];
  struct matrix line = {.data = (void *)(uintptr_t)y32, .dtype = DTYPE_BF16, .rows = 1, .cols = 32};
  struct matrix source = {.data = square, .dtype = DTYPE_BF16, .rows = 32, .cols = 32};
  cpu_quantise(&d.device, &(struct emission){.row = &row}, &line);
  cpu_quantise(&d.device, &(struct emission){.column = &column}, &source);
  for (int i = 0; i < 32; i++) {
    CHECK_EQ_I64("0123456789abcdef"[code_at(&row, 0, i)], codes[i]);
    CHECK_EQ_I64("0123456789abcdef"[code_at(&column, 7, i)], codes[i]);
  }
  CHECK_EQ_I64(scale_at(&row, 0, 0), 128);
  CHECK_EQ_I64(scale_at(&column, 7, 0), 128);
  CHECK_EQ_I64(scale_at(&column, 6, 0), 0);
  CHECK_EQ_I64(row.codes[0], 0x63); /* element 0 in the low nibble */
  operand_end(&row);
  operand_end(&column);
  device_end(&d);
}

/* Every encoding of a source of one kind. */
static void check_shape(struct cpu_device *d, int64_t rows, int64_t cols, int kind) {
  uint16_t *z = malloc((size_t)(rows * cols) * sizeof *z);
  for (int64_t i = 0; i < rows * cols; i++) z[i] = value_of_kind(kind, 50);
  struct draw draw = {.seed = ((uint64_t)next() << 32) | next(), .update = next() % 1000, .layer = 3, .operand = 2};
  draw.first_sample = ((uint64_t)next() << 8) & 0xFFFFFFFFFF;
  draw.seq_len = 1 + next() % (uint32_t)rows;
  bool whole = rows % 32 == 0;
  check_source(d, z, rows, cols, STOCHASTIC, whole ? &NEAREST : NULL, &draw);
  check_source(d, z, rows, cols, NEAREST, whole ? &TILES : NULL, &draw);
  if (whole) check_source(d, z, rows, cols, TILES, &TILES, &draw);
  free(z);
}

TEST(against_the_model) {
  static const int64_t shapes[][2] = {{1, 32}, {31, 64}, {33, 96}, {32, 32}, {64, 288}, {96, 160}, {160, 32}, {257, 64},
                                      {32, 544}};
  struct cpu_device d = device_of(2);
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int kind = 0; kind < KINDS; kind++) check_shape(&d, shapes[s][0], shapes[s][1], kind);
  device_end(&d);
}

/* Of many pieces, strips and scale tiles along either axis. */
TEST(large_shapes) {
  for (int i = 0; i < 10; i++) {
    struct cpu_device d = device_of(1 + i % 3);
    int64_t cols = round_up(test_size(31, i, 6000), 32), rows = test_size(32, i, 60000 / cols);
    check_shape(&d, i % 4 ? round_up(rows, 32) : rows, cols, (int)(next() % KINDS));
    device_end(&d);
  }
}

/* Every BF16 pattern no larger than the group's first element, a power of two. */
TEST(every_pattern) {
  static const int bytes[] = {2, 19, 20, 21, 127, 254};
  struct cpu_device d = device_of(1);
  enum { ROWS = 2144 };
  uint16_t *z = malloc(ROWS * 32 * sizeof *z);
  for (size_t k = 0; k < sizeof bytes / sizeof bytes[0]; k++) {
    uint16_t largest = (uint16_t)(bytes[k] << 7);
    for (int64_t i = 0, pattern = 0; i < ROWS * 32; i++) {
      if (i % 32 == 0) z[i] = largest;
      else z[i] = (uint16_t)pattern++;
      if ((z[i] & 0x7FFF) > largest) z[i] = (uint16_t)(z[i] & 0x8000);
    }
    struct draw draw = {.seed = 7, .seq_len = ROWS};
    check_source(&d, z, ROWS, 32, NEAREST, NULL, &draw);
    check_source(&d, z, ROWS, 32, STOCHASTIC, NULL, &draw);
    /* the same groups as columns */
    uint16_t *turned = malloc(ROWS * 32 * sizeof *z);
    for (int64_t r = 0; r < ROWS; r++)
      for (int64_t c = 0; c < 32; c++) turned[c * ROWS + r] = z[r * 32 + c];
    check_source(&d, turned, 32, ROWS, NEAREST, &NEAREST, &draw);
    free(turned);
  }
  free(z);
  device_end(&d);
}

TEST(tiles_decode_alike) {
  struct cpu_device d = device_of(2);
  enum { R = 96, C = 352 };
  static uint16_t z[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) z[r][c] = bf16_encode((float)(normal() * ldexp(1, (r / 32 + c / 32) % 7)));
  struct operand row = operand_new(TILES, VIEW_ROW, R, C), column = operand_new(TILES, VIEW_COLUMN, C, R);
  struct matrix source = {.data = z, .dtype = DTYPE_BF16, .rows = R, .cols = C};
  cpu_quantise(&d.device, &(struct emission){.row = &row, .column = &column}, &source);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      float by_row = mxfp4_decode(code_at(&row, r, c), scale_at(&row, r, c / 32));
      float by_column = mxfp4_decode(code_at(&column, c, r), scale_at(&column, c, r / 32));
      if (f32_bits(by_row) != f32_bits(by_column)) FAIL("(%d, %d): %g and %g", r, c, (double)by_row, (double)by_column);
    }
  operand_end(&row);
  operand_end(&column);
  device_end(&d);
}

TEST(rule_of_87_hundredths) {
  static const struct {
    float largest;
    int byte;
  } of[] = {{.8671875f, 126}, {.87109375f, 127}, {1, 127}, {.50390625f, 126}, {1.734375f, 127}, {1.7421875f, 128}, {2, 128}};
  struct cpu_device d = device_of(1);
  for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
    uint16_t z[32][32];
    for (int r = 0; r < 32; r++)
      for (int c = 0; c < 32; c++) z[r][c] = bf16_encode((float)((r * 32 + c) % 7) * .0625f);
    z[31][17] = bf16_encode(-of[i].largest);
    struct operand row = operand_new(TILES, VIEW_ROW, 32, 32);
    struct quantise_counts counts[2] = {{0}};
    struct matrix source = {.data = z, .dtype = DTYPE_BF16, .rows = 32, .cols = 32};
    cpu_quantise(&d.device, &(struct emission){.row = &row, .counts = counts}, &source);
    for (int r = 0; r < 32; r++) CHECK_EQ_I64(scale_at(&row, r, 0), of[i].byte);
    CHECK_EQ_I64(code_at(&row, 31, 17), 15);
    CHECK_EQ_I64(counts[VIEW_ROW].saturated, (double)of[i].largest > ldexp(1, of[i].byte - 127));
    CHECK_EQ_I64(counts[VIEW_COLUMN].elements, 0);
    operand_end(&row);
  }
  device_end(&d);
}

/* A sample gives the same bytes wherever it stands in a batch, for any number
 * of threads; other seeds, updates, layers, operands or samples other bytes. */
TEST(draws_do_not_depend_on_layout) {
  enum { SEQ = 40, C = 288, BATCH = 3 };
  static uint16_t z[BATCH * SEQ][C];
  for (int r = 0; r < BATCH * SEQ; r++)
    for (int c = 0; c < C; c++) z[r][c] = bf16_encode((float)normal());
  struct draw draw = {.seed = 1234, .update = 9, .first_sample = 0xFFFFFFFF, .seq_len = SEQ, .layer = 4, .operand = 1};
  struct cpu_device one = device_of(1), three = device_of(3);
  struct operand whole = operand_new(STOCHASTIC, VIEW_ROW, BATCH * SEQ, C);
  struct operand again = operand_new(STOCHASTIC, VIEW_ROW, BATCH * SEQ, C);
  struct matrix source = {.data = z, .dtype = DTYPE_BF16, .rows = BATCH * SEQ, .cols = C};
  cpu_quantise(&one.device, &(struct emission){.row = &whole, .draw = draw}, &source);
  cpu_quantise(&three.device, &(struct emission){.row = &again, .draw = draw}, &source);
  CHECK(operands_equal(&whole, &again));
  for (int b = 0; b < BATCH; b++) {
    struct operand alone = operand_new(STOCHASTIC, VIEW_ROW, SEQ, C);
    struct matrix sample = {.data = z[b * SEQ], .dtype = DTYPE_BF16, .rows = SEQ, .cols = C};
    struct draw at = draw;
    at.first_sample += (uint64_t)b;
    cpu_quantise(&three.device, &(struct emission){.row = &alone, .draw = at}, &sample);
    CHECK(memcmp(alone.codes, whole.codes + b * SEQ * C / 2, SEQ * C / 2) == 0);
    operand_end(&alone);
  }
  for (int k = 0; k < 5; k++) {
    struct draw other = draw;
    if (k == 0) other.seed ^= (uint64_t)1 << 40;
    if (k == 1) other.update++;
    if (k == 2) other.layer++;
    if (k == 3) other.operand++;
    if (k == 4) other.first_sample++;
    cpu_quantise(&one.device, &(struct emission){.row = &again, .draw = other}, &source);
    CHECK(!operands_equal(&whole, &again));
  }
  operand_end(&whole);
  operand_end(&again);
  device_end(&one);
  device_end(&three);
}

TEST(columns_draw_nothing) {
  enum { R = 64, C = 96 };
  static uint16_t z[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) z[r][c] = bf16_encode((float)normal());
  struct cpu_device d = device_of(2);
  struct matrix source = {.data = z, .dtype = DTYPE_BF16, .rows = R, .cols = C};
  struct operand first = operand_new(NEAREST, VIEW_COLUMN, C, R);
  for (uint64_t seed = 0; seed < 4; seed++) {
    struct operand row = operand_new(STOCHASTIC, VIEW_ROW, R, C), column = operand_new(NEAREST, VIEW_COLUMN, C, R);
    struct draw draw = {.seed = seed, .seq_len = R};
    cpu_quantise(&d.device, &(struct emission){.row = &row, .column = seed ? &column : &first, .draw = draw}, &source);
    if (seed) CHECK(operands_equal(&first, &column));
    operand_end(&row);
    operand_end(&column);
  }
  operand_end(&first);
  device_end(&d);
}

static double relative_l2(const struct operand *o, const uint16_t *z, int64_t cols, double *gain) {
  double error = 0, power = 0, cross = 0;
  for (int64_t r = 0; r < o->rows; r++)
    for (int64_t c = 0; c < o->cols; c++) {
      double x = (double)bf16_decode(z[r * cols + c]);
      double q = (double)mxfp4_decode(code_at(o, r, c), scale_at(o, r, c / 32)) / 6;
      error += (q - x) * (q - x);
      power += x * x;
      cross += q * x;
    }
  *gain = cross / power;
  return sqrt(error / power);
}

TEST(error_energies) {
  enum { R = 256, C = 512 };
  uint16_t *z = malloc(R * C * sizeof *z);
  struct matrix source = {.data = z, .dtype = DTYPE_BF16, .rows = R, .cols = C};
  struct cpu_device d = device_of(2);
  double gain, e;
  struct draw draw = {.seed = 5, .seq_len = R};
  for (int i = 0; i < R * C; i++) z[i] = bf16_encode((float)normal());
  struct operand row = operand_new(NEAREST, VIEW_ROW, R, C), sr = operand_new(STOCHASTIC, VIEW_ROW, R, C);
  cpu_quantise(&d.device, &(struct emission){.row = &row}, &source);
  cpu_quantise(&d.device, &(struct emission){.row = &sr, .draw = draw}, &source);
  e = relative_l2(&row, z, C, &gain);
  CHECK_CLOSE(e, .1177, .001);
  CHECK_CLOSE(gain, .990, .002);
  e = relative_l2(&sr, z, C, &gain);
  CHECK_CLOSE(e, .1679, .002);
  CHECK_CLOSE(gain, 1, .001); /* nothing clips, so stochastic rounding keeps the mean */
  operand_end(&row);
  operand_end(&sr);
  double sum = 0, sum_gain = 0;
  for (int k = 0; k < 4; k++) { /* averaged over the phase of the scale */
    struct operand tiles = operand_new(TILES, VIEW_ROW, R, C);
    for (int i = 0; i < R * C; i++) z[i] = bf16_encode((float)(normal() * pow(2, k / 4.)));
    cpu_quantise(&d.device, &(struct emission){.row = &tiles}, &source);
    sum += relative_l2(&tiles, z, C, &gain) / 4;
    sum_gain += gain / 4;
    operand_end(&tiles);
  }
  CHECK_CLOSE(sum, .1202, .0024);
  CHECK_CLOSE(sum_gain, .979, .003);
  free(z);
  device_end(&d);
}

/* The mean over many seeds is the value, to the last place of the fields. */
TEST(stochastic_rounding_is_unbiased) {
  enum { SEEDS = 4096 };
  static const float of[8] = {1, .3f, -.11f, .77f, .013f, -.9f, .499f, .25f};
  uint16_t z[32];
  double sum[32] = {0};
  for (int i = 0; i < 32; i++) z[i] = bf16_encode(of[i % 8]);
  struct matrix source = {.data = z, .dtype = DTYPE_BF16, .rows = 1, .cols = 32};
  struct cpu_device d = device_of(1);
  struct operand row = operand_new(STOCHASTIC, VIEW_ROW, 1, 32);
  for (uint64_t seed = 0; seed < SEEDS; seed++) {
    struct draw draw = {.seed = seed, .seq_len = 1};
    cpu_quantise(&d.device, &(struct emission){.row = &row, .draw = draw}, &source);
    for (int i = 0; i < 32; i++) sum[i] += (double)mxfp4_decode(code_at(&row, 0, i), scale_at(&row, 0, 0)) / 6 / SEEDS;
  }
  for (int i = 0; i < 32; i++) CHECK_CLOSE(sum[i], (double)bf16_decode(z[i]), 5 * .17 / sqrt(SEEDS));
  operand_end(&row);
  device_end(&d);
}

/* Strips of FP32 values, wider than a chunk, with every kind of output. */
TEST(emission) {
  enum { R = 72, C = 352 };
  static float values[R][C];
  static uint16_t bits[R][C], plain[R][C], copy[R][C];
  static float wide[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      bits[r][c] = bf16_encode((float)normal());
      values[r][c] = bf16_decode(bits[r][c]);
    }
  struct cpu_device d = device_of(2);
  struct draw draw = {.seed = 3, .seq_len = 24};
  struct matrix source = {.data = bits, .dtype = DTYPE_BF16, .rows = R, .cols = C};
  struct operand want = operand_new(STOCHASTIC, VIEW_ROW, R, C);
  struct quantise_counts want_counts[2] = {{0}};
  cpu_quantise(&d.device, &(struct emission){.row = &want, .draw = draw, .counts = want_counts}, &source);

  for (int with_plain = 0; with_plain < 2; with_plain++) {
    struct matrix m = {.data = plain, .dtype = DTYPE_BF16, .rows = R, .cols = C};
    struct matrix f = {.data = wide, .dtype = DTYPE_F32, .rows = R, .cols = C};
    struct operand column = operand_of_matrix(&f, VIEW_COLUMN), row = operand_new(STOCHASTIC, VIEW_ROW, R, C);
    struct emission out = {.plain = with_plain ? &m : NULL, .row = &row, .column = &column, .draw = draw};
    struct quantise_counts counts[2] = {{0}};
    for (int64_t first = 0; first < R; first += CPU_STRIP)
      cpu_emit_strip(&out, R, C, first, R - first < CPU_STRIP ? R - first : CPU_STRIP, values[first], counts, d.scratch);
    CHECK(operands_equal(&row, &want));
    check_counts(&counts[VIEW_ROW], &want_counts[VIEW_ROW]);
    CHECK_EQ_I64(counts[VIEW_COLUMN].elements, 0);
    if (with_plain) CHECK(memcmp(plain, bits, sizeof bits) == 0);
    CHECK(memcmp(wide, values, sizeof values) == 0);
    operand_end(&row);
  }

  /* an FP32 matrix is rounded to BF16 on the way; plain copies change nothing else */
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) wide[r][c] = values[r][c] * (1.0f + 0x1p-12f);
  struct matrix f = {.data = wide, .dtype = DTYPE_F32, .rows = R, .cols = C};
  struct matrix m = {.data = plain, .dtype = DTYPE_BF16, .rows = R, .cols = C};
  struct matrix n = {.data = copy, .dtype = DTYPE_BF16, .rows = R, .cols = C};
  struct operand row = operand_new(STOCHASTIC, VIEW_ROW, R, C), column = operand_of_matrix(&n, VIEW_COLUMN);
  cpu_quantise(&d.device, &(struct emission){.row = &row, .draw = draw}, &f);
  CHECK(operands_equal(&row, &want));
  cpu_quantise(&d.device, &(struct emission){.plain = &m, .row = &row, .column = &column, .draw = draw}, &f);
  CHECK(operands_equal(&row, &want));
  CHECK(memcmp(plain, bits, sizeof bits) == 0 && memcmp(copy, bits, sizeof bits) == 0);
  operand_end(&row);
  operand_end(&want);
  device_end(&d);
}

TEST(rows_in_fp32) {
  enum { N = 1031 };
  float values[N], back[N];
  uint16_t bits[N + 3];
  for (int i = 0; i < N; i++) values[i] = f32_from_bits(next());
  values[5] = NAN;
  struct matrix m = {.data = bits, .dtype = DTYPE_BF16, .rows = 1, .cols = N + 3};
  cpu_store(&m, 3, values, N);
  for (int i = 0; i < N; i++) CHECK_EQ_I64(bits[i + 3], bf16_encode(values[i]));
  cpu_load(back, &m, 3, N);
  cpu_round(values, DTYPE_F32, N);
  cpu_round(values, DTYPE_BF16, N);
  CHECK(memcmp(values, back, sizeof back) == 0);
  float wide[N + 1];
  struct matrix f = {.data = wide, .dtype = DTYPE_F32, .rows = 1, .cols = N + 1};
  cpu_store(&f, 1, values, N);
  memset(back, 0, sizeof back);
  cpu_load(back, &f, 1, N);
  CHECK(memcmp(values, back, sizeof back) == 0);
}

TEST(encodings_refused) {
  for (int v = 0; v < 2; v++) {
    enum view view = v ? VIEW_COLUMN : VIEW_ROW;
    CHECK(!cpu_refuse_encoding(NULL, &NEAREST, view) && !cpu_refuse_encoding(NULL, &TILES, view));
    CHECK(!cpu_refuse_encoding(NULL, &(struct encoding){.format = FORMAT_BF16}, view));
    CHECK(!cpu_refuse_encoding(NULL, &(struct encoding){.format = FORMAT_F32}, view));
  }
  CHECK(!cpu_refuse_encoding(NULL, &STOCHASTIC, VIEW_ROW));
  CHECK(cpu_refuse_encoding(NULL, &STOCHASTIC, VIEW_COLUMN) != NULL);
  struct encoding no[] = {
      {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ADAPTIVE, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_MXFP4, BLOCK_1X16, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_MXFP4, BLOCK_NONE, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_MXFP4, BLOCK_2D32, SCALE_MX_ADAPTIVE, ROUND_NEAREST, HADAMARD_SIGNED_32, 0},
      {FORMAT_MXFP4, BLOCK_2D32, SCALE_MX_ADAPTIVE, ROUND_STOCHASTIC, HADAMARD_NONE, 0},
      {FORMAT_MXFP4, BLOCK_2D32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_NVFP4, BLOCK_1X32, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_NVFP4_LOCAL, BLOCK_1X16, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_NVFP4_LOCAL, BLOCK_1X32, SCALE_LOCAL_POW2, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_NVFP4_LOCAL, BLOCK_2D16, SCALE_LOCAL_POW2, ROUND_STOCHASTIC, HADAMARD_NONE, 0},
      {FORMAT_NVFP4_LOCAL, BLOCK_2D16, SCALE_LOCAL_POW2, ROUND_NEAREST, HADAMARD_SIGNED_16, 0},
      {FORMAT_NVFP4_LOCAL, BLOCK_1X16, SCALE_LOCAL_POW2, ROUND_NEAREST, HADAMARD_NONE, 64},
      {FORMAT_E4M3, BLOCK_NONE, SCALE_NONE, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_E4M3, BLOCK_1X32, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_E5M2, BLOCK_NONE, SCALE_ROW, ROUND_STOCHASTIC, HADAMARD_NONE, 0},
      {FORMAT_BF16, BLOCK_1X32, SCALE_NONE, ROUND_NEAREST, HADAMARD_NONE, 0},
      {FORMAT_BF16, BLOCK_NONE, SCALE_NONE, ROUND_STOCHASTIC, HADAMARD_NONE, 0},
      {FORMAT_BF16, BLOCK_NONE, SCALE_NONE, ROUND_NEAREST, HADAMARD_PLAIN_16, 0},
  };
  for (size_t i = 0; i < sizeof no / sizeof no[0]; i++) {
    const char *why = cpu_refuse_encoding(NULL, &no[i], VIEW_ROW);
    CHECK(why && *why);
  }
}

/* Bits on every machine: a fixed input, hashed. */
TEST(bits_of_every_machine) {
  enum { R = 160, C = 416 };
  static uint16_t z[R][C];
  uint32_t x = 12345;
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      x = x * 1664525u + 1013904223u;
      z[r][c] = (uint16_t)((x >> 16 & 0x807F) | (0x3800 + (x >> 8 & 0x7) * 0x80 * (uint32_t)(1 + r % 16)));
    }
  z[3][5] = 0x7FC0;
  z[77][300] = 0xFF80;
  struct cpu_device d = device_of(2);
  struct matrix source = {.data = z, .dtype = DTYPE_BF16, .rows = R, .cols = C};
  struct draw draw = {.seed = 42, .update = 7, .first_sample = 11, .seq_len = 50, .layer = 2, .operand = 3};
  struct operand operands[4] = {operand_new(STOCHASTIC, VIEW_ROW, R, C), operand_new(NEAREST, VIEW_COLUMN, C, R),
                                operand_new(TILES, VIEW_ROW, R, C), operand_new(TILES, VIEW_COLUMN, C, R)};
  cpu_quantise(&d.device, &(struct emission){.row = &operands[0], .column = &operands[1], .draw = draw}, &source);
  cpu_quantise(&d.device, &(struct emission){.row = &operands[2], .column = &operands[3]}, &source);
  static const char *const want[4] = {"6de672eac0311d9fb74b71f4640de903", "add505fab4178c7930234bf294c7095e",
                                     "51847bcdfedd5d97a842d39e3e1a6de4", "14ba5dffbacb3e3e03d5f456d731ba42"};
  for (int i = 0; i < 4; i++) {
    char text[HASH_TEXT];
    struct hash_state *s = hash_open();
    CHECK(s != NULL);
    struct operand *o = &operands[i];
    hash_feed(s, o->codes, (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols));
    hash_feed(s, o->scales, (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols));
    hash_text(hash_close(s), text);
    CHECK_STR(text, want[i]);
    operand_end(o);
  }
  device_end(&d);
}

int main(void) {
  RUN(golden_group);
  RUN(against_the_model);
  RUN(every_pattern);
  RUN(tiles_decode_alike);
  RUN(rule_of_87_hundredths);
  RUN(draws_do_not_depend_on_layout);
  RUN(columns_draw_nothing);
  RUN(error_energies);
  RUN(stochastic_rounding_is_unbiased);
  RUN(emission);
  RUN(rows_in_fp32);
  RUN(encodings_refused);
  RUN(bits_of_every_machine);
  RUN(large_shapes);
  return test_report();
}
