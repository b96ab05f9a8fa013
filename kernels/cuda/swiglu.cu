/* The gated FFN's non-linearity: the arithmetic of kernels/cpu/swiglu.c, eight
 * elements a thread.
 *
 * Forward moves gate, up and out, 3 elements for each of out; backward d_act,
 * gate, up, d_gate and d_up, 5.  In BF16 the sigmoid's instructions are nearly
 * as slow as its memory, so eight gates that are all of ordinary size take a
 * shorter exponential and quotient of the same bits (`sigmoid_ordinary`).
 */
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/sigmoid.cuh"

namespace {

enum { THREADS = 256, VECTOR = 8, PIECE = THREADS * VECTOR };
enum { FORWARD_BLOCKS = 6 }; /* that an SM has at once, so that others load while one computes */

/* s = sigmoid(g), for eight of T. */
template <typename T> CUDA_INLINE void sigmoids(float (&s)[VECTOR], const float (&g)[VECTOR]) {
  bool ordinary = true;
#pragma unroll
  for (int e = 0; e < VECTOR; e++) ordinary = ordinary && sigmoid_is_ordinary(g[e]);
  if (ordinary) {
#pragma unroll
    for (int e = 0; e < VECTOR; e++) s[e] = sigmoid_ordinary<sizeof(T) == 2>(g[e]);
  } else {
#pragma unroll
    for (int e = 0; e < VECTOR; e++) s[e] = f32_sigmoid(g[e]);
  }
}

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS)
    gate_forward(const __grid_constant__ struct targets out, const T *gate_up, int64_t rows, int64_t n) {
  const int64_t i = (int64_t)blockIdx.x * PIECE + (int64_t)threadIdx.x * VECTOR;
  if (i >= n) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    packed<T, VECTOR> gates, ups, result;
    row_load<WHOLE>(gates, gate_up + row * 2 * n, i, n);
    row_load<WHOLE>(ups, gate_up + row * 2 * n + n, i, n);
    float g[VECTOR], u[VECTOR], s[VECTOR];
    unpack(g, gates);
    unpack(u, ups);
    sigmoids<T>(s, g);
#pragma unroll
    for (int e = 0; e < VECTOR; e++) g[e] = (g[e] * s[e]) * u[e];
    pack(result, g);
    targets_store<WHOLE>(out, row * n, i, n, result);
  }
}

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(THREADS)
    gate_backward(const __grid_constant__ struct targets out, const T *d_act, const T *gate_up, int64_t rows, int64_t n) {
  const int64_t i = (int64_t)blockIdx.x * PIECE + (int64_t)threadIdx.x * VECTOR;
  if (i >= n) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    packed<T, VECTOR> gates, ups, ds;
    row_load<WHOLE>(gates, gate_up + row * 2 * n, i, n);
    row_load<WHOLE>(ups, gate_up + row * 2 * n + n, i, n);
    row_load<WHOLE>(ds, d_act + row * n, i, n);
    float g[VECTOR], u[VECTOR], d[VECTOR], s[VECTOR];
    unpack(g, gates);
    unpack(u, ups);
    unpack(d, ds);
    sigmoids<T>(s, g);
#pragma unroll
    for (int e = 0; e < VECTOR; e++) {
      u[e] = (d[e] * u[e]) * (s[e] * f32_fma(g[e], 1.0f - s[e], 1.0f));
      d[e] = d[e] * (g[e] * s[e]);
    }
    pack(gates, u);
    pack(ups, d);
    targets_store<WHOLE>(out, row * 2 * n, i, n, gates);
    targets_store<WHOLE>(out, row * 2 * n + n, i, n, ups);
  }
}

}  // namespace

void cuda_swiglu_forward(struct device *device, const struct emission *out, const struct matrix *gate_up) {
  struct cuda_device *d = cuda_of(device);
  const int64_t rows = gate_up->rows, n = gate_up->cols / 2, pieces = (n + PIECE - 1) / PIECE;
  const struct targets to = targets_of(out, gate_up->dtype, rows, n);
  if (rows * n == 0 || to.count == 0) return;
  with_type(gate_up->dtype, [&](auto zero) {
    using T = decltype(zero);
    with_bool(cuda_whole(n, VECTOR, gate_up->data) && targets_whole(&to), [&](auto whole) {
      CUDA_LAUNCH(d, (gate_forward<T, decltype(whole)::value>), grid_of_rows(pieces, rows), THREADS, 0, to,
                  (const T *)gate_up->data, rows, n);
    });
  });
}

void cuda_swiglu_backward(struct device *device, const struct emission *out, const struct matrix *d_act,
                          const struct matrix *gate_up) {
  struct cuda_device *d = cuda_of(device);
  const int64_t rows = d_act->rows, n = d_act->cols, pieces = (n + PIECE - 1) / PIECE;
  CUDA_REQUIRE(gate_up->cols == 2 * n && gate_up->rows == rows, "d_act does not fit gate_up");
  CUDA_REQUIRE(gate_up->dtype == d_act->dtype, "d_act is not of gate_up's type");
  const struct targets to = targets_of(out, d_act->dtype, rows, 2 * n);
  if (rows * n == 0 || to.count == 0) return;
  with_type(d_act->dtype, [&](auto zero) {
    using T = decltype(zero);
    with_bool(cuda_whole(n, VECTOR, gate_up->data, d_act->data) && targets_whole(&to), [&](auto whole) {
      CUDA_LAUNCH(d, (gate_backward<T, decltype(whole)::value>), grid_of_rows(pieces, rows), THREADS, 0, to,
                  (const T *)d_act->data, (const T *)gate_up->data, rows, n);
    });
  });
}
