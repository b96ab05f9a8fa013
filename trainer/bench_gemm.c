/* bench gemm: the contractions of a model's linears, beside what the machine
 * can do. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "model/linears.h"
#include "trainer/bench.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/record.h"

/* out[m, n] = a[m, k] b[n, k]^T, each operand in a view of its source. */
struct product {
  const char *site, *pass, *route;
  int64_t m, n, k;
  struct encoding a, b;
  enum view view_a, view_b;
  enum dtype type;
  enum tensor tensor_a, tensor_b;
  int64_t arm; /* linear_arm */
};

struct run_of {
  struct device *d;
  struct matrix out, source[2];
  struct operand operand[2];
};

/* The roofs, FLOP/s. */
struct roofs {
  double fma;         /* register loop */
  double contraction; /* of BF16 operands at their best, where another unit than the FMA's serves them; else 0 */
  const struct machine *gpu; /* data-sheet peaks; NULL: the CPU, or a GPU that is not listed */
  double measured;           /* of BF16 operands on this GPU by others' programs; 0: not known */
};

static bool make_operand(struct run_of *r, int i, const struct product *p, struct error *e) {
  const struct encoding *encoding = i == 0 ? &p->a : &p->b;
  const enum view view = i == 0 ? p->view_a : p->view_b;
  const int64_t rows = i == 0 ? p->m : p->n, cols = p->k;
  struct device *d = r->d;
  struct matrix *source = &r->source[i];
  struct operand *o = &r->operand[i];
  *source = (struct matrix){.dtype = p->type, .rows = view == VIEW_ROW ? rows : cols, .cols = view == VIEW_ROW ? cols : rows};
  if (!bench_random(d, source, (uint64_t)(i + 1), e)) return false;
  *o = operand_of_matrix(source, view);
  if (encoding_is_plain(encoding)) return true;
  *o = (struct operand){.encoding = *encoding, .view = view, .rows = rows, .cols = cols};
  linear_set_outers(o, i == 0 ? p->tensor_a : p->tensor_b, p->arm);
  const size_t scales = (size_t)operand_scale_bytes(encoding, rows, cols), outer = (size_t)operand_outer_count(o) * sizeof(float);
  o->codes = d->k->allocate(d, (size_t)operand_code_bytes(encoding, rows, cols), e);
  if (scales) o->scales = d->k->allocate(d, scales, e);
  if (outer) o->outer = d->k->allocate(d, outer, e);
  if (!o->codes || (scales && !o->scales) || (outer && !o->outer)) return false;
  struct emission out = {.draw = {.seq_len = source->rows}};
  if (view == VIEW_ROW)
    out.row = o;
  else
    out.column = o;
  d->k->quantise(d, &out, source);
  return d->k->synchronize(d, e);
}

static void release(struct run_of *r) {
  for (int i = 0; i < 2; i++) {
    if (r->operand[i].codes && r->operand[i].codes != r->source[i].data) r->d->k->release(r->d, r->operand[i].codes);
    if (r->operand[i].scales) r->d->k->release(r->d, r->operand[i].scales);
    if (r->operand[i].outer) r->d->k->release(r->d, r->operand[i].outer);
    if (r->source[i].data) r->d->k->release(r->d, r->source[i].data);
  }
  if (r->out.data) r->d->k->release(r->d, r->out.data);
}

static void contract(void *context) {
  struct run_of *r = context;
  r->d->k->contract(r->d, &r->out, &r->operand[0], &r->operand[1], NULL);
}

static double flops(const struct product *p) { return 2.0 * (double)p->m * (double)p->n * (double)p->k; }

static double rate(const struct product *p, double seconds) { return flops(p) / seconds; }

static bool measure(const struct bench *b, struct device *d, const struct product *p, struct bench_seconds *s,
                    struct error *e) {
  struct run_of r = {.d = d, .out = {.dtype = p->type, .rows = p->m, .cols = p->n}};
  const bool good = bench_random(d, &r.out, 3, e) && make_operand(&r, 0, p, e) && make_operand(&r, 1, p, e) &&
                    bench_measure_device(b, d, contract, &r, s, e);
  release(&r);
  return good;
}

/* The peak of the GPU's maker, and what an 8192^3 product of random BF16 numbers by
 * PyTorch reached on an H200: 769 to 798 TFLOP/s. */
static void gpu_roofs(const struct bench *b, struct roofs *r, const struct device *d) {
  if (!(r->gpu = machine_of_device(d))) {
    bench_title(b, "roof: none is known of this GPU");
    return;
  }
  if (r->gpu == machine_named("h200")) r->measured = 790e12;
  bench_title(b, "roof: %s, %.0f TF/s of BF16, dense (data sheet)", r->gpu->title, r->gpu->bf16_flops * 1e-12);
  if (r->measured > 0) bench_title(b, "      in brackets: of %.0f TF/s, an 8192^3 product by PyTorch", r->measured * 1e-12);
}

