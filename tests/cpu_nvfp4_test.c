/* NVFP4 with one factor a view: codes, scales and factors against Transformer
 * Engine's steps written out one element at a time. */
#include <float.h>

#include "kernels/cpu/codes.h"
#include "kernels/cpu/nvfp4.h"
#include "tests/cpu_quantise.h"

static const struct encoding ROWS = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding TILES = {FORMAT_NVFP4, BLOCK_2D16, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding SR = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_STOCHASTIC, HADAMARD_NONE, 0};
static const struct encoding SIGNED = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_SIGNED_16, 0};
static const struct encoding SIGNED_SR = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_STOCHASTIC, HADAMARD_SIGNED_16, 0};
static const struct encoding PLAIN_32 = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_SIGNED_32, 0};
static const struct encoding BEST = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR_4OVER6, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding BEST_TILES = {FORMAT_NVFP4, BLOCK_2D16, SCALE_TENSOR_4OVER6, ROUND_NEAREST, HADAMARD_NONE, 0};

static struct device *dev[3]; /* 1, 2 and 3 threads */

/* ---- the model ------------------------------------------------------------------------- */

struct block {
  uint32_t scale;
  float encode; /* as TE has it: FLT_MAX where the scale is 0 */
};

struct factor {
  float s, d, outer;
};

static float least(float a, float b) { return isnan(a) ? b : isnan(b) ? a : a < b ? a : b; } /* fminf */

static struct factor factor_of(uint32_t amax, float reach) {
  const float a = bf16_decode((uint16_t)amax);
  struct factor f = {.outer = a};
  f.s = least(reach / a, FLT_MAX);
  if (a == 0 || f.s == 0 || isnan(a)) f.s = 1;
  f.d = 1.0f / f.s;
  return f;
}

static struct block block_of(float t, const struct factor *f) {
  struct block b = {.scale = e4m3_encode(least(t, FLT_MAX))};
  b.encode = least(1.0f / (e4m3_decode(b.scale) * f->d), FLT_MAX);
  return b;
}

static float error_of_row(const uint16_t *x, const struct block *b, const struct factor *f) {
  float error = 0;
  for (int i = 0; i < 16; i++) {
    const float v = bf16_decode(x[i]);
    const float value = e2m1_decode(e2m1_encode(v * b->encode)) * e4m3_decode(b->scale) * f->outer / 1536.0f;
    error = error + fabsf(value - v);
  }
  return error;
}

static float tree(const float *v, int first, int step, int n) { /* of rows first, first + step, ... */
  return n == 1 ? v[first] : tree(v, first, step * 2, n / 2) + tree(v, first + step, step * 2, n / 2);
}

/* x[0] is row 0 of the block or tile, rows `stride` apart. */
static struct block choose(const uint16_t *x, int64_t stride, int rows, uint32_t amax, const struct factor *f) {
  const float b = bf16_decode((uint16_t)amax) / 6.0f * f->s;
  const struct block six = block_of(least(b, 448.0f), f), four = block_of(least(b * 1.5f, 448.0f), f);
  float error6[16], error4[16];
  for (int r = 0; r < rows; r++) {
    error6[r] = error_of_row(x + r * stride, &six, f);
    error4[r] = error_of_row(x + r * stride, &four, f);
  }
  /* pairs 8 apart first: bits of the row number from the top down */
  return tree(error4, 0, 1, rows) < tree(error6, 0, 1, rows) ? four : six;
}

static int64_t literal_differs; /* blocks in which TE's own codes are not ours */

