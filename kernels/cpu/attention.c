/* What attention's forward and backward share: rows in and out of scratch. */
#include "kernels/cpu/attention.h"

#include "kernels/attention.h"
#include "kernels/formats.h"

struct attention_layout attention_layout(const struct attention_shape *s) {
  CPU_REQUIRE(s->batch > 0 && s->seq_len > 0 && s->head_dim > 0 && s->n_kv_heads > 0, "attention extents must be positive");
  CPU_REQUIRE(s->n_heads % s->n_kv_heads == 0 && s->n_heads > 0, "n_heads must be a multiple of n_kv_heads");
  struct attention_layout a = {.shape = *s, .group = s->n_heads / s->n_kv_heads};
  a.cols = round_up(s->head_dim, ATTENTION_BLOCK);
  a.ld = a.cols + 16;
  a.transposed = round_up(s->head_dim, 4) * ATTENTION_BLOCK;
  a.scale = 1.0f / f32_sqrt((float)s->head_dim);
  a.kappa = a.scale * ATTENTION_LOG2_E;
  return a;
}

struct attention_source attention_codes(const struct attention_layout *a, const struct attention_payload *payload,
                                        enum attention_view view) {
  int64_t heads = view == ATTENTION_Q8 ? a->shape.n_heads : a->shape.n_kv_heads;
  return (struct attention_source){.kind = SOURCE_E4M3, .codes = payload->view[view], .factor = 1.0f,
                                   .cols = heads * a->shape.head_dim};
}

struct attention_sources attention_sources(const struct attention_layout *a, const struct matrix *qkv,
                                           const struct attention_payload *payload) {
  struct attention_sources x = {.q = {.plain = qkv, .col0 = attention_q_col(a, 0)},
                                .k = {.plain = qkv, .col0 = attention_k_col(a, 0)},
                                .v = {.plain = qkv, .col0 = attention_v_col(a, 0)}};
  if (!payload) return x;
  int64_t q_cols = a->shape.n_heads * a->shape.head_dim, k_cols = a->shape.n_kv_heads * a->shape.head_dim;
  uint8_t *const *view = payload->view;
  if (payload->formats.qk == FORMAT_NVFP4) {
    x.q = (struct attention_source){SOURCE_NVFP4, NULL, view[ATTENTION_Q4], view[ATTENTION_Q4_SCALES], 0, q_cols, 1.0f};
    x.k = (struct attention_source){SOURCE_NVFP4, NULL, view[ATTENTION_K4], view[ATTENTION_K4_SCALES], 0, k_cols, 1.0f};
  } else if (payload->formats.qk == FORMAT_E4M3) {
    x.q = attention_codes(a, payload, ATTENTION_Q8);
    x.k = attention_codes(a, payload, ATTENTION_K8);
    x.q.factor = x.k.factor = 1.0f / ATTENTION_LIFT;
  }
  if (payload->formats.pv == FORMAT_MXFP4) {
    x.v = (struct attention_source){SOURCE_MXFP4, NULL, view[ATTENTION_V4], view[ATTENTION_V4_SCALES], 0, k_cols, 1.0f};
  } else if (payload->formats.pv == FORMAT_E4M3) {
    x.v = attention_codes(a, payload, ATTENTION_V8);
    x.v.factor = 1.0f / ATTENTION_LIFT;
  }
  return x;
}

CPU_CLONES float attention_dot(const float *x, const float *y, int64_t n) {
  enum { W = ATTENTION_BLOCK };
  float sum[W] = {0};
  for (int64_t d = 0; d < n; d += W)
    for (int64_t l = 0; l < (n - d < W ? n - d : W); l++) sum[l] = f32_fma(x[d + l], y[d + l], sum[l]);
  for (int half = W / 2; half > 0; half /= 2)
    for (int l = 0; l < half; l++) sum[l] = sum[l] + sum[l + half];
  return sum[0];
}

void attention_require(const struct attention_layout *a, const struct matrix *qkv, const struct matrix *out,
                       const int32_t *starts) {
  const struct attention_shape *s = &a->shape;
  int64_t tokens = s->batch * s->seq_len;
  CPU_REQUIRE(qkv->rows == tokens && qkv->cols == (s->n_heads + 2 * s->n_kv_heads) * s->head_dim,
              "qkv must be [tokens, (n_heads + 2 n_kv_heads) * head_dim]");
  CPU_REQUIRE(out->rows == tokens && out->cols == s->n_heads * s->head_dim,
              "attention output must be [tokens, n_heads * head_dim]");
  for (int64_t t = 0; starts && t < tokens; t++) {
    int64_t i = t % s->seq_len, least = i > 0 ? starts[t - 1] : 0;
    CPU_REQUIRE(starts[t] >= least && starts[t] <= i, "a document must begin at its tokens or before, and none before the last");
  }
}

/* n rows of `dim` BF16 elements, `stride` apart. A row's successors are fetched
 * ahead: they lie too far apart for hardware to foresee. */
static CPU_CLONES void load_bf16(float *restrict rows, int64_t ld, const uint16_t *restrict bits, int64_t stride,
                                 int64_t n, int64_t dim) {
  enum { AHEAD = 8, LINE = 32 };
  for (int64_t r = 0; r < n; r++) {
    if (r + AHEAD < n)
      for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(bits + (r + AHEAD) * stride + d);
    for (int64_t d = 0; d < dim; d++) rows[r * ld + d] = bf16_decode(bits[r * stride + d]);
  }
}

static void load_plain(float *rows, const struct attention_layout *a, const struct matrix *m, int64_t first, int64_t n,
                       int64_t col) {
  int64_t dim = a->shape.head_dim, from = first * m->cols + col;
  if (m->dtype == DTYPE_BF16)
    load_bf16(rows, a->ld, (const uint16_t *)m->data + from, m->cols, n, dim);
  else
    for (int64_t r = 0; r < n; r++) cpu_load(rows + r * a->ld, m, from + r * m->cols, dim);
}

