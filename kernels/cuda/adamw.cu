/* AdamW: the arithmetic and the draws of kernels/cpu/adamw.c, eight elements a
 * thread (one draw), a chunk of the long sum a block, the tensors of a list together.
 *
 * Moves param, grad, m and v in, param, m and v out, and the master in and out
 * where there is one: of BF16 parameters with FP32 gradients 24 bytes an element
 * alone, 30 beside a master (22 and 28 with BF16 gradients).  So that memory is what
 * it waits for, eight elements that are all of ordinary size take quotients and roots
 * without the special cases, those by the biases by their reciprocals: the same bits.
 */
#include "kernels/cuda/quotient.cuh"
#include "kernels/cuda/reduce.cuh"

namespace {

enum { VECTOR = LONGSUM_VECTOR, THREADS = LONGSUM_THREADS, DRAW_ELEMENTS = 8 };
constexpr float LEAST_BIAS = 0x1p-10f, LEAST_EPS = 0x1p-40f;

struct update {
  struct adamw_tensor tensor[LONGSUM_LIST];
  bool measured;
  struct adamw a;
  float inverse1, inverse2; /* of the biases; 0: not to be used */
  uint64_t seed;
  uint32_t number, operand; /* of the draws */
};
static_assert(sizeof(struct update) + sizeof(struct longsum_wave) + 8 <= 32764, "what a kernel's parameters may be, from CUDA 12.1 on");

/* The 16-bit fields of elements at .. at + 7 of a tensor. */
CUDA_INLINE void draw_fields(uint32_t (&field)[VECTOR], const struct update &u, uint32_t layer, uint64_t at) {
  static_assert(VECTOR == DRAW_ELEMENTS, "a thread's elements are a draw's");
  const uint64_t block = at / DRAW_ELEMENTS;
  const uint32_t skip = (uint32_t)(at % DRAW_ELEMENTS);
  uint32_t word[8];
  struct philox_block r = philox4x32_10(u.seed, philox_counter(u.number, block >> 32, layer, u.operand, (uint32_t)block));
#pragma unroll
  for (int j = 0; j < 4; j++) word[j] = r.word[j];
  if (skip) { /* the next block has the others */
    const uint64_t next = block + 1;
    r = philox4x32_10(u.seed, philox_counter(u.number, next >> 32, layer, u.operand, (uint32_t)next));
#pragma unroll
    for (int j = 0; j < 4; j++) word[j + 4] = r.word[j];
#pragma unroll
    for (int j = 0; j < 6; j++) word[j] = skip & 4u ? word[j + 2] : word[j];
#pragma unroll
    for (int j = 0; j < 5; j++) word[j] = skip & 2u ? word[j + 1] : word[j];
#pragma unroll
    for (int j = 0; j < 4; j++) word[j] = skip & 1u ? word[j] >> 16 | word[j + 1] << 16 : word[j];
  }
#pragma unroll
  for (int e = 0; e < VECTOR; e++) field[e] = word[e / 2] >> (e % 2 * 16);
}

/* Whether numbers are all 0 or in [2^-90, 2^40] as magnitudes, and none -0: then `divide`,
 * `quotient` and `root` meet neither overflow nor subnormal numbers (LEAST_BIAS, LEAST_EPS). */
struct sizes {
  uint32_t least, most; /* of magnitudes' bits - 1, which are most for 0; of magnitudes' bits */
  int lowest;           /* of bits as integers: -0 is the lowest of all */
};
CUDA_INLINE void sizes_add(struct sizes &s, float x) {
  const uint32_t bits = f32_bits(x), size = bits & 0x7FFFFFFFu, before = size - 1u;
  s.least = before < s.least ? before : s.least;
  s.most = size > s.most ? size : s.most;
  s.lowest = (int)bits < s.lowest ? (int)bits : s.lowest;
}
CUDA_INLINE bool sizes_are_ordinary(const struct sizes &s) {
  return s.least >= f32_bits(0x1p-90f) - 1u && s.most <= f32_bits(0x1p40f) && s.lowest != INT32_MIN;
}

/* What is read of a thread's elements. */
template <typename P, typename G> struct elements {
  packed<P, VECTOR> param;
  packed<float, VECTOR> master, m, v;
  packed<G, VECTOR> grad;
};

template <bool MASTER, bool ALIGNED, typename P, typename G>
CUDA_INLINE void elements_load(struct elements<P, G> &x, const struct adamw_tensor &t, int64_t i, int64_t end) {
  if (MASTER) flat_load<ALIGNED>(x.master, t.master, i, end);
  else flat_load<ALIGNED>(x.param, (const P *)t.param, i, end);
  flat_load<ALIGNED>(x.m, t.m, i, end);
  flat_load<ALIGNED>(x.v, t.v, i, end);
  flat_load<ALIGNED>(x.grad, (const G *)t.grad, i, end);
}

template <bool MASTER, bool ALIGNED, typename P, typename G>
CUDA_INLINE void elements_update(struct elements<P, G> &x, const struct update &u, const struct adamw_tensor &t, int64_t i, int64_t end,
                                 double (&change)[VECTOR], double (&weight)[VECTOR]) {
  const struct adamw &a = u.a;
  const float rest1 = 1.0f - a.beta1, rest2 = 1.0f - a.beta2;
  float w[VECTOR], m[VECTOR], v[VECTOR], grad[VECTOR], before[VECTOR];
  if (MASTER) unpack(w, x.master);
  else unpack(w, x.param);
  unpack(m, x.m);
  unpack(v, x.v);
  unpack(grad, x.grad);
  struct sizes sizes = {UINT32_MAX, 0, INT32_MAX};
#pragma unroll
  for (int e = 0; e < VECTOR; e++) {
    const float g = a.grad_scale * grad[e];
    m[e] = f32_fma(a.beta1, m[e], rest1 * g);
    v[e] = f32_fma(a.beta2, v[e], (rest2 * g) * g);
    sizes_add(sizes, m[e]);
    sizes_add(sizes, v[e]);
  }
  pack(x.m, m);
  pack(x.v, v);
  flat_store<ALIGNED>(t.m, i, end, x.m);
  flat_store<ALIGNED>(t.v, i, end, x.v);
  if (u.inverse1 > 0.0f && sizes_are_ordinary(sizes)) {
#pragma unroll
    for (int e = 0; e < VECTOR; e++) m[e] = quotient(divide(m[e], a.bias1, u.inverse1), root(divide(v[e], a.bias2, u.inverse2)) + a.eps);
  } else {
#pragma unroll 1
    for (int e = 0; e < VECTOR; e++) m[e] = (m[e] / a.bias1) / (f32_sqrt(v[e] / a.bias2) + a.eps);
  }
#pragma unroll
  for (int e = 0; e < VECTOR; e++) {
    before[e] = w[e];
    w[e] = f32_fma(-a.lr, f32_fma(t.weight_decay, w[e], m[e]), w[e]);
  }
  if (sizeof(P) == 2 && !MASTER) {
    uint32_t field[VECTOR];
    draw_fields(field, u, t.layer, t.first + (uint64_t)i);
#pragma unroll
    for (int e = 0; e < VECTOR; e++) w[e] = bf16_decode(bf16_encode_stochastic(w[e], field[e]));
  }
  pack(x.param, w);
  flat_store<ALIGNED>((P *)t.param, i, end, x.param);
  if (MASTER) {
    pack(x.master, w);
    flat_store<ALIGNED>(t.master, i, end, x.master);
  }
  if (!u.measured) return;
  const int have = end - i < VECTOR ? (int)(end - i) : (int)VECTOR;
#pragma unroll
  for (int e = 0; e < VECTOR; e++)
    if (e < have) {
      const double old = (double)before[e], moved = (double)w[e] - old;
      change[e] = f64_fma(moved, moved, change[e]);
      weight[e] = f64_fma(old, old, weight[e]);
    }
}

/* The next elements are on their way while a thread computes. */
template <typename P, typename G, bool MASTER, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, 4)
    update_chunks(struct longsum_part *parts, const __grid_constant__ struct update u, const __grid_constant__ struct longsum_wave wave) {
  __shared__ double sums[2][THREADS / 32];
  int64_t begin;
  const struct adamw_tensor &t = u.tensor[longsum_place(wave, begin)];
  const int64_t end = begin + REDUCE_CHUNK < t.n ? begin + REDUCE_CHUNK : t.n;
  double change[VECTOR] = {0.0}, weight[VECTOR] = {0.0};
  int64_t i = begin + (int64_t)threadIdx.x * VECTOR;
  struct elements<P, G> x, next;
  elements_load<MASTER, ALIGNED>(x, t, i, end);
  for (; i < end; i += REDUCE_LANES) {
    elements_load<MASTER, ALIGNED>(next, t, i + REDUCE_LANES, end);
    elements_update<MASTER, ALIGNED>(x, u, t, i, end, change, weight);
    x = next;
  }
  if (!u.measured) return;
  const double changed = reduce_lanes(change, sums[0]), weighed = reduce_lanes(weight, sums[1]);
  if (threadIdx.x == 0) parts[blockIdx.x] = {{changed, weighed}, 0, 0};
}

