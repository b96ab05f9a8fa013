/* RMSNorm, SwiGLU, rotary embedding and the embedding table, each against a
 * literal model in double, at odd shapes, in both types. */
#include "kernels/elementary.h"
#include "kernels/rope.h"
#include "tests/cpu_device.h"

static const struct extent extent = {.tokens = 70,
                                     .head_chunk = 8,
                                     .attention = {1, 70, 4, 2, 32},
                                     .hidden_size = 4096,
                                     .ffn_size = 2048,
                                     .vocab_size = 300};

static struct device *dev[3]; /* 1, 2 and 3 threads */

struct shape {
  int64_t rows, cols;
};
static const struct shape shapes[] = {{1, 8},    {2, 96},    {31, 8},    {32, 96},  {33, 1000}, {64, 8},
                                      {65, 96},  {70, 1000}, {5, 1000},  {3, 4096}, {34, 4096}, {70, 8}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void drop(struct matrix m) { free(m.data); }

/* ---- RMSNorm ------------------------------------------------------------- */
struct norm_case {
  struct matrix residual, delta, gain, residual_out, out;
  float *rstd;
};

static struct norm_case norm_case(enum dtype t, struct shape s, uint64_t key) {
  return (struct norm_case){.residual = test_random(t, s.rows, s.cols, key, 1.3),
                            .delta = test_random(t, s.rows, s.cols, key + 1, 0.7),
                            .gain = test_random(t, 1, s.cols, key + 2, 1.0),
                            .residual_out = test_matrix(t, s.rows, s.cols),
                            .out = test_matrix(t, s.rows, s.cols),
                            .rstd = test_memory((size_t)s.rows * sizeof(float))};
}

static void norm_drop(struct norm_case *n) {
  drop(n->residual), drop(n->delta), drop(n->gain), drop(n->residual_out), drop(n->out);
  free(n->rstd);
}

static void norm_run(struct device *d, struct norm_case *n) {
  cpu_add_rmsnorm_forward(d, &(struct emission){.plain = &n->out}, &n->residual_out, n->rstd, &n->residual, &n->delta,
                          &n->gain, 1e-5f);
}

static double row_rstd(const struct matrix *x, int64_t r, double eps) {
  double sum = 0;
  for (int64_t c = 0; c < x->cols; c++) sum += test_get(x, r * x->cols + c) * test_get(x, r * x->cols + c);
  return 1.0 / sqrt(sum / (double)x->cols + eps);
}

/* To nearest even in the upper half of a finite float's bits. */
static float bf16_by_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  uint32_t low = u & 0xffff, up = u >> 16;
  if (low > 0x8000 || (low == 0x8000 && (up & 1))) up++;
  u = up << 16;
  memcpy(&x, &u, sizeof x);
  return x;
}

TEST(rmsnorm_forward) {
  for (int i = 0; i < 2 * SHAPES; i++) {
    enum dtype t = test_types[i % 2];
    struct shape s = shapes[i / 2];
    struct norm_case n = norm_case(t, s, 100 + (uint64_t)i);
    norm_run(dev[0], &n);
    for (int64_t r = 0; r < s.rows; r++) {
      double rstd = row_rstd(&n.residual_out, r, (double)1e-5f);
      CHECK(test_near((double)n.rstd[r], rstd, 2e-6 * rstd));
      for (int64_t c = 0; c < s.cols; c++) {
        int64_t e = r * s.cols + c;
        double sum = test_get(&n.residual, e) + test_get(&n.delta, e);
        CHECK(test_near(test_get(&n.residual_out, e), sum, 1.001 * test_half_ulp(t) * fabs(sum)));
        double want = test_get(&n.residual_out, e) * rstd * test_get(&n.gain, c);
        CHECK(test_near(test_get(&n.out, e), want, (1.001 * test_half_ulp(t) + 2e-6) * fabs(want)));
      }
    }
    norm_drop(&n);
  }
}

