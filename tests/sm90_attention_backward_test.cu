/* Attention's backward on Hopper beside the same sums in double, element by element.
 *
 * What is allowed follows from what is rounded: P and dS to BF16 once each (2^-8 of
 * every term, as magnitudes), the gradient to BF16 once (2^-8 of it), and FP32 sums
 * and exponents (2^-14 of the terms without cancellation).  The CPU backend, which
 * rounds the gradient alone, must agree within the same. */
#include <vector>

extern "C" {
#include "kernels/rope.h"
}
#include "tests/cuda_rig.h"

static struct rig *devices() {
  static const struct extent extents = {600, 32, {3, 300, 8, 2, 128}, 96, 160, 100, DTYPE_BF16};
  static struct rig r = rig_open("sm90", &extents);
  return &r;
}

struct problem {
  struct attention_shape s;
  struct matrix qkv, out, d_out, cpu, gpu; /* the last two: d_qkv */
  float *lse;
  int32_t *starts; /* NULL: whole samples */
};

static int64_t tokens(const struct problem *p) { return p->s.batch * p->s.seq_len; }
static int64_t width(const struct problem *p) { return (p->s.n_heads + 2 * p->s.n_kv_heads) * p->s.head_dim; }

/* Documents of 1..longest tokens. */
static int32_t *documents(const struct attention_shape *s, int64_t longest, uint64_t key) {
  int32_t *starts = static_cast<int32_t *>(rig_host((size_t)(s->batch * s->seq_len) * 4));
  uint32_t draw = 0;
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0, first = 0, end = 0; i < s->seq_len; i++) {
      if (i == end) {
        const struct philox_block r = philox4x32_10(key, philox_counter(3, 0, 0, 0, draw++));
        first = i;
        end = i + 1 + r.word[0] % longest;
      }
      starts[b * s->seq_len + i] = (int32_t)first;
    }
  return starts;
}

/* out and lse are the CPU backend's forward; so are its gradients. */
static struct problem problem_new(struct attention_shape s, int64_t longest, double factor) {
  struct problem p = {};
  p.s = s;
  p.qkv = rig_random(DTYPE_BF16, tokens(&p), width(&p), 1 + (uint64_t)s.seq_len, factor);
  p.d_out = rig_random(DTYPE_BF16, tokens(&p), s.n_heads * s.head_dim, 2 + (uint64_t)s.seq_len, 1.0);
  p.out = rig_matrix(DTYPE_BF16, tokens(&p), s.n_heads * s.head_dim);
  p.cpu = rig_matrix(DTYPE_BF16, tokens(&p), width(&p));
  p.gpu = rig_matrix(DTYPE_BF16, tokens(&p), width(&p));
  p.lse = static_cast<float *>(rig_host((size_t)(tokens(&p) * s.n_heads) * 4));
  if (longest) p.starts = documents(&s, longest, 5 + (uint64_t)s.seq_len);
  struct device *cpu = devices()->cpu;
  cpu->k->attention_forward(cpu, &p.out, p.lse, NULL, NULL, &p.qkv, NULL, p.starts, &s);
  cpu->k->attention_backward(cpu, &p.cpu, NULL, &p.d_out, NULL, &p.out, p.lse, &p.qkv, NULL, p.starts, &s);
  return p;
}

static void problem_free(struct problem *p) {
  void *const all[] = {p->qkv.data, p->out.data, p->d_out.data, p->cpu.data, p->gpu.data, p->lse, p->starts};
  for (void *x : all) free(x);
}

