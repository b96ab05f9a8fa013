/* Cross-entropy, AdamW and the measures of a matrix, against literal models in double. */
#include "kernels/cpu/longsum.h"
#include "kernels/elementary.h"
#include "kernels/reduce.h"
#include "tests/cpu_device.h"

static const struct extent extent = {.tokens = 70, .head_chunk = 70, .attention = {1, 70, 1, 1, 8}, .hidden_size = 8,
                                     .ffn_size = 8, .vocab_size = 5000};
static struct device *dev[3]; /* 1, 2 and 3 threads */

/* ---- cross-entropy ------------------------------------------------------- */
static double log_sum_exp(const struct matrix *x, int64_t row) {
  double top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < x->cols; i++) {
    double v = test_get(x, row * x->cols + i);
    top = v > top ? v : top; /* gcc 12 for aarch64 fails on an fmax reduction */
  }
  for (int64_t i = 0; i < x->cols; i++) sum += exp(test_get(x, row * x->cols + i) - top);
  return top + log(sum);
}

TEST(cross_entropy) {
  static const int64_t vocab[] = {1, 2, 7, 64, 258, 1000, 1023, 1024, 1025, 5000, 65537, 128256};
  for (int v = 0; v < 12; v++) {
    int64_t n = vocab[v], rows = n > 5000 ? 2 : 1 + 9 * v % 14;
    struct matrix x = test_random(DTYPE_F32, rows, n, 20 + (uint64_t)v, 4.0);
    int32_t targets[14];
    for (int64_t r = 0; r < rows; r++) targets[r] = r % 5 == 3 ? -1 : (int32_t)(test_uniform(4, r + v) * (double)n);
    const float scale = 0.37f;
    float nll[3][14];
    struct matrix d[3];
    for (int k = 0; k < 3; k++) { /* threads; the third in place */
      struct matrix in = test_copy(&x);
      d[k] = k == 2 ? in : test_matrix(DTYPE_F32, rows, n);
      cpu_cross_entropy(dev[k], nll[k], &d[k], &in, targets, scale);
      CHECK(test_same(&d[0], &d[k]) && memcmp(nll[0], nll[k], (size_t)rows * sizeof(float)) == 0);
      if (k != 2) {
        CHECK(test_same(&in, &x));
        free(in.data);
      }
    }
    struct matrix bf16 = test_matrix(DTYPE_BF16, rows, n);
    float again[14];
    cpu_cross_entropy(dev[1], again, &bf16, &x, targets, scale);
    cpu_cross_entropy(dev[1], again, NULL, &x, targets, scale);
    CHECK(memcmp(again, nll[0], (size_t)rows * sizeof(float)) == 0);
    for (int64_t cut = 1; cut <= n; cut += 1 + n / 3) { /* the first columns alone: as if there were no others */
      struct matrix first = test_matrix(DTYPE_F32, rows, cut);
      int32_t within[14];
      float whole[14];
      for (int64_t r = 0; r < rows; r++) {
        memcpy((float *)first.data + r * cut, (const float *)x.data + r * n, (size_t)cut * sizeof(float));
        within[r] = targets[r] < cut ? targets[r] : -1;
      }
      cpu_cross_entropy(dev[1], whole, NULL, &first, within, 0);
      cpu_cross_entropy_within(dev[1], again, &x, cut, within);
      CHECK(memcmp(whole, again, (size_t)rows * sizeof(float)) == 0);
      free(first.data);
    }
    for (int64_t r = 0; r < rows; r++) {
      double lse = log_sum_exp(&x, r), sum = 0;
      bool counted = targets[r] >= 0;
      double want = counted ? lse - test_get(&x, r * n + targets[r]) : 0.0;
      CHECK(test_near((double)nll[0][r], want, 2e-6 * (1 + fabs(want))));
      for (int64_t i = 0; i < n; i++) {
        double got = test_get(&d[0], r * n + i), p = exp(test_get(&x, r * n + i) - lse);
        double grad = counted ? (p - (i == targets[r])) * (double)scale : 0.0;
        CHECK(test_near(got, grad, 3e-6 * p + 1e-7 * (i == targets[r]) + 1e-40));
        CHECK(test_get(&bf16, r * n + i) == (double)bf16_decode(bf16_encode((float)got)));
        sum += got;
      }
      CHECK(test_near(sum, 0.0, 2e-6));
    }
    for (int k = 0; k < 3; k++) free(d[k].data);
    free(x.data), free(bf16.data);
  }
}

