/* bench attention --setup: error of attention's formats against FP64, as a table. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/elementary.h"
#include "trainer/attention_quality.h"
#include "trainer/bench.h"
#include "trainer/findings.h"
#include "trainer/machine.h"
#include "trainer/record.h"
#include "trainer/table.h"

/* ---- set-ups ----------------------------------------------------------------------------- */

static const struct p_format exact = {"fp64", P_EXACT, P_MAXIMUM, 0, 0, false, P_FAST},
                             e4m3 = {"e4m3", P_E4M3, P_MAXIMUM, 0, 0, false, P_FAST},
                             mxfp4 = {"mxfp4", P_MXFP4, P_MAXIMUM, 32, 0, false, P_FAST},
                             fast = {"direct-p fast", P_DIRECT, P_NONE, 32, 0, true, P_FAST},
                             accurate = {"direct-p accurate", P_DIRECT, P_NONE, 32, 0, true, P_ACCURATE},
                             guarded = {"direct-p guarded", P_DIRECT, P_NONE, 32, 0, true, P_GUARDED},
                             stabilised = {"nvfp4 G=448", P_NVFP4, P_MAXIMUM, 16, 448, false, P_FAST},
                             shiftless = {"nvfp4 shiftless", P_NVFP4, P_NONE, 16, 1, true, P_FAST},
                             sum_g1 = {"nvfp4 G=1", P_NVFP4, P_NORMALISED, 32, 1, false, P_FAST},
                             sum_g448 = {"nvfp4 G=448", P_NVFP4, P_NORMALISED, 32, 448, false, P_FAST},
                             sum_mxfp4 = {"mxfp4", P_MXFP4, P_NORMALISED, 32, 0, false, P_FAST};

/* Formats of the causal operator of training. */
static const struct attention_formats training[] = {
    {.qk = FORMAT_BF16, .pv = FORMAT_BF16},
    {.qk = FORMAT_E4M3, .pv = FORMAT_E4M3},
    {.qk = FORMAT_NVFP4, .pv = FORMAT_E4M3},
    {.qk = FORMAT_NVFP4, .pv = FORMAT_MXFP4},
    {.qk = FORMAT_NVFP4, .pv = FORMAT_MXFP4, .p_slope = 1.5f, .p_offset = 1.2f},
};

enum { ROWS = 16, TRAINING = sizeof training / sizeof *training };

static const struct setup {
  const char *name;
  int rows;
  bool training; /* the backend's causal rows follow */
  struct attention_row row[ROWS];
  int shapes;
  int64_t shape[3][4]; /* when none is given: seq_len, heads, head_dim, batch */
} setups[] = {
    {"formats", 11, true,
     {{TENSOR_BF16, TENSOR_BF16, &exact}, {TENSOR_E4M3, TENSOR_E4M3, &e4m3}, {TENSOR_NVFP4, TENSOR_BF16, &exact},
      {TENSOR_BF16, TENSOR_E4M3, &e4m3}, {TENSOR_BF16, TENSOR_MXFP4, &mxfp4}, {TENSOR_NVFP4, TENSOR_E4M3, &e4m3},
      {TENSOR_NVFP4, TENSOR_MXFP4, &mxfp4}, {TENSOR_NVFP4, TENSOR_MXFP4, &accurate}, {TENSOR_NVFP4, TENSOR_MXFP4, &fast},
      {TENSOR_MXFP4, TENSOR_MXFP4, &fast}, {TENSOR_NVFP4, TENSOR_NVFP4, &stabilised}},
     1, {{1024, 2, 128, 1}}},
    {"training", 0, true, {{0}}, 1, {{1024, 2, 128, 1}}},
    {"table-3", 3, false,
     {{TENSOR_BF16, TENSOR_BF16, &sum_g1}, {TENSOR_BF16, TENSOR_BF16, &sum_g448}, {TENSOR_BF16, TENSOR_BF16, &sum_mxfp4}},
     3, {{1024, 2, 128, 1}, {4096, 2, 128, 1}, {8192, 2, 128, 1}}},
    {"appendix-d", 10, false,
     {{TENSOR_NVFP4, TENSOR_E4M3, &e4m3}, {TENSOR_NVFP4, TENSOR_NVFP4, &stabilised}, {TENSOR_NVFP4, TENSOR_NVFP4, &shiftless},
      {TENSOR_MXFP4, TENSOR_NVFP4, &shiftless}, {TENSOR_NVFP4, TENSOR_MXFP4, &accurate}, {TENSOR_NVFP4, TENSOR_MXFP4, &fast},
      {TENSOR_NVFP4, TENSOR_MXFP4, &guarded}, {TENSOR_NVFP4_64, TENSOR_MXFP4, &accurate}, {TENSOR_NVFP4_64, TENSOR_MXFP4, &fast}, {TENSOR_MXFP4, TENSOR_MXFP4, &fast}},
     1, {{1024, 4, 128, 1}}},
};
enum { SETUPS = sizeof setups / sizeof *setups };

