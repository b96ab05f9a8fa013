/* What quantisers, transforms and the contraction promise together, on the
 * three contractions of a linear of two arms:
 *   Y = X W^T,  dX = dY W,  dW = dY^T X     X [M, K], W [N, K], dY [M, N] */
#include "kernels/cpu/whole.h"
#include "tests/cpu_literal.h"

enum { M = 160, K = 288, ARM = 144, N = 2 * ARM };

static struct matrix gaussian(int64_t rows, int64_t cols) {
  struct matrix m = test_matrix(DTYPE_BF16, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) test_set(&m, i, normal());
  return m;
}

static struct cpu_device device;

static void open_device(void) {
  struct error e;
  device.threads = threads_create(2, &e);
  device.scratch_bytes = cpu_contract_scratch_bytes(NULL, 2);
  device.scratch = test_memory((size_t)device.scratch_bytes);
  if (!device.threads) exit(1);
}

/* ---- a linear's operands ------------------------------------------------------------ */

enum role { X_ROW, X_COLUMN, W_ROW, W_COLUMN, DY_ROW, DY_COLUMN, ROLES };

/* What a route takes for each. */
typedef struct encoding linear_encodings[ROLES];

static const struct encoding PLAIN = {.format = FORMAT_BF16};

static void all_plain(linear_encodings e) {
  for (int i = 0; i < ROLES; i++) e[i] = PLAIN;
}
static void all_local(linear_encodings e, enum scale_rule rule, enum hadamard h) {
  const struct encoding rows = {FORMAT_NVFP4_LOCAL, BLOCK_1X16, rule, ROUND_NEAREST, HADAMARD_NONE, 128};
  for (int i = 0; i < ROLES; i++) e[i] = rows;
  e[W_ROW].block = e[W_COLUMN].block = BLOCK_2D16;
  e[W_ROW].strip = e[W_COLUMN].strip = 0;
  e[DY_ROW].rounding = ROUND_STOCHASTIC;
  e[X_COLUMN].hadamard = e[DY_COLUMN].hadamard = h;
}
static void all_nvfp4(linear_encodings e, enum hadamard h) {
  for (int i = 0; i < ROLES; i++) e[i] = (struct encoding){FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0};
  e[W_ROW].block = e[W_COLUMN].block = BLOCK_2D16;
  e[DY_ROW].rounding = ROUND_STOCHASTIC;
  e[X_COLUMN].hadamard = e[DY_COLUMN].hadamard = h;
}
static void all_mxfp4(linear_encodings e, enum hadamard h) {
  for (int i = 0; i < ROLES; i++) e[i] = (struct encoding){FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE, 0};
  e[W_ROW].block = e[W_COLUMN].block = BLOCK_2D32;
  e[W_ROW].scale = e[W_COLUMN].scale = SCALE_MX_ADAPTIVE;
  e[DY_ROW].rounding = ROUND_STOCHASTIC;
  e[X_COLUMN].hadamard = e[DY_COLUMN].hadamard = h;
}

struct linear {
  struct matrix x, w, dy;
  struct operand o[ROLES];
};

static struct linear linear_of(struct matrix (*values)(int64_t rows, int64_t cols)) {
  struct linear l = {0};
  l.x = values(M, K);
  l.w = values(N, K);
  l.dy = values(M, N);
  return l;
}
static void linear_free(struct linear *l) {
  free(l->x.data);
  free(l->w.data);
  free(l->dy.data);
}

static struct operand operand_new(const struct encoding *e, enum role role, const struct matrix *m) {
  const bool row = role % 2 == 0;
  if (e->format == FORMAT_BF16) return operand_of_matrix(m, row ? VIEW_ROW : VIEW_COLUMN);
  struct operand o = {.encoding = *e, .view = row ? VIEW_ROW : VIEW_COLUMN, .strip = e->strip};
  o.rows = row ? m->rows : m->cols;
  o.cols = row ? m->cols : m->rows;
  if (e->format == FORMAT_NVFP4_LOCAL) { /* outer factors by arm */
    if (role == W_ROW) o.strip = ARM;
    if (role == W_COLUMN || role == DY_ROW) o.segment = ARM;
  }
  o.codes = test_memory((size_t)operand_code_bytes(e, o.rows, o.cols));
  o.scales = test_memory((size_t)operand_scale_bytes(e, o.rows, o.cols));
  if (operand_outer_count(&o)) o.outer = test_memory((size_t)operand_outer_count(&o) * sizeof *o.outer);
  return o;
}

