/* The definition of causal grouped-query attention, with P in FP32 and in few
 * bits, and what its forward and backward share.
 *
 * Query head h reads kv head h / group, group = n_heads / n_kv_heads.  For
 * query i only keys j, starts_i <= j <= i, exist (starts_i = 0 without starts):
 * another token takes no part in any sum, not even as a zero.  All values are
 * FP32; sums run in the order written, over the tokens that exist.
 *
 *   scale = 1 / sqrt(head_dim),  kappa = scale * log2(e)
 *   s_ij  = +0;  d ascending: s_ij = fma(q_id, k_jd, s_ij)
 *
 * Forward: keys in tiles of 128 from key 0 of the sample, softmax online in base 2
 * (Milakov and Gimelshein; Dao et al., "FlashAttention").
 *   m = -inf, l = +0, O_d = +0;  for each tile with a key that exists:
 *     m' = max(m, every s_ij of the tile)         a NaN is never the larger
 *     b  = m' * kappa  (0 where m' is -inf),  c = exp2(fma(m, kappa, -b)),  m = m'
 *     p_j = exp2(fma(s_ij, kappa, -b))
 *     l   = fma(l, c, sum),   sum = +0; j ascending: sum = sum + p_j
 *     O_d = O_d * c;   j ascending: O_d = fma(p_j, v_jd, O_d)
 *   out_id = O_d * (1 / l),  lse_i = fma(b, ln 2, log(l)),  largest logit m * scale
 *
 * Backward: P again from lse.
 *   D_i   = sum over d of dO_id * O_id: 32 partial sums, the one of lane w takes
 *           d = w, w + 32, … by fma; then halves are added, 16, 8, 4, 2, 1
 *   p_ij  = exp2(fma(s_ij, kappa, -(lse_i * log2(e))))
 *   dp_ij = +0;  d ascending: fma(dO_id, v_jd, dp_ij)
 *   ds_ij = p_ij * (dp_ij - D_i)
 *   dV_jd = +0;  heads of the group ascending, in each i ascending from j, starts_i <= j: fma(p_ij, dO_id, dV_jd)
 *   dK_jd = +0;  the same order: fma(ds_ij, q_id, dK_jd);  at the end times scale
 *   dQ_id = +0;  j ascending from starts_i to i: fma(ds_ij, k_jd, dQ_id);  at the end times scale
 *
 * In few bits (kernels/attention.h says how each number is written) q, k and v
 * are what their codes decode to: the same sums over those, with these differences.
 *
 * Forward with P in codes:
 *   the maximum is lazy: m' = max as above, but m stays where (m - m') kappa >= -8;
 *   c = 1 where it stays, else exp2(b - b'), and 0 in the first tile
 *   E4M3   l sums p_j as above, at most 448, unrounded (below 1/2: the row is NaN); O_d = fma(E4M3(p_j), v_jd, O_d)
 *   MXFP4  blocks of 32 keys from the tile's first, of the keys that the query sees:
 *          t_j = fma(s_ij, kappa, -b), t_max = (largest s - m) * kappa; code q_j, scale 2^e
 *          sum = fma(2^e, sum of the block's q_j, sum);  O_d = fma(2^e q_j, 6 v_jd, O_d)
 *          out_id = O_d * (1 / (6 l)),  lse_i = fma(b, ln 2, log(l / 6))
 *          A block with e < -126 is zero.  A NaN among the scores makes the row NaN.
 *   P is normalised by what its codes sum to in MXFP4, by what it was in E4M3.
 * Backward with dO in codes (g: 4 L dO, k8, q8, v8: 4 k, 4 q, 4 v; all as decoded):
 *   d_stat_i = -4 * (sum over d of g_id * O_id, as D),  l_stat_i = fma(lse_i, -log2(e), 8)
 *   p_ij  = E4M3(exp2(min(fma(s_ij, kappa, l_stat_i), 8)))                      256 P
 *   dp_ij = +0;  d ascending: fma(g_id, v8_jd, dp_ij)                           16 L dP
 *   ds_ij = E4M3(p_ij * (dp_ij + d_stat_i) * (scale / 16))                      256 L scale dS
 *   dV_jd of p_ij and g_id, dK_jd of ds_ij and q8_id, dQ_id of ds_ij and k8_jd, in
 *   the same orders; at the end times 2^-10 / L.
 * Backward with dO plain: P and dS in FP32 from the decoded q, k and v (v in MXFP4
 * rounded to FP32, its sixth being no binary number).
 *
 * Only the tile of 128 keys is visible in the bits: every other blocking below
 * is a schedule.  exp2 and log are those of kernels/elementary.h.
 */
#ifndef FP4D_KERNELS_CPU_ATTENTION_H
#define FP4D_KERNELS_CPU_ATTENTION_H

#include "base/checked.h"
#include "kernels/cpu/cpu.h"

