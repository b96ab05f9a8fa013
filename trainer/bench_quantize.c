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

#include "trainer/bench.h"
#include "trainer/captured.h"
#include "trainer/plan.h"
#include "trainer/quality.h"
#include "trainer/record.h"

enum { ROUTES = 64, CONTRACTIONS = 3 };

static const struct contraction {
  const char *name;
  enum operand_role a, b;
} contractions[CONTRACTIONS] = {
    {"fprop", FPROP_X, FPROP_W}, {"dgrad", DGRAD_DY, DGRAD_W}, {"wgrad", WGRAD_DY, WGRAD_X}};

/* Pooled over all linears, each counting alike. */
struct pool {
  double energy, cosine, gain; /* sums; energy of the error relative to the result's */
  int64_t n;
};

struct job {
  const struct bench *b;
  struct device *d;
  struct capture_file capture;
  struct route route[ROUTES];
  int n_routes;
  struct pool pool[ROUTES][CONTRACTIONS];
  struct matrix out;          /* device, FP32: any result */
  float *result;              /* the same here */
  float *exact[CONTRACTIONS]; /* results of the linear that is measured */
  double *row;
};

/* ---- contractions --------------------------------------------------------------------- */

/* result = a b^T */
static bool contract(struct job *j, const struct operand *a, const struct operand *b, float *result, struct error *e) {
  j->out.rows = a->rows;
  j->out.cols = b->rows;
  j->d->k->contract(j->d, &j->out, a, b, NULL);
  j->d->k->download(j->d, result, j->out.data, (size_t)(a->rows * b->rows) * sizeof *result);
  return j->d->k->synchronize(j->d, e);
}

static bool contract_exactly(struct job *j, const struct captured *t, struct error *e) {
  for (int i = 0; i < CONTRACTIONS; i++) {
    const struct operand a = captured_plain(t, contractions[i].a, FORMAT_F32);
    const struct operand b = captured_plain(t, contractions[i].b, FORMAT_F32);
    if (!contract(j, &a, &b, j->exact[i], e)) return false;
  }
  return true;
}

