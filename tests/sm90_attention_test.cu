/* Attention forward of kernels/sm90 beside a literal one in double and the CPU backend.
 *
 * Bound of an element of O = sum p v / l: P in BF16 adds at most 2^-8 of every term, the
 * rounding of O 2^-8 of the result; scores, exp2, l and the sums in FP32 add less than
 * 2^-14 of sum |p v| / l for the inputs here. */
#include "base/philox.h"
#include "tests/sm90_rig.h"

namespace {

/* ---- a case ------------------------------------------------------------------- */
struct problem {
  struct attention_shape s;
  std::vector<uint16_t> qkv;
  std::vector<int32_t> starts; /* empty: whole samples */
  std::vector<uint16_t> out;
  std::vector<float> lse;
  float max_logit = -INFINITY;

  int64_t tokens() const { return s.batch * s.seq_len; }
  int64_t cols() const { return (s.n_heads + 2 * s.n_kv_heads) * s.head_dim; }
  int64_t width() const { return s.n_heads * s.head_dim; }
  int64_t q_at(int64_t b, int64_t i, int64_t h) const { return (b * s.seq_len + i) * cols() + h * s.head_dim; }
  int64_t k_at(int64_t b, int64_t j, int64_t h) const { return (b * s.seq_len + j) * cols() + (s.n_heads + h * s.n_kv_heads / s.n_heads) * s.head_dim; }
  int64_t v_at(int64_t b, int64_t j, int64_t h) const { return k_at(b, j, h) + s.n_kv_heads * s.head_dim; }
  int64_t o_at(int64_t b, int64_t i, int64_t h) const { return (b * s.seq_len + i) * width() + h * s.head_dim; }
  int64_t start(int64_t b, int64_t i) const { return starts.empty() ? 0 : starts[(size_t)(b * s.seq_len + i)]; }
  double at(int64_t i) const { return (double)bf16_decode(qkv[(size_t)i]); }
  void set(int64_t i, double x) { qkv[(size_t)i] = bf16_encode((float)x); }
};

uint32_t draw(int key, int64_t i) { return philox4x32_10((uint64_t)key, philox_counter(1, 0, 0, 0, (uint32_t)i)).word[0]; }

problem problem_new(struct attention_shape s, double factor, int key) {
  problem p;
  p.s = s;
  p.qkv.resize((size_t)(p.tokens() * p.cols()));
  for (size_t i = 0; i < p.qkv.size(); i++) p.qkv[i] = bf16_encode((float)(((double)(draw(key, (int64_t)i) >> 20) * 0x1p-11 - 1.0) * factor));
  return p;
}

/* Documents of 1 to `longest` tokens. */
void divide(problem *p, int longest, int key) {
  p->starts.resize((size_t)p->tokens());
  for (int64_t b = 0, n = 0; b < p->s.batch; b++)
    for (int64_t i = 0, start = 0, end = 0; i < p->s.seq_len; i++) {
      if (i == end) {
        start = i;
        end = i + 1 + draw(key, n++) % (uint32_t)longest;
      }
      p->starts[(size_t)(b * p->s.seq_len + i)] = (int32_t)start;
    }
}

/* On the CPU backend. */
void run_cpu(problem *p) {
  struct device *d = sm90_rig()->cpu;
  p->out.resize((size_t)(p->tokens() * p->width()));
  p->lse.resize((size_t)(p->tokens() * p->s.n_heads));
  struct matrix x = {p->qkv.data(), DTYPE_BF16, p->tokens(), p->cols()}, o = {p->out.data(), DTYPE_BF16, p->tokens(), p->width()};
  d->k->attention_forward(d, &o, p->lse.data(), &p->max_logit, nullptr, &x, nullptr, p->starts.empty() ? nullptr : p->starts.data(), &p->s);
}

void run(problem *p) {
  struct device *d = sm90_rig()->gpu;
  device_array<uint16_t> qkv(p->qkv), out((int)(p->tokens() * p->width()));
  device_array<float> lse((int)(p->tokens() * p->s.n_heads)), max_logit(std::vector<float>(1, p->max_logit));
  std::vector<int32_t> none(1, 0);
  device_array<int32_t> starts(p->starts.empty() ? none : p->starts);
  struct matrix x = {qkv.data(), DTYPE_BF16, p->tokens(), p->cols()}, o = {out.data(), DTYPE_BF16, p->tokens(), p->width()};
  d->k->attention_forward(d, &o, lse.data(), max_logit.data(), nullptr, &x, nullptr, p->starts.empty() ? nullptr : starts.data(), &p->s);
  p->out = out.read();
  p->lse = lse.read();
  p->max_logit = max_logit.read()[0];
}

/* ---- beside double -------------------------------------------------------------- */
void name(const problem &p, char *text, size_t size) {
  snprintf(text, size, "b%d s%d h%d/%d d%d%s", (int)p.s.batch, (int)p.s.seq_len, (int)p.s.n_heads, (int)p.s.n_kv_heads, (int)p.s.head_dim,
           p.starts.empty() ? "" : " documents");
}

void compare(const problem &p) {
  char text[80];
  name(p, text, sizeof text);
  const int64_t D = p.s.head_dim;
  std::vector<double> score((size_t)p.s.seq_len);
  double max_logit = -INFINITY;
  int wrong = 0;
  for (int64_t b = 0; b < p.s.batch; b++)
    for (int64_t h = 0; h < p.s.n_heads; h++)
      for (int64_t i = 0; i < p.s.seq_len; i++) {
        double top = -INFINITY, sum = 0;
        for (int64_t j = p.start(b, i); j <= i; j++) {
          double x = 0;
          for (int64_t d = 0; d < D; d++) x += p.at(p.q_at(b, i, h) + d) * p.at(p.k_at(b, j, h) + d);
          score[(size_t)j] = x / sqrt((double)D);
          top = fmax(top, score[(size_t)j]);
        }
        for (int64_t j = p.start(b, i); j <= i; j++) sum += score[(size_t)j] = exp(score[(size_t)j] - top);
        max_logit = fmax(max_logit, top);
        const double lse = top + log(sum), got_lse = (double)p.lse[(size_t)((b * p.s.n_heads + h) * p.s.seq_len + i)];
        if (!(fabs(got_lse - lse) <= 1e-5 * (1 + fabs(lse))) && !wrong++) FAIL("%s: lse of %d, %d, %d is %g, expected %g", text, (int)b, (int)h, (int)i, got_lse, lse);
        for (int64_t d = 0; d < D; d++) {
          double o = 0, magnitude = 0;
          for (int64_t j = p.start(b, i); j <= i; j++) {
            const double term = score[(size_t)j] * p.at(p.v_at(b, j, h) + d) / sum;
            o += term;
            magnitude += fabs(term);
          }
          const double got = (double)bf16_decode(p.out[(size_t)(p.o_at(b, i, h) + d)]), bound = (0x1p-8 + 0x1p-14) * magnitude + (0x1p-8 + 0x1p-14) * fabs(o) + 1e-38;
          if (!(fabs(got - o) <= bound) && !wrong++)
            FAIL("%s: out of sample %d, head %d, query %d, column %d is %g, expected %g within %g", text, (int)b, (int)h, (int)i, (int)d, got, o, bound);
        }
      }
  CHECK_CLOSE(p.max_logit, max_logit, 1e-5 * (1 + fabs(max_logit)));
}

const struct attention_shape shapes[] = {{3, 1, 4, 4, 64},    {3, 2, 4, 1, 128},  {2, 17, 2, 1, 64},  {1, 63, 4, 1, 128}, {2, 64, 1, 1, 64},
                                         {2, 65, 2, 2, 128},  {1, 127, 2, 2, 64}, {1, 128, 4, 1, 64}, {2, 129, 2, 1, 128}, {3, 33, 4, 2, 64},
                                         {1, 257, 2, 1, 128}, {1, 400, 1, 1, 64}, {2, 191, 2, 1, 64}, {1, 320, 1, 1, 128}};

TEST(against_double) {
  int key = 1;
  for (const struct attention_shape &s : shapes) {
    problem p = problem_new(s, 2.5, key++);
    run(&p);
    compare(p);
  }
}

TEST(documents_against_double) {
  int key = 101;
  for (const struct attention_shape &s : shapes)
    for (int longest = 7; longest < 400; longest *= 13) {
      problem p = problem_new(s, 2.5, key);
      divide(&p, longest, key++);
      run(&p);
      compare(p);
    }
}

/* The reference of the exponents: maxima that grow from the diagonal down, by less
 * and by more than what moves it, and that fall. */
TEST(growing_maxima) {
  const double slopes[] = {0.5, 2, 30, -3};
  for (int n = 0; n < 4; n++) {
    problem p = problem_new({1, 400, 1, 1, n % 2 ? 128 : 64}, 1.0, 200 + n);
    for (int64_t i = 0; i < 400; i++) {
      p.set(p.q_at(0, i, 0), 8);
      p.set(p.k_at(0, i, 0), slopes[n] * (double)((399 - i) / 32));
    }
    run(&p);
    compare(p);
  }
}

/* Beside the CPU backend, which differs from the double as well. */
TEST(against_cpu) {
  for (int n = 0; n < 2; n++) {
    problem p = problem_new({2, 200, 4, 2, n ? 128 : 64}, 2.0, 300 + n);
    if (n) divide(&p, 90, 300);
    problem q = p;
    run(&p);
    run_cpu(&q);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < p.out.size(); i++) {
      const double x = (double)bf16_decode(p.out[i]), y = (double)bf16_decode(q.out[i]);
      difference += (x - y) * (x - y);
      norm += y * y;
    }
    CHECK(sqrt(difference / norm) < 0x1p-8);
    for (size_t i = 0; i < p.lse.size(); i++) CHECK_CLOSE(p.lse[i], q.lse[i], 1e-5 * (1 + fabs((double)q.lse[i])));
    CHECK_CLOSE(p.max_logit, q.max_logit, 1e-5 * (1 + fabs((double)q.max_logit)));
  }
}

