/* AdamW: the arithmetic and the draws of kernels/cpu/adamw.c, four elements a
 * thread, a chunk of the long sum a block.
 *
 * Moves param, grad, m and v in, param, m and v out, and the master in and out
 * where there is one: of BF16 parameters with FP32 gradients 24 bytes an element
 * alone, 30 beside a master (22 and 28 with BF16 gradients).
 */
#include "kernels/cuda/reduce.cuh"

namespace {

enum { VECTOR = LONGSUM_VECTOR, THREADS = LONGSUM_THREADS, DRAW_ELEMENTS = 8 };
enum { AHEAD = 2 }; /* groups of elements that a thread has under way */

struct update {
  void *param;
  float *master, *m, *v;
  const void *grad;
  bool grad_is_bf16;
  int64_t n;
  struct adamw a;
  struct draw draw;
  bool measured;
};

/* The 16-bit fields of elements at .. at + 3 of a tensor. */
CUDA_INLINE void draw_fields(uint32_t (&field)[VECTOR], const struct draw &d, uint64_t at) {
  const uint64_t block = at / DRAW_ELEMENTS;
  const uint32_t skip = (uint32_t)(at % DRAW_ELEMENTS);
  uint32_t word[6];
  struct philox_block r = philox4x32_10(d.seed, philox_counter(d.update, block >> 32, d.layer, d.operand, (uint32_t)block));
#pragma unroll
  for (int j = 0; j < 4; j++) word[j] = r.word[j];
  word[4] = word[5] = 0;
  if (skip > DRAW_ELEMENTS - VECTOR) { /* the next block has the others */
    const uint64_t next = block + 1;
    r = philox4x32_10(d.seed, philox_counter(d.update, next >> 32, d.layer, d.operand, (uint32_t)next));
    word[4] = r.word[0], word[5] = r.word[1];
  }
#pragma unroll
  for (int j = 0; j < 4; j++) word[j] = skip & 4u ? word[j + 2] : word[j];
#pragma unroll
  for (int j = 0; j < 3; j++) word[j] = skip & 2u ? word[j + 1] : word[j];
#pragma unroll
  for (int j = 0; j < 2; j++) word[j] = skip & 1u ? word[j] >> 16 | word[j + 1] << 16 : word[j];
#pragma unroll
  for (int e = 0; e < VECTOR; e++) field[e] = word[e / 2] >> (e % 2 * 16);
}

CUDA_INLINE void step(float &w, float &m, float &v, float grad, const struct adamw &a) {
  const float g = a.grad_scale * grad;
  m = f32_fma(a.beta1, m, (1.0f - a.beta1) * g);
  v = f32_fma(a.beta2, v, ((1.0f - a.beta2) * g) * g);
  const float u = (m / a.bias1) / (f32_sqrt(v / a.bias2) + a.eps);
  w = f32_fma(-a.lr, f32_fma(a.weight_decay, w, u), w);
}

/* What is read of four elements. */
template <typename P> struct elements {
  packed<P, VECTOR> param;
  packed<float, VECTOR> master, m, v;
  float grad[VECTOR];
};

template <bool MASTER, bool ALIGNED, typename P>
CUDA_INLINE void elements_load(struct elements<P> &x, const struct update &u, int64_t i, int64_t end) {
  if (MASTER) flat_load<ALIGNED>(x.master, u.master, i, end);
  else flat_load<ALIGNED>(x.param, (const P *)u.param, i, end);
  flat_load<ALIGNED>(x.m, u.m, i, end);
  flat_load<ALIGNED>(x.v, u.v, i, end);
  flat_load_any<ALIGNED>(x.grad, u.grad, u.grad_is_bf16, i, end);
}

template <bool MASTER, bool ALIGNED, typename P>
CUDA_INLINE void elements_update(struct elements<P> &x, const struct update &u, int64_t i, int64_t end, double (&change)[VECTOR],
                                 double (&weight)[VECTOR]) {
  float w[VECTOR], m[VECTOR], v[VECTOR], before[VECTOR];
  if (MASTER) unpack(w, x.master);
  else unpack(w, x.param);
  unpack(m, x.m);
  unpack(v, x.v);
#pragma unroll
  for (int e = 0; e < VECTOR; e++) {
    before[e] = w[e];
    step(w[e], m[e], v[e], x.grad[e], u.a);
  }
  if (sizeof(P) == 2 && !MASTER) {
    uint32_t field[VECTOR];
    draw_fields(field, u.draw, u.draw.first_sample + (uint64_t)i);
#pragma unroll
    for (int e = 0; e < VECTOR; e++) w[e] = bf16_decode(bf16_encode_stochastic(w[e], field[e]));
  }
  pack(x.param, w);
  pack(x.m, m);
  pack(x.v, v);
  flat_store<ALIGNED>((P *)u.param, i, end, x.param);
  flat_store<ALIGNED>(u.m, i, end, x.m);
  flat_store<ALIGNED>(u.v, i, end, x.v);
  if (MASTER) {
    pack(x.master, w);
    flat_store<ALIGNED>(u.master, i, end, x.master);
  }
  if (!u.measured) return;
#pragma unroll
  for (int e = 0; e < VECTOR; e++)
    if (i + e < end) {
      const double old = (double)before[e], moved = (double)w[e] - old;
      change[e] = f64_fma(moved, moved, change[e]);
      weight[e] = f64_fma(old, old, weight[e]);
    }
}

template <typename P, bool MASTER, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, 2)
    update_chunks(struct longsum_part *parts, const __grid_constant__ struct update u, int64_t first_chunk) {
  __shared__ double sums[2][THREADS / 32];
  const int64_t begin = (first_chunk + blockIdx.x) * REDUCE_CHUNK;
  const int64_t end = begin + REDUCE_CHUNK < u.n ? begin + REDUCE_CHUNK : u.n;
  double change[VECTOR] = {0.0}, weight[VECTOR] = {0.0};
  for (int64_t i = begin + (int64_t)threadIdx.x * VECTOR; i < end; i += AHEAD * REDUCE_LANES) {
    struct elements<P> x[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) elements_load<MASTER, ALIGNED>(x[a], u, i + a * REDUCE_LANES, end);
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
      if (i + a * REDUCE_LANES < end) elements_update<MASTER, ALIGNED>(x[a], u, i + a * REDUCE_LANES, end, change, weight);
  }
  if (!u.measured) return;
  const double changed = reduce_lanes(change, sums[0]), weighed = reduce_lanes(weight, sums[1]);
  if (threadIdx.x == 0) parts[blockIdx.x] = {{changed, weighed}, 0, 0};
}

