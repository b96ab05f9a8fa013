/* The definition of Direct-P (kernels/direct_p.h): its sums and their order.
 *
 * Query head h reads kv head h / group.  There is no mask; keys beyond the last do not
 * exist.  All values are FP32; sums run in the order written.
 *
 *   kappa = log2(e) / sqrt(head_dim)
 *   s_ij  = +0;  d ascending: fma(q_id, k_jd, s_ij)          q, k: code * scale, exactly
 *   a_i   = 0, or the largest s_ij of the anchor (a NaN is larger than anything)
 *   t_ij  = fma(s_ij - a_i, kappa, -margin)
 *   O_d = +0, L = +0;  keys in groups of 64 from key 0, two blocks of 32 each:
 *     blocks ascending:  L = L + scale * (c / 6)
 *     g_d = +0;  j ascending: g_d = fma(code_j * scale, v_jd, g_d)    v: code * scale, six times V
 *     O_d = O_d + g_d
 *   L is NaN where it is infinite: an output that is finite would be 0
 *   out_id = (O_d / L) * (1 / 36)
 *   lse_i  = ((fma(a_i, kappa, margin) + log2 L) + lift) * ln 2
 *
 * Only the group of 64 is visible in the bits: it is one contraction of the tensor cores,
 * whose accumulator takes group after group.
 */
#ifndef FP4D_KERNELS_CPU_DIRECT_P_H
#define FP4D_KERNELS_CPU_DIRECT_P_H

#include "kernels/cpu/attention.h"
#include "kernels/direct_p.h"

/* What a head publishes as P, where it is wanted: a code in a byte. */
struct direct_p_publication {
  uint8_t *codes;  /* [queries][keys] */
  uint8_t *scales; /* [queries][ceil(keys / 32)] */
};

/* One head, decoded.  Rows of `ld` floats, of which `cols`, a multiple of 32, are read;
 * those from head_dim on are 0. */
struct direct_p_head {
  int64_t queries, keys, head_dim, cols, ld;
  const float *q, *k, *v; /* v: six times the values */
};

int64_t direct_p_head_bytes(const struct direct_p_head *h, int threads);
/* out[queries][head_dim], lse[queries]; `scratch`: direct_p_head_bytes, 64-byte aligned. */
void direct_p_head(struct threads *threads, float *out, float *lse, const struct direct_p_publication *p,
                   const struct direct_p_head *h, const struct direct_p *rule, void *scratch);

int64_t direct_p_bytes(const struct attention_shape *s, int threads);
/* All heads of a payload with the views Q4, K4 and V4.  out [tokens, n_heads * head_dim],
 * lse [batch, n_heads, seq_len]; `scratch`: direct_p_bytes, 64-byte aligned. */
void cpu_direct_p(struct device *d, struct matrix *out, float *lse, const struct attention_payload *payload,
                  const struct direct_p *rule, const struct attention_shape *s, void *scratch);

#endif
