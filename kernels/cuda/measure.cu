/* Sum of squares, non-finite count and amax of matrices, and the plain sum of one: one
 * look at every element, as kernels/cpu/measure.c.  Moves a matrix in, once. */
#include "kernels/cuda/reduce.cuh"

namespace {

enum { VECTOR = LONGSUM_VECTOR, THREADS = LONGSUM_THREADS, AHEAD = 4 }; /* loads that a thread has under way */

/* A list of arrays of one type. */
struct arrays {
  const void *data[LONGSUM_LIST];
  int64_t n[LONGSUM_LIST];
};

/* The block's chunk of its array: elements `begin` to the returned one. */
template <typename T> CUDA_INLINE int64_t chunk_of(const struct arrays &a, const struct longsum_wave &wave, const T *&x, int64_t &begin) {
  const int i = longsum_place(wave, begin);
  x = (const T *)a.data[i];
  return begin + REDUCE_CHUNK < a.n[i] ? begin + REDUCE_CHUNK : a.n[i];
}

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
    measure_chunks(struct longsum_part *parts, const __grid_constant__ struct arrays a, const __grid_constant__ struct longsum_wave wave) {
  __shared__ double sums[THREADS / 32];
  __shared__ int counts[THREADS / 32];
  __shared__ unsigned tops[THREADS / 32];
  const T *x;
  int64_t begin;
  const int64_t end = chunk_of(a, wave, x, begin);
  double lane[VECTOR] = {0.0};
  int nonfinite = 0;
  unsigned largest = 0;
  for (int64_t first = begin + (int64_t)threadIdx.x * VECTOR; first < end; first += AHEAD * REDUCE_LANES) {
    packed<T, VECTOR> held[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) flat_load<ALIGNED>(held[k], x, first + k * REDUCE_LANES, end);
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      float v[VECTOR];
      unpack(v, held[k]);
#pragma unroll
      for (int e = 0; e < VECTOR; e++) { /* of one that is not there: 0 */
        uint32_t bits = f32_bits(v[e]) & 0x7FFFFFFFu;
        const bool bad = bits >= 0x7F800000u;
        nonfinite += bad;
        bits = bad ? 0u : bits;
        largest = bits > largest ? bits : largest;
        const double size = (double)f32_from_bits(bits);
        lane[e] = f64_fma(size, size, lane[e]);
      }
    }
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    nonfinite += __shfl_xor_sync(0xFFFFFFFFu, nonfinite, mask);
    const unsigned other = __shfl_xor_sync(0xFFFFFFFFu, largest, mask);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % 32 == 0) {
    counts[threadIdx.x / 32] = nonfinite;
    tops[threadIdx.x / 32] = largest;
  }
  const double sum = reduce_lanes(lane, sums); /* and its barrier */
  if (threadIdx.x != 0) return;
  struct longsum_part part = {{sum, 0.0}, 0, 0};
  for (int w = 0; w < THREADS / 32; w++) {
    part.count += counts[w];
    part.largest = tops[w] > part.largest ? tops[w] : part.largest;
  }
  parts[blockIdx.x] = part;
}

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
    sum_chunks(struct longsum_part *parts, const __grid_constant__ struct arrays a, const __grid_constant__ struct longsum_wave wave) {
  __shared__ double sums[THREADS / 32];
  const T *x;
  int64_t begin;
  const int64_t end = chunk_of(a, wave, x, begin);
  double lane[VECTOR] = {0.0};
  for (int64_t first = begin + (int64_t)threadIdx.x * VECTOR; first < end; first += REDUCE_LANES) {
    packed<T, VECTOR> held;
    float v[VECTOR];
    flat_load<ALIGNED>(held, x, first, end);
    unpack(v, held);
#pragma unroll
    for (int e = 0; e < VECTOR; e++) lane[e] = lane[e] + (double)v[e]; /* of one that is not there: 0 */
  }
  const double sum = reduce_lanes(lane, sums);
  if (threadIdx.x == 0) parts[blockIdx.x] = {{sum, 0.0}, 0, 0};
}

struct add_sum {
  double *to;
  __device__ void operator()(int, const struct longsum_part &total) const { *to += total.sum[0]; }
};

struct add_measure {
  struct measure *to;
  __device__ void operator()(int i, const struct longsum_part &total) const {
    to[i].sum_squares += total.sum[0];
    to[i].nonfinite += total.count;
    const float amax = f32_from_bits(total.largest);
    if (amax > to[i].amax) to[i].amax = amax;
  }
};

/* kernel_of(zero, aligned) of the matrices' chunks, then add_of(first matrix of the wave). */
template <typename KERNEL_OF, typename ADD_OF>
void over_chunks(struct cuda_device *d, const struct matrix *x, int count, KERNEL_OF kernel_of, ADD_OF add_of) {
  for (int from = 0; from < count; from += LONGSUM_LIST) {
    const int some = count - from < LONGSUM_LIST ? count - from : LONGSUM_LIST;
    int64_t n[LONGSUM_LIST];
    bool whole = true;
    for (int i = 0; i < some; i++) {
      CUDA_REQUIRE(x[from + i].dtype == x[0].dtype, "a list of matrices has two types");
      n[i] = x[from + i].rows * x[from + i].cols;
      whole = whole && cuda_whole(0, 1, x[from + i].data);
    }
    with_type(x[0].dtype, [&](auto zero) {
      with_bool(whole, [&](auto aligned) {
        const auto launch = [&](const struct longsum_wave &w, struct longsum_part *parts) {
          struct arrays a = {};
          for (int i = 0; i < w.count; i++) a.data[i] = x[from + w.array + i].data, a.n[i] = n[w.array + i];
          CUDA_LAUNCH(d, (kernel_of(zero, aligned)), static_cast<unsigned>(w.begin[w.count]), THREADS, 0, parts, a, w);
        };
        longsum(d, n, some, launch, [&](const struct longsum_wave &w) { return add_of(from + w.array); });
      });
    });
  }
}

}  // namespace

void cuda_measure(struct device *device, struct measure *measured, const struct matrix *x, int count) {
  over_chunks(cuda_of(device), x, count, [](auto zero, auto aligned) { return measure_chunks<decltype(zero), decltype(aligned)::value>; },
              [&](int first) { return add_measure{measured + first}; });
}

void cuda_sum(struct device *device, double *sum, const struct matrix *x) {
  over_chunks(cuda_of(device), x, 1, [](auto zero, auto aligned) { return sum_chunks<decltype(zero), decltype(aligned)::value>; },
              [&](int) { return add_sum{sum}; });
}

int64_t cuda_producer_scratch_bytes(const struct extent *x) {
  const int64_t group[] = {cuda_embedding_scratch_bytes(x->tokens), cuda_rmsnorm_scratch_bytes(x->tokens, x->hidden_size),
                           LONGSUM_SCRATCH_BYTES};
  int64_t most = 0;
  for (int64_t bytes : group)
    if (bytes > most) most = bytes;
  return most;
}
