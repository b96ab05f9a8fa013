/* AdamW and the measure of a matrix on the CUDA backends: the CPU's bits.
 * Cross-entropy: close to the CPU's. */
#include "tests/cuda_twin.h"

#include "kernels/cuda/sigmoid.cuh"

static struct extent extents() {
  struct extent x = {};
  x.tokens = 64, x.head_chunk = 16, x.attention = {1, 64, 4, 2, 32}, x.hidden_size = 64, x.ffn_size = 64, x.vocab_size = 300;
  return x;
}

/* ---- measure --------------------------------------------------------------- */
static struct measure measure_get(const struct measure *device) {
  struct measure m = {};
  rig_get(&rig, &m, device, sizeof m);
  return m;
}

/* Numbers of like size, in which the order of a sum shows, and of any. The last has
 * several waves of chunks where the model runs. */
TEST(measure) {
  static const int64_t sizes[] = {1, 5, 127, 1023, 1024, 1025, 4097, 65535, 65536, 65537, 131072 + 77, 9 * 65536 + 3};
  int number = 0;
  for (int64_t n : sizes)
    for (int kind = 0; kind < 4; kind++) {
      const enum dtype t = twin_types[kind % 2];
      const int64_t rows = kind >= 2 && n > 2000 ? n / 1000 : 1, cols = rows > 1 ? 1000 : n;
      const uint64_t key = 20 + (uint64_t)number;
      struct twin x = twin_shifted(kind < 2 ? rig_random(t, rows, cols, key, 3.0) : twin_values(t, rows, cols, key, 3.0), number % 3 == 1);
      struct measure want = {0.7, 2, number % 2 ? 1e38f : 0.0f};
      struct measure *device = static_cast<struct measure *>(rig_put(&rig, &want, sizeof want));
      for (int twice = 0; twice < 2; twice++) { /* added to what is there */
        rig.cpu->k->measure(rig.cpu, &want, &x.host, 1);
        rig.gpu->k->measure(rig.gpu, device, &x.device, 1);
      }
      const struct measure got = measure_get(device);
      CHECK(got.sum_squares == want.sum_squares && got.nonfinite == want.nonfinite && got.amax == want.amax);
      rig_drop(&rig, device), twin_drop(&x);
      number++;
    }
}

/* Several matrices in one call, one of them longer than a wave, one empty. */
TEST(measure_of_a_list) {
  static const int64_t sizes[] = {65536, 5, 0, 9 * 65536 + 3, 2 * 65536, 77};
  for (enum dtype t : twin_types) {
    struct twin x[18];
    struct matrix host[18], device[18];
    struct measure want[18] = {}, got[18];
    for (int i = 0; i < 18; i++) {
      x[i] = twin_of(rig_random(t, 1, sizes[i % 6], 700 + (uint64_t)i, 3.0));
      host[i] = x[i].host, device[i] = x[i].device;
    }
    struct measure *to = static_cast<struct measure *>(rig_put(&rig, want, sizeof want));
    rig.cpu->k->measure(rig.cpu, want, host, 18);
    rig.gpu->k->measure(rig.gpu, to, device, 18);
    rig_get(&rig, got, to, sizeof got);
    for (int i = 0; i < 18; i++) CHECK(got[i].sum_squares == want[i].sum_squares && got[i].nonfinite == want[i].nonfinite && got[i].amax == want[i].amax);
    for (struct twin &each : x) twin_drop(&each);
    rig_drop(&rig, to);
  }
}

/* What is not finite stays in the sum, as on the CPU. */
TEST(sum) {
  static const int64_t sizes[] = {1, 5, 127, 1023, 1024, 1025, 4097, 65536, 65537, 131072 + 77, 9 * 65536 + 3};
  int number = 0;
  for (int64_t n : sizes)
    for (enum dtype t : twin_types) {
      struct twin x = twin_shifted(number % 5 == 4 ? twin_values(t, 1, n, 60 + (uint64_t)number, 3.0) : rig_random(t, 1, n, 60 + (uint64_t)number, 3.0), number % 3 == 1);
      double want = 0.7, got = 0;
      double *device = static_cast<double *>(rig_put(&rig, &want, sizeof want));
      for (int twice = 0; twice < 2; twice++) { /* added to what is there */
        rig.cpu->k->sum(rig.cpu, &want, &x.host);
        rig.gpu->k->sum(rig.gpu, device, &x.device);
      }
      rig_get(&rig, &got, device, sizeof got);
      CHECK(got == want || (isnan(got) && isnan(want)));
      rig_drop(&rig, device), twin_drop(&x);
      number++;
    }
}

