/* E4M3 and E5M2 with a factor a view or a row: against the definition, one
 * element at a time. */
#include <float.h>

#include "tests/cpu_quantise.h"

static const struct encoding E4M3 = {FORMAT_E4M3, BLOCK_NONE, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding E5M2 = {FORMAT_E5M2, BLOCK_NONE, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding E4M3_ROW = {FORMAT_E4M3, BLOCK_NONE, SCALE_ROW, ROUND_NEAREST, HADAMARD_NONE, 0};
static const struct encoding E5M2_ROW = {FORMAT_E5M2, BLOCK_NONE, SCALE_ROW, ROUND_NEAREST, HADAMARD_SIGNED_16, 0};
static const struct encoding E4M3_SIGNED = {FORMAT_E4M3, BLOCK_NONE, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_SIGNED_16, 0};

static struct device *dev[3];

/* The nearest value of the format to v among all codes, ties to the even code. */
static uint32_t nearest(double v, bool e4m3) {
  if (isnan(v)) return 0x7F;
  const uint32_t most = e4m3 ? 0x7E : 0x7B, sign = signbit(v) ? 0x80 : 0;
  const double a = fabs(v);
  uint32_t low = 0, high = most;
  if (a >= (double)(e4m3 ? e4m3_decode(most) : e5m2_decode(most))) return most | sign;
  while (high - low > 1) { /* decode grows with the code */
    const uint32_t middle = (low + high) / 2;
    if ((double)(e4m3 ? e4m3_decode(middle) : e5m2_decode(middle)) <= a) low = middle;
    else high = middle;
  }
  const double below = a - (double)(e4m3 ? e4m3_decode(low) : e5m2_decode(low));
  const double above = (double)(e4m3 ? e4m3_decode(high) : e5m2_decode(high)) - a;
  return (below < above || (below == above && low % 2 == 0) ? low : high) | sign;
}

static struct quantise_counts check_operand(const struct operand *o, const struct matrix *source) {
  const bool e4m3 = o->encoding.format == FORMAT_E4M3, by_row = o->encoding.scale == SCALE_ROW;
  const float most = e4m3 ? 448 : 57344;
  uint16_t *view = quantise_view(o, source);
  const int64_t n = o->rows * o->cols;
  struct quantise_counts want = {.elements = n, .blocks = by_row ? o->rows : 1, .amax = quantise_finite_amax(view, n)};
  int64_t wrong = 0;
  for (int64_t r = 0; r < o->rows; r++) {
    const uint16_t *row = view + r * o->cols;
    const uint32_t amax = by_row ? quantise_amax(row, o->cols) : quantise_amax(view, n);
    const float a = bf16_decode((uint16_t)amax), outer = o->outer[by_row ? r : 0];
    float s = 1, inverse = 1;
    if (amax != 0 && amax < 0x7F80) {
      s = most / a;
      if (s > FLT_MAX) s = FLT_MAX;
      inverse = 1 / s;
    } else if (amax >= 0x7F80) {
      inverse = amax > 0x7F80 ? NAN : a;
    }
    wrong += !(outer == inverse || (isnan(outer) && isnan(inverse)));
    if (by_row || r == 0) want.zero_blocks += amax == 0;
    for (int64_t c = 0; c < o->cols; c++) {
      const float t = bf16_decode(row[c]) * s;
      const uint32_t code = nearest((double)t, e4m3);
      wrong += o->codes[r * o->cols + c] != code;
      want.saturated += !(fabsf(t) <= most);
      want.underflowed += (row[c] & 0x7FFF) != 0 && (code & 0x7F) == 0;
    }
  }
  CHECK_EQ_I64(wrong, 0);
  free(view);
  return want;
}

static void check(struct device *d, const struct matrix *source, const struct encoding *row_as,
                  const struct encoding *column_as) {
  struct quantise_counts counts[2] = {{0}}, want;
  struct operand row = {0}, column = {0};
  struct emission out = {.counts = counts};
  if (row_as) row = quantise_operand(*row_as, VIEW_ROW, source->rows, source->cols), out.row = &row;
  if (column_as) column = quantise_operand(*column_as, VIEW_COLUMN, source->rows, source->cols), out.column = &column;
  cpu_quantise(d, &out, source);
  if (row_as) {
    want = check_operand(&row, source);
    quantise_check_counts(&counts[VIEW_ROW], &want);
    quantise_drop(&row);
  }
  if (column_as) {
    want = check_operand(&column, source);
    quantise_check_counts(&counts[VIEW_COLUMN], &want);
    quantise_drop(&column);
  }
}

static void check_shape(int64_t rows, int64_t cols, int kind) {
  static const struct encoding *pairs[][2] = {
      {&E4M3, &E4M3}, {&E5M2, &E5M2}, {&E4M3_ROW, &E4M3_ROW}, {&E5M2_ROW, &E5M2_ROW}, {&E4M3_SIGNED, &E4M3_SIGNED}};
  struct matrix z = quantise_source(rows, cols, kind);
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
    check(dev[i % 3], &z, z.cols % 16 ? NULL : pairs[i][0], z.rows % 16 ? NULL : pairs[i][1]);
  free(z.data);
}

TEST(against_the_model) {
  static const int64_t shapes[][2] = {{1, 16}, {17, 32}, {16, 16}, {48, 144}, {144, 80}, {96, 272}, {64, 33}, {160, 7}, {13, 304}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int kind = 0; kind < QUANTISE_KINDS; kind++) check_shape(shapes[s][0], shapes[s][1], kind);
}

/* Of many panels and pieces of the amax; either axis whole, at times both. */
TEST(large_shapes) {
  for (int i = 0; i < 12; i++) {
    int64_t rows = test_size(35, i, 5000);
    if (i % 3) rows = round_up(rows, 16);
    const int64_t cols = test_size(36, i, 60000 / rows);
    check_shape(rows, i % 3 == 1 ? cols : round_up(cols, 16), (int)(next() % QUANTISE_KINDS));
  }
}

/* Every BF16 pattern against amaxes that make S odd, 1, FLT_MAX. */
TEST(every_pattern) {
  static const uint16_t amax[] = {0x43E0, 0x3F80, 0x4049, 0x0001, 0x0101, 0x7F7F};
  struct matrix z = test_matrix(DTYPE_BF16, 1024, 64);
  uint16_t *bits = z.data;
  for (size_t k = 0; k < sizeof amax / sizeof amax[0]; k++) {
    for (int i = 0; i < 65536; i++) {
      bits[i] = (uint16_t)i;
      if ((i & 0x7FFF) > amax[k]) bits[i] = (uint16_t)(amax[k] - (uint32_t)i % amax[k]);
    }
    check(dev[1], &z, k % 2 ? &E4M3 : &E5M2, k % 2 ? NULL : &E4M3);
  }
  free(z.data);
}

TEST(errors) {
  enum { R = 256, C = 512 };
  struct matrix z = quantise_source(R, C, 0);
  static const struct {
    const struct encoding *as;
    double low, high;
  } of[] = {{&E4M3, .0255, .0275}, {&E5M2, .051, .055}, {&E4M3_ROW, .0255, .0275}};
  for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
    struct operand o = quantise_operand(*of[i].as, VIEW_ROW, R, C);
    cpu_quantise(dev[1], &(struct emission){.row = &o}, &z);
    const struct quantise_error e = quantise_error_of(&o, &z);
    CHECK(e.relative > of[i].low && e.relative < of[i].high);
    CHECK_CLOSE(e.gain, 1, .004);
    quantise_drop(&o);
  }
  /* rows of very different magnitudes: a factor a row keeps them all */
  for (int i = 0; i < R * C; i++)
    ((uint16_t *)z.data)[i] = bf16_encode((float)(normal() * ldexp(1, -(i / C % 30))));
  struct operand whole = quantise_operand(E4M3, VIEW_ROW, R, C), rows = quantise_operand(E4M3_ROW, VIEW_ROW, R, C);
  struct quantise_counts of_whole[2] = {{0}}, of_rows[2] = {{0}};
  cpu_quantise(dev[1], &(struct emission){.row = &whole, .counts = of_whole}, &z);
  cpu_quantise(dev[1], &(struct emission){.row = &rows, .counts = of_rows}, &z);
  CHECK(of_whole[0].underflowed > 20 * of_rows[0].underflowed);
  quantise_drop(&whole);
  quantise_drop(&rows);
  free(z.data);
}

TEST(bits_of_every_machine) {
  struct matrix z = quantise_fixed_source(160, 208);
  static const struct {
    const struct encoding *as;
    enum view view;
    uint64_t hash;
  } of[] = {{&E4M3, VIEW_ROW, 0x3cf5a19c006d3478u},
            {&E5M2, VIEW_COLUMN, 0x8d46da03682c5422u},
            {&E5M2_ROW, VIEW_COLUMN, 0x5cf1c3f2420952a6u},
            {&E4M3_SIGNED, VIEW_COLUMN, 0x76744598aabd8eb4u}};
  for (size_t i = 0; i < sizeof of / sizeof of[0]; i++)
    for (int threads = 0; threads < 3; threads++) {
      struct operand o = quantise_operand(*of[i].as, of[i].view, 160, 208);
      struct emission out = {0};
      *(of[i].view == VIEW_ROW ? &out.row : &out.column) = &o;
      cpu_quantise(dev[threads], &out, &z);
      CHECK_HASH(quantise_hash(&o), of[i].hash);
      quantise_drop(&o);
    }
  free(z.data);
}

TEST(encodings_refused) {
  static const struct encoding *yes[] = {&E4M3, &E5M2, &E4M3_ROW, &E5M2_ROW, &E4M3_SIGNED};
  for (size_t i = 0; i < sizeof yes / sizeof yes[0]; i++)
    CHECK(!cpu_refuse_encoding(NULL, yes[i], VIEW_ROW) && !cpu_refuse_encoding(NULL, yes[i], VIEW_COLUMN));
  struct encoding no[] = {E4M3, E4M3, E5M2, E5M2};
  no[0].block = BLOCK_1X16;
  no[1].rounding = ROUND_STOCHASTIC;
  no[2].scale = SCALE_NONE;
  no[3].strip = 128;
  for (size_t i = 0; i < sizeof no / sizeof no[0]; i++) CHECK(cpu_refuse_encoding(NULL, &no[i], VIEW_COLUMN) != NULL);
}

int main(void) {
  const struct extent x = {.tokens = 256, .head_chunk = 16, .attention = {1, 256, 2, 2, 32}, .hidden_size = 512,
                           .ffn_size = 512, .vocab_size = 64};
  for (int i = 0; i < 3; i++) dev[i] = test_device(i + 1, &x);
  RUN(against_the_model);
  RUN(every_pattern);
  RUN(errors);
  RUN(bits_of_every_machine);
  RUN(encodings_refused);
  RUN(large_shapes);
  for (int i = 0; i < 3; i++) test_device_close(dev[i]);
  return test_report();
}