static CPU_CLONES void load_fp8(float *restrict rows, int64_t ld, const uint8_t *restrict codes, int64_t stride,
                                int64_t n, int64_t dim, float factor, bool e5m2) {
  for (int64_t r = 0; r < n; r++) {
    const uint8_t *code = codes + r * stride;
    if (e5m2)
      for (int64_t d = 0; d < dim; d++) rows[r * ld + d] = e5m2_decode(code[d]) * factor;
    else
      for (int64_t d = 0; d < dim; d++) rows[r * ld + d] = e4m3_decode(code[d]) * factor;
  }
}

/* Codes first, then their scales: loops that end with a block are not vectorised.
 * `first` counts rows of the whole tensor: scales lie in tiles of it. */
static CPU_CLONES void load_nvfp4(float *restrict rows, int64_t ld, const struct attention_source *x, int64_t first,
                                  int64_t n, int64_t dim, int64_t col) {
  enum { K16 = ATTENTION_K16 };
  for (int64_t r = 0; r < n; r++) {
    const uint8_t *restrict code = x->codes + (first + r) * (x->cols / 2) + col / 2;
    float *restrict row = rows + r * ld;
    for (int64_t i = 0; i < dim / 2; i++) {
      row[2 * i] = e2m1_decode(code[i]);
      row[2 * i + 1] = e2m1_decode((uint32_t)code[i] >> 4);
    }
    for (int64_t b = 0; b < dim / K16; b++) {
      float scale = e4m3_decode(x->scales[operand_scale_offset(first + r, col / K16 + b, x->cols / K16)]);
      for (int i = 0; i < K16; i++) row[b * K16 + i] = row[b * K16 + i] * scale;
    }
  }
}

/* Codes stand by feature. */
static CPU_CLONES void load_mxfp4(float *restrict rows, const struct attention_layout *a,
                                  const struct attention_source *x, int64_t first, int64_t n, int64_t col) {
  enum { MX = ATTENTION_MX };
  const struct attention_shape *s = &a->shape;
  int64_t blocks = ceil_div(s->seq_len, MX), sample = first / s->seq_len, token = first % s->seq_len;
  const uint8_t *codes = x->codes + (sample * x->cols + col) * blocks * (MX / 2);
  const uint8_t *scales = x->scales + sample * round_up(x->cols, 128) * round_up(blocks, 4);
  for (int64_t d = 0; d < s->head_dim; d++)
    for (int64_t b = 0; b * MX < n; b++) {
      int64_t block = token / MX + b, most = n - b * MX < MX ? n - b * MX : MX;
      const uint8_t *code = codes + (d * blocks + block) * (MX / 2);
      uint32_t byte = scales[operand_scale_offset(col + d, block, blocks)];
      for (int64_t t = 0; t < most; t++)
        rows[(b * MX + t) * a->ld + d] = mxfp4_decode((uint32_t)code[t / 2] >> 4 * (t % 2), byte) * x->factor;
    }
}

void attention_load(float *rows, const struct attention_layout *a, const struct attention_source *x, int64_t first,
                    int64_t n, int64_t padded, int64_t head) {
  int64_t dim = a->shape.head_dim, col = head * dim, from = first * x->cols + col;
  switch (x->kind) {
    case SOURCE_PLAIN: load_plain(rows, a, x->plain, first, n, x->col0 + col); break;
    case SOURCE_E4M3:
    case SOURCE_E5M2: load_fp8(rows, a->ld, x->codes + from, x->cols, n, dim, x->factor, x->kind == SOURCE_E5M2); break;
    case SOURCE_NVFP4: load_nvfp4(rows, a->ld, x, first, n, dim, col); break;
    case SOURCE_MXFP4: load_mxfp4(rows, a, x, first, n, col); break;
  }
  for (int64_t r = 0; r < padded; r++)
    for (int64_t d = r < n ? dim : 0; d < a->cols; d++) rows[r * a->ld + d] = 0.0f;
}

static CPU_CLONES void scale_row(float *row, int64_t n, float factor) {
  for (int64_t d = 0; d < n; d++) row[d] = row[d] * factor;
}

void attention_store(struct matrix *m, const struct attention_layout *a, int64_t first, int64_t n, int64_t col,
                     float *rows, float factor) {
  for (int64_t r = 0; r < n; r++) {
    float *row = rows + r * a->ld;
    if (factor != 1.0f) scale_row(row, a->shape.head_dim, factor);
    cpu_store(m, (first + r) * m->cols + col, row, a->shape.head_dim);
  }
}

typedef float lane4 __attribute__((vector_size(16)));

void attention_transpose(float *to, const struct attention_layout *a, const float *rows) {
  for (int64_t d = 0; d < a->shape.head_dim; d += 4)
    for (int64_t r = 0; r < ATTENTION_BLOCK; r += 4) {
      lane4 row[4], column[4];
      for (int i = 0; i < 4; i++) memcpy(&row[i], rows + (r + i) * a->ld + d, sizeof row[i]);
      lane4 low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
      lane4 low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
      lane4 high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
      lane4 high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
      column[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
      column[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
      column[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
      column[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
      for (int i = 0; i < 4; i++) memcpy(to + (d + i) * ATTENTION_BLOCK + r, &column[i], sizeof column[i]);
    }
}

int64_t cpu_attention_scratch_bytes(const struct extent *x, int threads) {
  struct attention_layout a = attention_layout(&x->attention);
  int64_t forward = attention_forward_bytes(&a, threads), backward = attention_backward_bytes(&a, threads);
  return forward > backward ? forward : backward;
}
