/* Causal grouped-query attention of any head_dim up to 256, in FP32 by the CUDA
 * cores: the definition of kernels/cpu/attention.h but for the order of sums, which
 * is fixed too.  Not fast: backends' own kernels take the shapes that matter.
 *
 * Tiles of queries and keys stand in shared memory in FP32, head_dim padded with
 * zeros to DIM.  256 threads are 16 x 16: of a product of rows (S, dP) thread
 * (y, x) makes rows y R .. and columns x, x + 16, …; of a sum of rows (O, dQ, dK, dV)
 * rows 4 y .. 4 y + 3 and columns 4 x .. 4 x + 3, 64 + 4 x, ….
 *
 * A key that a query does not see takes no part in any sum, whatever stands in it
 * (an infinity times a weight of 0 would): `low` and `high` hold the keys of the
 * tile that each query sees, and tiles in which all see all pass over them.
 *
 * Backward, deterministic without atomics: dK and dV by a block that owns the keys
 * and walks the heads of their group and the queries, dQ by one that owns the queries
 * and walks the keys; S and dP are computed in both.
 */
#include "kernels/attention.h"
#include "kernels/cuda/rows.cuh"

namespace {

constexpr int THREADS = 256, SIDE = 16, LARGE = 64, SMALL = 32, PAIR_LD = LARGE + 4;
constexpr float LOG2_E = 0x1.715476p+0f, LN_2 = 0x1.62e430p-1f;

struct tensor {
  void *data;
  bool is_bf16;
  int64_t cols;
};

struct problem {
  struct tensor qkv, out, d_out, d_qkv; /* forward: the first two */
  const int32_t *starts;                /* NULL: whole samples */
  float *lse, *largest, *delta;         /* largest: one a block */
  int heads, kv_heads, group, dim;
  int64_t seq_len;
  float scale, kappa;
};

CUDA_INLINE int64_t k_col(const struct problem &p, int kv_head) { return (int64_t)(p.heads + kv_head) * p.dim; }
CUDA_INLINE int64_t v_col(const struct problem &p, int kv_head) { return (int64_t)(p.heads + p.kv_heads + kv_head) * p.dim; }

CUDA_INLINE float tensor_get(const struct tensor &m, int64_t row, int64_t col) {
  const int64_t i = row * m.cols + col;
  return m.is_bf16 ? element(((const bf16 *)m.data)[i]) : ((const float *)m.data)[i];
}
CUDA_INLINE void tensor_set(const struct tensor &m, int64_t row, int64_t col, float x) {
  const int64_t i = row * m.cols + col;
  if (m.is_bf16) element_set((bf16 *)m.data + i, x);
  else ((float *)m.data)[i] = x;
}

/* ---- tiles ------------------------------------------------------------------ */
template <int DIM> constexpr int ld_of = DIM + 4;

/* tile[ROWS][DIM + 4] = `have` rows from `row`, a head's columns from `col`; else zeros. */
template <int DIM, int ROWS>
CUDA_INLINE void tile_load(float *tile, const struct tensor &m, int64_t row, int have, int64_t col, int dim) {
  for (int i = (int)threadIdx.x; i < ROWS * DIM; i += THREADS) {
    const int r = i / DIM, c = i % DIM;
    tile[r * ld_of<DIM> + c] = r < have && c < dim ? tensor_get(m, row + r, col + c) : 0.0f;
  }
}

/* s[r][c] = row y R + r of a by row x + 16 c of b. */
template <int DIM, int R, int C> CUDA_INLINE void product(float (&s)[R][C], const float *a, const float *b) {
  constexpr int LD = ld_of<DIM>;
  const int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int c = 0; c < C; c++) s[r][c] = 0.0f;
#pragma unroll 2
  for (int d = 0; d < DIM; d += 4) {
    float4 u[R], v[C];
#pragma unroll
    for (int r = 0; r < R; r++) u[r] = *(const float4 *)(a + (y * R + r) * LD + d);
#pragma unroll
    for (int c = 0; c < C; c++) v[c] = *(const float4 *)(b + (x + SIDE * c) * LD + d);
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int c = 0; c < C; c++) {
        s[r][c] = f32_fma(u[r].x, v[c].x, s[r][c]);
        s[r][c] = f32_fma(u[r].y, v[c].y, s[r][c]);
        s[r][c] = f32_fma(u[r].z, v[c].z, s[r][c]);
        s[r][c] = f32_fma(u[r].w, v[c].w, s[r][c]);
      }
  }
}

