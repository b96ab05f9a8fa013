/* A case of attention in any formats: inputs, payloads, results, from
 * boundary (2) to d_qkv.  Inputs are those of tests/oracle/attention_lowp.py. */
#ifndef FP4D_TESTS_CPU_ATTENTION_CASE_H
#define FP4D_TESTS_CPU_ATTENTION_CASE_H

#include "kernels/attention.h"
#include "kernels/cpu/attention.h"
#include "tests/cpu_device.h"

struct attention_case {
  struct attention_shape s;
  struct attention_payload payload;
  struct attention_gradient gradient;
  bool coded; /* dO is */
  struct matrix qkv, out, d_out, d_qkv;
  int32_t *starts; /* NULL: whole samples */
  float *lse, max_logit;
  struct quantise_counts counts[ATTENTION_TENSORS];
  struct cpu_device d;
};

static inline int64_t case_tokens(const struct attention_case *c) { return c->s.batch * c->s.seq_len; }

/* Twice the sum of the eight 16-bit halves of a draw, less its mean, scaled: standard deviation nearly 1. */
static inline double case_bell(int64_t i, uint32_t stream) {
  struct philox_block w = philox4x32_10(0x51A27153u, (struct philox_block){{(uint32_t)i, stream, 0, 0}});
  int64_t sum = 0;
  for (int j = 0; j < 4; j++) sum += (int64_t)(w.word[j] & 0xFFFFu) + (int64_t)(w.word[j] >> 16);
  return (double)(2 * sum - 8 * 65535) * 9.344e-6;
}

/* BF16 q, k, v, of which k grows by `steep` a token, and dO times `gradient`. */
static inline void case_fill(struct attention_case *c, double steep, double gradient) {
  int64_t q = c->s.n_heads * c->s.head_dim, k = c->s.n_kv_heads * c->s.head_dim, cols = c->qkv.cols;
  for (int64_t i = 0; i < c->qkv.rows * cols; i++) {
    double factor = i % cols >= q && i % cols < q + k ? 1 + steep * (double)(i / cols % c->s.seq_len) : 1;
    test_set(&c->qkv, i, case_bell(i, 21) * factor);
  }
  for (int64_t i = 0; i < c->d_out.rows * q; i++) test_set(&c->d_out, i, case_bell(i, 22) * gradient);
}

/* Memory is full of what must not matter. */
static inline void *case_memory(int64_t bytes) { return memset(test_memory((size_t)bytes), 0xA5, (size_t)bytes); }

/* Documents: in a thousand tokens, `rate` begin one, as a stream of draws says. */
static inline void case_documents(struct attention_case *c, int rate, uint32_t stream) {
  c->starts = case_memory(case_tokens(c) * 4);
  for (int64_t t = 0; t < case_tokens(c); t++) {
    int64_t i = t % c->s.seq_len;
    uint32_t word = philox4x32_10(0x51A27153u, (struct philox_block){{(uint32_t)t, stream, 0, 0}}).word[0];
    c->starts[t] = (int)(word % 1000) < rate ? (int32_t)i : i > 0 ? c->starts[t - 1] : 0;
  }
}

static inline struct attention_case *case_new(struct attention_shape s, struct attention_formats f, int threads) {
  struct error e;
  struct attention_case *c = test_memory(sizeof *c);
  *c = (struct attention_case){.s = s, .payload = {.formats = f}, .coded = !attention_format_plain(f.d_out), .max_logit = -F32_INFINITY};
  int64_t n = case_tokens(c), q = s.n_heads * s.head_dim, cols = q + 2 * s.n_kv_heads * s.head_dim;
  c->qkv = test_matrix(DTYPE_BF16, n, cols);
  c->d_qkv = test_matrix(DTYPE_BF16, n, cols);
  c->out = test_matrix(DTYPE_BF16, n, q);
  c->d_out = test_matrix(DTYPE_BF16, n, q);
  c->lse = case_memory(n * s.n_heads * 4);
  for (int v = 0; v < ATTENTION_VIEWS; v++) {
    int64_t bytes = attention_view_bytes(&f, &s, true, (enum attention_view)v);
    if (bytes > 0) c->payload.view[v] = case_memory(bytes);
  }
  c->gradient = (struct attention_gradient){case_memory(n * q), case_memory(s.batch * s.n_kv_heads * 4),
                                            case_memory(n * s.n_heads * 4), case_memory(n * s.n_heads * 4)};
  struct extent x = {.attention = s, .tokens = n, .hidden_size = 1};
  c->d.threads = threads_create(threads, &e);
  if (!c->d.threads) exit(1);
  int64_t attention = cpu_attention_scratch_bytes(&x, threads), producer = cpu_producer_scratch_bytes(&x, threads);
  c->d.scratch_bytes = attention > producer ? attention : producer;
  c->d.scratch = aligned_alloc(256, (size_t)(c->d.scratch_bytes + 255) / 256 * 256);
  if (!c->d.scratch) exit(1);
  return c;
}

static inline void case_free(struct attention_case *c) {
  void *all[] = {c->qkv.data, c->d_qkv.data, c->out.data, c->d_out.data, c->lse, c->starts, c->gradient.codes, c->gradient.lift,
                 c->gradient.d_stat, c->gradient.l_stat, c->d.scratch};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  for (int v = 0; v < ATTENTION_VIEWS; v++) free(c->payload.view[v]);
  threads_destroy(c->d.threads);
  free(c);
}

static inline struct device *case_device(struct attention_case *c) {
  memset(c->d.scratch, 0xFF, (size_t)c->d.scratch_bytes); /* NaN */
  return &c->d.device;
}

/* Boundary (2) without its rotation (which would make a NaN of an infinity), and attention. */
static inline void case_forward(struct attention_case *c) {
  if (!attention_plain(&c->payload.formats)) attention_publish(case_device(c), &c->payload, c->counts, &c->qkv, &c->s);
  cpu_attention_forward(case_device(c), &c->out, c->lse, &c->max_logit, c->counts, &c->qkv, &c->payload, c->starts, &c->s);
}

static inline void case_gradient(struct attention_case *c) {
  if (c->coded)
    cpu_attention_gradient(case_device(c), &c->gradient, c->counts, &c->d_out, &c->out, c->lse, &c->payload.formats, &c->s);
}

static inline void case_backward(struct attention_case *c) {
  cpu_attention_backward(case_device(c), &c->d_qkv, c->counts, &c->d_out, c->coded ? &c->gradient : NULL, &c->out, c->lse,
                         &c->qkv, &c->payload, c->starts, &c->s);
}

static inline void case_run(struct attention_case *c) {
  case_forward(c);
  case_gradient(c);
  case_backward(c);
}

#endif
