/* Pass 3 of `prepare`: documents in their final order, into the streams. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "data/little_endian.h"
#include "data/prepare_parts.h"
#include "data/stream_file.h"

/* The documents of one group, pass after pass. */
struct supply {
  int64_t pass; /* that `merge` gives; -1: none */
  struct sort_merge *merge;
  struct sort_external *again; /* of a later pass: the same documents by other keys */
};

struct writing {
  struct preparation *p;
  int side, groups;
  struct mixture mixture;
  struct supply supply[DATA_SOURCES];
  struct stream_writer *writer;
  struct overlap *overlap;
  char *text; /* a document as text, for the overlap */
  int64_t text_room;
  struct data_prepared_source *counts;
};

static int64_t merge_memory(const struct writing *w) { return w->p->memory / 4 / w->groups; }

/* ---- passes over a source -------------------------------------------------- */

/* The next document that was not dropped. */
static int next_live(const struct preparation *p, struct sort_merge *m, struct sort_record *record, struct error *e) {
  int more;
  do more = sort_merge_next(m, record, e);
  while (more > 0 && prepare_is_dropped(p, prepare_ordinal(record->key)));
  return more;
}

static struct sort_merge *open_base(const struct writing *w, int group, struct error *e) {
  const int number = PREPARE_DOCUMENTS + DATA_SOURCES * w->side + group;
  return sort_merge_open(w->p->sort, number, number, merge_memory(w), e);
}

static void close_supply(struct supply *s) {
  sort_merge_close(s->merge);
  sort_external_close(s->again);
  *s = (struct supply){.pass = -1};
}

/* Sorts a source's documents by the keys of a later pass. */
static bool sort_again(struct writing *w, struct supply *s, int group, int64_t pass, struct error *e) {
  const struct preparation *p = w->p;
  char *folder = NULL;
  if (asprintf(&folder, "%s/again-%d-%d", p->work, w->side, group) < 0) return error_set(e, ERROR_SYSTEM, "out of memory");
  const struct sort_request request = {.folder = folder, .owner = p->owner, .key_bytes = PREPARE_KEY,
                                       .memory = p->memory / 4 / w->groups};
  bool ok = file_remove_tree(folder, ERROR_DATA, e) && (s->again = sort_external_open(&request, e)) != NULL;
  free(folder);
  struct sort_merge *base = ok ? open_base(w, group, e) : NULL;
  struct sort_record record;
  int more = base ? 1 : -1;
  while (more > 0 && (more = next_live(p, base, &record, e)) > 0) {
    unsigned char key[PREPARE_KEY];
    memcpy(key, record.key, PREPARE_KEY);
    prepare_order(p, w->side, pass, key);
    if (!sort_external_fits(s->again, 1, record.bytes) && !sort_external_flush(s->again, NULL, e)) more = -1;
    if (more > 0 && !sort_external_add(s->again, key, record.payload, record.bytes, e)) more = -1;
  }
  sort_merge_close(base);
  return more == 0 && sort_external_flush(s->again, NULL, e) && sort_external_reduce(s->again, 1, NULL, NULL, e) &&
         (s->merge = sort_merge_open(s->again, 0, SORT_GROUPS - 1, request.memory, e)) != NULL;
}

static bool next_document(struct writing *w, int group, struct sort_record *record, struct error *e) {
  struct supply *s = &w->supply[group];
  const int64_t pass = mixture_pass(&w->mixture, group);
  if (s->pass != pass) {
    close_supply(s);
    const bool ok = pass == 0 || w->p->request->in_file_order ? (s->merge = open_base(w, group, e)) != NULL
                                                                : sort_again(w, s, group, pass, e);
    if (!ok) return false;
    s->pass = pass;
  }
  const int more = next_live(w->p, s->merge, record, e);
  return more > 0 || (more == 0 && error_set(e, ERROR_INTERNAL, "%s holds fewer documents than were counted", w->p->work));
}

/* ---- a document ------------------------------------------------------------ */

/* The text that its ids came from. */
static bool text_of(struct writing *w, const unsigned char *ids, int64_t n, int64_t *bytes, struct error *e) {
  const struct preparation *p = w->p;
  *bytes = 0;
  for (int64_t i = 0; i < n; i++, ids += p->token_bytes) {
    if ((i == 0 && p->bos >= 0) || (i == n - 1 && p->eos >= 0)) continue;
    int64_t length;
    const int32_t id = (int32_t)(p->token_bytes == 2 ? load_u16(ids) : load_u32(ids));
    const char *token = tokenizer_token(p->tokenizer, id, &length);
    if (!token) continue;
    if (*bytes + length > w->text_room) {
      const int64_t room = 2 * (*bytes + length) + 65536;
      char *text = realloc(w->text, (size_t)room);
      if (!text) return error_set(e, ERROR_SYSTEM, "out of memory for a document");
      w->text = text;
      w->text_room = room;
    }
    memcpy(w->text + *bytes, token, (size_t)length);
    *bytes += length;
  }
  return true;
}

