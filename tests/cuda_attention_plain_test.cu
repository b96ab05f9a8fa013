/* The CUDA backends' plain attention beside the CPU's: close, with the same promises
 * about what a query does not see. */
#include "tests/cuda_twin.h"

static struct extent extents() {
  struct extent x = {};
  x.tokens = 512, x.head_chunk = 8, x.attention = {2, 256, 8, 2, 256}, x.hidden_size = 64, x.ffn_size = 64, x.vocab_size = 300;
  return x;
}

struct problem {
  struct attention_shape s;
  struct twin qkv, out, d_out, d_qkv, lse, top;
  int32_t *starts, *device_starts; /* NULL: whole samples */
};

static struct problem problem_of(enum dtype t, struct attention_shape s, double size, uint64_t key) {
  struct problem p = {};
  const int64_t n = s.batch * s.seq_len, wide = (s.n_heads + 2 * s.n_kv_heads) * s.head_dim, narrow = s.n_heads * s.head_dim;
  struct matrix top = rig_matrix(DTYPE_F32, 1, 1);
  rig_set(&top, 0, -INFINITY);
  p.s = s;
  p.qkv = twin_of(rig_random(t, n, wide, key, size));
  p.out = twin_of(rig_matrix(t, n, narrow));
  p.d_out = twin_of(rig_random(t, n, narrow, key + 1, 1.0));
  p.d_qkv = twin_of(rig_matrix(t, n, wide));
  p.lse = twin_of(rig_matrix(DTYPE_F32, s.batch * s.n_heads, s.seq_len));
  p.top = twin_of(top);
  return p;
}

/* Documents: of a thousand tokens `rate` begin one. */
static void divide(struct problem *p, uint32_t rate) {
  const int64_t n = p->s.batch * p->s.seq_len;
  p->starts = static_cast<int32_t *>(rig_host((size_t)n * sizeof *p->starts));
  for (int64_t t = 0; t < n; t++) {
    const int64_t i = t % p->s.seq_len;
    const uint32_t word = philox4x32_10(33, philox_counter(4, 0, 0, 0, (uint32_t)t)).word[0];
    p->starts[t] = i > 0 ? word % 1000 < rate ? (int32_t)i : p->starts[t - 1] : 0;
  }
  p->device_starts = static_cast<int32_t *>(rig_put(&rig, p->starts, (size_t)n * sizeof *p->starts));
}

static void problem_drop(struct problem *p) {
  struct twin *const all[] = {&p->qkv, &p->out, &p->d_out, &p->d_qkv, &p->lse, &p->top};
  for (struct twin *t : all) twin_drop(t);
  if (p->starts) rig_drop(&rig, p->device_starts), free(p->starts);
}

static void set_qkv(struct problem *p, int64_t row, int64_t col, double x) {
  const int64_t i = row * p->qkv.host.cols + col;
  rig_set(&p->qkv.host, i, x);
  rig.gpu->k->upload(rig.gpu, p->qkv.device.data, p->qkv.host.data, rig_bytes(&p->qkv.host));
  rig_synchronize(&rig);
}

static void run_cpu(struct problem *p) {
  float *lse = static_cast<float *>(p->lse.host.data), *top = static_cast<float *>(p->top.host.data);
  rig.cpu->k->attention_forward(rig.cpu, &p->out.host, lse, top, NULL, &p->qkv.host, NULL, p->starts, &p->s);
  rig.cpu->k->attention_backward(rig.cpu, &p->d_qkv.host, NULL, &p->d_out.host, NULL, &p->out.host, lse, &p->qkv.host, NULL, p->starts, &p->s);
}

static void run_gpu(struct problem *p) {
  float *lse = static_cast<float *>(p->lse.device.data), *top = static_cast<float *>(p->top.device.data);
  cuda_attention_forward(rig.gpu, &p->out.device, lse, top, NULL, &p->qkv.device, NULL, p->device_starts, &p->s);
  cuda_attention_backward(rig.gpu, &p->d_qkv.device, NULL, &p->d_out.device, NULL, &p->out.device, lse, &p->qkv.device, NULL,
                          p->device_starts, &p->s);
}