TEST(rmsnorm_forward_modes_agree) {
  for (int i = 0; i < 2 * SHAPES; i++) {
    struct norm_case a = norm_case(test_types[i % 2], shapes[i / 2], 100 + (uint64_t)i);
    norm_run(dev[0], &a);
    for (int k = 1; k < 3; k++) { /* more threads, and the sum in place */
      struct norm_case b = norm_case(test_types[i % 2], shapes[i / 2], 100 + (uint64_t)i);
      cpu_add_rmsnorm_forward(dev[k], &(struct emission){.plain = &b.out}, &b.residual, b.rstd, &b.residual, &b.delta,
                              &b.gain, 1e-5f);
      CHECK(test_same(&a.out, &b.out) && test_same(&a.residual_out, &b.residual));
      CHECK(memcmp(a.rstd, b.rstd, (size_t)shapes[i / 2].rows * sizeof(float)) == 0);
      norm_drop(&b);
    }
    /* Without delta: the sum itself as residual, nothing written. */
    struct matrix out = test_matrix(a.out.dtype, a.out.rows, a.out.cols);
    cpu_add_rmsnorm_forward(dev[1], &(struct emission){.plain = &out}, NULL, a.rstd, &a.residual_out, NULL, &a.gain,
                            1e-5f);
    CHECK(test_same(&a.out, &out));
    drop(out);
    norm_drop(&a);
  }
}

/* The cast before the gain: each product rounded to the type as it stands, from the sum and
 * the factor that were written; in FP32 there is nothing to round. */
TEST(rmsnorm_forward_cast) {
  int64_t differ = 0;
  for (int i = 0; i < 2 * SHAPES; i++) {
    enum dtype t = test_types[i % 2];
    struct shape s = shapes[i / 2];
    struct norm_case n = norm_case(t, s, 900 + (uint64_t)i), after = norm_case(t, s, 900 + (uint64_t)i);
    norm_run(dev[0], &after);
    cpu_add_rmsnorm_forward_cast(dev[i % 3], &(struct emission){.plain = &n.out}, &n.residual_out, n.rstd, &n.residual,
                                 &n.delta, &n.gain, 1e-5f);
    CHECK(test_same(&n.residual_out, &after.residual_out));
    CHECK(memcmp(n.rstd, after.rstd, (size_t)s.rows * sizeof(float)) == 0);
    for (int64_t e = 0; e < s.rows * s.cols; e++) {
      float scaled = (float)test_get(&n.residual_out, e) * n.rstd[e / s.cols];
      if (t == DTYPE_BF16) scaled = bf16_by_bits(scaled);
      float want = scaled * (float)test_get(&n.gain, e % s.cols);
      if (t == DTYPE_BF16) want = bf16_by_bits(want);
      CHECK((float)test_get(&n.out, e) == want);
    }
    if (t == DTYPE_F32) CHECK(test_same(&n.out, &after.out));
    else differ += !test_same(&n.out, &after.out);
    norm_drop(&n), norm_drop(&after);
  }
  CHECK(differ >= SHAPES / 2);
}

TEST(rmsnorm_extremes) {
  struct norm_case n = norm_case(DTYPE_F32, (struct shape){4, 96}, 5);
  float *x = n.residual.data;
  memset(n.delta.data, 0, 4 * 96 * sizeof(float));
  for (int i = 0; i < 96; i++) x[i] = 0.0f, x[96 + i] = 1e-30f, x[3 * 96 + i] = 1e15f;
  x[2 * 96 + 7] = NAN;
  norm_run(dev[0], &n);
  const float *y = n.out.data, *g = n.gain.data;
  for (int i = 0; i < 96; i++) {
    CHECK(y[i] == 0.0f);
    CHECK(test_near((double)y[96 + i], (double)g[i] * 1e-30 / sqrt(1e-5), 1e-33));
    CHECK(isnan(y[2 * 96 + i]));
    CHECK(test_near((double)y[3 * 96 + i], (double)g[i], 1e-6 * fabs((double)g[i])));
  }
  norm_drop(&n);
}

/* sum of dy * rmsnorm(x) * gain, in double: what backward differentiates. */
static double norm_loss(const double *x, const double *dy, const double *gain, int64_t n, double eps) {
  double squares = 0, sum = 0;
  for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
  for (int64_t i = 0; i < n; i++) sum += dy[i] * x[i] * gain[i];
  return sum / sqrt(squares / (double)n + eps);
}

static struct matrix filled(enum dtype t, int64_t rows, int64_t cols, double value) {
  struct matrix m = test_matrix(t, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) test_set(&m, i, value);
  return m;
}

/* What began alike and was added to in BF16 is the FP32 result rounded once. */
static bool is_rounding_of(const struct matrix *bf16, const struct matrix *f32) {
  for (int64_t i = 0; i < f32->rows * f32->cols; i++)
    if (((const uint16_t *)bf16->data)[i] != bf16_encode(((const float *)f32->data)[i])) return false;
  return bf16->rows == f32->rows && bf16->cols == f32->cols;
}