TEST(cross_entropy_gradient_is_the_derivative) {
  struct matrix x = test_random(DTYPE_F32, 1, 17, 31, 2.0), d = test_matrix(DTYPE_F32, 1, 17);
  int32_t target = 5;
  float nll;
  cpu_cross_entropy(dev[0], &nll, &d, &x, &target, 1.0f);
  const double h = 0x1p-12;
  for (int64_t i = 0; i < 17; i++) {
    double at = test_get(&x, i);
    test_set(&x, i, at + h);
    double high = test_get(&x, i), up = log_sum_exp(&x, 0) - test_get(&x, target);
    test_set(&x, i, at - h);
    double low = test_get(&x, i), down = log_sum_exp(&x, 0) - test_get(&x, target);
    test_set(&x, i, at);
    CHECK(test_near(test_get(&d, i), (up - down) / (high - low), 1e-6));
  }
  free(x.data), free(d.data);
}

TEST(cross_entropy_extremes) {
  enum { N = 1100 };
  struct matrix x = test_matrix(DTYPE_F32, 7, N), d = test_matrix(DTYPE_F32, 7, N);
  float *v = x.data, nll[7];
  const float *g = d.data;
  static const int32_t targets[7] = {3, 3, 3, 3, 3, 3, 3};
  for (int i = 0; i < N; i++) {
    v[i] = i == 3 ? 1e30f : -1e30f;         /* certain and right */
    v[N + i] = i == 4 ? 1e30f : -1e30f;     /* certain and wrong */
    v[2 * N + i] = i % 2 ? 0.0f : -INFINITY; /* half of them masked */
    v[3 * N + i] = i == 3 ? -INFINITY : 0.0f; /* the target masked */
    v[4 * N + i] = i == 1099 ? NAN : 1.0f;
    v[5 * N + i] = i == 7 ? INFINITY : 1.0f;
    v[6 * N + i] = -1e30f;                   /* all alike */
  }
  cpu_cross_entropy(dev[2], nll, &d, &x, targets, 1.0f);
  CHECK(nll[0] == 0.0f && g[3] == 0.0f && g[4] == 0.0f);
  CHECK(nll[1] == 2e30f && g[N + 3] == -1.0f && g[N + 4] == 1.0f && g[N] == 0.0f);
  CHECK_CLOSE(nll[2], log(N / 2), 1e-6);
  CHECK(g[2 * N] == 0.0f);
  CHECK_CLOSE(g[2 * N + 1], 2.0 / N, 1e-9);
  CHECK(nll[3] == INFINITY && g[3 * N + 3] == -1.0f);
  CHECK(isnan(nll[4]) && isnan(g[4 * N]) && isnan(g[4 * N + 3]) && isnan(nll[5]));
  CHECK_CLOSE(nll[6], log(N), 1e-6);
  for (int i = 0; i < 4 * N; i++) CHECK(isfinite(g[i]));
  free(x.data), free(d.data);
}

/* ---- AdamW --------------------------------------------------------------- */
struct tensor {
  int64_t n;
  struct matrix param, master, m, v, grad;
};

static struct tensor tensor(enum dtype t, bool master, int64_t n, uint64_t key) {
  struct tensor x = {.n = n, .param = test_matrix(t, 1, n), .master = test_random(DTYPE_F32, 1, n, key, 0.5)};
  x.m = test_random(DTYPE_F32, 1, n, key + 1, 0.01), x.v = test_random(DTYPE_F32, 1, n, key + 2, 0.01);
  x.grad = test_random(DTYPE_F32, 1, n, key + 3, 1.0);
  for (int64_t i = 0; i < n; i++) {
    test_set(&x.v, i, fabs(test_get(&x.v, i)));
    test_set(&x.param, i, test_get(&x.master, i));
  }
  if (!master) free(x.master.data), x.master.data = NULL;
  return x;
}

static void tensor_drop(struct tensor *x) {
  free(x->param.data), free(x->master.data), free(x->m.data), free(x->v.data), free(x->grad.data);
}

static bool tensor_same(const struct tensor *a, const struct tensor *b) {
  return test_same(&a->param, &b->param) && test_same(&a->m, &b->m) && test_same(&a->v, &b->v) &&
         (!a->master.data || test_same(&a->master, &b->master));
}

