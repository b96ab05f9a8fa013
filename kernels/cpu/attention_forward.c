/* Attention forward: tasks are (sample, kv head, tile of 128 queries).
 *
 * A task loads each tile of keys and values once and takes all queries of the
 * kv head's group through it in blocks of 32.  A block's scores stand as
 * [keys][32 queries], so that softmax runs along columns: no sum across lanes.
 */
#include "kernels/cpu/attention.h"
#include "kernels/cpu/codes.h"
#include "kernels/attention.h"

/* 32 queries of one head. */
struct block {
  float *q;    /* [head_dim][32] */
  float *o;    /* [32][ld] */
  float *m, *l, *base, *largest; /* [32]; largest score */
};

/* A worker's scratch. */
struct desk {
  float *k, *v, *rows, *scores;
  float *blocks;
  int64_t block_floats;
};

enum { BLOCKS = ATTENTION_KEYS / ATTENTION_BLOCK }; /* of a tile of queries */

static struct desk desk_at(const struct attention_layout *a, char *at, int64_t *bytes) {
  struct desk w;
  *bytes = 0;
  w.k = attention_take(&at, bytes, ATTENTION_KEYS * a->ld);
  w.v = attention_take(&at, bytes, ATTENTION_KEYS * a->ld);
  w.rows = attention_take(&at, bytes, ATTENTION_BLOCK * a->ld);
  w.scores = attention_take(&at, bytes, ATTENTION_KEYS * ATTENTION_BLOCK);
  w.block_floats = a->transposed + ATTENTION_BLOCK * (a->ld + 4);
  w.blocks = attention_take(&at, bytes, a->group * BLOCKS * w.block_floats);
  return w;
}

static struct block block_at(const struct attention_layout *a, const struct desk *w, int64_t head, int64_t number) {
  float *at = w->blocks + (head * BLOCKS + number) * w->block_floats;
  struct block b = {.q = at, .o = at + a->transposed};
  b.m = b.o + ATTENTION_BLOCK * a->ld;
  b.l = b.m + ATTENTION_BLOCK;
  b.base = b.l + ATTENTION_BLOCK;
  b.largest = b.base + ATTENTION_BLOCK;
  return b;
}

int64_t attention_forward_bytes(const struct attention_layout *a, int threads) {
  int64_t bytes;
  desk_at(a, NULL, &bytes);
  return round_up((int64_t)sizeof(float) * threads, 64) + threads * bytes;
}

/* exp2(fma(s, kappa, -base)); for s = -inf, which is frequent, without the
 * underflow in exp2 that processors are slow at. */
ATTENTION_INLINE float weight(float s, float kappa, float base) {
  bool absent = s == -F32_INFINITY;
  float p = f32_exp2(absent ? 0.0f : f32_fma(s, kappa, -base));
  return absent ? 0.0f : p;
}

/* How P is written. */
struct map {
  enum format pv;
  float slope, offset;
};

/* Of a column of queries, over one tile: codes that are 0, blocks, those that are 0. */
struct seen {
  uint32_t zeros[ATTENTION_BLOCK], blocks[ATTENTION_BLOCK], zero_blocks[ATTENTION_BLOCK];
};

/* As bits: of comparisons of floats the compiler makes branches. */
ATTENTION_INLINE uint32_t is_absent(float s) { return f32_bits(s) == 0xFF800000u; }
ATTENTION_INLINE uint32_t zero_code(float p, float s) { return f32_bits(p) == 0u ? 1u - is_absent(s) : 0u; }

/* P of the tile's scores in their place, and its sum: in FP32, or rounded to E4M3
 * while the sum is not. */
ATTENTION_INLINE void weights(float *restrict scores, float *restrict sum, int64_t keys, float kappa,
                              const float *restrict base, bool e4m3, struct seen *restrict seen) {
  enum { W = ATTENTION_BLOCK };
  for (int64_t j = 0; j < keys; j++)
    for (int l = 0; l < W; l++) {
      float s = scores[j * W + l], p = weight(s, kappa, base[l]);
      if (e4m3) p = p > ATTENTION_P_MOST ? ATTENTION_P_MOST : p;
      sum[l] = sum[l] + p;
      if (e4m3) {
        p = e4m3_round(p);
        seen->zeros[l] += zero_code(p, s);
      }
      scores[j * W + l] = p;
    }
}

