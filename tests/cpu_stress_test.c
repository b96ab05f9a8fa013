/* Every encoding that the CPU executes, on a view that is zero, has a zero block,
 * one element of 1e4, or one that is not finite: what comes out is defined, and
 * what is not finite never passes for a number. */
#include "tests/cpu_quantise.h"

enum { ROWS = 128, COLS = 96, R = 70, C = 41, ONES = 3 };

static struct device *device;

/* ---- every encoding ---------------------------------------------------------------- */

struct subject {
  struct encoding encoding;
  enum view view;
  char name[ENCODING_TEXT + 16];
};

static struct subject subjects[256];
static int n_subjects;

static void find_subjects(void) {
  for (int i = 0; i < 8 * 5 * 10 * 2 * 4 * 2 * 2; i++) {
    const int strip = i % 2 * 128, view = i / 2 % 2, h = i / 4 % 4, r = i / 16 % 2, s = i / 32 % 10, b = i / 320 % 5;
    const struct encoding e = {(enum format)(i / 1600), (enum block_geometry)b, (enum scale_rule)s, (enum rounding)r,
                               (enum hadamard)h, strip};
    if (encoding_is_plain(&e) || device->k->refuse_encoding(device, &e, (enum view)view)) continue;
    struct subject *x = &subjects[n_subjects++];
    *x = (struct subject){.encoding = e, .view = (enum view)view};
    char text[ENCODING_TEXT];
    snprintf(x->name, sizeof x->name, "%s, %s view", encoding_text(&e, text, sizeof text), view == VIEW_ROW ? "row" : "column");
  }
}

static struct operand encoded(const struct subject *x, const struct matrix *source) {
  struct operand o = quantise_operand(x->encoding, x->view, ROWS, COLS);
  if (x->encoding.strip > 0) {
    free(o.outer);
    o.strip = x->encoding.strip;
    o.outer = quantise_guarded(quantise_outer_bytes(&o));
  }
  struct emission out = {.draw = {.seed = 5, .update = 2, .seq_len = ROWS / 2, .operand = DRAW_DY_GATE_UP}};
  *(x->view == VIEW_ROW ? &out.row : &out.column) = &o;
  device->k->quantise(device, &out, source);
  return o;
}

/* The operand times columns of ones: [rows, ONES] in FP32. */
static struct matrix summed(const struct operand *o) {
  struct matrix ones = test_matrix(DTYPE_BF16, ONES, o->cols), out = test_matrix(DTYPE_F32, o->rows, ONES);
  for (int64_t i = 0; i < ONES * o->cols; i++) test_set(&ones, i, 1);
  struct operand b = operand_of_matrix(&ones, VIEW_ROW);
  device->k->contract(device, &out, o, &b, NULL);
  free(ones.data);
  return out;
}

static struct matrix normals(void) {
  struct matrix m = test_matrix(DTYPE_BF16, ROWS, COLS);
  for (int64_t i = 0; i < ROWS * COLS; i++) test_set(&m, i, normal());
  return m;
}

static double *decoded(const struct operand *o) {
  double *values = test_memory((size_t)(o->rows * o->cols) * sizeof *values);
  for (int64_t r = 0; r < o->rows; r++) operand_decode(o, r, values + r * o->cols);
  return values;
}

/* Where element (row, col) of the source is. */
static int64_t place(const struct subject *x, int64_t row, int64_t col) {
  return x->view == VIEW_ROW ? row * COLS + col : col * ROWS + row;
}

/* ---- zeros --------------------------------------------------------------------------- */

static void check_zeros(const struct subject *x) {
  struct matrix z = test_matrix(DTYPE_BF16, ROWS, COLS);
  for (int64_t i = 0; i < ROWS * COLS; i += 3) ((uint16_t *)z.data)[i] = 0x8000;
  struct operand o = encoded(x, &z);
  struct matrix sums = summed(&o);
  for (int64_t i = 0; i < sums.rows * ONES; i++)
    if (!(test_get(&sums, i) == 0)) FAIL("%s: zeros add up to %g", x->name, test_get(&sums, i));
  for (size_t i = 0; i < quantise_scale_bytes(&o); i++)
    if (o.scales[i] != 0) FAIL("%s: the scale of zeros is %d", x->name, o.scales[i]);
  for (int64_t i = 0; i < operand_outer_count(&o); i++) CHECK(isfinite(o.outer[i]));
  free(sums.data);
  quantise_drop(&o);
  free(z.data);
}

