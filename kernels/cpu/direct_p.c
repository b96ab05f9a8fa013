/* Direct-P: tasks are blocks of 32 queries of a head.
 *
 * Scores stand as [keys][32 queries], so that maxima, codes and sums of codes run along
 * columns: no operation across lanes.
 */
#include "kernels/cpu/direct_p.h"

#include <string.h>

#include "kernels/cpu/codes.h"

enum { W = ATTENTION_BLOCK, R = ATTENTION_ROWS, GROUP = DIRECT_P_GROUP, BLOCK = DIRECT_P_BLOCK };

/* A worker's scratch. */
struct desk {
  float *q;        /* [head_dim][32] */
  float *scores;   /* [64][32]; then codes * scale */
  float *o, *g;    /* [32][ld] */
  float *edge;     /* [8][ld]: the last rows of K, or an anchor's */
  float *denominator, *reference; /* [32] */
};

static struct desk desk_at(int64_t ld, char *at, int64_t *bytes) {
  struct desk w;
  *bytes = 0;
  w.q = attention_take(&at, bytes, ld * W);
  w.scores = attention_take(&at, bytes, GROUP * W);
  w.o = attention_take(&at, bytes, W * ld);
  w.g = attention_take(&at, bytes, W * ld);
  w.edge = attention_take(&at, bytes, R * ld);
  w.denominator = attention_take(&at, bytes, W);
  w.reference = attention_take(&at, bytes, W);
  return w;
}

int64_t direct_p_head_bytes(const struct direct_p_head *h, int threads) {
  int64_t bytes;
  desk_at(h->ld, NULL, &bytes);
  return bytes * threads;
}

/* scores[8][32] of eight rows of K. */
static CPU_CLONES void score(float *scores, const float *rows, int64_t ld, const float *q, int64_t head_dim) {
  attention_product(scores, W, rows, ld, 1, q, W, head_dim, true, EDGE_NONE, 0);
}

/* o = o + the group's product with V. */
static CPU_CLONES void gather(const struct direct_p_head *h, const struct desk *w, int64_t first, int64_t keys) {
  for (int64_t c = 0; c < h->cols; c += W)
    for (int64_t r = 0; r < W; r += R)
      attention_product(w->g + r * h->ld + c, h->ld, w->scores + r, 1, W, h->v + first * h->ld + c, h->ld, keys, true,
                        EDGE_NONE, 0);
  for (int64_t r = 0; r < W; r++)
    for (int64_t c = 0; c < h->cols; c++) w->o[r * h->ld + c] += w->g[r * h->ld + c];
}

/* t of a block of `keys` keys from scores, in place; then codes * scale, the sum of codes
 * into L, and the byte of each query. */
static CPU_CLONES void publish(float *restrict t, int64_t keys, const struct direct_p *rule, float kappa,
                               const float *restrict reference, float *restrict denominator, uint32_t *restrict byte) {
  float top[W], shift[W], scale[W];
  uint32_t halves[W];
  const float lowest = rule->lift > 0 || rule->margin > 0 ? (float)rule->lift + 1.0f : 0.0f;
  for (int l = 0; l < W; l++) top[l] = -F32_INFINITY;
  for (int64_t j = 0; j < keys; j++)
    for (int l = 0; l < W; l++) {
      t[j * W + l] = f32_fma(t[j * W + l] - reference[l], kappa, -(float)rule->margin);
      top[l] = direct_p_larger(top[l], t[j * W + l]);
    }
  for (int l = 0; l < W; l++) {
    const float u = direct_p_byte(top[l], rule->exponent, lowest);
    byte[l] = u < 1.0f ? 0u : u > 254.0f ? 255u : (uint32_t)(int32_t)u - (uint32_t)rule->lift;
    scale[l] = direct_p_scale(byte[l]);
    shift[l] = u - 127.0f;
    halves[l] = 0;
  }
  for (int64_t j = 0; j < keys; j++) {
    if (rule->native >> (j / 2) & 1u)
      for (int l = 0; l < W; l++) t[j * W + l] = attention_p_exp2(t[j * W + l], shift[l]);
    else
      for (int l = 0; l < W; l++) t[j * W + l] = attention_p_affine(t[j * W + l], shift[l], rule->slope, rule->offset);
    for (int l = 0; l < W; l++) {
      const float code = scale[l] == 0.0f ? 0.0f : codes_nearest_value(t[j * W + l]);
      halves[l] += (uint32_t)(int32_t)(code * 2.0f);
      t[j * W + l] = code;
    }
  }
  for (int l = 0; l < W; l++) denominator[l] = denominator[l] + scale[l] * direct_p_sum(halves[l]);
}

