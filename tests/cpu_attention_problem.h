/* Attention of the CPU backend in FP32 or BF16 beside a literal implementation in
 * double, of whole samples and within documents. */
#ifndef FP4D_TESTS_CPU_ATTENTION_PROBLEM_H
#define FP4D_TESTS_CPU_ATTENTION_PROBLEM_H

#include <math.h>
#include <stdlib.h>

#include "base/philox.h"
#include "tests/cpu_device.h"

static inline void *get(int64_t bytes) {
  void *p = malloc((size_t)(bytes > 0 ? bytes : 1));
  if (!p) abort();
  return p;
}

/* ---- a case: inputs and what the backend makes of them ------------------- */
struct problem {
  struct attention_shape s;
  struct matrix qkv, out, d_out, d_qkv;
  int32_t *starts; /* NULL: whole samples */
  float *lse, max_logit;
};

static inline int64_t tokens(const struct problem *p) { return p->s.batch * p->s.seq_len; }
static inline int64_t elements(const struct matrix *m) { return m->rows * m->cols; }

static inline struct matrix matrix_new(enum dtype type, int64_t rows, int64_t cols) {
  return (struct matrix){get(rows * cols * (int64_t)dtype_bytes(type)), type, rows, cols};
}

/* Multiples of 2^-11 in [-1, 1): exact in FP32, rounded in BF16. */
static inline void fill(struct matrix *m, uint64_t seed, float factor) {
  for (int64_t i = 0; i < elements(m); i++) {
    struct philox_block at = {{(uint32_t)(i / 4), 7, 0, 0}};
    uint32_t word = philox4x32_10(seed, at).word[i % 4];
    float x = ((float)(word >> 20) * 0x1p-11f - 1.0f) * factor;
    cpu_store(m, i, &x, 1);
  }
}

static inline struct problem problem_new(enum dtype type, struct attention_shape s, float factor) {
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

static inline void problem_free(struct problem *p) {
  void *all[] = {p->qkv.data, p->d_qkv.data, p->out.data, p->d_out.data, p->lse, p->starts};
  for (int i = 0; i < 6; i++) free(all[i]);
}

static inline void set(struct matrix *m, int64_t row, int64_t col, float x) { cpu_store(m, row * m->cols + col, &x, 1); }
static inline float at(const struct matrix *m, int64_t i) {
  float x;
  cpu_load(&x, m, i, 1);
  return x;
}

/* Forward, then backward, in scratch full of NaN that was sized for `extent`. */
static inline void run_sized(struct problem *p, int threads, struct attention_shape extent) {
  struct error e;
  struct extent x = {.attention = extent};
  struct cpu_device d = {.threads = threads_create(threads, &e)};
  if (!d.threads) abort();
  d.scratch_bytes = cpu_attention_scratch_bytes(&x, threads);
  d.scratch = get(d.scratch_bytes);
  memset(d.scratch, 0xFF, (size_t)d.scratch_bytes);
  memset(p->d_qkv.data, 0xFF, (size_t)elements(&p->d_qkv) * dtype_bytes(p->d_qkv.dtype));
  memset(p->out.data, 0xFF, (size_t)elements(&p->out) * dtype_bytes(p->out.dtype));
  cpu_attention_forward(&d.device, &p->out, p->lse, &p->max_logit, NULL, &p->qkv, NULL, p->starts, &p->s);
  memset(d.scratch, 0xFF, (size_t)d.scratch_bytes);
  cpu_attention_backward(&d.device, &p->d_qkv, NULL, &p->d_out, NULL, &p->out, p->lse, &p->qkv, NULL, p->starts, &p->s);
  free(d.scratch);
  threads_destroy(d.threads);
}
static inline void run(struct problem *p, int threads) { run_sized(p, threads, p->s); }

/* ---- the literal implementation ------------------------------------------ */
struct literal {
  double *qkv, *out, *lse, *d_out, *d_qkv, max_logit;
};

static inline double *doubles(const struct matrix *m) {
  double *x = get(elements(m) * 8);
  for (int64_t i = 0; i < elements(m); i++) x[i] = (double)at(m, i);
  return x;
}

/* starts: as the operator's. */
static inline void literal_forward(const struct attention_shape *s, const int32_t *starts, const double *qkv, double *out,
                                   double *lse, double *max) {
  int64_t D = s->head_dim, cols = (s->n_heads + 2 * s->n_kv_heads) * D;
  double *score = get(s->seq_len * 8);
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t h = 0; h < s->n_heads; h++) {
      int64_t kv = h / (s->n_heads / s->n_kv_heads);
      const double *q = qkv + b * s->seq_len * cols + h * D, *k = qkv + b * s->seq_len * cols + (s->n_heads + kv) * D,
                   *v = k + s->n_kv_heads * D;
      for (int64_t i = 0; i < s->seq_len; i++) {
        int64_t first = starts ? starts[b * s->seq_len + i] : 0;
        double top = -INFINITY, sum = 0;
        for (int64_t j = first; j <= i; j++) {
          double x = 0;
          for (int64_t d = 0; d < D; d++) x += q[i * cols + d] * k[j * cols + d];
          score[j] = x / sqrt((double)D);
          if (score[j] > top) top = score[j];
        }
        for (int64_t j = first; j <= i; j++) {
          score[j] = exp(score[j] - top);
          sum += score[j];
        }
        for (int64_t d = 0; d < D; d++) {
          double x = 0;
          for (int64_t j = first; j <= i; j++) x += score[j] * v[j * cols + d];
          out[(b * s->seq_len + i) * s->n_heads * D + h * D + d] = x / sum;
        }
        lse[(b * s->n_heads + h) * s->seq_len + i] = top + log(sum);
        if (top > *max) *max = top;
      }
    }
  free(score);
}