/* ---- exact cases ---------------------------------------------------------------- */
/* Query i sees one key alone, a chosen one: its value comes out bit for bit. */
TEST(one_key_each) {
  for (int n = 0; n < 6; n++) {
    struct attention_shape s = {n % 3 + 1, n < 2 ? 290 : 140, n % 2 ? 4 : 2, n % 2 ? 2 : 1, n % 2 ? 128 : 64};
    problem p = problem_new(s, 3.0, 400 + n);
    if (n > 2) divide(&p, n == 3 ? 200 : 40, 400 + n);
    std::vector<int64_t> chosen((size_t)(p.tokens() * s.n_heads));
    for (int64_t b = 0; b < s.batch; b++)
      for (int64_t h = 0; h < s.n_heads; h++)
        for (int64_t i = 0; i < s.seq_len; i++) {
          const int64_t kv = h * s.n_kv_heads / s.n_heads;
          for (int64_t d = 0; d < s.head_dim; d++)
            p.set(p.k_at(b, i, h) + d, draw(500 + n, ((b * s.n_kv_heads + kv) * s.seq_len + i) * s.head_dim + d) & 1 ? 16 : -16);
        }
    for (int64_t b = 0; b < s.batch; b++)
      for (int64_t h = 0; h < s.n_heads; h++)
        for (int64_t i = 0; i < s.seq_len; i++) {
          const int64_t first = p.start(b, i), j = first + draw(600 + n, (b * s.n_heads + h) * s.seq_len + i) % (uint32_t)(i - first + 1);
          chosen[(size_t)((b * s.n_heads + h) * s.seq_len + i)] = j;
          for (int64_t d = 0; d < s.head_dim; d++) p.set(p.q_at(b, i, h) + d, p.at(p.k_at(b, j, h) + d));
        }
    run(&p);
    const double logit = 256 * sqrt((double)s.head_dim);
    int wrong = 0;
    for (int64_t b = 0; b < s.batch; b++)
      for (int64_t h = 0; h < s.n_heads; h++)
        for (int64_t i = 0; i < s.seq_len; i++) {
          const int64_t row = (b * s.n_heads + h) * s.seq_len + i, j = chosen[(size_t)row];
          CHECK_CLOSE(p.lse[(size_t)row], logit, 1e-6 * logit);
          for (int64_t d = 0; d < s.head_dim; d++)
            if (p.out[(size_t)(p.o_at(b, i, h) + d)] != p.qkv[(size_t)(p.v_at(b, j, h) + d)] && !wrong++)
              FAIL("case %d: sample %d, head %d, query %d does not give value %d", n, (int)b, (int)h, (int)i, (int)j);
        }
    CHECK_CLOSE(p.max_logit, logit, 1e-6 * logit);
  }
}