static struct quantise_counts check_operand(const struct operand *o, const struct matrix *source,
                                            const struct draw *draw) {
  const struct encoding *e = &o->encoding;
  const bool tiled = e->block == BLOCK_2D16, best = e->scale == SCALE_TENSOR_4OVER6;
  uint16_t *view = quantise_view(o, source);
  const int64_t n = o->rows * o->cols;
  const struct factor f = factor_of(quantise_amax(view, n), best ? 1536 : 2688);
  struct quantise_counts want = {.elements = n, .blocks = n / 16, .amax = quantise_finite_amax(view, n)};
  double *decoded = test_memory((size_t)o->cols * sizeof *decoded);
  int64_t wrong = quantise_padding(o, 16);
  if (isnan(f.outer)) CHECK(f32_bits(o->outer[0]) == 0x7FC00000);
  else CHECK(f32_bits(o->outer[0]) == f32_bits(f.outer));
  for (int64_t r = 0; r < o->rows; r++) {
    operand_decode(o, r, decoded);
    for (int64_t g = 0; g < o->cols / 16; g++) {
      const uint16_t *x = view + r * o->cols + g * 16, *tile = view + r / 16 * 16 * o->cols + g * 16;
      uint32_t amax = 0;
      for (int i = 0; i < (tiled ? 16 : 1); i++) {
        const uint32_t a = quantise_amax(tiled ? tile + i * o->cols : x, 16);
        amax = a > amax ? a : amax;
      }
      struct block b = block_of(bf16_decode((uint16_t)amax) * (f.s * (1.0f / 6.0f)), &f);
      uint16_t source_rows[16][16];
      for (int i = 0; tiled && i < 256; i++) /* whichever the view, errors are summed along these */
        source_rows[i / 16][i % 16] = o->view == VIEW_ROW ? tile[i / 16 * o->cols + i % 16] : tile[i % 16 * o->cols + i / 16];
      if (best) b = choose(tiled ? source_rows[0] : x, 16, tiled ? 16 : 1, amax, &f);
      wrong += quantise_scale(o, r, g, 16) != b.scale;
      want.zero_blocks += b.scale == 0;
      for (int64_t i = 0; i < 16; i++) {
        const float t = bf16_decode(x[i]) * b.encode;
        uint32_t code = e->rounding == ROUND_STOCHASTIC
                            ? e2m1_encode_stochastic(t, quantise_field(o, r, g * 16 + i, draw))
                            : e2m1_encode(t);
        /* as TE has it, it decodes to the same */
        const double literal = (double)e2m1_decode(code) * (double)e4m3_decode(b.scale) * (double)f.outer / (best ? 1536 : 2688);
        const double ours = decoded[g * 16 + i];
        wrong += !(literal == ours || (isnan(literal) && isnan(ours)));
        literal_differs += b.scale == 0 && code != 0;
        if (b.scale == 0) code = 0;
        wrong += quantise_code(o, r, g * 16 + i) != code;
        want.saturated += b.scale != 0 && !(fabsf(t) <= 6);
        want.underflowed += (x[i] & 0x7FFF) != 0 && (code & 7) == 0;
      }
    }
  }
  CHECK_EQ_I64(wrong, 0);
  free(decoded);
  free(view);
  return want;
}

static void check(struct device *d, const struct matrix *source, const struct encoding *row_as,
                  const struct encoding *column_as, const struct draw *draw) {
  struct quantise_counts counts[2] = {{0}}, want;
  struct operand row = {0}, column = {0};
  struct emission out = {.draw = *draw, .counts = counts};
  if (row_as) row = quantise_operand(*row_as, VIEW_ROW, source->rows, source->cols), out.row = &row;
  if (column_as) column = quantise_operand(*column_as, VIEW_COLUMN, source->rows, source->cols), out.column = &column;
  cpu_quantise(d, &out, source);
  if (row_as) {
    want = check_operand(&row, source, draw);
    quantise_check_counts(&counts[VIEW_ROW], &want);
    quantise_drop(&row);
  }
  if (column_as) {
    want = check_operand(&column, source, draw);
    quantise_check_counts(&counts[VIEW_COLUMN], &want);
    quantise_drop(&column);
  }
}

/* ---- tests --------------------------------------------------------------------------------- */