static bool operand_quality(struct job *j, const struct captured *t, const struct operand *o, enum tensor which,
                            struct quality *q, struct error *e) {
  struct operand here;
  *q = (struct quality){0};
  const bool good = captured_fetch(o, j->d, &here, e);
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

static bool measure_route(struct job *j, const struct captured *t, int r, struct error *e) {
  const struct capture_entry *x = t->entry[TENSOR_X];
  const struct linear_route *route = route_linear(&j->route[r], (int)x->block - 1, x->site);
  struct captured_operands o;
  struct quality q[OPERAND_ROLE_COUNT];
  bool good = captured_take(&o, j->d, &j->capture.header, route, t, e);
  for (int i = 0; good && i < TENSOR_COUNT; i++) captured_quantise(&o, j->d, &j->capture.header, t, (enum tensor)i);
  for (int role = 0; good && role < OPERAND_ROLE_COUNT; role++)
    good = operand_quality(j, t, &o.of[role], operand_role_tensor((enum operand_role)role), &q[role], e);
  for (int i = 0; good && i < CONTRACTIONS; i++) {
    const struct contraction *c = &contractions[i];
    const struct operand *a = &o.of[c->a], *b = &o.of[c->b];
    const struct quantise_counts *na = &o.counts[c->a], *nb = &o.counts[c->b];
    good = contract(j, a, b, j->result, e);
    if (!good) break;
    struct quality all = {0};
    for (int64_t n = 0; n < a->rows * b->rows; n++) quality_add(&all, (double)j->result[n], (double)j->exact[i][n]);
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
  captured_drop(&o, j->d);
  return good;
}

/* The linears of the file that have all three tensors; calls body for each. */
static bool each_linear(struct job *j, bool (*body)(struct job *j, const struct captured *t, struct error *e),
                        bool largest_only, struct error *e) {
  int done = 0;
  for (int i = 0; i < j->capture.n; i++) {
    const struct capture_entry *x = &j->capture.entries[i];
    if (x->tensor != TENSOR_X || (largest_only && (x->site != LINEAR_GATE_UP || done))) continue;
    struct captured t;
    const bool good = (captured_load(&t, j->d, &j->capture, x, e) || error_context(e, "%s", j->b->a.from)) &&
                      contract_exactly(j, &t, e) && body(j, &t, e);
    captured_release(&t, j->d);
    if (!good) return false;
    done++;
  }
  return done > 0 || error_set(e, ERROR_DATA, "%s holds no captured linear", j->b->a.from);
}

static bool measure_linear(struct job *j, const struct captured *t, struct error *e) {
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
  const struct captured *t;
  enum tensor which;
  struct captured_operands o;
};

static bool quantise_once(void *context, struct error *e) {
  struct timed *x = context;
  captured_quantise(&x->o, x->d, x->header, x->t, x->which);
  return x->d->k->synchronize(x->d, e);
}

/* Of the widest linear, with one thread. */
static bool measure_speed(struct job *j, const struct captured *t, struct error *e) {
  struct bench one = *j->b;
  one.a.threads = 1;
  void *scratch;
  struct timed x = {.header = &j->capture.header, .t = t};
  x.d = bench_device(&one, &j->capture.header.extent, 1, &scratch, e);
  if (!x.d) return false;
  bench_title(j->b, "\nspeed of one core, both views in one call, block %" PRId64 " %s", t->entry[TENSOR_X]->block,
              linear_name(t->entry[TENSOR_X]->site));
  bool good = true;
  for (int r = 0; good && r < j->n_routes; r++) {
    const struct capture_entry *entry = t->entry[TENSOR_X];
    const struct linear_route *route = route_linear(&j->route[r], (int)entry->block - 1, entry->site);
    good = captured_take(&x.o, x.d, &j->capture.header, route, t, e);
    for (int i = 0; good && i < TENSOR_COUNT; i++) {
      const struct operand *row = &x.o.of[operand_role_of((enum tensor)i, VIEW_ROW)],
                           *column = &x.o.of[operand_role_of((enum tensor)i, VIEW_COLUMN)];
      if (!captured_packed(row) && !captured_packed(column)) continue;
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
    captured_drop(&x.o, x.d);
  }
  bench_close(x.d, scratch);
  return good;
}

/* ---- all of it ------------------------------------------------------------------------------ */

/* Something of each of a block's linears, in some block. */
static bool quantises(const struct route *r) {
  unsigned sites = 0;
  for (int s = 0; s < r->n_spans; s++)
    for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
      if (!encoding_is_plain(&r->span[s].linear.operand[role])) sites |= r->span[s].sites;
  return sites == (1u << LINEAR_SITES) - 1;
}

/* Routes that were asked for must be executable.  Of all others, those that
 * leave some linear as it is are not like the rest, and those that are not executable are named. */
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

/* The longest row of any operand. */
static int64_t longest_row(const struct extent *x) {
  int64_t most = x->tokens;
  for (int site = 0; site < LINEAR_SITES; site++) {
    const struct linear_shape w = linear_shape(x, (enum linear_site)site);
    if (w.n > most) most = w.n;
    if (w.k > most) most = w.k;
  }
  return most;
}

static bool take_results(struct job *j, struct error *e) {
  const size_t n = (size_t)plan_largest_tensor(&j->capture.header.extent);
  j->out = (struct matrix){.data = j->d->k->allocate(j->d, n * sizeof(float), e), .dtype = DTYPE_F32};
  j->result = malloc(n * sizeof *j->result);
  j->row = malloc((size_t)longest_row(&j->capture.header.extent) * sizeof *j->row);
  bool good = j->out.data && j->result && j->row;
  for (int i = 0; i < CONTRACTIONS; i++) {
    j->exact[i] = malloc(n * sizeof *j->exact[i]);
    good = good && j->exact[i];
  }
  return good || error_set(e, ERROR_SYSTEM, "out of memory");
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
    j->d = bench_device(b, &j->capture.header.extent, 1, &scratch, e);
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
  for (int i = 0; i < CONTRACTIONS; i++) free(j->exact[i]);
  free(j->row);
  free(j);
  return good;
}