/* ---- AdamW ----------------------------------------------------------------- */
struct tensor {
  struct twin param, master, m, v, grad;
  struct update_measure host;
  struct update_measure *device;
};

static struct tensor tensor_of(enum dtype t, enum dtype gradient, int64_t n, int number, int64_t shift) {
  const uint64_t key = 100 + 5 * (uint64_t)number;
  struct tensor x = {};
  struct matrix v = rig_random(DTYPE_F32, 1, n, key + 2, 0.01);
  for (int64_t i = 0; i < n; i++) rig_set(&v, i, fabs(rig_value(&v, i)));
  x.param = twin_shifted(twin_values(t, 1, n, key, 0.5), shift);
  x.master = twin_shifted(rig_random(DTYPE_F32, 1, n, key, 0.5), shift);
  x.m = twin_shifted(rig_random(DTYPE_F32, 1, n, key + 1, 0.01), shift);
  x.v = twin_shifted(v, shift);
  x.grad = twin_shifted(twin_values(gradient, 1, n, key + 3 + (uint64_t)(number % 8 == 5), 1.0), shift);
  x.host = {0.25, 3.5};
  x.device = static_cast<struct update_measure *>(rig_put(&rig, &x.host, sizeof x.host));
  return x;
}

static const struct draw draws = {0x123456789ABCDEFu, 17, 0, 0, 0, DRAW_PARAMETER};

/* Updates the tensors, of one kind, in one list. */
static void update(struct tensor *x, int count, bool with_master, const struct adamw *a, const uint64_t *firsts, bool measured) {
  const auto run = [&](bool gpu) {
    struct adamw_tensor list[8] = {};
    struct device *d = gpu ? rig.gpu : rig.cpu;
    for (int i = 0; i < count; i++) {
      const auto data = [&](const struct twin &t) { return gpu ? t.device.data : t.host.data; };
      list[i].param = data(x[i].param);
      list[i].master = with_master ? static_cast<float *>(data(x[i].master)) : NULL;
      list[i].m = static_cast<float *>(data(x[i].m)), list[i].v = static_cast<float *>(data(x[i].v));
      list[i].grad = data(x[i].grad);
      list[i].n = x[i].param.host.cols;
      list[i].weight_decay = (firsts[i] + (uint64_t)i) % 3 ? 0.1f : 0.0f;
      list[i].layer = 5 + (uint32_t)i;
      list[i].first = firsts[i];
      list[i].measured = !measured ? NULL : gpu ? x[i].device : &x[i].host;
    }
    d->k->adamw_update(d, list, count, x[0].param.host.dtype, x[0].grad.host.dtype, a, &draws);
  };
  run(false);
  run(true);
}

/* Equal, or both NaN. */
static bool same_number(double a, double b) { return a == b || (isnan(a) && isnan(b)); }

static void tensor_check(struct tensor *x) {
  struct update_measure got = {};
  rig_get(&rig, &got, x->device, sizeof got);
  if (!same_number(got.update_sum_squares, x->host.update_sum_squares) || !same_number(got.weight_sum_squares, x->host.weight_sum_squares))
    FAIL("n %" PRId64 ": measured %a and %a, expected %a and %a", x->m.host.cols, got.update_sum_squares, got.weight_sum_squares,
         x->host.update_sum_squares, x->host.weight_sum_squares);
  struct twin *const all[] = {&x->param, &x->master, &x->m, &x->v, &x->grad};
  static const char *const names[] = {"param", "master", "m", "v", "grad"};
  for (int i = 0; i < 5; i++) {
    twin_same(names[i], all[i]);
    twin_drop(all[i]);
  }
  rig_drop(&rig, x->device);
}

