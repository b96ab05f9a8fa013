/* bench attention: causal grouped-query attention of a configuration, both ways. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "trainer/bench.h"
#include "trainer/plan.h"
#include "trainer/record.h"

struct attention {
  struct device *d;
  struct attention_shape shape;
  struct matrix qkv, d_qkv, out, d_out, lse;
};

static bool forward(void *context, struct error *e) {
  struct attention *a = context;
  a->d->k->attention_forward(a->d, &a->out, a->lse.data, NULL, NULL, &a->qkv, NULL, NULL, &a->shape);
  return a->d->k->synchronize(a->d, e);
}

static bool backward(void *context, struct error *e) {
  struct attention *a = context;
  a->d->k->attention_backward(a->d, &a->d_qkv, NULL, &a->d_out, NULL, &a->out, a->lse.data, &a->qkv, NULL, NULL, &a->shape);
  return a->d->k->synchronize(a->d, e);
}

static void row(const struct bench *b, const struct attention *a, const char *pass, double flops, double roof,
                const struct bench_seconds *s) {
  const struct attention_shape *x = &a->shape;
  json_t *o = json_object();
  record_text(o, "pass", pass);
  record_integer(o, "batch", x->batch);
  record_integer(o, "seq_len", x->seq_len);
  record_integer(o, "n_heads", x->n_heads);
  record_integer(o, "n_kv_heads", x->n_kv_heads);
  record_integer(o, "head_dim", x->head_dim);
  record_text(o, "dtype", dtype_name(a->qkv.dtype));
  record_real(o, "flops_per_second", flops / s->median);
  record_real(o, "tokens_per_second", (double)(x->batch * x->seq_len) / s->median);
  record_real(o, "roof_flops_per_second", roof);
  char percent[16] = "";
  if (roof > 0) snprintf(percent, sizeof percent, "%5.1f%%", 100 * flops / s->median / roof);
  bench_row(b, o, s, "%-8s  %10.3f ms  %9.1f GF/s  %s  %12.0f tokens/s", pass, s->median * 1e3, flops / s->median * 1e-9, percent,
            (double)(x->batch * x->seq_len) / s->median);
}

static bool run(const struct bench *b, struct attention *a, struct error *e) {
  const struct attention_shape *x = &a->shape;
  struct bench_seconds s;
  struct matrix *all[] = {&a->qkv, &a->d_qkv, &a->out, &a->d_out, &a->lse};
  for (int i = 0; i < 5; i++)
    if (!bench_random(a->d, all[i], (uint64_t)i, e)) return false;
  /* Q K^T and P V over the causal half; backward has five such products. */
  const double pair = 2.0 * (double)x->batch * (double)x->n_heads * (double)x->seq_len * (double)(x->seq_len + 1) / 2 * (double)x->head_dim;
  const double roof = strcmp(a->d->k->backend, "cpu") == 0 ? cpu_peak_fma(a->d) : 0;
  char text[256];
  a->d->k->describe(a->d, text, sizeof text);
  bench_title(b, "backend %s: %s", a->d->k->backend, text);
  bench_title(b, "causal attention, %s: batch %" PRId64 ", %" PRId64 " tokens, %" PRId64 " heads, %" PRId64 " for keys and values, of %" PRId64,
              dtype_name(a->qkv.dtype), x->batch, x->seq_len, x->n_heads, x->n_kv_heads, x->head_dim);
  if (roof > 0) bench_title(b, "roof: FP32 FMA loop in registers, %.1f GF/s", roof * 1e-9);
  if (!bench_measure(b, 0, forward, a, &s, e)) return false;
  row(b, a, "forward", 2 * pair, roof, &s);
  if (!bench_measure(b, 0, backward, a, &s, e)) return false;
  row(b, a, "backward", 5 * pair, roof, &s);
  return true;
}

bool bench_attention(struct bench *b, struct error *e) {
  if (b->a.setup || b->a.distribution || b->a.shapes.n > 0 || b->a.seed >= 0 || b->a.queries > 0 || !isnan(b->a.scale)) return bench_attention_quality(b, e);
  const struct extent x = b->config ? plan_extent(b->config)
                                    : (struct extent){.tokens = 2048, .head_chunk = 2048, .attention = {1, 2048, 8, 2, 64},
                                                      .hidden_size = 512, .ffn_size = 1024, .vocab_size = 512};
  const struct attention_shape *s = &x.attention;
  const enum dtype type = b->config ? b->config->route.activations : DTYPE_BF16;
  const int64_t wide = (s->n_heads + 2 * s->n_kv_heads) * s->head_dim, query = s->n_heads * s->head_dim;
  void *scratch;
  struct attention a = {.shape = *s,
                        .qkv = {NULL, type, x.tokens, wide},
                        .d_qkv = {NULL, type, x.tokens, wide},
                        .out = {NULL, type, x.tokens, query},
                        .d_out = {NULL, type, x.tokens, query},
                        .lse = {NULL, DTYPE_F32, s->batch * s->n_heads, s->seq_len}};
  a.d = bench_device(b, &x, &scratch, e);
  if (!a.d) return false;
  const bool good = run(b, &a, e);
  struct matrix *all[] = {&a.qkv, &a.d_qkv, &a.out, &a.d_out, &a.lse};
  for (int i = 0; i < 5; i++)
    if (all[i]->data) a.d->k->release(a.d, all[i]->data);
  bench_close(a.d, scratch);
  return good;
}