struct add_update {
  struct update_measure *to[LONGSUM_LIST];
  __device__ void operator()(int i, const struct longsum_part &total) const {
    to[i]->update_sum_squares += total.sum[0];
    to[i]->weight_sum_squares += total.sum[1];
  }
};


}  // namespace

void cuda_adamw_update(struct device *device, const struct adamw_tensor *tensors, int count, enum dtype param_dtype, enum dtype grad_dtype,
                       const struct adamw *a, const struct draw *draw) {
  struct cuda_device *d = cuda_of(device);
  if (count == 0) return;
  const bool master = tensors[0].master != NULL, measured = tensors[0].measured != NULL;
  CUDA_REQUIRE(master || param_dtype != DTYPE_BF16 || draw, "a BF16 parameter without a master needs a draw");
  struct update u = {};
  u.measured = measured;
  u.a = *a;
  const bool ordinary = a->bias1 >= LEAST_BIAS && a->bias1 <= 1.0f && a->bias2 >= LEAST_BIAS && a->bias2 <= 1.0f && a->eps >= LEAST_EPS && a->eps <= 1.0f;
  if (ordinary) u.inverse1 = 1.0f / a->bias1, u.inverse2 = 1.0f / a->bias2;
  if (draw) u.seed = draw->seed, u.number = draw->update, u.operand = draw->operand;
  for (int from = 0; from < count; from += LONGSUM_LIST) {
    const int some = count - from < LONGSUM_LIST ? count - from : LONGSUM_LIST;
    int64_t n[LONGSUM_LIST];
    bool whole = true;
    for (int i = 0; i < some; i++) {
      const struct adamw_tensor *t = &tensors[from + i];
      CUDA_REQUIRE((t->master != NULL) == master && (t->measured != NULL) == measured, "some tensors of a list have a master or a measure");
      whole = whole && cuda_whole(0, 1, t->param, t->master, t->m, t->v, t->grad);
      n[i] = t->n;
    }
    const auto with_types = [&](auto f) {
      with_type(param_dtype, [&](auto param) { with_type(grad_dtype, [&](auto grad) { f(param, grad); }); });
    };
    with_types([&](auto param, auto grad) {
      with_bool(master, [&](auto beside) {
        with_bool(whole, [&](auto aligned) {
          const auto launch = [&](const struct longsum_wave &w, struct longsum_part *parts) {
            for (int i = 0; i < w.count; i++) u.tensor[i] = tensors[from + w.array + i];
            CUDA_LAUNCH(d, (update_chunks<decltype(param), decltype(grad), decltype(beside)::value, decltype(aligned)::value>),
                        static_cast<unsigned>(w.begin[w.count]), THREADS, 0, parts, u, w);
          };
          const auto add_of = [&](const struct longsum_wave &w) {
            struct add_update add = {};
            for (int i = 0; i < w.count; i++) add.to[i] = tensors[from + w.array + i].measured;
            return add;
          };
          if (measured) longsum(d, n, some, launch, add_of);
          else
            longsum_waves(d, n, some, [&](const struct longsum_wave &w, struct longsum_part *parts) {
              if (w.begin[w.count] > 0) launch(w, parts);
            });
        });
      });
    });
  }
}
