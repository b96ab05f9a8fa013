/* Pass 1 of `prepare`: every source is read once, into runs of the sort.
 *
 * One thread reads records into batches, workers make documents of them, and the
 * calling thread takes finished batches in the order in which they were read.  So
 * runs, counters and the first error are the same for any number of workers.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/log.h"
#include "data/prepare_parts.h"

enum { BATCH_BYTES = 256 * 1024, BATCH_RECORDS = 2048 };
static const double flush_every_s = 60; /* work that a kill may cost */

enum batch_state { BATCH_FREE, BATCH_FILLED, BATCH_TAKEN, BATCH_DONE };

struct batch {
  enum batch_state state;
  char *text;
  int64_t bytes, room;
  struct prepare_input *in; /* [BATCH_RECORDS]; `bytes` is set when text is complete */
  int64_t n;
  int64_t file, records, ordinal; /* the position after it */
  int64_t disk;                   /* bytes of files read by then */
  bool last;
  struct prepare_output out;
  struct data_prepared_source counts[DATA_SOURCES];
  struct error error; /* code 0: none */
};

struct reading {
  struct preparation *p;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  struct batch *batch; /* a ring */
  int64_t n_batches;
  int64_t produced, taken, collected; /* how many so far */
  int64_t in_flight;                  /* bytes of text in batches that are not collected */
  bool stop;
};

/* ---- the reader ------------------------------------------------------------ */

/* The next free batch, once the text in flight leaves room for `bytes` more; NULL: stop. */
static struct batch *next_free(struct reading *r, int64_t bytes) {
  const int64_t most = r->p->memory / 32;
  struct batch *b = NULL;
  pthread_mutex_lock(&r->mutex);
  for (;;) {
    b = &r->batch[r->produced % r->n_batches];
    if (r->stop) b = NULL;
    if (!b || (b->state == BATCH_FREE && (r->in_flight == 0 || r->in_flight + bytes <= most))) break;
    pthread_cond_wait(&r->changed, &r->mutex);
  }
  pthread_mutex_unlock(&r->mutex);
  if (!b) return NULL;
  b->n = b->bytes = 0;
  b->last = false;
  b->error.code = ERROR_NONE;
  return b;
}

static void hand_over(struct reading *r, struct batch *b) {
  int64_t at = 0;
  for (int64_t i = 0; i < b->n; i++) {
    b->in[i].bytes = b->text + at;
    at += b->in[i].length;
  }
  pthread_mutex_lock(&r->mutex);
  b->state = BATCH_FILLED;
  r->in_flight += b->bytes;
  r->produced++;
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->mutex);
}

static bool put_record(struct batch *b, const struct corpus_record *record, int64_t file, int64_t ordinal, struct error *e) {
  if (b->bytes + record->length > b->room) {
    const int64_t room = b->bytes + record->length > BATCH_BYTES ? b->bytes + record->length : BATCH_BYTES;
    char *text = realloc(b->text, (size_t)room);
    if (!text) return error_set(e, ERROR_SYSTEM, "out of memory reading %" PRId64 " bytes", room);
    b->text = text;
    b->room = room;
  }
  if (record->length > 0) memcpy(b->text + b->bytes, record->bytes, (size_t)record->length);
  b->bytes += record->length;
  b->in[b->n++] = (struct prepare_input){.length = record->length, .line = record->line, .file = file, .ordinal = ordinal};
  return true;
}

/* The file must be the one that was listed. */
static bool check_unchanged(const struct corpus_file *f, struct error *e) {
  struct stat st;
  if (stat(f->path, &st) != 0) return error_errno(e, ERROR_DATA, "cannot examine %s", f->path);
  if (st.st_size == f->bytes && st.st_mtim.tv_sec == f->changed_s && st.st_mtim.tv_nsec == f->changed_ns) return true;
  error_set(e, ERROR_DATA, "%s changed while it was being prepared", f->path);
  return error_hint(e, "start again when nothing writes to it");
}

/* Where the reader is. */
struct place {
  struct batch *b; /* being filled; NULL: none, or stop */
  int64_t file, records, ordinal;
  int64_t disk; /* bytes of the files before */
};

static void set_position(struct place *at, int64_t file, int64_t records, int64_t disk) {
  at->b->file = file;
  at->b->records = records;
  at->b->ordinal = at->ordinal;
  at->b->disk = disk;
}

