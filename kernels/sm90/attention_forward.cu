/* Attention forward on Hopper, head_dim 64 and 128, BF16.
 *
 * The method is that of FlashAttention-3 (Shah et al., 2024): a producer thread
 * copies tiles by TMA, two warpgroups of 64 queries each multiply by wgmma.  While
 * one runs a tile's softmax the other's products run (they take turns by named
 * barriers), and inside a warpgroup the scores of the next key tile are computed
 * beside P V of this one.  P stays in registers: accumulators are the next
 * product's A operand as they lie.  V is read as it is, with rows as K.
 *
 * A block of 384 threads per multiprocessor takes tiles of 128 queries of one head
 * from a common counter, longest first: within what fits the L2 cache, the last
 * queries of every head, then those before; heads of a kv head beside each other.
 * No result depends on which block takes which tile.
 *
 * What differs from the CPU backend's definition (kernels/cpu/attention.h):
 *   - keys are taken from the diagonal down, the order of sums is the tensor
 *     cores', exp2 is the hardware's (relative error 2^-22);
 *   - P is rounded to BF16 for P V (relative 2^-9 a term); its row sum l is not;
 *   - the reference m of the exponents follows the maximum only when that has grown
 *     by 2^8: P is at most 256, which rounds the same;
 *   - a masked key of a tile takes part as P = 0: a NaN or infinity in V reaches
 *     every query of its sample that shares a tile of 128 keys with it.
 */
#include <math.h>

#include "kernels/sm90/attention.h"

namespace {

enum {
  TILE = SM90_ATTENTION_TILE,
  CHUNK = SM90_ATTENTION_CHUNK,
  CONSUMERS = 2,             /* warpgroups of 64 queries */
  ROWS = TILE / CONSUMERS,   /* of a consumer */
  THREADS = 128 * (1 + CONSUMERS),
  CONSUMER_WARPS = 4 * CONSUMERS,
  NO_TILE = -1
};

/* Named barriers; 0 is __syncthreads. */
enum { TURN = 1, /* + consumer: its turn to issue products */ OWN = 3 /* + consumer: its 128 threads */ };

constexpr float LAZY = 8.0f; /* log2 by which the maximum may outgrow m */

struct arguments {
  struct sm90_attention_shape shape;
  int section;            /* kv heads (of all samples) whose K and V stay in the L2 cache together */
  const int32_t *starts;  /* may be NULL */
  float *lse, *max_logit; /* max_logit may be NULL */
  unsigned *next;         /* tile to be taken */
};

/* How P becomes pairs of BF16: the A operand of P V. */
struct round_bf16 {
  __device__ static uint32_t pair(float low, float high) { return sm90_bf16_pair(low, high); }
};

/* ---- shared memory ----------------------------------------------------------- */
template <int D> struct shared {
  static constexpr int STAGES = D == 128 ? 2 : 4;
  static constexpr int BYTES = TILE * D * 2; /* a tile */
  char q[BYTES], out[BYTES], k[STAGES][BYTES], v[STAGES][BYTES];
  uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  int tile; /* that q holds; NO_TILE: there are no more */
};

/* A place in a ring of stages, and the parity of its present use. */
template <int STAGES> struct place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage < STAGES) return;
    stage = 0;
    parity ^= 1;
  }
};

/* ---- tiles -------------------------------------------------------------------- */
struct tile {
  int sample, head, kv_head;
  int query;          /* tile of queries = the last tile of keys */
  int first, last;    /* tiles of keys */
};

__device__ int tile_count(const arguments &a) { return a.shape.batch * a.shape.heads * a.shape.tiles; }

__device__ tile tile_at(const arguments &a, int index) {
  const int units = a.shape.batch * a.shape.kv_heads, per_section = a.section * a.shape.group * a.shape.tiles;
  const int section = index / per_section, rest = index % per_section, begin = section * a.section;
  const int heads = (begin + a.section < units ? a.section : units - begin) * a.shape.group;
  const int unit = begin + rest % heads / a.shape.group;
  tile t;
  t.sample = unit / a.shape.kv_heads;
  t.kv_head = unit % a.shape.kv_heads;
  t.head = t.kv_head * a.shape.group + rest % a.shape.group;
  t.query = t.last = a.shape.tiles - 1 - rest / heads;
  t.first = a.starts ? a.starts[static_cast<int64_t>(t.sample) * a.shape.seq_len + t.query * TILE] / TILE : 0;
  return t;
}