static void quantise(struct linear *l, const linear_encodings e, uint64_t seed) {
  const struct draw draw = {.seed = seed, .update = 1, .seq_len = 80, .operand = DRAW_DY_GATE_UP};
  const struct matrix *source[3] = {&l->x, &l->w, &l->dy};
  for (int i = 0; i < ROLES; i += 2) {
    l->o[i] = operand_new(&e[i], (enum role)i, source[i / 2]);
    l->o[i + 1] = operand_new(&e[i + 1], (enum role)(i + 1), source[i / 2]);
    if (e[i].format == FORMAT_BF16) continue;
    const struct emission out = {.row = &l->o[i], .column = &l->o[i + 1], .draw = draw};
    cpu_quantise(&device.device, &out, source[i / 2]);
  }
}
static void linear_drop(struct linear *l) {
  for (int i = 0; i < ROLES; i++) {
    if (l->o[i].encoding.format == FORMAT_BF16) continue;
    free(l->o[i].codes);
    free(l->o[i].scales);
    free(l->o[i].outer);
  }
}

enum product { FPROP, DGRAD, WGRAD, PRODUCTS };

static struct matrix contract(const struct operand *a, const struct operand *b) {
  struct matrix out = test_matrix(DTYPE_F32, a->rows, b->rows);
  cpu_contract(&device.device, &out, a, b, NULL);
  return out;
}
static struct matrix product_of(const struct linear *l, enum product p) {
  switch (p) {
    case FPROP: return contract(&l->o[X_ROW], &l->o[W_ROW]);
    case DGRAD: return contract(&l->o[DY_ROW], &l->o[W_COLUMN]);
    default: return contract(&l->o[DY_COLUMN], &l->o[X_COLUMN]);
  }
}

struct nearness {
  double relative, cosine, ratio;
};
static struct nearness nearness(const struct matrix *got, const struct matrix *want) {
  double error = 0, square = 0, norm = 0, dot = 0;
  for (int64_t i = 0; i < want->rows * want->cols; i++) {
    const double g = test_get(got, i), w = test_get(want, i);
    error += (g - w) * (g - w);
    square += g * g;
    norm += w * w;
    dot += g * w;
  }
  return (struct nearness){sqrt(error / norm), dot / sqrt(square * norm), sqrt(square / norm)};
}

/* ---- exact data ------------------------------------------------------------------------- */

/* Elements are E2M1 values times 2^0..2^3, one power a 16x16 tile, whose
 * diagonal has the largest code: every block along rows or columns, and every
 * tile, encodes exactly.  Chunks and strips have powers of their own beside. */
static struct matrix exact_matrix(int64_t rows, int64_t cols) {
  struct matrix m = test_matrix(DTYPE_BF16, rows, cols);
  for (int64_t r0 = 0; r0 < rows; r0 += 16)
    for (int64_t c0 = 0; c0 < cols; c0 += 16) {
      const int power = (int)(next() % 2) + (r0 >= 128) + (c0 >= 144);
      for (int64_t r = 0; r < 16; r++)
        for (int64_t c = 0; c < 16; c++) {
          const double level = r == c ? 6 : LEVEL[next() % 8];
          test_set(&m, (r0 + r) * cols + c0 + c, ldexp(next() % 2 ? level : -level, power));
        }
    }
  return m;
}

/* LC-P2 on such data: outer factors times an exact integer sum, to the bit, in all
 * three contractions (grid values do not move when rounded stochastically). */
