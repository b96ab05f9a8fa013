/* Token files to documents: every byte is read once, in segments that threads
 * take in any order, for the digests of blocks, the check of ids and the content
 * hashes of documents.  A document that crosses a segment's end is hashed
 * afterwards. */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "data/index_parts.h"
#include "data/tokens_parts.h"

enum { SEGMENT = 16 * INDEX_BLOCK, OVERHANG = 8, PIECE = 1 << 16 };

/* What one segment gave. */
struct segment {
  int64_t file, begin; /* byte of the file where it begins */
  struct index_document *document; /* those that begin here; a length of -1: not known here */
  int64_t count, room;
};

struct worker {
  unsigned char *raw; /* SEGMENT + OVERHANG */
  int32_t *ids;       /* one more than SEGMENT */
  int64_t most_id;
};

struct scan {
  struct index_scan *out;
  const struct data_index *request;
  struct segment *segment;
  int64_t segments;
  struct worker *worker;
  int workers;
  int64_t *open_document; /* numbers of documents whose content is still to be hashed */
  pthread_mutex_t mutex;  /* guards what follows */
  int64_t failed;         /* the first task that failed; INT64_MAX: none */
  struct error failure;
};

/* The error of the first task in order is the one told, whatever thread met one first. */
static void fail(struct scan *s, int64_t task, const struct error *e) {
  pthread_mutex_lock(&s->mutex);
  if (task < s->failed) {
    s->failed = task;
    s->failure = *e;
  }
  pthread_mutex_unlock(&s->mutex);
}

static bool failed_before(struct scan *s, int64_t task) {
  pthread_mutex_lock(&s->mutex);
  const bool failed = s->failed < task;
  pthread_mutex_unlock(&s->mutex);
  return failed;
}

/* ---- finding ---------------------------------------------------------------- */

static bool out_of_memory(struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory for the index"); }

static bool open_source(struct index_scan *s, const struct data_source *source, int number, struct error *e) {
  struct tokens_list list = {0};
  bool ok = tokens_find(&list, source, e);
  struct tokens_file *files = ok ? realloc(s->file, (size_t)(s->files + list.count) * sizeof *files) : NULL;
  if (files) s->file = files;
  int *sources = files ? realloc(s->source, (size_t)(s->files + list.count) * sizeof *sources) : NULL;
  if (sources) s->source = sources;
  if (ok && !sources) ok = out_of_memory(e);
  for (int64_t i = 0; ok && i < list.count; i++) {
    struct tokens_file *f = &s->file[s->files];
    ok = tokens_open(f, list.path[i], source, e);
    if (!ok) break;
    close(f->fd); /* thousands of files may be more than a process can have open */
    f->fd = -1;
    s->source[s->files++] = number;
    if (s->files > INT32_MAX / 2) ok = error_set(e, ERROR_DATA, "%s: too many token files", source->path);
  }
  tokens_list_free(&list);
  return ok;
}

static int reopen(const struct tokens_file *f, struct error *e) {
  int64_t size = 0;
  const int fd = tokens_open_file(f->path, &size, e);
  if (fd < 0 || size == f->size) return fd;
  close(fd);
  error_set(e, ERROR_DATA, "%s: it had %" PRId64 " bytes, now it has %" PRId64 ": it changes while it is being indexed", f->path, f->size, size);
  return -1;
}

/* ---- segments --------------------------------------------------------------- */

static bool add_document(struct segment *g, const struct index_document *d, struct error *e) {
  if (g->count == g->room) {
    const int64_t room = g->room ? 2 * g->room : 16;
    struct index_document *documents = realloc(g->document, (size_t)room * sizeof *documents);
    if (!documents) return out_of_memory(e);
    g->document = documents;
    g->room = room;
  }
  g->document[g->count++] = *d;
  return true;
}

/* The first token that begins at byte `at` or later. */
static int64_t token_at(const struct tokens_file *f, int64_t at) {
  if (at <= f->data_at) return 0;
  const int64_t token = ceil_div(at - f->data_at, f->width);
  return token < f->tokens ? token : f->tokens;
}

/* Adds the document [first, end); ids of token `a` on are at hand, up to token b. */
static bool end_document(struct segment *g, int64_t first, int64_t end, const int32_t *ids, int64_t a, int64_t b, struct error *e) {
  struct index_document d = {.first = first, .length = end - first, .file = (int32_t)g->file};
  d.hashed = end <= b;
  if (d.hashed) d.content = hash_bytes(ids + (first - a), (size_t)d.length * sizeof *ids);
  return add_document(g, &d, e);
}

/* Documents of a table that begin at tokens [a, b). */
static bool documents_by_table(const struct tokens_file *f, struct segment *g, const int32_t *ids, int64_t a, int64_t b, struct error *e) {
  int64_t low = 0, high = f->documents; /* the first that begins at a or later: below low all begin before */
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if ((middle > 0 ? f->ends[middle - 1] : 0) < a)
      low = middle + 1;
    else
      high = middle;
  }
  for (int64_t d = low; d < f->documents; d++) {
    const int64_t first = d > 0 ? f->ends[d - 1] : 0;
    if (first >= b) break;
    if (f->ends[d] > first && !end_document(g, first, f->ends[d], ids, a, b, e)) return false;
  }
  return true;
}

