/* From text files to token streams.
 *
 * Pass 1 reads every file once for its content hash; that decides all: which
 * files are duplicates, which side a document falls on, and where.  Pass 2
 * reads the documents in their final order and writes them.  Nothing depends
 * on names, dates or the order in which files were found, except which of two
 * equal files is called the duplicate.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/hash.h"
#include "data/corpus.h"
#include "data/corpus_bytes.h"
#include "data/data.h"
#include "data/stream_file.h"

#define CHUNK (256 * 1024) /* bytes of text in memory */

enum { TRAIN = 0, VALIDATION = 1 };

struct document {
  struct hash content, order;
  int64_t file, bytes;
  int side;
};

struct preparation {
  const struct data_prepare *request;
  struct corpus_files files;
  struct document *documents;
  int64_t count;
  char *text;
  int32_t *ids;
};

/* A hash of `label`, `seed` and a content hash. */
static struct hash keyed(const char label[8], uint64_t seed, struct hash content) {
  unsigned char bytes[32];
  memcpy(bytes, label, 8);
  store_u64(bytes + 8, seed);
  store_hash(bytes + 16, content);
  return hash_bytes(bytes, sizeof bytes);
}

static int compare_hash(struct hash a, struct hash b) {
  if (a.high != b.high) return a.high < b.high ? -1 : 1;
  return (a.low > b.low) - (a.low < b.low);
}

static int by_content(const void *x, const void *y) {
  const struct document *a = x, *b = y;
  int c = compare_hash(a->content, b->content);
  return c ? c : (a->file > b->file) - (a->file < b->file);
}

static int by_order(const void *x, const void *y) {
  const struct document *a = x, *b = y;
  int c = compare_hash(a->order, b->order);
  return c ? c : compare_hash(a->content, b->content);
}

/* Feeds a file's text through `text`; with a writer, writes it too. */
static bool read_document(struct preparation *p, const char *path, struct stream_writer *w, struct hash *content,
                          int64_t *bytes, struct error *e) {
  struct corpus_bytes *t = corpus_bytes_open(path, e);
  if (!t) return false;
  struct hash_state *h = hash_open();
  bool ok = h || error_set(e, ERROR_SYSTEM, "out of memory reading %s", path);
  *bytes = 0;
  while (ok) {
    int64_t got = corpus_bytes_read(t, p->text, CHUNK, e);
    if (got < 0) ok = false;
    if (got <= 0) break;
    hash_feed(h, p->text, (size_t)got);
    *bytes += got;
    if (w) ok = stream_writer_tokens(w, p->ids, tokenizer_bytes_encode(p->text, got, p->ids), e);
  }
  if (h) *content = hash_close(h);
  corpus_bytes_close(t);
  return ok;
}

/* The streams must not take the place of the text that they are made of. */
static bool check_targets(const struct preparation *p, struct error *e) {
  const char *targets[2] = {p->request->train_path, p->request->validation_path};
  if (targets[1] && strcmp(targets[0], targets[1]) == 0)
    return error_set(e, ERROR_DATA, "training and validation stream have the same path %s", targets[0]);
  for (int side = 0; side < 2; side++) {
    struct stat target, st;
    if (!targets[side] || stat(targets[side], &target) != 0) continue; /* new */
    for (int64_t i = 0; i < p->files.count; i++)
      if (stat(p->files.file[i].path, &st) == 0 && st.st_dev == target.st_dev && st.st_ino == target.st_ino)
        return error_set(e, ERROR_DATA, "the stream %s would overwrite the source %s", targets[side],
                         p->files.file[i].path);
  }
  return true;
}

static bool read_all(struct preparation *p, struct data_prepared *done, struct error *e) {
  p->documents = malloc((size_t)p->files.count * sizeof *p->documents);
  if (!p->documents) return error_set(e, ERROR_SYSTEM, "out of memory for %" PRId64 " documents", p->files.count);
  for (int64_t i = 0; i < p->files.count; i++) {
    struct document d = {.file = i};
    if (!read_document(p, p->files.file[i].path, NULL, &d.content, &d.bytes, e)) return false;
    if (d.bytes == 0)
      done->empty++;
    else
      p->documents[p->count++] = d;
  }
  return true;
}

/* Drops duplicates, chooses sides, puts documents in order. */
static bool arrange(struct preparation *p, struct data_prepared *done, struct error *e) {
  const struct data_prepare *r = p->request;
  double fraction = r->validation_path ? r->validation_fraction : 0;
  if (p->count == 0) return error_set(e, ERROR_DATA, "all %" PRId64 " text files are empty", p->files.count);
  qsort(p->documents, (size_t)p->count, sizeof *p->documents, by_content);
  int64_t kept = 0;
  for (int64_t i = 0; i < p->count; i++)
    if (i == 0 || !hash_equal(p->documents[i].content, p->documents[kept - 1].content))
      p->documents[kept++] = p->documents[i];
  done->duplicates = p->count - kept;
  p->count = kept;
  for (int64_t i = 0; i < kept; i++) {
    struct document *d = &p->documents[i];
    d->order = keyed("order\0\0", r->seed, d->content);
    uint64_t u = keyed("holdout", 0, d->content).high;
    d->side = (double)(u >> 11) * 0x1p-53 < fraction ? VALIDATION : TRAIN;
    done->documents[d->side]++;
  }
  for (int side = 0; r->validation_path && side < 2; side++)
    if (done->documents[side] == 0) {
      error_set(e, ERROR_DATA, "of %" PRId64 " distinct documents none is left for %s (data.validation_fraction %g)", kept,
                side == TRAIN ? "training" : "validation", fraction);
      if (kept == 1) return error_hint(e, "give at least two files: a file is one document");
      return error_hint(e, "%s data.validation_fraction or add documents", side == TRAIN ? "lower" : "raise");
    }
  qsort(p->documents, (size_t)kept, sizeof *p->documents, by_order);
  return true;
}