/* The tensor's first element: draws of a slice are those of the whole, and beyond 2^32 blocks. */
TEST(adamw) {
  static const int64_t sizes[] = {1, 7, 8, 63, 1024, 1025, 5000, 65536, 65536 + 100, 5 * 65536 + 1};
  static const uint64_t firsts[] = {0, 16, 3, ((uint64_t)1 << 35) - 3, 4, ((uint64_t)7 << 36) + 13};
  static const float biases[] = {0.271f, 0.142625f, 1.0f, 0x1.fffffep-1f, 1e-13f};
  int number = 0;
  for (int64_t n : sizes)
    for (enum dtype t : twin_types)
      for (int with_master = 0; with_master < 2; with_master++, number++) {
        struct adamw a = {3e-3f, 0.9f, 0.95f, number % 7 == 6 ? 0.0f : 1e-8f, 0.7f, biases[number % 5], biases[number % 3]};
        struct tensor x = tensor_of(t, twin_types[number / 4 % 2], n, number, number % 5 == 2);
        for (int step = 0; step < 2; step++) update(&x, 1, with_master, &a, &firsts[number / 4 % 6], number % 4 != 3);
        tensor_check(&x);
      }
}

/* Of a list that has no elements, few, or more than a wave takes, in one call. */
TEST(adamw_of_a_list) {
  static const int64_t sizes[][8] = {{65536, 3, 0, 2 * 65536 + 5, 9 * 65536 + 8, 1, 65536, 4 * 65536}, {9 * 65536 + 3, 8, 5 * 65536, 0, 0, 0, 1024, 4 * 65536 + 1}};
  static const uint64_t firsts[] = {0, 8, 16, 0, 24, 5, 0, 40};
  int number = 200;
  for (const auto &list : sizes)
    for (int with_master = 0; with_master < 2; with_master++) {
      const struct adamw a = {3e-3f, 0.9f, 0.95f, 1e-8f, 0.7f, 0.271f, 0.142625f};
      struct tensor x[8];
      for (int i = 0; i < 8; i++) x[i] = tensor_of(DTYPE_BF16, twin_types[with_master], list[i], number++, 0);
      update(x, 8, with_master, &a, firsts, true);
      for (struct tensor &t : x) tensor_check(&t);
    }
}

/* The quotients by the biases are the CPU's, of numbers of every size. */
TEST(adamw_of_every_size) {
  enum { N = 3 * 65536 };
  static const float biases[] = {0.1f, 0.05f, 0x1.fffffep-1f, 0x1.000002p-1f, 3e-5f};
  for (int round = 0; round < 5; round++) {
    struct tensor x = tensor_of(DTYPE_F32, DTYPE_F32, N, 300 + round, 0);
    for (int64_t i = 0; i < N; i++) { /* grad 0: m and v are what they were, times 1 */
      const struct philox_block r = philox4x32_10(77, philox_counter((uint32_t)round, 0, 0, 0, (uint32_t)i));
      const uint32_t exponent = r.word[1] % 255; /* finite: subnormal to 2^127 */
      rig_set(&x.m.host, i, (double)f32_from_bits((r.word[0] & 0x807FFFFFu) | exponent << 23));
      rig_set(&x.v.host, i, (double)f32_from_bits((r.word[2] & 0x007FFFFFu) | (i % 64 ? exponent : 0u) << 23));
      rig_set(&x.grad.host, i, 0.0);
    }
    for (struct twin *t : {&x.m, &x.v, &x.grad}) rig.gpu->k->upload(rig.gpu, t->device.data, t->host.data, rig_bytes(&t->host));
    rig_synchronize(&rig);
    const struct adamw a = {3e-3f, 1.0f, 1.0f, 0.0f, 1.0f, biases[round], biases[(round + 2) % 5]};
    const uint64_t first = 0;
    update(&x, 1, round % 2, &a, &first, false);
    tensor_check(&x);
  }
}

/* ---- cross-entropy --------------------------------------------------------- */
static bool near(double got, double want, double bound) { return fabs(got - want) <= bound || got == want || (isnan(got) && isnan(want)); }