static const struct adamw adam = {.lr = 3e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f,
                                  .grad_scale = 0.7f, .bias1 = 0.271f, .bias2 = 0.142625f};
static const float decay = 0.1f;
static const struct draw draw = {.seed = 0x123456789ABCDEFu, .update = 17, .operand = DRAW_PARAMETER};
enum { LAYER = 5 };

/* Updates elements [first, first + n) of x. */
static void update(struct device *d, struct tensor *x, int64_t first, int64_t n, const struct adamw *a, float weight_decay,
                   struct update_measure *measured) {
  const struct adamw_tensor t = {.param = (char *)x->param.data + (size_t)first * dtype_bytes(x->param.dtype),
                                 .master = x->master.data ? (float *)x->master.data + first : NULL,
                                 .m = (float *)x->m.data + first,
                                 .v = (float *)x->v.data + first,
                                 .grad = (const char *)x->grad.data + (size_t)first * dtype_bytes(x->grad.dtype),
                                 .n = n,
                                 .weight_decay = weight_decay,
                                 .layer = LAYER,
                                 .first = (uint64_t)first,
                                 .measured = measured};
  cpu_adamw_update(d, &t, 1, x->param.dtype, x->grad.dtype, a, &draw);
}

static const struct {
  enum dtype type;
  bool master;
} kinds[] = {{DTYPE_F32, false}, {DTYPE_BF16, true}, {DTYPE_BF16, false}, {DTYPE_F32, true}};
static const int64_t lengths[] = {1, 7, 8, 1023, 1025, 66001};

TEST(adamw) {
  for (int i = 0; i < 4 * 6; i++) {
    int64_t n = lengths[i / 4];
    struct tensor old = tensor(kinds[i % 4].type, kinds[i % 4].master, n, 40 + (uint64_t)i), x[3];
    struct update_measure got[3] = {{1.0, 2.0}, {1.0, 2.0}, {1.0, 2.0}};
    for (int k = 0; k < 3; k++) {
      x[k] = tensor(kinds[i % 4].type, kinds[i % 4].master, n, 40 + (uint64_t)i);
      update(dev[k], &x[k], 0, n, &adam, decay, &got[k]);
      CHECK(tensor_same(&x[0], &x[k]) && memcmp(&got[0], &got[k], sizeof *got) == 0);
    }
    double change = 1.0, weight = 2.0;
    for (int64_t e = 0; e < n; e++) {
      const struct adamw *a = &adam;
      double g = (double)a->grad_scale * test_get(&old.grad, e);
      double m = (double)a->beta1 * test_get(&old.m, e) + (1.0 - (double)a->beta1) * g;
      double v = (double)a->beta2 * test_get(&old.v, e) + (1.0 - (double)a->beta2) * g * g;
      const struct matrix *source = old.master.data ? &old.master : &old.param;
      const struct matrix *result = old.master.data ? &x[0].master : &x[0].param;
      double w = test_get(source, e), q = m / (double)a->bias1 / (sqrt(v / (double)a->bias2) + (double)a->eps);
      double want = w - (double)a->lr * (q + (double)decay * w);
      bool rounded = kinds[i % 4].type == DTYPE_BF16 && !kinds[i % 4].master;
      CHECK(test_near(test_get(&x[0].m, e), m, 1e-7 * (fabs(m) + fabs(g))));
      CHECK(test_near(test_get(&x[0].v, e), v, 3e-7 * v));
      /* stochastic: either neighbour, so within a whole step */
      CHECK(test_near(test_get(result, e), want, (rounded ? 0x1.01p-7 : 1e-7) * fabs(want) + 3e-9));
      if (old.master.data) {
        double kept = test_get(result, e);
        test_set(&old.param, e, kept);
        CHECK(test_get(&x[0].param, e) == test_get(&old.param, e));
      }
      double moved = test_get(result, e) - w;
      change += moved * moved, weight += w * w;
    }
    CHECK_CLOSE(got[0].update_sum_squares / change, 1.0, 1e-12);
    CHECK_CLOSE(got[0].weight_sum_squares / weight, 1.0, 1e-12);
    /* Not measured: the same update. */
    struct tensor y = tensor(kinds[i % 4].type, kinds[i % 4].master, n, 40 + (uint64_t)i);
    update(dev[1], &y, 0, n, &adam, decay, NULL);
    CHECK(tensor_same(&x[0], &y));
    tensor_drop(&y), tensor_drop(&old);
    for (int k = 0; k < 3; k++) tensor_drop(&x[k]);
  }
}