/* sum[r][…] += weight_r times a row of b, for four rows of which `mask` says which take part. */
template <int DIM> CUDA_INLINE void add_row(float (&sum)[4][DIM / SIDE], const float (&weight)[4], unsigned mask, const float *b) {
  const int x = (int)threadIdx.x % SIDE;
#pragma unroll
  for (int q = 0; q < DIM / LARGE; q++) {
    const float4 v = *(const float4 *)(b + LARGE * q + 4 * x);
    const float part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float next = f32_fma(weight[r], part[e], sum[r][4 * q + e]);
        sum[r][4 * q + e] = mask >> r & 1u ? next : sum[r][4 * q + e];
      }
  }
}

/* Which keys of a tile each of its queries sees: low .. high, none where high < low. */
struct sight {
  int low[LARGE], high[LARGE];
};

/* True: every query sees every key. Ends with no barrier. */
template <int QUERIES, int KEYS>
CUDA_INLINE bool sight_of(struct sight *s, const struct problem &p, int64_t row0, int64_t query, int64_t key) {
  const int t = (int)threadIdx.x;
  const int64_t last = query + QUERIES < p.seq_len ? query + QUERIES : p.seq_len; /* queries end */
  if (t < QUERIES) {
    const int64_t i = query + t, first = p.starts && i < p.seq_len ? p.starts[row0 + i] : 0;
    const int64_t end = i < p.seq_len ? (i - key < KEYS - 1 ? i - key : KEYS - 1) : -1;
    s->low[t] = (int)(first - key < 0 ? 0 : first - key < KEYS ? first - key : KEYS);
    s->high[t] = (int)(end < -1 ? -1 : end);
  }
  const int64_t latest = p.starts ? p.starts[row0 + last - 1] : 0;
  return query + QUERIES <= p.seq_len && key + KEYS - 1 <= query && latest <= key;
}

/* sum += P B, rows being queries and P[query][PAIR_LD]. */
template <int DIM, int KEYS>
CUDA_INLINE void add_keys(float (&sum)[4][DIM / SIDE], const float *pairs, const float *b, const struct sight *s, bool all) {
  const int y = (int)threadIdx.x / SIDE;
  int low[4], high[4];
#pragma unroll
  for (int r = 0; r < 4; r++) low[r] = all ? 0 : s->low[4 * y + r], high[r] = all ? KEYS : s->high[4 * y + r];
  for (int k = 0; k < KEYS; k += 4) {
    float4 row[4];
#pragma unroll
    for (int r = 0; r < 4; r++) row[r] = *(const float4 *)(pairs + (4 * y + r) * PAIR_LD + k);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float weight[4];
      unsigned mask = 0;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        weight[r] = j == 0 ? row[r].x : j == 1 ? row[r].y : j == 2 ? row[r].z : row[r].w;
        mask |= k + j >= low[r] && k + j <= high[r] ? 1u << r : 0u;
      }
      if (mask) add_row<DIM>(sum, weight, mask, b + (k + j) * ld_of<DIM>);
    }
  }
}

