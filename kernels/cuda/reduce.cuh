/* The fixed trees of kernels/reduce.h by thread blocks: the same bits.
 *
 * A block of 1024 / V threads takes 1024 elements at once, V consecutive ones a
 * thread: thread t is lanes t V .. t V + V - 1.  The first log2(V) levels of the
 * neighbour tree are in a thread's registers, the next five in a warp (an
 * exchange with lane ^ 1, ^ 2, …: addition commutes, so both get the sum), the
 * rest over the warps' sums in shared memory.
 */
#ifndef FP4D_KERNELS_CUDA_REDUCE_CUH
#define FP4D_KERNELS_CUDA_REDUCE_CUH

#include "kernels/cuda/rows.cuh"
#include "kernels/reduce.h"

/* The neighbour tree over x[0..N), N a power of two, in registers. */
template <int N, typename S> CUDA_INLINE S reduce_registers(const S (&x)[N]) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    S half[N / 2];
#pragma unroll
    for (int j = 0; j < N / 2; j++) half[j] = x[2 * j] + x[2 * j + 1];
    return reduce_registers(half);
  }
}

/* Over x[0..have), 1 <= have <= N: the last of an odd count passes through. */
template <int N> CUDA_INLINE float reduce_some(const float (&x)[N], int have) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    float half[N / 2];
#pragma unroll
    for (int j = 0; j < N / 2; j++) half[j] = 2 * j + 1 < have ? x[2 * j] + x[2 * j + 1] : x[2 * j];
    return reduce_some(half, (have + 1) / 2);
  }
}

template <typename S> CUDA_INLINE S reduce_warp(S x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x = x + __shfl_xor_sync(0xFFFFFFFFu, x, mask);
  return x;
}

/* The tree over a block's 1024 lanes; every thread gets the sum.  `shared`: one
 * value a warp; a block's calls that follow each other use different memory
 * (two in turn do: a barrier lies between). */
template <int V, typename S> CUDA_INLINE S reduce_lanes(const S (&lane)[V], S *shared) {
  constexpr int WARPS = REDUCE_LANES / V / 32;
  S x = reduce_warp(reduce_registers(lane));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  S warp[WARPS];
#pragma unroll
  for (int w = 0; w < WARPS; w++) warp[w] = shared[w];
  return reduce_registers(warp);
}

/* ---- long sums -------------------------------------------------------------- */
/* Of several arrays at once, so that small ones fill a GPU: chunks of REDUCE_CHUNK
 * elements, a block each, leave their parts; then a block an array adds its parts
 * ascending.  As on the CPU in waves, so that scratch has a fixed size: of an array
 * longer than a wave the sum stands in parts[LONGSUM_WAVE] between them. */
struct longsum_part {
  double sum[2];
  long long count;
  unsigned largest; /* bits of a float without sign */
};

constexpr int LONGSUM_VECTOR = 8; /* elements a thread takes at once */
constexpr int LONGSUM_THREADS = REDUCE_LANES / LONGSUM_VECTOR;
constexpr int LONGSUM_LIST = 64; /* arrays of a wave at most */
#ifdef FP4D_CUDA_MODEL
constexpr int LONGSUM_WAVE = 4; /* tests have several */
#else
constexpr int LONGSUM_WAVE = 65536;
#endif
constexpr int LONGSUM_SCRATCH_BYTES = (LONGSUM_WAVE + 1) * (int)sizeof(struct longsum_part);

/* Which chunks a wave's blocks take.  One that begins inside an array or does not reach its end has this array alone. */
struct longsum_wave {
  int array, count;            /* the arrays: array .. array + count - 1 of the list */
  int begin[LONGSUM_LIST + 1]; /* parts of the wave's i-th array: begin[i] .. begin[i + 1] - 1 */
  int64_t chunk;               /* the first array's first chunk here; the others' is 0 */
  bool first, last;            /* the first array begins, the last one ends here */
};

/* The block's array within the wave, and the first element of its chunk. */
CUDA_INLINE int longsum_place(const struct longsum_wave &w, int64_t &element) {
  int i = 0; /* the last array that begins at this block or before */
  for (int end = w.count; end - i > 1;) {
    const int middle = (i + end) / 2;
    if (w.begin[middle] <= static_cast<int>(blockIdx.x)) i = middle;
    else end = middle;
  }
  element = ((i == 0 ? w.chunk : 0) + static_cast<int>(blockIdx.x) - w.begin[i]) * REDUCE_CHUNK;
  return i;
}