/* |got - want| / |want| over columns [from, to), and NaN in the same places. */
static double distance(const char *what, const struct matrix *got, const struct matrix *want, int64_t from, int64_t to) {
  double difference = 0, norm = 0;
  for (int64_t r = 0; r < want->rows; r++)
    for (int64_t c = from; c < to; c++) {
      const double a = rig_value(got, r * want->cols + c), b = rig_value(want, r * want->cols + c);
      if (isnan(a) != isnan(b)) FAIL("%s: row %" PRId64 " column %" PRId64 " is %g, expected %g", what, r, c, a, b);
      if (!isfinite(b)) continue;
      difference += (a - b) * (a - b), norm += b * b;
    }
  return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

/* In BF16 both round an FP32 result to nearest: 2^-9 apart from it, or one step of 2^-8 apart. */
static void compare(struct problem *p) {
  const double bound = p->qkv.host.dtype == DTYPE_F32 ? 1e-5 : 6e-3;
  const int64_t q = p->s.n_heads * p->s.head_dim, k = q + p->s.n_kv_heads * p->s.head_dim;
  struct matrix out = rig_matrix_get(&rig, &p->out.device), d_qkv = rig_matrix_get(&rig, &p->d_qkv.device);
  struct matrix lse = rig_matrix_get(&rig, &p->lse.device), top = rig_matrix_get(&rig, &p->top.device);
  const struct {
    const char *name;
    double error;
  } parts[] = {{"out", distance("out", &out, &p->out.host, 0, q)},
               {"dq", distance("dq", &d_qkv, &p->d_qkv.host, 0, q)},
               {"dk", distance("dk", &d_qkv, &p->d_qkv.host, q, k)},
               {"dv", distance("dv", &d_qkv, &p->d_qkv.host, k, p->qkv.host.cols)}};
  for (const auto &part : parts)
    if (!(part.error < bound))
      FAIL("%s of b%d s%d h%d/%d d%d %s: error %.3g, allowed %g", part.name, (int)p->s.batch, (int)p->s.seq_len, (int)p->s.n_heads,
           (int)p->s.n_kv_heads, (int)p->s.head_dim, dtype_name(p->qkv.host.dtype), part.error, bound);
  for (int64_t i = 0; i < lse.rows * lse.cols; i++) {
    const double want = rig_value(&p->lse.host, i), got = rig_value(&lse, i);
    if (!(fabs(got - want) <= 2e-6 * (1 + fabs(want))) && got != want && !(isnan(got) && isnan(want)))
      FAIL("lse %" PRId64 ": %.9g, expected %.9g", i, got, want);
  }
  const double want = rig_value(&p->top.host, 0), got = rig_value(&top, 0);
  if (got != want) CHECK_CLOSE(got, want, 2e-6 * (1 + fabs(want))); /* both may be infinite */
  free(out.data), free(d_qkv.data), free(lse.data), free(top.data);
}

TEST(beside_the_cpu) {
  static const struct attention_shape shapes[] = {{3, 1, 4, 4, 32}, {2, 17, 4, 1, 64},  {1, 129, 2, 1, 64}, {2, 65, 3, 1, 10},
                                                  {1, 70, 2, 2, 128}, {1, 33, 1, 1, 256}, {1, 31, 2, 1, 1}, {1, 100, 2, 1, 96}};
  int number = 0;
  for (const struct attention_shape &s : shapes) {
    for (int documents = 0; documents < 2; documents++, number++) {
      struct problem p = problem_of(twin_types[number / 2 % 2 != documents], s, 1.5, 10 + (uint64_t)number);
      if (documents) divide(&p, number % 4 == 1 ? 300 : 30);
      run_cpu(&p);
      run_gpu(&p);
      compare(&p);
      problem_drop(&p);
    }
  }
}

/* Twice in other orders of blocks and threads: the same bits. */
TEST(deterministic) {
  struct problem p = problem_of(DTYPE_F32, {1, 100, 4, 2, 16}, 2.0, 5);
  run_gpu(&p);
  struct matrix out = rig_matrix_get(&rig, &p.out.device), d_qkv = rig_matrix_get(&rig, &p.d_qkv.device);
  run_gpu(&p);
  struct matrix out_again = rig_matrix_get(&rig, &p.out.device), d_qkv_again = rig_matrix_get(&rig, &p.d_qkv.device);
  rig_same("out", &out_again, &out);
  rig_same("d_qkv", &d_qkv_again, &d_qkv);
  void *const all[] = {out.data, d_qkv.data, out_again.data, d_qkv_again.data};
  for (void *x : all) free(x);
  problem_drop(&p);
}

/* Whatever a token becomes, what queries before it get does not change by a bit. */
TEST(causality) {
  static const int64_t changed[] = {1, 32, 63, 64, 90};
  static const double values[] = {NAN, INFINITY, -INFINITY, 3.0, NAN};
  const struct attention_shape s = {1, 100, 2, 1, 16};
  struct problem p = problem_of(DTYPE_F32, s, 2.0, 6);
  run_gpu(&p);
  struct matrix out = rig_matrix_get(&rig, &p.out.device);
  for (int n = 0; n < 5; n++) {
    struct problem b = problem_of(DTYPE_F32, s, 2.0, 6);
    for (int64_t c = 0; c < b.qkv.host.cols; c++) set_qkv(&b, changed[n], c, values[n]);
    run_cpu(&b);
    run_gpu(&b);
    struct matrix got = rig_matrix_get(&rig, &b.out.device);
    CHECK(memcmp(got.data, out.data, (size_t)(changed[n] * out.cols) * sizeof(float)) == 0);
    CHECK(memcmp(got.data, out.data, rig_bytes(&out)) != 0);
    if (values[n] == 3.0) compare(&b);
    free(got.data);
    problem_drop(&b);
  }
  free(out.data);
  problem_drop(&p);
}

/* A NaN or an infinity in a key or a value reaches what the CPU's reaches, within its document. */
TEST(not_finite) {
  for (int n = 0; n < 4; n++) {
    struct problem p = problem_of(DTYPE_F32, {1, 90, 2, 1, 12}, 1.0, 7);
    if (n % 2) divide(&p, 40);
    set_qkv(&p, 50, (n < 2 ? 2 : 3) * 12 + 5, n % 2 ? INFINITY : NAN);
    run_cpu(&p);
    run_gpu(&p);
    compare(&p);
    problem_drop(&p);
  }
}

TEST(largest_logit_only_grows) {
  struct problem p = problem_of(DTYPE_F32, {1, 5, 1, 1, 4}, 1.0, 8);
  const float most = 1e6f;
  rig.gpu->k->upload(rig.gpu, p.top.device.data, &most, sizeof most);
  run_gpu(&p);
  struct matrix top = rig_matrix_get(&rig, &p.top.device);
  CHECK(rig_value(&top, 0) == 1e6);
  free(top.data);
  problem_drop(&p);
}

/* What sm90's own kernels do not take, its table gives to these. */
TEST(table_of_sm90) {
  static const struct {
    enum dtype type;
    int64_t head_dim;
  } cases[] = {{DTYPE_F32, 64}, {DTYPE_BF16, 20}};
  const struct extent x = extents();
  struct rig hopper = rig_open("sm90", &x);
  for (const auto &c : cases) {
    struct problem p = problem_of(c.type, {1, 40, 2, 1, c.head_dim}, 1.0, 9);
    float *lse = static_cast<float *>(p.lse.device.data), *top = static_cast<float *>(p.top.device.data);
    run_cpu(&p);
    hopper.gpu->k->attention_forward(hopper.gpu, &p.out.device, lse, top, NULL, &p.qkv.device, NULL, NULL, &p.s);
    hopper.gpu->k->attention_backward(hopper.gpu, &p.d_qkv.device, NULL, &p.d_out.device, NULL, &p.out.device, lse, &p.qkv.device, NULL,
                                      NULL, &p.s);
    rig_synchronize(&hopper);
    compare(&p);
    problem_drop(&p);
  }
  rig_close(&hopper);
}

int main() {
  const struct extent x = extents();
  rig = rig_open(rig_on_gpu ? "sm90" : "sm100", &x); /* called by name, they run on both */
  RUN(beside_the_cpu);
  RUN(deterministic);
  RUN(causality);
  RUN(not_finite);
  RUN(largest_logit_only_grows);
  RUN(table_of_sm90);
  rig_close(&rig);
  return test_report();
}