/* All scores equal, values integers: sums are exact. */
TEST(means) {
  for (int n = 0; n < 4; n++) {
    struct attention_shape s = {2, n < 2 ? 300 : 130, 2, 1, n % 2 ? 128 : 64};
    problem p = problem_new(s, 0.0, 700);
    if (n > 1) divide(&p, 100, 700 + n);
    for (int64_t b = 0; b < s.batch; b++)
      for (int64_t j = 0; j < s.seq_len; j++)
        for (int64_t d = 0; d < s.head_dim; d++) p.set(p.v_at(b, j, 0) + d, (int)(draw(701, (b * s.seq_len + j) * s.head_dim + d) % 41) - 20);
    run(&p);
    int wrong = 0;
    for (int64_t b = 0; b < s.batch; b++)
      for (int64_t h = 0; h < s.n_heads; h++)
        for (int64_t d = 0; d < s.head_dim; d++)
          for (int64_t i = 0; i < s.seq_len; i++) {
            double sum = 0;
            for (int64_t j = p.start(b, i); j <= i; j++) sum += p.at(p.v_at(b, j, h) + d);
            const float count = (float)(i - p.start(b, i) + 1);
            if (p.out[(size_t)(p.o_at(b, i, h) + d)] != bf16_encode((float)sum * (1.0f / count)) && !wrong++)
              FAIL("case %d: sample %d, head %d, query %d, column %d is %g, expected %g / %g", n, (int)b, (int)h, (int)i, (int)d,
                   (double)bf16_decode(p.out[(size_t)(p.o_at(b, i, h) + d)]), sum, (double)count);
          }
    CHECK(p.max_logit == 0.0f);
  }
}