enum {
  ATTENTION_KEYS = 128,  /* keys of a tile: part of the definition */
  ATTENTION_BLOCK = 32,  /* queries taken through a tile at once, and the columns of a product */
  ATTENTION_ROWS = 8     /* rows of a product */
};

#define ATTENTION_LOG2_E 0x1.715476p+0f
#define ATTENTION_LN_2 0x1.62e430p-1f

/* What follows from a shape. */
struct attention_layout {
  struct attention_shape shape;
  int64_t group;      /* query heads of a kv head */
  int64_t cols;       /* head_dim padded to whole products; the padding is zero */
  int64_t ld;         /* floats between rows in scratch: off the cache's set strides */
  int64_t transposed; /* floats of 32 rows transposed */
  float scale, kappa;
};

struct attention_layout attention_layout(const struct attention_shape *s);
/* Aborts unless the matrices have the shape's extents and starts (or NULL) ascend. */
void attention_require(const struct attention_layout *a, const struct matrix *qkv, const struct matrix *out,
                       const int32_t *starts);

/* Columns of qkv at which query head h, and k or v of kv head g, begin. */
static inline int64_t attention_q_col(const struct attention_layout *a, int64_t h) { return h * a->shape.head_dim; }
static inline int64_t attention_k_col(const struct attention_layout *a, int64_t g) {
  return (a->shape.n_heads + g) * a->shape.head_dim;
}
static inline int64_t attention_v_col(const struct attention_layout *a, int64_t g) {
  return (a->shape.n_heads + a->shape.n_kv_heads + g) * a->shape.head_dim;
}

/* One of Q, K, V, dO as it is contracted. */
struct attention_source {
  enum { SOURCE_PLAIN, SOURCE_E4M3, SOURCE_E5M2, SOURCE_NVFP4, SOURCE_MXFP4 } kind;
  const struct matrix *plain;
  const uint8_t *codes, *scales;
  int64_t col0, cols; /* plain: the column at which the tensor begins; of codes: columns of a row */
  float factor;       /* of what codes decode to (MXFP4: six times the value) */
};

/* Q, K and V for scores and P V: what the formats have them in. */
struct attention_sources {
  struct attention_source q, k, v;
};
struct attention_sources attention_sources(const struct attention_layout *a, const struct matrix *qkv,
                                           const struct attention_payload *payload);
/* Q8, K8 or V8 as codes, four times the value. */
struct attention_source attention_codes(const struct attention_layout *a, const struct attention_payload *payload,
                                        enum attention_view view);

/* rows[padded][ld] = head_dim columns of a head, tokens first..first+n-1 (of one
 * sample; MXFP4: the first is the first of a block); zero in the columns up to
 * `cols` and in the rows from n. */
void attention_load(float *rows, const struct attention_layout *a, const struct attention_source *x, int64_t first,
                    int64_t n, int64_t padded, int64_t head);
/* Writes rows[n][ld] * factor there. */
void attention_store(struct matrix *m, const struct attention_layout *a, int64_t first, int64_t n, int64_t col,
                     float *rows, float factor);
/* to[head_dim][32] = the transpose of 32 loaded rows. */
void attention_transpose(float *to, const struct attention_layout *a, const float *rows);

/* Takes n floats of a worker's scratch, 64-byte aligned; with *at NULL it only counts. */
static inline float *attention_take(char **at, int64_t *bytes, int64_t n) {
  float *p = (float *)(void *)*at;
  int64_t size = round_up(n * (int64_t)sizeof(float), 64);
  if (*at) *at += size;
  *bytes += size;
  return p;
}

/* Sum of x y: 32 partial sums as of D above. */
float attention_dot(const float *x, const float *y, int64_t n);

/* Writes the payload's views of a rotated qkv. */
void attention_publish(struct device *d, const struct attention_payload *payload, struct quantise_counts *counts,
                       const struct matrix *qkv, const struct attention_shape *s);

int64_t attention_forward_bytes(const struct attention_layout *a, int threads);
int64_t attention_backward_bytes(const struct attention_layout *a, int threads);

/* ---- products ------------------------------------------------------------ */
/* Which of the 8 rows take part in the first or last k of a product. */
enum attention_edge {
  EDGE_NONE,
  EDGE_BEFORE, /* `edges` k come first; rows 0..e take part in number e */
  EDGE_AFTER   /* 7 k come last; rows e+1..7 take part in number e */
};

#define ATTENTION_INLINE static inline __attribute__((always_inline))

/* Where the keys begin that 32 queries of a sample see, counted from the tile's first,
 * `key`, and in 0..128: first[32], ascending; of queries that do not exist, the last one's.  False, and nothing is written, where none begins after `key`. */
static inline bool attention_first_keys(int32_t *first, const int32_t *starts, int64_t queries, int64_t key) {
  if (!starts || starts[queries - 1] <= key) return false;
  for (int64_t l = 0; l < ATTENTION_BLOCK; l++) {
    int64_t start = starts[l < queries ? l : queries - 1] - key;
    first[l] = (int32_t)(start < 0 ? 0 : start > ATTENTION_KEYS ? ATTENTION_KEYS : start);
  }
  return true;
}

