/* What attention's forward and backward share: rows in and out of scratch. */
#include "kernels/cpu/attention.h"

#include "kernels/elementary.h"
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

void attention_require(const struct attention_layout *a, const struct matrix *qkv, const struct matrix *out) {
  const struct attention_shape *s = &a->shape;
  int64_t tokens = s->batch * s->seq_len;
  CPU_REQUIRE(qkv->rows == tokens && qkv->cols == (s->n_heads + 2 * s->n_kv_heads) * s->head_dim,
              "qkv must be [tokens, (n_heads + 2 n_kv_heads) * head_dim]");
  CPU_REQUIRE(out->rows == tokens && out->cols == s->n_heads * s->head_dim,
              "attention output must be [tokens, n_heads * head_dim]");
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

void attention_load(float *rows, const struct attention_layout *a, const struct matrix *m, int64_t first, int64_t n,
                    int64_t padded, int64_t col) {
  int64_t dim = a->shape.head_dim, from = first * m->cols + col;
  if (m->dtype == DTYPE_BF16)
    load_bf16(rows, a->ld, (const uint16_t *)m->data + from, m->cols, n, dim);
  else
    for (int64_t r = 0; r < n; r++) cpu_load(rows + r * a->ld, m, from + r * m->cols, dim);
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