/* ---- who sees whom --------------------------------------------------------------- */
/* Each sample of a batch is what it is alone, whatever the schedule was. */
TEST(samples_are_independent) {
  struct attention_shape s = {3, 150, 4, 2, 64};
  problem all = problem_new(s, 2.0, 800);
  run(&all);
  s.batch = 1;
  for (int64_t b = 0; b < 3; b++) {
    problem one = problem_new(s, 2.0, 800);
    const size_t wide = one.qkv.size(), narrow = (size_t)(one.tokens() * one.width()), rows = (size_t)(one.tokens() * s.n_heads);
    memcpy(one.qkv.data(), all.qkv.data() + (size_t)b * wide, wide * 2);
#ifdef FP4D_CUDA_MODEL
    cuda_model_seed((uint64_t)(b + 7));
#endif
    run(&one);
    CHECK(!memcmp(one.out.data(), all.out.data() + (size_t)b * narrow, narrow * 2));
    CHECK(!memcmp(one.lse.data(), all.lse.data() + (size_t)b * rows, rows * 4));
  }
}

/* Whatever a later token or another document becomes, a query stays the same bit for bit. */
TEST(causality) {
  problem a = problem_new({1, 300, 2, 1, 64}, 2.0, 900);
  divide(&a, 120, 900);
  problem whole = a;
  whole.starts.clear();
  run(&a);
  run(&whole);
  for (int64_t t : {1, 8, 63, 64, 127, 128, 200, 256, 299}) {
    problem b = a, c = whole;
    for (int64_t i = 0; i < a.cols(); i++) {
      b.set(t * a.cols() + i, 3);
      c.set(t * a.cols() + i, 3);
    }
    run(&b);
    run(&c);
    const size_t row = (size_t)a.width();
    CHECK(!memcmp(c.out.data(), whole.out.data(), (size_t)t * row * 2));
    CHECK(memcmp(c.out.data(), whole.out.data(), 300 * row * 2));
    for (int64_t i = 0; i < 300; i++) {
      const bool sees = i >= t && a.start(0, i) <= t;
      if (!sees && memcmp(b.out.data() + (size_t)i * row, a.out.data() + (size_t)i * row, row * 2)) FAIL("query %d saw token %d", (int)i, (int)t);
    }
  }
}