static inline void literal_backward(const struct attention_shape *s, const int32_t *starts, struct literal *x) {
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
        for (int64_t j = starts ? starts[first + i] : 0; j <= i; j++) {
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

static inline struct literal literal_of(const struct problem *p) {
  struct literal x = {.qkv = doubles(&p->qkv), .d_out = doubles(&p->d_out), .max_logit = -INFINITY};
  x.out = get(elements(&p->out) * 8);
  x.lse = get(tokens(p) * p->s.n_heads * 8);
  x.d_qkv = get(elements(&p->qkv) * 8);
  literal_forward(&p->s, p->starts, x.qkv, x.out, x.lse, &x.max_logit);
  literal_backward(&p->s, p->starts, &x);
  return x;
}

static inline void literal_free(struct literal *x) {
  double *all[] = {x->qkv, x->out, x->lse, x->d_out, x->d_qkv};
  for (int i = 0; i < 5; i++) free(all[i]);
}

/* |got - expected| / |expected| over columns [from, to). */
static inline double distance(const struct matrix *got, const double *expected, int64_t from, int64_t to) {
  double difference = 0, norm = 0;
  for (int64_t r = 0; r < got->rows; r++)
    for (int64_t c = from; c < to; c++) {
      double e = expected[r * got->cols + c], d = (double)at(got, r * got->cols + c) - e;
      difference += d * d;
      norm += e * e;
    }
  return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static inline void compare(const struct problem *p, double tolerance, double lse_tolerance) {
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

static inline bool same_bits(const struct problem *a, const struct problem *b) {
  size_t size = dtype_bytes(a->qkv.dtype);
  return !memcmp(a->out.data, b->out.data, (size_t)elements(&a->out) * size) &&
         !memcmp(a->d_qkv.data, b->d_qkv.data, (size_t)elements(&a->d_qkv) * size) &&
         !memcmp(a->lse, b->lse, (size_t)(tokens(a) * a->s.n_heads) * 4) && a->max_logit == b->max_logit;
}

#endif
