/* Attention backward: one walk over pairs of a tile of keys and a block of 32
 * queries, which makes dQ, or dK and dV, or all three.
 *
 * Fused: a task is (sample, kv head) and its walk makes all three, S and dP
 * being computed once.  Split, for few long sequences: tasks (…, tile of keys)
 * make dK and dV, tasks (…, tile of queries) dQ, and S and dP are computed
 * twice.  Every sum has the same order in both, so the bits are the same.
 * Both keep memory linear in the sequence.
 */
#include "kernels/cpu/attention.h"
#include "kernels/attention.h"

enum { W = ATTENTION_BLOCK, R = ATTENTION_ROWS, PAIR_LD = ATTENTION_KEYS + 16 };

/* A worker's scratch. */
struct desk {
  float *k, *v;                 /* a tile's rows */
  float *k_columns, *v_columns; /* [4][head_dim][32] */
  float *q, *d_out;             /* a block's rows */
  float *p, *ds;                /* [32][PAIR_LD] */
  float *dk, *dv;               /* of the tile */
  float *dq;                    /* [group][queries of the walk][ld] */
};

static struct desk desk_at(const struct attention_layout *a, int64_t queries, char *at, int64_t *bytes) {
  struct desk w;
  *bytes = 0;
  float **tile[] = {&w.k, &w.v, &w.dk, &w.dv}, **block[] = {&w.q, &w.d_out};
  for (int i = 0; i < 4; i++) *tile[i] = attention_take(&at, bytes, ATTENTION_KEYS * a->ld);
  for (int i = 0; i < 2; i++) *block[i] = attention_take(&at, bytes, W * a->ld);
  w.k_columns = attention_take(&at, bytes, ATTENTION_KEYS / W * a->transposed);
  w.v_columns = attention_take(&at, bytes, ATTENTION_KEYS / W * a->transposed);
  w.p = attention_take(&at, bytes, W * PAIR_LD);
  w.ds = attention_take(&at, bytes, W * PAIR_LD);
  w.dq = attention_take(&at, bytes, a->group * round_up(queries, W) * a->ld);
  return w;
}

/* Fused makes 5 products a pair, split 7; fused has fewer, larger tasks. */
static bool fused_is_faster(const struct attention_shape *s, int threads) {
  int64_t tasks = s->batch * s->n_kv_heads;
  return tasks * 7 >= ceil_div(tasks, threads) * threads * 5;
}

static int64_t shared_bytes(const struct attention_shape *s) {
  return round_up(s->batch * s->n_heads * s->seq_len * (int64_t)sizeof(float), 64);
}

/* A worker's bytes: of a walk or of two rows for D. */
static int64_t desk_bytes(const struct attention_layout *a, bool fused) {
  int64_t bytes, rows = round_up(2 * a->shape.n_heads * a->shape.head_dim * (int64_t)sizeof(float), 64);
  desk_at(a, fused ? a->shape.seq_len : ATTENTION_KEYS, NULL, &bytes);
  return bytes > rows ? bytes : rows;
}

/* Fewer samples than these may be split where these are fused, and a sequence may
 * be shorter than the tile of queries that a split walk has room for. */
int64_t attention_backward_bytes(const struct attention_layout *a, int threads) {
  int64_t split = desk_bytes(a, false), fused = fused_is_faster(&a->shape, threads) ? desk_bytes(a, true) : 0;
  return shared_bytes(&a->shape) + threads * (fused > split ? fused : split);
}

struct backward {
  struct attention_layout layout;
  struct attention_sources source;              /* for scores and dP */
  struct attention_source d_out_source, q8, k8; /* q8, k8: for dK and dQ, where dO has codes */
  const struct attention_gradient *gradient;    /* where it has */
  struct matrix *d_qkv;
  const struct matrix *d_out, *out;
  const int32_t *starts; /* [batch, seq_len] or NULL */
  const float *lse;
  float *delta; /* D: [batch, n_heads, seq_len], where it has not */
  struct quantise_counts *counts;
  char *desks;
  int64_t desk_bytes;
};

/* ---- D ------------------------------------------------------------------- */
/* D of 32 tokens, all heads. */
static void delta_task(void *context, int64_t index, int worker) {
  const struct backward *b = context;
  const struct attention_shape *s = &b->layout.shape;
  int64_t tokens = s->batch * s->seq_len, cols = s->n_heads * s->head_dim;
  float *x = (float *)(void *)(b->desks + worker * b->desk_bytes), *y = x + cols;
  for (int64_t t = index * W; t < (index + 1) * W && t < tokens; t++) {
    cpu_load(x, b->d_out, t * cols, cols);
    cpu_load(y, b->out, t * cols, cols);
    for (int64_t h = 0; h < s->n_heads; h++)
      b->delta[(t / s->seq_len * s->n_heads + h) * s->seq_len + t % s->seq_len] =
          attention_dot(x + h * s->head_dim, y + h * s->head_dim, s->head_dim);
  }
}