/* Documents that begin at tokens [a, b) by bos and eos; `before`: the id of token a - 1. */
static bool documents_by_ids(const struct tokens_file *f, struct segment *g, const int32_t *ids, int64_t before, int64_t a, int64_t b, struct error *e) {
  int64_t first = -1;
  for (int64_t t = a; t < b; t++) {
    const int32_t id = ids[t - a];
    if (t == 0 || id == f->bos || (f->eos >= 0 && before == f->eos)) {
      if (first >= 0 && !end_document(g, first, t, ids, a, b, e)) return false;
      first = t;
    }
    before = id;
  }
  if (first < 0) return true;
  if (b == f->tokens) return end_document(g, first, b, ids, a, b, e);
  const struct index_document d = {.first = first, .length = -1, .file = (int32_t)g->file};
  return add_document(g, &d, e);
}

static bool read_segment(struct scan *s, struct segment *g, struct worker *w, int fd, struct error *e) {
  struct index_scan *out = s->out;
  const struct tokens_file *f = &out->file[g->file];
  const int64_t end = g->begin + SEGMENT < f->size ? g->begin + SEGMENT : f->size;
  const int64_t until = end + OVERHANG < f->size ? end + OVERHANG : f->size;
  if (!frame_read_at(fd, f->path, w->raw, until - g->begin, g->begin, e)) return false;
  unsigned char *digest = out->digest + 16 * (out->first_block[g->file] + g->begin / INDEX_BLOCK);
  for (int64_t at = g->begin; at < end; at += INDEX_BLOCK, digest += 16)
    store_hash(digest, hash_bytes(w->raw + (at - g->begin), (size_t)(end - at < INDEX_BLOCK ? end - at : INDEX_BLOCK)));

  const int64_t a = token_at(f, g->begin), b = token_at(f, end);
  if (a == b) return true;
  if (!tokens_decode(f, w->raw + (f->data_at + a * f->width - g->begin), a, b - a, s->request->vocab_size, w->ids, e)) return false;
  for (int64_t i = 0; i < b - a; i++) w->most_id = w->ids[i] > w->most_id ? w->ids[i] : w->most_id;
  if (f->ends) return documents_by_table(f, g, w->ids, a, b, e);
  int32_t before = -1;
  if (a > 0 && f->eos >= 0) {
    unsigned char raw[8];
    if (!frame_read_at(fd, f->path, raw, f->width, f->data_at + (a - 1) * f->width, e) ||
        !tokens_decode(f, raw, a - 1, 1, s->request->vocab_size, &before, e))
      return false;
  }
  return documents_by_ids(f, g, w->ids, before, a, b, e);
}

static void segment_task(void *context, int64_t task, int worker) {
  struct scan *s = context;
  struct segment *g = &s->segment[task];
  struct error e = {0};
  if (failed_before(s, task)) return;
  const int fd = reopen(&s->out->file[g->file], &e);
  if (fd < 0 || !read_segment(s, g, &s->worker[worker], fd, &e)) fail(s, task, &e);
  if (fd >= 0) close(fd);
}

/* ---- documents that cross segments -------------------------------------------- */

static bool hash_document(struct scan *s, struct index_document *d, struct worker *w, int fd, struct hash_state *h, struct error *e) {
  const struct tokens_file *f = &s->out->file[d->file];
  for (int64_t at = 0; at < d->length; at += PIECE) {
    const int64_t n = d->length - at < PIECE ? d->length - at : PIECE, first = d->first + at;
    if (!frame_read_at(fd, f->path, w->raw, n * f->width, f->data_at + first * f->width, e) ||
        !tokens_decode(f, w->raw, first, n, s->request->vocab_size, w->ids, e))
      return false;
    hash_feed(h, w->ids, (size_t)n * sizeof *w->ids);
  }
  return true;
}

static void document_task(void *context, int64_t task, int worker) {
  struct scan *s = context;
  struct index_document *d = &s->out->document[s->open_document[task]];
  struct error e = {0};
  if (failed_before(s, task)) return;
  struct hash_state *h = hash_open();
  const int fd = h ? reopen(&s->out->file[d->file], &e) : -1;
  if (!h) out_of_memory(&e);
  if (fd < 0 || !hash_document(s, d, &s->worker[worker], fd, h, &e)) fail(s, task, &e);
  if (h) d->content = hash_close(h);
  if (fd >= 0) close(fd);
}

