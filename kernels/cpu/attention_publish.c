/* What attention's boundaries publish: views of the rotated qkv (2), and of dO.
 *
 * A task is 32 tokens of a sample, so that blocks of V lie in one.
 */
#include "kernels/attention.h"
#include "kernels/cpu/attention.h"

enum { TOKENS = ATTENTION_MX, K16 = ATTENTION_K16, FEATURES = 64 };

static uint32_t magnitude(uint32_t bits) { return bits & 0x7FFFu; }

/* ---- rows ------------------------------------------------------------------ */

ATTENTION_INLINE void byte_row(uint8_t *restrict code, const uint16_t *restrict bits, int64_t n, float lift,
                               struct quantise_counts *counts, uint32_t (*encode)(float, float), float most) {
  uint32_t saturated = 0, underflowed = 0;
  for (int64_t i = 0; i < n; i++) {
    float x = bf16_decode(bits[i]);
    uint32_t c = encode(x, lift);
    code[i] = (uint8_t)c;
    saturated += f32_bits(x * lift) << 1 > f32_bits(most) << 1;
    underflowed += (c & 0x7Fu) == 0u && magnitude(bits[i]) != 0u;
  }
  counts->elements += n;
  counts->saturated += saturated;
  counts->underflowed += underflowed;
}

static CPU_CLONES void e4m3_row(uint8_t *restrict code, const uint16_t *restrict bits, int64_t n, float lift,
                                struct quantise_counts *counts) {
  byte_row(code, bits, n, lift, counts, attention_e4m3, 448.0f);
}

static CPU_CLONES void e5m2_row(uint8_t *restrict code, const uint16_t *restrict bits, int64_t n, float lift,
                                struct quantise_counts *counts) {
  byte_row(code, bits, n, lift, counts, attention_e5m2, 57344.0f);
}

static uint32_t largest(const uint16_t *bits, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) most = magnitude(bits[i]) > most ? magnitude(bits[i]) : most;
  return most;
}

/* Row `row` of a view in K16 blocks. */
static CPU_CLONES void k16_row(uint8_t *restrict codes, uint8_t *restrict scales, int64_t row,
                               const uint16_t *restrict bits, int64_t n, struct quantise_counts *counts) {
  uint32_t saturated = 0, underflowed = 0;
  uint8_t *out = codes + row * (n / 2);
  for (int64_t b = 0; b < n / K16; b++) {
    const uint16_t *x = bits + b * K16;
    uint32_t scale = attention_k16_scale(largest(x, K16)), code[K16];
    float factor = attention_k16_factor(scale);
    for (int i = 0; i < K16; i++) {
      float z = bf16_decode(x[i]) * factor;
      code[i] = e2m1_encode(z);
      saturated += f32_bits(z) << 1 > f32_bits(6.0f) << 1;
      underflowed += (code[i] & 7u) == 0u && (x[i] & 0x7FFFu) != 0u;
    }
    for (int i = 0; i < K16 / 2; i++) out[b * (K16 / 2) + i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
    scales[operand_scale_offset(row, b, n / K16)] = (uint8_t)scale;
    counts->blocks++;
    counts->zero_blocks += scale == 0u;
  }
  counts->elements += n;
  counts->saturated += saturated;
  counts->underflowed += underflowed;
}

/* ---- V by features --------------------------------------------------------- */

/* Codes and scales of `tokens` <= 32 rows, `stride` apart, of `n` <= FEATURES features. */
static CPU_CLONES void mx_columns(uint8_t code[TOKENS][FEATURES], uint8_t *restrict scale,
                                  const uint16_t *restrict bits, int64_t stride, int64_t tokens, int64_t n,
                                  struct quantise_counts *counts) {
  uint32_t amax[FEATURES] = {0}, saturated = 0, underflowed = 0;
  float factor[FEATURES];
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t f = 0; f < n; f++) {
      uint32_t a = bits[t * stride + f] & 0x7FFFu;
      amax[f] = a > amax[f] ? a : amax[f];
    }
  for (int64_t f = 0; f < n; f++) {
    uint32_t s = attention_v_scale(amax[f]);
    scale[f] = (uint8_t)s;
    factor[f] = s == 0u ? 0.0f : mxfp4_coefficient(s);
    counts->zero_blocks += s == 0u;
  }
  memset(code, 0, TOKENS * FEATURES);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t f = 0; f < n; f++) {
      uint16_t x = bits[t * stride + f];
      float z = bf16_decode(x) * factor[f];
      uint32_t c = e2m1_encode(z);
      code[t][f] = (uint8_t)c;
      saturated += f32_bits(z) << 1 > f32_bits(6.0f) << 1;
      underflowed += (c & 7u) == 0u && (x & 0x7FFFu) != 0u;
    }
  counts->elements += tokens * n;
  counts->blocks += n;
  counts->saturated += saturated;
  counts->underflowed += underflowed;
}

