/* Attention within documents: against double, and the bits that other documents
 * must not move.  tests/cpu_attention_oracle_test.c has NumPy's and JAX's numbers. */
#include "base/hash.h"
#include "tests/cpu_attention_case.h"
#include "tests/cpu_attention_problem.h"

static const struct {
  const char *name;
  struct attention_formats f;
  bool blocks; /* of tokens share a scale of V */
} format[] = {{"bf16", {.qk = FORMAT_BF16}, false},
              {"training", {.qk = FORMAT_NVFP4, .pv = FORMAT_E4M3, .d_out = FORMAT_E5M2, .d_out_lift = 1}, false},
              {"e4m3", {.qk = FORMAT_E4M3, .pv = FORMAT_E4M3, .d_out = FORMAT_E4M3, .d_out_lift = 1}, false},
              {"fp8 P and V", {.qk = FORMAT_NVFP4, .pv = FORMAT_E4M3}, false},
              {"control", {.qk = FORMAT_NVFP4, .pv = FORMAT_MXFP4, .d_out = FORMAT_E5M2, .d_out_lift = 1}, true},
              {"affine", {.qk = FORMAT_NVFP4, .pv = FORMAT_MXFP4, .p_slope = 1.5f, .p_offset = 1.2f}, true}};
enum { FORMATS = sizeof format / sizeof *format };

/* Documents whose lengths are about `mean`, many of one token where it is small; beginning at multiples of `unit`. */
static int32_t *documents_by(struct attention_shape s, double mean, int64_t unit, uint32_t seed) {
  int32_t *starts = test_memory((size_t)(s.batch * s.seq_len) * sizeof *starts);
  for (int64_t t = 0; t < s.batch * s.seq_len; t++) {
    int64_t i = t % s.seq_len;
    bool begins = i == 0 || (i % unit == 0 && test_uniform(seed, t) * mean < (double)unit);
    starts[t] = begins ? (int32_t)i : starts[t - 1];
  }
  return starts;
}

static int32_t *documents_of(struct attention_shape s, double mean, uint32_t seed) { return documents_by(s, mean, 1, seed); }

static struct attention_shape shape_of(int64_t n, int64_t longest) {
  struct attention_shape s = {.seq_len = test_size(61, n, longest), .n_kv_heads = test_size(63, n, 3)};
  s.head_dim = test_size(62, n, 70);
  s.n_heads = s.n_kv_heads * test_size(64, n, 4);
  s.batch = test_size(65, n, 2);
  return s;
}

static const double means[] = {1, 1.5, 7, 40, 130, 1e9};

TEST(against_double) {
  for (int64_t n = 0; n < 18; n++) {
    enum dtype type = n % 2 ? DTYPE_BF16 : DTYPE_F32;
    struct problem p = problem_new(type, shape_of(n, n < 12 ? 80 : 280), 2.0f);
    p.starts = documents_of(p.s, means[n % 6], 71);
    run(&p, 1 + (int)(n % 3));
    compare(&p, type == DTYPE_F32 ? 1e-5 : 2e-2, 1e-5);
    problem_free(&p);
  }
}

/* One document that is all of the sample is no document at all; threads, fused or split walks change no bit. */
TEST(schedules) {
  for (int64_t n = 0; n < 12; n++) {
    struct attention_shape s = shape_of(n + 40, 300);
    struct problem one = problem_new(DTYPE_F32, s, 2.0f);
    one.starts = n % 3 ? documents_of(s, means[n % 6], 72) : NULL;
    run(&one, 1);
    for (int threads = 1; threads <= 3; threads++) {
      struct problem p = problem_new(DTYPE_F32, s, 2.0f);
      p.starts = documents_of(s, n % 3 ? means[n % 6] : 1e9, 72);
      run(&p, threads);
      if (!same_bits(&one, &p)) FAIL("case %d: threads %d", (int)n, threads);
      problem_free(&p);
    }
    problem_free(&one);
  }
}