/* Six times P in MXFP4, and the sum of that. */
ATTENTION_INLINE void weights_mxfp4(float *restrict scores, float *restrict sum, int64_t keys, float kappa,
                                    const float *restrict m, const float *restrict base, const struct map *map, bool affine,
                                    struct seen *restrict seen) {
  enum { W = ATTENTION_BLOCK };
  const float raise = affine ? ATTENTION_RAISE_AFFINE : ATTENTION_RAISE_EXP2, slope = map->slope, offset = map->offset;
  for (int64_t first = 0; first < keys; first += ATTENTION_MX) {
    int64_t end = first + ATTENTION_MX < keys ? first + ATTENTION_MX : keys;
    float top[W], e[W], scale[W], codes[W];
    for (int l = 0; l < W; l++) top[l] = -F32_INFINITY, codes[l] = 0.0f;
    for (int64_t j = first; j < end; j++)
      for (int l = 0; l < W; l++) top[l] = scores[j * W + l] > top[l] ? scores[j * W + l] : top[l];
    for (int l = 0; l < W; l++) {
      e[l] = attention_p_exponent((top[l] - m[l]) * kappa, raise); /* of the maximum exactly 0 */
      scale[l] = attention_p_scale(e[l]);
      seen->blocks[l] += top[l] > -F32_INFINITY;
      seen->zero_blocks[l] += (uint32_t)(top[l] > -F32_INFINITY) & (uint32_t)(scale[l] == 0.0f);
    }
    for (int64_t j = first; j < end; j++)
      for (int l = 0; l < W; l++) {
        float s = scores[j * W + l];
        uint32_t absent = is_absent(s) | (f32_bits(scale[l]) == 0u);
        float t = absent ? e[l] : f32_fma(s, kappa, -base[l]);
        float code = codes_nearest_value(affine ? attention_p_affine(t, e[l], slope, offset) : attention_p_exp2(t, e[l]));
        code = absent ? 0.0f : code;
        code = f32_bits(s) << 1 > 0xFF000000u ? s : code; /* a NaN */
        codes[l] = codes[l] + code;
        seen->zeros[l] += zero_code(code, s);
        scores[j * W + l] = scale[l] * code;
      }
    for (int l = 0; l < W; l++) sum[l] = f32_fma(scale[l], codes[l], sum[l]);
  }
}

/* Takes a block through a tile of `keys` keys.  `ahead` = the block's first
 * query - the tile's first key: below 128 the diagonal is in the tile.
 * first[32]: the tile's first key that each query sees; NULL: key 0. */