/* angles: of the GPU's memory, or NULL.  What stands in scratch before is NaN: nothing is read of it that was not written. */
static void run(struct problem *p, const float *angles = NULL) {
  struct rig *r = devices();
  struct cuda_device *d = cuda_of(r->gpu);
  struct extent extent = {};
  extent.attention = p->s;
  extent.attention_backward = DTYPE_BF16;
  const std::vector<uint8_t> nan((size_t)sm90_attention_backward_scratch_bytes(d, &extent), 0xFF);
  r->gpu->k->upload(r->gpu, d->scratch, nan.data(), nan.size());
  rig_synchronize(r);
  struct matrix filler = rig_matrix(DTYPE_BF16, p->gpu.rows, p->gpu.cols);
  struct matrix qkv = rig_matrix_put(r, &p->qkv), out = rig_matrix_put(r, &p->out), d_out = rig_matrix_put(r, &p->d_out),
                d_qkv = rig_matrix_put(r, &filler);
  float *lse = static_cast<float *>(rig_put(r, p->lse, (size_t)(tokens(p) * p->s.n_heads) * 4));
  int32_t *starts = p->starts ? static_cast<int32_t *>(rig_put(r, p->starts, (size_t)tokens(p) * 4)) : NULL;
  if (angles) r->gpu->k->attention_rope_backward(r->gpu, &d_qkv, &d_out, &out, lse, &qkv, angles, starts, &p->s);
  else r->gpu->k->attention_backward(r->gpu, &d_qkv, NULL, &d_out, NULL, &out, lse, &qkv, NULL, starts, &p->s);
  rig_synchronize(r);
  rig_get(r, p->gpu.data, d_qkv.data, rig_bytes(&p->gpu));
  void *const all[] = {qkv.data, out.data, d_out.data, d_qkv.data, lse};
  for (void *x : all) rig_drop(r, x);
  if (starts) rig_drop(r, starts);
  free(filler.data);
}

static std::vector<double> doubles(const struct matrix *m) {
  std::vector<double> x((size_t)(m->rows * m->cols));
  for (size_t i = 0; i < x.size(); i++) x[i] = rig_value(m, (int64_t)i);
  return x;
}

/* Gradients in double of the out and lse that the kernels get, and what may be
 * between: `rounded` sums magnitudes of terms, `tail` those before cancellation. */
struct literal {
  std::vector<double> value, rounded, tail;
};

/* row += factor * y, with what that may be off. */
static void add(struct literal *x, int64_t row, const double *y, int64_t n, double factor, double rounded, double tail) {
  double *value = &x->value[(size_t)row], *r = &x->rounded[(size_t)row], *t = &x->tail[(size_t)row];
  for (int64_t d = 0; d < n; d++) {
    value[d] += factor * y[d];
    r[d] += rounded * fabs(y[d]);
    t[d] += tail * fabs(y[d]);
  }
}

static struct literal literal_of(const struct problem *p) {
  const struct attention_shape *s = &p->s;
  const int64_t D = s->head_dim, cols = width(p), o_cols = s->n_heads * D;
  const double scale = 1 / sqrt((double)D);
  const std::vector<double> qkv = doubles(&p->qkv), out = doubles(&p->out), d_out = doubles(&p->d_out);
  struct literal x = {std::vector<double>(qkv.size()), std::vector<double>(qkv.size()), std::vector<double>(qkv.size())};
  for (int64_t t = 0; t < tokens(p); t++)
    for (int64_t h = 0; h < s->n_heads; h++) {
      const int64_t sample = t / s->seq_len, i = t % s->seq_len, kv = h / (s->n_heads / s->n_kv_heads), q_at = t * cols + h * D;
      const double *q = &qkv[(size_t)q_at], *g = &d_out[(size_t)(t * o_cols + h * D)], *o = &out[(size_t)(t * o_cols + h * D)];
      const double lse = (double)p->lse[(sample * s->n_heads + h) * s->seq_len + i];
      double centre = 0, centre_size = 0;
      for (int64_t d = 0; d < D; d++) {
        centre += g[d] * o[d];
        centre_size += fabs(g[d] * o[d]);
      }
      for (int64_t j = p->starts ? p->starts[t] : 0; j <= i; j++) {
        const int64_t k_at = (sample * s->seq_len + j) * cols + (s->n_heads + kv) * D, v_at = k_at + s->n_kv_heads * D;
        const double *k = &qkv[(size_t)k_at], *v = &qkv[(size_t)v_at];
        double score = 0, dp = 0, size = centre_size;
        for (int64_t d = 0; d < D; d++) {
          score += q[d] * k[d];
          dp += g[d] * v[d];
          size += fabs(g[d] * v[d]);
        }
        const double prob = exp(score * scale - lse), ds = prob * (dp - centre) * scale, ds_tail = prob * size * scale;
        add(&x, q_at, k, D, ds, fabs(ds), ds_tail);
        add(&x, k_at, q, D, ds, fabs(ds), ds_tail);
        add(&x, v_at, g, D, prob, prob, prob);
      }
    }
  return x;
}

static double worst; /* of what is allowed, the largest share seen */

