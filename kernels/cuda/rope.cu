/* Rotary embedding: the arithmetic of kernels/cpu/rope.c, four pairs a thread.
 *
 * Moves q and k of every row, in and out; what is written elsewhere than in
 * place has v too.  The table (4 bytes for each element of a head, a position)
 * is read by every head of a row, from the caches.
 */
#include "kernels/cuda/rows.cuh"

namespace {

enum { THREADS = 256, VECTOR = 8, PIECE = THREADS * VECTOR };

/* head_dim is even, so that no pair is cut.  WHOLE: a multiple of VECTOR. */
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(THREADS)
    rotate_rows(const __grid_constant__ struct targets out, const T *x, const float *cos_sin, float direction, int64_t rows, int64_t n, int64_t used,
                int rotated, int head_dim, uint32_t seq_len) {
  const int64_t i = (int64_t)blockIdx.x * PIECE + (int64_t)threadIdx.x * VECTOR;
  if (i >= used) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const float *table = cos_sin + (int64_t)((uint32_t)row % seq_len) * head_dim;
    packed<T, VECTOR> p;
    row_load<WHOLE>(p, x + row * n, i, n);
    if (i < rotated) {
      float v[VECTOR], angle[VECTOR];
      unpack(v, p);
      if (WHOLE) {
        packed<float, VECTOR> a;
        row_load<true>(a, table, (int)i % head_dim, (int64_t)head_dim);
        unpack(angle, a);
      } else {
#pragma unroll
        for (int e = 0; e < VECTOR; e++) angle[e] = table[((int)i + e) % head_dim];
      }
#pragma unroll
      for (int e = 0; e < VECTOR; e += 2) {
        if (!WHOLE && i + e >= rotated) break;
        const float x0 = v[e], x1 = v[e + 1], c = angle[e], s = angle[e + 1] * direction;
        v[e] = f32_fma(x0, c, -(x1 * s));
        v[e + 1] = f32_fma(x0, s, x1 * c);
      }
      pack(p, v);
    }
    targets_store<WHOLE>(out, row * n, i, n, p);
  }
}

static void rotate(struct device *device, const struct emission *out, const struct matrix *x, const float *cos_sin,
                   const struct attention_shape *s, float direction) {
  struct cuda_device *d = cuda_of(device);
  const int64_t rows = x->rows, n = x->cols, rotated = (s->n_heads + s->n_kv_heads) * s->head_dim;
  CUDA_REQUIRE(n == rotated + s->n_kv_heads * s->head_dim && rows == s->batch * s->seq_len,
               "qkv does not have the attention's shape");
  CUDA_REQUIRE(s->head_dim % 2 == 0, "head_dim is odd");
  CUDA_REQUIRE(n <= INT32_MAX && rows <= UINT32_MAX, "a row is too long, or there are too many");
  const struct targets to = targets_of(out, x->dtype, rows, n);
  if (rows * n == 0 || to.count == 0) return;
  const int64_t used = to.count == 1 && to.at[0] == x->data ? rotated : n, pieces = (used + PIECE - 1) / PIECE;
  with_type(x->dtype, [&](auto zero) {
    using T = decltype(zero);
    with_bool(s->head_dim % VECTOR == 0 && cuda_whole(n, VECTOR, x->data, cos_sin) && targets_whole(&to), [&](auto whole) {
      CUDA_LAUNCH(d, (rotate_rows<T, decltype(whole)::value>), grid_of_rows(pieces, rows), THREADS, 0, to, (const T *)x->data,
                  cos_sin, direction, rows, n, used, (int)rotated, (int)s->head_dim, (uint32_t)s->seq_len);
    });
  });
}

}  // namespace

void cuda_rope_forward(struct device *d, struct matrix *qkv, const struct attention_payload *payload,
                       struct quantise_counts *counts, const float *cos_sin, const struct attention_shape *s) {
  (void)counts;
  CUDA_REQUIRE(!payload || attention_plain(&payload->formats), "attention's formats are not executable");
  struct emission out = {};
  out.plain = qkv;
  rotate(d, &out, qkv, cos_sin, s, 1.0f);
}

void cuda_rope_backward(struct device *d, const struct emission *out, const struct matrix *d_qkv, const float *cos_sin,
                        const struct attention_shape *s) {
  rotate(d, out, d_qkv, cos_sin, s, -1.0f);
}
