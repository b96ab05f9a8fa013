/* dQ of 128 queries of a head, 64 a warpgroup, over the keys that they see.  Q and dO
 * are kept in registers at head_dim 128, for shared memory's bandwidth: 32 each beside dQ
 * 64, S and dP 32 each, dS in BF16 16.  Not at head_dim 64: there ptxas (12.8, 13.0) gives
 * dS the registers of Q or dO, which the next tile still needs. */
#ifndef FP4D_KERNELS_SM90_ATTENTION_BACKWARD_QUERIES_CUH
#define FP4D_KERNELS_SM90_ATTENTION_BACKWARD_QUERIES_CUH

#include "kernels/sm90/attention_backward.cuh"

namespace {

template <int D> struct queries_shared {
  uint16_t q[CONSUMERS][TILE * D], d_out[CONSUMERS][TILE * D], d_q[CONSUMERS][TILE * D];
  struct {
    uint16_t k[TILE * D], v[TILE * D];
  } stage[STAGES];
  struct statistics statistics[CONSUMERS];
  uint64_t ready, taken;
  struct ring<STAGES> ring;
  int item; /* that q and d_out hold; NO_ITEM: there are no more */
};

struct item {
  int sample, head, query; /* the first of 128 */
  int begin, end;          /* tiles of keys that they see */
};

__device__ int item_count(const arguments &a) { return a.shape.batch * a.shape.heads * a.shape.tiles; }

/* The last queries of every head first, which see most keys. */
__device__ item item_at(const arguments &a, int index) {
  const int heads = a.shape.batch * a.shape.heads, last = a.shape.seq_len - 1;
  item x;
  x.sample = index % heads / a.shape.heads;
  x.head = index % heads % a.shape.heads;
  x.query = (a.shape.tiles - 1 - index / heads) * BLOCK;
  const int32_t *starts = starts_of(a, x.sample);
  x.begin = starts ? uniform(starts[x.query]) / TILE : 0;
  x.end = (x.query + BLOCK - 1 < last ? x.query + BLOCK - 1 : last) / TILE + 1;
  return x;
}

/* By the first warp: lane 0 issues. */
template <int D> __device__ void queries_produce(queries_shared<D> *m, const CUtensorMap *qkv, const CUtensorMap *d_out, const arguments &a) {
  const bool issuer = threadIdx.x == 0;
  const int items = item_count(a);
  int n = 0, index = uniform(issuer ? static_cast<int>(atomicAdd(a.next, 1u)) : 0);
  for (int turn = 0;; turn ^= 1) {
    const int next = issuer && index < items ? static_cast<int>(atomicAdd(a.next, 1u)) : 0; /* known by the time it is needed */
    sm90_barrier_wait(&m->taken, static_cast<uint32_t>(turn ^ 1));
    if (index >= items) {
      if (issuer) {
        m->item = NO_ITEM;
        sm90_barrier_arrive(&m->ready);
      }
      return;
    }
    const item x = item_at(a, index);
    if (issuer) {
      const int k_col = (a.shape.heads + x.head / a.shape.group) * D, v_col = k_col + a.shape.kv_heads * D;
      m->item = index;
      /* the last block may have one tile alone */
      const uint32_t held = x.query / TILE + CONSUMERS <= a.tiles ? sizeof m->statistics : sizeof m->statistics[0];
      sm90_barrier_expect(&m->ready, static_cast<uint32_t>(sizeof m->q + sizeof m->d_out) + held);
      sm90_bulk_load(m->statistics, statistics_of(a, x.sample, x.head) + x.query / TILE, &m->ready, held);
      for (int w = 0; w < CONSUMERS; w++) {
        load_tile<D>(m->q[w], qkv, &m->ready, x.head * D, x.query + w * TILE, x.sample);
        load_tile<D>(m->d_out[w], d_out, &m->ready, x.head * D, x.query + w * TILE, x.sample);
      }
      for (int t = x.begin; t < x.end; t++, n++) {
        const int s = n % STAGES;
        ring_wait_empty(&m->ring, n);
        sm90_barrier_expect(&m->ring.full[s], sizeof m->stage[s]);
        load_tile<D>(m->stage[s].k, qkv, &m->ring.full[s], k_col, t * TILE, x.sample);
        load_tile<D>(m->stage[s].v, qkv, &m->ring.full[s], v_col, t * TILE, x.sample);
      }
    }
    index = uniform(next);
  }
}

/* A tile as operand A of products along its columns. */
template <int D> __device__ __forceinline__ void fragments(uint32_t (&a)[D / 16][4], const uint16_t *tile) {
  const uint32_t thread = opaque(threadIdx.x % 128), row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
  for (uint32_t k = 0; k < D / 16; k++)
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) a[k][i] = *reinterpret_cast<const uint32_t *>(tile + tile_at(row + i % 2 * 8, k * 16 + i / 2 * 8 + column));
  written(a);
}

