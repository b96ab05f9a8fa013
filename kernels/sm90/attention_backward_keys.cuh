/* dK and dV of 128 keys of a kv head, 64 a warpgroup, over the queries of its heads.
 * Scores are transposed, rows are keys: P^T and dS^T are operands A as they lie.
 *
 * Registers of a consumer: dK and dV 64 each (head_dim 128), S and dP 32 each, P and
 * dS in BF16 16 each, which is all but 16 of its 240: dP of a tile begins when dS of
 * the one before has been read. */
#ifndef FP4D_KERNELS_SM90_ATTENTION_BACKWARD_KEYS_CUH
#define FP4D_KERNELS_SM90_ATTENTION_BACKWARD_KEYS_CUH

#include "kernels/sm90/attention_backward.cuh"

namespace {

template <int D> struct keys_shared {
  uint16_t k[CONSUMERS][TILE * D], v[CONSUMERS][TILE * D];
  struct {
    uint16_t q[TILE * D], d_out[TILE * D];
  } stage[STAGES];
  struct statistics statistics[STAGES];
  uint64_t ready;
  struct ring<STAGES> ring;
};

/* How many queries of a sample may see `key`: their starts, which ascend, are at most that.  By a whole warp. */
__device__ int queries_until(const int32_t *starts, int n, int key) {
  int low = 0, high = n; /* queries before low may, from high on they may not */
  while (low < high) {
    const int step = (high - low + 31) / 32, at = low + static_cast<int>(threadIdx.x) % 32 * step;
    const int may = __popc(__ballot_sync(0xFFFFFFFFu, at < high && starts[at] <= key));
    if (may == 0) break;
    high = low + may * step < high ? low + may * step : high;
    low = low + (may - 1) * step + 1;
  }
  return uniform(low);
}

/* Tiles of queries in which some see some of the keys first..last. */
struct span {
  int begin, end;
};
__device__ span queries_of(const arguments &a, const int32_t *starts, int first, int last) {
  const int begin = first / TILE, end = starts ? (queries_until(starts, a.shape.seq_len, last) + TILE - 1) / TILE : a.tiles;
  return span{begin < end ? begin : end, end};
}

template <int D>
__device__ void keys_produce(keys_shared<D> *m, const CUtensorMap *qkv, const CUtensorMap *d_out, const arguments &a, int sample, int kv_head,
                             int key, span queries) {
  const int k_col = (a.shape.heads + kv_head) * D, v_col = k_col + a.shape.kv_heads * D;
  sm90_barrier_expect(&m->ready, sizeof m->k + sizeof m->v);
  for (int w = 0; w < CONSUMERS; w++) {
    load_tile<D>(m->k[w], qkv, &m->ready, k_col, key + w * TILE, sample);
    load_tile<D>(m->v[w], qkv, &m->ready, v_col, key + w * TILE, sample);
  }
  int n = 0;
  for (int head = kv_head * a.shape.group; head < (kv_head + 1) * a.shape.group; head++)
    for (int t = queries.begin; t < queries.end; t++, n++) {
      const int s = n % STAGES;
      uint64_t *full = &m->ring.full[s];
      ring_wait_empty(&m->ring, n);
      sm90_barrier_expect(full, sizeof m->stage[s] + sizeof m->statistics[s]);
      load_tile<D>(m->stage[s].q, qkv, full, head * D, t * TILE, sample);
      load_tile<D>(m->stage[s].d_out, d_out, full, head * D, t * TILE, sample);
      sm90_bulk_load(&m->statistics[s], statistics_of(a, sample, head) + t, full, sizeof m->statistics[s]);
    }
}

/* Scores of pairs that do not see each other become -inf: rows are keys from `key`, columns queries from `query`. */
__device__ __forceinline__ void mask_keys(float (&scores)[TILE / 2], int key, int query, const int32_t *starts, int seq_len) {
#pragma unroll
  for (int c = 0; c < TILE / 4; c++) {
    const int q = query + own_column() + c / 2 * 8 + c % 2;
    const int first = starts ? __ldg(starts + (q < seq_len ? q : seq_len - 1)) : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int k = key + own_row() + 8 * i;
      if (k > q || k < first) scores[c / 2 * 4 + i * 2 + c % 2] = -F32_INFINITY;
    }
  }
}

/* Where this thread's part of dS stands (d_scores_of), which goes out while nobody waits for it. */
__device__ __forceinline__ void keep_scores(uint16_t *tile, const uint32_t (&ds16)[TILE / 16][4]) {
  uint4 *to = reinterpret_cast<uint4 *>(tile) + threadIdx.x % 128;
#pragma unroll
  for (int h = 0; h < TILE / 16; h++) __stcs(to + h * 128, uint4{ds16[h][0], ds16[h][1], ds16[h][2], ds16[h][3]});
}