ATTENTION_INLINE void attend_as(const struct attention_layout *a, const struct desk *w, const struct block *b,
                                int64_t keys, int64_t ahead, const int32_t *first, const struct map *map, enum format pv,
                                bool affine, struct seen *restrict counts) {
  enum { W = ATTENTION_BLOCK, R = ATTENTION_ROWS };
  bool diagonal = ahead < ATTENTION_KEYS, lazy = !attention_format_plain(pv);
  float *scores = w->scores, kappa = a->kappa;
  int64_t seen = diagonal && ahead + W < keys ? ahead + W : keys;
  int64_t begin = first ? first[0] / ATTENTION_MX * ATTENTION_MX : 0; /* with a block of P */
  for (int64_t j = begin; j < seen; j += R)
    attention_product(scores + j * W, W, w->k + j * a->ld, a->ld, 1, b->q, W, a->shape.head_dim, true, EDGE_NONE, 0);
  for (int64_t j = ahead + 1; j < seen; j++)
    for (int64_t l = 0; l < W; l++) scores[j * W + l] = l < j - ahead ? -F32_INFINITY : scores[j * W + l];
  for (int64_t j = begin; first && j < seen && j < first[W - 1]; j++)
    for (int l = 0; l < W; l++) scores[j * W + l] = j < first[l] ? -F32_INFINITY : scores[j * W + l];

  float top[W], base[W], correction[W], sum[W];
  for (int l = 0; l < W; l++) top[l] = b->largest[l];
  for (int64_t j = begin; j < seen; j++)
    for (int l = 0; l < W; l++) top[l] = scores[j * W + l] > top[l] ? scores[j * W + l] : top[l];
  for (int l = 0; l < W; l++) {
    b->largest[l] = top[l];
    if (lazy) {
      bool fresh = !(b->m[l] > -F32_INFINITY), moves = fresh || (b->m[l] - top[l]) * kappa < -ATTENTION_LAZY;
      top[l] = moves ? top[l] : b->m[l];
      base[l] = top[l] > -F32_INFINITY ? top[l] * kappa : 0.0f;
      correction[l] = fresh ? 0.0f : f32_exp2(moves ? b->base[l] - base[l] : 0.0f);
    } else {
      base[l] = top[l] > -F32_INFINITY ? top[l] * kappa : 0.0f;
      correction[l] = weight(b->m[l], kappa, base[l]);
    }
    b->m[l] = top[l];
    b->base[l] = base[l];
    sum[l] = 0.0f;
  }
  if (pv == FORMAT_MXFP4)
    weights_mxfp4(scores + begin * W, sum, seen - begin, kappa, top, base, map, affine, counts);
  else
    weights(scores + begin * W, sum, seen - begin, kappa, base, pv == FORMAT_E4M3, counts);
  for (int l = 0; l < W; l++) b->l[l] = f32_fma(b->l[l], correction[l], sum[l]);

  for (int64_t r = 0; r < W; r++)
    for (int64_t d = 0; d < a->cols; d++) b->o[r * a->ld + d] = b->o[r * a->ld + d] * correction[r];
  for (int64_t d = 0; d < a->cols; d += W)
    for (int64_t r = 0; r < W; r += R) {
      if (!diagonal || ahead + r < keys) /* else past the end of the sequence */
        attention_product_queries(b->o + r * a->ld + d, a->ld, scores + r, 1, W, w->v + d, a->ld, keys, diagonal,
                                  ahead + r, first ? first + r : NULL);
    }
}

typedef void attend_body(const struct attention_layout *a, const struct desk *w, const struct block *b, int64_t keys,
                         int64_t ahead, const int32_t *first, const struct map *map, struct seen *seen);

#define ATTEND(name, pv, affine)                                                                                       \
  static CPU_CLONES void name(const struct attention_layout *a, const struct desk *w, const struct block *b,           \
                              int64_t keys, int64_t ahead, const int32_t *first, const struct map *map,                \
                              struct seen *seen) {                                                                     \
    attend_as(a, w, b, keys, ahead, first, map, pv, affine, seen);                                                     \
  }
ATTEND(attend_plain, FORMAT_BF16, false)
ATTEND(attend_e4m3, FORMAT_E4M3, false)
ATTEND(attend_mxfp4, FORMAT_MXFP4, false)
ATTEND(attend_mxfp4_affine, FORMAT_MXFP4, true)

static attend_body *attend_of(const struct map *map) {
  if (map->pv == FORMAT_MXFP4) return map->slope != 0.0f ? attend_mxfp4_affine : attend_mxfp4;
  return map->pv == FORMAT_E4M3 ? attend_e4m3 : attend_plain;
}

struct forward {
  struct attention_layout layout;
  struct attention_sources source;
  struct map map;
  attend_body *attend;
  struct matrix *out;
  const int32_t *starts; /* [batch, seq_len] or NULL */
  float *lse;
  struct quantise_counts *counts;
  float *largest; /* one a worker */
  char *desks;
  int64_t desk_bytes, tiles;
};

