/* bench quantize: what each route makes of captured tensors.
 *
 * Every operand is quantised as in training: both views at once, with the draws
 * of its update, sample and layer.  Results of contractions are kept in FP32 and
 * compared with the same contraction of the captured values in FP32, which
 * rounds some 1e-7 of them, far below any route's error. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/formats.h"
#include "trainer/bench.h"
#include "trainer/capture.h"
#include "trainer/quality.h"
#include "trainer/record.h"

enum { ROUTES = 64, CONTRACTIONS = 3 };

static const struct contraction {
  const char *name;
  enum operand_role a, b;
} contractions[CONTRACTIONS] = {
    {"fprop", FPROP_X, FPROP_W}, {"dgrad", DGRAD_DY, DGRAD_W}, {"wgrad", WGRAD_DY, WGRAD_X}};

/* Operands by tensor and view. */
static const enum operand_role roles[TENSOR_COUNT][2] = {
    [TENSOR_X] = {FPROP_X, WGRAD_X}, [TENSOR_W] = {FPROP_W, DGRAD_W}, [TENSOR_DY] = {DGRAD_DY, WGRAD_DY}};

static enum tensor tensor_of(enum operand_role role) {
  return role == FPROP_X || role == WGRAD_X ? TENSOR_X : role == FPROP_W || role == DGRAD_W ? TENSOR_W : TENSOR_DY;
}

/* Pooled over all linears, each counting alike. */
struct pool {
  double energy, cosine, gain; /* sums; energy of the error relative to the result's */
  int64_t n;
};

/* A linear's tensors at one update, on the device and here. */
struct tensors {
  const struct capture_entry *entry[TENSOR_COUNT];
  struct matrix half[TENSOR_COUNT], wide[TENSOR_COUNT]; /* BF16, FP32 */
  float *values[TENSOR_COUNT];
  float *exact[CONTRACTIONS]; /* results */
};

/* One route's operands of them. */
struct operands {
  struct operand of[OPERAND_ROLE_COUNT];
  struct quantise_counts counts[OPERAND_ROLE_COUNT];
};

struct job {
  const struct bench *b;
  struct device *d;
  struct capture_file capture;
  struct route route[ROUTES];
  int n_routes;
  struct pool pool[ROUTES][CONTRACTIONS];
  struct matrix out; /* device, FP32: any result */
  float *result;     /* the same here */
  double *row;
};

/* ---- tensors ---------------------------------------------------------------------- */

static void release_tensors(struct job *j, struct tensors *t) {
  for (int i = 0; i < TENSOR_COUNT; i++) {
    if (t->half[i].data) j->d->k->release(j->d, t->half[i].data);
    if (t->wide[i].data) j->d->k->release(j->d, t->wide[i].data);
    free(t->values[i]);
  }
  for (int i = 0; i < CONTRACTIONS; i++) free(t->exact[i]);
}

static bool load_tensor(struct job *j, struct tensors *t, int i, struct error *e) {
  const struct kernels *k = j->d->k;
  const int slice = t->entry[i]->slice;
  const struct tensor_slice *s = hdf5_slice(j->capture.file, slice);
  const size_t n = (size_t)(s->rows * s->cols);
  uint16_t *bits = malloc(n * sizeof *bits);
  t->values[i] = malloc(n * sizeof *t->values[i]);
  t->half[i] = (struct matrix){k->allocate(j->d, n * 2, e), DTYPE_BF16, s->rows, s->cols};
  t->wide[i] = (struct matrix){k->allocate(j->d, n * 4, e), DTYPE_F32, s->rows, s->cols};
  bool good = bits && t->values[i] && t->half[i].data && t->wide[i].data;
  if (!good) error_set(e, ERROR_SYSTEM, "no memory for %s", s->name);
  good = good && hdf5_read(j->capture.file, slice, 0, s->rows, bits, e);
  if (good) {
    for (size_t x = 0; x < n; x++) t->values[i][x] = bf16_decode(bits[x]);
    k->upload(j->d, t->half[i].data, bits, n * 2);
    k->upload(j->d, t->wide[i].data, t->values[i], n * 4);
    good = k->synchronize(j->d, e);
  }
  free(bits);
  return good;
}