TEST(rmsnorm_backward_is_the_derivative) {
  static const int64_t widths[] = {8, 96, 203};
  for (int w = 0; w < 3; w++) {
    int64_t n = widths[w], rows = 3;
    struct norm_case f = norm_case(DTYPE_F32, (struct shape){rows, n}, 40 + (uint64_t)w);
    norm_run(dev[0], &f);
    struct matrix dy = test_random(DTYPE_F32, rows, n, 70, 1.0), dx = test_matrix(DTYPE_F32, rows, n);
    struct matrix d_gain = test_matrix(DTYPE_F32, 1, n);
    cpu_add_rmsnorm_backward(dev[1], &(struct emission){.plain = &dx}, &d_gain, &dy, NULL, &f.residual_out, f.rstd,
                             &f.gain);
    double x[203], d[203], g[203];
    const double h = 1e-5;
    for (int64_t c = 0; c < n; c++) {
      double want_gain = 0;
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < n; i++)
          x[i] = test_get(&f.residual_out, r * n + i), d[i] = test_get(&dy, r * n + i), g[i] = test_get(&f.gain, i);
        x[c] += h;
        double up = norm_loss(x, d, g, n, (double)1e-5f);
        x[c] -= 2 * h;
        double down = norm_loss(x, d, g, n, (double)1e-5f);
        x[c] += h;
        CHECK(test_near(test_get(&dx, r * n + c), (up - down) / (2 * h), 3e-6));
        g[c] += h;
        up = norm_loss(x, d, g, n, (double)1e-5f);
        g[c] -= 2 * h;
        want_gain += (up - norm_loss(x, d, g, n, (double)1e-5f)) / (2 * h);
      }
      CHECK(test_near(test_get(&d_gain, c), want_gain, 5e-6));
    }
    drop(dy), drop(dx), drop(d_gain);
    norm_drop(&f);
  }
}

TEST(rmsnorm_backward) {
  for (int i = 0; i < 2 * SHAPES; i++) {
    enum dtype t = test_types[i % 2];
    struct shape s = shapes[i / 2];
    struct norm_case f = norm_case(t, s, 300 + (uint64_t)i);
    norm_run(dev[0], &f);
    struct matrix dy = test_random(t, s.rows, s.cols, 11, 1.0), above = test_random(t, s.rows, s.cols, 12, 0.5);
    struct matrix dx[3];
    struct matrix d_gain[3], rounded = filled(DTYPE_BF16, 1, s.cols, 0.25);
    for (int k = 0; k < 3; k++) { /* threads; the third in place of d_above */
      d_gain[k] = filled(DTYPE_F32, 1, s.cols, 0.25);
      dx[k] = k == 2 ? test_copy(&above) : test_matrix(t, s.rows, s.cols);
      cpu_add_rmsnorm_backward(dev[k], &(struct emission){.plain = &dx[k]}, &d_gain[k], &dy, k == 2 ? &dx[k] : &above,
                               &f.residual_out, f.rstd, &f.gain);
      CHECK(test_same(&dx[0], &dx[k]) && test_same(&d_gain[0], &d_gain[k]));
    }
    struct matrix again = test_matrix(t, s.rows, s.cols);
    cpu_add_rmsnorm_backward(dev[i % 3], &(struct emission){.plain = &again}, &rounded, &dy, &above, &f.residual_out,
                             f.rstd, &f.gain);
    CHECK(test_same(&again, &dx[0]) && is_rounding_of(&rounded, &d_gain[0]));
    double *want_gain = test_memory((size_t)s.cols * sizeof *want_gain);
    double *size_gain = test_memory((size_t)s.cols * sizeof *size_gain);
    for (int64_t r = 0; r < s.rows; r++) {
      double rstd = row_rstd(&f.residual_out, r, (double)1e-5f), dot = 0;
      for (int64_t c = 0; c < s.cols; c++) {
        int64_t e = r * s.cols + c;
        double part = test_get(&dy, e) * test_get(&f.residual_out, e);
        dot += part * test_get(&f.gain, c);
        want_gain[c] += part * rstd, size_gain[c] += fabs(part * rstd);
      }
      for (int64_t c = 0; c < s.cols; c++) {
        int64_t e = r * s.cols + c;
        double norm = rstd * (test_get(&dy, e) * test_get(&f.gain, c) -
                              test_get(&f.residual_out, e) * rstd * rstd * dot / (double)s.cols);
        double want = test_get(&above, e) + norm;
        CHECK(test_near(test_get(&dx[0], e), want, 1.001 * test_half_ulp(t) * fabs(want) + 4e-6));
      }
    }
    for (int64_t c = 0; c < s.cols; c++)
      CHECK(test_near(test_get(&d_gain[0], c), 0.25 + want_gain[c], 4e-6 * (1.0 + size_gain[c])));
    for (int k = 0; k < 3; k++) drop(dx[k]), drop(d_gain[k]);
    drop(dy), drop(above), drop(rounded), drop(again), free(want_gain), free(size_gain);
    norm_drop(&f);
  }
}

