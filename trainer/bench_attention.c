/* bench attention: causal grouped-query attention of a configuration, both ways. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "trainer/bench.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/record.h"

struct attention {
  struct device *d;
  struct attention_shape shape;
  double roof; /* FLOP/s; 0: none is known */
  struct matrix qkv, d_qkv, out, d_out, lse;
};

static void forward(void *context) {
  struct attention *a = context;
  a->d->k->attention_forward(a->d, &a->out, a->lse.data, NULL, NULL, &a->qkv, NULL, NULL, &a->shape);
}

static void backward(void *context) {
  struct attention *a = context;
  a->d->k->attention_backward(a->d, &a->d_qkv, NULL, &a->d_out, NULL, &a->out, a->lse.data, &a->qkv, NULL, NULL, &a->shape);
}

/* Q K^T and P V; backward has five such products.  Counted are the pairs of causality,
 * S (S + 1) / 2 of a head, or the square of all, S^2. */
static const struct pass {
  const char *name;
  void (*launch)(void *context);
  double products;
} passes[] = {{"forward", forward, 2}, {"backward", backward, 5}};

static void row(const struct bench *b, const struct attention *a, const struct pass *pass, const struct bench_seconds *s) {
  const struct attention_shape *x = &a->shape;
  const double length = (double)x->seq_len, pair = pass->products * 2.0 * (double)x->batch * (double)x->n_heads * (double)x->head_dim;
  const double half = pair * length * (length + 1) / 2 / s->median, full = pair * length * length / s->median;
  const double tokens = (double)x->batch * length / s->median;
  const bool gpu = !a->d->k->host_memory;
  json_t *o = json_object();
  record_text(o, "pass", pass->name);
  record_integer(o, "batch", x->batch);
  record_integer(o, "seq_len", x->seq_len);
  record_integer(o, "n_heads", x->n_heads);
  record_integer(o, "n_kv_heads", x->n_kv_heads);
  record_integer(o, "head_dim", x->head_dim);
  record_text(o, "dtype", dtype_name(a->qkv.dtype));
  record_real(o, "flops_per_second", half);
  record_real(o, "flops_per_second_full_square", full);
  record_real(o, "tokens_per_second", tokens);
  record_real(o, "roof_flops_per_second", a->roof);
  char percent[2][16] = {"", ""};
  if (a->roof > 0) {
    snprintf(percent[0], sizeof percent[0], "%5.1f%%", 100 * half / a->roof);
    snprintf(percent[1], sizeof percent[1], "%5.1f%%", 100 * full / a->roof);
  }
  const double unit = gpu ? 1e-12 : 1e-9;
  bench_row(b, o, s, "%7" PRId64 "  %-8s  %10.3f ms  %9.1f  %6s  %9.1f  %6s  %12.0f tokens/s", x->seq_len, pass->name, s->median * 1e3, half * unit,
            percent[0], full * unit, percent[1], tokens);
}

/* The peak in the maker's data sheet for BF16 on a GPU; on the CPU its register loop. */
static void find_roof(const struct bench *b, struct attention *a) {
  const struct machine *gpu = machine_of_device(a->d);
  if (a->d->k->host_memory) {
    a->roof = cpu_peak_fma(a->d);
    bench_title(b, "roof: FP32 FMA loop in registers, %.1f GF/s", a->roof * 1e-9);
  } else if (gpu && a->qkv.dtype == DTYPE_BF16) {
    a->roof = gpu->bf16_flops;
    bench_title(b, "roof: %.5g TF/s, the dense BF16 peak of %s in its data sheet", a->roof * 1e-12, gpu->title);
  } else {
    bench_title(b, "roof: none is known");
  }
}

static void say_head(const struct bench *b, struct attention *a) {
  const struct attention_shape *x = &a->shape;
  char text[256];
  a->d->k->describe(a->d, text, sizeof text);
  bench_title(b, "backend %s: %s", a->d->k->backend, text);
  bench_title(b, "causal attention, %s: batch %" PRId64 ", %" PRId64 " heads, %" PRId64 " for keys and values, of %" PRId64,
              dtype_name(a->qkv.dtype), x->batch, x->n_heads, x->n_kv_heads, x->head_dim);
  find_roof(b, a);
  const char *unit = a->d->k->host_memory ? "GF/s" : "TF/s";
  bench_title(b, "half: the pairs of causality counted, S (S + 1) / 2; full: all S^2, of which the other half is never computed");
  bench_title(b, "  %7s  %-8s  %10s     %4s half  %6s  %4s full", "tokens", "", "", unit, "", unit);
}

