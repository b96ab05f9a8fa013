/* What extents sm90 refuses: its attention's limits, or those of kernels/cuda's where that runs. */
#include "kernels/sm90/attention.h"

extern "C" const char *sm90_refuse_extent(const struct device *d, const struct extent *x, enum dtype activations) {
  const struct attention_shape *s = &x->attention;
  if (!sm90_attention_takes(s, activations)) return cuda_refuse_extent(d, x, activations);
  const int64_t blocks = (s->seq_len + SM90_ATTENTION_TILE - 1) / SM90_ATTENTION_TILE;
  const int64_t row = 2 * (s->n_heads + 2 * s->n_kv_heads) * s->head_dim; /* bytes */
  if (s->n_heads > 65535) return "n_heads above 65535";
  if (s->batch > 65535) return "a local_batch above 65535";
  if (blocks > 65535) return "a seq_len above 8388480";
  if (s->seq_len >= (INT64_C(1) << 40) / row) return "a sample's Q, K and V of a TiB or more";
  if (s->batch >= (INT64_C(1) << 30) / (s->n_heads * blocks)) return "local_batch x n_heads x seq_len of 2^37 or more";
  return NULL;
}