bool row_has_nan(const problem &p, int64_t b, int64_t i, int64_t h) {
  bool any = false, all = true;
  for (int64_t d = 0; d < p.s.head_dim; d++) {
    const bool nan = isnan(bf16_decode(p.out[(size_t)(p.o_at(b, i, h) + d)]));
    any = any || nan;
    all = all && nan;
  }
  return any && all;
}

/* A NaN in K or Q is for those that see it; one in V for its tile of 128 keys too. */
TEST(nan_propagates) {
  for (int which = 0; which < 3; which++) {
    problem p = problem_new({2, 300, 4, 2, 64}, 2.0, 1000);
    const int64_t t = 200;
    if (which == 0) p.set(p.q_at(0, t, 2) + 5, NAN);
    if (which == 1) p.set(p.k_at(0, t, 2) + 5, NAN);
    if (which == 2)
      for (int64_t d = 0; d < 64; d++) p.set(p.v_at(0, t, 2) + d, NAN);
    run(&p);
    for (int64_t b = 0; b < 2; b++)
      for (int64_t h = 0; h < 4; h++)
        for (int64_t i = 0; i < 300; i++) {
          const bool must = b == 0 && (which == 0 ? h == 2 && i == t : h >= 2 && i >= t), may = which == 2 && b == 0 && h >= 2 && i >= 128;
          const bool nan = row_has_nan(p, b, i, h);
          if (nan != must && !(may && nan)) FAIL("NaN in %c of token 200: sample %d, head %d, query %d", "QKV"[which], (int)b, (int)h, (int)i);
        }
  }
}

/* A key of -inf weighs nothing, and a row of nothing else is NaN. */
TEST(infinite_scores) {
  problem p = problem_new({1, 140, 1, 1, 64}, 1.0, 1100);
  for (int64_t i = 0; i < 140; i++) {
    p.set(p.q_at(0, i, 0), 1);
    if (i < 135) p.set(p.k_at(0, i, 0), -INFINITY);
  }
  run(&p);
  for (int64_t i = 0; i < 140; i++) CHECK(row_has_nan(p, 0, i, 0) == (i < 135));
  CHECK(p.out[(size_t)p.o_at(0, 135, 0)] == p.qkv[(size_t)p.v_at(0, 135, 0)]);
}

TEST(max_logit_only_grows) {
  problem p = problem_new({1, 70, 2, 1, 64}, 1.0, 1200);
  p.max_logit = 1e6f;
  run(&p);
  CHECK(p.max_logit == 1e6f);
  /* negative ones, in a tile with rows that do not exist */
  for (int64_t i = 0; i < 70; i++)
    for (int64_t d = 0; d < 64; d++) {
      p.set(p.q_at(0, i, 0) + d, 1);
      p.set(p.q_at(0, i, 1) + d, 1);
      p.set(p.k_at(0, i, 0) + d, -1 - (double)(i % 7));
    }
  p.max_logit = -INFINITY;
  run(&p);
  CHECK(p.max_logit == -8.0f);
  p.max_logit = -3.0f;
  run(&p);
  CHECK(p.max_logit == -3.0f);
}

}  // namespace

int main() {
  RUN(against_double);
  RUN(documents_against_double);
  RUN(growing_maxima);
  RUN(against_cpu);
  RUN(one_key_each);
  RUN(means);
  RUN(samples_are_independent);
  RUN(causality);
  RUN(nan_propagates);
  RUN(infinite_scores);
  RUN(max_logit_only_grows);
  return test_report();
}