static void begin_block(const struct forward *f, const struct desk *w, const struct block *b, int64_t row, int64_t n,
                        int64_t head) {
  const struct attention_layout *a = &f->layout;
  attention_load(w->rows, a, &f->source.q, row, n, ATTENTION_BLOCK, head);
  attention_transpose(b->q, a, w->rows);
  memset(b->o, 0, (size_t)(ATTENTION_BLOCK * a->ld) * sizeof(float));
  for (int l = 0; l < ATTENTION_BLOCK; l++) {
    b->m[l] = b->largest[l] = -F32_INFINITY;
    b->l[l] = b->base[l] = 0.0f;
  }
}

/* O / l, lse and the largest logit of each query. */
static CPU_CLONES void normalise(const struct attention_layout *a, const struct block *b, enum format pv, float *lse,
                                 float *logit) {
  const bool sixfold = pv == FORMAT_MXFP4, e4m3 = pv == FORMAT_E4M3;
  float inverse[ATTENTION_BLOCK];
  for (int l = 0; l < ATTENTION_BLOCK; l++) {
    lse[l] = f32_fma(b->base[l], ATTENTION_LN_2, f32_log(sixfold ? b->l[l] / 6.0f : b->l[l]));
    logit[l] = b->largest[l] * a->scale;
    inverse[l] = 1.0f / (sixfold ? b->l[l] * 6.0f : b->l[l]); /* of V too: 1/36 of P V, 1/6 of l */
    if (e4m3) inverse[l] = b->l[l] < ATTENTION_L_LEAST ? F32_NAN : inverse[l];
  }
  for (int64_t r = 0; r < ATTENTION_BLOCK; r++)
    for (int64_t d = 0; d < a->cols; d++) b->o[r * a->ld + d] = b->o[r * a->ld + d] * inverse[r];
}

static void finish_block(const struct forward *f, const struct block *b, int64_t row, int64_t n, int64_t head,
                         float *lse, float *largest) {
  float block_lse[ATTENTION_BLOCK], logit[ATTENTION_BLOCK];
  normalise(&f->layout, b, f->map.pv, block_lse, logit);
  attention_store(f->out, &f->layout, row, n, attention_q_col(&f->layout, head), b->o, 1.0f);
  for (int64_t r = 0; r < n; r++) {
    lse[r] = block_lse[r];
    if (logit[r] > *largest) *largest = logit[r];
  }
}

/* Of the queries that exist, at most `queries`. */
static void add_seen(struct quantise_counts *counts, const struct seen *seen, int64_t keys, int64_t ahead,
                     const int32_t *first, int64_t queries) {
  for (int64_t l = 0; l < ATTENTION_BLOCK && l < queries; l++) {
    int64_t end = ahead + l + 1 < keys ? ahead + l + 1 : keys, begin = first ? first[l] : 0;
    counts->elements += begin < end ? end - begin : 0;
    counts->underflowed += seen->zeros[l];
    counts->blocks += seen->blocks[l];
    counts->zero_blocks += seen->zero_blocks[l];
  }
}

