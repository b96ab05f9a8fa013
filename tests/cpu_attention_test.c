/* Attention of the CPU backend against a literal implementation in double. */
#include <math.h>
#include <stdlib.h>

#include "base/hash.h"
#include "base/philox.h"
#include "tests/cpu_device.h"

static void *get(int64_t bytes) {
  void *p = malloc((size_t)(bytes > 0 ? bytes : 1));
  if (!p) abort();
  return p;
}

/* ---- a case: inputs and what the backend makes of them ------------------- */
struct problem {
  struct attention_shape s;
  struct matrix qkv, out, d_out, d_qkv;
  float *lse, max_logit;
};

static int64_t tokens(const struct problem *p) { return p->s.batch * p->s.seq_len; }
static int64_t elements(const struct matrix *m) { return m->rows * m->cols; }

static struct matrix matrix_new(enum dtype type, int64_t rows, int64_t cols) {
  return (struct matrix){get(rows * cols * (int64_t)dtype_bytes(type)), type, rows, cols};
}

/* Multiples of 2^-11 in [-1, 1): exact in FP32, rounded in BF16. */
static void fill(struct matrix *m, uint64_t seed, float factor) {
  for (int64_t i = 0; i < elements(m); i++) {
    struct philox_block at = {{(uint32_t)(i / 4), 7, 0, 0}};
    uint32_t word = philox4x32_10(seed, at).word[i % 4];
    float x = ((float)(word >> 20) * 0x1p-11f - 1.0f) * factor;
    cpu_store(m, i, &x, 1);
  }
}

static struct problem problem_new(enum dtype type, struct attention_shape s, float factor) {
  struct problem p = {.s = s, .max_logit = -INFINITY};
  int64_t n = s.batch * s.seq_len, wide = (s.n_heads + 2 * s.n_kv_heads) * s.head_dim;
  p.qkv = matrix_new(type, n, wide);
  p.d_qkv = matrix_new(type, n, wide);
  p.out = matrix_new(type, n, s.n_heads * s.head_dim);
  p.d_out = matrix_new(type, n, s.n_heads * s.head_dim);
  p.lse = get(n * s.n_heads * 4);
  fill(&p.qkv, 1, factor);
  fill(&p.d_out, 2, 1.0f);
  return p;
}

static void problem_free(struct problem *p) {
  void *all[] = {p->qkv.data, p->d_qkv.data, p->out.data, p->d_out.data, p->lse};
  for (int i = 0; i < 5; i++) free(all[i]);
}

static void set(struct matrix *m, int64_t row, int64_t col, float x) { cpu_store(m, row * m->cols + col, &x, 1); }
static float at(const struct matrix *m, int64_t i) {
  float x;
  cpu_load(&x, m, i, 1);
  return x;
}

/* Forward, then backward, in scratch full of NaN that was sized for `extent`. */
static void run_sized(struct problem *p, int threads, struct attention_shape extent) {
  struct error e;
  struct extent x = {.attention = extent};
  struct cpu_device d = {.threads = threads_create(threads, &e)};
  if (!d.threads) abort();
  d.scratch_bytes = cpu_attention_scratch_bytes(&x, threads);
  d.scratch = get(d.scratch_bytes);
  memset(d.scratch, 0xFF, (size_t)d.scratch_bytes);
  memset(p->d_qkv.data, 0xFF, (size_t)elements(&p->d_qkv) * dtype_bytes(p->d_qkv.dtype));
  memset(p->out.data, 0xFF, (size_t)elements(&p->out) * dtype_bytes(p->out.dtype));
  cpu_attention_forward(&d.device, &p->out, p->lse, &p->max_logit, NULL, &p->qkv, NULL, NULL, &p->s);
  memset(d.scratch, 0xFF, (size_t)d.scratch_bytes);
  cpu_attention_backward(&d.device, &p->d_qkv, NULL, &p->d_out, NULL, &p->out, p->lse, &p->qkv, NULL, NULL, &p->s);
  free(d.scratch);
  threads_destroy(d.threads);
}
static void run(struct problem *p, int threads) { run_sized(p, threads, p->s); }

