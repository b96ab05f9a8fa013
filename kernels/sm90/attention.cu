/* Which attention sm90 runs: its own kernels' for what they take, else that of
 * kernels/cuda without tensor cores. */
#include "kernels/sm90/attention.h"

extern "C" void sm90_choose_attention_forward(struct device *d, struct matrix *out, float *lse, float *max_logit,
                                              struct quantise_counts *counts, const struct matrix *qkv,
                                              const struct attention_payload *payload, const int32_t *starts,
                                              const struct attention_shape *s) {
  if (sm90_attention_takes(s, qkv->dtype)) sm90_attention_forward(d, out, lse, max_logit, counts, qkv, payload, starts, s);
  else cuda_attention_forward(d, out, lse, max_logit, counts, qkv, payload, starts, s);
}

extern "C" void sm90_choose_attention_backward(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts,
                                               const struct matrix *d_out, const struct attention_gradient *g, const struct matrix *out,
                                               const float *lse, const struct matrix *qkv, const struct attention_payload *payload,
                                               const int32_t *starts, const struct attention_shape *s) {
  if (sm90_attention_takes(s, qkv->dtype)) sm90_attention_backward(d, d_qkv, counts, d_out, g, out, lse, qkv, payload, starts, s);
  else cuda_attention_backward(d, d_qkv, counts, d_out, g, out, lse, qkv, payload, starts, s);
}

extern "C" void sm90_choose_attention_rope_backward(struct device *d, struct matrix *d_qkv, const struct matrix *d_out, const struct matrix *out,
                                                    const float *lse, const struct matrix *qkv, const float *cos_sin, const int32_t *starts,
                                                    const struct attention_shape *s) {
  if (sm90_attention_takes(s, qkv->dtype)) return sm90_attention_rope_backward(d, d_qkv, d_out, out, lse, qkv, cos_sin, starts, s);
  cuda_attention_backward(d, d_qkv, NULL, d_out, NULL, out, lse, qkv, NULL, starts, s);
  struct emission in_place = {};
  in_place.plain = d_qkv;
  cuda_rope_backward(d, &in_place, d_qkv, cos_sin, s);
}
