/* Attention backward on Hopper, head_dim 64 and 128, BF16.
 *
 * Every kernel is the only writer of what it makes: no atomic additions, the same
 * bits in every run.  P and dS are operands of products as their accumulators lie.
 *
 *   summarise   of every query -lse * log2(e) and D = sum over columns of dO O
 *   keys        128 keys of a kv head: dK and dV, over the queries of its heads
 *                 S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q
 *   kept        256 queries of a head: dQ += dS K, of dS that `keys` has written
 *   queries     128 queries of a head, where dS is not kept: dQ, over the keys that they see
 *                 S = Q K^T,  dP = dO V^T,  dQ += dS K
 *
 * Kept dS is S^2 bytes a head, written and read once while the tensor cores work on; where
 * it is made twice there are 7 products in place of 5.  So it is kept where that of one kv
 * head's queries has room in attention_kept_most bytes (kernels/cuda/cuda.h), for as many
 * kv heads at a time as have: a pass.
 *
 * A producer thread copies tiles by TMA into a ring; two warpgroups have 64 keys or
 * queries each.  What one computes of scores hides behind the other's products, and
 * a warpgroup's next scores are queued behind its own last products.  Q and dO, K
 * and V are read as they are, along columns for scores and along rows for gradients.
 * Only tiles on the diagonal or at a document's edge are masked.  Long blocks first:
 * `keys` by order of launch, `kept` by turns, `queries` from a counter, so that their
 * producers have the next block's tiles while this one's gradient is written.
 *
 * What differs from the CPU backend's definition (kernels/cpu/attention.h):
 *   - sums run over tiles of 64 in the tensor cores' order; exp2 is the hardware's
 *     (relative error 2^-22);
 *   - with rotary embedding, dQ and dK are rotated in FP32 and rounded once;
 *   - P for dV and dS for dQ and dK are rounded to BF16 (relative 2^-8 a term);
 *   - a masked pair of a tile takes part with P = dS = 0: a NaN or infinity in a
 *     token reaches every token of its sample that shares a pair of tiles with it.
 */
#include "kernels/sm90/attention_backward_kept.cuh"
#include "kernels/sm90/attention_backward_keys.cuh"
#include "kernels/sm90/attention_backward_queries.cuh"

namespace {

/* ---- statistics: a block has a tile of a head ---------------------------------------- */
template <int D>
__global__ void __launch_bounds__(256) summarise(struct statistics *to, const uint16_t *d_out, const uint16_t *out, const float *lse, int seq_len) {
  constexpr int LANES = D / 8, ROWS = 256 / LANES;
  const int lane = static_cast<int>(threadIdx.x) % LANES, heads = static_cast<int>(gridDim.y);
  const int64_t head = static_cast<int64_t>(blockIdx.z) * heads + blockIdx.y; /* of all samples */
  to += head * gridDim.x + blockIdx.x;
#pragma unroll
  for (int first = 0; first < TILE; first += ROWS) {
    const int row = first + static_cast<int>(threadIdx.x) / LANES, query = static_cast<int>(blockIdx.x) * TILE + row;
    float sum = 0.0f;
    if (query < seq_len) {
      const int64_t at = ((static_cast<int64_t>(blockIdx.z) * seq_len + query) * heads + blockIdx.y) * D + lane * 8;
      const uint4 g = __ldg(reinterpret_cast<const uint4 *>(d_out + at)), o = __ldg(reinterpret_cast<const uint4 *>(out + at));
      const uint32_t x[4] = {g.x, g.y, g.z, g.w}, y[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum = f32_fma(f32_from_bits(x[i] << 16), f32_from_bits(y[i] << 16), sum);
        sum = f32_fma(f32_from_bits(x[i] & 0xFFFF0000u), f32_from_bits(y[i] & 0xFFFF0000u), sum);
      }
    }
#pragma unroll
    for (int half = LANES / 2; half > 0; half /= 2) sum = sum + __shfl_xor_sync(0xFFFFFFFFu, sum, half);
    if (lane == 0) {
      to->log_sum[row] = query < seq_len ? -(lse[head * seq_len + query] * SM90_LOG2_E) : -F32_INFINITY;
      to->centre[row] = sum;
    }
  }
}

/* ---- launching -------------------------------------------------------------------------- */
int64_t tiles_of(const struct attention_shape *s) { return (s->seq_len + TILE - 1) / TILE; }
int64_t statistics_bytes(const struct attention_shape *s) {
  return s->batch * s->n_heads * tiles_of(s) * static_cast<int64_t>(sizeof(struct statistics));
}
int64_t units_of(const struct attention_shape *s) { return s->batch * s->n_kv_heads; }
/* dS of the queries of a kv head. */
int64_t unit_bytes(const struct attention_shape *s) {
  return s->n_heads / s->n_kv_heads * pairs_before(tiles_of(s)) * SCORES * static_cast<int64_t>(sizeof(uint16_t));
}
/* Kv heads of a pass; 0: dS is not kept. */
int64_t units_of_pass(const struct attention_shape *s, int64_t most) {
  const int64_t fit = most / unit_bytes(s), all = units_of(s);
  return fit < all ? fit : all;
}
/* Scratch: statistics, the counter, dS of a pass. */
int64_t kept_offset(const struct attention_shape *s) { return statistics_bytes(s) + 16; }

template <int D>
void launch(struct cuda_device *d, const struct matrix *d_qkv, const struct matrix *d_out, const struct matrix *out, const float *lse,
            const struct matrix *qkv, const float *cos_sin, const int32_t *starts, const struct attention_shape *s) {
  struct statistics *statistics = reinterpret_cast<struct statistics *>(d->scratch);
  arguments a = {};
  a.shape = sm90_attention_shape_of(s);
  a.tiles = static_cast<int>(tiles_of(s));
  a.starts = starts;
  a.cos_sin = cos_sin;
  a.statistics = statistics;
  a.d_qkv = static_cast<uint16_t *>(d_qkv->data);
  a.next = reinterpret_cast<unsigned *>(d->scratch + statistics_bytes(s));
  const unsigned tiles = static_cast<unsigned>(a.tiles), heads = static_cast<unsigned>(s->n_heads), batch = static_cast<unsigned>(s->batch);
  const unsigned blocks = static_cast<unsigned>(a.shape.tiles), items = batch * heads * blocks;
  const unsigned sms = static_cast<unsigned>(d->sm_count);
  const int units = static_cast<int>(units_of(s)), pass = static_cast<int>(units_of_pass(s, d->attention_kept_most));
  CUDA_REQUIRE(heads < 65536 && batch < 65536 && blocks < 65536 && s->batch * s->n_heads * a.shape.tiles < INT32_MAX, "attention of more heads, samples or blocks than a grid has");
  CUDA_LAUNCH(d, summarise<D>, dim3(tiles, heads, batch), 256, 0, statistics, static_cast<const uint16_t *>(d_out->data),
              static_cast<const uint16_t *>(out->data), lse, a.shape.seq_len);
  const CUtensorMap qkv_map = sm90_attention_map(d, qkv, s, TILE), d_out_map = sm90_attention_map(d, d_out, s, TILE);
  const auto pass_of = [&](int n) {
    a.units = n;
    CUDA_LAUNCH(d, keys<D>, dim3(static_cast<unsigned>(n), blocks), THREADS, sizeof(keys_shared<D>), qkv_map, d_out_map, a);
  };
  if (pass == 0) {
    pass_of(units);
    cuda_keep_fault(d, cudaMemsetAsync(a.next, 0, sizeof *a.next, d->stream), "attention_backward");
    CUDA_LAUNCH(d, queries<D>, items < sms ? items : sms, THREADS, sizeof(queries_shared<D>), qkv_map, d_out_map, a);
    return;
  }
  a.d_scores = reinterpret_cast<uint16_t *>(d->scratch + kept_offset(s));
  for (; a.unit < units; a.unit += pass) {
    pass_of(units - a.unit < pass ? units - a.unit : pass);
    CUDA_LAUNCH(d, kept<D>, sms, KEPT_THREADS, sizeof(kept_shared<D>), qkv_map, a);
  }
}

}  // namespace

