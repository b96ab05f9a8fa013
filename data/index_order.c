/* Documents of scanned files in the order of the rule. */
#include <stdlib.h>
#include <string.h>

#include "data/index_parts.h"

struct hash index_settings(const struct data_index *x) {
  struct hash_state *h = hash_open();
  if (!h) return (struct hash){0, 0};
  const int64_t numbers[] = {INDEX_VERSION, x->tokens, (int64_t)x->seed, x->shuffle_documents, x->n_sources, x->n_stages,
                             x->validation_path != NULL};
  const double fraction = x->validation_path ? x->validation_fraction : 0;
  hash_feed(h, numbers, sizeof numbers);
  hash_feed(h, &fraction, sizeof fraction);
  for (int i = 0; i < x->n_sources; i++) {
    const struct data_source *s = &x->sources[i];
    const double shares[] = {s->weight, s->max_repetition};
    const int64_t marks[] = {s->format, s->bos, s->eos};
    hash_feed(h, shares, sizeof shares);
    hash_feed(h, marks, sizeof marks);
    hash_feed(h, s->name, strlen(s->name) + 1);
  }
  for (int k = 0; k < x->n_stages; k++) {
    hash_feed(h, &x->stages[k].at, sizeof x->stages[k].at);
    hash_feed(h, x->stages[k].weight, (size_t)x->n_sources * sizeof(double));
  }
  return hash_close(h);
}

static int by_key(const void *x, const void *y, void *scan) {
  const struct index_entry *a = x, *b = y;
  const struct index_document *documents = ((const struct index_scan *)scan)->document;
  int c = mixture_compare(a->key, b->key);
  if (c == 0) c = mixture_compare(documents[a->document].content, documents[b->document].content);
  return c ? c : (a->document > b->document) - (a->document < b->document);
}

/* Is a document of this stream? */
static bool is_mine(const struct index_order *o, int64_t document) {
  const struct data_index *x = o->request;
  return o->validation == (x->validation_path && mixture_held_out(o->scan->document[document].content, x->validation_fraction));
}

bool index_order_start(struct index_order *o, const struct data_index *x, const struct index_scan *s, bool validation, struct error *e) {
  *o = (struct index_order){.request = x, .scan = s, .validation = validation};
  const bool pool = mixture_is_pool(x->sources, x->n_sources, x->n_stages);
  int64_t documents[DATA_SOURCES] = {0}, tokens[DATA_SOURCES] = {0}, filled[DATA_SOURCES] = {0};
  for (int64_t d = 0; d < s->documents; d++) {
    if (!is_mine(o, d)) continue;
    const int source = s->source[s->document[d].file];
    documents[source]++;
    tokens[source] += s->document[d].length;
  }
  mixture_start(&o->mixture, x->sources, x->n_sources, x->stages, x->n_stages, documents, tokens, x->tokens, validation);
  for (int g = 0; g < o->mixture.n; g++) {
    o->sorted[g] = -1;
    o->entry[g] = malloc((size_t)o->mixture.documents[g] * sizeof *o->entry[g] + 1);
    if (!o->entry[g]) return error_set(e, ERROR_SYSTEM, "out of memory for the order of documents");
  }
  for (int64_t d = 0; d < s->documents; d++) {
    if (!is_mine(o, d)) continue;
    const int g = pool ? 0 : s->source[s->document[d].file];
    o->entry[g][filled[g]++].document = d;
  }
  return true;
}

/* Without shuffling every pass has the order that files have, which is the one made at the start. */
static void sort_pass(struct index_order *o, int group, int64_t pass) {
  const struct index_scan *s = o->scan;
  const int64_t n = o->mixture.documents[group];
  const uint64_t seed = o->validation ? 0 : o->request->seed;
  o->sorted[group] = pass;
  if (!o->request->shuffle_documents) return;
  for (int64_t i = 0; i < n; i++) {
    struct index_entry *x = &o->entry[group][i];
    x->key = mixture_key(seed, (uint64_t)pass, s->document[x->document].content);
  }
  qsort_r(o->entry[group], (size_t)n, sizeof *o->entry[group], by_key, (void *)s);
}

int64_t index_order_next(struct index_order *o) {
  const int group = mixture_choose(&o->mixture);
  if (group < 0) return -1;
  const int64_t pass = mixture_pass(&o->mixture, group);
  if (o->sorted[group] != pass) sort_pass(o, group, pass);
  const int64_t document = o->entry[group][mixture_place(&o->mixture, group)].document;
  mixture_take(&o->mixture, group, o->scan->document[document].length);
  return document;
}

void index_order_free(struct index_order *o) {
  for (int g = 0; g < DATA_SOURCES; g++) free(o->entry[g]);
}