static bool run(const struct bench *b, struct attention *a, struct error *e) {
  for (int i = 0; i < 2; i++) {
    struct bench_seconds s;
    if (!bench_measure_device(b, a->d, passes[i].launch, a, &s, e)) return false;
    row(b, a, &passes[i], &s);
  }
  return true;
}

/* The tensors of a length, while it is measured. */
static bool run_length(const struct bench *b, struct attention *a, enum dtype type, int64_t seq_len, struct error *e) {
  struct attention_shape *x = &a->shape;
  x->seq_len = seq_len;
  const int64_t tokens = x->batch * seq_len, wide = (x->n_heads + 2 * x->n_kv_heads) * x->head_dim, query = x->n_heads * x->head_dim;
  a->qkv = a->d_qkv = (struct matrix){NULL, type, tokens, wide};
  a->out = a->d_out = (struct matrix){NULL, type, tokens, query};
  a->lse = (struct matrix){NULL, DTYPE_F32, x->batch * x->n_heads, seq_len};
  struct matrix *all[] = {&a->qkv, &a->d_qkv, &a->out, &a->d_out, &a->lse};
  bool good = true;
  for (int i = 0; good && i < 5; i++) good = bench_random(a->d, all[i], (uint64_t)i, e);
  good = good && run(b, a, e);
  for (int i = 0; i < 5; i++)
    if (all[i]->data) a->d->k->release(a->d, all[i]->data);
  return good;
}

static bool parse_lengths(const struct bench *b, int64_t length[ARGUMENT_LIST], struct error *e) {
  const struct argument_list *l = &b->a.lengths;
  for (int i = 0; i < l->n; i++) {
    char rest;
    if (sscanf(l->item[i], "%" SCNd64 "%c", &length[i], &rest) != 1 || length[i] < 1 || length[i] > 1 << 24)
      return error_set(e, ERROR_USAGE, "bench attention: --seq-len '%.40s': a number of tokens from 1 to 16777216 is wanted", l->item[i]);
  }
  return true;
}

bool bench_attention(struct bench *b, struct error *e) {
  if (b->a.setup || b->a.distribution || b->a.shapes.n > 0 || b->a.seed >= 0 || b->a.queries > 0 || !isnan(b->a.scale)) {
    if (b->a.lengths.n == 0) return bench_attention_quality(b, e);
    return error_set(e, ERROR_USAGE, "bench attention: --seq-len is of its speed: --shape has the lengths of a set-up");
  }
  const struct extent x = b->config ? plan_extent(b->config)
                                    : (struct extent){.tokens = 2048, .head_chunk = 2048, .attention = {1, 2048, 8, 2, 64},
                                                      .hidden_size = 512, .ffn_size = 1024, .vocab_size = 512,
                                                      .attention_backward = DTYPE_BF16};
  int64_t length[ARGUMENT_LIST] = {x.attention.seq_len};
  const int n = b->a.lengths.n > 0 ? b->a.lengths.n : 1;
  if (!parse_lengths(b, length, e)) return false;
  struct extent each[ARGUMENT_LIST];
  for (int i = 0; i < n; i++) {
    each[i] = x;
    each[i].attention.seq_len = length[i];
    each[i].tokens = x.attention.batch * length[i];
    each[i].head_chunk = x.head_chunk < each[i].tokens ? x.head_chunk : each[i].tokens;
  }
  const enum dtype type = x.attention_backward;
  void *scratch;
  struct attention a = {.shape = x.attention, .qkv = {.dtype = type}};
  a.d = bench_device(b, each, n, &scratch, e);
  if (!a.d) return false;
  say_head(b, &a);
  bool good = true;
  for (int i = 0; good && i < n; i++) good = run_length(b, &a, type, length[i], e);
  bench_close(a.d, scratch);
  return good;
}