static void mx_block(const struct attention_payload *p, const struct attention_shape *s, int64_t sample, int64_t block,
                     const uint16_t *bits, int64_t stride, int64_t tokens, struct quantise_counts *counts) {
  int64_t features = s->n_kv_heads * s->head_dim, blocks = ceil_div(s->seq_len, TOKENS);
  uint8_t *codes = p->view[ATTENTION_V4] + sample * features * blocks * (TOKENS / 2) + block * (TOKENS / 2);
  uint8_t *scales = p->view[ATTENTION_V4_SCALES] + sample * attention_view_bytes(&p->formats, s, false, ATTENTION_V4_SCALES) / s->batch;
  for (int64_t first = 0; first < features; first += FEATURES) {
    int64_t n = features - first < FEATURES ? features - first : FEATURES;
    uint8_t code[TOKENS][FEATURES], scale[FEATURES];
    mx_columns(code, scale, bits + first, stride, tokens, n, counts);
    for (int64_t f = 0; f < n; f++) {
      uint8_t *out = codes + (first + f) * blocks * (TOKENS / 2);
      for (int t = 0; t < TOKENS; t += 2) out[t / 2] = (uint8_t)(code[t][f] | code[t + 1][f] << 4);
      scales[operand_scale_offset(first + f, block, blocks)] = scale[f];
    }
  }
}

/* ---- boundary (2) ----------------------------------------------------------- */

struct publication {
  const struct attention_payload *payload;
  const struct attention_shape *shape;
  const struct matrix *qkv;
  struct quantise_counts *counts;
};

static void add_counts(struct quantise_counts *to, const struct quantise_counts *from) {
  for (int t = 0; to && t < ATTENTION_TENSORS; t++)
    if (from[t].elements > 0) cpu_counts_add(&to[t], &from[t]);
}

static void publish_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct publication *p = context;
  const struct attention_shape *s = p->shape;
  uint8_t *const *view = p->payload->view;
  int64_t blocks = ceil_div(s->seq_len, TOKENS), sample = index / blocks, block = index % blocks;
  int64_t tokens = s->seq_len - block * TOKENS < TOKENS ? s->seq_len - block * TOKENS : TOKENS;
  int64_t row0 = sample * s->seq_len + block * TOKENS, cols = p->qkv->cols;
  int64_t q = s->n_heads * s->head_dim, k = s->n_kv_heads * s->head_dim;
  struct quantise_counts counts[ATTENTION_TENSORS] = {{0}};
  for (int64_t t = row0; t < row0 + tokens; t++) {
    const uint16_t *bits = (const uint16_t *)p->qkv->data + t * cols;
    if (view[ATTENTION_Q4]) k16_row(view[ATTENTION_Q4], view[ATTENTION_Q4_SCALES], t, bits, q, &counts[ATTENTION_Q]);
    if (view[ATTENTION_K4]) k16_row(view[ATTENTION_K4], view[ATTENTION_K4_SCALES], t, bits + q, k, &counts[ATTENTION_K]);
    if (view[ATTENTION_Q8]) e4m3_row(view[ATTENTION_Q8] + t * q, bits, q, ATTENTION_LIFT, &counts[ATTENTION_Q]);
    if (view[ATTENTION_K8]) e4m3_row(view[ATTENTION_K8] + t * k, bits + q, k, ATTENTION_LIFT, &counts[ATTENTION_K]);
    if (view[ATTENTION_V8]) e4m3_row(view[ATTENTION_V8] + t * k, bits + q + k, k, ATTENTION_LIFT, &counts[ATTENTION_V]);
  }
  if (view[ATTENTION_V4])
    mx_block(p->payload, s, sample, block, (const uint16_t *)p->qkv->data + row0 * cols + q + k, cols, tokens,
             &counts[ATTENTION_V]);
  add_counts(p->counts, counts);
}

void attention_publish(struct device *d, const struct attention_payload *payload, struct quantise_counts *counts,
                       const struct matrix *qkv, const struct attention_shape *s) {
  static const enum attention_view scales[] = {ATTENTION_Q4_SCALES, ATTENTION_K4_SCALES, ATTENTION_V4_SCALES};
  CPU_REQUIRE(qkv->dtype == DTYPE_BF16, "codes are made of BF16");
  CPU_REQUIRE(payload->formats.qk != FORMAT_NVFP4 || s->head_dim % K16 == 0, "K16 blocks end with a head");
  for (int i = 0; i < 3; i++) /* their padding is zero */
    if (payload->view[scales[i]])
      memset(payload->view[scales[i]], 0, (size_t)attention_view_bytes(&payload->formats, s, false, scales[i]));
  struct publication p = {.payload = payload, .shape = s, .qkv = qkv, .counts = counts};
  threads_run(cpu_of(d)->threads, s->batch * ceil_div(s->seq_len, TOKENS), publish_task, &p);
}

/* ---- dO ---------------------------------------------------------------------- */