TEST(golden_block) {
  static const uint16_t x16[16] = {0xc032, 0xc01a, 0xc002, 0x3eac, 0xbfa6, 0xbf6d, 0xbf0e, 0xbe3d,
                                   0x3e3d, 0x3f0e, 0x3f6d, 0x3fa6, 0x3fd5, 0x4002, 0x401a, 0x4032};
  const char *codes = "ffe1dca912455677";
  struct matrix z = test_matrix(DTYPE_BF16, 32, 32);
  memcpy(z.data, x16, sizeof x16);
  uint16_t *bits = z.data;
  for (int i = 0; i < 16; i++) bits[i * 32 + 20] = x16[i]; /* a column too */
  bits[31 * 32 + 31] = 0x4100;                             /* amax 8 */
  struct operand row = quantise_operand(ROWS, VIEW_ROW, 32, 32), column = quantise_operand(ROWS, VIEW_COLUMN, 32, 32);
  cpu_quantise(dev[0], &(struct emission){.row = &row, .column = &column}, &z);
  CHECK_EQ_I64(quantise_scale(&row, 0, 0, 16), 0x72);
  CHECK_EQ_I64(quantise_scale(&column, 20, 0, 16), 0x72);
  for (int i = 0; i < 16; i++) {
    CHECK_EQ_I64("0123456789abcdef"[quantise_code(&row, 0, i)], codes[i]);
    CHECK_EQ_I64("0123456789abcdef"[quantise_code(&column, 20, i)], codes[i]);
  }
  CHECK(row.outer[0] == 8 && column.outer[0] == 8);
  quantise_drop(&row);
  quantise_drop(&column);
  free(z.data);
}

/* Every pair of encodings that the shape allows. */
static void check_shape(int64_t rows, int64_t cols, int kind) {
  static const struct encoding *pairs[][2] = {{&ROWS, &ROWS},  {&ROWS, &SIGNED},       {&SR, &SIGNED_SR}, {&SIGNED, &SR},
                                              {&TILES, &TILES}, {&BEST, &BEST}, {&BEST_TILES, &BEST_TILES},
                                              {&TILES, &BEST}, {&PLAIN_32, &PLAIN_32}};
  struct matrix z = quantise_source(rows, cols, kind);
  struct draw draw = {.seed = ((uint64_t)next() << 32) | next(), .update = next() % 1000};
  draw.first_sample = ((uint64_t)next() << 8) & 0xFFFFFFFFFF;
  draw.layer = 3, draw.operand = 2, draw.seq_len = 16 * (1 + next() % 9);
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    const struct encoding *r = pairs[i][0], *c = pairs[i][1];
    const int64_t unit = r->hadamard == HADAMARD_SIGNED_32 ? 32 : 16;
    const bool square = r->block == BLOCK_2D16;
    if (cols % unit || (square && rows % 16)) r = NULL;
    if (rows % unit || (square && cols % 16)) c = NULL;
    if (r || c) check(dev[i % 3], &z, r, c, &draw);
  }
  free(z.data);
}

TEST(against_the_model) {
  static const int64_t shapes[][2] = {{1, 16}, {17, 32}, {16, 16}, {32, 48}, {48, 144}, {144, 80}, {96, 272}, {64, 33},
                                      {160, 7}, {13, 304}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int kind = 0; kind < QUANTISE_KINDS; kind++) check_shape(shapes[s][0], shapes[s][1], kind);
  CHECK(literal_differs > 100); /* blocks whose scale is 0 were there */
}

/* Of many panels, scale tiles and pieces of the amax; either axis whole, at times both. */
TEST(large_shapes) {
  for (int i = 0; i < 9; i++) {
    int64_t rows = test_size(33, i, 5000);
    if (i % 3) rows = round_up(rows, 32);
    const int64_t cols = test_size(34, i, 40000 / rows);
    check_shape(rows, i % 3 == 1 ? cols : round_up(cols, 32), (int)(next() % QUANTISE_KINDS));
  }
}

/* Every BF16 pattern as an element, and as the amax of the view. */
TEST(every_pattern) {
  struct matrix z = test_matrix(DTYPE_BF16, 4096, 16);
  uint16_t *bits = z.data;
  for (int i = 0; i < 65536; i++) bits[i] = (uint16_t)((uint32_t)i * 40503u);
  const struct draw draw = {.seed = 9, .seq_len = 4096};
  check(dev[1], &z, &ROWS, &ROWS, &draw);
  for (int i = 0; i < 65536; i++)
    if ((bits[i] & 0x7FFF) > 0x4300) bits[i] = (uint16_t)(bits[i] & 0x8FFF);
  check(dev[1], &z, &ROWS, &SR, &draw);
  check(dev[1], &z, &SR, NULL, &draw);
  for (uint32_t a = 0; a < 0x7F80; a += 37) {
    struct matrix one = test_matrix(DTYPE_BF16, 1, 32);
    ((uint16_t *)one.data)[3] = (uint16_t)a;
    ((uint16_t *)one.data)[20] = (uint16_t)(a / 2);
    check(dev[0], &one, &ROWS, NULL, &draw);
    free(one.data);
  }
  free(z.data);
}