/* 32x32 of them among numbers: a group of every geometry and transform. */
static void check_zero_block(const struct subject *x) {
  struct matrix z = normals();
  for (int64_t r = 32; r < 64; r++)
    for (int64_t c = 32; c < 64; c++) test_set(&z, r * COLS + c, 0);
  struct operand o = encoded(x, &z);
  double *values = decoded(&o);
  int64_t wrong = 0, rest = 0;
  for (int64_t r = 0; r < ROWS; r++)
    for (int64_t c = 0; c < COLS; c++) {
      double value = values[place(x, r, c)];
      if (r / 32 == 1 && c / 32 == 1) wrong += !(value == 0);
      else rest += value != 0;
      wrong += !isfinite(value);
    }
  if (wrong || rest < 6000) FAIL("%s: %d values wrong, %d not zero", x->name, (int)wrong, (int)rest);
  free(values);
  quantise_drop(&o);
  free(z.data);
}

/* ---- an outlier ------------------------------------------------------------------------ */

static void check_outlier(const struct subject *x) {
  struct matrix z = normals();
  struct operand without = encoded(x, &z);
  test_set(&z, R * COLS + C, 1e4);
  struct operand o = encoded(x, &z);
  double *values = decoded(&o), *before = decoded(&without);
  int64_t moved = 0;
  for (int64_t i = 0; i < ROWS * COLS; i++) {
    if (!isfinite(values[i])) FAIL("%s: an element is %g", x->name, values[i]);
    moved += values[i] != before[i];
  }
  /* a code of 6 for what is up to twice as large (decode rule), or 4 drawn for nearly 6 */
  if (x->encoding.hadamard == HADAMARD_NONE) CHECK_CLOSE(values[place(x, R, C)], 1e4, .51e4);
  int64_t group = x->encoding.block == BLOCK_2D32 ? 32 * 32 : x->encoding.block == BLOCK_1X32 ? 32 : ROWS * COLS;
  if (x->encoding.format == FORMAT_MXFP4 && moved > group)
    FAIL("%s: an outlier moves %d elements, its group has %d", x->name, (int)moved, (int)group);
  struct matrix sums = summed(&o);
  for (int64_t i = 0; i < sums.rows * ONES; i++) CHECK(isfinite(test_get(&sums, i)));
  free(sums.data);
  free(values);
  free(before);
  quantise_drop(&o);
  quantise_drop(&without);
  free(z.data);
}

/* ---- what is not finite ------------------------------------------------------------------ */

/* Rows of the view, in a row's or strip's outer factor or in a group with element (R, C). */
static bool touched(const struct subject *x, int64_t row) {
  const int64_t at = x->view == VIEW_ROW ? R : C;
  switch (x->encoding.block) {
    case BLOCK_2D16: break; /* an outer factor of the whole */
    case BLOCK_2D32: return row / 32 == at / 32;
    default: break;
  }
  if (x->encoding.format == FORMAT_MXFP4 || x->encoding.scale == SCALE_ROW) return row == at;
  return x->encoding.strip == 0 || row / x->encoding.strip == at / x->encoding.strip;
}

static void check_not_finite(const struct subject *x, uint16_t word) {
  struct matrix z = normals();
  ((uint16_t *)z.data)[R * COLS + C] = word;
  struct operand o = encoded(x, &z);
  struct matrix sums = summed(&o);
  const int64_t at = x->view == VIEW_ROW ? R : C;
  for (int64_t i = 0; i < sums.rows * ONES; i++) {
    bool finite = isfinite(test_get(&sums, i));
    if (i / ONES == at && finite) FAIL("%s: %04x becomes %g", x->name, word, test_get(&sums, i));
    if (!touched(x, i / ONES) && !finite) FAIL("%s: %04x reaches row %d", x->name, word, (int)(i / ONES));
  }
  free(sums.data);
  quantise_drop(&o);
  free(z.data);
}

TEST(zeros) {
  for (int i = 0; i < n_subjects; i++) check_zeros(&subjects[i]);
}
TEST(a_zero_block) {
  for (int i = 0; i < n_subjects; i++) check_zero_block(&subjects[i]);
}
TEST(an_outlier) {
  for (int i = 0; i < n_subjects; i++) check_outlier(&subjects[i]);
}
TEST(not_finite) {
  static const uint16_t words[4] = {0x7F80, 0xFF80, 0x7FC0, 0xFFC1};
  for (int i = 0; i < n_subjects; i++)
    for (int k = 0; k < 4; k++) check_not_finite(&subjects[i], words[k]);
}

int main(void) {
  const struct extent x = {.tokens = ROWS,
                           .head_chunk = ROWS,
                           .attention = {.batch = 2, .seq_len = ROWS / 2, .n_heads = 3, .n_kv_heads = 3, .head_dim = 32},
                           .hidden_size = ROWS,
                           .ffn_size = ROWS,
                           .vocab_size = ROWS};
  device = test_backend(2, &x);
  find_subjects();
  printf("# %d encodings of views\n", n_subjects);
  if (n_subjects < 90) printf("not ok subjects: %d\n", n_subjects);
  RUN(zeros);
  RUN(a_zero_block);
  RUN(an_outlier);
  RUN(not_finite);
  test_backend_close(device);
  return test_report();
}