/* ---- the literal implementation ------------------------------------------ */
struct literal {
  double *qkv, *out, *lse, *d_out, *d_qkv, max_logit;
};

static double *doubles(const struct matrix *m) {
  double *x = get(elements(m) * 8);
  for (int64_t i = 0; i < elements(m); i++) x[i] = (double)at(m, i);
  return x;
}

static void literal_forward(const struct attention_shape *s, const double *qkv, double *out, double *lse, double *max) {
  int64_t D = s->head_dim, cols = (s->n_heads + 2 * s->n_kv_heads) * D;
  double *score = get(s->seq_len * 8);
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t h = 0; h < s->n_heads; h++) {
      int64_t kv = h / (s->n_heads / s->n_kv_heads);
      const double *q = qkv + b * s->seq_len * cols + h * D, *k = qkv + b * s->seq_len * cols + (s->n_heads + kv) * D,
                   *v = k + s->n_kv_heads * D;
      for (int64_t i = 0; i < s->seq_len; i++) {
        double top = -INFINITY, sum = 0;
        for (int64_t j = 0; j <= i; j++) {
          double x = 0;
          for (int64_t d = 0; d < D; d++) x += q[i * cols + d] * k[j * cols + d];
          score[j] = x / sqrt((double)D);
          if (score[j] > top) top = score[j];
        }
        for (int64_t j = 0; j <= i; j++) {
          score[j] = exp(score[j] - top);
          sum += score[j];
        }
        for (int64_t d = 0; d < D; d++) {
          double x = 0;
          for (int64_t j = 0; j <= i; j++) x += score[j] * v[j * cols + d];
          out[(b * s->seq_len + i) * s->n_heads * D + h * D + d] = x / sum;
        }
        lse[(b * s->n_heads + h) * s->seq_len + i] = top + log(sum);
        if (top > *max) *max = top;
      }
    }
  free(score);
}

static void literal_backward(const struct attention_shape *s, struct literal *x) {
  int64_t D = s->head_dim, cols = (s->n_heads + 2 * s->n_kv_heads) * D;
  for (int64_t i = 0; i < s->batch * s->seq_len * cols; i++) x->d_qkv[i] = 0;
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t h = 0; h < s->n_heads; h++) {
      int64_t first = b * s->seq_len, kv = s->n_heads + h / (s->n_heads / s->n_kv_heads);
      for (int64_t i = 0; i < s->seq_len; i++) {
        const double *q = x->qkv + (first + i) * cols + h * D;
        const double *g = x->d_out + (first + i) * s->n_heads * D + h * D;
        const double *o = x->out + (first + i) * s->n_heads * D + h * D;
        double *dq = x->d_qkv + (first + i) * cols + h * D, centre = 0;
        for (int64_t d = 0; d < D; d++) centre += g[d] * o[d];
        for (int64_t j = 0; j <= i; j++) {
          int64_t k_at = (first + j) * cols + kv * D, v_at = k_at + s->n_kv_heads * D;
          double score = 0, dp = 0;
          for (int64_t d = 0; d < D; d++) score += q[d] * x->qkv[k_at + d];
          for (int64_t d = 0; d < D; d++) dp += g[d] * x->qkv[v_at + d];
          double p = exp(score / sqrt((double)D) - x->lse[(b * s->n_heads + h) * s->seq_len + i]);
          double ds = p * (dp - centre) / sqrt((double)D);
          for (int64_t d = 0; d < D; d++) {
            dq[d] += ds * x->qkv[k_at + d];
            x->d_qkv[k_at + d] += ds * q[d];
            x->d_qkv[v_at + d] += p * g[d];
          }
        }
      }
    }
}