/* ---- rows ---------------------------------------------------------------------------------- */

struct names {
  const char *qk, *p, *v, *mask, *by;
};

static double share(double part, double of) { return of > 0 ? part / of : 0; }

static void add_row(const struct bench *b, struct table *t, const struct setup *s, const struct attention_inputs *x,
                    const struct names *n, const struct attention_measure *m) {
  const double zero_scale = share((double)m->p.zero_blocks, (double)m->p.blocks), lost = share(m->lost, (double)m->queries);
  const double zero_payload = share((double)m->p.zero_codes, (double)m->p.codes), rmse = sqrt(share(m->out.error, (double)m->numbers));
  const double cosine = m->out.own > 0 ? quality_cosine(&m->out) : F64_NAN; /* no number is finite */
  const bool blocks = m->p.blocks > 0, codes = m->p.codes > 0, p = m->queries > 0;
  table_add(t, "%s", n->qk), table_add(t, "%s", n->p), table_add(t, "%s", n->v);
  table_add(t, "%.6f", cosine), table_add(t, "%.6f", quality_relative(&m->out)), table_add(t, "%.6f", rmse);
  table_add(t, blocks ? "%.5f" : "-", zero_scale), table_add(t, codes ? "%.5f" : "-", zero_payload);
  table_add(t, p ? "%.5f" : "-", lost), table_add(t, p ? "%.4f" : "-", quality_relative(&m->p_error));
  table_add(t, "%" PRId64, m->nonfinite), table_add(t, "%s", n->by);
  if (!b->a.json) return;
  json_t *o = json_object();
  record_text(o, "setup", s->name);
  record_text(o, "mask", n->mask);
  record_text(o, "by", n->by);
  record_text(o, "qk", n->qk), record_text(o, "p", n->p), record_text(o, "v", n->v);
  record_integer(o, "seq_len", x->seq_len), record_integer(o, "heads", x->heads);
  record_integer(o, "head_dim", x->head_dim), record_integer(o, "batch", x->batch);
  record_integer(o, "queries", x->queries);
  record_text(o, "distribution", input_distributions[x->distribution]);
  record_real(o, "scale", x->scale);
  record_integer(o, "seed", (int64_t)x->seed);
  record_real(o, "cosine", cosine);
  record_real(o, "relative_l2", quality_relative(&m->out));
  record_real(o, "rmse", rmse);
  if (blocks) record_real(o, "zero_scale_fraction", zero_scale);
  if (codes) record_real(o, "zero_payload_fraction", zero_payload);
  if (p) record_real(o, "lost_mass", lost), record_real(o, "p_relative_l2", quality_relative(&m->p_error));
  record_integer(o, "nonfinite", m->nonfinite);
  bench_row(b, o, NULL, "%s", "");
}

static struct table head(void) {
  static const char *const names[] = {"q, k", "P", "v", "cosine", "rel. L2", "RMSE", "zero scales", "zero codes", "lost mass", "P rel. L2", "non-finite", "by"};
  struct table t = table_new(12);
  for (int i = 0; i < 12; i++) table_add(&t, "%s", names[i]);
  return t;
}

static bool show(const struct bench *b, struct table *t, struct error *e) {
  const bool good = !t->failed || error_set(e, ERROR_SYSTEM, "no memory for a table");
  if (good && !b->a.json) table_print(t, stdout, false);
  table_free(t);
  return good;
}

static bool no_memory(const struct attention_inputs *x, struct error *e) {
  return error_set(e, ERROR_SYSTEM, "no memory for heads of [%" PRId64 ", %" PRId64 "]", x->seq_len, x->head_dim);
}

/* ---- without a mask ------------------------------------------------------------------------- */

static bool run_rows(const struct bench *b, const struct setup *s, const struct attention_inputs *x, struct threads *threads, struct error *e) {
  struct attention_measure measure[ROWS] = {0};
  for (int64_t h = 0; h < x->batch * x->heads; h++)
    if (!attention_measure(measure, s->row, s->rows, x, h, threads)) return no_memory(x, e);
  struct table t = head();
  for (int r = 0; r < s->rows; r++) {
    const struct attention_row *row = &s->row[r];
    const struct names n = {tensor_format_names[row->qk], row->p->name, tensor_format_names[row->v], "none",
                            row->p->kind == P_DIRECT ? "cpu" : "fp64 of codes"};
    add_row(b, &t, s, x, &n, &measure[r]);
  }
  return show(b, &t, e);
}

