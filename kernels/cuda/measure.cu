/* Sum of squares, non-finite count and amax of a matrix, and its plain sum: one
 * look at every element, as kernels/cpu/measure.c.  Moves the matrix in, once. */
#include "kernels/cuda/reduce.cuh"

namespace {

enum { VECTOR = LONGSUM_VECTOR, THREADS = LONGSUM_THREADS, AHEAD = 4 }; /* loads that a thread has under way */

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
    measure_chunks(struct longsum_part *parts, const T *x, int64_t n, int64_t first_chunk) {
  __shared__ double sums[THREADS / 32];
  __shared__ int counts[THREADS / 32];
  __shared__ unsigned tops[THREADS / 32];
  const int64_t begin = (first_chunk + blockIdx.x) * REDUCE_CHUNK;
  const int64_t end = begin + REDUCE_CHUNK < n ? begin + REDUCE_CHUNK : n;
  double lane[VECTOR] = {0.0};
  int nonfinite = 0;
  unsigned largest = 0;
  for (int64_t first = begin + (int64_t)threadIdx.x * VECTOR; first < end; first += AHEAD * REDUCE_LANES) {
    packed<T, VECTOR> held[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) flat_load<ALIGNED>(held[a], x, first + a * REDUCE_LANES, end);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      float v[VECTOR];
      unpack(v, held[a]);
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
__global__ void __launch_bounds__(THREADS) sum_chunks(struct longsum_part *parts, const T *x, int64_t n, int64_t first_chunk) {
  __shared__ double sums[THREADS / 32];
  const int64_t begin = (first_chunk + blockIdx.x) * REDUCE_CHUNK;
  const int64_t end = begin + REDUCE_CHUNK < n ? begin + REDUCE_CHUNK : n;
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
  __device__ void operator()(const struct longsum_part &total) const { *to += total.sum[0]; }
};

struct add_measure {
  struct measure *to;
  __device__ void operator()(const struct longsum_part &total) const {
    to->sum_squares += total.sum[0];
    to->nonfinite += total.count;
    const float amax = f32_from_bits(total.largest);
    if (amax > to->amax) to->amax = amax;
  }
};

}  // namespace

void cuda_measure(struct device *device, struct measure *measured, const struct matrix *x) {
  struct cuda_device *d = cuda_of(device);
  const int64_t n = x->rows * x->cols;
  with_type(x->dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *data = (const T *)x->data;
    with_bool(cuda_whole(0, 1, x->data), [&](auto aligned) {
      auto launch = [&](int64_t first, int chunks, struct longsum_part *parts) {
        CUDA_LAUNCH(d, (measure_chunks<T, decltype(aligned)::value>), (unsigned)chunks, THREADS, 0, parts, data, n, first);
      };
      longsum(d, n, launch, add_measure{measured});
    });
  });
}

void cuda_sum(struct device *device, double *sum, const struct matrix *x) {
  struct cuda_device *d = cuda_of(device);
  const int64_t n = x->rows * x->cols;
  with_type(x->dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *data = (const T *)x->data;
    with_bool(cuda_whole(0, 1, x->data), [&](auto aligned) {
      auto launch = [&](int64_t first, int chunks, struct longsum_part *parts) {
        CUDA_LAUNCH(d, (sum_chunks<T, decltype(aligned)::value>), (unsigned)chunks, THREADS, 0, parts, data, n, first);
      };
      longsum(d, n, launch, add_sum{sum});
    });
  });
}

int64_t cuda_producer_scratch_bytes(const struct extent *x) {
  const int64_t group[] = {cuda_embedding_scratch_bytes(x->tokens), cuda_rmsnorm_scratch_bytes(x->tokens, x->hidden_size),
                           LONGSUM_SCRATCH_BYTES};
  int64_t most = 0;
  for (int64_t bytes : group)
    if (bytes > most) most = bytes;
  return most;
}
