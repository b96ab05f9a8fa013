/* What the kernels of attention's backward share (attention_backward.cu): the ring of
 * tiles, products of tiles, where dS stands, and how a gradient is written. */
#ifndef FP4D_KERNELS_SM90_ATTENTION_BACKWARD_CUH
#define FP4D_KERNELS_SM90_ATTENTION_BACKWARD_CUH

#include "kernels/sm90/attention.h"

namespace {

enum {
  TILE = 64,                  /* queries or keys of a tile: rows of a product */
  CHUNK = TILE * 64,          /* elements of its 64 columns that the swizzle keeps together */
  BLOCK = SM90_ATTENTION_TILE,
  CONSUMERS = BLOCK / TILE,   /* warpgroups that compute */
  THREADS = 128 * (1 + CONSUMERS),
  STAGES = 4,
  CONSUMER_WARPS = 4 * CONSUMERS,
  SCORES = TILE * TILE,       /* elements of dS of a pair of tiles */
  NO_ITEM = -1
};

/* Of the queries of a tile; behind the sample's end -inf, which makes P zero, and 0. */
struct statistics {
  float log_sum[TILE]; /* -lse * log2(e) */
  float centre[TILE];  /* D */
};

struct arguments {
  struct sm90_attention_shape shape;
  int tiles;                            /* of 64 positions in a sample */
  const int32_t *starts;                /* may be NULL */
  const struct statistics *statistics;  /* [batch * heads][tiles] */
  uint16_t *d_qkv;
  const float *cos_sin;                 /* [seq_len][head_dim / 2][2]; NULL: gradients of rotated Q and K */
  uint16_t *d_scores;                   /* dS of the units of this pass; NULL: not kept */
  int unit, units;                      /* of this pass: first kv head, counted over samples, and how many */
  unsigned *next;                       /* block of queries to be taken */
};

__device__ __forceinline__ const int32_t *starts_of(const arguments &a, int sample) {
  return a.starts ? a.starts + static_cast<int64_t>(sample) * a.shape.seq_len : nullptr;
}

__device__ __forceinline__ const struct statistics *statistics_of(const arguments &a, int sample, int head) {
  return a.statistics + (static_cast<int64_t>(sample) * a.shape.heads + head) * a.tiles;
}

/* Pairs of tiles of a head: (t, k) is its t (t + 1) / 2 + k-th. */
__host__ __device__ __forceinline__ int64_t pairs_before(int64_t t) { return t * (t + 1) / 2; }

/* dS of the pair (t, k) of a head, counted over the pass, in BF16 as its warps hold it: warp w of
 * the 64 keys has [h][w][lane] as the four registers a[0..3] of dS^T's columns 16 h.. (kernels/sm90/ptx.h). */
__device__ __forceinline__ uint16_t *d_scores_of(const arguments &a, int head, int t, int k) {
  return a.d_scores + (head * pairs_before(a.tiles) + pairs_before(t) + k) * SCORES;
}

__device__ __forceinline__ const float *angles_of(const arguments &a, int position, int head_dim) {
  return a.cos_sin ? a.cos_sin + static_cast<int64_t>(position) * head_dim : nullptr;
}

/* In a register that the compiler knows to be the same in all lanes. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

/* Where a thread's accumulators stand (kernels/sm90/ptx.h): element 4 j + 2 i + e in
 * row own_row() + 8 i, column own_column() + 8 j + e. */
__device__ __forceinline__ int own_row() { return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4; }
__device__ __forceinline__ int own_column() { return static_cast<int>(threadIdx.x) % 4 * 2; }
/* x, of which the compiler knows nothing: addresses made of it are not kept in registers through a loop. */
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  uint32_t value[1] = {x};
  sm90_wgmma_registers(value);
  return value[0];
}
/* Where column `column` of row `row` stands in a tile. */
__device__ __forceinline__ uint32_t tile_at(uint32_t row, uint32_t column) { return column / 64 * CHUNK + sm90_swizzled(row, column % 64); }

/* ---- the ring: the n-th tile that a producer copies is in stage n % N -------------- */
template <int N> struct ring {
  uint64_t full[N], empty[N];
};

template <int N> __device__ void ring_init(struct ring<N> *r, uint32_t warps) {
  for (int i = 0; i < N; i++) {
    sm90_barrier_init(&r->full[i], 1);
    sm90_warp_barrier_init(&r->empty[i], warps);
  }
}
template <int N> __device__ __forceinline__ void ring_wait_full(struct ring<N> *r, int n) {
  sm90_barrier_wait(&r->full[n % N], static_cast<uint32_t>(n / N) % 2);
}
template <int N> __device__ __forceinline__ void ring_wait_empty(struct ring<N> *r, int n) {
  sm90_barrier_wait(&r->empty[n % N], static_cast<uint32_t>(n / N + 1) % 2);
}
/* This warp is done with tile n. */
template <int N> __device__ __forceinline__ void ring_release(struct ring<N> *r, int n) { sm90_warp_arrive(&r->empty[n % N]); }
/* Tiles n..end-1 are for other warpgroups alone. */
template <int N> __device__ __forceinline__ int ring_pass(struct ring<N> *r, int n, int end) {
  for (; n < end; n++) {
    ring_wait_full(r, n);
    ring_release(r, n);
  }
  return n;
}