/* sum += P^T B, rows being keys. */
template <int DIM, int QUERIES>
CUDA_INLINE void add_queries(float (&sum)[4][DIM / SIDE], const float *pairs, const float *b, const struct sight *s, bool all) {
  const int y = (int)threadIdx.x / SIDE;
  for (int i = 0; i < QUERIES; i++) {
    const float4 row = *(const float4 *)(pairs + i * PAIR_LD + 4 * y);
    const float weight[4] = {row.x, row.y, row.z, row.w};
    unsigned mask = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) mask |= all || (4 * y + r >= s->low[i] && 4 * y + r <= s->high[i]) ? 1u << r : 0u;
    if (mask) add_row<DIM>(sum, weight, mask, b + i * ld_of<DIM>);
  }
}

/* Writes the sums' rows that exist, times `factor`. */
template <int DIM>
CUDA_INLINE void store_rows(const struct tensor &m, int64_t row, int have, int64_t col, int dim, const float (&sum)[4][DIM / SIDE],
                            const float (&factor)[4]) {
  const int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int q = 0; q < DIM / LARGE; q++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int c = LARGE * q + 4 * x + e;
        if (4 * y + r < have && c < dim) tensor_set(m, row + 4 * y + r, col + c, sum[r][4 * q + e] * factor[r]);
      }
}

/* exp2(fma(s, kappa, -base)), 0 for s = -inf. */
CUDA_INLINE float weight_of(float s, float kappa, float base) {
  return s == -F32_INFINITY ? 0.0f : f32_exp2(f32_fma(s, kappa, -base));
}

/* ---- forward ---------------------------------------------------------------- */
template <int DIM> constexpr int forward_floats = 2 * LARGE * ld_of<DIM> + LARGE * PAIR_LD;

/* A block: 64 queries of a head. */
template <int DIM> __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ struct problem p) {
  CUDA_DYNAMIC_SHARED(float, memory);
  __shared__ struct sight sight;
  __shared__ float correction[LARGE], inverse[LARGE], top[LARGE];
  float *queries = memory, *rows = queries + LARGE * ld_of<DIM>, *pairs = rows + LARGE * ld_of<DIM>;
  const int t = (int)threadIdx.x, x = t % SIDE, y = t / SIDE;
  const int head = (int)blockIdx.y % p.heads, kv_head = head / p.group;
  const int64_t sample = blockIdx.y / (unsigned)p.heads, row0 = sample * p.seq_len;
  const int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * LARGE; /* the longest first */
  const int have = p.seq_len - query < LARGE ? (int)(p.seq_len - query) : LARGE;
  tile_load<DIM, LARGE>(queries, p.qkv, row0 + query, have, (int64_t)head * p.dim, p.dim);

  float sum[4][DIM / SIDE] = {{0.0f}};
  float m = -F32_INFINITY, l = 0.0f, base = 0.0f; /* of row t / 4, in four threads */
  const int64_t begin = p.starts ? p.starts[row0 + query] / LARGE * LARGE : 0;
  for (int64_t key = begin; key < query + have; key += LARGE) {
    const int keys = p.seq_len - key < LARGE ? (int)(p.seq_len - key) : LARGE;
    __syncthreads(); /* the last tile's sums are done */
    tile_load<DIM, LARGE>(rows, p.qkv, row0 + key, keys, k_col(p, kv_head), p.dim);
    const bool all = sight_of<LARGE, LARGE>(&sight, p, row0, query, key);
    __syncthreads();
    float s[4][4];
    product<DIM>(s, queries, rows);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int i = 4 * y + r, j = x + SIDE * c;
        pairs[i * PAIR_LD + j] = all || (j >= sight.low[i] && j <= sight.high[i]) ? s[r][c] : -F32_INFINITY;
      }
    __syncthreads();
    tile_load<DIM, LARGE>(rows, p.qkv, row0 + key, keys, v_col(p, kv_head), p.dim);
    float *row = pairs + t / 4 * PAIR_LD + t % 4, next = m, part = 0.0f;
    for (int j = 0; j < LARGE; j += 4) next = row[j] > next ? row[j] : next; /* a NaN is never the larger */
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, next, mask);
      next = other > next ? other : next;
    }
    base = next > -F32_INFINITY ? next * p.kappa : 0.0f;
    for (int j = 0; j < LARGE; j += 4) {
      row[j] = weight_of(row[j], p.kappa, base);
      part = part + row[j];
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) part = part + __shfl_xor_sync(0xFFFFFFFFu, part, mask);
    const float factor = weight_of(m, p.kappa, base);
    l = f32_fma(l, factor, part);
    m = next;
    if (t % 4 == 0) correction[t / 4] = factor;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int c = 0; c < DIM / SIDE; c++) sum[r][c] = sum[r][c] * correction[4 * y + r];
    add_keys<DIM, LARGE>(sum, pairs, rows, &sight, all);
  }
  if (t % 4 == 0) {
    inverse[t / 4] = 1.0f / l;
    top[t / 4] = t / 4 < have ? m * p.scale : -F32_INFINITY;
    if (t / 4 < have) p.lse[(sample * p.heads + head) * p.seq_len + query + t / 4] = f32_fma(base, LN_2, f32_log(l));
  }
  __syncthreads();
  const float factor[4] = {inverse[4 * y], inverse[4 * y + 1], inverse[4 * y + 2], inverse[4 * y + 3]};
  store_rows<DIM>(p.out, row0 + query, have, (int64_t)head * p.dim, p.dim, sum, factor);
  if (t != 0 || !p.largest) return;
  float largest = -F32_INFINITY;
  for (int i = 0; i < LARGE; i++) largest = top[i] > largest ? top[i] : largest;
  p.largest[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = largest;
}