/* Records of one file from number at->records on.  False with at->b NULL: stop. */
static bool read_file(struct reading *r, struct place *at, struct error *e) {
  const struct corpus_file *f = &r->p->files.file[at->file];
  struct corpus_reader *reader = check_unchanged(f, e) ? corpus_reader_open(f, r->p->memory / 32, e) : NULL;
  if (!reader) return false;
  struct corpus_record record;
  int more = 1;
  for (int64_t i = 0; i < at->records && more > 0; i++) more = corpus_reader_next(reader, &record, e);
  while (more > 0 && (more = corpus_reader_next(reader, &record, e)) > 0) {
    if (at->b->n == BATCH_RECORDS || (at->b->n > 0 && at->b->bytes + record.length > BATCH_BYTES)) {
      hand_over(r, at->b);
      at->b = next_free(r, record.length > BATCH_BYTES ? record.length : BATCH_BYTES);
      if (!at->b) break;
    }
    if (!put_record(at->b, &record, at->file, at->ordinal, e)) {
      more = -1;
      break;
    }
    at->records++;
    at->ordinal++;
    set_position(at, at->file, at->records, at->disk + corpus_reader_position(reader));
  }
  corpus_reader_close(reader);
  if (more != 0 || !at->b || !check_unchanged(f, e)) return false;
  at->file++;
  at->records = 0;
  at->disk += f->bytes;
  set_position(at, at->file, 0, at->disk);
  return true;
}

static void *reader_main(void *context) {
  struct reading *r = context;
  const struct prepare_state *s = &r->p->state;
  struct place at = {.file = s->file, .records = s->records, .ordinal = s->ordinal};
  for (int64_t i = 0; i < at.file; i++) at.disk += r->p->files.file[i].bytes;
  at.b = next_free(r, BATCH_BYTES);
  if (at.b) set_position(&at, at.file, at.records, at.disk);
  struct error e = {0};
  bool ok = true;
  while (ok && at.b && at.file < r->p->files.count) ok = read_file(r, &at, &e);
  if (!at.b) return NULL;
  if (!ok) at.b->error = e; /* after the records before it */
  at.b->last = true;
  hand_over(r, at.b);
  return NULL;
}

/* ---- workers --------------------------------------------------------------- */

static void work_on(const struct preparation *p, struct prepare_worker *w, struct batch *b) {
  struct error e = {0};
  memset(b->counts, 0, sizeof b->counts);
  b->out.n = b->out.used = 0;
  for (int64_t i = 0; i < b->n; i++) {
    const int source = p->files.file[b->in[i].file].source;
    if (!prepare_document(p, w, &b->in[i], &b->out, &b->counts[source], &e)) {
      b->error = e;
      return;
    }
  }
}

static void *worker_main(void *context) {
  struct reading *r = context;
  struct prepare_worker w = {0};
  struct error e = {0};
  w.scratch = tokenizer_scratch_open(r->p->tokenizer, &e);
  for (;;) {
    pthread_mutex_lock(&r->mutex);
    while (!r->stop && r->taken == r->produced) pthread_cond_wait(&r->changed, &r->mutex);
    struct batch *b = r->stop ? NULL : &r->batch[r->taken++ % r->n_batches];
    if (b) b->state = BATCH_TAKEN;
    pthread_mutex_unlock(&r->mutex);
    if (!b) break;
    if (w.scratch)
      work_on(r->p, &w, b);
    else
      b->error = e;
    pthread_mutex_lock(&r->mutex);
    b->state = BATCH_DONE;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->mutex);
  }
  if (w.scratch) tokenizer_scratch_close(w.scratch);
  tokenizer_ids_free(&w.ids);
  free(w.text);
  return NULL;
}

/* ---- the collector --------------------------------------------------------- */

static void add_counts(struct data_prepared_source *to, const struct data_prepared_source *more) {
  to->bytes += more->bytes;
  to->documents += more->documents;
  to->empty += more->empty;
  to->invalid += more->invalid;
  to->replacements += more->replacements;
  to->invalid_dropped += more->invalid_dropped;
  for (int side = 0; side < 2; side++) {
    to->side[side].documents += more->side[side].documents;
    to->side[side].tokens += more->side[side].tokens;
  }
}