static void keep(const struct direct_p_publication *p, const struct direct_p_head *h, const float *codes,
                 const uint32_t *byte, int64_t query, int64_t queries, int64_t key, int64_t keys) {
  for (int64_t l = 0; l < queries; l++) {
    for (int64_t j = 0; j < keys; j++)
      p->codes[(query + l) * h->keys + key + j] = (uint8_t)e2m1_encode(codes[j * W + l]);
    p->scales[(query + l) * ceil_div(h->keys, BLOCK) + key / BLOCK] = (uint8_t)byte[l];
  }
}

static CPU_CLONES void weigh(float *restrict codes, int64_t keys, const uint32_t *restrict byte) {
  for (int64_t j = 0; j < keys; j++)
    for (int l = 0; l < W; l++) codes[j * W + l] *= direct_p_scale(byte[l]);
}

/* Eight rows of K from `first`; rows beyond the last are zero. */
static const float *eight_rows(const struct direct_p_head *h, const struct desk *w, int64_t first) {
  if (first + R <= h->keys) return h->k + first * h->ld;
  memset(w->edge, 0, (size_t)(R * h->ld) * sizeof(float));
  memcpy(w->edge, h->k + first * h->ld, (size_t)((h->keys - first) * h->ld) * sizeof(float));
  return w->edge;
}

static void find_reference(const struct direct_p_head *h, const struct direct_p *rule, const struct desk *w) {
  const int64_t n = rule->anchor < h->keys ? rule->anchor : h->keys;
  for (int l = 0; l < W; l++) w->reference[l] = n > 0 ? -F32_INFINITY : 0.0f;
  for (int64_t i = 0; i < n; i += R) {
    const int64_t some = n - i < R ? n - i : R;
    memset(w->edge, 0, (size_t)(R * h->ld) * sizeof(float));
    for (int64_t r = 0; r < some; r++)
      memcpy(w->edge + r * h->ld, h->k + direct_p_anchor_row(i + r, n, h->keys) * h->ld, (size_t)h->ld * sizeof(float));
    score(w->scores, w->edge, h->ld, w->q, h->head_dim);
    for (int64_t r = 0; r < some; r++)
      for (int l = 0; l < W; l++) w->reference[l] = direct_p_larger(w->reference[l], w->scores[r * W + l]);
  }
}

struct head_job {
  float *out, *lse;
  const struct direct_p_publication *publication;
  const struct direct_p_head *head;
  const struct direct_p *rule;
  char *scratch;
  float kappa;
};

static void attend(void *context, int64_t index, int worker) {
  const struct head_job *job = context;
  const struct direct_p_head *h = job->head;
  const int64_t first = index * W, queries = h->queries - first < W ? h->queries - first : W;
  int64_t bytes;
  uint32_t byte[W];
  desk_at(h->ld, NULL, &bytes);
  const struct desk w = desk_at(h->ld, job->scratch + worker * bytes, &bytes);
  for (int64_t d = 0; d < h->ld; d++)
    for (int64_t l = 0; l < W; l++) w.q[d * W + l] = l < queries ? h->q[(first + l) * h->ld + d] : 0.0f;
  for (int64_t i = 0; i < W * h->ld; i++) w.o[i] = 0.0f;
  for (int l = 0; l < W; l++) w.denominator[l] = 0.0f;
  find_reference(h, job->rule, &w);

  for (int64_t key = 0; key < h->keys; key += GROUP) {
    const int64_t keys = h->keys - key < GROUP ? h->keys - key : GROUP;
    for (int64_t j = 0; j < keys; j += R)
      score(w.scores + j * W, eight_rows(h, &w, key + j), h->ld, w.q, h->head_dim);
    for (int64_t b = 0; b < keys; b += BLOCK) {
      const int64_t some = keys - b < BLOCK ? keys - b : BLOCK;
      float *codes = w.scores + b * W;
      publish(codes, some, job->rule, job->kappa, w.reference, w.denominator, byte);
      if (job->publication) keep(job->publication, h, codes, byte, first, queries, key + b, some);
      weigh(codes, some, byte);
    }
    gather(h, &w, key, keys);
  }
  for (int64_t l = 0; l < queries; l++) {
    const float total = w.denominator[l] < F32_INFINITY ? w.denominator[l] : F32_NAN;
    for (int64_t d = 0; d < h->head_dim; d++)
      job->out[(first + l) * h->head_dim + d] = (w.o[l * h->ld + d] / total) * (1.0f / 36.0f);
    const float base = f32_fma(w.reference[l], job->kappa, (float)job->rule->margin);
    job->lse[first + l] = ((base + f32_log2(total)) + (float)job->rule->lift) * ATTENTION_LN_2;
  }
}