template <int D>
__device__ __forceinline__ void load_tile(uint16_t *to, const CUtensorMap *map, uint64_t *full, int col, int position, int sample) {
#pragma unroll
  for (int c = 0; c < D / 64; c++) sm90_tma_load_3d(to + c * CHUNK, map, full, col + c * 64, position, sample);
}

/* ---- products; issued, not waited for --------------------------------------------- */
__device__ __forceinline__ uint64_t along_columns(const uint16_t *tile) { return sm90_descriptor(tile, 16, 1024); }
__device__ __forceinline__ uint64_t along_rows(const uint16_t *tile) { return sm90_descriptor(tile, CHUNK * 2, 1024); }
/* The k-th 16 columns. */
__device__ __forceinline__ uint64_t columns_at(uint64_t tile, int k) {
  return sm90_descriptor_advance(tile, static_cast<uint32_t>(k / 4 * CHUNK * 2 + k % 4 * 32));
}

/* scores[64][64] = A B^T of two tiles. */
template <int D> __device__ __forceinline__ void issue_scores(float (&scores)[TILE / 2], const uint16_t *a, const uint16_t *b) {
  const uint64_t at = along_columns(a), bt = along_columns(b);
#pragma unroll
  for (int k = 0; k < D / 16; k++) sm90_wgmma_ss<TILE, false, false>(scores, columns_at(at, k), columns_at(bt, k), k > 0);
  sm90_wgmma_commit();
}
template <int D> __device__ __forceinline__ void issue_scores(float (&scores)[TILE / 2], const uint32_t (&a)[D / 16][4], const uint16_t *b) {
  const uint64_t bt = along_columns(b);
#pragma unroll
  for (int k = 0; k < D / 16; k++) sm90_wgmma_rs<TILE, false>(scores, a[k], columns_at(bt, k), k > 0);
  sm90_wgmma_commit();
}
/* sum[64][D] += A B of A [64][64] and a tile. */
template <int D> __device__ __forceinline__ void issue_sum(float (&sum)[D / 2], const uint32_t (&a)[TILE / 16][4], const uint16_t *b) {
  const uint64_t bt = along_rows(b);
#pragma unroll
  for (int k = 0; k < TILE / 16; k++) sm90_wgmma_rs<D, true>(sum, a[k], sm90_descriptor_advance(bt, static_cast<uint32_t>(k) * 16 * 128), true);
  sm90_wgmma_commit();
}

template <int R> __device__ __forceinline__ void clear(float (&sum)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) sum[i] = 0.0f;
  sm90_wgmma_registers(sum);
}
template <int K> __device__ __forceinline__ void written(uint32_t (&a)[K][4]) {
#pragma unroll
  for (int k = 0; k < K; k++) sm90_wgmma_registers(a[k]);
}

/* A warpgroup's 64 rows of a gradient, `rows` of them inside the sample, by way of
 * a tile of shared memory that nobody else reads.  Angles of the first row, or NULL:
 * rotated back by them (kernels/kernels.h, rope_backward). */
template <int D>
__device__ __forceinline__ void store(uint16_t *to, int64_t stride, int rows, const float (&sum)[D / 2], float factor, const float *angles,
                                      uint16_t *tile) {
  const uint32_t thread = opaque(threadIdx.x % 128), first = thread / 32 * 16, lane = thread % 32;
#pragma unroll
  for (uint32_t i = 0; i < D / 4; i++) {
    const uint32_t row = first + i % 2 * 8 + lane / 4, column = i / 2 * 8 + lane % 4 * 2;
    float x = sum[2 * i] * factor, y = sum[2 * i + 1] * factor;
    if (angles && static_cast<int>(row) < rows) {
      const float2 t = __ldg(reinterpret_cast<const float2 *>(angles + row * D + column));
      const float turned = f32_fma(x, t.x, y * t.y);
      y = f32_fma(y, t.x, -(x * t.y));
      x = turned;
    }
    *reinterpret_cast<uint32_t *>(tile + tile_at(row, column)) = sm90_bf16_pair(x, y);
  }
  __syncwarp(); /* a warp reads the 16 rows that it wrote */
  constexpr uint32_t LANES = D / 8;
#pragma unroll
  for (uint32_t r = 0; r < 16; r += 32 / LANES) {
    const uint32_t row = first + r + lane / LANES, column = lane % LANES * 8;
    if (static_cast<int>(row) < rows)
      *reinterpret_cast<uint4 *>(to + row * stride + column) = *reinterpret_cast<const uint4 *>(tile + tile_at(row, column));
  }
  __syncwarp();
}

}  // namespace

#endif