/* ---- producer: one thread ------------------------------------------------------ */
template <int D> __device__ void load_tile(char *to, const CUtensorMap *map, uint64_t *full, int col, int position, int sample) {
  sm90_barrier_expect(full, shared<D>::BYTES);
  for (int c = 0; c < D / CHUNK; c++) sm90_tma_load_3d(to + c * TILE * CHUNK * 2, map, full, col + c * CHUNK, position, sample);
}

template <int D> __device__ void produce(shared<D> *s, const CUtensorMap *qkv, const arguments &a) {
  constexpr int STAGES = shared<D>::STAGES;
  place<STAGES> k, v;
  place<1> q;
  const int tiles = tile_count(a);
  int index = static_cast<int>(atomicAdd(a.next, 1u));
  while (index < tiles) {
    const int next = static_cast<int>(atomicAdd(a.next, 1u)); /* known by the time it is needed */
    const tile t = tile_at(a, index);
    const int k_col = (a.shape.heads + t.kv_head) * D, v_col = k_col + a.shape.kv_heads * D;
    sm90_barrier_wait(&s->q_empty, q.parity ^ 1);
    s->tile = index;
    load_tile<D>(s->q, qkv, &s->q_full, t.head * D, t.query * TILE, t.sample);
    q.advance();
    /* K is one tile ahead of V, as the consumers want them */
    for (int j = t.last; j >= t.first - 1; j--) {
      if (j >= t.first) {
        sm90_barrier_wait(&s->k_empty[k.stage], k.parity ^ 1);
        load_tile<D>(s->k[k.stage], qkv, &s->k_full[k.stage], k_col, j * TILE, t.sample);
        k.advance();
      }
      if (j < t.last) {
        sm90_barrier_wait(&s->v_empty[v.stage], v.parity ^ 1);
        load_tile<D>(s->v[v.stage], qkv, &s->v_full[v.stage], v_col, (j + 1) * TILE, t.sample);
        v.advance();
      }
    }
    index = next;
  }
  sm90_barrier_wait(&s->q_empty, q.parity ^ 1);
  s->tile = NO_TILE;
  sm90_barrier_arrive(&s->q_full);
}

/* ---- consumers ------------------------------------------------------------------ */
/* This thread's two rows of the warpgroup's 64; i = 0, 1. */
struct softmax_rows {
  float m[2];   /* reference of the exponents */
  float top[2]; /* largest score */
  float l[2];   /* this thread's part of the sum of P */
};

__device__ int own_row(int i) { return static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + 8 * i; }
__device__ int own_column() { return static_cast<int>(threadIdx.x % 4 * 2); }

/* A value that all lanes have; the compiler then knows it. */
__device__ int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

/* scores[64][128] = Q K^T; issued, not waited for. */
template <int D> __device__ void issue_scores(float (&scores)[TILE / 2], uint64_t q, uint64_t k) {
  sm90_wgmma_fence();
#pragma unroll
  for (int step = 0; step < D / 16; step++) {
    const uint32_t at = static_cast<uint32_t>(step / 4 * TILE * CHUNK * 2 + step % 4 * 32);
    sm90_wgmma_ss<TILE, false, false>(scores, sm90_descriptor_advance(q, at), sm90_descriptor_advance(k, at), step > 0);
  }
  sm90_wgmma_commit();
}

/* out[64][D] (+)= P V; issued, not waited for. */
template <int D> __device__ void issue_output(float (&out)[D / 2], const uint32_t (&p)[TILE / 16][4], uint64_t v, bool accumulate) {
  sm90_wgmma_fence();
#pragma unroll
  for (int step = 0; step < TILE / 16; step++)
    sm90_wgmma_rs<D, true>(out, p[step], sm90_descriptor_advance(v, static_cast<uint32_t>(step * 16 * CHUNK * 2)), accumulate || step > 0);
  sm90_wgmma_commit();
}

/* Scores of keys that row i does not see become -inf; it sees the tile's columns low[i]..high[i]. */
__device__ void mask(float (&scores)[TILE / 2], const int (&low)[2], const int (&high)[2]) {
#pragma unroll
  for (int r = 0; r < TILE / 2; r++) {
    const int column = r / 4 * 8 + r % 2, i = r / 2 % 2;
    if (column < low[i] - own_column() || column > high[i] - own_column()) scores[r] = -F32_INFINITY;
  }
}