/* ---- the backend's causal attention ----------------------------------------------------------- */

struct causal {
  struct device *d;
  struct attention_shape shape;
  struct matrix qkv, out;
  float *lse, *cos_sin;
  struct attention_payload payload;
  uint16_t *host; /* qkv, then out */
  double *exact, *row;
};

static const char *format_word(enum format f) {
  return f == FORMAT_E4M3 ? "e4m3" : f == FORMAT_NVFP4 ? "nvfp4" : f == FORMAT_MXFP4 ? "mxfp4" : "bf16";
}

static void *device_room(struct causal *c, int64_t bytes, bool *good, struct error *e) {
  if (!*good || bytes == 0) return NULL;
  void *p = c->d->k->allocate(c->d, (size_t)bytes, e);
  *good = p != NULL;
  return p;
}

/* Q, K, V of every head as one matrix on the device, and the identity as rotation. */
static bool upload(struct causal *c, const struct attention_inputs *x, struct error *e) {
  const int64_t dim = x->head_dim, wide = 3 * x->heads * dim, angles = x->seq_len * dim;
  float *values = malloc((size_t)(x->seq_len * dim) * sizeof *values), *identity = malloc((size_t)angles * sizeof *identity);
  bool good = values && identity;
  for (int64_t i = 0; good && i < angles; i++) identity[i] = i % 2 ? 0.0f : 1.0f;
  for (int64_t h = 0; good && h < x->batch * x->heads; h++)
    for (int tensor = 0; tensor < 3; tensor++) {
      attention_input(values, x, h, tensor);
      for (int64_t t = 0; t < x->seq_len; t++)
        for (int64_t d = 0; d < dim; d++)
          c->host[(h / x->heads * x->seq_len + t) * wide + (tensor * x->heads + h % x->heads) * dim + d] = bf16_encode(values[t * dim + d]);
    }
  if (good) {
    c->d->k->upload(c->d, c->qkv.data, c->host, (size_t)(c->qkv.rows * wide) * sizeof *c->host);
    c->d->k->upload(c->d, c->cos_sin, identity, (size_t)angles * sizeof *identity);
  }
  free(values);
  const bool done = good ? c->d->k->synchronize(c->d, e) : no_memory(x, e);
  free(identity);
  return done;
}

static const char *refused(const struct causal *c, const struct attention_formats *f) {
  const char *why = NULL;
  if (!attention_format_plain(f->qk)) why = c->d->k->refuse_attention(c->d, f, ATTENTION_PART_QK, &c->shape);
  if (!why && !attention_format_plain(f->pv)) why = c->d->k->refuse_attention(c->d, f, ATTENTION_PART_PV, &c->shape);
  return why;
}

static bool run_operator(struct causal *c, const struct attention_formats *f, struct quantise_counts *counts, struct error *e) {
  const struct kernels *k = c->d->k;
  bool good = true;
  c->payload = (struct attention_payload){.formats = *f};
  for (int i = 0; i < ATTENTION_VIEWS; i++)
    c->payload.view[i] = device_room(c, attention_view_bytes(f, &c->shape, false, (enum attention_view)i), &good, e);
  if (good) {
    k->rope_forward(c->d, &c->qkv, &c->payload, NULL, c->cos_sin, &c->shape);
    k->attention_forward(c->d, &c->out, c->lse, NULL, counts, &c->qkv, attention_plain(f) ? NULL : &c->payload, NULL, &c->shape);
    k->download(c->d, c->host, c->out.data, (size_t)(c->out.rows * c->out.cols) * sizeof *c->host);
    good = k->synchronize(c->d, e);
  }
  for (int i = 0; i < ATTENTION_VIEWS; i++)
    if (c->payload.view[i]) k->release(c->d, c->payload.view[i]);
  return good;
}