/* j->result = a b^T */
static bool contract(struct job *j, const struct operand *a, const struct operand *b, struct error *e) {
  j->out.rows = a->rows;
  j->out.cols = b->rows;
  j->d->k->contract(j->d, &j->out, a, b, NULL);
  j->d->k->download(j->d, j->result, j->out.data, (size_t)(a->rows * b->rows) * sizeof *j->result);
  return j->d->k->synchronize(j->d, e);
}

static struct operand plain_operand(const struct tensors *t, enum operand_role role, enum format f) {
  const enum tensor which = tensor_of(role);
  return operand_of_matrix(f == FORMAT_BF16 ? &t->half[which] : &t->wide[which],
                           roles[which][VIEW_ROW] == role ? VIEW_ROW : VIEW_COLUMN);
}

static bool load(struct job *j, struct tensors *t, struct error *e) {
  for (int i = 0; i < TENSOR_COUNT; i++)
    if (!load_tensor(j, t, i, e)) return false;
  for (int i = 0; i < CONTRACTIONS; i++) {
    const struct operand a = plain_operand(t, contractions[i].a, FORMAT_F32);
    const struct operand b = plain_operand(t, contractions[i].b, FORMAT_F32);
    const size_t bytes = (size_t)(a.rows * b.rows) * sizeof(float);
    t->exact[i] = malloc(bytes);
    if (!t->exact[i]) return error_set(e, ERROR_SYSTEM, "out of memory");
    if (!contract(j, &a, &b, e)) return false;
    memcpy(t->exact[i], j->result, bytes);
  }
  return true;
}

/* ---- operands ----------------------------------------------------------------------- */

static bool owned(const struct operand *o) { return o->encoding.format && !encoding_is_plain(&o->encoding); }

static void release_operands(struct device *d, struct operands *o) {
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    if (!owned(&o->of[role])) continue;
    if (o->of[role].codes) d->k->release(d, o->of[role].codes);
    if (o->of[role].scales) d->k->release(d, o->of[role].scales);
    if (o->of[role].outer) d->k->release(d, o->of[role].outer);
  }
}

/* Room for the packed operands; plain ones are the tensors. */
static bool take_operands(struct job *j, struct device *d, const struct linear_route *route, const struct tensors *t,
                          struct operands *o, struct error *e) {
  memset(o, 0, sizeof *o);
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    const struct encoding *encoding = &route->operand[role];
    struct operand *p = &o->of[role];
    *p = plain_operand(t, (enum operand_role)role, encoding->format);
    if (encoding_is_plain(encoding)) continue;
    p->encoding = *encoding;
    p->codes = p->scales = NULL;
    linear_set_outers(p, tensor_of((enum operand_role)role),
                      linear_arm(&j->capture.header.extent, t->entry[TENSOR_X]->site));
    const size_t codes = (size_t)operand_code_bytes(encoding, p->rows, p->cols);
    const size_t scales = (size_t)operand_scale_bytes(encoding, p->rows, p->cols);
    const size_t outer = (size_t)operand_outer_count(p) * sizeof(float);
    p->codes = d->k->allocate(d, codes, e);
    if (scales) p->scales = d->k->allocate(d, scales, e);
    if (outer) p->outer = d->k->allocate(d, outer, e);
    if (!p->codes || (scales && !p->scales) || (outer && !p->outer)) return false;
  }
  return true;
}

/* Both views of one tensor, as its producer makes them in training. */
static void quantise(struct device *d, const struct capture_header *h, const struct tensors *t, enum tensor which,
                     struct operands *o) {
  struct operand *row = &o->of[roles[which][VIEW_ROW]], *column = &o->of[roles[which][VIEW_COLUMN]];
  struct quantise_counts counts[2] = {{0}};
  const struct capture_entry *entry = t->entry[which];
  const struct emission out = {
      .row = owned(row) ? row : NULL,
      .column = owned(column) ? column : NULL,
      .draw = {.seed = (uint64_t)h->seed, .update = (uint32_t)entry->update, .first_sample = (uint64_t)entry->first_sample,
               .seq_len = h->extent.attention.seq_len, .layer = (uint32_t)(entry->block - 1),
               .operand = linear_draw(entry->site)},
      .counts = counts};
  if (out.row || out.column) d->k->quantise(d, &out, &t->half[which]);
  for (int view = 0; view < 2; view++) o->counts[roles[which][view]] = counts[view];
}

