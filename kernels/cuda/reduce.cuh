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
/* Chunks of REDUCE_CHUNK elements, a block each, leave their parts; one block
 * adds the parts ascending.  As on the CPU in waves, so that scratch has a fixed
 * size: between them the sum stands in parts[LONGSUM_WAVE]. */
struct longsum_part {
  double sum[2];
  long long count;
  unsigned largest; /* bits of a float without sign */
};

constexpr int LONGSUM_VECTOR = 4; /* elements a thread takes at once */
constexpr int LONGSUM_THREADS = REDUCE_LANES / LONGSUM_VECTOR;
#ifdef FP4D_CUDA_MODEL
constexpr int LONGSUM_WAVE = 4; /* tests have several */
#else
constexpr int LONGSUM_WAVE = 16384;
#endif
constexpr int LONGSUM_SCRATCH_BYTES = (LONGSUM_WAVE + 1) * (int)sizeof(struct longsum_part);

/* add(total) when the last wave is in.  Four threads, of a warp each, add one figure
 * each: a chain of additions in registers, of parts that stand in shared memory. */
template <typename ADD>
static __global__ void longsum_total(struct longsum_part *parts, int n, bool first, bool last, ADD add) {
  __shared__ struct longsum_part piece[LONGSUM_THREADS];
  __shared__ struct longsum_part total;
  const int t = (int)threadIdx.x, figure = t % 32 == 0 ? t / 32 : -1;
  struct longsum_part own = {};
  if (!first && figure >= 0) own = parts[LONGSUM_WAVE];
  for (int from = 0; from < n; from += LONGSUM_THREADS) {
    const int have = n - from < LONGSUM_THREADS ? n - from : LONGSUM_THREADS;
    if (t < have) piece[t] = parts[from + t];
    __syncthreads();
    if (figure == 0)
      for (int i = 0; i < have; i++) own.sum[0] = own.sum[0] + piece[i].sum[0];
    if (figure == 1)
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
  if (last) add(total);
  else parts[LONGSUM_WAVE] = total;
}

/* launch(first_chunk, chunks, parts) for each wave of an array of n elements; add_up(chunks, first, last) after each. */
template <typename LAUNCH, typename ADD_UP>
static inline void longsum_waves(struct cuda_device *d, int64_t n, LAUNCH launch, ADD_UP add_up) {
  CUDA_REQUIRE(d->scratch_bytes >= LONGSUM_SCRATCH_BYTES, "scratch is too small");
  const int64_t chunks = (n + REDUCE_CHUNK - 1) / REDUCE_CHUNK;
  for (int64_t first = 0; first < chunks; first += LONGSUM_WAVE) {
    const int wave = (int)(chunks - first < LONGSUM_WAVE ? chunks - first : LONGSUM_WAVE);
    launch(first, wave, (struct longsum_part *)(void *)d->scratch);
    add_up(wave, first == 0, first + wave == chunks);
  }
}

/* The same, then add(total) on the device. */
template <typename LAUNCH, typename ADD> static inline void longsum(struct cuda_device *d, int64_t n, LAUNCH launch, ADD add) {
  longsum_waves(d, n, launch, [&](int wave, bool first, bool last) {
    CUDA_LAUNCH(d, (longsum_total<ADD>), 1, LONGSUM_THREADS, 0, (struct longsum_part *)(void *)d->scratch, wave, first, last, add);
  });
}

#endif