static bool run_format(const struct bench *b, struct causal *c, struct table *t, const struct setup *s, const struct attention_inputs *x,
                       const struct attention_formats *f, struct error *e) {
  struct attention_measure m = {0};
  struct quantise_counts counts[ATTENTION_TENSORS] = {{0}};
  const int64_t each = x->queries * x->head_dim;
  if (!run_operator(c, f, counts, e)) return false;
  for (int64_t h = 0; h < x->batch * x->heads; h++)
    for (int64_t i = 0; i < x->queries; i++) {
      const int64_t token = h / x->heads * x->seq_len + i * x->seq_len / x->queries;
      const uint16_t *at = c->host + token * c->out.cols + h % x->heads * x->head_dim;
      for (int64_t d = 0; d < x->head_dim; d++) c->row[d] = (double)bf16_decode(at[d]);
      attention_measure_out(&m, c->row, c->exact + h * each + i * x->head_dim, x->head_dim);
    }
  const struct quantise_counts *p = &counts[ATTENTION_P];
  m.p = (struct p_counts){p->blocks, p->zero_blocks, p->elements, p->underflowed};
  const struct names n = {format_word(f->qk), f->p_slope > 0 ? "mxfp4 affine" : format_word(f->pv), format_word(f->pv), "causal", c->d->k->backend};
  add_row(b, t, s, x, &n, &m);
  return true;
}

static bool run_training(const struct bench *b, const struct setup *s, const struct attention_inputs *x, struct error *e) {
  const int64_t tokens = x->batch * x->seq_len, query = x->heads * x->head_dim;
  const struct attention_shape shape = {x->batch, x->seq_len, x->heads, x->heads, x->head_dim};
  const struct extent extent = {.tokens = tokens, .head_chunk = tokens, .attention = shape, .hidden_size = query, .ffn_size = query, .vocab_size = 32};
  struct causal c = {.shape = shape, .qkv = {NULL, DTYPE_BF16, tokens, 3 * query}, .out = {NULL, DTYPE_BF16, tokens, query}};
  const int64_t each = x->queries * x->head_dim;
  void *scratch;
  c.d = bench_device(b, &extent, 1, &scratch, e);
  if (!c.d) return false;
  bool good = true;
  c.qkv.data = device_room(&c, tokens * 3 * query * 2, &good, e);
  c.out.data = device_room(&c, tokens * query * 2, &good, e);
  c.lse = device_room(&c, tokens * x->heads * 4, &good, e);
  c.cos_sin = device_room(&c, x->seq_len * x->head_dim * 4, &good, e);
  c.host = malloc((size_t)(tokens * 3 * query) * sizeof *c.host);
  c.exact = malloc((size_t)(x->batch * x->heads * each) * sizeof *c.exact);
  c.row = malloc((size_t)x->head_dim * sizeof *c.row);
  if (good && !(c.host && c.exact && c.row)) good = no_memory(x, e);
  for (int64_t h = 0; good && h < x->batch * x->heads; h++)
    good = attention_causal(c.exact + h * each, x, h) || no_memory(x, e);
  good = good && upload(&c, x, e);
  bench_title(b, "causal, the operator of training (backend %s):", c.d->k->backend);
  struct table t = head();
  for (int i = 0; good && i < TRAINING; i++) {
    const char *why = refused(&c, &training[i]);
    if (why)
      bench_title(b, "  %s, %s: not by this backend: %s", format_word(training[i].qk), format_word(training[i].pv), why);
    else
      good = run_format(b, &c, &t, s, x, &training[i], e);
  }
  if (good)
    good = show(b, &t, e);
  else
    table_free(&t);
  void *device[] = {c.qkv.data, c.out.data, c.lse, c.cos_sin};
  for (int i = 0; i < 4; i++)
    if (device[i]) c.d->k->release(c.d, device[i]);
  bench_close(c.d, scratch);
  free(c.host), free(c.exact), free(c.row);
  return good;
}

/* ---- arguments ---------------------------------------------------------------------------------- */

/* Digits at *at, which passes them; 0 where there are none, and at most 2^30. */
static int64_t take_number(const char **at) {
  const int64_t most = 1 << 30;
  int64_t value = 0;
  for (; **at >= '0' && **at <= '9'; (*at)++) value = value * 10 + (**at - '0') < most ? value * 10 + (**at - '0') : most;
  return value;
}

static bool take_shape(const char *text, struct attention_inputs *x, struct error *e) {
  int64_t *const number[] = {&x->seq_len, &x->heads, &x->head_dim, &x->batch};
  char shown[QUOTED];
  const char *at = text;
  int n = 0;
  x->batch = 1;
  do {
    at += n > 0;
    *number[n] = take_number(&at);
  } while (*number[n++] > 0 && *at == ',' && n < 4);
  const bool good = n >= 3 && *at == 0 && *number[n - 1] > 0;
  if (!good) return error_set(e, ERROR_USAGE, "--shape %s: SEQ_LEN,HEADS,HEAD_DIM or with ,BATCH are wanted", text_quote(text, shown));
  if (x->seq_len > 1 << 20 || x->heads * x->batch > 1 << 12 || x->head_dim > 1 << 10)
    return error_set(e, ERROR_USAGE, "--shape %s: at most 1048576 tokens, 4096 heads in all and a head_dim of 1024", text_quote(text, shown));
  if (x->head_dim % 16 != 0) return error_set(e, ERROR_USAGE, "--shape %s: head_dim is not made of whole blocks of 16", text_quote(text, shown));
  return true;
}