TEST(exact_on_exact_data) {
  linear_encodings e;
  all_local(e, SCALE_LOCAL_POW2, HADAMARD_NONE);
  struct linear l = linear_of(exact_matrix);
  quantise(&l, e, 1);
  CHECK(l.o[DY_ROW].outer[0] != l.o[DY_ROW].outer[1]); /* the arms' */
  for (int p = 0; p < PRODUCTS; p++) {
    const struct matrix got = product_of(&l, (enum product)p);
    int64_t wrong = 0;
    for (int64_t i = 0; i < got.rows; i++)
      for (int64_t j = 0; j < got.cols; j++) {
        double sum = 0;
        if (p == FPROP)
          for (int64_t k = 0; k < K; k++) sum += test_get(&l.x, i * K + k) * test_get(&l.w, j * K + k);
        else if (p == DGRAD)
          for (int64_t n = 0; n < N; n++) sum += test_get(&l.dy, i * N + n) * test_get(&l.w, n * K + j);
        else
          for (int64_t m = 0; m < M; m++) sum += test_get(&l.dy, m * N + i) * test_get(&l.x, m * K + j);
        wrong += test_get(&got, i * got.cols + j) != sum;
      }
    CHECK_EQ_I64(wrong, 0);
    free(got.data);
  }
  linear_drop(&l);
  linear_free(&l);
}

/* ---- transforms ----------------------------------------------------------------------------- */

/* The column view of m after the transform, as a plain matrix. */
static struct matrix transformed(const struct matrix *m, enum hadamard h) {
  struct matrix t = test_matrix(DTYPE_BF16, m->cols, m->rows);
  uint16_t bits[PANEL_ELEMENTS];
  struct panel p = {.rows = PANEL_ROWS};
  for (; p.first_row < t.rows; p.first_row += PANEL_ROWS)
    for (p.first_col = 0; p.first_col < t.cols; p.first_col += PANEL_COLS) {
      p.cols = t.cols - p.first_col < PANEL_COLS ? t.cols - p.first_col : PANEL_COLS;
      panels_load(bits, m, VIEW_COLUMN, h, &p);
      for (int64_t r = 0; r < PANEL_ROWS; r++)
        for (int64_t c = 0; c < p.cols; c++)
          ((uint16_t *)t.data)[(p.first_row + r) * t.cols + p.first_col + c] = bits[c * PANEL_ROWS + r];
    }
  return t;
}

/* Without a quantiser: the product of transformed operands is the product, but
 * for their rounding to BF16; that of one transformed operand is another thing. */
TEST(paired_transforms_cancel) {
  const struct matrix x = gaussian(M, K), dy = gaussian(M, N);
  const struct operand plain_x = operand_of_matrix(&x, VIEW_COLUMN), plain_dy = operand_of_matrix(&dy, VIEW_COLUMN);
  const struct matrix want = contract(&plain_dy, &plain_x);
  for (int h = HADAMARD_PLAIN_16; h <= HADAMARD_SIGNED_32; h++) {
    const struct matrix hx = transformed(&x, (enum hadamard)h), hdy = transformed(&dy, (enum hadamard)h);
    const struct operand a = operand_of_matrix(&hdy, VIEW_ROW), b = operand_of_matrix(&hx, VIEW_ROW);
    const struct matrix both = contract(&a, &b), one = contract(&a, &plain_x), other = contract(&plain_dy, &b);
    CHECK(nearness(&both, &want).relative < 0x1p-8);
    CHECK(nearness(&one, &want).relative > .9);
    CHECK(nearness(&other, &want).relative > .9);
    free(both.data);
    free(one.data);
    free(other.data);
    free(hx.data);
    free(hdy.data);
  }
  free(want.data);
  free(x.data);
  free(dy.data);
}

/* ---- routes ------------------------------------------------------------------------------------ */

static void encodings_of(linear_encodings e, int route, enum hadamard h) {
  switch (route) {
    case 0: all_local(e, SCALE_LOCAL_FAITHFUL, h); break;
    case 1: all_local(e, SCALE_LOCAL_POW2, h); break;
    case 2: all_nvfp4(e, h); break;
    default: all_mxfp4(e, h); break;
  }
}
enum { ROUTES = 4 };