/* Scores become P, unrounded; rows' sums and references follow.  Whether O must be
 * multiplied by factor (the same in a whole warp). */
__device__ bool softmax(float (&scores)[TILE / 2], softmax_rows *rows, float (&factor)[2], float kappa) {
  float base[2];
  bool grew = false;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float even = -F32_INFINITY, odd = -F32_INFINITY; /* two chains */
#pragma unroll
    for (int r = 2 * i; r < TILE / 2; r += 4) {
      even = fmaxf(even, scores[r]);
      odd = fmaxf(odd, scores[r + 1]);
    }
    float top = fmaxf(even, odd);
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
    rows->top[i] = fmaxf(rows->top[i], top);
    factor[i] = 1.0f;
    if ((rows->top[i] - rows->m[i]) * kappa > LAZY) {
      factor[i] = sm90_exp2((rows->m[i] - rows->top[i]) * kappa);
      rows->m[i] = rows->top[i];
      grew = true;
    }
    base[i] = rows->m[i] == -F32_INFINITY ? 0.0f : rows->m[i] * kappa;
  }
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int r = 0; r < TILE / 2; r++) {
    const int i = r / 2 % 2;
    scores[r] = sm90_exp2(f32_fma(scores[r], kappa, -base[i]));
    sum[i] = sum[i] + scores[r];
  }
#pragma unroll
  for (int i = 0; i < 2; i++) rows->l[i] = f32_fma(rows->l[i], factor[i], sum[i]);
  return __any_sync(0xFFFFFFFFu, grew);
}

template <class Round> __device__ void round_p(uint32_t (&p)[TILE / 16][4], const float (&scores)[TILE / 2]) {
#pragma unroll
  for (int r = 0; r < TILE / 4; r++) p[r / 4][r % 4] = Round::pair(scores[2 * r], scores[2 * r + 1]);
}

template <int D> __device__ void rescale(float (&out)[D / 2], const float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < D / 2; r++) out[r] = out[r] * factor[r / 2 % 2];
}

/* Writes the consumer's 64 rows of O and lse. */
template <int D>
__device__ void store(shared<D> *s, int consumer, float (&out)[D / 2], const softmax_rows &rows, const CUtensorMap *out_map, const arguments &a,
                      const tile &t) {
  const int position = t.query * TILE + consumer * ROWS;
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float l = rows.l[i];
    l = l + __shfl_xor_sync(0xFFFFFFFFu, l, 1);
    l = l + __shfl_xor_sync(0xFFFFFFFFu, l, 2);
    inverse[i] = 1.0f / l;
    const int row = position + own_row(i);
    if (own_column() == 0 && row < a.shape.seq_len) {
      const float base = rows.m[i] == -F32_INFINITY ? 0.0f : rows.m[i] * a.shape.kappa;
      a.lse[(static_cast<int64_t>(t.sample) * a.shape.heads + t.head) * a.shape.seq_len + row] = f32_fma(base, SM90_LN_2, f32_log(l));
    }
  }
  char *own = s->out + consumer * (ROWS * D * 2);
  const bool issuer = threadIdx.x % 128 == 0;
  if (issuer) sm90_bulk_wait_read<0>(); /* the last tile's copy has read it */
  sm90_named_barrier_sync(OWN + consumer, 128);
#pragma unroll
  for (int r = 0; r < D / 2; r += 2) {
    const int i = r / 2 % 2, column = r / 4 * 8 + own_column();
    uint16_t *chunk = reinterpret_cast<uint16_t *>(own + column / CHUNK * (ROWS * CHUNK * 2));
    *reinterpret_cast<uint32_t *>(chunk + sm90_swizzled(static_cast<uint32_t>(own_row(i)), static_cast<uint32_t>(column % CHUNK))) =
        sm90_bf16_pair(out[r] * inverse[i], out[r + 1] * inverse[i]);
  }
  sm90_fence_async_shared();
  sm90_named_barrier_sync(OWN + consumer, 128);
  if (issuer) {
    for (int c = 0; c < D / CHUNK; c++) sm90_tma_store_3d(out_map, own + c * (ROWS * CHUNK * 2), t.head * D + c * CHUNK, position, t.sample);
    sm90_bulk_commit();
  }
}