/* ---- SwiGLU -------------------------------------------------------------- */
static double silu(double x) { return x / (1.0 + exp(-x)); }

TEST(swiglu) {
  for (int i = 0; i < 2 * SHAPES; i++) {
    enum dtype t = test_types[i % 2];
    struct shape s = shapes[i / 2];
    int64_t n = s.cols > 2048 ? 2048 : s.cols;
    struct matrix x = test_random(t, s.rows, 2 * n, 500 + (uint64_t)i, 3.0), d = test_random(t, s.rows, n, 9, 1.0);
    struct matrix out[3], dx[3];
    for (int k = 0; k < 3; k++) {
      out[k] = test_matrix(t, s.rows, n), dx[k] = test_matrix(t, s.rows, 2 * n);
      cpu_swiglu_forward(dev[k], &(struct emission){.plain = &out[k]}, &x);
      cpu_swiglu_backward(dev[k], &(struct emission){.plain = &dx[k]}, &d, &x);
      CHECK(test_same(&out[0], &out[k]) && test_same(&dx[0], &dx[k]));
    }
    const double h = 1e-5;
    for (int64_t r = 0; r < s.rows; r++) {
      for (int64_t c = 0; c < n; c++) {
        double gate = test_get(&x, r * 2 * n + c), up = test_get(&x, r * 2 * n + n + c), dy = test_get(&d, r * n + c);
        double want = silu(gate) * up, half = 1.001 * test_half_ulp(t);
        CHECK(test_near(test_get(&out[0], r * n + c), want, (half + 4e-7) * fabs(want)));
        double slope = (silu(gate + h) - silu(gate - h)) / (2 * h);
        double want_gate = dy * up * slope, want_up = dy * silu(gate);
        CHECK(test_near(test_get(&dx[0], r * 2 * n + c), want_gate, half * fabs(want_gate) + 1e-6 * fabs(dy * up)));
        CHECK(test_near(test_get(&dx[0], r * 2 * n + n + c), want_up, (half + 4e-7) * fabs(want_up)));
      }
    }
    for (int k = 0; k < 3; k++) drop(out[k]), drop(dx[k]);
    drop(x), drop(d);
  }
}

TEST(swiglu_extremes) {
  static const float gates[] = {1e30f, -1e30f, 200.0f, -200.0f, 0.0f, -0.0f, NAN, INFINITY};
  struct matrix x = test_matrix(DTYPE_F32, 1, 16), y = test_matrix(DTYPE_F32, 1, 8), d = test_matrix(DTYPE_F32, 1, 8);
  struct matrix dx = test_matrix(DTYPE_F32, 1, 16);
  for (int i = 0; i < 8; i++) test_set(&x, i, (double)gates[i]), test_set(&x, 8 + i, 2.0), test_set(&d, i, 1.0);
  cpu_swiglu_forward(dev[0], &(struct emission){.plain = &y}, &x);
  cpu_swiglu_backward(dev[0], &(struct emission){.plain = &dx}, &d, &x);
  const float *o = y.data, *g = dx.data;
  CHECK(o[0] == 2e30f && o[1] == 0.0f && o[2] == 400.0f && o[3] == 0.0f && o[4] == 0.0f && o[5] == 0.0f);
  CHECK(isnan(o[6]) && o[7] == INFINITY);
  CHECK(g[0] == 2.0f && g[1] == 0.0f && g[2] == 2.0f && g[3] == 0.0f && g[4] == 1.0f && isnan(g[6]));
  drop(x), drop(y), drop(d), drop(dx);
}