struct add_update {
  struct update_measure *to;
  __device__ void operator()(const struct longsum_part &total) const {
    to->update_sum_squares += total.sum[0];
    to->weight_sum_squares += total.sum[1];
  }
};

}  // namespace

void cuda_adamw_update(struct device *device, void *param, enum dtype param_dtype, float *master, float *m, float *v,
                                  const void *grad, enum dtype grad_dtype, int64_t n, const struct adamw *a,
                                  const struct draw *draw, struct update_measure *measured) {
  struct cuda_device *d = cuda_of(device);
  const bool stochastic = param_dtype == DTYPE_BF16 && !master;
  CUDA_REQUIRE(!stochastic || draw, "a BF16 parameter without a master needs a draw");
  struct update u = {param, master, m, v, grad, grad_dtype == DTYPE_BF16, n, *a, {}, measured != NULL};
  if (stochastic) u.draw = *draw;
  with_type(param_dtype, [&](auto zero) {
    with_bool(master != NULL, [&](auto beside) {
      with_bool(cuda_whole(0, 1, param, master, m, v, grad), [&](auto aligned) {
        auto launch = [&](int64_t first, int chunks, struct longsum_part *parts) {
          CUDA_LAUNCH(d, (update_chunks<decltype(zero), decltype(beside)::value, decltype(aligned)::value>), (unsigned)chunks, THREADS,
                      0, parts, u, first);
        };
        if (measured) longsum(d, n, launch, add_update{measured});
        else longsum_waves(d, n, launch, [](int, bool, bool) {});
      });
    });
  });
}