TEST(tiles_decode_alike) {
  for (int best = 0; best < 2; best++) {
    const struct encoding as = best ? BEST_TILES : TILES;
    struct matrix z = quantise_source(112, 176, 5);
    struct operand row = quantise_operand(as, VIEW_ROW, 112, 176), column = quantise_operand(as, VIEW_COLUMN, 112, 176);
    cpu_quantise(dev[1], &(struct emission){.row = &row, .column = &column}, &z);
    double *by_row = test_memory(112 * 176 * sizeof *by_row), by_column[112];
    for (int r = 0; r < 112; r++) operand_decode(&row, r, by_row + r * 176);
    int wrong = row.outer[0] != column.outer[0];
    for (int c = 0; c < 176; c++) {
      operand_decode(&column, c, by_column);
      for (int r = 0; r < 112; r++) wrong += by_row[r * 176 + c] != by_column[r];
    }
    CHECK_EQ_I64(wrong, 0);
    free(by_row);
    quantise_drop(&row);
    quantise_drop(&column);
    free(z.data);
  }
}

/* Vector encoders against the scalar definitions; stochastic ones over all fields. */
TEST(encoders) {
  int64_t wrong = 0;
  for (uint64_t u = 0; u < 0x80000000u; u += 2311) {
    const float t = f32_from_bits((uint32_t)u);
    const uint16_t field = (uint16_t)((uint32_t)(u * 2654435761u) >> 16);
    wrong += (codes_nearest(t) & 0xFFFF) != (e2m1_encode(t) & 7);
    wrong += (codes_steps(t) + field) >> 16 != (e2m1_encode_stochastic(t, field) & 7);
    wrong += codes_nearest_value(t) != e2m1_decode(e2m1_encode(t) & 7);
    const struct nvfp4_scale scale = nvfp4_scale_of(t);
    if (u <= 0x7F800000) wrong += scale.code != e4m3_encode(t) || scale.value != e4m3_decode(scale.code);
  }
  static const float edges[] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5, 6, 0};
  for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++)
    for (int step = -1; step <= 1; step++) {
      const float t = f32_from_bits(f32_bits(edges[i]) + (uint32_t)step);
      if (edges[i] > 0) wrong += (codes_nearest(t) & 0xFFFF) != e2m1_encode(t);
    }
  CHECK_EQ_I64(wrong, 0);
  static const struct {
    float t;
    double mean;
  } of[] = {{1.1f, 1.099998}, {5.9f, 5.899994}, {.01f, .009995}, {.75f, .75}, {3, 3}, {4.5f, 4.5}, {0x1p-20f, 0}};
  for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
    double sum = 0;
    for (uint32_t r = 0; r < 65536; r++) {
      const uint32_t code = (codes_steps(of[i].t) + r) >> 16;
      wrong += code != e2m1_encode_stochastic(of[i].t, r);
      sum += (double)e2m1_decode(code);
    }
    CHECK_CLOSE(sum / 65536, of[i].mean, 1e-6);
  }
  CHECK_EQ_I64(wrong, 0);
}