/* ---- a tile of keys and a block of queries ------------------------------- */
struct pair {
  int64_t keys, queries; /* that exist */
  int64_t ahead;         /* first query - first key; below 128 the diagonal is in the pair */
  const float *lse, *delta; /* where dO has codes: l_stat, d_stat */
  bool ragged;              /* some query begins after the first key: at first[32] of the pair's keys, ascending */
  int32_t first[ATTENTION_BLOCK];
};

/* Of a lane of keys: dS in codes. */
struct seen {
  uint32_t zeros[ATTENTION_BLOCK], saturated[ATTENTION_BLOCK], largest[ATTENTION_BLOCK];
};

/* P and dS of 8 queries and 32 keys, from S and dP in their place, in FP32. */
ATTENTION_INLINE void gradients(float *restrict p, float *restrict ds, float kappa, const float exponent[R],
                                const float delta[R]) {
  for (int r = 0; r < R; r++)
    for (int l = 0; l < W; l++) {
      float x = f32_exp2(f32_fma(p[r * PAIR_LD + l], kappa, -exponent[r]));
      p[r * PAIR_LD + l] = x;
      ds[r * PAIR_LD + l] = x * (ds[r * PAIR_LD + l] - delta[r]);
    }
}

/* The same in E4M3, lifted; `last`: of the keys that the first query sees; first[8]:
 * the first that each sees. */
ATTENTION_INLINE void gradients_e4m3(float *restrict p, float *restrict ds, float kappa, float scale,
                                     const float l_stat[R], const float d_stat[R], int64_t last, int64_t queries,
                                     const int32_t first[R], struct seen *restrict seen) {
  for (int r = 0; r < R; r++) {
    int32_t visible = r < queries ? (int32_t)(last + r) : -1; /* the last key */
    for (int l = 0; l < W; l++) {
      float x = e4m3_round(attention_p_lifted(p[r * PAIR_LD + l], kappa, l_stat[r]));
      float dp = ds[r * PAIR_LD + l], z = attention_ds_lifted(x, dp, d_stat[r], scale), code = e4m3_round(z);
      uint32_t mask = l <= visible && l >= first[r] ? ~0u : 0u, size = f32_bits(z) & 0x7FFFFFFFu & mask;
      seen->zeros[l] += (uint32_t)(code == 0.0f) & (uint32_t)(dp + d_stat[r] != 0.0f) & mask;
      seen->saturated[l] += size > 0x43E00000u; /* 448 */
      seen->largest[l] = size > seen->largest[l] && size < 0x7F800000u ? size : seen->largest[l];
      p[r * PAIR_LD + l] = x;
      ds[r * PAIR_LD + l] = code;
    }
  }
}

/* P and dS, for the keys that each row of 8 queries sees (and some more). */
ATTENTION_INLINE void pair_scores_as(const struct attention_layout *a, const struct desk *w, const struct pair *n,
                                     bool codes, struct seen *seen) {
  for (int64_t r0 = 0; r0 < n->queries; r0 += R) {
    float exponent[R], delta[R];
    for (int64_t r = 0; r < R; r++) {
      bool exists = r0 + r < n->queries;
      exponent[r] = exists ? (codes ? n->lse[r0 + r] : n->lse[r0 + r] * ATTENTION_LOG2_E) : 0.0f;
      delta[r] = exists ? n->delta[r0 + r] : 0.0f;
    }
    int64_t keys = n->ahead + r0 + R < n->keys ? n->ahead + r0 + R : n->keys;
    for (int64_t j = n->ragged ? n->first[r0] / W * W : 0; j < keys; j += W) {
      float *p = w->p + r0 * PAIR_LD + j, *ds = w->ds + r0 * PAIR_LD + j;
      attention_product(p, PAIR_LD, w->q + r0 * a->ld, a->ld, 1, w->k_columns + j / W * a->transposed, W,
                        a->shape.head_dim, true, EDGE_NONE, 0);
      attention_product(ds, PAIR_LD, w->d_out + r0 * a->ld, a->ld, 1, w->v_columns + j / W * a->transposed, W,
                        a->shape.head_dim, true, EDGE_NONE, 0);
      if (codes) {
        int32_t first[R] = {0};
        for (int r = 0; n->ragged && r < R; r++) first[r] = n->first[r0 + r] - (int32_t)j;
        gradients_e4m3(p, ds, a->kappa, a->scale, exponent, delta, n->ahead + r0 - j, n->queries - r0, first, seen);
      } else {
        gradients(p, ds, a->kappa, exponent, delta);
      }
    }
  }
}