static struct attention_case *case_of(struct attention_shape s, int f, int threads) {
  struct attention_case *c = case_new(s, format[f].f, threads);
  case_fill(c, 0, 1);
  return c;
}

/* A document alone: its tokens' results are those of a sample that is only it,
 * where it begins with a tile of keys. */
TEST(alone) {
  for (int f = 0; f < FORMATS; f++) {
    struct attention_shape s = {2, 300, 4, 2, 32}, own = {2, 172, 4, 2, 32};
    struct attention_case *c = case_of(s, f, 2), *a = case_new(own, format[f].f, 1);
    c->starts = documents_of(s, 1e9, 0);
    for (int64_t t = 0; t < 600; t++) c->starts[t] = t % 300 < 128 ? 0 : 128;
    for (int64_t b = 0; b < 2; b++) {
      size_t wide = (size_t)c->qkv.cols * 2, narrow = (size_t)c->out.cols * 2, from = (size_t)(b * 300 + 128), to = (size_t)b * 172;
      memcpy((char *)a->qkv.data + to * wide, (char *)c->qkv.data + from * wide, 172 * wide);
      memcpy((char *)a->d_out.data + to * narrow, (char *)c->d_out.data + from * narrow, 172 * narrow);
    }
    case_run(c);
    case_run(a);
    for (int64_t b = 0; b < 2; b++) {
      size_t wide = (size_t)c->qkv.cols * 2, narrow = (size_t)c->out.cols * 2, from = (size_t)(b * 300 + 128), to = (size_t)b * 172;
      if (memcmp((char *)a->out.data + to * narrow, (char *)c->out.data + from * narrow, 172 * narrow) != 0)
        FAIL("%s: out of sample %d", format[f].name, (int)b);
      if (memcmp((char *)a->d_qkv.data + to * wide, (char *)c->d_qkv.data + from * wide, 172 * wide) != 0)
        FAIL("%s: gradients of sample %d", format[f].name, (int)b);
      for (int64_t h = 0; h < 4; h++)
        CHECK(memcmp(a->lse + (b * 4 + h) * 172, c->lse + (b * 4 + h) * 300 + 128, 172 * 4) == 0);
    }
    case_free(c);
    case_free(a);
  }
}

/* Other content in every document but one, infinities and NaN in it too: that one's results stay.
 * Where 32 tokens share a scale of V, documents begin and end with such blocks. */
static void swap(int f, int64_t n) {
  static const double values[] = {7, -300, INFINITY, NAN, -INFINITY};
  struct attention_shape s = {1 + n % 2, 64 + test_size(81, n, 260), 4, 2, 32};
  struct attention_case *a = case_of(s, f, 1 + (int)(n % 3)), *b = case_of(s, f, 2);
  a->starts = documents_by(s, 40, format[f].blocks ? ATTENTION_MX : 1, (uint32_t)(90 + n));
  b->starts = memcpy(test_memory((size_t)case_tokens(a) * 4), a->starts, (size_t)case_tokens(a) * 4);
  int64_t token = (int64_t)(test_uniform(82, n) * (double)s.seq_len), own = a->starts[token], q = s.n_heads * s.head_dim;
  for (int64_t t = 0; t < case_tokens(b); t++) {
    if (t < s.seq_len && b->starts[t] == own) continue;
    for (int64_t i = 0; i < b->qkv.cols; i++)
      test_set(&b->qkv, t * b->qkv.cols + i, test_uniform(83, t) < 0.2 ? values[t % 5] : test_get(&b->qkv, (t + 1) % s.seq_len * b->qkv.cols + i));
    for (int64_t i = 0; i < q; i++) test_set(&b->d_out, t * q + i, 0.25 * test_get(&b->d_out, t * q + i));
  }
  case_run(a);
  case_run(b);
  int64_t kept = 0;
  for (int64_t t = 0; t < s.seq_len; t++) {
    if (a->starts[t] != own) continue;
    kept++;
    size_t wide = (size_t)a->qkv.cols * 2, narrow = (size_t)q * 2, at = (size_t)t;
    if (memcmp((char *)a->out.data + at * narrow, (char *)b->out.data + at * narrow, narrow) != 0)
      FAIL("%s %d: out of token %d", format[f].name, (int)n, (int)t);
    if (memcmp((char *)a->d_qkv.data + at * wide, (char *)b->d_qkv.data + at * wide, wide) != 0)
      FAIL("%s %d: gradient of token %d", format[f].name, (int)n, (int)t);
    for (int64_t h = 0; h < s.n_heads; h++) CHECK(a->lse[h * s.seq_len + t] == b->lse[h * s.seq_len + t]);
  }
  CHECK(kept > 0 && (kept == case_tokens(a) || !test_same(&a->out, &b->out)));
  case_free(a);
  case_free(b);
}