/* An operand's bytes here, to be decoded; plain ones are read from the captured values. */
static bool fetch(struct device *d, const struct operand *o, struct operand *here, struct error *e) {
  const size_t codes = (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols);
  const size_t scales = (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols);
  const size_t outer = (size_t)operand_outer_count(o) * sizeof(float);
  *here = *o;
  here->codes = malloc(codes);
  here->scales = malloc(scales + 1);
  here->outer = outer ? malloc(outer) : NULL;
  bool good = here->codes && here->scales && (here->outer || outer == 0);
  if (!good) return error_set(e, ERROR_SYSTEM, "out of memory");
  d->k->download(d, here->codes, o->codes, codes);
  if (scales) d->k->download(d, here->scales, o->scales, scales);
  if (outer) d->k->download(d, here->outer, o->outer, outer);
  return d->k->synchronize(d, e);
}

static bool operand_quality(struct job *j, const struct tensors *t, const struct operand *o, enum tensor which,
                            struct quality *q, struct error *e) {
  struct operand here;
  *q = (struct quality){0};
  const bool good = fetch(j->d, o, &here, e);
  if (good) quality_operand(q, &here, t->values[which], j->row);
  free(here.codes);
  free(here.scales);
  free(here.outer);
  return good;
}

/* ---- rows ----------------------------------------------------------------------------- */

static double share(int64_t part, int64_t of) { return of > 0 ? (double)part / (double)of : 0; }

static json_t *operand_object(const struct operand *o, const struct quality *q, const struct quantise_counts *n,
                              enum operand_role role) {
  char words[ENCODING_TEXT];
  json_t *object = json_object();
  record_text(object, "operand", operand_role_names[role]);
  record_text(object, "encoding", encoding_text(&o->encoding, words, sizeof words));
  record_real(object, "relative_l2", quality_relative(q));
  record_real(object, "saturated", share(n->saturated, n->elements));
  record_real(object, "underflowed", share(n->underflowed, n->elements));
  record_real(object, "zero_blocks", share(n->zero_blocks, n->blocks));
  return object;
}

static bool measure_route(struct job *j, const struct tensors *t, int r, struct error *e) {
  const struct capture_entry *x = t->entry[TENSOR_X];
  const struct linear_route *route = route_linear(&j->route[r], (int)x->block - 1);
  struct operands o;
  struct quality q[OPERAND_ROLE_COUNT];
  bool good = take_operands(j, j->d, route, t, &o, e);
  for (int i = 0; good && i < TENSOR_COUNT; i++) quantise(j->d, &j->capture.header, t, (enum tensor)i, &o);
  for (int role = 0; good && role < OPERAND_ROLE_COUNT; role++)
    good = operand_quality(j, t, &o.of[role], tensor_of((enum operand_role)role), &q[role], e);
  for (int i = 0; good && i < CONTRACTIONS; i++) {
    const struct contraction *c = &contractions[i];
    const struct operand *a = &o.of[c->a], *b = &o.of[c->b];
    const struct quantise_counts *na = &o.counts[c->a], *nb = &o.counts[c->b];
    good = contract(j, a, b, e);
    if (!good) break;
    struct quality all = {0};
    for (int64_t n = 0; n < a->rows * b->rows; n++) quality_add(&all, (double)j->result[n], (double)t->exact[i][n]);
    const double relative = quality_relative(&all), cosine = quality_cosine(&all), gain = quality_gain(&all);
    struct pool *p = &j->pool[r][i];
    p->energy += relative * relative;
    p->cosine += cosine;
    p->gain += gain;
    p->n++;
    json_t *object = json_object();
    record_text(object, "row", "contraction");
    record_text(object, "route", j->route[r].name);
    record_integer(object, "update", x->update);
    record_integer(object, "layer", x->block);
    record_text(object, "site", linear_name(x->site));
    record_text(object, "contraction", c->name);
    record_real(object, "relative_l2", relative);
    record_real(object, "cosine", cosine);
    record_real(object, "gain", gain);
    record_real(object, "error_energy", all.error);
    record_real(object, "reference_energy", all.reference);
    json_object_set_new(object, "a", operand_object(a, &q[c->a], na, c->a));
    json_object_set_new(object, "b", operand_object(b, &q[c->b], nb, c->b));
    bench_row(j->b, object, NULL, "%-26s %-5s  %8.5f %9.6f %8.5f   %8.5f %7.3f%% %7.3f%%   %8.5f %7.3f%% %7.3f%%",
              j->route[r].name, c->name, relative, cosine, gain, quality_relative(&q[c->a]),
              100 * share(na->saturated, na->elements), 100 * share(na->underflowed, na->elements),
              quality_relative(&q[c->b]), 100 * share(nb->saturated, nb->elements),
              100 * share(nb->underflowed, nb->elements));
  }
  release_operands(j->d, &o);
  return good;
}