/* A gradient in BF16 is read as the FP32 numbers that it is. */
TEST(adamw_of_bf16_gradients) {
  for (int i = 0; i < 4 * 6; i++) {
    int64_t n = lengths[i / 4];
    struct tensor wide = tensor(kinds[i % 4].type, kinds[i % 4].master, n, 80 + (uint64_t)i);
    struct tensor narrow = tensor(kinds[i % 4].type, kinds[i % 4].master, n, 80 + (uint64_t)i);
    struct update_measure got[2] = {{0}};
    free(narrow.grad.data);
    narrow.grad = test_matrix(DTYPE_BF16, 1, n);
    for (int64_t e = 0; e < n; e++) {
      test_set(&narrow.grad, e, test_get(&wide.grad, e));
      test_set(&wide.grad, e, test_get(&narrow.grad, e));
    }
    update(dev[0], &wide, 0, n, &adam, decay, &got[0]);
    update(dev[i % 3], &narrow, n / 2, n - n / 2, &adam, decay, NULL);
    update(dev[i % 3], &narrow, 0, n / 2, &adam, decay, NULL);
    CHECK(tensor_same(&wide, &narrow));
    struct tensor whole = tensor(kinds[i % 4].type, kinds[i % 4].master, n, 80 + (uint64_t)i);
    free(whole.grad.data);
    whole.grad = test_copy(&narrow.grad);
    update(dev[1], &whole, 0, n, &adam, decay, &got[1]);
    CHECK(memcmp(&got[0], &got[1], sizeof *got) == 0);
    tensor_drop(&wide), tensor_drop(&narrow), tensor_drop(&whole);
  }
}

TEST(stochastic_rounding_knows_no_slices) {
  enum { N = 3000 };
  struct tensor whole = tensor(DTYPE_BF16, false, N, 3), parts = tensor(DTYPE_BF16, false, N, 3);
  update(dev[0], &whole, 0, N, &adam, decay, NULL);
  static const int64_t cuts[] = {0, 1, 4, 13, 1024, 1033, 2999, N};
  for (int i = 6; i >= 0; i--) update(dev[i % 3], &parts, cuts[i], cuts[i + 1] - cuts[i], &adam, decay, NULL);
  CHECK(tensor_same(&whole, &parts));
  tensor_drop(&whole), tensor_drop(&parts);
}

/* Weights of 1 that step down by `lr` exactly: m' / bias1 = v' / bias2 = 1. */
static struct adamw steady(float lr) {
  return (struct adamw){.lr = lr, .beta1 = 0, .beta2 = 0, .eps = 0, .grad_scale = 1, .bias1 = 1, .bias2 = 1};
}

static struct tensor ones(int64_t n) {
  struct tensor x = tensor(DTYPE_BF16, false, n, 1);
  for (int64_t i = 0; i < n; i++) test_set(&x.param, i, 1.0), test_set(&x.grad, i, -1.0);
  return x;
}

TEST(stochastic_rounding_draws_the_contract) {
  /* An element far into a tensor of 2^40: its block number needs 38 bits. */
  enum { N = 40 };
  const uint64_t first = ((uint64_t)1 << 40) - 64 + 3;
  const float lr = 0x1p-7f * 0.375f; /* 1 + lr lies 0.375 of a BF16 step above 1 */
  struct tensor x = ones(N);
  struct adamw a = steady(lr);
  const struct adamw_tensor t = {.param = x.param.data, .m = x.m.data, .v = x.v.data, .grad = x.grad.data, .n = N, .layer = LAYER, .first = first};
  cpu_adamw_update(dev[0], &t, 1, DTYPE_BF16, x.grad.dtype, &a, &draw);
  int ups = 0;
  for (int i = 0; i < N; i++) {
    uint64_t e = first + (uint64_t)i, block = e / 8;
    struct philox_block counter = {{(uint32_t)block, (uint32_t)(block >> 32), 17, LAYER << 12 | DRAW_PARAMETER}};
    struct philox_block r = philox4x32_10(draw.seed, counter);
    uint32_t field = r.word[e % 8 / 2] >> (e % 2 ? 16 : 0) & 0xFFFFu;
    bool up = field >= 65536u - 24576u; /* 0.375 * 65536 carries */
    CHECK(test_get(&x.param, i) == (up ? 1.0078125 : 1.0));
    ups += up;
  }
  CHECK(ups > 3 && ups < N - 3);
  tensor_drop(&x);
}