static CPU_CLONES void pair_scores(const struct attention_layout *a, const struct desk *w, const struct pair *n) {
  pair_scores_as(a, w, n, false, NULL);
}

static CPU_CLONES void pair_scores_e4m3(const struct attention_layout *a, const struct desk *w, const struct pair *n,
                                        struct seen *seen) {
  pair_scores_as(a, w, n, true, seen);
}

/* seen_to[key]: the queries before this one see it, unless it is later than they. */
static void queries_of_keys(int64_t seen_to[ATTENTION_KEYS + R], const struct pair *n) {
  int64_t i = 0, padded = round_up(n->keys, R);
  for (int64_t j = 0; j < padded; j++) {
    while (i < n->queries && (!n->ragged || n->first[i] <= j)) i++;
    seen_to[j] = i;
  }
}

/* out[keys][d] continued by the pair's A^T B, A = P or dS, B = rows of dO or Q. */
static CPU_CLONES void pair_to_keys(const struct attention_layout *a, float *out, const float *pairs,
                                    const float *rows, const struct pair *n) {
  int64_t seen_to[ATTENTION_KEYS + R];
  queries_of_keys(seen_to, n);
  for (int64_t d = 0; d < a->cols; d += W)
    for (int64_t j = 0; j < n->keys; j += R) {
      int64_t i = j - n->ahead; /* the query on the diagonal */
      int64_t queries = seen_to[j];
      float *c = out + j * a->ld + d;
      if (seen_to[j + R - 1] != queries) {
        int64_t from[R];
        for (int r = 0; r < R; r++) from[r] = i + r > 0 ? i + r : 0;
        attention_product_ragged(c, a->ld, pairs + j, 1, PAIR_LD, rows + d, a->ld, from, seen_to + j);
      } else if (i < 0) {
        attention_product(c, a->ld, pairs + j, 1, PAIR_LD, rows + d, a->ld, queries, false, EDGE_NONE, 0);
      } else if (i < queries) {
        int64_t edges = queries - i < R ? queries - i : R;
        attention_product(c, a->ld, pairs + i * PAIR_LD + j, 1, PAIR_LD, rows + i * a->ld + d, a->ld,
                          queries - i - edges, false, EDGE_BEFORE, edges);
      }
    }
}

/* dq[queries][d] continued by dS K. */
static CPU_CLONES void pair_to_queries(const struct attention_layout *a, float *dq, const struct desk *w,
                                       const struct pair *n) {
  for (int64_t d = 0; d < a->cols; d += W)
    for (int64_t r = 0; r < n->queries; r += R)
      attention_product_queries(dq + r * a->ld + d, a->ld, w->ds + r * PAIR_LD, PAIR_LD, 1, w->k + d, a->ld, n->keys,
                                n->ahead < ATTENTION_KEYS, n->ahead + r, n->ragged ? n->first + r : NULL);
}

/* ---- the walk ------------------------------------------------------------ */
struct walk {
  int64_t sample, kv_head;
  int64_t key_begin, key_end, query_begin, query_end; /* begins are multiples of 128 */
  bool d_keys, d_queries;                             /* what is wanted */
};

static void load_keys(const struct backward *b, const struct desk *w, const struct walk *x, int64_t key, int64_t keys) {
  const struct attention_layout *a = &b->layout;
  int64_t row = x->sample * a->shape.seq_len + key, padded = round_up(keys, W);
  attention_load(w->k, a, &b->source.k, row, keys, padded, x->kv_head);
  attention_load(w->v, a, &b->source.v, row, keys, padded, x->kv_head);
  for (int64_t j = 0; j < padded; j += W) {
    attention_transpose(w->k_columns + j / W * a->transposed, a, w->k + j * a->ld);
    attention_transpose(w->v_columns + j / W * a->transposed, a, w->v + j * a->ld);
  }
  if (b->gradient) attention_load(w->k, a, &b->k8, row, keys, padded, x->kv_head);
}

/* Visible ones. */
static int64_t pairs_of(const struct pair *n) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < n->queries; i++) {
    int64_t end = n->ahead + i + 1 < n->keys ? n->ahead + i + 1 : n->keys, begin = n->ragged ? n->first[i] : 0;
    pairs += begin < end ? end - begin : 0;
  }
  return pairs;
}

