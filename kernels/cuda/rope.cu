/* Rotary embedding: the arithmetic of kernels/cpu/rope.c, four pairs a thread.
 *
 * Moves q and k of every row, in and out; what is written elsewhere than in
 * place has v too.  A block has a row: a thread the same part of many heads, so
 * that it reads that part of the table (4 bytes for each element of a head, a
 * position) once, and has HELD heads under way.
 */
#include "kernels/cuda/rows.cuh"

namespace {

enum { VECTOR = 8, PARTS = 128, HELD = 8 };

/* (x, y) of a block: the part, the first head.  `used` heads of a row's are moved, the first
 * `rotated` of them rotated.  WHOLE: head_dim, always even, is a multiple of VECTOR. */
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(PARTS)
    rotate_rows(const __grid_constant__ struct targets out, const T *x, const float *cos_sin, float direction, int64_t rows, int64_t n, int used,
                int rotated, int head_dim, uint32_t seq_len) {
  const int part = (int)(blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, step = (int)blockDim.y;
  if (part >= head_dim) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    packed<float, VECTOR> a;
    float angle[VECTOR];
    row_load<WHOLE>(a, cos_sin + (int64_t)((uint32_t)row % seq_len) * head_dim, part, head_dim);
    unpack(angle, a);
    for (int first = (int)threadIdx.y; first < used; first += HELD * step) {
      packed<T, VECTOR> p[HELD];
#pragma unroll
      for (int k = 0; k < HELD; k++)
        if (first + k * step < used) row_load<WHOLE>(p[k], x + row * n + (first + k * step) * head_dim, part, head_dim);
#pragma unroll
      for (int k = 0; k < HELD; k++) {
        const int head = first + k * step;
        if (head >= used) break;
        if (head < rotated) {
          float v[VECTOR];
          unpack(v, p[k]);
#pragma unroll
          for (int e = 0; e < VECTOR; e += 2) {
            const float x0 = v[e], x1 = v[e + 1], c = angle[e], s = angle[e + 1] * direction;
            v[e] = f32_fma(x0, c, -(x1 * s));
            v[e + 1] = f32_fma(x0, s, x1 * c);
          }
          pack(p[k], v);
        }
        targets_store<WHOLE>(out, row * n + head * head_dim, part, head_dim, p[k]);
      }
    }
  }
}

static void rotate(struct device *device, const struct emission *out, const struct matrix *x, const float *cos_sin,
                   const struct attention_shape *s, float direction) {
  struct cuda_device *d = cuda_of(device);
  const int64_t rows = x->rows, n = x->cols, rotated = s->n_heads + s->n_kv_heads;
  CUDA_REQUIRE(n == (rotated + s->n_kv_heads) * s->head_dim && rows == s->batch * s->seq_len,
               "qkv does not have the attention's shape");
  CUDA_REQUIRE(s->head_dim % 2 == 0, "head_dim is odd");
  CUDA_REQUIRE(n <= INT32_MAX && rows <= UINT32_MAX, "a row is too long, or there are too many");
  const struct targets to = targets_of(out, x->dtype, rows, n);
  if (rows * n == 0 || to.count == 0) return;
  const int64_t used = to.count == 1 && to.at[0] == x->data ? rotated : rotated + s->n_kv_heads;
  const int64_t parts = (s->head_dim + VECTOR - 1) / VECTOR, width = parts < PARTS ? parts : (int64_t)PARTS;
  const int64_t needed = (used + HELD - 1) / HELD, fit = PARTS / width;
  const dim3 block((unsigned)width, (unsigned)(needed < fit ? needed : fit));
  with_type(x->dtype, [&](auto zero) {
    using T = decltype(zero);
    with_bool(s->head_dim % VECTOR == 0 && cuda_whole(n, VECTOR, x->data, cos_sin) && targets_whole(&to), [&](auto whole) {
      CUDA_LAUNCH(d, (rotate_rows<T, decltype(whole)::value>), grid_of_rows((parts + width - 1) / width, rows), block, 0, to, (const T *)x->data,
                  cos_sin, direction, rows, n, (int)used, (int)rotated, (int)s->head_dim, (uint32_t)s->seq_len);
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