TEST(stochastic_rounding_is_unbiased) {
  enum { N = 100000 };
  static const double fractions[] = {0.5, 0.1, 0.9, 1.0 / 64};
  for (int f = 0; f < 4; f++) {
    struct tensor x = ones(N);
    struct adamw a = steady((float)(fractions[f] * 0x1p-7));
    update(dev[1], &x, 0, N, &a, 0, NULL);
    int64_t ups = 0, pairs = 0;
    for (int64_t i = 0; i < N; i++) {
      bool up = test_get(&x.param, i) > 1.0;
      CHECK(test_get(&x.param, i) == (up ? 1.0078125 : 1.0));
      ups += up;
      if (i % 2) pairs += up && test_get(&x.param, i - 1) > 1.0;
    }
    double p = fractions[f], sigma = sqrt(N * p * (1 - p)), sigma_pairs = sqrt(N / 2.0 * p * p * (1 - p * p));
    CHECK_CLOSE(ups, N * p, 4.5 * sigma);
    CHECK_CLOSE(pairs, N / 2.0 * p * p, 4.5 * sigma_pairs); /* neighbours are independent */
    tensor_drop(&x);
  }
}

/* ---- measures ------------------------------------------------------------ */
TEST(measure) {
  static const struct {
    int64_t rows, cols;
  } shapes[] = {{1, 1}, {3, 96}, {70, 1000}, {5, 4096}, {1, 65536}, {0, 8}, {131, 1001}};
  for (int i = 0; i < 14; i++) {
    int64_t rows = shapes[i / 2].rows, cols = shapes[i / 2].cols, n = rows * cols;
    struct matrix x = test_random(test_types[i % 2], rows, cols, 60 + (uint64_t)i, 1.0);
    int64_t bad = 0;
    if (n > 200) {
      test_set(&x, 5, (double)NAN), test_set(&x, n - 1, INFINITY), test_set(&x, 100, -INFINITY), bad = 3;
      test_set(&x, 7, -3e38), test_set(&x, 8, 1e-40); /* squares beyond FP32 */
    }
    double sum = 10.0, amax = 0.5;
    for (int64_t e = 0; e < n; e++) {
      double v = test_get(&x, e);
      if (isfinite(v)) sum += v * v, amax = fmax(amax, fabs(v));
    }
    struct measure got[3];
    for (int k = 0; k < 3; k++) {
      got[k] = (struct measure){.sum_squares = 10.0, .nonfinite = 4, .amax = 0.5f};
      cpu_measure(dev[k], &got[k], &x, 1);
      CHECK(got[k].sum_squares == got[0].sum_squares && got[k].nonfinite == got[0].nonfinite);
      CHECK(got[k].amax == got[0].amax);
    }
    CHECK_CLOSE(got[0].sum_squares / sum, 1.0, 1e-12);
    CHECK_EQ_I64(got[0].nonfinite, 4 + bad);
    CHECK((double)got[0].amax == amax);
    if (bad == 0 && x.dtype == DTYPE_F32) {
      struct measure zero = {0};
      cpu_measure(dev[2], &zero, &x, 1);
      CHECK(zero.sum_squares == reduce_long_sum_squares(x.data, n));
    }
    free(x.data);
  }
  /* The definition's chunks, on more than one of them. */
  struct matrix x = test_random(DTYPE_F32, 1, 2 * REDUCE_CHUNK + 77, 2, 1.0);
  struct measure m = {0};
  cpu_measure(dev[1], &m, &x, 1);
  CHECK(m.sum_squares == reduce_long_sum_squares(x.data, x.cols));
  free(x.data);
}