/* AMX has no register loop of its own here: its roof is the contraction at its best. */
static bool find_roofs(const struct bench *b, struct device *d, struct roofs *r, struct error *e) {
  *r = (struct roofs){0};
  char text[256];
  d->k->describe(d, text, sizeof text);
  bench_title(b, "backend %s: %s", d->k->backend, text);
  if (strcmp(d->k->backend, "cpu") != 0) {
    gpu_roofs(b, r, d);
    return true;
  }
  r->fma = cpu_peak_fma(d);
  bench_title(b, "roof: FP32 FMA loop in registers, %.1f GF/s", r->fma * 1e-9);
  if (strcmp(cpu_isa_name(), "amx-bf16") != 0) return true;
  for (int64_t size = 512; size <= 2048; size *= 2) {
    const struct product p = {.m = size, .n = size, .k = size, .a = {.format = FORMAT_BF16}, .b = {.format = FORMAT_BF16},
                              .type = DTYPE_BF16};
    struct bench_seconds s;
    if (!measure(b, d, &p, &s, e)) return false;
    if (rate(&p, s.least) > r->contraction) r->contraction = rate(&p, s.least);
  }
  bench_title(b, "roof of operands exact in BF16 (amx-bf16): our contraction's best of 512^3, 1024^3 and 2048^3, %.1f GF/s",
              r->contraction * 1e-9);
  return true;
}

static bool row(const struct bench *b, struct device *d, const struct roofs *roofs, const struct product *p,
                struct error *e) {
  struct bench_seconds s;
  char words_a[ENCODING_TEXT], words_b[ENCODING_TEXT];
  if (!measure(b, d, p, &s, e)) return false;
  const bool bf16 = p->type == DTYPE_BF16, gpu = strcmp(d->k->backend, "cpu") != 0;
  const double roof = roofs->gpu && bf16 ? roofs->gpu->bf16_flops : roofs->contraction > 0 && bf16 ? roofs->contraction : roofs->fma;
  json_t *o = json_object();
  encoding_text(&p->a, words_a, sizeof words_a);
  encoding_text(&p->b, words_b, sizeof words_b);
  record_text(o, "route", p->route);
  record_text(o, "linear", p->site);
  record_text(o, "pass", p->pass);
  record_text(o, "a", words_a);
  record_text(o, "b", words_b);
  record_integer(o, "m", p->m);
  record_integer(o, "n", p->n);
  record_integer(o, "k", p->k);
  record_real(o, "flops_per_second", rate(p, s.median));
  record_text(o, "roof", roof == 0 ? "none" : roofs->gpu ? "gpu" : roof == roofs->fma ? "fma" : "contraction");
  record_real(o, "roof_flops_per_second", roof);
  char percent[40] = "";
  if (roof > 0) snprintf(percent, sizeof percent, "%5.1f%%", 100 * rate(p, s.median) / roof);
  if (roof > 0 && roofs->measured > 0) snprintf(percent, sizeof percent, "%5.1f%% (%.1f%%)", 100 * rate(p, s.median) / roof, 100 * rate(p, s.median) / roofs->measured);
  bench_row(b, o, &s, "%-8s %-6s %6" PRId64 " %6" PRId64 " %6" PRId64 "  %9.3f ms  %9.1f %s  %s  %s x %s", p->site, p->pass, p->m, p->n,
            p->k, s.median * 1e3, rate(p, s.median) * (gpu ? 1e-12 : 1e-9), gpu ? "TF/s" : "GF/s", percent, words_a, words_b);
  return true;
}

/* The three contractions of a linear under a route. */
static int products_of(const struct route *r, const struct extent *x, enum linear_site site, struct product out[3]) {
  const struct encoding *o = route_linear(r, 0, site)->operand;
  const struct linear_shape w = linear_shape(x, site);
  const int64_t arm = linear_arm(x, site);
  const enum dtype type = r->activations;
  out[0] = (struct product){linear_name(site), "fprop", r->name, x->tokens, w.n, w.k, o[FPROP_X], o[FPROP_W], VIEW_ROW, VIEW_ROW, type, TENSOR_X, TENSOR_W, arm};
  out[1] = (struct product){linear_name(site), "dgrad", r->name, x->tokens, w.k, w.n, o[DGRAD_DY], o[DGRAD_W], VIEW_ROW, VIEW_COLUMN, type, TENSOR_DY, TENSOR_W, arm};
  out[2] = (struct product){linear_name(site), "wgrad", r->name, w.n, w.k, x->tokens, o[WGRAD_DY], o[WGRAD_X], VIEW_COLUMN, VIEW_COLUMN, type, TENSOR_DY, TENSOR_X, arm};
  return 3;
}