/* ---- rotary embedding ---------------------------------------------------- */
TEST(rope) {
  static const struct attention_shape cases[] = {
      {1, 1, 1, 1, 2}, {2, 33, 4, 2, 32}, {3, 20, 3, 1, 8}, {1, 64, 8, 8, 4}, {5, 13, 2, 1, 128}};
  for (int i = 0; i < 10; i++) {
    enum dtype t = test_types[i % 2];
    const struct attention_shape *s = &cases[i / 2];
    int64_t cols = (s->n_heads + 2 * s->n_kv_heads) * s->head_dim, rows = s->batch * s->seq_len;
    float *table = test_memory((size_t)(s->seq_len * s->head_dim) * sizeof *table);
    rope_table(table, s->seq_len, s->head_dim, 10000.0, NULL);
    struct matrix x = test_random(t, rows, cols, 700 + (uint64_t)i, 1.0), y[3], back[3];
    for (int k = 0; k < 3; k++) {
      y[k] = test_copy(&x);
      cpu_rope_forward(dev[k], &y[k], NULL, NULL, table, s);
      back[k] = k == 2 ? test_copy(&y[0]) : test_matrix(t, rows, cols);
      cpu_rope_backward(dev[k], &(struct emission){.plain = &back[k]}, k == 2 ? &back[k] : &y[0], table, s);
      CHECK(test_same(&y[0], &y[k]) && test_same(&back[0], &back[k]));
    }
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < cols; c += 2) {
        int64_t e = r * cols + c;
        double a = test_get(&x, e), b = test_get(&x, e + 1), cosine = 1, sine = 0;
        if (c < (s->n_heads + s->n_kv_heads) * s->head_dim) {
          double angle = (double)(r % s->seq_len) * pow(10000.0, -(double)(c % s->head_dim) / (double)s->head_dim);
          cosine = cos(angle), sine = sin(angle);
        } else {
          CHECK(test_get(&y[0], e) == a && test_get(&y[0], e + 1) == b && test_get(&back[0], e) == a);
        }
        double half = test_half_ulp(t) * 1.001, size = 3e-7 * (fabs(a) + fabs(b));
        double want = a * cosine - b * sine, want1 = a * sine + b * cosine;
        CHECK(test_near(test_get(&y[0], e), want, half * fabs(want) + size));
        CHECK(test_near(test_get(&y[0], e + 1), want1, half * fabs(want1) + size));
        CHECK(test_near(test_get(&back[0], e), a, 4 * half * (fabs(a) + fabs(b)) + size));
        CHECK(test_near(test_get(&back[0], e + 1), b, 4 * half * (fabs(a) + fabs(b)) + size));
      }
    }
    for (int k = 0; k < 3; k++) drop(y[k]), drop(back[k]);
    drop(x), free(table);
  }
}

/* ---- embedding ----------------------------------------------------------- */
TEST(embedding) {
  enum { VOCAB = 300 };
  static int32_t tokens[70];
  for (int i = 0; i < 70; i++) tokens[i] = (int32_t)(test_uniform(3, i) * (i % 3 ? VOCAB : 4)); /* many repeats */
  tokens[0] = VOCAB - 1, tokens[1] = 0;
  for (int i = 0; i < 2 * SHAPES; i++) {
    enum dtype t = test_types[i % 2];
    struct shape s = shapes[i / 2];
    struct matrix table = test_random(i % 3 ? t : DTYPE_F32, VOCAB, s.cols, 900, 1.0), x = test_matrix(t, s.rows, s.cols);
    cpu_embedding_forward(dev[i % 3], &x, &table, tokens);
    struct matrix want = test_matrix(t, s.rows, s.cols);
    for (int64_t e = 0; e < s.rows * s.cols; e++)
      test_set(&want, e, test_get(&table, tokens[e / s.cols] * s.cols + e % s.cols));
    CHECK(test_same(&x, &want));

    struct matrix sums = filled(DTYPE_F32, VOCAB, s.cols, 0.125);
    for (int64_t e = 0; e < s.rows * s.cols; e++)
      ((float *)sums.data)[tokens[e / s.cols] * s.cols + e % s.cols] += (float)test_get(&x, e);
    for (int k = 0; k < 3; k++) {
      struct matrix d_table = filled(DTYPE_F32, VOCAB, s.cols, 0.125), rounded = filled(DTYPE_BF16, VOCAB, s.cols, 0.125);
      cpu_embedding_backward(dev[k], &d_table, &x, tokens);
      cpu_embedding_backward(dev[k], &rounded, &x, tokens);
      CHECK(test_same(&d_table, &sums) && is_rounding_of(&rounded, &sums));
      drop(d_table), drop(rounded);
    }
    drop(table), drop(x), drop(want), drop(sums);
  }
}

