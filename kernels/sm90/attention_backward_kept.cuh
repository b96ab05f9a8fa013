/* dQ of 256 queries of a head, 64 a warpgroup: the product of dS, which `keys` has
 * kept, and the keys that they see.  It waits for memory: 8 KB of dS for 1 MFLOP. */
#ifndef FP4D_KERNELS_SM90_ATTENTION_BACKWARD_KEPT_CUH
#define FP4D_KERNELS_SM90_ATTENTION_BACKWARD_KEPT_CUH

#include "kernels/sm90/attention_backward.cuh"

namespace {

enum { KEPT_CONSUMERS = 4, KEPT_THREADS = 128 * (1 + KEPT_CONSUMERS), KEPT_STAGES = 3 };

template <int D> struct kept_shared {
  struct {
    uint16_t k[TILE * D], d_scores[KEPT_CONSUMERS][SCORES];
  } stage[KEPT_STAGES];
  uint16_t d_q[KEPT_CONSUMERS][TILE * D];
  struct ring<KEPT_STAGES> ring;
};

/* A block of queries, and the tiles of keys that each warpgroup's 64 see, which the first one's begin and the last one's end. */
struct kept_item {
  int head, tile;                                      /* counted over the pass; first tile of queries */
  int begin[KEPT_CONSUMERS], end[KEPT_CONSUMERS], last; /* last: end of all */
};

__device__ kept_item kept_item_at(const arguments &a, int index) {
  const int heads = a.units * a.shape.group, blocks = (a.tiles + KEPT_CONSUMERS - 1) / KEPT_CONSUMERS;
  kept_item x;
  x.head = index % heads;
  x.tile = (blocks - 1 - index / heads) * KEPT_CONSUMERS;
  x.last = 0;
  const int32_t *starts = starts_of(a, (a.unit + x.head / a.shape.group) / a.shape.kv_heads);
#pragma unroll
  for (int w = 0; w < KEPT_CONSUMERS; w++) {
    const int tile = x.tile + w;
    x.begin[w] = tile < a.tiles && starts ? uniform(starts[tile * TILE]) / TILE : 0;
    x.end[w] = tile < a.tiles ? tile + 1 : 0;
    if (x.end[w] > 0) x.last = x.end[w];
  }
  return x;
}

/* The block of this thread block's n-th turn: the last queries of every head first, which see most
 * keys, to thread blocks forth and back, so that all have as much to do.  May be none. */
__device__ __forceinline__ int kept_index(int turn) {
  const int grid = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
  return turn * grid + (turn % 2 ? grid - 1 - own : own);
}
__device__ __forceinline__ int kept_items(const arguments &a) {
  return a.units * a.shape.group * ((a.tiles + KEPT_CONSUMERS - 1) / KEPT_CONSUMERS);
}

/* By the first warp: lane 0 issues. */
template <int D> __device__ void kept_produce(kept_shared<D> *m, const CUtensorMap *qkv, const arguments &a) {
  int n = 0;
  for (int turn = 0, index; (index = kept_index(turn)) < kept_items(a); turn++) {
    const kept_item x = kept_item_at(a, index);
    if (threadIdx.x != 0) continue;
    const int unit = a.unit + x.head / a.shape.group, sample = unit / a.shape.kv_heads;
    const int k_col = (a.shape.heads + unit % a.shape.kv_heads) * D;
    for (int t = x.begin[0]; t < x.last; t++, n++) {
      auto &stage = m->stage[n % KEPT_STAGES];
      uint64_t *full = &m->ring.full[n % KEPT_STAGES];
      ring_wait_empty(&m->ring, n);
      uint32_t bytes = sizeof stage.k;
#pragma unroll
      for (int w = 0; w < KEPT_CONSUMERS; w++)
        if (t >= x.begin[w] && t < x.end[w]) bytes += sizeof stage.d_scores[w];
      sm90_barrier_expect(full, bytes);
      load_tile<D>(stage.k, qkv, full, k_col, t * TILE, sample);
#pragma unroll
      for (int w = 0; w < KEPT_CONSUMERS; w++)
        if (t >= x.begin[w] && t < x.end[w])
          sm90_bulk_load(stage.d_scores[w], d_scores_of(a, x.head, x.tile + w, t), full, sizeof stage.d_scores[w]);
    }
  }
}

/* What a warp of 16 queries multiplies: the registers of dS^T (d_scores_of) transposed. */
__device__ __forceinline__ void kept_operand(uint32_t (&ds16)[TILE / 16][4], const uint16_t *tile) {
  const uint4 *from = reinterpret_cast<const uint4 *>(tile) + threadIdx.x % 128 / 32 * 128 + threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < TILE / 16; k++) {
    const uint4 x = from[k * 32];
    ds16[k][0] = sm90_transpose_8x8(x.x);
    ds16[k][1] = sm90_transpose_8x8(x.z);
    ds16[k][2] = sm90_transpose_8x8(x.y);
    ds16[k][3] = sm90_transpose_8x8(x.w);
  }
  written(ds16);
}

template <int D> __device__ void kept_consume(kept_shared<D> *m, const arguments &a, int w) {
  const int64_t stride = static_cast<int64_t>(a.shape.heads + 2 * a.shape.kv_heads) * D;
  int n = 0;
  for (int turn = 0, index; (index = kept_index(turn)) < kept_items(a); turn++) {
    const kept_item x = kept_item_at(a, index);
    int begin = 0, end = 0;
#pragma unroll
    for (int i = 0; i < KEPT_CONSUMERS; i++)
      if (i == w) begin = x.begin[i], end = x.end[i];
    const int first = n, beyond = n + x.last - x.begin[0]; /* beyond: the next block's first tile */
    if (begin < end) {
      float dq[D / 2];
      clear(dq);
      n = ring_pass(&m->ring, n, first + begin - x.begin[0]);
      for (int t = begin; t < end; t++, n++) {
        uint32_t ds16[TILE / 16][4];
        ring_wait_full(&m->ring, n);
        kept_operand(ds16, m->stage[n % KEPT_STAGES].d_scores[w]);
        sm90_wgmma_fence();
        issue_sum<D>(dq, ds16, m->stage[n % KEPT_STAGES].k);
        sm90_wgmma_wait<0>();
        sm90_wgmma_registers(dq);
        ring_release(&m->ring, n);
      }
      const int query = (x.tile + w) * TILE, head = a.unit * a.shape.group + x.head; /* of all samples */
      uint16_t *to = a.d_qkv + (static_cast<int64_t>(head / a.shape.heads) * a.shape.seq_len + query) * stride + head % a.shape.heads * D;
      store<D>(to, stride, a.shape.seq_len - query, dq, a.shape.scale, angles_of(a, query, D), m->d_q[w]);
    }
    n = ring_pass(&m->ring, n, beyond);
  }
}

template <int D>
__global__ void __launch_bounds__(KEPT_THREADS, 1) kept(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ arguments a) {
  CUDA_DYNAMIC_SHARED(kept_shared<D>, m);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    ring_init(&m->ring, 4 * KEPT_CONSUMERS);
    sm90_barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    sm90_registers_fewer<24>();
    if (threadIdx.x < 32) kept_produce<D>(m, &qkv, a);
  } else {
    sm90_registers_more<112>();
    kept_consume<D>(m, a, warpgroup - 1);
  }
}

}  // namespace

#endif