static bool parse_shape(const char *text, struct product *p, struct error *e) {
  char rest;
  if (sscanf(text, "%" SCNd64 ",%" SCNd64 ",%" SCNd64 "%c", &p->m, &p->n, &p->k, &rest) == 3 && p->m > 0 && p->n > 0 && p->k > 0 &&
      p->m <= 1 << 20 && p->n <= 1 << 20 && p->k <= 1 << 20)
    return true;
  return error_set(e, ERROR_USAGE, "bench gemm: --shape '%.40s': three numbers M,N,K from 1 to 1048576 are wanted", text);
}

/* Packed operands have whole blocks. */
static bool fits(const struct product *p, struct error *e) {
  const struct encoding *both[] = {&p->a, &p->b};
  const int64_t rows[] = {p->m, p->n};
  for (int i = 0; i < 2; i++) {
    const int block = block_size(both[i]->block);
    const bool square = block_is_2d(both[i]->block) || (i == 0 ? p->view_a : p->view_b) == VIEW_COLUMN;
    if (block > 1 && (p->k % block != 0 || (square && rows[i] % block != 0)))
      return error_set(e, ERROR_USAGE, "bench gemm: %" PRId64 " x %" PRId64 " is not made of whole blocks of %d", rows[i], p->k, block);
  }
  return true;
}

static bool run_routes(const struct bench *b, struct device *d, const struct extent *x, const struct roofs *roofs, struct error *e) {
  static const char *const usual[] = {"bf16", "mxfp4-row-sr"}, *const squares[] = {"256,256,256", "1024,1024,1024", "2048,2048,2048"};
  const struct argument_list *l = &b->a.routes, *s = &b->a.shapes;
  const int n_usual = strcmp(d->k->backend, "cpu") == 0 ? 2 : 1; /* GPUs: plain operands */
  for (int i = 0; i < (l->n ? l->n : n_usual); i++) {
    struct route r;
    if (!route_named(l->n ? l->item[i] : usual[i], b->config ? (int)b->config->model.shape.n_layers : 8, &r, e)) return false;
    for (int i_role = 0; i_role < LINEAR_SITES * OPERAND_ROLE_COUNT; i_role++) {
      const int role = i_role % OPERAND_ROLE_COUNT;
      const struct encoding *encoding = &route_linear(&r, 0, (enum linear_site)(i_role / OPERAND_ROLE_COUNT))->operand[role];
      const char *why = d->k->refuse_encoding(d, encoding, operand_role_view((enum operand_role)role));
      if (why) return error_set(e, ERROR_DEVICE, "bench gemm: route %s: %s", r.name, why);
    }
    bench_title(b, "\nroute %s\n  %-8s %-6s %6s %6s %6s", r.name, "linear", "", "M", "N", "K");
    if (b->config && s->n == 0) {
      for (int site = 0; site < LINEAR_SITES; site++) {
        struct product p[3];
        const int n = products_of(&r, x, (enum linear_site)site, p);
        for (int j = 0; j < n; j++)
          if (!fits(&p[j], e) || !row(b, d, roofs, &p[j], e)) return false;
      }
      continue;
    }
    for (int j = 0; j < (s->n ? s->n : 3); j++) {
      const struct encoding *o = route_linear(&r, 0, LINEAR_QKV)->operand;
      struct product p = {"-", "fprop", r.name, 0, 0, 0, o[FPROP_X], o[FPROP_W], VIEW_ROW, VIEW_ROW, r.activations, TENSOR_X, TENSOR_W, 0};
      if (!parse_shape(s->n ? s->item[j] : squares[j], &p, e) || !fits(&p, e) || !row(b, d, roofs, &p, e)) return false;
    }
  }
  return true;
}

bool bench_gemm(struct bench *b, struct error *e) {
  struct extent x = b->config ? plan_extent(b->config)
                              : (struct extent){.tokens = 2048, .head_chunk = 2048, .attention = {1, 2048, 16, 16, 128},
                                                .hidden_size = 2048, .ffn_size = 4096, .vocab_size = 2048};
  void *scratch;
  x.attention_backward = 0;
  struct device *d = bench_device(b, &x, 1, &scratch, e);
  if (!d) return false;
  struct roofs roofs;
  const bool good = find_roofs(b, d, &roofs, e) && run_routes(b, d, &x, &roofs, e);
  bench_close(d, scratch);
  return good;
}
