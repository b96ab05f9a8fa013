/* `contract` on the CUDA backends.  On the host model cuBLASLt is a double, which is
 * what layouts, types and choices are tested against; on a GPU it is the library. */
#include "tests/cuda_rig.h"

#ifdef FP4D_CUDA_MODEL
#include "tests/cublaslt_double.h"
/* The model's own `contract` is the CPU's. */
#define cuda_contract gemm_contract
#define cuda_contract_open gemm_open
#define cuda_contract_close gemm_close
#define cuda_contract_describe gemm_describe
#define cuda_contract_choices gemm_choices
#define cuda_contract_scratch_bytes gemm_scratch_bytes
extern "C" {
void gemm_contract(struct device *d, struct matrix *out, const struct operand *a, const struct operand *b, const struct matrix *add);
bool gemm_open(struct cuda_device *d, struct error *e);
void gemm_close(struct cuda_device *d);
void gemm_describe(const struct cuda_device *d, char *text, int size);
void gemm_choices(const struct device *d, void (*take)(void *context, const char *contraction, const char *choice), void *context);
int64_t gemm_scratch_bytes(const struct cuda_device *d, const struct extent *x);
}
#include "kernels/cuda/gemm.cu"
#endif

static const struct extent extents = {64, 32, {2, 32, 4, 2, 24}, 96, 160, 100, {}};

/* A device whose `contract` is gemm.cu's. */
struct subject {
  struct rig r;
  struct cuda_gemm *models;
};

static struct subject open_subject() {
  struct subject s = {};
#ifdef FP4D_CUDA_MODEL
  struct error e = {};
  s.r = rig_open("sm90", &extents);
  struct cuda_device *d = cuda_of(s.r.gpu);
  s.models = d->gemm;
  d->gemm = NULL;
  if (!gemm_open(d, &e)) rig_end(&e);
  const int64_t bytes = gemm_scratch_bytes(d, &extents);
  rig_drop(&s.r, s.r.gpu_scratch);
  s.r.gpu_scratch = rig_put(&s.r, NULL, static_cast<size_t>(bytes));
  s.r.gpu->k->set_scratch(s.r.gpu, s.r.gpu_scratch, bytes);
#else
  s.r = rig_open("sm90", &extents);
#endif
  return s;
}

static void close_subject(struct subject *s) {
#ifdef FP4D_CUDA_MODEL
  struct cuda_device *d = cuda_of(s->r.gpu);
  gemm_close(d);
  CHECK_EQ_I64(double_seen.descriptors, 0);
  d->gemm = s->models;
#endif
  rig_close(&s->r);
}

static void contract(struct subject *s, struct matrix *out, const struct operand *a, const struct operand *b, const struct matrix *add) {
#ifdef FP4D_CUDA_MODEL
  gemm_contract(s->r.gpu, out, a, b, add);
#else
  s->r.gpu->k->contract(s->r.gpu, out, a, b, add);
#endif
}

/* Whole numbers of -most..most, most 6 or less: every sum is exact in FP32, in any order. */
static struct matrix integers_of(enum dtype t, int64_t rows, int64_t cols, int key, int most) {
  struct matrix m = rig_matrix(t, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) rig_set(&m, i, (double)((i * 37 + i / cols * 11 + key) % (2 * most + 1)) - most);
  return m;
}
static struct matrix integers(enum dtype t, int64_t rows, int64_t cols, int key) { return integers_of(t, rows, cols, key, 6); }

enum addend { ADD_NONE, ADD_OUT, ADD_SAME_TYPE, ADD_F32, ADDENDS };

struct product_case {
  int64_t m, n, k;
  enum dtype operands, out;
  enum view view_a, view_b;
  enum addend add;
};

/* The library may round a product to BF16 before it adds it to what out holds. */
static bool rounds_twice(const struct product_case *c) { return c->out == DTYPE_BF16 && c->add == ADD_OUT; }

