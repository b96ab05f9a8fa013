#include "trainer/compare.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/log.h"
#include "model/problems.h"
#include "trainer/changes.h"
#include "trainer/records.h"
#include "trainer/table.h"

enum { COLUMNS = 10, COLUMNS_MOST = 64, KEYS = 900 /* say() has room for them */ };

struct comparison {
  const struct compare *c;
  struct records *run; /* [c->n] */
  FILE *markdown;
};

/* What stands in a table for a run: its route, or its name where two have one route. */
static const char *label_of(const struct comparison *x, int i) {
  for (int j = 0; j < x->c->n; j++)
    if (j != i && strcmp(x->run[i].route, x->run[j].route) == 0) return x->run[i].name;
  return x->run[i].route;
}

/* ---- matched? ---------------------------------------------------------------------- */

/* Updates that run i and the first have both; *last of them. */
static int64_t shared_updates(const struct comparison *x, int i, int64_t *last) {
  int64_t n = 0;
  *last = 0;
  for (int64_t u = 0; u < x->run[i].n_updates; u++)
    if (records_update(&x->run[0], x->run[i].update[u].update)) {
      n++;
      *last = x->run[i].update[u].update;
    }
  return n;
}

static void match(const struct comparison *x, int i, struct problems *p) {
  const struct records *r = &x->run[i], *first = &x->run[0];
  int64_t last;
  if (strcmp(r->init_hash, first->init_hash) != 0)
    problems_add(p, "%s: initial parameters %s, those of %s are %s", x->c->runs[i], r->init_hash, x->c->runs[0], first->init_hash);
  if (strcmp(r->train_digest, first->train_digest) != 0)
    problems_add(p, "%s: training stream %s, that of %s is %s", x->c->runs[i], r->train_digest, x->c->runs[0], first->train_digest);
  if (shared_updates(x, i, &last) == 0) problems_add(p, "%s has no update in common with %s", x->c->runs[i], x->c->runs[0]);
  int64_t different = 0, at = 0;
  for (int64_t u = 0; u < r->n_updates; u++) {
    const struct records_update *other = records_update(first, r->update[u].update);
    if (!other || strcmp(other->batch_hash, r->update[u].batch_hash) == 0) continue;
    if (different++ == 0) at = other->update;
  }
  if (different > 0)
    problems_add(p, "%s: another batch than %s in %" PRId64 " shared updates, first in update %" PRId64, x->c->runs[i],
                 x->c->runs[0], different, at);
}

static bool check_matched(const struct comparison *x, struct error *e) {
  struct error why = {0};
  struct problems p = {.error = &why, .code = ERROR_DATA};
  for (int i = 1; i < x->c->n; i++) match(x, i, &p);
  if (problems_none(&p)) return true;
  if (!x->c->allow_unmatched) {
    *e = why;
    return error_hint(e, "these runs are not matched; --allow-unmatched compares them all the same");
  }
  for (char *line = strtok(why.message, "\n"); line; line = strtok(NULL, "\n")) log_warning("not matched: %s", line);
  return true;
}

/* Keys that are a run's own, or have no effect on what is computed. */
static void add_key(void *context, const char *key, const char *text) {
  static const char *const own[] = {"run.name", "run.folder", "run.threads", "route", "log.", "limits.", "checkpoint.", NULL};
  char *keys = context;
  (void)text;
  for (int i = 0; own[i]; i++)
    if (strncmp(key, own[i], strlen(own[i])) == 0) return;
  const size_t used = strlen(keys), length = strlen(key);
  for (const char *at = keys; (at = strstr(at, key)); at += length) /* the whole of an entry, not a part of a longer one */
    if ((at == keys || at[-1] == ' ') && (at[length] == ',' || at[length] == 0)) return;
  snprintf(keys + used, KEYS - used, "%s%s", used ? ", " : "", key);
}

/* ---- printing ------------------------------------------------------------------------ */