/* ---- emission ------------------------------------------------------------ */
static struct operand packed(enum view view, enum rounding rounding, int64_t rows, int64_t cols) {
  struct encoding e = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, rounding, HADAMARD_NONE, 0};
  if (view == VIEW_COLUMN) { /* contracted over the source's rows */
    int64_t swap = rows;
    rows = cols, cols = swap;
  }
  struct operand o = {.encoding = e, .view = view, .rows = rows, .cols = cols};
  o.codes = test_memory((size_t)operand_code_bytes(&e, rows, cols));
  o.scales = test_memory((size_t)operand_scale_bytes(&e, rows, cols));
  return o;
}

static bool packed_same(const struct operand *a, const struct operand *b) {
  return memcmp(a->codes, b->codes, (size_t)operand_code_bytes(&a->encoding, a->rows, a->cols)) == 0 &&
         memcmp(a->scales, b->scales, (size_t)operand_scale_bytes(&a->encoding, a->rows, a->cols)) == 0;
}

struct emitted {
  struct operand row, column;
  struct quantise_counts counts[2];
  struct emission emission;
};

static struct emitted *emitted(enum rounding rounding, int64_t rows, int64_t cols) {
  struct emitted *e = test_memory(sizeof *e);
  e->row = packed(VIEW_ROW, rounding, rows, cols);
  e->column = packed(VIEW_COLUMN, ROUND_NEAREST, rows, cols);
  e->emission = (struct emission){.row = &e->row, .column = &e->column, .counts = e->counts};
  e->emission.draw = (struct draw){.seed = 5, .update = 3, .first_sample = 9, .seq_len = 32, .layer = 2, .operand = 1};
  return e;
}

/* `e` came without a plain result; quantising the plain one must give the same. */
static void check_emitted(struct emitted *e, enum rounding rounding, const struct matrix *plain) {
  struct emitted *want = emitted(rounding, plain->rows, plain->cols);
  cpu_quantise(dev[0], &want->emission, plain);
  CHECK(packed_same(&e->row, &want->row) && packed_same(&e->column, &want->column));
  CHECK(memcmp(e->counts, want->counts, sizeof e->counts) == 0 && e->counts[0].elements == plain->rows * plain->cols);
  struct emitted *both[] = {e, want};
  for (int i = 0; i < 2; i++) {
    free(both[i]->row.codes), free(both[i]->row.scales), free(both[i]->column.codes), free(both[i]->column.scales);
    free(both[i]);
  }
}

TEST(operands_are_those_of_the_rounded_result) {
  enum { ROWS = 64, COLS = 96 };
  struct norm_case f = norm_case(DTYPE_BF16, (struct shape){ROWS, COLS}, 21);
  norm_run(dev[0], &f);
  struct emitted *e = emitted(ROUND_NEAREST, ROWS, COLS);
  cpu_add_rmsnorm_forward(dev[2], &e->emission, &f.residual_out, f.rstd, &f.residual, &f.delta, &f.gain, 1e-5f);
  check_emitted(e, ROUND_NEAREST, &f.out);

  struct matrix dy = test_random(DTYPE_BF16, ROWS, COLS, 22, 1.0), dx = test_matrix(DTYPE_BF16, ROWS, COLS);
  struct matrix d_gain = test_matrix(DTYPE_F32, 1, COLS);
  cpu_add_rmsnorm_backward(dev[0], &(struct emission){.plain = &dx}, &d_gain, &dy, &f.delta, &f.residual_out, f.rstd,
                           &f.gain);
  e = emitted(ROUND_STOCHASTIC, ROWS, COLS);
  cpu_add_rmsnorm_backward(dev[2], &e->emission, &d_gain, &dy, &f.delta, &f.residual_out, f.rstd, &f.gain);
  check_emitted(e, ROUND_STOCHASTIC, &dx);

  struct matrix gate_up = test_random(DTYPE_BF16, ROWS, 2 * COLS, 23, 2.0), wide = test_matrix(DTYPE_BF16, ROWS, 2 * COLS);
  cpu_swiglu_forward(dev[0], &(struct emission){.plain = &dx}, &gate_up);
  e = emitted(ROUND_NEAREST, ROWS, COLS);
  cpu_swiglu_forward(dev[1], &e->emission, &gate_up);
  check_emitted(e, ROUND_NEAREST, &dx);
  cpu_swiglu_backward(dev[0], &(struct emission){.plain = &wide}, &dy, &gate_up);
  e = emitted(ROUND_STOCHASTIC, ROWS, 2 * COLS);
  cpu_swiglu_backward(dev[2], &e->emission, &dy, &gate_up);
  check_emitted(e, ROUND_STOCHASTIC, &wide);

  struct attention_shape s = {2, 32, 2, 2, 32};
  static float table[32 * 32];
  rope_table(table, 32, 32, 10000.0, NULL);
  cpu_rope_backward(dev[0], &(struct emission){.plain = &wide}, &gate_up, table, &s);
  e = emitted(ROUND_STOCHASTIC, ROWS, 2 * COLS);
  cpu_rope_backward(dev[1], &e->emission, &gate_up, table, &s);
  check_emitted(e, ROUND_STOCHASTIC, &wide);
  drop(dy), drop(dx), drop(gate_up), drop(wide), drop(d_gain);
  norm_drop(&f);
}