/* *to = max(*to, x[0..n)): one block. */
__global__ void __launch_bounds__(THREADS) take_largest(float *to, const float *x, int64_t n) {
  __shared__ float top[THREADS];
  float largest = -F32_INFINITY;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) largest = x[i] > largest ? x[i] : largest;
  top[threadIdx.x] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < THREADS; i++) largest = top[i] > largest ? top[i] : largest;
  if (largest > *to) *to = largest;
}

/* ---- backward --------------------------------------------------------------- */
/* delta[batch, heads, seq_len]: a warp a row of a head. */
__global__ void __launch_bounds__(THREADS) row_deltas(const __grid_constant__ struct problem p, int64_t rows) {
  const int lane = (int)threadIdx.x % 32;
  const int64_t stride = (int64_t)gridDim.x * (THREADS / 32);
  for (int64_t i = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; i < rows * p.heads; i += stride) {
    const int64_t row = i / p.heads, head = i % p.heads;
    float sum = 0.0f;
    for (int d = lane; d < p.dim; d += 32)
      sum = f32_fma(tensor_get(p.d_out, row, head * p.dim + d), tensor_get(p.out, row, head * p.dim + d), sum);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum = sum + __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
    if (lane == 0) p.delta[(row / p.seq_len * p.heads + head) * p.seq_len + row % p.seq_len] = sum;
  }
}

/* lse (in base 2) and D of a tile's queries. */
struct statistics {
  float exponent[LARGE], delta[LARGE];
};

template <int QUERIES>
CUDA_INLINE void statistics_load(struct statistics *s, const struct problem &p, int64_t sample, int head, int64_t query) {
  const int t = (int)threadIdx.x;
  if (t >= QUERIES) return;
  const int64_t i = (sample * p.heads + head) * p.seq_len + query + t;
  s->exponent[t] = query + t < p.seq_len ? p.lse[i] * LOG2_E : 0.0f;
  s->delta[t] = query + t < p.seq_len ? p.delta[i] : 0.0f;
}

/* P (NULL: not wanted) and dS of the pairs of a tile, from S and dP in registers. */
template <int R, int C>
CUDA_INLINE void write_pairs(float *weights, float *gradients, const float (&s)[R][C], const float (&dp)[R][C],
                             const struct statistics *n, float kappa) {
  const int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int c = 0; c < C; c++) {
      const int i = y * R + r, j = x + SIDE * c;
      const float w = f32_exp2(f32_fma(s[r][c], kappa, -n->exponent[i]));
      if (weights) weights[i * PAIR_LD + j] = w;
      gradients[i * PAIR_LD + j] = w * (dp[r][c] - n->delta[i]);
    }
}