template <int D, class Round>
__device__ void consume(shared<D> *s, const CUtensorMap *out_map, const arguments &a) {
  constexpr int STAGES = shared<D>::STAGES;
  const int consumer = uniform(static_cast<int>(threadIdx.x / 128)) - 1;
  const uint64_t q_tile = sm90_descriptor(s->q + consumer * (ROWS * CHUNK * 2), 16, 1024), k_tiles = sm90_descriptor(s->k, 16, 1024),
                 v_tiles = sm90_descriptor(s->v, TILE * CHUNK * 2, 1024);
  place<STAGES> k, v;
  place<1> q;
  float largest = -F32_INFINITY;
  if (consumer == 1) sm90_named_barrier_arrive(TURN, 2 * 128);
  const auto stage_of = [](uint64_t tiles, const place<STAGES> &at) {
    return sm90_descriptor_advance(tiles, static_cast<uint32_t>(uniform(at.stage)) * shared<D>::BYTES);
  };
  for (;;) {
    sm90_barrier_wait(&s->q_full, q.parity);
    q.advance();
    const int index = uniform(s->tile);
    if (index == NO_TILE) break;
    tile t = tile_at(a, index);
    t.first = uniform(t.first);
    /* Of this thread's rows, and of the consumer's last: a tile of keys before that row's start is masked. */
    int row[2], start[2] = {0, 0}, last_start = 0;
    const int position = t.query * TILE + consumer * ROWS;
    const int32_t *starts = a.starts ? a.starts + static_cast<int64_t>(t.sample) * a.shape.seq_len : nullptr;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      row[i] = position + own_row(i);
      if (starts) start[i] = starts[row[i] < a.shape.seq_len ? row[i] : a.shape.seq_len - 1];
    }
    if (starts) last_start = starts[position + ROWS <= a.shape.seq_len ? position + ROWS - 1 : a.shape.seq_len - 1];

    float scores[TILE / 2], out[D / 2], factor[2];
    uint32_t p[TILE / 16][4];
    softmax_rows rows = {{-F32_INFINITY, -F32_INFINITY}, {-F32_INFINITY, -F32_INFINITY}, {0.0f, 0.0f}};
    for (int j = t.last; j >= t.first; j--) {
      const bool begins = j == t.last;
      const uint64_t k_tile = stage_of(k_tiles, k);
      sm90_barrier_wait(&s->k_full[k.stage], k.parity);
      if (begins) {
        issue_scores<D>(scores, q_tile, k_tile);
        sm90_wgmma_wait<0>();
      } else {
        sm90_named_barrier_sync(TURN + consumer, 2 * 128);
        issue_scores<D>(scores, q_tile, k_tile);
        sm90_barrier_wait(&s->v_full[v.stage], v.parity);
        issue_output<D>(out, p, stage_of(v_tiles, v), j + 1 < t.last);
        sm90_named_barrier_arrive(TURN + 1 - consumer, 2 * 128);
        sm90_wgmma_wait<1>();
      }
      sm90_wgmma_registers(scores);
      sm90_warp_arrive(&s->k_empty[k.stage]);
      k.advance();
      if (j == t.first) sm90_warp_arrive(&s->q_empty);
      if (begins || j * TILE < last_start) {
        const int low[2] = {start[0] - j * TILE, start[1] - j * TILE}, high[2] = {row[0] - j * TILE, row[1] - j * TILE};
        mask(scores, low, high);
      }
      const bool grew = softmax(scores, &rows, factor, a.shape.kappa);
      if (!begins) {
        sm90_wgmma_wait<0>();
        sm90_wgmma_registers(out);
        sm90_warp_arrive(&s->v_empty[v.stage]);
        v.advance();
        if (grew) rescale<D>(out, factor);
      }
      round_p<Round>(p, scores);
    }
    sm90_barrier_wait(&s->v_full[v.stage], v.parity);
    issue_output<D>(out, p, stage_of(v_tiles, v), t.first < t.last);
    sm90_wgmma_wait<0>();
    sm90_wgmma_registers(out);
    sm90_warp_arrive(&s->v_empty[v.stage]);
    v.advance();
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (row[i] < a.shape.seq_len) largest = fmaxf(largest, rows.top[i]);
    store<D>(s, consumer, out, rows, out_map, a, t);
  }
  if (consumer == 0) sm90_named_barrier_sync(TURN, 2 * 128); /* the other's last arrival */
  if (threadIdx.x % 128 == 0) sm90_bulk_wait_read<0>();
  if (!a.max_logit) return;
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
  if (threadIdx.x % 32 == 0) sm90_atomic_max(a.max_logit, largest * a.shape.scale);
}

