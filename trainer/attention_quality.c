#include "trainer/attention_quality.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/direct_p.h"

const char *const input_distributions[] = {"normal", "student-t", "outlier-channels", NULL};

/* ---- inputs ---------------------------------------------------------------------------- */

enum { DEGREES = 4, CHANNEL = 32, CHANNEL_FIRST = 7, CHANNEL_FACTOR = 8 };

static double drawn(uint32_t word) { return ((double)word + 0.5) * 0x1p-32; }

/* Student's t with 4 degrees of freedom is z / sqrt(chi2 / 4), chi2 = -2 log(u1 u2); of unit variance here. */
static double draw_element(const struct attention_inputs *x, struct philox_block r) {
  const double z = normal_quantile(drawn(r.word[0]));
  if (x->distribution != INPUT_STUDENT_T) return z;
  return z / sqrt(-2 * (f64_log(drawn(r.word[1])) + f64_log(drawn(r.word[2]))) / DEGREES) / sqrt(2);
}

void attention_input(float *values, const struct attention_inputs *x, int64_t head, int tensor) {
  for (int64_t i = 0; i < x->seq_len * x->head_dim; i++) {
    const struct philox_block at = philox_counter((uint32_t)tensor, (uint64_t)head, 0, 0, (uint32_t)i);
    double value = draw_element(x, philox4x32_10(x->seed, at)) * (tensor < 2 ? x->scale : 1);
    if (x->distribution == INPUT_OUTLIER_CHANNELS && tensor == 1 && i % x->head_dim % CHANNEL == CHANNEL_FIRST) value *= CHANNEL_FACTOR;
    values[i] = bf16_decode(bf16_encode((float)value));
  }
}

/* ---- a head ------------------------------------------------------------------------------ */

struct desk {
  const struct attention_inputs *x;
  float *q, *k, *v;                      /* [queries], [seq_len], [seq_len][head_dim] */
  float *q_few, *k_few, *v_few;          /* as represented */
  float *rows_q, *rows_k, *rows_v, *out, *lse; /* Direct-P's */
  uint8_t *codes, *bytes;
  void *scratch;
  double *exact;                         /* [queries][head_dim] */
  double *t, *p, *own, *one;             /* a query's log2 scores, P, exact P; [head_dim] */
  void *taken[24];
  int n;
  int64_t size; /* in bytes */
  bool counts; /* takes nothing, only counts bytes */
};

static void *take(struct desk *w, int64_t bytes) {
  const int64_t whole = round_up(bytes > 0 ? bytes : 1, 64);
  w->size += whole;
  return w->taken[w->n++] = w->counts ? NULL : aligned_alloc(64, (size_t)whole);
}

static void desk_free(struct desk *w) {
  for (int i = 0; i < w->n; i++) free(w->taken[i]);
}

static struct direct_p_head direct_head(const struct desk *w) {
  const struct attention_inputs *x = w->x;
  const int64_t cols = round_up(x->head_dim, 32);
  return (struct direct_p_head){x->queries, x->seq_len, x->head_dim, cols, cols + 16, w->rows_q, w->rows_k, w->rows_v};
}

static void desk_take(struct desk *w, const struct attention_inputs *x, int threads) {
  const int64_t s = x->seq_len, d = x->head_dim, n = x->queries;
  w->x = x;
  const struct direct_p_head h = direct_head(w);
  const int64_t whole = 4 * s * d, rows = 4 * s * h.ld;
  w->q = take(w, whole), w->k = take(w, whole), w->v = take(w, whole);
  w->q_few = take(w, whole), w->k_few = take(w, whole), w->v_few = take(w, whole);
  w->rows_q = take(w, rows), w->rows_k = take(w, rows), w->rows_v = take(w, rows);
  w->out = take(w, 4 * n * d), w->lse = take(w, 4 * n);
  w->codes = take(w, n * s), w->bytes = take(w, n * ceil_div(s, DIRECT_P_BLOCK));
  w->scratch = take(w, direct_p_head_bytes(&h, threads));
  w->exact = take(w, 8 * n * d);
  w->t = take(w, 8 * s), w->p = take(w, 8 * s), w->own = take(w, 8 * s), w->one = take(w, 8 * d);
}