/* The CPU's bits of an exact product: of one that BF16 holds too, where it may be rounded in between. */
static void check_exact(struct subject *s, const struct product_case *c) {
  const int most = rounds_twice(c) ? 1 : 6;
  struct matrix a = integers_of(c->operands, c->view_a == VIEW_ROW ? c->m : c->k, c->view_a == VIEW_ROW ? c->k : c->m, 1, most);
  struct matrix b = integers_of(c->operands, c->view_b == VIEW_ROW ? c->n : c->k, c->view_b == VIEW_ROW ? c->k : c->n, 5, most);
  struct matrix before = integers(c->out, c->m, c->n, 3), addend = integers(c->add == ADD_F32 ? DTYPE_F32 : c->out, c->m, c->n, 7);
  struct matrix want = rig_matrix(c->out, c->m, c->n);
  memcpy(want.data, before.data, rig_bytes(&before));
  struct operand wa = operand_of_matrix(&a, c->view_a), wb = operand_of_matrix(&b, c->view_b);
  s->r.cpu->k->contract(s->r.cpu, &want, &wa, &wb, c->add == ADD_NONE ? NULL : c->add == ADD_OUT ? &want : &addend);

  struct matrix da = rig_matrix_put(&s->r, &a), db = rig_matrix_put(&s->r, &b), dout = rig_matrix_put(&s->r, &before),
                dadd = rig_matrix_put(&s->r, &addend);
  struct operand oa = operand_of_matrix(&da, c->view_a), ob = operand_of_matrix(&db, c->view_b);
  contract(s, &dout, &oa, &ob, c->add == ADD_NONE ? NULL : c->add == ADD_OUT ? &dout : &dadd);
  struct matrix got = rig_matrix_get(&s->r, &dout);
  char what[100];
  snprintf(what, sizeof what, "[%d, %d, %d] %s to %s, views %d %d, add %d", (int)c->m, (int)c->n, (int)c->k, dtype_name(c->operands),
           dtype_name(c->out), c->view_a, c->view_b, c->add);
  rig_same(what, &got, &want);
  for (const struct matrix *m : {&da, &db, &dout, &dadd}) rig_drop(&s->r, m->data);
  for (const struct matrix *m : {&a, &b, &before, &addend, &want, &got}) free(m->data);
}

static const enum dtype types[] = {DTYPE_F32, DTYPE_BF16};
static const enum view views[] = {VIEW_ROW, VIEW_COLUMN};

/* Multiples of 8, as the library's tensor-core kernels want them, and not. */
TEST(every_type_view_and_addend) {
  struct subject s = open_subject();
  static const int64_t shapes[][3] = {{96, 64, 128}, {64, 200, 40}, {5, 7, 9}, {1, 33, 2}};
  for (const auto &shape : shapes)
    for (enum dtype operands : types)
      for (enum dtype out : types)
        for (enum view view_a : views)
          for (enum view view_b : views)
            for (int add = 0; add < ADDENDS; add++) {
              const struct product_case c = {shape[0], shape[1], shape[2], operands, out, view_a, view_b, static_cast<enum addend>(add)};
              check_exact(&s, &c);
            }
  close_subject(&s);
}

