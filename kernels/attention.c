/* Extents of what attention's boundary publishes. */
#include "base/checked.h"
#include "kernels/kernels.h"

static int64_t scale_bytes(int64_t rows, int64_t scale_cols) { return round_up(rows, 128) * round_up(scale_cols, 4); }

int64_t attention_view_bytes(const struct attention_formats *f, const struct attention_shape *s, bool training,
                             enum attention_view view) {
  const bool gradients = training && !attention_format_plain(f->d_out); /* through E4M3 operands */
  const bool q8 = f->qk == FORMAT_E4M3 || gradients, v8 = f->pv == FORMAT_E4M3 || gradients;
  const bool q4 = f->qk == FORMAT_NVFP4, v4 = f->pv == FORMAT_MXFP4;
  const int64_t tokens = s->batch * s->seq_len, q = s->n_heads * s->head_dim, k = s->n_kv_heads * s->head_dim;
  const int64_t blocks = ceil_div(s->seq_len, 32);
  switch (view) {
    case ATTENTION_Q4: return q4 ? tokens * (q / 2) : 0;
    case ATTENTION_K4: return q4 ? tokens * (k / 2) : 0;
    case ATTENTION_Q4_SCALES: return q4 ? scale_bytes(tokens, q / 16) : 0;
    case ATTENTION_K4_SCALES: return q4 ? scale_bytes(tokens, k / 16) : 0;
    case ATTENTION_V4: return v4 ? s->batch * k * blocks * 16 : 0;
    case ATTENTION_V4_SCALES: return v4 ? s->batch * scale_bytes(k, blocks) : 0;
    case ATTENTION_Q8: return q8 ? tokens * q : 0;
    case ATTENTION_K8: return q8 ? tokens * k : 0;
    case ATTENTION_V8: return v8 ? tokens * k : 0;
    case ATTENTION_VIEWS: break;
  }
  return 0;
}