static void forward_task(void *context, int64_t index, int worker) {
  const struct forward *f = context;
  const struct attention_layout *a = &f->layout;
  const struct attention_shape *s = &a->shape;
  int64_t bytes;
  struct desk w = desk_at(a, f->desks + worker * f->desk_bytes, &bytes);
  int64_t streams = s->batch * s->n_kv_heads;
  int64_t sample = index % streams / s->n_kv_heads, kv_head = index % s->n_kv_heads;
  int64_t tile = f->tiles - 1 - index / streams; /* the longest first */
  int64_t first = tile * ATTENTION_KEYS, row0 = sample * s->seq_len;
  int64_t end = first + ATTENTION_KEYS < s->seq_len ? first + ATTENTION_KEYS : s->seq_len;
  int64_t blocks = ceil_div(end - first, ATTENTION_BLOCK);
  bool coded = f->counts && !attention_format_plain(f->map.pv);
  struct quantise_counts counts = {0};

  for (int64_t g = 0; g < a->group; g++)
    for (int64_t i = 0; i < blocks; i++) {
      struct block b = block_at(a, &w, g, i);
      int64_t query = first + i * ATTENTION_BLOCK, n = end - query < ATTENTION_BLOCK ? end - query : ATTENTION_BLOCK;
      begin_block(f, &w, &b, row0 + query, n, kv_head * a->group + g);
    }
  const int32_t *starts = f->starts ? f->starts + row0 + first : NULL; /* of the tile's queries */
  int64_t key0 = starts ? starts[0] / ATTENTION_KEYS * ATTENTION_KEYS : 0;
  for (int64_t key = key0; key < end; key += ATTENTION_KEYS) {
    int64_t keys = end - key < ATTENTION_KEYS ? end - key : ATTENTION_KEYS;
    int64_t padded = round_up(keys, ATTENTION_ROWS);
    attention_load(w.k, a, &f->source.k, row0 + key, keys, padded, kv_head);
    attention_load(w.v, a, &f->source.v, row0 + key, keys, padded, kv_head);
    for (int64_t g = 0; g < a->group; g++)
      for (int64_t i = 0; i < blocks; i++) {
        struct block b = block_at(a, &w, g, i);
        struct seen seen = {{0}, {0}, {0}};
        int64_t query = first + i * ATTENTION_BLOCK, ahead = query - key;
        int64_t n = end - query < ATTENTION_BLOCK ? end - query : ATTENTION_BLOCK;
        int32_t begins[ATTENTION_BLOCK];
        bool ragged = attention_first_keys(begins, starts ? starts + i * ATTENTION_BLOCK : NULL, n, key);
        if (ragged && begins[0] >= keys) continue;
        f->attend(a, &w, &b, keys, ahead, ragged ? begins : NULL, &f->map, &seen);
        if (coded) add_seen(&counts, &seen, keys, ahead, ragged ? begins : NULL, n);
      }
  }
  if (coded) cpu_counts_add(&f->counts[ATTENTION_P], &counts);
  for (int64_t g = 0; g < a->group; g++)
    for (int64_t i = 0; i < blocks; i++) {
      struct block b = block_at(a, &w, g, i);
      int64_t head = kv_head * a->group + g;
      int64_t query = first + i * ATTENTION_BLOCK, n = end - query < ATTENTION_BLOCK ? end - query : ATTENTION_BLOCK;
      finish_block(f, &b, row0 + query, n, head, f->lse + (sample * s->n_heads + head) * s->seq_len + query,
                   &f->largest[worker]);
    }
}

void cpu_attention_forward(struct device *d, struct matrix *out, float *lse, float *max_logit,
                           struct quantise_counts *counts, const struct matrix *qkv,
                           const struct attention_payload *payload, const int32_t *starts,
                           const struct attention_shape *s) {
  struct cpu_device *cpu = cpu_of(d);
  int threads = threads_count(cpu->threads);
  struct forward f = {.layout = attention_layout(s), .out = out, .starts = starts, .lse = lse, .counts = counts};
  if (payload) f.map = (struct map){payload->formats.pv, payload->formats.p_slope, payload->formats.p_offset};
  f.source = attention_sources(&f.layout, qkv, payload);
  f.attend = attend_of(&f.map);
  attention_require(&f.layout, qkv, out, starts);
  CPU_REQUIRE(cpu->scratch_bytes >= attention_forward_bytes(&f.layout, threads), "scratch too small for attention");
  f.largest = (float *)(void *)cpu->scratch;
  f.desks = cpu->scratch + round_up((int64_t)sizeof(float) * threads, 64);
  desk_at(&f.layout, NULL, &f.desk_bytes);
  f.tiles = ceil_div(s->seq_len, ATTENTION_KEYS);
  for (int i = 0; i < threads; i++) f.largest[i] = -F32_INFINITY;
  threads_run(cpu->threads, s->batch * s->n_kv_heads * f.tiles, forward_task, &f);
  for (int i = 0; max_logit && i < threads; i++)
    if (f.largest[i] > *max_logit) *max_logit = f.largest[i];
}
