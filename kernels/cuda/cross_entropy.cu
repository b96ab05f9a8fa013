/* Cross-entropy: what kernels/cpu/cross_entropy.c computes, a row of logits a
 * block.
 *
 * One walk over the row makes the largest logit and the sum of e^(x - top), each
 * thread keeping the largest so far and a sum relative to it (Milakov and
 * Gimelshein, "Online normalizer calculation for softmax"); a second, backwards,
 * writes the gradient: what the first read last is still in the L2 cache.  The
 * sum's order is fixed but not the CPU's: nll and d_logits are close to the
 * CPU's, the largest logit is the same.
 *
 * Moves the logits in twice (the second time in part from the cache) and
 * d_logits out: 12 bytes an element where that is FP32, in place or not.
 */
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/sigmoid.cuh"

namespace {

enum { THREADS = 1024, AHEAD = 4 }; /* AHEAD: loads that a thread has under way */

/* Sum of e^(x - base) with base = top, or 0 where that is -inf: then e^(x - base) is 0 or NaN. */
struct online {
  float top, sum;
};

CUDA_INLINE float online_base(float top) { return top > -F32_INFINITY ? top : 0.0f; }

/* The sum relative to another, larger base. With top -inf it is 0 or NaN, and stays that. */
CUDA_INLINE float online_rebased(struct online o, float base) {
  return o.top > -F32_INFINITY ? o.sum * f32_exp(o.top - base) : o.sum;
}

CUDA_INLINE struct online online_join(struct online a, struct online b) {
  const float top = a.top > b.top ? a.top : b.top, base = online_base(top);
  return {top, online_rebased(a, base) + online_rebased(b, base)};
}

/* e^(x - base) of numbers of which none is larger than base, if no NaN: f32_exp's bits,
 * by the shorter way where none is so far below that its exponential is not a normal number. */
template <int N> CUDA_INLINE void exponentials(float (&e)[N], const float (&x)[N], float base) {
  bool ordinary = true;
#pragma unroll
  for (int j = 0; j < N; j++) e[j] = x[j] - base, ordinary = ordinary && e[j] >= -86.0f;
  if (ordinary) {
#pragma unroll
    for (int j = 0; j < N; j++) e[j] = exp_ordinary(e[j]);
  } else {
#pragma unroll
    for (int j = 0; j < N; j++) e[j] = f32_exp(e[j]);
  }
}

template <int N> CUDA_INLINE void online_take(struct online &o, const float (&x)[N]) {
  float top = o.top, e[N];
#pragma unroll
  for (int j = 0; j < N; j++) top = x[j] > top ? x[j] : top; /* a NaN is passed over */
  const float base = online_base(top);
  if (top > o.top) o.sum = online_rebased(o, base);
  o.top = top;
  exponentials(e, x, base);
  o.sum = o.sum + reduce_registers(e);
}

/* The row's; every thread gets it. */
CUDA_INLINE struct online online_block(struct online o, struct online *shared) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const struct online other = {__shfl_xor_sync(0xFFFFFFFFu, o.top, mask), __shfl_xor_sync(0xFFFFFFFFu, o.sum, mask)};
    o = online_join(o, other);
  }
  __syncthreads(); /* the last row's have been read */
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = o;
  __syncthreads();
  o = shared[threadIdx.x % 32];
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const struct online other = {__shfl_xor_sync(0xFFFFFFFFu, o.top, mask), __shfl_xor_sync(0xFFFFFFFFu, o.sum, mask)};
    o = online_join(o, other);
  }
  return o;
}

struct loss {
  float *nll;
  void *d_logits; /* NULL: not wanted */
  const float *logits;
  const int32_t *targets;
  float grad_scale;
  int64_t rows, n, stride; /* of a row the first n elements; d_logits: n == stride */
};

/* V elements a thread at once: 4 of rows that are whole, else 1; AHEAD times, a block's
 * width apart.  -inf past the row's end. */
template <int V> CUDA_INLINE void logits_load(float (&v)[AHEAD * V], const float *x, int64_t first, int64_t n) {
#pragma unroll
  for (int a = 0; a < AHEAD; a++) {
    const int64_t i = first + (int64_t)a * THREADS * V;
#pragma unroll
    for (int e = 0; e < V; e++) v[a * V + e] = -F32_INFINITY;
    if (i >= n) continue;
    if constexpr (V == 4) {
      const float4 q = *(const float4 *)(x + i);
      v[a * V] = q.x, v[a * V + 1] = q.y, v[a * V + 2] = q.z, v[a * V + 3] = q.w;
    } else {
      v[a] = x[i];
    }
  }
}