int64_t attention_measure_bytes(const struct attention_inputs *x, int threads) {
  struct desk w = {.counts = true};
  desk_take(&w, x, threads);
  return w.size;
}

static bool desk_new(struct desk *w, const struct attention_inputs *x, int threads) {
  *w = (struct desk){0};
  desk_take(w, x, threads);
  for (int i = 0; i < w->n; i++)
    if (!w->taken[i]) return false;
  return true;
}

static int64_t query_at(const struct attention_inputs *x, int64_t i) { return i * x->seq_len / x->queries; }

static void load_inputs(struct desk *w, int64_t head) {
  const struct attention_inputs *x = w->x;
  attention_input(w->v, x, head, 0);
  for (int64_t i = 0; i < x->queries; i++)
    memcpy(w->q + i * x->head_dim, w->v + query_at(x, i) * x->head_dim, (size_t)x->head_dim * sizeof(float));
  attention_input(w->k, x, head, 1);
  attention_input(w->v, x, head, 2);
}

/* Log2 scores of a query against keys 0..n-1. */
static CLONES void scores(double *restrict t, const float *restrict q, const float *restrict k, int64_t n, int64_t dim) {
  enum { LANES = 8 };
  const double kappa = 1.4426950408889634 / sqrt((double)dim);
  for (int64_t j = 0; j < n; j++) {
    double sum[LANES] = {0}, all = 0;
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
      for (int l = 0; l < LANES; l++) sum[l] += (double)q[d + l] * (double)k[j * dim + d + l];
    for (; d < dim; d++) all += (double)q[d] * (double)k[j * dim + d];
    for (int l = 0; l < LANES; l++) all += sum[l];
    t[j] = all * kappa;
  }
}

static void softmax(double *p, const double *t, int64_t n) {
  double top = -INFINITY, sum = 0;
  for (int64_t j = 0; j < n; j++) top = t[j] > top ? t[j] : top;
  for (int64_t j = 0; j < n; j++) sum += p[j] = f64_exp2(t[j] - top);
  for (int64_t j = 0; j < n; j++) p[j] /= sum;
}

static CLONES void gather(double *restrict out, const double *restrict p, const float *restrict v, int64_t n, int64_t dim, double factor) {
  for (int64_t d = 0; d < dim; d++) out[d] = 0;
  for (int64_t j = 0; j < n; j++)
    for (int64_t d = 0; d < dim; d++) out[d] += p[j] * (double)v[j * dim + d];
  for (int64_t d = 0; d < dim; d++) out[d] *= factor;
}

void attention_measure_out(struct attention_measure *m, const double *out, const double *exact, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const bool finite = isfinite(out[i]);
    m->nonfinite += !finite;
    m->numbers++;
    quality_add(&m->out, finite ? out[i] : 0, exact[i]);
  }
}

/* P as represented and divided against `own`; not finite: it is 0 there, but not lost. */
static void measure_p(struct attention_measure *m, const double *p, const double *own, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    quality_add(&m->p_error, isfinite(p[j]) ? p[j] : 0, own[j]);
    m->lost += p[j] == 0 ? own[j] : 0;
  }
  m->queries++;
}

/* ---- rows ---------------------------------------------------------------------------------- */

static void measure_represented(struct desk *w, struct attention_measure *m, const struct attention_row *row) {
  const int64_t s = w->x->seq_len, dim = w->x->head_dim;
  for (int64_t i = 0; i < w->x->queries; i++) {
    double denominator;
    scores(w->t, w->q_few + i * dim, w->k_few, s, dim);
    softmax(w->own, w->t, s);
    p_represent(w->p, &denominator, &m->p, w->t, s, row->p);
    bool any = false;
    for (int64_t j = 0; j < s; j++) any |= w->p[j] != 0;
    for (int64_t j = 0; any && j < s; j++) w->p[j] /= denominator;
    measure_p(m, w->p, w->own, s);
    gather(w->one, w->p, w->v_few, s, dim, !any ? F64_NAN : row->v == TENSOR_MXFP4 ? 1.0 / 6 : 1.0);
    attention_measure_out(m, w->one, w->exact + i * dim, dim);
  }
}