/* out += A B^T in BF16 is rounded once, or the product before it too; nothing else. */
TEST(sums_in_place_are_rounded_twice_at_most) {
  struct subject s = open_subject();
  static const int64_t shapes[][3] = {{96, 64, 128}, {64, 200, 40}, {256, 512, 1024}, {5, 7, 9}};
  for (const auto &x : shapes)
    for (enum view view_a : views)
      for (enum view view_b : views) {
        struct matrix a = integers(DTYPE_BF16, view_a == VIEW_ROW ? x[0] : x[2], view_a == VIEW_ROW ? x[2] : x[0], 1);
        struct matrix b = integers(DTYPE_BF16, view_b == VIEW_ROW ? x[1] : x[2], view_b == VIEW_ROW ? x[2] : x[1], 5);
        struct matrix before = integers(DTYPE_BF16, x[0], x[1], 3), product = rig_matrix(DTYPE_F32, x[0], x[1]);
        struct operand oa = operand_of_matrix(&a, view_a), ob = operand_of_matrix(&b, view_b);
        s.r.cpu->k->contract(s.r.cpu, &product, &oa, &ob, NULL);
        struct matrix da = rig_matrix_put(&s.r, &a), db = rig_matrix_put(&s.r, &b), out = rig_matrix_put(&s.r, &before);
        oa = operand_of_matrix(&da, view_a), ob = operand_of_matrix(&db, view_b);
        contract(&s, &out, &oa, &ob, &out);
        struct matrix got = rig_matrix_get(&s.r, &out);
        int wrong = 0;
        for (int64_t i = 0; i < x[0] * x[1]; i++) {
          const float p = static_cast<const float *>(product.data)[i], c = (float)rig_value(&before, i);
          const uint16_t once = bf16_encode(p + c), twice = bf16_encode(bf16_decode(bf16_encode(p)) + c), is = static_cast<const uint16_t *>(got.data)[i];
          if (is != once && is != twice && !wrong++)
            FAIL("[%d, %d, %d], views %d %d: element %d is %g, not %g + %g rounded", (int)x[0], (int)x[1], (int)x[2], view_a, view_b, (int)i,
                 (double)bf16_decode(is), (double)p, (double)c);
        }
        for (const struct matrix *m : {&da, &db, &out}) rig_drop(&s.r, m->data);
        for (const struct matrix *m : {&a, &b, &before, &product, &got}) free(m->data);
      }
  close_subject(&s);
}

/* BF16 results of FP32 sums, in more than one piece. */
TEST(results_by_way_of_fp32_in_pieces) {
  struct subject s = open_subject();
  for (enum view view_a : views) {
    const struct product_case c = {2051, 4096, 2, DTYPE_F32, DTYPE_BF16, view_a, VIEW_ROW, ADD_OUT};
    check_exact(&s, &c);
  }
  close_subject(&s);
}

#ifdef FP4D_CUDA_MODEL
/* Once for a product; anew after as many others as are kept, with nothing lost. */
TEST(choices_are_kept) {
  struct subject s = open_subject();
  double_seen = {double_seen.descriptors, 0, 0};
  struct product_case c = {8, 8, 8, DTYPE_BF16, DTYPE_BF16, VIEW_ROW, VIEW_ROW, ADD_NONE};
  check_exact(&s, &c);
  check_exact(&s, &c);
  CHECK_EQ_I64(double_seen.heuristics, 1);
  CHECK_EQ_I64(double_seen.products, 2);
  c.add = ADD_OUT;
  check_exact(&s, &c);
  CHECK_EQ_I64(double_seen.heuristics, 2);
  for (c.m = 1; c.m <= 2 * PRODUCTS; c.m++) check_exact(&s, &c);
  c.add = ADD_NONE;
  c.m = 8;
  check_exact(&s, &c);
  CHECK_EQ_I64(double_seen.heuristics, 2 + 2 * PRODUCTS);
  CHECK_EQ_I64(double_seen.descriptors, 4 * PRODUCTS);
  close_subject(&s);
}

struct said {
  int n;
  char contraction[16][512], choice[512];
};

static void note(void *context, const char *contraction, const char *choice) {
  struct said *s = static_cast<struct said *>(context);
  snprintf(s->contraction[s->n++], sizeof s->contraction[0], "%s", contraction);
  snprintf(s->choice, sizeof s->choice, "%s", choice);
}