static struct literal literal_of(const struct problem *p) {
  struct literal x = {.qkv = doubles(&p->qkv), .d_out = doubles(&p->d_out), .max_logit = -INFINITY};
  x.out = get(elements(&p->out) * 8);
  x.lse = get(tokens(p) * p->s.n_heads * 8);
  x.d_qkv = get(elements(&p->qkv) * 8);
  literal_forward(&p->s, x.qkv, x.out, x.lse, &x.max_logit);
  literal_backward(&p->s, &x);
  return x;
}

static void literal_free(struct literal *x) {
  double *all[] = {x->qkv, x->out, x->lse, x->d_out, x->d_qkv};
  for (int i = 0; i < 5; i++) free(all[i]);
}

/* |got - expected| / |expected| over columns [from, to). */
static double distance(const struct matrix *got, const double *expected, int64_t from, int64_t to) {
  double difference = 0, norm = 0;
  for (int64_t r = 0; r < got->rows; r++)
    for (int64_t c = from; c < to; c++) {
      double e = expected[r * got->cols + c], d = (double)at(got, r * got->cols + c) - e;
      difference += d * d;
      norm += e * e;
    }
  return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static void compare(const struct problem *p, double tolerance, double lse_tolerance) {
  struct literal x = literal_of(p);
  int64_t D = p->s.head_dim, q = p->s.n_heads * D, k = q + p->s.n_kv_heads * D, end = p->qkv.cols;
  double error[4] = {distance(&p->out, x.out, 0, q), 0, 0, distance(&p->d_qkv, x.d_qkv, k, end)};
  error[1] = distance(&p->d_qkv, x.d_qkv, 0, q);
  error[2] = distance(&p->d_qkv, x.d_qkv, q, k);
  const char *name[] = {"out", "dq", "dk", "dv"};
  for (int i = 0; i < 4; i++)
    if (!(error[i] < tolerance))
      FAIL("%s of b%d s%d h%d/%d d%d %s: error %.3g, allowed %g", name[i], (int)p->s.batch, (int)p->s.seq_len,
           (int)p->s.n_heads, (int)p->s.n_kv_heads, (int)D, dtype_name(p->qkv.dtype), error[i], tolerance);
  for (int64_t i = 0; i < tokens(p) * p->s.n_heads; i++)
    CHECK_CLOSE(p->lse[i], x.lse[i], lse_tolerance * (1 + fabs(x.lse[i])));
  CHECK_CLOSE(p->max_logit, x.max_logit, lse_tolerance * (1 + fabs(x.max_logit)));
  literal_free(&x);
}

/* ---- tests --------------------------------------------------------------- */
TEST(against_double) {
  const struct attention_shape shape[] = {
      {3, 1, 4, 4, 32},  {3, 2, 4, 1, 32},   {2, 17, 8, 1, 64}, {1, 63, 4, 1, 128}, {1, 127, 2, 2, 80},
      {1, 128, 4, 1, 32}, {1, 129, 2, 1, 64}, {3, 33, 8, 2, 32}, {1, 200, 4, 1, 64}, {1, 257, 1, 1, 32},
      {1, 31, 2, 1, 2},  {1, 40, 2, 2, 6},   {1, 37, 1, 1, 256}, {2, 65, 6, 2, 10}};
  for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
    for (int type = DTYPE_F32; type <= DTYPE_BF16; type++) {
      struct problem p = problem_new((enum dtype)type, shape[i], 2.5f);
      run(&p, 1);
      compare(&p, type == DTYPE_F32 ? 1e-5 : 2e-2, 1e-5);
      problem_free(&p);
    }
}

/* The gradient of sum(d_out * out) by differences of the literal forward. */
TEST(finite_differences) {
  struct problem p = problem_new(DTYPE_F32, (struct attention_shape){2, 19, 4, 2, 8}, 2.0f);
  run(&p, 1);
  struct literal x = literal_of(&p);
  double h = 1e-5;
  for (int64_t n = 0; n < 60; n++) {
    int64_t i = n * 7919 % elements(&p.qkv);
    double value[2], keep = x.qkv[i];
    for (int side = 0; side < 2; side++) {
      x.qkv[i] = keep + (side ? h : -h);
      literal_forward(&p.s, x.qkv, x.out, x.lse, &x.max_logit);
      value[side] = 0;
      for (int64_t k = 0; k < elements(&p.out); k++) value[side] += x.d_out[k] * x.out[k];
    }
    x.qkv[i] = keep;
    CHECK_CLOSE(at(&p.d_qkv, i), (value[1] - value[0]) / (2 * h), 2e-5);
  }
  literal_free(&x);
  problem_free(&p);
}

static bool same_bits(const struct problem *a, const struct problem *b) {
  size_t size = dtype_bytes(a->qkv.dtype);
  return !memcmp(a->out.data, b->out.data, (size_t)elements(&a->out) * size) &&
         !memcmp(a->d_qkv.data, b->d_qkv.data, (size_t)elements(&a->d_qkv) * size) &&
         !memcmp(a->lse, b->lse, (size_t)(tokens(a) * a->s.n_heads) * 4) && a->max_logit == b->max_logit;
}

/* One thread is fused, two and three are split in the first shape. */
TEST(threads) {
  const struct attention_shape shape[] = {{1, 300, 4, 1, 32}, {2, 150, 6, 3, 64}, {1, 129, 1, 1, 80}};
  for (int i = 0; i < 3; i++) {
    struct problem one = problem_new(DTYPE_F32, shape[i], 2.0f);
    run(&one, 1);
    for (int threads = 2; threads <= 3; threads++) {
      struct problem many = problem_new(DTYPE_F32, shape[i], 2.0f);
      run(&many, threads);
      CHECK(same_bits(&one, &many));
      problem_free(&many);
    }
    problem_free(&one);
  }
}

/* Scratch sized for the largest extents serves smaller ones, whichever of the
 * two is fused and which is split: same bits. */
TEST(smaller_than_extent) {
  static const struct attention_shape pairs[][2] = {{{3, 140, 2, 1, 16}, {4, 160, 2, 1, 16}},
                                                    {{1, 40, 2, 1, 8}, {4, 40, 2, 1, 8}},
                                                    {{1, 200, 3, 1, 6}, {2, 200, 3, 1, 6}},
                                                    {{2, 33, 8, 1, 4}, {3, 127, 8, 1, 4}},
                                                    {{2, 129, 2, 2, 10}, {5, 129, 2, 2, 10}}};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
    for (int threads = 1; threads <= 4; threads++) {
      struct problem a = problem_new(DTYPE_BF16, pairs[i][0], 2.0f), b = problem_new(DTYPE_BF16, pairs[i][0], 2.0f);
      run(&a, threads);
      run_sized(&b, threads, pairs[i][1]);
      CHECK(same_bits(&a, &b));
      problem_free(&a);
      problem_free(&b);
    }
}

/* Sequences of many tiles, heads of any even and odd width, groups of any size. */
TEST(large_shapes) {
  for (int i = 0; i < 12; i++) {
    struct attention_shape s = {.seq_len = i % 2 ? test_size(43, i, 900) : 300 + (int64_t)(test_uniform(42, i) * 600)};
    int64_t room = 1200000 / (s.seq_len * s.seq_len); /* batch * n_heads * head_dim */
    s.head_dim = test_size(44, i, room < 256 ? room : 256), room /= s.head_dim;
    s.n_kv_heads = test_size(45, i, room < 3 ? room : 3), room /= s.n_kv_heads;
    s.n_heads = s.n_kv_heads * test_size(46, i, room < 7 ? room : 7), room /= s.n_heads / s.n_kv_heads;
    s.batch = test_size(47, i, room < 3 ? room : 3);
    if (s.seq_len < 2) s.seq_len = 2;
    enum dtype type = test_types[i / 2 % 2];
    struct problem one = problem_new(type, s, 2.0f), many = problem_new(type, s, 2.0f);
    run(&one, 1);
    compare(&one, type == DTYPE_F32 ? 1e-5 : 2e-2, 1e-5);
    run(&many, 2 + i % 2);
    CHECK(same_bits(&one, &many));
    problem_free(&one);
    problem_free(&many);
  }
}

/* Each sample of a batch is what it is alone. */
TEST(samples_are_independent) {
  struct attention_shape s = {3, 70, 4, 2, 32};
  struct problem all = problem_new(DTYPE_F32, s, 2.0f);
  run(&all, 1);
  s.batch = 1;
  for (int64_t b = 0; b < 3; b++) {
    struct problem one = problem_new(DTYPE_F32, s, 2.0f);
    size_t wide = (size_t)elements(&one.qkv) * 4, narrow = (size_t)elements(&one.out) * 4;
    memcpy(one.qkv.data, (char *)all.qkv.data + (size_t)b * wide, wide);
    memcpy(one.d_out.data, (char *)all.d_out.data + (size_t)b * narrow, narrow);
    run(&one, 1);
    CHECK(!memcmp(one.out.data, (char *)all.out.data + (size_t)b * narrow, narrow));
    CHECK(!memcmp(one.d_qkv.data, (char *)all.d_qkv.data + (size_t)b * wide, wide));
    CHECK(!memcmp(one.lse, all.lse + b * 70 * 4, 70 * 4 * 4));
    problem_free(&one);
  }
  problem_free(&all);
}

/* Whatever token t becomes, nothing before it changes by a bit; and d_out of
 * tokens before t gives t and later ones no gradient. */
TEST(causality) {
  struct attention_shape s = {1, 150, 4, 2, 32};
  const int64_t changed[] = {1, 8, 31, 32, 45, 127, 128, 149};
  const float value[] = {3.0f, NAN, INFINITY, -INFINITY};
  struct problem a = problem_new(DTYPE_F32, s, 2.0f);
  run(&a, 1);
  for (size_t n = 0; n < sizeof changed / sizeof *changed; n++) {
    int64_t t = changed[n];
    struct problem b = problem_new(DTYPE_F32, s, 2.0f), c = problem_new(DTYPE_F32, s, 2.0f);
    for (int64_t i = t * b.qkv.cols; i < (t + 1) * b.qkv.cols; i++) {
      float x = value[n % 4];
      cpu_store(&b.qkv, i, &x, 1);
    }
    run(&b, 1);
    CHECK(!memcmp(a.out.data, b.out.data, (size_t)(t * a.out.cols) * 4));
    CHECK(memcmp(a.out.data, b.out.data, (size_t)elements(&a.out) * 4));
    for (int64_t h = 0; h < s.n_heads; h++) CHECK(!memcmp(a.lse + h * 150, b.lse + h * 150, (size_t)t * 4));
    memset((char *)c.d_out.data + t * c.d_out.cols * 4, 0, (size_t)((150 - t) * c.d_out.cols) * 4);
    run(&c, 1);
    bool zero = true;
    for (int64_t i = t * c.qkv.cols; i < elements(&c.qkv); i++) zero = zero && at(&c.d_qkv, i) == 0.0f;
    CHECK(zero);
    problem_free(&b);
    problem_free(&c);
  }
  problem_free(&a);
}

/* A NaN reaches the outputs of its own and later queries of its group, no others. */
TEST(nan_propagates) {
  struct attention_shape s = {2, 140, 4, 2, 32};
  struct problem p = problem_new(DTYPE_BF16, s, 2.0f);
  set(&p.qkv, 50, 4 * 32 + 32 + 5, NAN); /* k of kv head 1, token 50 of sample 0 */
  run(&p, 2);
  for (int64_t r = 0; r < p.out.rows; r++)
    for (int64_t c = 0; c < p.out.cols; c++) {
      bool expected = r >= 50 && r < 140 && c >= 2 * 32;
      if (isnan(at(&p.out, r * p.out.cols + c)) != expected) FAIL("row %d col %d: NaN is not as expected", (int)r, (int)c);
    }
  CHECK(isnan(at(&p.d_qkv, 50 * p.qkv.cols + 4 * 32 + 32)));
  CHECK(!isnan(at(&p.d_qkv, 139 * p.qkv.cols)));
  problem_free(&p);
  /* a key of -inf weighs nothing */
  p = problem_new(DTYPE_F32, (struct attention_shape){1, 9, 1, 1, 2}, 1.0f);
  for (int64_t r = 0; r < 9; r++) {
    set(&p.qkv, r, 0, 1.0f);
    set(&p.qkv, r, 1, 1.0f);
    set(&p.qkv, r, 2, r < 8 ? -INFINITY : 0.5f);
  }
  run(&p, 1);
  CHECK(isnan(at(&p.out, 0)));
  CHECK(at(&p.out, 16) == at(&p.qkv, 8 * 6 + 4));
  problem_free(&p);
}

/* Scores up to +-1e4 that are exact in FP32. */
TEST(large_logits) {
  struct problem p = problem_new(DTYPE_F32, (struct attention_shape){1, 140, 2, 1, 64}, 1.0f);
  for (int64_t r = 0; r < 140; r++)
    for (int64_t c = 0; c < 3 * 64; c++) {
      float x = at(&p.qkv, r * p.qkv.cols + c);
      set(&p.qkv, r, c, rintf(x * 90.0f));
    }
  run(&p, 1);
  CHECK(p.max_logit > 5e3f);
  struct literal x = literal_of(&p);
  CHECK(distance(&p.out, x.out, 0, p.out.cols) < 1e-5);
  for (int64_t i = 0; i < 280; i++) CHECK_CLOSE(p.lse[i], x.lse[i], 2e-7 * (1 + fabs(x.lse[i])));
  for (int64_t i = 0; i < elements(&p.d_qkv); i++) CHECK(isfinite(at(&p.d_qkv, i)));
  literal_free(&x);
  problem_free(&p);
}

TEST(max_logit_only_grows) {
  struct problem p = problem_new(DTYPE_F32, (struct attention_shape){1, 5, 1, 1, 4}, 1.0f);
  p.max_logit = 1e6f;
  run(&p, 1);
  CHECK(p.max_logit == 1e6f);
  problem_free(&p);
}

/* One bit pattern on every machine and instruction set. */
TEST(fixed_bits) {
  const char *expected[] = {"ac68c72336c6639651e3fd297b6e1f3b", "ec946b9b73eb65669ab758293546f654"};
  for (int type = DTYPE_F32; type <= DTYPE_BF16; type++) {
    struct problem p = problem_new((enum dtype)type, (struct attention_shape){2, 150, 4, 2, 40}, 3.0f);
    run(&p, 2);
    struct hash h = hash_bytes(p.out.data, (size_t)elements(&p.out) * dtype_bytes(p.out.dtype));
    h = hash_sum(h, hash_bytes(p.d_qkv.data, (size_t)elements(&p.d_qkv) * dtype_bytes(p.d_qkv.dtype)));
    h = hash_sum(h, hash_bytes(p.lse, (size_t)(tokens(&p) * p.s.n_heads) * 4));
    char text[HASH_TEXT];
    hash_text(h, text);
    CHECK_STR(text, expected[type - DTYPE_F32]);
    problem_free(&p);
  }
}

int main(void) {
  RUN(against_double);
  RUN(finite_differences);
  RUN(threads);
  RUN(smaller_than_extent);
  RUN(large_shapes);
  RUN(samples_are_independent);
  RUN(causality);
  RUN(nan_propagates);
  RUN(large_logits);
  RUN(max_logit_only_grows);
  RUN(fixed_bits);
  return test_report();
}