/* What a pair showed of dS; `factor` takes the lift off. */
static void add_seen(struct quantise_counts *to, const struct seen *seen, int64_t pairs, float factor) {
  uint32_t largest = 0;
  to->elements += pairs;
  for (int l = 0; l < W; l++) {
    to->underflowed += seen->zeros[l];
    to->saturated += seen->saturated[l];
    largest = seen->largest[l] > largest ? seen->largest[l] : largest;
  }
  float amax = f32_from_bits(largest) * factor;
  if (attention_finite(amax) && amax > to->amax) to->amax = amax;
}

static void walk(const struct backward *b, const struct desk *w, const struct walk *x) {
  const struct attention_layout *a = &b->layout;
  const struct attention_shape *s = &a->shape;
  const bool codes = b->gradient != NULL, counted = codes && b->counts && x->d_keys;
  const float unlift = codes ? ATTENTION_GRADIENT / b->gradient->lift[x->sample * s->n_kv_heads + x->kv_head] : 1.0f;
  const float scale = codes ? unlift : a->scale; /* codes of dS hold it */
  const float *exponent = codes ? b->gradient->l_stat : b->lse, *delta = codes ? b->gradient->d_stat : b->delta;
  int64_t row0 = x->sample * s->seq_len;
  int64_t dq_floats = round_up(x->query_end - x->query_begin, W) * a->ld; /* of a head */
  struct quantise_counts counts = {0};
  size_t tile_bytes = (size_t)(ATTENTION_KEYS * a->ld) * sizeof(float);
  if (x->d_queries) memset(w->dq, 0, (size_t)(a->group * dq_floats) * sizeof(float));

  const int32_t *starts = b->starts ? b->starts + row0 : NULL;
  int64_t key_begin = x->key_begin; /* dQ alone: from the tile in which the first query begins */
  if (starts && !x->d_keys) key_begin = starts[x->query_begin] / ATTENTION_KEYS * ATTENTION_KEYS;
  for (int64_t key = key_begin; key < x->key_end; key += ATTENTION_KEYS) {
    int64_t keys = x->key_end - key < ATTENTION_KEYS ? x->key_end - key : ATTENTION_KEYS;
    load_keys(b, w, x, key, keys);
    if (x->d_keys) {
      memset(w->dk, 0, tile_bytes);
      memset(w->dv, 0, tile_bytes);
    }
    int64_t first_query = key > x->query_begin ? key : x->query_begin;
    for (int64_t g = 0; g < a->group; g++) {
      int64_t head = x->kv_head * a->group + g, head0 = (x->sample * s->n_heads + head) * s->seq_len;
      for (int64_t query = first_query; query < x->query_end; query += W) {
        struct pair n = {.keys = keys, .ahead = query - key, .lse = exponent + head0 + query,
                         .delta = delta + head0 + query};
        n.queries = x->query_end - query < W ? x->query_end - query : W;
        n.ragged = attention_first_keys(n.first, starts ? starts + query : NULL, n.queries, key);
        if (n.ragged && n.first[0] >= keys) break; /* so do all later ones */
        int64_t padded = round_up(n.queries, R);
        attention_load(w->q, a, &b->source.q, row0 + query, n.queries, padded, head);
        attention_load(w->d_out, a, &b->d_out_source, row0 + query, n.queries, padded, head);
        if (codes) {
          struct seen seen = {{0}, {0}, {0}};
          pair_scores_e4m3(a, w, &n, &seen);
          if (counted) add_seen(&counts, &seen, pairs_of(&n), ATTENTION_LIFT * unlift);
          if (x->d_keys) attention_load(w->q, a, &b->q8, row0 + query, n.queries, padded, head);
        } else {
          pair_scores(a, w, &n);
        }
        if (x->d_keys) {
          pair_to_keys(a, w->dv, w->p, w->d_out, &n);
          pair_to_keys(a, w->dk, w->ds, w->q, &n);
        }
        if (x->d_queries) pair_to_queries(a, w->dq + g * dq_floats + (query - x->query_begin) * a->ld, w, &n);
      }
    }
    if (x->d_keys) {
      attention_store(b->d_qkv, a, row0 + key, keys, attention_k_col(a, x->kv_head), w->dk, scale);
      attention_store(b->d_qkv, a, row0 + key, keys, attention_v_col(a, x->kv_head), w->dv, unlift);
    }
  }
  if (counted) cpu_counts_add(&b->counts[ATTENTION_DS], &counts);
  for (int64_t g = 0; x->d_queries && g < a->group; g++)
    attention_store(b->d_qkv, a, row0 + x->query_begin, x->query_end - x->query_begin,
                    attention_q_col(a, x->kv_head * a->group + g), w->dq + g * dq_floats, scale);
}