static bool write_ids(const struct writing *w, const unsigned char *ids, int64_t n, struct error *e) {
  int32_t part[4096];
  const int width = w->p->token_bytes;
  for (int64_t i = 0; i < n;) {
    const int64_t count = n - i < 4096 ? n - i : 4096;
    for (int64_t k = 0; k < count; k++, ids += width) part[k] = (int32_t)(width == 2 ? load_u16(ids) : load_u32(ids));
    if (!stream_writer_tokens(w->writer, part, count, e)) return false;
    i += count;
  }
  return true;
}

static bool write_document(struct writing *w, int group, const struct sort_record *record, struct error *e) {
  const int source = record->key[PREPARE_AT_SOURCE];
  const int64_t n = record->bytes / w->p->token_bytes;
  struct data_prepared_source *counts = &w->counts[source];
  if (!stream_writer_document(w->writer, source, e) || !write_ids(w, record->payload, n, e)) return false;
  if (w->overlap) {
    int64_t bytes;
    if (!text_of(w, record->payload, n, &bytes, e)) return false;
    if (w->side == PREPARE_TRAIN)
      overlap_count(w->overlap, w->text, bytes, &counts->overlap);
    else if (!overlap_add(w->overlap, w->text, bytes, e))
      return error_hint(e, "raise data.prepare_memory or leave out data.overlap_report");
  }
  counts->side[w->side].written_documents++;
  counts->side[w->side].written_tokens += n;
  mixture_take(&w->mixture, group, n);
  return true;
}

/* ---- a stream -------------------------------------------------------------- */

static void count_unused(struct writing *w) {
  struct data_prepared *done = w->p->done;
  done->exhausted[w->side] = done->pool ? -1 : mixture_exhausted(&w->mixture);
  for (int i = 0; i < w->p->request->n_sources; i++) {
    const int64_t pool_unused = w->counts[i].side[w->side].tokens - w->counts[i].side[w->side].written_tokens;
    w->counts[i].side[w->side].unused_tokens = done->pool ? pool_unused : mixture_unused(&w->mixture, i);
  }
}

/* May it stand in the stream's text? */
static bool is_one_line(const char *path) {
  for (; *path; path++)
    if ((unsigned char)*path < ' ' || *path == 127) return false;
  return true;
}

static bool write_side(struct preparation *p, int side, struct stream_writer *writer, struct overlap *overlap, struct error *e) {
  const struct data_prepare *r = p->request;
  struct writing w = {.p = p, .side = side, .groups = p->pool ? 1 : r->n_sources, .writer = writer, .overlap = overlap,
                      .counts = p->done->source};
  int64_t documents[DATA_SOURCES], tokens[DATA_SOURCES], all = 0;
  for (int i = 0; i < r->n_sources; i++) {
    documents[i] = w.counts[i].side[side].documents;
    tokens[i] = w.counts[i].side[side].tokens;
    all += tokens[i];
  }
  mixture_start(&w.mixture, r->sources, r->n_sources, r->stages, r->n_stages, documents, tokens, r->tokens,
                side == PREPARE_VALIDATION);
  if (!mixture_check_sources(&w.mixture, p->pool ? NULL : r->sources, side == PREPARE_VALIDATION, e)) return false;
  if (side == PREPARE_TRAIN && r->tokens > 0) all = r->tokens;
  for (int g = 0; g < DATA_SOURCES; g++) w.supply[g].pass = -1;
  struct prepare_progress progress;
  prepare_progress_begin(&progress, side == PREPARE_TRAIN ? "writing the training stream" : "writing the validation stream", 0, r->quiet);
  bool ok = true;
  for (int group; ok && (group = mixture_choose(&w.mixture)) >= 0;) {
    struct sort_record record;
    ok = next_document(&w, group, &record, e) && write_document(&w, group, &record, e);
    const int64_t bytes = w.mixture.written * p->token_bytes;
    prepare_progress_say(&progress, bytes, all * p->token_bytes, bytes);
  }
  for (int g = 0; g < DATA_SOURCES; g++) close_supply(&w.supply[g]);
  free(w.text);
  if (!ok || !mixture_check_end(&w.mixture, p->pool ? NULL : r->sources, e)) return false;
  count_unused(&w);
  const char *notes[DATA_SOURCES];
  for (int i = 0; i < r->n_sources; i++) notes[i] = is_one_line(r->sources[i].path) ? r->sources[i].path : NULL;
  return stream_writer_finish(writer, notes, e);
}