/* What both make of logits; the gradient in its own type, or in the logits' place. */
static void loss_case(const char *what, struct matrix logits, const int32_t *targets, enum dtype t, bool in_place) {
  const int64_t rows = logits.rows, n = logits.cols;
  struct twin x = twin_of(logits), nll = twin_of(rig_matrix(DTYPE_F32, 1, rows)), d = twin_of(rig_matrix(in_place ? DTYPE_F32 : t, rows, n));
  int32_t *device_targets = static_cast<int32_t *>(rig_put(&rig, targets, (size_t)rows * sizeof *targets));
  float *host_nll = static_cast<float *>(nll.host.data), *device_nll = static_cast<float *>(nll.device.data);
  rig.cpu->k->cross_entropy(rig.cpu, host_nll, &d.host, &x.host, targets, 0.37f);
  rig.gpu->k->cross_entropy(rig.gpu, device_nll, NULL, &x.device, device_targets, 0.37f);
  struct matrix alone = rig_matrix_get(&rig, &nll.device);
  rig.gpu->k->cross_entropy(rig.gpu, device_nll, in_place ? &x.device : &d.device, &x.device, device_targets, 0.37f);
  struct matrix got_nll = rig_matrix_get(&rig, &nll.device), got = rig_matrix_get(&rig, in_place ? &x.device : &d.device);
  rig_same("nll with and without a gradient", &got_nll, &alone);
  for (int64_t r = 0; r < rows; r++) {
    const double want = (double)host_nll[r], have = rig_value(&got_nll, r);
    if (!near(have, want, 2e-6 * (1 + fabs(want)))) FAIL("%s: nll of row %" PRId64 " is %.9g, expected %.9g", what, r, have, want);
    for (int64_t i = 0; i < n; i++) {
      const double dw = rig_value(&d.host, r * n + i), dg = rig_value(&got, r * n + i);
      const double bound = (got.dtype == DTYPE_BF16 ? 0x1p-7 : 4e-6) * fabs(dw) + (i == targets[r] ? 2e-7 : 1e-37);
      if (!near(dg, dw, bound)) {
        FAIL("%s: gradient of row %" PRId64 " column %" PRId64 " is %.9g, expected %.9g", what, r, i, dg, dw);
        break;
      }
    }
  }
  free(alone.data), free(got_nll.data), free(got.data);
  rig_drop(&rig, device_targets);
  twin_drop(&x), twin_drop(&nll), twin_drop(&d);
}

TEST(cross_entropy) {
  static const int64_t vocab[] = {1, 2, 7, 64, 258, 1000, 4096, 4099, 5000, 50257, 128256};
  int number = 0;
  for (int64_t n : vocab)
    for (int mode = 0; mode < 3; mode++, number++) {
      const int64_t rows = n > 5000 ? 2 : 5;
      int32_t targets[5];
      for (int r = 0; r < 5; r++) targets[r] = r == 3 ? -1 : (int32_t)((r + 1) * 7919 * (number + 1) % n);
      loss_case("random", rig_random(DTYPE_F32, rows, n, 20 + (uint64_t)number, 6.0), targets, twin_types[mode == 1], mode == 2);
    }
}

/* The first columns alone: what stands in the others, here NaN, has no part. Close to the
 * CPU's, and where rows are whole of the bits that a matrix without the others has. */