template <int DIM> constexpr int backward_floats = 2 * (LARGE + SMALL) * ld_of<DIM>;
template <int DIM> constexpr int keys_floats = backward_floats<DIM> + 2 * SMALL * PAIR_LD;
template <int DIM> constexpr int queries_floats = backward_floats<DIM> + LARGE * PAIR_LD;

/* A block: dK and dV of 64 keys of a kv head. */
template <int DIM> __global__ void __launch_bounds__(THREADS) differentiate_keys(const __grid_constant__ struct problem p) {
  CUDA_DYNAMIC_SHARED(float, memory);
  __shared__ struct sight sight;
  __shared__ struct statistics statistics;
  constexpr int LD = ld_of<DIM>;
  float *k = memory, *v = k + LARGE * LD, *q = v + LARGE * LD, *d_out = q + SMALL * LD;
  float *weights = d_out + SMALL * LD, *gradients = weights + SMALL * PAIR_LD;
  const int kv_head = (int)blockIdx.y % p.kv_heads;
  const int64_t sample = blockIdx.y / (unsigned)p.kv_heads, row0 = sample * p.seq_len, key = (int64_t)blockIdx.x * LARGE;
  const int keys = p.seq_len - key < LARGE ? (int)(p.seq_len - key) : LARGE;
  tile_load<DIM, LARGE>(k, p.qkv, row0 + key, keys, k_col(p, kv_head), p.dim);
  tile_load<DIM, LARGE>(v, p.qkv, row0 + key, keys, v_col(p, kv_head), p.dim);
  float dk[4][DIM / SIDE] = {{0.0f}}, dv[4][DIM / SIDE] = {{0.0f}};
  for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; head++)
    for (int64_t query = key; query < p.seq_len; query += SMALL) {
      if (p.starts && p.starts[row0 + query] >= key + keys) break; /* so do all later ones */
      const int have = p.seq_len - query < SMALL ? (int)(p.seq_len - query) : SMALL;
      __syncthreads(); /* the last tile's sums are done */
      tile_load<DIM, SMALL>(q, p.qkv, row0 + query, have, (int64_t)head * p.dim, p.dim);
      tile_load<DIM, SMALL>(d_out, p.d_out, row0 + query, have, (int64_t)head * p.dim, p.dim);
      statistics_load<SMALL>(&statistics, p, sample, head, query);
      const bool all = sight_of<SMALL, LARGE>(&sight, p, row0, query, key);
      __syncthreads();
      float s[2][4], dp[2][4];
      product<DIM>(s, q, k);
      product<DIM>(dp, d_out, v);
      write_pairs(weights, gradients, s, dp, &statistics, p.kappa);
      __syncthreads();
      add_queries<DIM, SMALL>(dv, weights, d_out, &sight, all);
      add_queries<DIM, SMALL>(dk, gradients, q, &sight, all);
    }
  const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f}, scale[4] = {p.scale, p.scale, p.scale, p.scale};
  store_rows<DIM>(p.d_qkv, row0 + key, keys, k_col(p, kv_head), p.dim, dk, scale);
  store_rows<DIM>(p.d_qkv, row0 + key, keys, v_col(p, kv_head), p.dim, dv, one);
}