/* Against BF16, on normal numbers: Fprop, Dgrad (stochastic) and Wgrad of every
 * format with every transform that it takes; one transformed operand fails. */
TEST(contractions_are_near) {
  struct linear l = linear_of(gaussian);
  linear_encodings e;
  all_plain(e);
  quantise(&l, e, 1);
  struct matrix want[PRODUCTS];
  for (int p = 0; p < PRODUCTS; p++) want[p] = product_of(&l, (enum product)p);
  linear_drop(&l);
  for (int route = 0; route < ROUTES; route++)
    for (int h = HADAMARD_NONE; h <= HADAMARD_SIGNED_32; h++) {
      encodings_of(e, route, (enum hadamard)h);
      quantise(&l, e, 1);
      for (int p = 0; p < PRODUCTS; p++) {
        const struct matrix got = product_of(&l, (enum product)p);
        const struct nearness n = nearness(&got, &want[p]);
        CHECK(n.relative < .25 && n.cosine > .96 && n.ratio > .8 && n.ratio < 1.2);
        free(got.data);
      }
      linear_drop(&l);
      if (h == HADAMARD_NONE) continue;
      e[X_COLUMN].hadamard = HADAMARD_NONE;
      quantise(&l, e, 1);
      const struct matrix got = product_of(&l, WGRAD);
      CHECK(nearness(&got, &want[WGRAD]).relative > .9);
      free(got.data);
      linear_drop(&l);
    }
  for (int p = 0; p < PRODUCTS; p++) free(want[p].data);
  linear_free(&l);
}

/* Another seed changes the codes of dY's row view and no other byte. */
TEST(seeds_reach_the_row_view_alone) {
  struct linear a = linear_of(gaussian), b = a;
  for (int route = 0; route < ROUTES; route++) {
    linear_encodings e;
    encodings_of(e, route, HADAMARD_SIGNED_16);
    quantise(&a, e, 1);
    quantise(&b, e, 2);
    for (int i = 0; i < ROLES; i++) {
      const struct operand *p = &a.o[i], *q = &b.o[i];
      const size_t codes = (size_t)operand_code_bytes(&p->encoding, p->rows, p->cols);
      CHECK((memcmp(p->codes, q->codes, codes) == 0) == (i != DY_ROW));
      CHECK(memcmp(p->scales, q->scales, (size_t)operand_scale_bytes(&p->encoding, p->rows, p->cols)) == 0);
      CHECK(!p->outer || memcmp(p->outer, q->outer, (size_t)operand_outer_count(p) * sizeof(float)) == 0);
    }
    linear_drop(&a);
    linear_drop(&b);
  }
  linear_free(&a);
}

/* Zeros in, zeros out: strips of zeros, and whole operands of them. */
TEST(zeros_contract_to_zeros) {
  for (int route = 0; route < ROUTES; route++) {
    struct linear l = linear_of(gaussian);
    memset((uint16_t *)l.dy.data + 128 * N, 0, (M - 128) * N * sizeof(uint16_t));
    memset(l.x.data, 0, M * K * sizeof(uint16_t));
    linear_encodings e;
    encodings_of(e, route, HADAMARD_NONE);
    quantise(&l, e, 1);
    for (int p = 0; p < PRODUCTS; p++) {
      const struct matrix got = product_of(&l, (enum product)p);
      int64_t wrong = 0;
      for (int64_t i = p == DGRAD ? 128 * K : 0; i < got.rows * got.cols; i++) wrong += !(test_get(&got, i) == 0);
      CHECK_EQ_I64(wrong, 0);
      free(got.data);
    }
    linear_drop(&l);
    linear_free(&l);
  }
}

int main(void) {
  open_device();
  RUN(exact_on_exact_data);
  RUN(paired_transforms_cancel);
  RUN(contractions_are_near);
  RUN(seeds_reach_the_row_view_alone);
  RUN(zeros_contract_to_zeros);
  threads_destroy(device.threads);
  free(device.scratch);
  return test_report();
}