/* Each product under a name of its own, with all that the library has of its algorithm; a second device says the same. */
TEST(choices_are_told) {
  struct said said[2] = {};
  for (struct said &one : said) {
    struct subject s = open_subject();
    gemm_choices(s.r.gpu, note, &one);
    CHECK_EQ_I64(one.n, 0);
    const struct product_case plain = {8, 24, 16, DTYPE_BF16, DTYPE_F32, VIEW_ROW, VIEW_COLUMN, ADD_NONE};
    check_exact(&s, &plain);
    for (int i = 0; i < 9; i++) {
      struct product_case c = plain;
      if (i < 3) *(i == 0 ? &c.m : i == 1 ? &c.n : &c.k) *= 2;
      if (i == 3) c.operands = DTYPE_F32;
      if (i == 4) c.out = DTYPE_BF16;
      if (i == 5) c.view_a = VIEW_COLUMN;
      if (i == 6) c.view_b = VIEW_ROW;
      if (i > 6) c.add = i == 7 ? ADD_OUT : ADD_SAME_TYPE;
      check_exact(&s, &c);
    }
    gemm_choices(s.r.gpu, note, &one);
    close_subject(&s);
  }
  CHECK_EQ_I64(said[0].n, 10);
  for (int i = 0; i < 10; i++) {
    CHECK_STR(said[0].contraction[i], said[1].contraction[i]);
    for (int j = 0; j < i; j++) CHECK(strcmp(said[0].contraction[i], said[0].contraction[j]) != 0);
  }
  CHECK_STR(said[0].contraction[0], "bf16 [8, 24, 16] row x column to fp32");
  CHECK_STR(said[0].contraction[8], "bf16 [8, 24, 16] row x column to fp32, added to it");
  CHECK_STR(said[0].choice, said[1].choice);
  const char *const from = strchr(said[0].choice, ':');
  CHECK(strncmp(said[0].choice, "cuBLASLt 13.1.2 on ", 19) == 0 && from);
  CHECK_STR(from, ": algorithm 100, tile 20, stages 106, splits of K 102, scheme 103, swizzle 104, option 105, inner shape 107, cluster 108, 33554432 bytes");
}

/* Part of a larger matrix is another product, by its rows and by its alignment. */
TEST(names_tell_leads_and_alignments) {
  char text[TEXT];
  struct cuda_product_key k = {8, 24, 16, 16, DTYPE_BF16, DTYPE_BF16, VIEW_ROW, VIEW_ROW, 1, 256, 256, 256, 256};
  product_text(&k, text);
  CHECK_STR(text, "bf16 [8, 24, 16] row x row to bf16, added to it");
  k.view_a = VIEW_COLUMN, k.lead_a = 32, k.align_out = 4;
  product_text(&k, text);
  CHECK_STR(text, "bf16 [8, 24, 16] column x row, of 32 rows to bf16, added to it, aligned to 256, 256, 256, 4 bytes");
}

/* Of what can be run: the preferred tile for a large BF16 product, else the heuristic's first. */
TEST(large_products_prefer_a_tile) {
  struct subject s = open_subject();
  const struct cuda_cublaslt *lt = cuda_of(s.r.gpu)->gemm->lt;
  cublasLtMatmulHeuristicResult_t found[4] = {};
  found[0].state = CUBLAS_STATUS_NOT_SUPPORTED, found[0].algo.tile = PREFERRED_TILE;
  found[1].algo.tile = CUBLASLT_MATMUL_TILE_128x128;
  found[2].algo.tile = PREFERRED_TILE, found[2].workspaceSize = WORKSPACE + 1;
  found[3].algo.tile = PREFERRED_TILE;
  struct cuda_product_key k = {LARGE, LARGE, LARGE, LARGE, DTYPE_BF16, DTYPE_BF16, VIEW_ROW, VIEW_ROW, 0, 256, 256, 256, 256};
  CHECK_EQ_I64(chosen(lt, &k, found, 4), 3);
  CHECK_EQ_I64(chosen(lt, &k, found, 3), 1);
  CHECK_EQ_I64(chosen(lt, &k, found, 1), -1);
  k.operands = DTYPE_F32;
  CHECK_EQ_I64(chosen(lt, &k, found, 4), 1);
  k.operands = DTYPE_BF16;
  for (int64_t *side : {&k.m, &k.n, &k.k}) {
    *side = LARGE - 1;
    CHECK_EQ_I64(chosen(lt, &k, found, 4), 1);
    *side = LARGE;
  }
  close_subject(&s);
}