static bool take_names(const struct bench *b, const struct setup **s, struct attention_inputs *x, struct error *e) {
  const char *setup = b->a.setup ? b->a.setup : setups[0].name, *distribution = b->a.distribution ? b->a.distribution : "normal";
  char shown[QUOTED];
  int i = 0, d = 0;
  while (i < SETUPS && strcmp(setups[i].name, setup) != 0) i++;
  if (i == SETUPS) return error_set(e, ERROR_USAGE, "--setup %s: there are formats, training, table-3 and appendix-d", text_quote(setup, shown));
  while (input_distributions[d] && strcmp(input_distributions[d], distribution) != 0) d++;
  if (!input_distributions[d])
    return error_set(e, ERROR_USAGE, "--distribution %s: there are normal, student-t and outlier-channels", text_quote(distribution, shown));
  *s = &setups[i];
  x->distribution = (unsigned)d;
  x->scale = isnan(b->a.scale) ? 1 : b->a.scale;
  x->seed = b->a.seed < 0 ? 1 : (uint64_t)b->a.seed;
  return true;
}

/* Memory that is promised but not there ends the process without a word. */
static bool fits(const struct setup *s, const struct attention_inputs *x, struct threads *threads, struct error *e) {
  const int64_t numbers = x->batch * x->heads * x->head_dim; /* of a token's Q, K or V */
  const int64_t whole = s->training ? numbers * (14 * x->seq_len + 8 * x->queries) : 0; /* qkv, out, both on the host, exact */
  const int64_t need = whole + attention_measure_bytes(x, threads_count(threads)), have = machine_memory();
  if (need <= have) return true;
  return error_set(e, ERROR_SYSTEM,
                   "%" PRId64 " tokens, batch %" PRId64 ", %" PRId64 " heads of %" PRId64 " need %.1f GB of memory, this machine has %.1f GB",
                   x->seq_len, x->batch, x->heads, x->head_dim, (double)need * 1e-9, (double)have * 1e-9);
}

static bool run_shape(const struct bench *b, const struct setup *s, struct attention_inputs *x, struct threads *threads, struct error *e) {
  const int64_t most = b->a.queries > 0 ? b->a.queries : 256;
  x->queries = x->seq_len < most ? x->seq_len : most;
  bench_title(b, "%s: %" PRId64 " tokens, batch %" PRId64 ", %" PRId64 " heads of %" PRId64 ", %s x %g, seed %" PRIu64 ", %" PRId64 " queries of a head; against FP64",
              s->name, x->seq_len, x->batch, x->heads, x->head_dim, input_distributions[x->distribution], x->scale, x->seed, x->queries);
  if (!fits(s, x, threads, e)) return false;
  return (s->rows == 0 || run_rows(b, s, x, threads, e)) && (!s->training || run_training(b, s, x, e));
}

bool bench_attention_quality(struct bench *b, struct error *e) {
  const struct setup *s = setups;
  struct attention_inputs x = {0};
  if (b->a.config) return error_set(e, ERROR_USAGE, "bench attention: a set-up has shapes of its own, or --shape, not a CONFIG's");
  if (!take_names(b, &s, &x, e)) return false;
  struct attention_inputs shape[ARGUMENT_LIST];
  int n = b->a.shapes.n;
  for (int i = 0; i < n; i++) {
    shape[i] = x;
    if (!take_shape(b->a.shapes.item[i], &shape[i], e)) return false;
  }
  for (; b->a.shapes.n == 0 && n < s->shapes; n++) {
    shape[n] = x;
    shape[n].seq_len = s->shape[n][0], shape[n].heads = s->shape[n][1], shape[n].head_dim = s->shape[n][2], shape[n].batch = s->shape[n][3];
  }
  struct threads *threads = threads_create((int)(b->a.threads > 0 ? b->a.threads : threads_available()), e);
  bool good = threads != NULL;
  for (int i = 0; good && i < n; i++) good = run_shape(b, s, &shape[i], threads, e);
  threads_destroy(threads);
  return good;
}