extern "C" int64_t sm90_attention_backward_scratch_bytes(const struct cuda_device *d, const struct extent *x) {
  const struct attention_shape *s = &x->attention;
  if (!sm90_attention_takes(s, x->attention_backward)) return 0;
  return kept_offset(s) + units_of_pass(s, d->attention_kept_most) * unit_bytes(s);
}

/* cos_sin may be NULL. */
static void backward(struct device *dd, struct matrix *d_qkv, const struct matrix *d_out, const struct matrix *out, const float *lse,
                     const struct matrix *qkv, const float *cos_sin, const int32_t *starts, const struct attention_shape *s) {
  struct cuda_device *d = cuda_of(dd);
  CUDA_REQUIRE(sm90_attention_takes(s, qkv->dtype) && d_qkv->dtype == qkv->dtype && d_out->dtype == qkv->dtype && out->dtype == qkv->dtype,
               "attention of a head_dim or type that it does not take");
  CUDA_REQUIRE(qkv->rows == s->batch * s->seq_len && qkv->cols == (s->n_heads + 2 * s->n_kv_heads) * s->head_dim && d_qkv->rows == qkv->rows &&
                   d_qkv->cols == qkv->cols,
               "qkv and d_qkv must be [tokens, (n_heads + 2 n_kv_heads) * head_dim]");
  CUDA_REQUIRE(out->rows == qkv->rows && out->cols == s->n_heads * s->head_dim && d_out->rows == out->rows && d_out->cols == out->cols,
               "out and d_out must be [tokens, n_heads * head_dim]");
  struct extent x = {};
  x.attention = *s;
  x.attention_backward = qkv->dtype;
  CUDA_REQUIRE(d->scratch_bytes >= sm90_attention_backward_scratch_bytes(d, &x), "scratch too small for attention's backward");
  if (s->head_dim == 128) launch<128>(d, d_qkv, d_out, out, lse, qkv, cos_sin, starts, s);
  else launch<64>(d, d_qkv, d_out, out, lse, qkv, cos_sin, starts, s);
}

extern "C" void sm90_attention_backward(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts, const struct matrix *d_out,
                                        const struct attention_gradient *g, const struct matrix *out, const float *lse, const struct matrix *qkv,
                                        const struct attention_payload *payload, const int32_t *starts, const struct attention_shape *s) {
  (void)counts; /* of codes, which plain formats have not */
  CUDA_REQUIRE(!g && (!payload || attention_plain(&payload->formats)), "attention formats that cuda_refuse_attention refuses");
  backward(d, d_qkv, d_out, out, lse, qkv, NULL, starts, s);
}

extern "C" void sm90_attention_rope_backward(struct device *d, struct matrix *d_qkv, const struct matrix *d_out, const struct matrix *out,
                                             const float *lse, const struct matrix *qkv, const float *cos_sin, const int32_t *starts,
                                             const struct attention_shape *s) {
  backward(d, d_qkv, d_out, out, lse, qkv, cos_sin, starts, s);
}