static void compare(const struct problem *p) {
  const struct literal x = literal_of(p);
  for (size_t i = 0; i < x.value.size(); i++) {
    const double u = 0x1p-8, allowed = u * x.rounded[i] + u * fabs(x.value[i]) + 0x1p-14 * x.tail[i] + 0x1p-126;
    const double got = rig_value(&p->gpu, (int64_t)i), cpu = rig_value(&p->cpu, (int64_t)i);
    if (!(fabs(got - x.value[i]) <= allowed) || !(fabs(got - cpu) <= allowed + u * fabs(x.value[i]))) {
      const int64_t D = p->s.head_dim, col = (int64_t)i % width(p) / D, heads = p->s.n_heads, kv = p->s.n_kv_heads;
      FAIL("%s of b%d s%d h%d/%d d%d%s: token %d, head %d, column %d is %.6g, not %.6g (CPU %.6g), allowed %.2g",
           col < heads ? "dq" : col < heads + kv ? "dk" : "dv", (int)p->s.batch, (int)p->s.seq_len, (int)heads, (int)kv, (int)D,
           p->starts ? " in documents" : "", (int)((int64_t)i / width(p)), (int)col, (int)((int64_t)i % D), got, x.value[i], cpu, allowed);
      return;
    }
    const double share = fabs(got - x.value[i]) / allowed;
    if (share > worst) worst = share;
  }
}

static void check(struct attention_shape s, int64_t longest) {
  struct problem p = problem_new(s, longest, 1.5);
  run(&p);
  compare(&p);
  problem_free(&p);
}

/* Every place of the sequence's end in a block of 128, groups of 1, 2 and 4, both widths. */
TEST(against_double) {
  static const int lengths[] = {1, 2, 31, 63, 64, 65, 100, 127, 128, 129, 192, 200, 255, 257, 300};
  int n = 0;
  for (int seq_len : lengths) {
    const int64_t group = (int64_t)1 << n % 3, kv = seq_len < 130 ? 1 + n % 2 : 1, batch = seq_len < 66 ? 1 + n % 3 : seq_len < 130 ? 2 : 1;
    check({batch, seq_len, group * kv, kv, n % 2 ? 128 : 64}, 0);
    n++;
  }
  check({1, 130, 2, 1, 128}, 0);
  check({1, 191, 4, 1, 64}, 0);
}

/* Documents within tiles, across tiles and as long as samples. */
TEST(documents) {
  static const int longest[] = {1, 3, 40, 90, 150, 300};
  int n = 0;
  for (int l : longest) {
    check({1 + n % 2, n % 2 ? 150 : 290, 2, 1 + n % 2, n / 2 % 2 ? 64 : 128}, l);
    n++;
  }
  check({3, 65, 4, 1, 128}, 30);
}

/* The order in which threads, copies and products take their turns has no part in the bits. */
TEST(repeatable) {
  struct problem p = problem_new({2, 200, 4, 2, 128}, 120, 1.5);
  run(&p);
  struct matrix first = p.gpu;
  p.gpu = rig_matrix(DTYPE_BF16, first.rows, first.cols);
  for (int i = 0; i < 3; i++) {
#ifdef FP4D_CUDA_MODEL
    cuda_model_seed(1000 + (uint64_t)i);
#endif
    run(&p);
    rig_same("another order", &p.gpu, &first);
  }
  free(first.data);
  problem_free(&p);
}

/* Scratch for dS is of whole kv heads, and there where attention's backward on tensor cores is called alone. */
TEST(scratch) {
  static const struct attention_shape llama = {1, 8192, 32, 8, 128}, wide = {1, 8192, 32, 8, 256};
  struct cuda_device *d = cuda_of(devices()->gpu);
  const int64_t usual = d->attention_kept_most, unit = INT64_C(4) * (128 * 129 / 2) * 8192, statistics = 32 * 8192 * 8 + 16;
  const struct {
    struct attention_shape s;
    enum dtype backward;
    int64_t most, bytes;
  } cases[] = {
      {llama, DTYPE_BF16, usual, statistics + 8 * unit}, {llama, DTYPE_BF16, 3 * unit + 5000, statistics + 3 * unit},
      {llama, DTYPE_BF16, unit - 1, statistics},         {llama, DTYPE_F32, usual, 0},
      {llama, {}, usual, 0},                             {wide, DTYPE_BF16, usual, 0},
  };
  for (const auto &c : cases) {
    struct extent x = {};
    x.attention = c.s;
    x.attention_backward = c.backward;
    d->attention_kept_most = c.most;
    CHECK_EQ_I64(sm90_attention_backward_scratch_bytes(d, &x), c.bytes);
  }
  d->attention_kept_most = usual;
}