TEST(draws) {
  enum { SEQ = 48, COLS = 80, BATCH = 3 };
  struct matrix z = quantise_source(BATCH * SEQ, COLS, 0);
  struct draw draw = {.seed = 1234, .update = 9, .first_sample = 0xFFFFFFFF, .seq_len = SEQ, .layer = 4, .operand = 1};
  struct operand row = quantise_operand(SR, VIEW_ROW, BATCH * SEQ, COLS), again = quantise_operand(SR, VIEW_ROW, BATCH * SEQ, COLS);
  struct operand column = quantise_operand(SIGNED_SR, VIEW_COLUMN, BATCH * SEQ, COLS);
  struct operand other = quantise_operand(SIGNED_SR, VIEW_COLUMN, BATCH * SEQ, COLS);
  struct operand nearest = quantise_operand(SIGNED, VIEW_COLUMN, BATCH * SEQ, COLS);
  struct operand still = quantise_operand(SIGNED, VIEW_COLUMN, BATCH * SEQ, COLS);
  cpu_quantise(dev[0], &(struct emission){.row = &row, .column = &column, .draw = draw}, &z);
  cpu_quantise(dev[2], &(struct emission){.row = &again, .column = &other, .draw = draw}, &z);
  CHECK(quantise_same(&row, &again) && quantise_same(&column, &other)); /* any number of threads */
  cpu_quantise(dev[1], &(struct emission){.row = &again, .column = &nearest, .draw = draw}, &z);
  CHECK(!quantise_same(&column, &nearest));
  for (int k = 0; k < 5; k++) {
    struct draw at = draw;
    if (k == 0) at.seed ^= (uint64_t)1 << 40;
    if (k == 1) at.update++;
    if (k == 2) at.layer++;
    if (k == 3) at.operand++;
    if (k == 4) at.first_sample++;
    cpu_quantise(dev[1], &(struct emission){.row = &again, .column = &other, .draw = at}, &z);
    CHECK(!quantise_same(&row, &again) && !quantise_same(&column, &other));
    cpu_quantise(dev[1], &(struct emission){.row = &again, .column = &still, .draw = at}, &z);
    CHECK(quantise_same(&nearest, &still)); /* what is rounded to nearest knows no seed */
  }
  struct operand *all[] = {&row, &again, &column, &other, &nearest, &still};
  for (int i = 0; i < 6; i++) quantise_drop(all[i]);
  free(z.data);
}

TEST(error_energies) {
  enum { R = 512, C = 1024 };
  struct matrix z = quantise_source(R, C, 0);
  struct operand row = quantise_operand(ROWS, VIEW_ROW, R, C), sr = quantise_operand(SR, VIEW_ROW, R, C);
  struct operand best = quantise_operand(BEST, VIEW_ROW, R, C);
  struct quantise_counts counts[2] = {{0}};
  cpu_quantise(dev[1], &(struct emission){.row = &row, .counts = counts}, &z);
  cpu_quantise(dev[1], &(struct emission){.row = &sr, .draw = {.seed = 5, .seq_len = R}}, &z);
  cpu_quantise(dev[1], &(struct emission){.row = &best}, &z);
  const struct quantise_error nearest = quantise_error_of(&row, &z), stochastic = quantise_error_of(&sr, &z);
  CHECK_CLOSE(nearest.relative, .0951, .0004);
  CHECK_CLOSE(nearest.gain, .996, .001);
  CHECK_CLOSE(stochastic.relative, .1372, .0006);
  CHECK_CLOSE((double)counts[0].underflowed / (R * C), .068, .002);
  CHECK(quantise_error_of(&best, &z).relative < .93 * nearest.relative);
  quantise_drop(&row);
  quantise_drop(&sr);
  quantise_drop(&best);
  free(z.data);
}

/* Codes of all fields together: the mean over seeds is the value. */
TEST(stochastic_rounding_is_unbiased) {
  enum { SEEDS = 2048 };
  struct matrix z = test_matrix(DTYPE_BF16, 16, 16);
  for (int i = 0; i < 256; i++) ((uint16_t *)z.data)[i] = bf16_encode((float)((i * 37 % 256) / 256. - .4));
  struct operand row = quantise_operand(SR, VIEW_ROW, 16, 16), column = quantise_operand(SR, VIEW_COLUMN, 16, 16);
  static double of_row[256], of_column[256], values[16];
  for (uint64_t seed = 0; seed < SEEDS; seed++) {
    cpu_quantise(dev[0], &(struct emission){.row = &row, .column = &column, .draw = {.seed = seed, .seq_len = 16}}, &z);
    for (int r = 0; r < 16; r++) {
      operand_decode(&row, r, values);
      for (int c = 0; c < 16; c++) of_row[r * 16 + c] += values[c] / SEEDS;
      operand_decode(&column, r, values);
      for (int c = 0; c < 16; c++) of_column[c * 16 + r] += values[c] / SEEDS;
    }
  }
  for (int i = 0; i < 256; i++) {
    const double x = (double)bf16_decode(((uint16_t *)z.data)[i]);
    if (fabs(x) > .5) continue; /* the largest of a block may clip */
    CHECK_CLOSE(of_row[i], x, 5.5 * .11 / sqrt(SEEDS));
    CHECK_CLOSE(of_column[i], x, 5.5 * .11 / sqrt(SEEDS));
  }
  quantise_drop(&row);
  quantise_drop(&column);
  free(z.data);
}

