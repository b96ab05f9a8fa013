/* Every quantiser against tests/golden/quantisers.txt, which independent
 * packages and an independent model made (tests/oracle/quantisers.py says what
 * a line holds).  Inputs are made here as there: integers and correctly
 * rounded FP64 alone.
 *
 * Compared bit for bit: codes, tiled scales with their padding, outer factors. */
#include <math.h>
#include <stdlib.h>

#include "base/hash.h"
#include "tests/cpu_device.h"

#define GOLDEN "tests/golden/quantisers.txt"

/* ---- inputs: tests/oracle/quantiser_inputs.py -------------------------------- */

static struct philox_block input_draw(int64_t i, uint32_t stream) {
  return philox4x32_10(0x51A27153u, (struct philox_block){{(uint32_t)i, stream, 0, 0}});
}

static int64_t input_halves(int64_t i, uint32_t stream) {
  struct philox_block w = input_draw(i, stream);
  int64_t sum = 0;
  for (int j = 0; j < 4; j++) sum += (int64_t)(w.word[j] & 0xFFFFu) + (int64_t)(w.word[j] >> 16);
  return 2 * sum - 8 * 65535;
}

static double bell(int64_t i) { return (double)input_halves(i, 1) * 9.344e-6; }

static double heavy(int64_t i) {
  int64_t q = 1;
  for (uint32_t s = 2; s <= 4; s++) {
    int64_t h = input_halves(i, s);
    q += h * h;
  }
  return (double)input_halves(i, 1) / sqrt((double)q / 3.0);
}

static double sparse(int64_t r, int64_t c, int64_t i) {
  static const struct {
    int64_t height, width;
  } pieces[5] = {{128, 1 << 20}, {128, 128}, {32, 32}, {1, 16}, {1, 1}};
  double x = bell(i);
  for (uint32_t p = 0; p < 5; p++)
    if (input_draw(r / pieces[p].height * 4096 + c / pieces[p].width, 6 + p).word[0] % 5 < 2) x *= 0.0;
  return x;
}

static uint16_t input_word(const char *name, int64_t r, int64_t c, int64_t cols) {
  const int64_t i = r * cols + c;
  double x;
  if (strcmp(name, "bell") == 0) x = bell(i);
  else if (strcmp(name, "heavy") == 0) x = heavy(i);
  else if (strcmp(name, "chunks") == 0) x = ldexp(bell(i), -(int)(input_draw(r / 128 * 64 + c / 128, 5).word[0] % 9));
  else if (strcmp(name, "wide") == 0) x = ldexp(bell(i), -(int)(input_draw(r / 16 * 64 + c / 16, 5).word[0] % 24));
  else if (strcmp(name, "tiny") == 0) x = bell(i) * 1e-12;
  else if (strcmp(name, "huge") == 0) x = ldexp(bell(i), 121);
  else if (strcmp(name, "subnormal") == 0) x = ldexp(bell(i), -129);
  else if (strcmp(name, "zeros") == 0) x = input_draw(i, 5).word[0] % 2 == 0 ? 0.0 : -0.0;
  else if (strcmp(name, "sparse") == 0) x = sparse(r, c, i);
  else if (strcmp(name, "outlier") == 0) x = i == 5 * cols + 37 ? 1e4 : bell(i);
  else if (strcmp(name, "lattice") == 0) x = ((int)(input_draw(i, 5).word[0] % 97) - 48) / 8.0;
  else if (strcmp(name, "words") == 0) {
    uint32_t w = input_draw(i, 5).word[0] & 0xFFFFu;
    return (uint16_t)((w & 0x7F80u) == 0x7F80u ? w & 0xBFFFu : w);
  } else if (strcmp(name, "nonfinite") == 0) {
    static const uint16_t special[4] = {0x7FC0, 0xFFC1, 0x7F80, 0xFF80};
    struct philox_block w = input_draw(r * 4096 + c / 8, 5);
    if (w.word[0] % 61 == 0 && c % 8 == w.word[2] % 8) return special[w.word[1] % 4];
    x = bell(i);
  } else {
    FAIL("no input %s", name);
    return 0;
  }
  return bf16_encode((float)x);
}

static struct matrix input_matrix(const char *name, int64_t rows, int64_t cols) {
  struct matrix m = test_matrix(DTYPE_BF16, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) ((uint16_t *)m.data)[i] = input_word(name, i / cols, i % cols, cols);
  return m;
}