/* A block: dQ of 64 queries of a head. */
template <int DIM> __global__ void __launch_bounds__(THREADS) differentiate_queries(const __grid_constant__ struct problem p) {
  CUDA_DYNAMIC_SHARED(float, memory);
  __shared__ struct sight sight;
  __shared__ struct statistics statistics;
  constexpr int LD = ld_of<DIM>;
  float *q = memory, *d_out = q + LARGE * LD, *k = d_out + LARGE * LD, *v = k + SMALL * LD, *gradients = v + SMALL * LD;
  const int head = (int)blockIdx.y % p.heads, kv_head = head / p.group;
  const int64_t sample = blockIdx.y / (unsigned)p.heads, row0 = sample * p.seq_len;
  const int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * LARGE;
  const int have = p.seq_len - query < LARGE ? (int)(p.seq_len - query) : LARGE;
  tile_load<DIM, LARGE>(q, p.qkv, row0 + query, have, (int64_t)head * p.dim, p.dim);
  tile_load<DIM, LARGE>(d_out, p.d_out, row0 + query, have, (int64_t)head * p.dim, p.dim);
  statistics_load<LARGE>(&statistics, p, sample, head, query);
  float dq[4][DIM / SIDE] = {{0.0f}};
  const int64_t begin = p.starts ? p.starts[row0 + query] / SMALL * SMALL : 0;
  for (int64_t key = begin; key < query + have; key += SMALL) {
    const int keys = p.seq_len - key < SMALL ? (int)(p.seq_len - key) : SMALL;
    __syncthreads(); /* the last tile's sums are done */
    tile_load<DIM, SMALL>(k, p.qkv, row0 + key, keys, k_col(p, kv_head), p.dim);
    tile_load<DIM, SMALL>(v, p.qkv, row0 + key, keys, v_col(p, kv_head), p.dim);
    const bool all = sight_of<LARGE, SMALL>(&sight, p, row0, query, key);
    __syncthreads();
    float s[4][2], dp[4][2];
    product<DIM>(s, q, k);
    product<DIM>(dp, d_out, v);
    write_pairs(NULL, gradients, s, dp, &statistics, p.kappa);
    __syncthreads();
    add_keys<DIM, SMALL>(dq, gradients, k, &sight, all);
  }
  const float scale[4] = {p.scale, p.scale, p.scale, p.scale};
  store_rows<DIM>(p.d_qkv, row0 + query, have, (int64_t)head * p.dim, p.dim, dq, scale);
}

/* ---- calls ------------------------------------------------------------------ */
struct tensor tensor_of(const struct matrix *m) { return {m->data, m->dtype == DTYPE_BF16, m->cols}; }

/* f(padded head_dim, as a type). */
template <typename F> void with_dim(int64_t dim, F f) {
  if (dim <= 64) f(std::integral_constant<int, 64>());
  else if (dim <= 128) f(std::integral_constant<int, 128>());
  else f(std::integral_constant<int, 256>());
}

struct problem problem_of(const struct matrix *out, float *lse, const struct matrix *qkv, const struct attention_payload *payload,
                          const int32_t *starts, const struct attention_shape *s) {
  const int64_t tokens = s->batch * s->seq_len;
  CUDA_REQUIRE(!payload || attention_plain(&payload->formats), "attention's formats are not executable");
  CUDA_REQUIRE(s->batch > 0 && s->seq_len > 0 && s->head_dim > 0 && s->n_kv_heads > 0, "attention extents must be positive");
  CUDA_REQUIRE(s->head_dim <= 256, "head_dim is more than 256");
  CUDA_REQUIRE(s->n_heads > 0 && s->n_heads % s->n_kv_heads == 0, "n_heads must be a multiple of n_kv_heads");
  CUDA_REQUIRE(s->batch * s->n_heads <= 65535, "a grid has no room for so many heads");
  CUDA_REQUIRE(qkv->rows == tokens && qkv->cols == (s->n_heads + 2 * s->n_kv_heads) * s->head_dim,
               "qkv must be [tokens, (n_heads + 2 n_kv_heads) * head_dim]");
  CUDA_REQUIRE(out->rows == tokens && out->cols == s->n_heads * s->head_dim,
               "attention output must be [tokens, n_heads * head_dim]");
  struct problem p = {};
  p.qkv = tensor_of(qkv), p.out = tensor_of(out), p.starts = starts, p.lse = lse;
  p.heads = (int)s->n_heads, p.kv_heads = (int)s->n_kv_heads, p.group = p.heads / p.kv_heads, p.dim = (int)s->head_dim;
  p.seq_len = s->seq_len;
  p.scale = 1.0f / f32_sqrt((float)s->head_dim);
  p.kappa = p.scale * LOG2_E;
  return p;
}