/* The linears of the file that have all three tensors; calls body for each. */
static bool each_linear(struct job *j, bool (*body)(struct job *j, const struct tensors *t, struct error *e),
                        bool largest_only, struct error *e) {
  int done = 0;
  for (int i = 0; i < j->capture.n; i++) {
    const struct capture_entry *x = &j->capture.entries[i];
    if (x->tensor != TENSOR_X || (largest_only && (x->site != LINEAR_GATE_UP || done))) continue;
    struct tensors t = {{x, capture_find(&j->capture, x->block, x->site, TENSOR_W, 0),
                         capture_find(&j->capture, x->block, x->site, TENSOR_DY, x->update)},
                        .values = {NULL}};
    if (!t.entry[TENSOR_W] || !t.entry[TENSOR_DY])
      return error_set(e, ERROR_DATA, "%s: %s has no W or no dY beside it", j->b->a.from, hdf5_slice(j->capture.file, x->slice)->name);
    const bool good = load(j, &t, e) && body(j, &t, e);
    release_tensors(j, &t);
    if (!good) return false;
    done++;
  }
  return done > 0 || error_set(e, ERROR_DATA, "%s holds no captured linear", j->b->a.from);
}

static bool measure_linear(struct job *j, const struct tensors *t, struct error *e) {
  const struct capture_entry *x = t->entry[TENSOR_X];
  const struct matrix *w = &t->half[TENSOR_W];
  bench_title(j->b, "\nupdate %" PRId64 ", block %" PRId64 ", %s: X [%" PRId64 ", %" PRId64 "], W [%" PRId64 ", %" PRId64 "]", x->update,
              x->block, linear_name(x->site), t->half[TENSOR_X].rows, w->cols, w->rows, w->cols);
  bench_title(j->b, "  %-26s %-5s  %8s %9s %8s   %8s %8s %8s   %8s %8s %8s", "route", "", "rel-L2", "cosine", "gain",
              "a rel-L2", "satur.", "underfl.", "b rel-L2", "satur.", "underfl.");
  for (int r = 0; r < j->n_routes; r++)
    if (!measure_route(j, t, r, e)) return false;
  return true;
}

/* ---- pooled ------------------------------------------------------------------------------ */

static void summary(struct job *j) {
  bench_title(j->b, "\nall linears, each counting alike: root of the mean error energy relative to the result, mean cosine and gain");
  for (int i = 0; i < CONTRACTIONS; i++)
    for (int r = 0; r < j->n_routes; r++) {
      const struct pool *p = &j->pool[r][i];
      const double n = (double)p->n;
      json_t *object = json_object();
      record_text(object, "row", "summary");
      record_text(object, "contraction", contractions[i].name);
      record_text(object, "route", j->route[r].name);
      record_integer(object, "linears", p->n);
      record_real(object, "relative_l2", sqrt(p->energy / n));
      record_real(object, "cosine", p->cosine / n);
      record_real(object, "gain", p->gain / n);
      bench_row(j->b, object, NULL, "%-5s  %-26s %8.5f %9.6f %8.5f", contractions[i].name, j->route[r].name,
                sqrt(p->energy / n), p->cosine / n, p->gain / n);
    }
}