/* ---- one line ------------------------------------------------------------------ */

struct line {
  char input[16], name[ENCODING_TEXT], agreed[64];
  int64_t rows, cols, strip, segment;
  enum view view;
  struct encoding encoding;
  uint64_t codes, scales, outer;
  double sum, magnitude; /* of decoded values: weighted, without sign */
};

static bool line_read(struct line *l, const char *text) {
  int view, f, b, s, r, h, strip;
  int n = sscanf(text,
                 "%15s %" SCNd64 " %" SCNd64 " %d %d %d %d %d %d %d %" SCNd64 " %" SCNd64 " %63s %" SCNx64 " %" SCNx64
                 " %" SCNx64 " %lf %lf %*s %*s %*s %63s",
                 l->input, &l->rows, &l->cols, &view, &f, &b, &s, &r, &h, &strip, &l->strip, &l->segment, l->name,
                 &l->codes, &l->scales, &l->outer, &l->sum, &l->magnitude, l->agreed);
  l->view = (enum view)view;
  l->encoding = (struct encoding){(enum format)f, (enum block_geometry)b, (enum scale_rule)s, (enum rounding)r,
                                  (enum hadamard)h, strip};
  return n == 19;
}

static struct operand operand_new(const struct line *l) {
  struct operand o = {.encoding = l->encoding, .view = l->view, .strip = l->strip, .segment = l->segment};
  o.rows = l->view == VIEW_ROW ? l->rows : l->cols;
  o.cols = l->view == VIEW_ROW ? l->cols : l->rows;
  size_t codes = (size_t)operand_code_bytes(&o.encoding, o.rows, o.cols);
  size_t scales = (size_t)operand_scale_bytes(&o.encoding, o.rows, o.cols);
  o.codes = test_memory(codes);
  o.scales = test_memory(scales);
  memset(o.codes, 0xA5, codes);
  memset(o.scales, 0xA5, scales);
  int64_t n = operand_outer_count(&o);
  if (n > 0) {
    o.outer = test_memory((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) o.outer[i] = NAN;
  }
  return o;
}

static void operand_end(struct operand *o) {
  free(o->codes);
  free(o->scales);
  free(o->outer);
}

static struct emission emission_of(const struct line *l) {
  return (struct emission){.draw = {.seed = 0x0123456789ABCDEFu,
                                    .update = 77,
                                    .first_sample = 0x12FFFFFFFFu,
                                    .seq_len = l->rows / 2,
                                    .layer = 5,
                                    .operand = DRAW_DY_GATE_UP}};
}

static void operand_compare_values(const struct operand *o, const struct line *l) {
  double sum = 0, magnitude = 0, *row = test_memory((size_t)o->cols * sizeof *row);
  for (int64_t r = 0; r < o->rows; r++) {
    operand_decode(o, r, row);
    for (int64_t c = 0; c < o->cols; c++) {
      sum += row[c] * (double)((7 * r + 3 * c) % 11 - 5);
      magnitude += fabs(row[c]);
    }
  }
  free(row);
  const bool finite = l->magnitude > 0 || isfinite(magnitude);
  if (finite && !(test_near(sum, l->sum, 1e-11 * l->magnitude) && test_near(magnitude, l->magnitude, 1e-11 * l->magnitude)))
    FAIL("%s on %s, %s view decodes to sums %.17g %.17g, expected %.17g %.17g", l->name, l->input,
         l->view == VIEW_ROW ? "row" : "column", sum, magnitude, l->sum, l->magnitude);
}

static void operand_compare(struct operand *o, const struct line *l, const char *how) {
  uint64_t codes = hash_bytes(o->codes, (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols)).low;
  uint64_t scales = hash_bytes(o->scales, (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols)).low;
  uint64_t outer = hash_bytes(o->outer, (size_t)operand_outer_count(o) * sizeof(float)).low;
  if (codes == l->codes && scales == l->scales && outer == l->outer) return;
  FAIL("%s on %s %dx%d, %s view%s (expected by %s):%s%s%s", l->name, l->input, (int)l->rows, (int)l->cols,
       l->view == VIEW_ROW ? "row" : "column", how, l->agreed, codes == l->codes ? "" : " codes",
       scales == l->scales ? "" : " scales", outer == l->outer ? "" : " outer factors");
}

/* ---- the test --------------------------------------------------------------------- */

static struct device *device;

static void compare_format(enum format format) {
  FILE *f = fopen(GOLDEN, "r");
  CHECK(f != NULL);
  if (!f) return;
  char text[512], input[16] = "";
  struct matrix source = {0};
  struct line l, last = {0};
  int lines = 0;
  while (fgets(text, sizeof text, f)) {
    if (text[0] == '#') continue;
    CHECK(line_read(&l, text));
    if (l.encoding.format != format) continue;
    char name[ENCODING_TEXT];
    CHECK_STR(encoding_text(&l.encoding, name, sizeof name), l.name);
    if (strcmp(input, l.input) != 0 || source.rows != l.rows || source.cols != l.cols) {
      free(source.data);
      source = input_matrix(l.input, l.rows, l.cols);
      snprintf(input, sizeof input, "%s", l.input);
    }
    lines++;
    const char *why = device->k->refuse_encoding(device, &l.encoding, l.view);
    if (why) {
      FAIL("%s, %s view is not executable: %s", l.name, l.view == VIEW_ROW ? "row" : "column", why);
      continue;
    }
    struct operand o = operand_new(&l);
    struct emission out = emission_of(&l);
    *(l.view == VIEW_ROW ? &out.row : &out.column) = &o;
    device->k->quantise(device, &out, &source);
    operand_compare(&o, &l, "");
    operand_compare_values(&o, &l);

    /* lines come in pairs: both views at once must give what each gives alone */
    if (l.view == VIEW_COLUMN && encoding_equal(&l.encoding, &last.encoding) && strcmp(l.input, last.input) == 0 &&
        l.rows == last.rows && l.cols == last.cols) { /* (lines of two arms are such pairs too) */
      struct operand row = operand_new(&last), column = operand_new(&l);
      out.row = &row;
      out.column = &column;
      device->k->quantise(device, &out, &source);
      operand_compare(&row, &last, " beside the other");
      operand_compare(&column, &l, " beside the other");
      operand_end(&row);
      operand_end(&column);
    }
    operand_end(&o);
    last = l;
  }
  CHECK(lines > 60);
  free(source.data);
  fclose(f);
}

/* What the device executes must be among the lines. */
TEST(every_executable_encoding_is_compared) {
  bool there[8][5][10][2][4][2] = {{{{{{false}}}}}};
  FILE *f = fopen(GOLDEN, "r");
  CHECK(f != NULL);
  if (!f) return;
  char text[512];
  struct line l;
  while (fgets(text, sizeof text, f)) {
    if (text[0] == '#' || !line_read(&l, text)) continue;
    const struct encoding *e = &l.encoding;
    there[e->format][e->block][e->scale][e->rounding][e->hadamard][l.view] = true;
  }
  fclose(f);
  int executable = 0;
  for (int i = 0; i < 8 * 5 * 10 * 2 * 4 * 2; i++) {
    const int view = i % 2, h = i / 2 % 4, r = i / 8 % 2, s = i / 16 % 10, b = i / 160 % 5, format = i / 800;
    const struct encoding e = {(enum format)format, (enum block_geometry)b, (enum scale_rule)s, (enum rounding)r,
                               (enum hadamard)h, 0};
    if (encoding_is_plain(&e) || device->k->refuse_encoding(device, &e, (enum view)view)) continue;
    executable++;
    char name[ENCODING_TEXT];
    if (!there[format][b][s][r][h][view])
      FAIL("%s, %s view: no line", encoding_text(&e, name, sizeof name), view == VIEW_ROW ? "row" : "column");
  }
  CHECK(executable > 80);
}

TEST(mxfp4) { compare_format(FORMAT_MXFP4); }
TEST(nvfp4) { compare_format(FORMAT_NVFP4); }
TEST(nvfp4_local) { compare_format(FORMAT_NVFP4_LOCAL); }
TEST(e4m3) { compare_format(FORMAT_E4M3); }
TEST(e5m2) { compare_format(FORMAT_E5M2); }

int main(void) {
  const struct extent x = {.tokens = 256,
                           .head_chunk = 256,
                           .attention = {.batch = 2, .seq_len = 128, .n_heads = 8, .n_kv_heads = 8, .head_dim = 32},
                           .hidden_size = 384,
                           .ffn_size = 384,
                           .vocab_size = 384};
  device = test_backend(2, &x);
  RUN(every_executable_encoding_is_compared);
  RUN(mxfp4);
  RUN(nvfp4);
  RUN(nvfp4_local);
  RUN(e4m3);
  RUN(e5m2);
  test_backend_close(device);
  return test_report();
}