TEST(cross_entropy_within) {
  static const int64_t shapes[][2] = {{258, 258}, {260, 256}, {264, 258}, {1001, 1000}, {128256, 128000}, {8192, 1}};
  int number = 0;
  for (const auto &shape : shapes) {
    enum { ROWS = 4 };
    const int64_t cols = shape[0], n = shape[1];
    struct matrix logits = rig_random(DTYPE_F32, ROWS, cols, 80 + (uint64_t)number, 6.0), cut = rig_matrix(DTYPE_F32, ROWS, n);
    int32_t targets[ROWS];
    for (int64_t r = 0; r < ROWS; r++) {
      targets[r] = r == 2 ? -1 : (int32_t)((r + 1) * 7919 * (number + 1) % n);
      for (int64_t i = 0; i < n; i++) rig_set(&cut, r * n + i, rig_value(&logits, r * cols + i));
      for (int64_t i = n; i < cols; i++) rig_set(&logits, r * cols + i, NAN);
    }
    struct twin x = twin_of(logits), alone = twin_of(cut), nll = twin_of(rig_matrix(DTYPE_F32, 1, ROWS)), nll_alone = twin_of(rig_matrix(DTYPE_F32, 1, ROWS));
    int32_t *device_targets = static_cast<int32_t *>(rig_put(&rig, targets, sizeof targets));
    rig.cpu->k->cross_entropy_within(rig.cpu, static_cast<float *>(nll.host.data), &x.host, n, targets);
    rig.gpu->k->cross_entropy_within(rig.gpu, static_cast<float *>(nll.device.data), &x.device, n, device_targets);
    rig.gpu->k->cross_entropy(rig.gpu, static_cast<float *>(nll_alone.device.data), NULL, &alone.device, device_targets, 1.0f);
    struct matrix got = rig_matrix_get(&rig, &nll.device), want = rig_matrix_get(&rig, &nll_alone.device);
    if ((n % 4 == 0) == (cols % 4 == 0 && n % 4 == 0)) rig_same("nll of the first columns", &got, &want);
    for (int64_t r = 0; r < ROWS; r++) {
      const double expected = rig_value(&nll.host, r), have = rig_value(&got, r);
      if (!near(have, expected, 2e-6 * (1 + fabs(expected)))) FAIL("nll of row %" PRId64 " is %.9g, expected %.9g", r, have, expected);
    }
    free(got.data), free(want.data);
    rig_drop(&rig, device_targets);
    twin_drop(&x), twin_drop(&alone), twin_drop(&nll), twin_drop(&nll_alone);
    number++;
  }
}

TEST(cross_entropy_extremes) {
  enum { N = 1100, ROWS = 10 };
  for (int mode = 0; mode < 3; mode++) {
    const int64_t n = mode == 1 ? N + 1 : N;
    struct matrix x = rig_matrix(DTYPE_F32, ROWS, n);
    int32_t targets[ROWS];
    for (int r = 0; r < ROWS; r++) targets[r] = 3;
    for (int64_t i = 0; i < n; i++) {
      const double row[ROWS] = {i == 3 ? 1e30 : -1e30,   i == 4 ? 1e30 : -1e30, i % 2 ? 0.0 : -INFINITY,
                                i == 3 ? -INFINITY : 0.0, i == 1099 ? NAN : 1.0, i == 7 ? INFINITY : 1.0,
                                -1e30,                    -INFINITY,             i < 1000 ? -1000.0 - (double)i : -INFINITY,
                                -0.1 * (double)i};
      for (int r = 0; r < ROWS; r++) rig_set(&x, r * n + i, row[r]);
    }
    loss_case("extremes", x, targets, DTYPE_F32, mode == 2);
  }
}

/* The shorter exponential's bits are f32_exp's, from -86 to 0. */
enum { EXP_STEP = 997, EXP_COUNT = (0x42AC0000 / EXP_STEP) & ~0xFFFF };
static __global__ void exponentials_below_zero(float *to) {
  const unsigned first = blockIdx.x * 256 + threadIdx.x, every = gridDim.x * 256;
  for (unsigned i = first; i < EXP_COUNT; i += every) to[i] = exp_ordinary(f32_from_bits(0xC2AC0000u - i * EXP_STEP));
}

TEST(exponential_below_zero) {
  struct twin e = twin_of(rig_matrix(DTYPE_F32, 1, EXP_COUNT));
  for (unsigned i = 0; i < EXP_COUNT; i++) rig_set(&e.host, i, (double)f32_exp(f32_from_bits(0xC2AC0000u - i * EXP_STEP)));
  CUDA_LAUNCH(cuda_of(rig.gpu), exponentials_below_zero, 64, 256, 0, static_cast<float *>(e.device.data));
  twin_same("exponentials", &e);
  twin_drop(&e);
}

int main() {
  const struct extent x = extents();
  rig = rig_open("sm90", &x);
  RUN(measure);
  RUN(measure_of_a_list);
  RUN(sum);
  RUN(adamw);
  RUN(adamw_of_a_list);
  RUN(adamw_of_every_size);
  RUN(exponential_below_zero);
  RUN(cross_entropy);
  RUN(cross_entropy_within);
  RUN(cross_entropy_extremes);
  rig_close(&rig);
  return test_report();
}