/* The report's diagnostic, E_MX / E_LC in dgrad, of every pair that has an error. */
static void ratios(struct job *j) {
  for (int i = 0; i < CONTRACTIONS; i++) {
    bench_title(j->b, "\n%s: error energy of the row's route over that of the column's", contractions[i].name);
    char head[16 * ROUTES] = "", line[16 * ROUTES];
    int column[ROUTES], n = 0;
    for (int r = 0; r < j->n_routes; r++)
      if (j->pool[r][i].energy > 0) column[n++] = r;
    for (int c = 0; c < n; c++) snprintf(head + strlen(head), sizeof head - strlen(head), " %6d", c + 1);
    bench_title(j->b, "  %-30s%s", "", head);
    for (int r = 0; r < n; r++) {
      json_t *object = json_object(), *over = json_object();
      line[0] = 0;
      for (int c = 0; c < n; c++) {
        const double ratio = j->pool[column[r]][i].energy / j->pool[column[c]][i].energy;
        snprintf(line + strlen(line), sizeof line - strlen(line), " %6.3f", ratio);
        record_real(over, j->route[column[c]].name, ratio);
      }
      record_text(object, "row", "energy_ratio");
      record_text(object, "contraction", contractions[i].name);
      record_text(object, "route", j->route[column[r]].name);
      json_object_set_new(object, "over", over);
      bench_row(j->b, object, NULL, "%2d %-26s %s", r + 1, j->route[column[r]].name, line);
    }
  }
}

/* ---- speed --------------------------------------------------------------------------------- */

struct timed {
  struct device *d;
  const struct capture_header *header;
  const struct tensors *t;
  enum tensor which;
  struct operands o;
};

static bool quantise_once(void *context, struct error *e) {
  struct timed *x = context;
  quantise(x->d, x->header, x->t, x->which, &x->o);
  return x->d->k->synchronize(x->d, e);
}

/* Of the widest linear, with one thread. */
static bool measure_speed(struct job *j, const struct tensors *t, struct error *e) {
  struct bench one = *j->b;
  one.a.threads = 1;
  void *scratch;
  struct timed x = {.header = &j->capture.header, .t = t};
  x.d = bench_device(&one, &j->capture.header.extent, &scratch, e);
  if (!x.d) return false;
  bench_title(j->b, "\nspeed of one core, both views in one call, block %" PRId64 " %s", t->entry[TENSOR_X]->block,
              linear_name(t->entry[TENSOR_X]->site));
  bool good = true;
  for (int r = 0; good && r < j->n_routes; r++) {
    const struct linear_route *route = route_linear(&j->route[r], (int)t->entry[TENSOR_X]->block - 1);
    good = take_operands(j, x.d, route, t, &x.o, e);
    for (int i = 0; good && i < TENSOR_COUNT; i++) {
      const struct operand *row = &x.o.of[roles[i][VIEW_ROW]], *column = &x.o.of[roles[i][VIEW_COLUMN]];
      if (!owned(row) && !owned(column)) continue;
      struct bench_seconds s;
      x.which = (enum tensor)i;
      good = bench_measure(j->b, 0, quantise_once, &x, &s, e);
      if (!good) break;
      char words[2][ENCODING_TEXT];
      encoding_text(&row->encoding, words[0], ENCODING_TEXT);
      encoding_text(&column->encoding, words[1], ENCODING_TEXT);
      const double rate = (double)(t->half[i].rows * t->half[i].cols * 2) / s.median;
      json_t *object = json_object();
      record_text(object, "row", "speed");
      record_text(object, "route", j->route[r].name);
      record_text(object, "tensor", tensor_name((enum tensor)i));
      record_integer(object, "rows", t->half[i].rows);
      record_integer(object, "cols", t->half[i].cols);
      record_text(object, "row_encoding", words[0]);
      record_text(object, "column_encoding", words[1]);
      record_real(object, "bytes_per_second_per_core", rate);
      bench_row(j->b, object, &s, "%-26s %-2s [%" PRId64 ", %" PRId64 "]  %6.2f GB/s of BF16  %s, %s", j->route[r].name,
                tensor_name((enum tensor)i), t->half[i].rows, t->half[i].cols, rate * 1e-9, words[0], words[1]);
    }
    release_operands(x.d, &x.o);
  }
  bench_close(x.d, scratch);
  return good;
}