struct gradient {
  struct attention_layout layout;
  const struct attention_gradient *g;
  const struct attention_formats *formats;
  const struct matrix *d_out, *out;
  const float *lse;
  struct quantise_counts *counts;
  char *desks;
  int64_t desk_bytes;
};

static const uint16_t *d_out_bits(const struct gradient *x, int64_t token, int64_t kv_head) {
  return (const uint16_t *)x->d_out->data + token * x->d_out->cols + attention_q_col(&x->layout, kv_head * x->layout.group);
}

/* The lift of a sample's kv head. */
static void lift_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct gradient *x = context;
  const struct attention_shape *s = &x->layout.shape;
  int64_t sample = index / s->n_kv_heads, kv_head = index % s->n_kv_heads;
  uint32_t amax = 0;
  for (int64_t i = 0; i < s->seq_len; i++) {
    uint32_t a = largest(d_out_bits(x, sample * s->seq_len + i, kv_head), x->layout.group * s->head_dim);
    amax = a > amax ? a : amax;
  }
  float given = x->formats->d_out_lift, own = attention_d_out_lift(amax);
  x->g->lift[index] = given > 0.0f && attention_finite(own) ? given : own;
}

static CPU_CLONES void decode_row(float *restrict value, const uint8_t *restrict code, int64_t n, bool e5m2) {
  if (e5m2)
    for (int64_t i = 0; i < n; i++) value[i] = e5m2_decode(code[i]);
  else
    for (int64_t i = 0; i < n; i++) value[i] = e4m3_decode(code[i]);
}

/* Codes and statistics of 32 tokens. */
static void gradient_task(void *context, int64_t index, int worker) {
  const struct gradient *x = context;
  const struct attention_shape *s = &x->layout.shape;
  const bool e5m2 = x->formats->d_out == FORMAT_E5M2;
  int64_t tokens = s->batch * s->seq_len, cols = s->n_heads * s->head_dim, wide = x->layout.group * s->head_dim;
  float *codes = (float *)(void *)(x->desks + worker * x->desk_bytes), *out = codes + cols;
  struct quantise_counts counts[ATTENTION_TENSORS] = {{0}}, *own = &counts[ATTENTION_DO];
  for (int64_t t = index * TOKENS; t < (index + 1) * TOKENS && t < tokens; t++) {
    int64_t sample = t / s->seq_len, position = t % s->seq_len;
    uint8_t *row = x->g->codes + t * cols;
    for (int64_t g = 0; g < s->n_kv_heads; g++) {
      const uint16_t *bits = d_out_bits(x, t, g);
      float lift = x->g->lift[sample * s->n_kv_heads + g] * ATTENTION_LIFT, amax = bf16_decode((uint16_t)largest(bits, wide));
      (e5m2 ? e5m2_row : e4m3_row)(row + g * wide, bits, wide, lift, own);
      if (attention_finite(amax) && amax > own->amax) own->amax = amax;
    }
    decode_row(codes, row, cols, e5m2);
    cpu_load(out, x->out, t * cols, cols);
    for (int64_t h = 0; h < s->n_heads; h++) {
      int64_t at = (sample * s->n_heads + h) * s->seq_len + position;
      x->g->d_stat[at] = attention_d_stat(attention_dot(codes + h * s->head_dim, out + h * s->head_dim, s->head_dim));
      x->g->l_stat[at] = attention_l_stat(x->lse[at]);
    }
  }
  add_counts(x->counts, counts);
}

void cpu_attention_gradient(struct device *d, const struct attention_gradient *g, struct quantise_counts *counts,
                            const struct matrix *d_out, const struct matrix *out, const float *lse,
                            const struct attention_formats *formats, const struct attention_shape *s) {
  struct cpu_device *cpu = cpu_of(d);
  struct gradient x = {.layout = attention_layout(s), .g = g, .formats = formats, .d_out = d_out, .out = out,
                       .lse = lse, .counts = counts, .desks = cpu->scratch};
  int64_t tokens = s->batch * s->seq_len, cols = s->n_heads * s->head_dim;
  CPU_REQUIRE(formats->d_out == FORMAT_E5M2 || formats->d_out == FORMAT_E4M3, "dO has codes");
  CPU_REQUIRE(d_out->dtype == DTYPE_BF16 && d_out->rows == tokens && d_out->cols == cols && out->rows == tokens &&
              out->cols == cols, "dO must be BF16, [tokens, n_heads * head_dim] as the output");
  x.desk_bytes = round_up(2 * cols * (int64_t)sizeof(float), 64);
  CPU_REQUIRE(cpu->scratch_bytes >= threads_count(cpu->threads) * x.desk_bytes, "scratch too small for dO's codes");
  threads_run(cpu->threads, s->batch * s->n_kv_heads, lift_task, &x);
  threads_run(cpu->threads, ceil_div(tokens, TOKENS), gradient_task, &x);
}