/* add(i, total) when the wave's i-th array is in.  Four threads, of a warp each, add one figure
 * each: a chain of additions in registers, of parts that stand in shared memory. */
template <typename ADD>
static __global__ void longsum_total(struct longsum_part *parts, const __grid_constant__ struct longsum_wave w, const __grid_constant__ ADD add) {
  __shared__ struct longsum_part piece[LONGSUM_THREADS];
  __shared__ struct longsum_part total;
  const int t = static_cast<int>(threadIdx.x), figure = t % 32 == 0 ? t / 32 : -1, array = static_cast<int>(blockIdx.x);
  struct longsum_part own = {};
  if (!w.first && figure >= 0) own = parts[LONGSUM_WAVE];
  for (int from = w.begin[array]; from < w.begin[array + 1]; from += LONGSUM_THREADS) {
    const int have = w.begin[array + 1] - from < LONGSUM_THREADS ? w.begin[array + 1] - from : LONGSUM_THREADS;
    if (t < have) piece[t] = parts[from + t];
    __syncthreads();
    if (figure == 0)
#pragma unroll 8
      for (int i = 0; i < have; i++) own.sum[0] = own.sum[0] + piece[i].sum[0];
    if (figure == 1)
#pragma unroll 8
      for (int i = 0; i < have; i++) own.sum[1] = own.sum[1] + piece[i].sum[1];
    if (figure == 2)
      for (int i = 0; i < have; i++) own.count += piece[i].count;
    if (figure == 3)
      for (int i = 0; i < have; i++) own.largest = piece[i].largest > own.largest ? piece[i].largest : own.largest;
    __syncthreads();
  }
  if (figure == 0) total.sum[0] = own.sum[0];
  if (figure == 1) total.sum[1] = own.sum[1];
  if (figure == 2) total.count = own.count;
  if (figure == 3) total.largest = own.largest;
  __syncthreads();
  if (t != 0) return;
  if (w.last) add(array, total);
  else parts[LONGSUM_WAVE] = total;
}

/* wave(w, parts) for each wave of `count` arrays of n[i] >= 0 elements. */
template <typename WAVE> static inline void longsum_waves(struct cuda_device *d, const int64_t *n, int count, WAVE wave) {
  CUDA_REQUIRE(d->scratch_bytes >= LONGSUM_SCRATCH_BYTES, "scratch is too small");
  struct longsum_part *parts = (struct longsum_part *)(void *)d->scratch;
  struct longsum_wave w = {};
  for (int i = 0; i < count; i++) {
    const int64_t chunks = (n[i] + REDUCE_CHUNK - 1) / REDUCE_CHUNK;
    if (w.count > 0 && (w.count == LONGSUM_LIST || w.begin[w.count] + chunks > LONGSUM_WAVE)) {
      wave(w, parts);
      w.count = 0;
    }
    if (w.count == 0) w = {i, 0, {0}, 0, true, true};
    for (; chunks - w.chunk > LONGSUM_WAVE; w.chunk += LONGSUM_WAVE, w.first = false) { /* longer than a wave, so alone */
      struct longsum_wave piece = w;
      piece.count = 1, piece.begin[1] = LONGSUM_WAVE, piece.last = false;
      wave(piece, parts);
    }
    w.begin[w.count + 1] = w.begin[w.count] + static_cast<int>(chunks - w.chunk);
    w.count++;
    if (!w.first) { /* the rest of a long one */
      wave(w, parts);
      w.count = 0;
    }
  }
  if (w.count > 0) wave(w, parts);
}

/* launch(w, parts) for each wave, then add_of(w), which adds the totals on the device. */
template <typename LAUNCH, typename ADD_OF>
static inline void longsum(struct cuda_device *d, const int64_t *n, int count, LAUNCH launch, ADD_OF add_of) {
  longsum_waves(d, n, count, [&](const struct longsum_wave &w, struct longsum_part *parts) {
    auto add = add_of(w);
    if (w.begin[w.count] > 0) launch(w, parts);
    CUDA_LAUNCH(d, (longsum_total<decltype(add)>), static_cast<unsigned>(w.count), LONGSUM_THREADS, 0, parts, w, add);
  });
}

#endif