/* Gives a finished batch to the sort; *flushed is when the last run was published. */
static bool collect(struct preparation *p, const struct batch *b, double *flushed, struct error *e) {
  struct prepare_state *s = &p->state;
  const bool held = sort_external_held(p->sort) > 0;
  if (held && (!sort_external_fits(p->sort, b->out.n, b->out.used) || clock_seconds() - *flushed > flush_every_s)) {
    if (!sort_external_flush(p->sort, s, e)) return false;
    *flushed = clock_seconds();
  }
  for (int64_t i = 0; i < b->out.n; i++) {
    const struct prepare_made *m = &b->out.made[i];
    if (!sort_external_add(p->sort, m->key, b->out.out + m->at, m->bytes, e)) return false;
  }
  for (int i = 0; i < p->request->n_sources; i++) add_counts(&s->source[i], &b->counts[i]);
  s->file = b->file;
  s->records = b->records;
  s->ordinal = b->ordinal;
  return true;
}

static bool collect_all(struct reading *r, struct error *e) {
  struct preparation *p = r->p;
  struct prepare_progress progress;
  int64_t begin = 0, text = 0;
  for (int64_t i = 0; i < p->state.file; i++) begin += p->files.file[i].bytes;
  prepare_progress_begin(&progress, "reading", begin, p->request->quiet);
  double flushed = clock_seconds();
  for (bool last = false; !last;) {
    struct batch *b = &r->batch[r->collected % r->n_batches];
    pthread_mutex_lock(&r->mutex);
    while (b->state != BATCH_DONE) pthread_cond_wait(&r->changed, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
    if (b->error.code != ERROR_NONE) {
      *e = b->error;
      return false;
    }
    if (!collect(p, b, &flushed, e)) return false;
    last = b->last;
    text += b->bytes;
    prepare_progress_say(&progress, b->disk, p->file_bytes, text);
    if (b->room > 4 * BATCH_BYTES) { /* a long record's memory is given back */
      free(b->text);
      free(b->out.out);
      b->text = NULL;
      b->out.out = NULL;
      b->room = b->out.room = 0;
    }
    pthread_mutex_lock(&r->mutex);
    b->state = BATCH_FREE;
    r->in_flight -= b->bytes;
    r->collected++;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->mutex);
  }
  p->state.finished = 1;
  return sort_external_flush(p->sort, &p->state, e);
}

/* ---- all of it ------------------------------------------------------------- */

static bool make_batches(struct reading *r, struct error *e) {
  r->batch = calloc((size_t)r->n_batches, sizeof *r->batch);
  bool ok = r->batch != NULL;
  for (int64_t i = 0; ok && i < r->n_batches; i++) {
    r->batch[i].in = malloc(BATCH_RECORDS * sizeof *r->batch[i].in);
    r->batch[i].text = malloc(BATCH_BYTES);
    r->batch[i].room = BATCH_BYTES;
    ok = r->batch[i].in && r->batch[i].text;
  }
  return ok || error_set(e, ERROR_SYSTEM, "out of memory reading the sources");
}

static void free_batches(struct reading *r) {
  for (int64_t i = 0; r->batch && i < r->n_batches; i++) {
    free(r->batch[i].in);
    free(r->batch[i].text);
    free(r->batch[i].out.made);
    free(r->batch[i].out.out);
  }
  free(r->batch);
}

static void stop_all(struct reading *r) {
  pthread_mutex_lock(&r->mutex);
  r->stop = true;
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->mutex);
}

bool prepare_read(struct preparation *p, struct error *e) {
  if (p->state.finished) return true;
  const int64_t most = p->memory / 32 / BATCH_BYTES; /* a batch takes some 6 times its text */
  struct reading r = {.p = p, .n_batches = 2 * (int64_t)p->threads + 2};
  if (r.n_batches > most) r.n_batches = most > 2 ? most : 2;
  pthread_t reader, *worker = calloc((size_t)p->threads, sizeof *worker);
  if (!worker) return error_set(e, ERROR_SYSTEM, "out of memory reading the sources");
  pthread_mutex_init(&r.mutex, NULL);
  pthread_cond_init(&r.changed, NULL);
  bool ok = make_batches(&r, e);
  const bool reads = ok && pthread_create(&reader, NULL, reader_main, &r) == 0;
  int workers = 0;
  while (reads && workers < p->threads && pthread_create(&worker[workers], NULL, worker_main, &r) == 0) workers++;
  if (ok && (!reads || workers == 0)) ok = error_set(e, ERROR_SYSTEM, "cannot start a thread");
  ok = ok && collect_all(&r, e);
  stop_all(&r);
  if (reads) pthread_join(reader, NULL);
  for (int i = 0; i < workers; i++) pthread_join(worker[i], NULL);
  pthread_cond_destroy(&r.changed);
  pthread_mutex_destroy(&r.mutex);
  free_batches(&r);
  free(worker);
  return ok;
}