static bool write_documents(struct preparation *p, struct stream_writer *w, int side, struct error *e) {
  static const int32_t bos = TOKENIZER_BYTES_BOS, eos = TOKENIZER_BYTES_EOS;
  for (int64_t i = 0; i < p->count; i++) {
    const struct document *d = &p->documents[i];
    if (d->side != side) continue;
    const char *path = p->files.file[d->file].path;
    struct hash content;
    int64_t bytes;
    if (!stream_writer_document(w, p->files.file[d->file].source, e) || !stream_writer_tokens(w, &bos, 1, e) ||
        !read_document(p, path, w, &content, &bytes, e) || !stream_writer_tokens(w, &eos, 1, e))
      return false;
    if (bytes != d->bytes || !hash_equal(content, d->content)) {
      error_set(e, ERROR_DATA, "%s changed while it was being prepared", path);
      return error_hint(e, "start again when nothing writes to it");
    }
  }
  const char *notes[STREAM_SOURCES];
  for (int i = 0; i < p->request->n_sources; i++) notes[i] = p->request->sources[i].path;
  return stream_writer_finish(w, notes, e);
}

/* The last part of the path; of equal ones the later ones have a number. */
static void source_name(const struct data_source *sources, int i, char name[STREAM_NAME]) {
  const char *path = sources[i].path;
  int end = (int)strlen(path), begin;
  while (end > 1 && path[end - 1] == '/') end--;
  for (begin = end; begin > 0 && path[begin - 1] != '/';) begin--;
  if (end - begin > STREAM_NAME - 8) begin = end - (STREAM_NAME - 8);
  snprintf(name, STREAM_NAME, "%.*s", end - begin, path + begin);
  for (int j = 0; j < i; j++) {
    char other[STREAM_NAME];
    source_name(sources, j, other);
    if (strcmp(other, name) == 0) snprintf(name, STREAM_NAME, "%.*s-%d", end - begin, path + begin, i);
  }
}

/* The streams are whole on the disk before one gets its name. */
static bool write_streams(struct preparation *p, struct data_prepared *done, struct error *e) {
  const char *paths[2] = {p->request->train_path, p->request->validation_path};
  struct stream_writer *w[2] = {NULL, NULL};
  char names[STREAM_SOURCES][STREAM_NAME];
  const char *name[STREAM_SOURCES];
  for (int i = 0; i < p->request->n_sources; i++) {
    source_name(p->request->sources, i, names[i]);
    name[i] = names[i];
  }
  const struct stream_start start = {.vocab_size = TOKENIZER_BYTES_VOCAB, .bos = TOKENIZER_BYTES_BOS, .eos = TOKENIZER_BYTES_EOS,
                                     .tokenizer = "bytes", .names = name, .n_sources = p->request->n_sources};
  bool ok = true;
  int sides = paths[VALIDATION] ? 2 : 1;
  for (int side = 0; ok && side < sides; side++) {
    w[side] = stream_writer_open(paths[side], &start, e);
    ok = w[side] && write_documents(p, w[side], side, e);
  }
  for (int side = 0; ok && side < sides; side++) {
    done->tokens[side] = stream_writer_count(w[side]);
    ok = stream_writer_publish(w[side], e);
  }
  stream_writer_close(w[0]);
  stream_writer_close(w[1]);
  return ok;
}

bool data_prepare(const struct data_prepare *r, struct data_prepared *done, struct error *e) {
  *done = (struct data_prepared){0};
  if (r->n_sources > STREAM_SOURCES)
    return error_set(e, ERROR_DATA, "%d sources, a stream has at most %d", r->n_sources, STREAM_SOURCES);
  if (r->n_sources < 1) {
    error_set(e, ERROR_DATA, "no sources to prepare");
    return error_hint(e, "set data.sources");
  }
  if (r->validation_path && !(r->validation_fraction > 0 && r->validation_fraction < 1))
    return error_set(e, ERROR_DATA, "data.validation_fraction is %g, it must lie between 0 and 1",
                     r->validation_fraction);
  struct preparation p = {.request = r};
  p.text = malloc(CHUNK);
  p.ids = malloc(CHUNK * sizeof *p.ids);
  bool ok = (p.text && p.ids) ||
            error_set(e, ERROR_SYSTEM, "out of memory preparing data");
  for (int i = 0; ok && i < r->n_sources; i++) ok = corpus_find(&p.files, r->sources[i].path, DATA_AUTO, i, e);
  done->files = p.files.count;
  ok = ok && check_targets(&p, e) && read_all(&p, done, e) && arrange(&p, done, e) && write_streams(&p, done, e);
  corpus_files_free(&p.files);
  free(p.documents);
  free(p.text);
  free(p.ids);
  return ok;
}