static void say(const struct comparison *x, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(const struct comparison *x, const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  printf("%s\n", text);
  if (x->markdown) fprintf(x->markdown, "%s\n\n", text);
}

static bool print(const struct comparison *x, struct table *t, struct error *e) {
  const bool good = !t->failed || error_set(e, ERROR_SYSTEM, "out of memory");
  if (good) {
    table_print(t, stdout, false);
    putchar('\n');
  }
  if (good && x->markdown) {
    table_print(t, x->markdown, true);
    fputc('\n', x->markdown);
  }
  table_free(t);
  return good;
}

static void say_matched(const struct comparison *x) {
  char keys[KEYS] = "";
  int64_t updates = 0, last;
  bool changed = false;
  for (int i = 1; i < x->c->n; i++) {
    updates += shared_updates(x, i, &last);
    changes_list(x->run[0].config, x->run[i].config, add_key, keys);
  }
  for (int i = 0; i < x->c->n; i++) changed |= x->run[i].config_changed;
  struct error ignored;
  struct problems p = {.error = &ignored, .code = ERROR_DATA};
  for (int i = 1; i < x->c->n; i++) match(x, i, &p);
  if (x->c->n > 1)
    say(x, problems_none(&p) ? "Matched: initial parameters %s, training stream %s and the batch of every shared update are equal (%d run%s beside %s, %" PRId64 " updates in all)."
                             : "NOT matched: initial parameters %s, training stream %s of the first run (%d run%s beside %s, %" PRId64 " updates in all).",
        x->run[0].init_hash, x->run[0].train_digest, x->c->n - 1, x->c->n == 2 ? "" : "s", x->run[0].name, updates);
  if (keys[0]) say(x, "Beside the route these settings differ: %s.", keys);
  if (changed) say(x, "A run was resumed under another configuration than it began with.");
}

static double percent(double reference, double loss) { return 100 * (reference - loss) / reference; }

/* The last validation that both have, on the same samples of one stream. */
static const struct records_validation *held_out(const struct comparison *x, int i, int64_t update,
                                                 const struct records_validation **reference) {
  const struct records_validation *own = records_validation(&x->run[i], update);
  *reference = records_validation(&x->run[0], update);
  const bool same = own && *reference && own->samples == (*reference)->samples && own->targets == (*reference)->targets &&
                    strcmp(x->run[i].validation_digest, x->run[0].validation_digest) == 0;
  return same ? own : NULL;
}

static int64_t last_held_out(const struct comparison *x, int i) {
  const struct records_validation *reference;
  for (int64_t v = x->run[i].n_validations; v-- > 0;)
    if (held_out(x, i, x->run[i].validation[v].update, &reference)) return x->run[i].validation[v].update;
  return 0;
}

/* Mean excess over the last tenth of the shared updates. */
static double late_excess(const struct comparison *x, int i, int64_t shared) {
  const struct records *r = &x->run[i];
  const int64_t wanted = shared / 10 > 0 ? shared / 10 : 1;
  double sum = 0;
  int64_t n = 0;
  for (int64_t u = r->n_updates; u-- > 0 && n < wanted;) {
    const struct records_update *other = records_update(&x->run[0], r->update[u].update);
    if (!other) continue;
    sum += r->update[u].loss - other->loss;
    n++;
  }
  return n > 0 ? sum / (double)n : NAN;
}

static bool summary(const struct comparison *x, struct error *e) {
  enum { SUMMARY = 13 };
  struct table t = table_new(SUMMARY);
  static const char *const head[SUMMARY] = {"run", "last shared", "loss", "excess", "last tenth", "100(Lr-L)/Lr", "held out", "excess",
                                     "100(Lr-L)/Lr", "max norm", "last norm", "applied/skipped/halted", "end"};
  for (int i = 0; i < SUMMARY; i++) table_add(&t, "%s", head[i]);
  for (int i = 0; i < x->c->n; i++) {
    const struct records *r = &x->run[i];
    int64_t last;
    const int64_t shared = shared_updates(x, i, &last), validated = last_held_out(x, i);
    double norm = 0;
    for (int64_t u = 0; u < r->n_updates; u++)
      if (!(r->update[u].grad_norm <= norm)) norm = r->update[u].grad_norm;
    table_add(&t, "%s", label_of(x, i));
    if (shared > 0) {
      const double loss = records_update(r, last)->loss, reference = records_update(&x->run[0], last)->loss;
      table_add(&t, "%" PRId64, last);
      table_add(&t, "%.4f", loss);
      table_add(&t, "%+.4f", loss - reference);
      table_add(&t, "%+.4f", late_excess(x, i, shared));
      table_add(&t, "%+.3f", percent(reference, loss));
    } else {
      for (int c = 0; c < 5; c++) table_add(&t, "-");
    }
    if (validated > 0) {
      const struct records_validation *reference, *own = held_out(x, i, validated, &reference);
      table_add(&t, "%.4f", own->loss);
      table_add(&t, "%+.4f", own->loss - reference->loss);
      table_add(&t, "%+.3f", percent(reference->loss, own->loss));
    } else {
      for (int c = 0; c < 3; c++) table_add(&t, "-");
    }
    table_add(&t, "%.4g", norm);
    table_add(&t, "%.4g", r->update[r->n_updates - 1].grad_norm);
    table_add(&t, "%" PRId64 "/%" PRId64 "/%" PRId64, r->applied, r->skipped, r->halted);
    table_add(&t, "%s", r->reason[0] ? r->reason : "none");
  }
  say(x, "Each run beside %s; excess: loss above it (nats a token); last tenth: mean excess over the last tenth of the shared updates; norm: of the gradient before clipping, its largest and its last.",
      label_of(x, 0));
  return print(x, &t, e);
}

enum quantity { TRAINING_LOSS, HELD_OUT_LOSS, GRADIENT_NORM };

/* Runs down, updates across: the first run's own numbers, the others' excess; of norms each run's own. */
static bool by_update(const struct comparison *x, enum quantity quantity, struct error *e) {
  static const char *const head[] = {"update", "held out", "norm"};
  static const char *const title[] = {"Training loss", "Held-out loss", "Gradient norm before clipping"};
  static const char *const rest[] = {"; excess of the others over it, on the same batch", "; excess of the others over it", ", and the others' own"};
  const bool validation = quantity == HELD_OUT_LOSS;
  const struct records *first = &x->run[0];
  const int64_t n = validation ? first->n_validations : first->n_updates;
  if (n == 0) return true;
  const int64_t last = validation ? first->validation[n - 1].update : first->update[n - 1].update;
  int64_t column[COLUMNS_MOST];
  int columns = 0;
  if (validation) { /* backwards from the last one */
    const int64_t step = ceil_div(n, COLUMNS);
    columns = (int)ceil_div(n, step);
    for (int c = 0; c < columns; c++) column[c] = first->validation[n - 1 - (columns - 1 - c) * step].update;
  } else {
    int64_t every = x->c->every > 0 ? x->c->every : ceil_div(last, COLUMNS);
    if (last / every > COLUMNS_MOST - 2) every = ceil_div(last, COLUMNS_MOST - 2);
    if (every > 1) column[columns++] = first->update[0].update;
    for (int64_t u = every; u < last; u += every) column[columns++] = u;
    if (last > column[0] || columns == 0) column[columns++] = last;
  }
  struct table t = table_new(columns + 1);
  table_add(&t, "%s", head[quantity]);
  for (int c = 0; c < columns; c++) table_add(&t, "%" PRId64, column[c]);
  for (int i = 0; i < x->c->n; i++) {
    table_add(&t, "%s", label_of(x, i));
    for (int c = 0; c < columns; c++) {
      const struct records_validation *reference, *own = validation ? held_out(x, i, column[c], &reference) : NULL;
      const struct records_update *a = records_update(first, column[c]), *b = records_update(&x->run[i], column[c]);
      const double from = validation ? own ? reference->loss : NAN : a ? a->loss : NAN;
      const double loss = validation ? own ? own->loss : NAN : b ? b->loss : NAN;
      if (validation ? !own : !a || !b)
        table_add(&t, "-");
      else if (quantity == GRADIENT_NORM)
        table_add(&t, "%.4g", b->grad_norm);
      else if (i == 0)
        table_add(&t, "%.4f", loss);
      else
        table_add(&t, "%+.4f", loss - from);
    }
  }
  say(x, "%s of %s%s.", title[quantity], label_of(x, 0), rest[quantity]);
  return print(x, &t, e);
}

bool compare_runs(const struct compare *c, struct error *e) {
  struct comparison x = {.c = c};
  x.run = calloc((size_t)c->n, sizeof *x.run);
  bool good = x.run ? true : error_set(e, ERROR_SYSTEM, "out of memory");
  for (int i = 0; good && i < c->n; i++) good = records_read(&x.run[i], c->runs[i], e);
  good = good && check_matched(&x, e);
  char *text = NULL;
  size_t bytes = 0;
  if (good && c->markdown) {
    x.markdown = open_memstream(&text, &bytes);
    good = x.markdown ? true : error_set(e, ERROR_SYSTEM, "out of memory");
  }
  if (good) say_matched(&x);
  good = good && summary(&x, e) && by_update(&x, TRAINING_LOSS, e) && by_update(&x, HELD_OUT_LOSS, e) && by_update(&x, GRADIENT_NORM, e);
  if (x.markdown) {
    const bool whole = !ferror(x.markdown);
    if ((fclose(x.markdown) != 0 || !whole) && good) good = error_set(e, ERROR_SYSTEM, "out of memory");
    good = good && file_publish(c->markdown, text, bytes, ERROR_SYSTEM, e);
    free(text);
  }
  for (int i = 0; x.run && i < c->n; i++) records_free(&x.run[i]);
  free(x.run);
  return good;
}