template <int D>
__device__ void keys_consume(keys_shared<D> *m, const arguments &a, int w, int sample, int kv_head, int unit, int block_key, span block) {
  const int32_t *starts = starts_of(a, sample);
  const int key = block_key + w * TILE;
  const span own = queries_of(a, starts, key, key + TILE - 1);
  int whole = a.tiles; /* tiles before this one have queries that see all of the keys, but for the diagonal's */
  if (starts) {
    const int all = queries_until(starts, a.shape.seq_len, key);
    if (all < a.shape.seq_len) whole = all / TILE;
  }
  float dk[D / 2], dv[D / 2];
  clear(dk);
  clear(dv);
  uint32_t p16[TILE / 16][4], ds16[TILE / 16][4]; /* in use until the next tile's S is there */
  sm90_barrier_wait(&m->ready, 0);
  int n = 0;
  for (int head = 0; head < a.shape.group; head++) {
    n = ring_pass(&m->ring, n, n + own.begin - block.begin);
    uint16_t *d_scores = d_scores_of(a, unit * a.shape.group + head, own.begin, key / TILE);
    for (int t = own.begin; t < own.end; t++, n++) {
      const uint16_t *q = m->stage[n % STAGES].q, *d_out = m->stage[n % STAGES].d_out;
      const struct statistics *statistics = &m->statistics[n % STAGES];
      float s[TILE / 2], dp[TILE / 2];
      ring_wait_full(&m->ring, n);
      sm90_wgmma_fence();
      issue_scores<D>(s, m->k[w], q);
      sm90_wgmma_wait<1>(); /* the last tile's dV and dK: registers of their P and dS become dP's */
      if (t > own.begin) ring_release(&m->ring, n - 1);
      sm90_wgmma_fence();
      issue_scores<D>(dp, m->v[w], d_out);
      sm90_wgmma_wait<1>(); /* S */
      sm90_wgmma_registers(s);
      if (t == own.begin || t >= whole) mask_keys(s, key, t * TILE, starts, a.shape.seq_len);
#pragma unroll
      for (int j = 0; j < TILE / 8; j++) {
        const float2 l = *reinterpret_cast<const float2 *>(statistics->log_sum + own_column() + 8 * j);
#pragma unroll
        for (int i = 0; i < 4; i++) s[4 * j + i] = sm90_exp2(f32_fma(s[4 * j + i], a.shape.kappa, i % 2 ? l.y : l.x));
        p16[j / 2][j % 2 * 2] = sm90_bf16_pair(s[4 * j], s[4 * j + 1]);
        p16[j / 2][j % 2 * 2 + 1] = sm90_bf16_pair(s[4 * j + 2], s[4 * j + 3]);
      }
      written(p16);
      sm90_wgmma_fence();
      issue_sum<D>(dv, p16, d_out);
      sm90_wgmma_wait<1>(); /* dP */
      sm90_wgmma_registers(dp);
#pragma unroll
      for (int j = 0; j < TILE / 8; j++) {
        const float2 c = *reinterpret_cast<const float2 *>(statistics->centre + own_column() + 8 * j);
#pragma unroll
        for (int i = 0; i < 4; i++) dp[4 * j + i] = s[4 * j + i] * (dp[4 * j + i] - (i % 2 ? c.y : c.x));
        ds16[j / 2][j % 2 * 2] = sm90_bf16_pair(dp[4 * j], dp[4 * j + 1]);
        ds16[j / 2][j % 2 * 2 + 1] = sm90_bf16_pair(dp[4 * j + 2], dp[4 * j + 3]);
      }
      if (a.d_scores) {
        keep_scores(d_scores, ds16);
        d_scores += (t + 1) * SCORES;
      }
      written(ds16);
      sm90_wgmma_fence();
      issue_sum<D>(dk, ds16, q);
    }
    sm90_wgmma_wait<0>();
    sm90_wgmma_registers(dk);
    sm90_wgmma_registers(dv);
    if (own.begin < own.end) ring_release(&m->ring, n - 1);
    n = ring_pass(&m->ring, n, n + block.end - own.end);
  }
  /* K and V are read no more once the four warps are here */
  if (w == 0) sm90_named_barrier_sync(1, 128);
  else sm90_named_barrier_sync(2, 128);
  const int64_t stride = static_cast<int64_t>(a.shape.heads + 2 * a.shape.kv_heads) * D;
  uint16_t *to = a.d_qkv + (static_cast<int64_t>(sample) * a.shape.seq_len + key) * stride + (a.shape.heads + kv_head) * D;
  store<D>(to, stride, a.shape.seq_len - key, dk, a.shape.scale, angles_of(a, key, D), m->k[w]);
  store<D>(to + a.shape.kv_heads * D, stride, a.shape.seq_len - key, dv, 1.0f, nullptr, m->v[w]);
}

/* Grid: kv heads of the pass, blocks of keys: the first keys, which most queries see, start first. */
template <int D>
__global__ void __launch_bounds__(THREADS, 1) keys(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap d_out,
                                                   const __grid_constant__ arguments a) {
  CUDA_DYNAMIC_SHARED(keys_shared<D>, m);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128), unit = static_cast<int>(blockIdx.x);
  const int sample = (a.unit + unit) / a.shape.kv_heads, kv_head = (a.unit + unit) % a.shape.kv_heads, key = static_cast<int>(blockIdx.y) * BLOCK;
  if (threadIdx.x == 0) {
    ring_init(&m->ring, CONSUMER_WARPS);
    sm90_barrier_init(&m->ready, 1);
    sm90_barrier_init_fence();
  }
  const span block = queries_of(a, starts_of(a, sample), key, key + BLOCK - 1);
  __syncthreads();
  if (warpgroup == 0) {
    sm90_registers_fewer<24>();
    if (threadIdx.x == 0) keys_produce<D>(m, &qkv, &d_out, a, sample, kv_head, key, block);
  } else {
    sm90_registers_more<240>();
    keys_consume<D>(m, a, warpgroup - 1, sample, kv_head, unit, key, block);
  }
}

}  // namespace

#endif