TEST(bits_of_every_machine) {
  struct matrix z = quantise_fixed_source(160, 208);
  ((uint16_t *)z.data)[5000] = 0; /* a zero among them */
  const struct draw draw = {.seed = 42, .update = 7, .first_sample = 11, .seq_len = 80, .layer = 2, .operand = 3};
  static const struct {
    const struct encoding *as;
    enum view view;
    uint64_t hash;
  } of[] = {{&ROWS, VIEW_ROW, 0x6b3813721ca7a0dbu},
            {&SIGNED_SR, VIEW_COLUMN, 0xefc7fed66cbc5682u},
            {&SR, VIEW_ROW, 0xc03e6bef775dd17eu},
            {&TILES, VIEW_COLUMN, 0x103e120ad04e47efu},
            {&BEST, VIEW_COLUMN, 0x50e53230ba70ce20u},
            {&BEST_TILES, VIEW_ROW, 0x1ae4a16b6b6a0bfbu}};
  for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
    struct operand o = quantise_operand(*of[i].as, of[i].view, 160, 208);
    struct emission out = {.draw = draw};
    *(of[i].view == VIEW_ROW ? &out.row : &out.column) = &o;
    cpu_quantise(dev[1], &out, &z);
    CHECK_HASH(quantise_hash(&o), of[i].hash);
    quantise_drop(&o);
  }
  free(z.data);
}

TEST(encodings_refused) {
  static const struct encoding *yes[] = {&ROWS, &TILES, &SR, &SIGNED, &SIGNED_SR, &PLAIN_32, &BEST, &BEST_TILES};
  for (size_t i = 0; i < sizeof yes / sizeof yes[0]; i++)
    CHECK(!cpu_refuse_encoding(NULL, yes[i], VIEW_ROW) && !cpu_refuse_encoding(NULL, yes[i], VIEW_COLUMN));
  struct encoding no[] = {ROWS, TILES, TILES, BEST, BEST, ROWS, ROWS};
  no[0].block = BLOCK_1X32;
  no[1].rounding = ROUND_STOCHASTIC;
  no[2].hadamard = HADAMARD_PLAIN_16;
  no[3].hadamard = HADAMARD_SIGNED_16;
  no[4].rounding = ROUND_STOCHASTIC;
  no[5].scale = SCALE_MX_ENCODE;
  no[6].strip = 128;
  for (size_t i = 0; i < sizeof no / sizeof no[0]; i++) CHECK(cpu_refuse_encoding(NULL, &no[i], VIEW_ROW) != NULL);
}

int main(void) {
  const struct extent x = {.tokens = 256, .head_chunk = 16, .attention = {1, 256, 2, 2, 32}, .hidden_size = 512,
                           .ffn_size = 512, .vocab_size = 64};
  for (int i = 0; i < 3; i++) dev[i] = test_device(i + 1, &x);
  RUN(golden_block);
  RUN(against_the_model);
  RUN(every_pattern);
  RUN(tiles_decode_alike);
  RUN(encoders);
  RUN(draws);
  RUN(error_energies);
  RUN(stochastic_rounding_is_unbiased);
  RUN(bits_of_every_machine);
  RUN(encodings_refused);
  RUN(large_shapes);
  for (int i = 0; i < 3; i++) test_device_close(dev[i]);
  return test_report();
}