/* ---- all of it ------------------------------------------------------------------------------ */

static bool quantises(const struct route *r) {
  for (int s = 0; s < r->n_spans; s++)
    for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
      if (!encoding_is_plain(&r->span[s].linear.operand[role])) return true;
  return false;
}

/* Routes that were asked for must be executable.  Of all others, those that
 * quantise nothing have no error, and those that are not executable are named. */
static bool choose_routes(struct job *j, struct error *e) {
  const struct argument_list *asked = &j->b->a.routes;
  const struct capture_header *h = &j->capture.header;
  const char *const *all = route_names();
  for (int i = 0; asked->n ? i < asked->n : all[i] != NULL; i++) {
    const char *name = asked->n ? asked->item[i] : all[i];
    if (j->n_routes == ROUTES) return error_set(e, ERROR_USAGE, "bench quantize: more than %d routes", ROUTES);
    struct route *r = &j->route[j->n_routes];
    struct error why = {0};
    if (route_named(name, (int)h->n_layers, r, &why) && route_check(r, (int)h->n_layers, &h->extent, j->d, &why)) {
      if (asked->n || quantises(r)) j->n_routes++;
      continue;
    }
    if (asked->n) {
      *e = why;
      return error_context(e, "bench quantize: route %s", name);
    }
    why.message[strcspn(why.message, "\n")] = 0;
    json_t *object = json_object();
    record_text(object, "row", "left_out");
    record_text(object, "route", name);
    record_text(object, "why", why.message);
    bench_row(j->b, object, NULL, "%-26s left out: %s", name, why.message);
  }
  return j->n_routes > 0 || error_set(e, ERROR_DEVICE, "bench quantize: no route can be executed");
}

static int64_t largest(const struct extent *x, int64_t *row) {
  int64_t most = 0;
  *row = x->tokens;
  for (int site = 0; site < LINEAR_SITES; site++) {
    const struct linear_shape w = linear_shape(x, (enum linear_site)site);
    const int64_t n[] = {x->tokens * w.n, x->tokens * w.k, w.n * w.k}, sides[] = {w.n, w.k};
    for (int i = 0; i < 3; i++)
      if (n[i] > most) most = n[i];
    for (int i = 0; i < 2; i++)
      if (sides[i] > *row) *row = sides[i];
  }
  return most;
}

static bool take_results(struct job *j, struct error *e) {
  int64_t row;
  const size_t n = (size_t)largest(&j->capture.header.extent, &row);
  j->out = (struct matrix){.data = j->d->k->allocate(j->d, n * sizeof(float), e), .dtype = DTYPE_F32};
  j->result = malloc(n * sizeof *j->result);
  j->row = malloc((size_t)row * sizeof *j->row);
  return (j->out.data && j->result && j->row) || error_set(e, ERROR_SYSTEM, "out of memory");
}

bool bench_quantize(struct bench *b, struct error *e) {
  if (!b->a.from) {
    error_set(e, ERROR_USAGE, "bench quantize: --from is missing");
    return error_hint(e, "it names what `fp4d capture` wrote");
  }
  struct job *j = calloc(1, sizeof *j);
  if (!j) return error_set(e, ERROR_SYSTEM, "out of memory");
  j->b = b;
  void *scratch = NULL;
  bool good = capture_open(&j->capture, b->a.from, e);
  if (good) {
    j->d = bench_device(b, &j->capture.header.extent, &scratch, e);
    good = j->d && choose_routes(j, e) && take_results(j, e);
    if (good)
      bench_title(b, "%s: trained with %s to update %" PRId64 ", captured under bf16; %d routes on backend %s", b->a.from,
                  j->capture.header.trained, j->capture.header.update, j->n_routes, j->d->k->backend);
    good = good && each_linear(j, measure_linear, false, e);
    if (good) summary(j);
    if (good) ratios(j);
    good = good && each_linear(j, measure_speed, true, e);
    if (j->out.data) j->d->k->release(j->d, j->out.data);
    bench_close(j->d, scratch);
    capture_close(&j->capture);
  }
  free(j->result);
  free(j->row);
  free(j);
  return good;
}