TEST(other_documents_change_nothing) {
  for (int f = 0; f < FORMATS; f++)
    for (int64_t n = 0; n < 5; n++) swap(f, 10 * f + n);
}

/* In MXFP4 a block of V that holds an edge has one scale for both sides: what stands
 * before the edge moves results behind it, in that block alone. */
TEST(blocks_that_straddle) {
  struct attention_shape s = {1, 96, 2, 1, 32};
  struct attention_case *a = case_of(s, 4, 1), *b = case_of(s, 4, 1);
  for (int k = 0; k < 2; k++) {
    struct attention_case *c = k ? b : a;
    c->starts = test_memory(96 * 4);
    for (int64_t t = 0; t < 96; t++) c->starts[t] = t < 40 ? 0 : 40;
  }
  for (int64_t i = 0; i < b->qkv.cols; i++) test_set(&b->qkv, 39 * b->qkv.cols + i, 500);
  case_run(a);
  case_run(b);
  CHECK(memcmp(a->lse + 40, b->lse + 40, 56 * 4) == 0); /* scores and P know nothing of it */
  CHECK(memcmp((char *)a->out.data + 40 * 64 * 2, (char *)b->out.data + 40 * 64 * 2, 64 * 2) != 0);
  case_free(a);
  case_free(b);
}

/* A document of one token: its output is V, and Q and K have no gradient, but for rounding. */
TEST(one_token) {
  struct problem p = problem_new(DTYPE_F32, (struct attention_shape){2, 200, 4, 2, 24}, 2.0f);
  p.starts = documents_of(p.s, 1, 0);
  run(&p, 2);
  for (int64_t t = 0; t < 400; t++)
    for (int64_t h = 0; h < 4; h++)
      for (int64_t d = 0; d < 24; d++) {
        float v = at(&p.qkv, t * p.qkv.cols + (6 + h / 2) * 24 + d);
        CHECK(fabsf(at(&p.out, (t * 4 + h) * 24 + d) - v) <= 0x1p-22f * fabsf(v));
        CHECK(fabsf(at(&p.d_qkv, t * p.qkv.cols + h * 24 + d)) < 2e-5f);
        CHECK(fabsf(at(&p.d_qkv, t * p.qkv.cols + (4 + h / 2) * 24 + d)) < 4e-5f);
      }
  problem_free(&p);
}

TEST(counts) {
  for (int f = 1; f < FORMATS; f++) {
    struct attention_case *c = case_of((struct attention_shape){2, 300, 4, 2, 16}, f, 3);
    c->starts = documents_of(c->s, 25, 77);
    int64_t pairs = 0;
    for (int64_t t = 0; t < 600; t++) pairs += 4 * (t % 300 - c->starts[t] + 1);
    case_run(c);
    CHECK_EQ_I64(c->counts[ATTENTION_P].elements, pairs);
    CHECK_EQ_I64(c->counts[ATTENTION_DS].elements, c->coded ? pairs : 0);
    case_free(c);
  }
}

int main(void) {
  RUN(against_double);
  RUN(schedules);
  RUN(alone);
  RUN(other_documents_change_nothing);
  RUN(blocks_that_straddle);
  RUN(one_token);
  RUN(counts);
  return test_report();
}