static void fused_task(void *context, int64_t index, int worker) {
  const struct backward *b = context;
  const struct attention_shape *s = &b->layout.shape;
  int64_t bytes;
  struct desk w = desk_at(&b->layout, s->seq_len, b->desks + worker * b->desk_bytes, &bytes);
  struct walk x = {.sample = index / s->n_kv_heads, .kv_head = index % s->n_kv_heads, .key_end = s->seq_len,
                   .query_end = s->seq_len, .d_keys = true, .d_queries = true};
  walk(b, &w, &x);
}

/* Task 2i makes dK and dV of a tile, 2i + 1 dQ: the longest of both first. */
static void split_task(void *context, int64_t index, int worker) {
  const struct backward *b = context;
  const struct attention_shape *s = &b->layout.shape;
  int64_t bytes;
  struct desk w = desk_at(&b->layout, ATTENTION_KEYS, b->desks + worker * b->desk_bytes, &bytes);
  int64_t streams = s->batch * s->n_kv_heads, tiles = ceil_div(s->seq_len, ATTENTION_KEYS);
  int64_t stream = index / 2 % streams, number = index / 2 / streams;
  struct walk x = {.sample = stream / s->n_kv_heads, .kv_head = stream % s->n_kv_heads};
  x.d_keys = index % 2 == 0;
  x.d_queries = !x.d_keys;
  int64_t first = (x.d_keys ? number : tiles - 1 - number) * ATTENTION_KEYS;
  int64_t end = first + ATTENTION_KEYS < s->seq_len ? first + ATTENTION_KEYS : s->seq_len;
  x.key_begin = x.d_keys ? first : 0;
  x.key_end = end;
  x.query_begin = first;
  x.query_end = x.d_keys ? s->seq_len : end;
  walk(b, &w, &x);
}

void cpu_attention_backward(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts,
                            const struct matrix *d_out, const struct attention_gradient *g, const struct matrix *out,
                            const float *lse, const struct matrix *qkv, const struct attention_payload *payload,
                            const int32_t *starts, const struct attention_shape *s) {
  struct cpu_device *cpu = cpu_of(d);
  int threads = threads_count(cpu->threads);
  struct backward b = {.layout = attention_layout(s), .d_qkv = d_qkv, .d_out = d_out, .out = out, .starts = starts,
                       .lse = lse, .gradient = g, .counts = counts};
  attention_require(&b.layout, qkv, out, starts);
  attention_require(&b.layout, d_qkv, d_out, NULL);
  b.source = attention_sources(&b.layout, qkv, payload);
  b.d_out_source = (struct attention_source){.plain = d_out};
  CPU_REQUIRE((g == NULL) == (!payload || attention_format_plain(payload->formats.d_out)), "dO has codes or has not");
  if (b.source.v.kind == SOURCE_MXFP4) b.source.v.factor = 1.0f / 6.0f;
  if (g) {
    b.source.v = attention_codes(&b.layout, payload, ATTENTION_V8);
    b.q8 = attention_codes(&b.layout, payload, ATTENTION_Q8);
    b.k8 = attention_codes(&b.layout, payload, ATTENTION_K8);
    b.d_out_source = (struct attention_source){.kind = payload->formats.d_out == FORMAT_E5M2 ? SOURCE_E5M2 : SOURCE_E4M3,
                                               .codes = g->codes, .cols = d_out->cols, .factor = 1.0f};
  }
  /* Scratch was sized for the largest extents, which may have been split where these would be fused. */
  bool fused = fused_is_faster(s, threads) &&
               cpu->scratch_bytes >= shared_bytes(s) + threads * desk_bytes(&b.layout, true);
  b.desk_bytes = desk_bytes(&b.layout, fused);
  CPU_REQUIRE(cpu->scratch_bytes >= shared_bytes(s) + threads * b.desk_bytes, "scratch too small for attention");
  b.delta = (float *)(void *)cpu->scratch;
  b.desks = cpu->scratch + shared_bytes(s);
  if (!g) threads_run(cpu->threads, ceil_div(s->batch * s->seq_len, W), delta_task, &b);
  int64_t streams = s->batch * s->n_kv_heads;
  if (fused)
    threads_run(cpu->threads, streams, fused_task, &b);
  else
    threads_run(cpu->threads, 2 * streams * ceil_div(s->seq_len, ATTENTION_KEYS), split_task, &b);
}