/* Rows of a larger matrix are less aligned than the whole, and the library is told so. */
TEST(alignment_is_told) {
  struct subject s = open_subject();
  struct matrix whole = integers(DTYPE_BF16, 40, 6, 1), out = integers(DTYPE_BF16, 33, 40, 0), want = rig_matrix(DTYPE_BF16, 33, 40);
  struct matrix d_whole = rig_matrix_put(&s.r, &whole), d_out = rig_matrix_put(&s.r, &out);
  struct matrix part = {static_cast<uint16_t *>(whole.data) + 7 * 6, DTYPE_BF16, 33, 6};
  struct matrix d_part = {static_cast<uint16_t *>(d_whole.data) + 7 * 6, DTYPE_BF16, 33, 6};
  struct operand a = operand_of_matrix(&part, VIEW_ROW), b = operand_of_matrix(&whole, VIEW_ROW);
  struct operand da = operand_of_matrix(&d_part, VIEW_ROW), db = operand_of_matrix(&d_whole, VIEW_ROW);
  s.r.cpu->k->contract(s.r.cpu, &want, &a, &b, NULL);
  contract(&s, &d_out, &da, &db, NULL);
  struct matrix got = rig_matrix_get(&s.r, &d_out);
  rig_same("rows from 7", &got, &want);
  for (const struct matrix *m : {&d_whole, &d_out}) rig_drop(&s.r, m->data);
  for (const struct matrix *m : {&whole, &out, &want, &got}) free(m->data);
  close_subject(&s);
}

TEST(a_product_without_algorithm_is_a_fault) {
  struct subject s = open_subject();
  struct matrix a = integers(DTYPE_BF16, 8, 16, 1), out = rig_matrix(DTYPE_F32, 8, 8);
  struct matrix da = rig_matrix_put(&s.r, &a), d_out = rig_matrix_put(&s.r, &out);
  struct operand o = operand_of_matrix(&da, VIEW_ROW);
  double_finds_nothing = true;
  contract(&s, &d_out, &o, &o, NULL);
  double_finds_nothing = false;
  struct error e = {};
  CHECK(!s.r.gpu->k->synchronize(s.r.gpu, &e));
  CHECK_EQ_I64(e.code, ERROR_DEVICE);
  CHECK(strstr(e.message, "contract of bf16 [8, 8, 16] to fp32: cublasLtMatmulAlgoGetHeuristic gives CUBLAS_STATUS_NOT_SUPPORTED") != NULL);
  cuda_of(s.r.gpu)->fault = cudaSuccess;
  char text[64];
  gemm_describe(cuda_of(s.r.gpu), text, sizeof text);
  CHECK_STR(text, "cuBLASLt 13.1.2");
  for (const struct matrix *m : {&da, &d_out}) rig_drop(&s.r, m->data);
  for (const struct matrix *m : {&a, &out}) free(m->data);
  close_subject(&s);
}
#endif

int main(void) {
  RUN(every_type_view_and_addend);
  RUN(sums_in_place_are_rounded_twice_at_most);
  RUN(results_by_way_of_fp32_in_pieces);
#ifdef FP4D_CUDA_MODEL
  RUN(choices_are_kept);
  RUN(choices_are_told);
  RUN(names_tell_leads_and_alignments);
  RUN(large_products_prefer_a_tile);
  RUN(alignment_is_told);
  RUN(a_product_without_algorithm_is_a_fault);
#endif
  return test_report();
}