/* Scores of keys that row i does not see become -inf; it sees the tile's columns low[i]..high[i]. */
__device__ __forceinline__ void mask_queries(float (&scores)[TILE / 2], const int (&low)[2], const int (&high)[2]) {
#pragma unroll
  for (int r = 0; r < TILE / 2; r++) {
    const int column = r / 4 * 8 + r % 2, i = r / 2 % 2;
    if (column < low[i] - own_column() || column > high[i] - own_column()) scores[r] = -F32_INFINITY;
  }
}

template <int D> __device__ void queries_consume(queries_shared<D> *m, const arguments &a, int w) {
  const int last = a.shape.seq_len - 1;
  int n = 0;
  for (uint32_t turn = 0;; turn ^= 1) {
    sm90_barrier_wait(&m->ready, turn);
    const int index = uniform(m->item);
    if (index == NO_ITEM) return;
    const item x = item_at(a, index);
    const int32_t *starts = starts_of(a, x.sample);
    const int query = x.query + w * TILE;
    int begin = x.begin, end = x.begin, whole = 0, row[2], first[2]; /* tiles before `whole`, and the last, are masked */
    if (query <= last) {
      end = query / TILE + 1;
      if (starts) {
        begin = uniform(starts[query]) / TILE;
        whole = (uniform(starts[query + TILE - 1 < last ? query + TILE - 1 : last]) + TILE - 1) / TILE;
      }
    }
    float log_sum[2], centre[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      row[i] = query + own_row() + 8 * i;
      first[i] = starts ? starts[row[i] < last ? row[i] : last] : 0;
      log_sum[i] = m->statistics[w].log_sum[own_row() + 8 * i];
      centre[i] = m->statistics[w].centre[own_row() + 8 * i];
    }
    constexpr bool HELD = D == 128;
    uint32_t q[D / 16][4], g[D / 16][4];
    if constexpr (HELD) {
      fragments<D>(q, m->q[w]);
      fragments<D>(g, m->d_out[w]);
      sm90_warp_arrive(&m->taken);
    }

    float dq[D / 2];
    clear(dq);
    uint32_t ds16[TILE / 16][4]; /* in use until the next tile's S is there */
    const int beyond = n + x.end - x.begin; /* the next item's first tile */
    n = ring_pass(&m->ring, n, n + begin - x.begin);
    for (int t = begin; t < end; t++, n++) {
      const uint16_t *k = m->stage[n % STAGES].k, *v = m->stage[n % STAGES].v;
      float s[TILE / 2], dp[TILE / 2];
      ring_wait_full(&m->ring, n);
      sm90_wgmma_fence();
      if constexpr (HELD) {
        issue_scores<D>(s, q, k);
        issue_scores<D>(dp, g, v);
      } else {
        issue_scores<D>(s, m->q[w], k);
        issue_scores<D>(dp, m->d_out[w], v);
      }
      sm90_wgmma_wait<1>(); /* all but dP */
      sm90_wgmma_registers(s);
      if (t > begin) ring_release(&m->ring, n - 1);
      if (t < whole || t == end - 1) {
        const int low[2] = {first[0] - t * TILE, first[1] - t * TILE}, high[2] = {row[0] - t * TILE, row[1] - t * TILE};
        mask_queries(s, low, high);
      }
#pragma unroll
      for (int r = 0; r < TILE / 2; r++) s[r] = sm90_exp2(f32_fma(s[r], a.shape.kappa, log_sum[r / 2 % 2]));
      sm90_wgmma_wait<0>();
      sm90_wgmma_registers(dp);
#pragma unroll
      for (int r = 0; r < TILE / 2; r += 2) {
        const float c = centre[r / 2 % 2];
        ds16[r / 8][r / 2 % 4] = sm90_bf16_pair(s[r] * (dp[r] - c), s[r + 1] * (dp[r + 1] - c));
      }
      written(ds16);
      sm90_wgmma_fence();
      issue_sum<D>(dq, ds16, k);
    }
    sm90_wgmma_wait<0>();
    sm90_wgmma_registers(dq);
    if (begin < end) ring_release(&m->ring, n - 1);
    if constexpr (!HELD) {
      sm90_warp_arrive(&m->taken);
    }
    n = ring_pass(&m->ring, n, beyond);
    const int64_t stride = static_cast<int64_t>(a.shape.heads + 2 * a.shape.kv_heads) * D;
    store<D>(a.d_qkv + (static_cast<int64_t>(x.sample) * a.shape.seq_len + query) * stride + x.head * D, stride, a.shape.seq_len - query, dq,
             a.shape.scale, angles_of(a, query, D), m->d_q[w]);
  }
}

template <int D>
__global__ void __launch_bounds__(THREADS, 1) queries(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap d_out,
                                                      const __grid_constant__ arguments a) {
  CUDA_DYNAMIC_SHARED(queries_shared<D>, m);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    ring_init(&m->ring, CONSUMER_WARPS);
    sm90_barrier_init(&m->ready, 1);
    sm90_warp_barrier_init(&m->taken, CONSUMER_WARPS);
    sm90_barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    sm90_registers_fewer<24>();
    if (threadIdx.x < 32) queries_produce<D>(m, &qkv, &d_out, a);
  } else {
    sm90_registers_more<240>();
    queries_consume<D>(m, a, warpgroup - 1);
  }
}

}  // namespace

#endif