/* ---- bits ---------------------------------------------------------------- */
TEST(bits_are_fixed) {
  static const uint64_t expected[2][4] = {
      {0x77633f858166052eu, 0x4549bba0bcbf43fbu, 0x6e26698d08d1f937u, 0x679c20d7f09e4f1cu},
      {0x17a81eb8517e9d34u, 0x854dde80e32fc47eu, 0x19ccefe35f0441afu, 0x4dd5912cc137d075u}};
  for (int i = 0; i < 2; i++) {
    enum dtype t = test_types[i];
    struct norm_case f = norm_case(t, (struct shape){45, 1000}, 1);
    norm_run(dev[1], &f);
    uint64_t h = test_hash_matrix(test_hash(TEST_HASH_START, f.rstd, 45, 4), &f.out);
    CHECK_HASH(test_hash_matrix(h, &f.residual_out), expected[i][0]);

    struct matrix dy = test_random(t, 45, 1000, 2, 1.0), dx = test_matrix(t, 45, 1000);
    struct matrix d_gain = test_matrix(DTYPE_F32, 1, 1000);
    cpu_add_rmsnorm_backward(dev[1], &(struct emission){.plain = &dx}, &d_gain, &dy, &f.residual, &f.residual_out,
                             f.rstd, &f.gain);
    CHECK_HASH(test_hash_matrix(test_hash_matrix(TEST_HASH_START, &d_gain), &dx), expected[i][1]);

    struct matrix act = test_matrix(t, 45, 500), d_gate_up = test_matrix(t, 45, 1000);
    cpu_swiglu_forward(dev[1], &(struct emission){.plain = &act}, &f.residual);
    cpu_swiglu_backward(dev[1], &(struct emission){.plain = &d_gate_up}, &act, &dy);
    CHECK_HASH(test_hash_matrix(test_hash_matrix(TEST_HASH_START, &act), &d_gate_up), expected[i][2]);

    struct attention_shape s = {3, 15, 8, 1, 100};
    float *table = test_memory(15 * 100 * sizeof *table);
    rope_table(table, 15, 100, 500000.0, NULL);
    cpu_rope_forward(dev[1], &dy, NULL, NULL, table, &s);
    cpu_rope_backward(dev[1], &(struct emission){.plain = &dx}, &f.residual, table, &s);
    CHECK_HASH(test_hash_matrix(test_hash_matrix(TEST_HASH_START, &dy), &dx), expected[i][3]);
    drop(dy), drop(dx), drop(d_gain), drop(act), drop(d_gate_up), free(table);
    norm_drop(&f);
  }
}

int main(void) {
  for (int k = 0; k < 3; k++) dev[k] = test_device(k + 1, &extent);
  RUN(rmsnorm_forward);
  RUN(rmsnorm_forward_modes_agree);
  RUN(rmsnorm_forward_cast);
  RUN(rmsnorm_extremes);
  RUN(rmsnorm_backward_is_the_derivative);
  RUN(rmsnorm_backward);
  RUN(swiglu);
  RUN(swiglu_extremes);
  RUN(rope);
  RUN(embedding);
  RUN(operands_are_those_of_the_rounded_result);
  RUN(bits_are_fixed);
  for (int k = 0; k < 3; k++) test_device_close(dev[k]);
  return test_report();
}