int64_t tiles_of(const struct attention_shape *s) { return (s->seq_len + LARGE - 1) / LARGE; }

}  // namespace

int64_t cuda_attention_scratch_bytes(const struct extent *x) {
  const struct attention_shape *s = &x->attention;
  return s->batch * s->n_heads * s->seq_len * (int64_t)sizeof(float); /* D; a largest logit a block is less */
}

void cuda_attention_forward(struct device *device, struct matrix *out, float *lse, float *max_logit,
                            struct quantise_counts *counts, const struct matrix *qkv, const struct attention_payload *payload,
                            const int32_t *starts, const struct attention_shape *s) {
  (void)counts;
  struct cuda_device *d = cuda_of(device);
  struct problem p = problem_of(out, lse, qkv, payload, starts, s);
  const int64_t blocks = s->batch * s->n_heads * tiles_of(s);
  CUDA_REQUIRE(d->scratch_bytes >= blocks * (int64_t)sizeof(float), "scratch is too small for attention");
  if (max_logit) p.largest = (float *)(void *)d->scratch;
  with_dim(s->head_dim, [&](auto dim) {
    constexpr int DIM = decltype(dim)::value;
    CUDA_LAUNCH(d, (attend<DIM>), dim3(cuda_grid(tiles_of(s)), (unsigned)(s->batch * s->n_heads)), THREADS,
                forward_floats<DIM> * sizeof(float), p);
  });
  if (max_logit) CUDA_LAUNCH(d, take_largest, 1, THREADS, 0, max_logit, p.largest, blocks);
}

void cuda_attention_backward(struct device *device, struct matrix *d_qkv, struct quantise_counts *counts,
                             const struct matrix *d_out, const struct attention_gradient *g, const struct matrix *out,
                             const float *lse, const struct matrix *qkv, const struct attention_payload *payload,
                             const int32_t *starts, const struct attention_shape *s) {
  (void)counts;
  struct cuda_device *d = cuda_of(device);
  struct problem p = problem_of(out, (float *)(uintptr_t)lse, qkv, payload, starts, s); /* read alone */
  const int64_t tokens = s->batch * s->seq_len, rows = tokens * s->n_heads;
  CUDA_REQUIRE(g == NULL, "dO has no codes here");
  CUDA_REQUIRE(d_qkv->rows == qkv->rows && d_qkv->cols == qkv->cols && d_out->rows == out->rows && d_out->cols == out->cols,
               "the gradients do not have the shapes of qkv and the output");
  CUDA_REQUIRE(d->scratch_bytes >= rows * (int64_t)sizeof(float), "scratch is too small for attention");
  p.d_out = tensor_of(d_out), p.d_qkv = tensor_of(d_qkv), p.delta = (float *)(void *)d->scratch;
  CUDA_LAUNCH(d, row_deltas, grid_of_tasks((rows + THREADS / 32 - 1) / (THREADS / 32)), THREADS, 0, p, tokens);
  with_dim(s->head_dim, [&](auto dim) {
    constexpr int DIM = decltype(dim)::value;
    CUDA_LAUNCH(d, (differentiate_keys<DIM>), dim3(cuda_grid(tiles_of(s)), (unsigned)(s->batch * s->n_kv_heads)), THREADS,
                keys_floats<DIM> * sizeof(float), p);
    CUDA_LAUNCH(d, (differentiate_queries<DIM>), dim3(cuda_grid(tiles_of(s)), (unsigned)(s->batch * s->n_heads)), THREADS,
                queries_floats<DIM> * sizeof(float), p);
  });
}