/* c[8][32] continued (or, `fresh`, begun at +0) by c_rl = fma(A_rk, b_kl, c_rl)
 * for k ascending, A_rk = a[r * a_row + k * a_k].  k: the edges before, n, the
 * edges after; a fresh product has no edges, and n > 0. */
ATTENTION_INLINE void attention_product(float *restrict c, int64_t ldc, const float *restrict a, int64_t a_row,
                                        int64_t a_k, const float *restrict b, int64_t ldb, int64_t n, bool fresh,
                                        enum attention_edge edge, int64_t edges) {
  float sum[ATTENTION_ROWS][ATTENTION_BLOCK];
  for (int r = 0; r < ATTENTION_ROWS; r++)
    for (int l = 0; l < ATTENTION_BLOCK; l++)
      sum[r][l] = fresh ? __builtin_fmaf(a[r * a_row], b[l], 0.0f) : c[r * ldc + l];
  if (edge == EDGE_BEFORE) {
#pragma GCC unroll 8
    for (int e = 0; e < ATTENTION_ROWS; e++) {
      if (e >= edges) break;
#pragma GCC unroll 8
      for (int r = 0; r <= e; r++)
        for (int l = 0; l < ATTENTION_BLOCK; l++)
          sum[r][l] = __builtin_fmaf(a[r * a_row + e * a_k], b[e * ldb + l], sum[r][l]);
    }
    a += edges * a_k;
    b += edges * ldb;
  }
  for (int64_t k = fresh; k < n; k++)
    for (int r = 0; r < ATTENTION_ROWS; r++)
      for (int l = 0; l < ATTENTION_BLOCK; l++)
        sum[r][l] = __builtin_fmaf(a[r * a_row + k * a_k], b[k * ldb + l], sum[r][l]);
  if (edge == EDGE_AFTER) {
    a += n * a_k;
    b += n * ldb;
#pragma GCC unroll 8
    for (int e = 0; e < ATTENTION_ROWS - 1; e++)
#pragma GCC unroll 8
      for (int r = e + 1; r < ATTENTION_ROWS; r++)
        for (int l = 0; l < ATTENTION_BLOCK; l++)
          sum[r][l] = __builtin_fmaf(a[r * a_row + e * a_k], b[e * ldb + l], sum[r][l]);
  }
  for (int r = 0; r < ATTENTION_ROWS; r++)
    for (int l = 0; l < ATTENTION_BLOCK; l++) c[r * ldc + l] = sum[r][l];
}

/* c[8][32] continued as there, row r for from[r] <= k < to[r] alone: where a
 * document ends among the rows. */
ATTENTION_INLINE void attention_product_ragged(float *restrict c, int64_t ldc, const float *restrict a, int64_t a_row,
                                               int64_t a_k, const float *restrict b, int64_t ldb, const int64_t *from,
                                               const int64_t *to) {
  for (int r = 0; r < ATTENTION_ROWS; r++) {
    float sum[ATTENTION_BLOCK];
    for (int l = 0; l < ATTENTION_BLOCK; l++) sum[l] = c[r * ldc + l];
    for (int64_t k = from[r]; k < to[r]; k++)
      for (int l = 0; l < ATTENTION_BLOCK; l++)
        sum[l] = __builtin_fmaf(a[r * a_row + k * a_k], b[k * ldb + l], sum[l]);
    for (int l = 0; l < ATTENTION_BLOCK; l++) c[r * ldc + l] = sum[l];
  }
}

/* c[8][32] of 8 queries continued by sums over the keys that each sees: those from
 * first[r] (NULL: from 0) to, `diagonal`, its own (row r's: ahead + r), else keys - 1. */
ATTENTION_INLINE void attention_product_queries(float *restrict c, int64_t ldc, const float *restrict a, int64_t a_row,
                                                int64_t a_k, const float *restrict b, int64_t ldb, int64_t keys,
                                                bool diagonal, int64_t ahead, const int32_t *first) {
  int64_t skip = first ? first[0] : 0;
  if (first && first[ATTENTION_ROWS - 1] != skip) {
    int64_t from[ATTENTION_ROWS], to[ATTENTION_ROWS];
    for (int r = 0; r < ATTENTION_ROWS; r++) {
      from[r] = first[r];
      to[r] = diagonal && ahead + r + 1 < keys ? ahead + r + 1 : keys;
    }
    attention_product_ragged(c, ldc, a, a_row, a_k, b, ldb, from, to);
    return;
  }
  a += skip * a_k;
  b += skip * ldb;
  if (!diagonal)
    attention_product(c, ldc, a, a_row, a_k, b, ldb, keys - skip, false, EDGE_NONE, 0);
  else
    attention_product(c, ldc, a, a_row, a_k, b, ldb, ahead + 1 - skip, false, EDGE_AFTER, 0);
}

#endif