/* ---- all of it ---------------------------------------------------------------- */

static bool lay_out(struct scan *s, struct error *e) {
  struct index_scan *out = s->out;
  out->first_block = malloc((size_t)(out->files + 1) * sizeof *out->first_block);
  if (!out->first_block) return out_of_memory(e);
  int64_t blocks = 0;
  for (int64_t i = 0; i < out->files; i++) {
    const struct tokens_file *f = &out->file[i];
    out->first_block[i] = blocks;
    blocks += index_blocks(f->size);
    s->segments += ceil_div(f->size, SEGMENT);
    if (!checked_add(out->bytes, f->size, &out->bytes)) return error_set(e, ERROR_DATA, "the token files have more than 2^63 bytes");
    for (int64_t d = 0; d < f->documents; d++) out->empty += f->ends[d] == (d > 0 ? f->ends[d - 1] : 0);
  }
  out->first_block[out->files] = blocks;
  out->digest = malloc((size_t)blocks * 16);
  s->segment = calloc((size_t)s->segments, sizeof *s->segment);
  s->worker = calloc((size_t)s->workers, sizeof *s->worker);
  if (!out->digest || !s->segment || !s->worker) return out_of_memory(e);
  for (int64_t i = 0, k = 0; i < out->files; i++)
    for (int64_t at = 0; at < out->file[i].size; at += SEGMENT) s->segment[k++] = (struct segment){.file = i, .begin = at};
  for (int i = 0; i < s->workers; i++) {
    s->worker[i] = (struct worker){.raw = malloc(SEGMENT + OVERHANG), .ids = malloc((SEGMENT + 1) * sizeof(int32_t))};
    if (!s->worker[i].raw || !s->worker[i].ids) return out_of_memory(e);
  }
  return true;
}

/* Segments' documents one after the other; a length that was not known reaches to the next one. */
static bool gather(struct scan *s, int64_t *n_open, struct error *e) {
  struct index_scan *out = s->out;
  int64_t total = 0, open = 0;
  for (int64_t k = 0; k < s->segments; k++) total += s->segment[k].count;
  out->document = malloc((size_t)total * sizeof *out->document + 1);
  if (!out->document) return out_of_memory(e);
  for (int64_t k = 0; k < s->segments; k++) {
    struct segment *g = &s->segment[k];
    if (g->count > 0) memcpy(out->document + out->documents, g->document, (size_t)g->count * sizeof *g->document);
    out->documents += g->count;
    free(g->document);
    g->document = NULL;
  }
  for (int64_t d = 0; d < total; d++) {
    struct index_document *x = &out->document[d];
    const bool last = d + 1 == total || out->document[d + 1].file != x->file;
    if (x->length < 0) x->length = (last ? out->file[x->file].tokens : out->document[d + 1].first) - x->first;
    open += !x->hashed;
  }
  s->open_document = malloc((size_t)open * sizeof *s->open_document + 1);
  if (!s->open_document) return out_of_memory(e);
  *n_open = 0;
  for (int64_t d = 0; d < total; d++)
    if (!out->document[d].hashed) s->open_document[(*n_open)++] = d;
  return true;
}

static bool run(struct scan *s, struct threads *t, int64_t n, void (*task)(void *, int64_t, int), struct error *e) {
  s->failed = INT64_MAX;
  threads_run(t, n, task, s);
  if (s->failed == INT64_MAX) return true;
  *e = s->failure;
  return false;
}

bool index_scan(struct index_scan *out, const struct data_index *x, struct threads *t, struct error *e) {
  *out = (struct index_scan){0};
  struct scan s = {.out = out, .request = x, .workers = threads_count(t)};
  bool ok = pthread_mutex_init(&s.mutex, NULL) == 0 || out_of_memory(e);
  if (!ok) return false;
  for (int i = 0; ok && i < x->n_sources; i++) ok = open_source(out, &x->sources[i], i, e);
  int64_t n_open = 0;
  ok = ok && lay_out(&s, e) && run(&s, t, s.segments, segment_task, e) && gather(&s, &n_open, e) &&
       run(&s, t, n_open, document_task, e);
  for (int i = 0; s.worker && i < s.workers; i++) {
    if (s.worker[i].most_id > out->most_id) out->most_id = s.worker[i].most_id;
    free(s.worker[i].raw);
    free(s.worker[i].ids);
  }
  for (int64_t k = 0; s.segment && k < s.segments; k++) free(s.segment[k].document);
  free(s.worker);
  free(s.segment);
  free(s.open_document);
  pthread_mutex_destroy(&s.mutex);
  return ok;
}

void index_scan_free(struct index_scan *s) {
  for (int64_t i = 0; i < s->files; i++) tokens_close(&s->file[i]);
  free(s->file);
  free(s->source);
  free(s->first_block);
  free(s->digest);
  free(s->document);
}