template <typename D, int V>
__global__ void __launch_bounds__(THREADS) loss_rows(const __grid_constant__ struct loss l) {
  __shared__ struct online shared[THREADS / 32];
  constexpr int64_t STEP = (int64_t)AHEAD * THREADS * V;
  const int64_t n = l.n, own = (int64_t)threadIdx.x * V;
  for (int64_t row = blockIdx.x; row < l.rows; row += gridDim.x) {
    const int32_t target = l.targets[row];
    CUDA_DEVICE_REQUIRE(target < n, "target outside the vocabulary");
    const float *x = l.logits + row * l.stride;
    struct online o = {-F32_INFINITY, 0.0f};
    float v[AHEAD * V];
    if (target >= 0) {
      for (int64_t first = own; first < n; first += STEP) {
        logits_load<V>(v, x, first, n);
        online_take(o, v);
      }
      o = online_block(o, shared);
    }
    const float inverse = 1.0f / o.sum;
    float at_target = 0.0f;
    if (target >= 0) at_target = (f32_exp(x[target] - o.top) * inverse - 1.0f) * l.grad_scale;
    if (threadIdx.x == 0) l.nll[row] = target >= 0 ? f32_log(o.sum) + (o.top - x[target]) : 0.0f;
    if (!l.d_logits) continue;
    __syncthreads(); /* d_logits may be logits: everyone has read the target's */
    D *d = (D *)l.d_logits + row * n;
    for (int64_t first = own + (n - 1) / STEP * STEP; first >= 0; first -= STEP) {
      if (target >= 0) {
        logits_load<V>(v, x, first, n);
        exponentials(v, v, o.top);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const int64_t i = first + (int64_t)a * THREADS * V;
        if (i >= n) continue;
        float part[V];
#pragma unroll
        for (int e = 0; e < V; e++) {
          part[e] = target < 0 ? 0.0f : (v[a * V + e] * inverse) * l.grad_scale;
          if (i + e == target) part[e] = at_target;
        }
        if constexpr (V > 1) {
          packed<D, V> p;
          pack(p, part);
          row_store<true>(d, i, n, p);
        } else {
          element_set(d + i, part[0]);
        }
      }
    }
  }
}

}  // namespace

static void launch(struct cuda_device *d, enum dtype gradient, const struct loss &l) {
  if (l.rows == 0) return;
  with_type(gradient, [&](auto zero) {
    with_bool(cuda_whole(l.n, 4, l.d_logits, l.logits) && l.stride % 4 == 0, [&](auto whole) {
      CUDA_LAUNCH(d, (loss_rows<decltype(zero), decltype(whole)::value ? 4 : 1>), grid_of_tasks(l.rows), THREADS, 0, l);
    });
  });
}

void cuda_cross_entropy(struct device *d, float *nll, struct matrix *d_logits, const struct matrix *logits, const int32_t *targets,
                        float grad_scale) {
  CUDA_REQUIRE(logits->dtype == DTYPE_F32, "logits are not FP32");
  CUDA_REQUIRE(!d_logits || (d_logits->rows == logits->rows && d_logits->cols == logits->cols),
               "d_logits does not have the shape of logits");
  launch(cuda_of(d), d_logits ? d_logits->dtype : DTYPE_F32,
         {nll, d_logits ? d_logits->data : NULL, (const float *)logits->data, targets, grad_scale, logits->rows, logits->cols, logits->cols});
}

void cuda_cross_entropy_within(struct device *d, float *nll, const struct matrix *logits, int64_t vocabulary, const int32_t *targets) {
  CUDA_REQUIRE(logits->dtype == DTYPE_F32, "logits are not FP32");
  CUDA_REQUIRE(vocabulary > 0 && vocabulary <= logits->cols, "a vocabulary wider than the logits, or empty");
  launch(cuda_of(d), DTYPE_F32, {nll, NULL, (const float *)logits->data, targets, 0.0f, logits->rows, vocabulary, logits->cols});
}