TEST(sum) {
  static const int64_t sizes[] = {0, 1, 1023, 4096, 65536, 2 * REDUCE_CHUNK + 77};
  for (int i = 0; i < 12; i++) {
    int64_t n = sizes[i / 2];
    struct matrix x = test_random(test_types[i % 2], 1, n, 90 + (uint64_t)i, 1.0), wide = test_matrix(DTYPE_F32, 1, n);
    double want = 0, size = 0, got[3];
    for (int64_t e = 0; e < n; e++) {
      test_set(&wide, e, test_get(&x, e));
      want += test_get(&x, e), size += fabs(test_get(&x, e));
    }
    for (int k = 0; k < 3; k++) {
      got[k] = 10.0;
      cpu_sum(dev[k], &got[k], &x);
      CHECK(got[k] == 10.0 + reduce_long_sum(wide.data, n));
    }
    CHECK(test_near(got[0], 10.0 + want, 1e-13 * (10.0 + size)));
    /* What is not finite stays in the sum. */
    if (n > 1) {
      test_set(&x, n - 1, INFINITY);
      cpu_sum(dev[1], &got[1], &x);
      CHECK(got[1] == INFINITY);
      test_set(&x, 0, -INFINITY);
      cpu_sum(dev[2], &got[2], &x);
      CHECK(isnan(got[2]));
    }
    free(x.data), free(wide.data);
  }
}

static void weigh_chunk(const void *op, int64_t first, int64_t n, struct longsum_part *part) {
  part->sum[0] = (double)n;
  part->sum[1] = *(const double *)op * (double)(first / REDUCE_CHUNK % 1000 + 1);
  part->count = first % REDUCE_CHUNK == 0;
  part->largest = (uint32_t)(first / REDUCE_CHUNK);
}

TEST(long_sums_go_on_in_waves) {
  const int64_t n = 3000000005; /* no memory of that size is touched */
  const double step = 0.1;
  double want = 0.0; /* in chunk order */
  for (int64_t c = 0; c < n / REDUCE_CHUNK + 1; c++) want += step * (double)(c % 1000 + 1);
  for (int k = 0; k < 3; k++) {
    struct longsum_part total = cpu_longsum(dev[k], n, &step, weigh_chunk);
    CHECK(total.sum[0] == (double)n && total.sum[1] == want);
    CHECK_EQ_I64(total.count, n / REDUCE_CHUNK + 1);
    CHECK_EQ_I64(total.largest, n / REDUCE_CHUNK);
  }
}

TEST(bits_are_fixed) {
  struct matrix x = test_random(DTYPE_F32, 5, 2500, 77, 6.0), d = test_matrix(DTYPE_F32, 5, 2500);
  static const int32_t targets[5] = {0, 2499, -1, 77, 1024};
  float nll[5];
  cpu_cross_entropy(dev[2], nll, &d, &x, targets, 0.125f);
  CHECK_HASH(test_hash_matrix(test_hash(TEST_HASH_START, nll, 5, 4), &d), 0x7b39b1cb755ee840u);
  struct measure seen = {0};
  cpu_measure(dev[2], &seen, &x, 1);
  CHECK_HASH(test_hash(test_hash(TEST_HASH_START, &seen.sum_squares, 1, 8), &seen.amax, 1, 4),
             0x3f1c61f9ac5b91cau);
  static const uint64_t expected[4] = {0xed140f0b879ac4d4u, 0xbfde75c8458c5eacu, 0x530f5c458e6eeb3au,
                                       0xed140f0b879ac4d4u};
  for (int i = 0; i < 4; i++) {
    struct tensor t = tensor(kinds[i].type, kinds[i].master, 70001, 9);
    struct update_measure moved = {0};
    update(dev[1], &t, 0, t.n, &adam, decay, &moved);
    update(dev[1], &t, 0, t.n, &adam, decay, &moved);
    uint64_t h = test_hash_matrix(test_hash_matrix(TEST_HASH_START, &t.param), &t.m);
    CHECK_HASH(test_hash(test_hash_matrix(h, &t.v), &moved, 2, 8), expected[i]);
    tensor_drop(&t);
  }
  free(x.data), free(d.data);
}

int main(void) {
  for (int k = 0; k < 3; k++) dev[k] = test_device(k + 1, &extent);
  RUN(cross_entropy);
  RUN(cross_entropy_gradient_is_the_derivative);
  RUN(cross_entropy_extremes);
  RUN(adamw);
  RUN(adamw_of_bf16_gradients);
  RUN(stochastic_rounding_knows_no_slices);
  RUN(stochastic_rounding_draws_the_contract);
  RUN(stochastic_rounding_is_unbiased);
  RUN(measure);
  RUN(sum);
  RUN(long_sums_go_on_in_waves);
  RUN(bits_are_fixed);
  for (int k = 0; k < 3; k++) test_device_close(dev[k]);
  return test_report();
}