/* ---- the overlap ----------------------------------------------------------- */

static bool publish_overlap(struct preparation *p, const struct overlap *overlap, struct error *e) {
  const struct data_prepare *r = p->request;
  struct data_prepared *done = p->done;
  done->overlap = overlap_side(overlap);
  snprintf(done->overlap_path, sizeof done->overlap_path, "%s.overlap.json", r->train_path);
  char *text = NULL;
  size_t bytes;
  FILE *f = open_memstream(&text, &bytes);
  if (!f) return error_set(e, ERROR_SYSTEM, "out of memory for the overlap report");
  const struct overlap_side *v = &done->overlap;
  fprintf(f, "{\"words\": %d,\n \"validation\": {\"documents\": %" PRId64 ", \"grams\": %" PRId64 ", \"distinct\": %" PRId64
             ", \"met_in_training\": %" PRId64 "},\n \"training\": [", OVERLAP_WORDS, v->documents, v->grams, v->distinct, v->met);
  for (int i = 0; i < r->n_sources; i++) {
    const struct overlap_total *t = &done->source[i].overlap;
    fprintf(f, "%s\n  {\"source\": \"", i ? "," : "");
    for (const char *c = r->sources[i].name; *c; c++) fprintf(f, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    fprintf(f, "\", \"documents\": %" PRId64 ", \"documents_sharing\": %" PRId64 ", \"grams\": %" PRId64 ", \"grams_shared\": %" PRId64 "}",
            t->documents, t->touched, t->grams, t->shared);
  }
  fprintf(f, "\n ]}\n");
  const bool written = fclose(f) == 0;
  const bool ok = written ? file_publish(done->overlap_path, text, bytes, ERROR_DATA, e)
                          : error_set(e, ERROR_SYSTEM, "out of memory for the overlap report");
  free(text);
  return ok;
}

/* ---- both ------------------------------------------------------------------ */

static void step(void *context, int64_t done, int64_t all) {
  if (!((const struct preparation *)context)->request->quiet)
    log_info("merging: %.3f of %.3f GB", (double)done / 1e9, (double)all / 1e9);
}

/* For a start after a kill, so it need not be durable. */
static bool mark_publishing(const struct preparation *p, struct error *e) {
  char *path;
  if (asprintf(&path, "%s/" PREPARE_PUBLISHING, p->work) < 0) return error_set(e, ERROR_SYSTEM, "out of memory");
  FILE *f = fopen(path, "we");
  const bool ok = f ? fclose(f) == 0 : error_errno(e, ERROR_DATA, "cannot create %s", path);
  free(path);
  return ok;
}

/* The streams are whole on the disk before one gets its name; validation comes first, because the
 * overlap is that of training with it. */
bool prepare_write(struct preparation *p, struct error *e) {
  const struct data_prepare *r = p->request;
  const char *paths[2] = {r->train_path, r->validation_path};
  const struct tokenizer_info *t = tokenizer_info(p->tokenizer);
  const char *names[DATA_SOURCES];
  for (int i = 0; i < r->n_sources; i++) names[i] = r->sources[i].name;
  char *settings = data_prepare_settings(r);
  const struct stream_start start = {.vocab_size = t->vocab_size, .bos = p->bos, .eos = p->eos, .tokenizer = t->name,
                                     .names = names, .n_sources = r->n_sources, .settings = settings};
  struct stream_writer *w[2] = {NULL, NULL};
  struct overlap *overlap = NULL;
  bool ok = settings || error_set(e, ERROR_SYSTEM, "out of memory preparing data");
  ok = ok && sort_external_reduce(p->sort, p->pool ? 1 : r->n_sources, step, p, e);
  if (ok && r->overlap_report && r->validation_path) ok = (overlap = overlap_open(p->memory / 2, e)) != NULL;
  for (int side = PREPARE_VALIDATION; ok && side >= PREPARE_TRAIN; side--) {
    if (!paths[side]) continue;
    w[side] = stream_writer_open(paths[side], &start, e);
    ok = w[side] && write_side(p, side, w[side], overlap, e);
  }
  if (ok && overlap) ok = publish_overlap(p, overlap, e);
  ok = ok && mark_publishing(p, e);
  for (int side = PREPARE_VALIDATION; ok && side >= PREPARE_TRAIN; side--) {
    if (!w[side]) continue;
    p->done->documents[side] = 0;
    for (int i = 0; i < r->n_sources; i++) p->done->documents[side] += p->done->source[i].side[side].written_documents;
    p->done->tokens[side] = stream_writer_count(w[side]);
    ok = stream_writer_publish(w[side], e);
  }
  overlap_close(overlap);
  stream_writer_close(w[0]);
  stream_writer_close(w[1]);
  free(settings);
  return ok;
}