template <int D, class Round>
__global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap out,
                                                                const __grid_constant__ arguments a) {
  CUDA_DYNAMIC_SHARED(shared<D>, s);
  if (threadIdx.x == 0) {
    sm90_barrier_init(&s->q_full, 1);
    sm90_warp_barrier_init(&s->q_empty, CONSUMER_WARPS);
    for (int i = 0; i < shared<D>::STAGES; i++) {
      sm90_barrier_init(&s->k_full[i], 1);
      sm90_barrier_init(&s->v_full[i], 1);
      sm90_warp_barrier_init(&s->k_empty[i], CONSUMER_WARPS);
      sm90_warp_barrier_init(&s->v_empty[i], CONSUMER_WARPS);
    }
    sm90_barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    sm90_registers_fewer<24>();
    if (threadIdx.x == 0) produce<D>(s, &qkv, a);
  } else {
    sm90_registers_more<240>();
    consume<D, Round>(s, &out, a);
  }
}

/* K and V of this many bytes share the L2 cache with what streams through it. */
constexpr int64_t SECTION_BYTES = 32 << 20;

template <int D>
void launch(struct cuda_device *d, struct matrix *out, const struct matrix *qkv, const struct attention_shape *s, const arguments &a) {
  const int64_t tiles = static_cast<int64_t>(a.shape.batch) * a.shape.heads * a.shape.tiles;
  const unsigned blocks = cuda_grid(tiles < d->sm_count ? tiles : d->sm_count);
  CUDA_LAUNCH(d, (attention_forward<D, round_bf16>), blocks, THREADS, sizeof(shared<D>), sm90_attention_map(d, qkv, s, TILE),
              sm90_attention_map(d, out, s, ROWS), a);
}

}  // namespace

extern "C" int64_t sm90_attention_forward_scratch_bytes(const struct extent *x) {
  (void)x;
  return sizeof(unsigned);
}

extern "C" void sm90_attention_forward(struct device *dd, struct matrix *out, float *lse, float *max_logit, struct quantise_counts *counts,
                                       const struct matrix *qkv, const struct attention_payload *payload, const int32_t *starts,
                                       const struct attention_shape *s) {
  struct cuda_device *d = cuda_of(dd);
  (void)counts; /* of codes, which plain formats have not */
  CUDA_REQUIRE(!payload || attention_plain(&payload->formats), "attention formats that cuda_refuse_attention refuses");
  CUDA_REQUIRE(sm90_attention_takes(s, qkv->dtype) && out->dtype == qkv->dtype, "attention of a head_dim or type that it does not take");
  CUDA_REQUIRE(qkv->rows == s->batch * s->seq_len && qkv->cols == (s->n_heads + 2 * s->n_kv_heads) * s->head_dim,
               "qkv must be [tokens, (n_heads + 2 n_kv_heads) * head_dim]");
  CUDA_REQUIRE(out->rows == qkv->rows && out->cols == s->n_heads * s->head_dim, "attention output must be [tokens, n_heads * head_dim]");
  CUDA_REQUIRE(d->scratch_bytes >= static_cast<int64_t>(sizeof(unsigned)), "scratch too small for attention");
  arguments a = {};
  a.shape = sm90_attention_shape_of(s);
  const int64_t units = s->batch * s->n_kv_heads, most = SECTION_BYTES / (s->seq_len * s->head_dim * 4);
  a.section = static_cast<int>(most < 1 ? 1 : most < units ? most : units);
  a.starts = starts;
  a.lse = lse;
  a.max_logit = max_logit;
  a.next = reinterpret_cast<unsigned *>(d->scratch);
  cuda_keep_fault(d, cudaMemsetAsync(a.next, 0, sizeof *a.next, d->stream), "attention_forward");
  if (s->head_dim == 128) launch<128>(d, out, qkv, s, a);
  else launch<64>(d, out, qkv, s, a);
}
