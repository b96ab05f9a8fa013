/* Attention on Hopper: what forward and backward share.
 *
 * Tiles are of 128 queries or keys by the head's columns, in chunks of 64 columns
 * (a row of the 128-byte swizzle): chunk c of a tile of R rows begins at
 * c * R * 128 bytes.  They are copied straight out of qkv, whose rows stand
 * [sample][position], so that what lies beyond a sample's end is zero.
 */
#ifndef FP4D_KERNELS_SM90_ATTENTION_H
#define FP4D_KERNELS_SM90_ATTENTION_H

#include "kernels/sm90/tensor_map.h"

enum { SM90_ATTENTION_TILE = 128, SM90_ATTENTION_CHUNK = 64 };

#define SM90_LOG2_E 0x1.715476p+0f
#define SM90_LN_2 0x1.62e430p-1f

/* A shape as kernels take it. */
struct sm90_attention_shape {
  int batch, seq_len, heads, kv_heads, group; /* group: query heads of a kv head */
  int tiles;                                  /* of 128 positions in a sample */
  float scale, kappa;                         /* 1 / sqrt(head_dim), times log2(e) */
};

static inline struct sm90_attention_shape sm90_attention_shape_of(const struct attention_shape *s) {
  CUDA_REQUIRE(s->batch > 0 && s->seq_len > 0 && s->n_kv_heads > 0 && s->n_heads > 0 && s->n_heads % s->n_kv_heads == 0,
               "attention extents must be positive, n_heads a multiple of n_kv_heads");
  CUDA_REQUIRE(s->seq_len < INT64_C(1) << 24 && s->batch * s->n_heads * s->seq_len / SM90_ATTENTION_TILE < INT64_C(1) << 30,
               "attention of more tiles than an int counts");
  struct sm90_attention_shape a = {};
  a.batch = static_cast<int>(s->batch);
  a.seq_len = static_cast<int>(s->seq_len);
  a.heads = static_cast<int>(s->n_heads);
  a.kv_heads = static_cast<int>(s->n_kv_heads);
  a.group = a.heads / a.kv_heads;
  a.tiles = (a.seq_len + SM90_ATTENTION_TILE - 1) / SM90_ATTENTION_TILE;
  a.scale = 1.0f / f32_sqrt(static_cast<float>(s->head_dim));
  a.kappa = a.scale * SM90_LOG2_E;
  return a;
}

/* Whether the kernels of kernels/sm90 take it; the others are kernels/cuda's. */
static inline bool sm90_attention_takes(const struct attention_shape *s, enum dtype t) {
  return t == DTYPE_BF16 && (s->head_dim == 64 || s->head_dim == 128);
}

/* The map of a [tokens, cols] matrix of BF16 as [batch][seq_len][cols], in boxes of
 * 64 columns and `rows` positions of one sample. */
static inline CUtensorMap sm90_attention_map(struct cuda_device *d, const struct matrix *m, const struct attention_shape *s, int rows) {
  const struct sm90_tensor t = {m->data,
                                3,
                                {m->cols, s->seq_len, s->batch},
                                {2, m->cols * 2, s->seq_len * m->cols * 2},
                                {SM90_ATTENTION_CHUNK, rows, 1}};
  return sm90_tensor_map(d, &t);
}

/* *to = max(*to, x) for x that is no NaN, by any number of threads. */
__device__ static inline void sm90_atomic_max(float *to, float x) {
  x = x + 0.0f; /* -0 becomes +0: the orders of floats and of integers agree */
  if (x >= 0.0f) atomicMax(reinterpret_cast<int *>(to), static_cast<int>(f32_bits(x)));
  else atomicMin(reinterpret_cast<unsigned *>(to), f32_bits(x));
}

#endif