static void spread(float *rows, const float *from, int64_t n, const struct direct_p_head *h) {
  for (int64_t r = 0; r < n; r++)
    for (int64_t d = 0; d < h->cols; d++) rows[r * h->ld + d] = d < h->head_dim ? from[r * h->head_dim + d] : 0.0f;
}

static void measure_direct(struct desk *w, struct attention_measure *m, const struct attention_row *row, struct threads *threads) {
  const int64_t s = w->x->seq_len, dim = w->x->head_dim, blocks = ceil_div(s, DIRECT_P_BLOCK);
  const struct direct_p policy[] = {[P_FAST] = direct_p_fast(), [P_ACCURATE] = direct_p_accurate(), [P_GUARDED] = direct_p_guarded()};
  const struct direct_p_publication publication = {w->codes, w->bytes};
  const struct direct_p_head h = direct_head(w);
  spread(w->rows_q, w->q_few, w->x->queries, &h);
  spread(w->rows_k, w->k_few, s, &h);
  spread(w->rows_v, w->v_few, s, &h);
  direct_p_head(threads, w->out, w->lse, &publication, &h, &policy[row->p->policy], w->scratch);
  for (int64_t i = 0; i < w->x->queries; i++) {
    double sum = 0;
    scores(w->t, w->q_few + i * dim, w->k_few, s, dim);
    softmax(w->own, w->t, s);
    m->p.blocks += blocks;
    m->p.codes += s;
    for (int64_t b = 0; b < blocks; b++) m->p.zero_blocks += w->bytes[i * blocks + b] == 0;
    for (int64_t j = 0; j < s; j++) {
      const uint8_t code = w->codes[i * s + j];
      m->p.zero_codes += code == 0;
      sum += w->p[j] = (double)e2m1_decode(code) * (double)direct_p_scale(w->bytes[i * blocks + j / DIRECT_P_BLOCK]);
    }
    for (int64_t j = 0; sum != 0 && j < s; j++) w->p[j] /= sum; /* NaN, where a scale is */
    measure_p(m, w->p, w->own, s);
    for (int64_t d = 0; d < dim; d++) w->one[d] = (double)w->out[i * dim + d];
    attention_measure_out(m, w->one, w->exact + i * dim, dim);
  }
}

bool attention_measure(struct attention_measure *measure, const struct attention_row *row, int rows, const struct attention_inputs *x,
                       int64_t head, struct threads *threads) {
  struct desk w;
  const bool good = desk_new(&w, x, threads_count(threads));
  if (good) {
    load_inputs(&w, head);
    for (int64_t i = 0; i < x->queries; i++) {
      scores(w.t, w.q + i * x->head_dim, w.k, x->seq_len, x->head_dim);
      softmax(w.p, w.t, x->seq_len);
      gather(w.exact + i * x->head_dim, w.p, w.v, x->seq_len, x->head_dim, 1);
    }
  }
  for (int r = 0; good && r < rows; r++) {
    tensor_represent(w.q_few, w.q, x->queries, x->head_dim, row[r].qk);
    tensor_represent(w.k_few, w.k, x->seq_len, x->head_dim, row[r].qk);
    tensor_represent_v(w.v_few, w.v, x->seq_len, x->head_dim, row[r].v);
    if (row[r].p->kind == P_DIRECT)
      measure_direct(&w, &measure[r], &row[r], threads);
    else
      measure_represented(&w, &measure[r], &row[r]);
  }
  desk_free(&w);
  return good;
}

bool attention_causal(double *out, const struct attention_inputs *x, int64_t head) {
  struct desk w;
  const bool good = desk_new(&w, x, 1);
  if (good) load_inputs(&w, head);
  for (int64_t i = 0; good && i < x->queries; i++) {
    const int64_t n = query_at(x, i) + 1;
    scores(w.t, w.q + i * x->head_dim, w.k, n, x->head_dim);
    softmax(w.p, w.t, n);
    gather(out + i * x->head_dim, w.p, w.v, n, x->head_dim, 1);
  }
  desk_free(&w);
  return good;
}