void direct_p_head(struct threads *threads, float *out, float *lse, const struct direct_p_publication *p,
                   const struct direct_p_head *h, const struct direct_p *rule, void *scratch) {
  const char *wrong = direct_p_refuse(rule);
  CPU_REQUIRE(!wrong, wrong);
  CPU_REQUIRE(h->cols % W == 0 && h->ld >= h->cols, "rows of whole products");
  struct head_job job = {out, lse, p, h, rule, scratch, (1.0f / f32_sqrt((float)h->head_dim)) * ATTENTION_LOG2_E};
  threads_run(threads, ceil_div(h->queries, W), attend, &job);
}

/* ---- a payload --------------------------------------------------------------------- */

struct buffers {
  float *q, *k, *v, *out; /* [seq_len][ld] */
  char *head;             /* direct_p_head's */
};

static struct buffers buffers_at(const struct direct_p_head *h, int threads, char *at, int64_t *bytes) {
  struct buffers b;
  *bytes = 0;
  b.q = attention_take(&at, bytes, h->queries * h->ld);
  b.k = attention_take(&at, bytes, h->keys * h->ld);
  b.v = attention_take(&at, bytes, h->keys * h->ld);
  b.out = attention_take(&at, bytes, h->queries * h->head_dim);
  b.head = at;
  *bytes += direct_p_head_bytes(h, threads);
  return b;
}

static struct direct_p_head head_of(const struct attention_layout *a) {
  return (struct direct_p_head){
      .queries = a->shape.seq_len, .keys = a->shape.seq_len, .head_dim = a->shape.head_dim, .cols = a->cols, .ld = a->ld};
}

int64_t direct_p_bytes(const struct attention_shape *s, int threads) {
  const struct attention_layout a = attention_layout(s);
  const struct direct_p_head h = head_of(&a);
  int64_t bytes;
  buffers_at(&h, threads, NULL, &bytes);
  return bytes;
}

/* rows[seq_len][ld] of a head. */
static void load(float *rows, const struct attention_layout *a, const struct attention_source *x, int64_t sample, int64_t head) {
  attention_load(rows, a, x, sample * a->shape.seq_len, a->shape.seq_len, a->shape.seq_len, head);
}

void cpu_direct_p(struct device *d, struct matrix *out, float *lse, const struct attention_payload *payload,
                  const struct direct_p *rule, const struct attention_shape *s, void *scratch) {
  CPU_REQUIRE(payload->formats.qk == FORMAT_NVFP4 && payload->formats.pv == FORMAT_MXFP4, "Q and K in NVFP4, V in MXFP4");
  CPU_REQUIRE(out->rows == s->batch * s->seq_len && out->cols == s->n_heads * s->head_dim, "out [tokens, n_heads * head_dim]");
  struct threads *threads = cpu_of(d)->threads;
  const struct attention_layout a = attention_layout(s);
  const struct attention_sources from = attention_sources(&a, NULL, payload);
  struct direct_p_head h = head_of(&a);
  int64_t bytes;
  const struct buffers b = buffers_at(&h, threads_count(threads), scratch, &bytes);
  h.q = b.q, h.k = b.k, h.v = b.v;
  for (int64_t sample = 0; sample < s->batch; sample++)
    for (int64_t head = 0; head < s->n_heads; head++) {
      load(b.q, &a, &from.q, sample, head);
      if (head % a.group == 0) {
        load(b.k, &a, &from.k, sample, head / a.group);
        load(b.v, &a, &from.v, sample, head / a.group);
      }
      direct_p_head(threads, b.out, lse + (sample * s->n_heads + head) * s->seq_len, NULL, &h, rule, b.head);
      for (int64_t t = 0; t < s->seq_len; t++)
        cpu_store(out, (sample * s->seq_len + t) * out->cols + head * s->head_dim, b.out + t * s->head_dim, s->head_dim);
    }
}