/* dS made again, or kept in passes of one, two and all kv heads: the gradients are right each time, and how many a pass has makes no difference. */
TEST(kept_scores) {
  struct cuda_device *d = cuda_of(devices()->gpu);
  const int64_t usual = d->attention_kept_most;
  for (int documents = 0; documents < 2; documents++) {
    struct problem p = problem_new({2, 280, 8, 2, documents ? 64 : 128}, documents ? 120 : 0, 1.5);
    const int64_t unit = 4 * 15 * 8192; /* 4 heads, 15 pairs of tiles */
    run(&p);
    const struct matrix whole = p.gpu;
    for (int64_t most : {unit, 2 * unit, 3 * unit + 5000}) {
      p.gpu = rig_matrix(DTYPE_BF16, whole.rows, whole.cols);
      d->attention_kept_most = most;
      run(&p);
      rig_same("other passes", &p.gpu, &whole);
      free(p.gpu.data);
    }
    p.gpu = whole;
    d->attention_kept_most = unit - 1;
    run(&p);
    compare(&p);
    d->attention_kept_most = usual;
    problem_free(&p);
  }
}

/* Gradients that are rotated back on their way out are the others rotated, but for one rounding in place of two. */
TEST(rotated_back) {
  struct rig *r = devices();
  const int64_t usual = cuda_of(r->gpu)->attention_kept_most;
  for (int turn = 0; turn < 3; turn++) { /* dS kept, at both widths; made again */
    struct problem p = problem_new({2, 150, 4, 2, turn ? 128 : 64}, turn ? 0 : 70, 1.5);
    if (turn == 2) cuda_of(r->gpu)->attention_kept_most = 0;
    const int64_t D = p.s.head_dim, rotated = (p.s.n_heads + p.s.n_kv_heads) * D;
    const struct rope_scaling unscaled = {};
    std::vector<float> angles((size_t)(p.s.seq_len * D));
    rope_table(angles.data(), p.s.seq_len, D, 10000.0, &unscaled);
    float *table = static_cast<float *>(rig_put(r, angles.data(), angles.size() * 4));
    run(&p);
    const struct matrix plain = p.gpu;
    p.gpu = rig_matrix(DTYPE_BF16, plain.rows, plain.cols);
    run(&p, table);
    for (int64_t i = 0; i < plain.rows; i++)
      for (int64_t c = 0; c < plain.cols; c += 2) {
        const int64_t at = i * plain.cols + c;
        const double x = rig_value(&plain, at), y = rig_value(&plain, at + 1);
        const float *t = &angles[(size_t)(i % p.s.seq_len * D + c % D)];
        const double cosine = c < rotated ? (double)t[0] : 1, sine = c < rotated ? (double)t[1] : 0;
        const double expected[2] = {x * cosine + y * sine, y * cosine - x * sine}, bound = c < rotated ? 0x1p-7 * 1.01 * (fabs(x) + fabs(y)) : 0;
        for (int e = 0; e < 2; e++)
          if (!(fabs(rig_value(&p.gpu, at + e) - expected[e]) <= bound)) {
            FAIL("turn %d: token %d, column %d is %.6g, not %.6g", turn, (int)i, (int)c + e, rig_value(&p.gpu, at + e), expected[e]);
            i = plain.rows - 1, c = plain.cols;
            break;
          }
      }
    rig_drop(r, table);
    free(plain.data);
    problem_free(&p);
  }
  cuda_of(r->gpu)->attention_kept_most = usual;
}

/* d_out of tokens before t gives t and later ones no gradient. */
TEST(causality) {
  struct problem p = problem_new({1, 190, 2, 1, 64}, 0, 1.5);
  const int64_t t = 77, row = p.d_out.cols;
  for (int64_t i = t * row; i < p.d_out.rows * row; i++) rig_set(&p.d_out, i, 0.0);
  run(&p);
  bool zero = true, other = false;
  for (int64_t i = 0; i < p.gpu.rows * p.gpu.cols; i++)
    if (i >= t * p.gpu.cols) zero = zero && rig_value(&p.gpu, i) == 0.0;
    else other = other || rig_value(&p.gpu, i) != 0.0;
  CHECK(zero);
  CHECK(other);
  problem_free(&p);
}

int main(void) {
  RUN(against_double);
  RUN(documents);
  RUN(repeatable);
  RUN(scratch);
  RUN(kept_scores);
  RUN(rotated_back);
  RUN(causality);
  printf("# largest error: %.2f of what is allowed\n", worst);
  return test_report();
}
