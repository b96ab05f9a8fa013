/* Building indexes: scan the files, put documents in order, write. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "data/index_parts.h"
#include "data/stream_file.h"

enum { TRAIN = 0, VALIDATION = 1 };

struct writing {
  struct frame_writer *frame;
  struct index_header header;
  struct stream_source source[STREAM_SOURCES];
};

static bool no_memory(const char *path, struct error *e) { return error_set(e, ERROR_SYSTEM, "%s: out of memory", path); }

/* BOS or EOS of the stream: the one that all sources have. */
static int32_t shared_mark(const struct data_index *x, bool bos) {
  const int64_t mark = bos ? x->sources[0].bos : x->sources[0].eos;
  for (int i = 1; i < x->n_sources; i++)
    if ((bos ? x->sources[i].bos : x->sources[i].eos) != mark) return -1;
  return mark < x->vocab_size ? (int32_t)mark : -1;
}

/* Records in order; sums up the content digest and the counts by source. */
static bool write_records(struct writing *w, struct index_order *o, struct hash_state *content, struct error *e) {
  const struct index_scan *s = o->scan;
  unsigned char bytes[INDEX_RECORD];
  for (int64_t d; (d = index_order_next(o)) >= 0;) {
    const struct index_document *x = &s->document[d];
    const int source = s->source[x->file];
    const struct index_record r = {w->header.tokens, x->first, x->file};
    index_record_encode(&r, bytes);
    if (!frame_writer_put(w->frame, bytes, INDEX_RECORD, e)) return false;
    unsigned char part[32];
    store_hash(part, x->content);
    store_u64(part + 16, (uint64_t)x->length);
    store_u64(part + 24, (uint64_t)source);
    hash_feed(content, part, sizeof part);
    w->header.tokens += x->length;
    w->header.documents++;
    w->source[source].documents++;
    w->source[source].tokens += x->length;
  }
  const struct index_record end = {.first = w->header.tokens};
  index_record_encode(&end, bytes);
  return frame_writer_put(w->frame, bytes, INDEX_RECORD, e);
}

static bool write_files(struct writing *w, const struct index_scan *s, struct error *e) {
  w->header.files = s->files;
  w->header.blocks = s->first_block[s->files];
  for (int64_t i = 0; i < s->files; i++) {
    const struct tokens_file *f = &s->file[i];
    unsigned char bytes[INDEX_FILE];
    const struct index_file x = {f->size, f->data_at, f->tokens, s->first_block[i], f->beside, f->width, f->is_signed, s->source[i]};
    index_file_encode(&x, bytes);
    if (!frame_writer_put(w->frame, bytes, INDEX_FILE, e)) return false;
  }
  if (!frame_writer_put(w->frame, s->digest, 16 * w->header.blocks, e)) return false;
  for (int64_t i = 0; i < s->files; i++) {
    const int64_t bytes = (int64_t)strlen(s->file[i].path) + 1;
    if (!frame_writer_put(w->frame, s->file[i].path, bytes, e)) return false;
    w->header.path_bytes += bytes;
  }
  return true;
}

static bool check_length(const struct data_index *x, const struct index_scan *s, const struct writing *w, int side, struct error *e) {
  const char *what = side == TRAIN ? "training" : "validation";
  if (w->header.documents > 0 && w->header.tokens >= x->least) return true;
  if (side == TRAIN && s->files == 1 && !x->validation_path)
    error_set(e, ERROR_DATA, "%s: a sample needs %" PRId64 " tokens (seq_len + 1), the file has %" PRId64, s->file[0].path, x->least, w->header.tokens);
  else
    error_set(e, ERROR_DATA, "%s and %" PRId64 " more token files: a sample needs %" PRId64 " tokens (seq_len + 1), the %s stream has %" PRId64
              " in %" PRId64 " documents", s->file[0].path, s->files - 1, x->least, what, w->header.tokens, w->header.documents);
  if (side == VALIDATION) return error_hint(e, "raise data.validation_fraction (now %g), or name no data.validation", x->validation_fraction);
  return error_hint(e, "give more data or a smaller train.seq_len");
}

static bool write_index(struct writing *w, const struct data_index *x, const struct index_scan *s, int side, struct data_indexed *done,
                        struct error *e) {
  const char *path = side == TRAIN ? x->train_path : x->validation_path;
  struct index_order order;
  struct hash_state *content = hash_open();
  const bool pool = mixture_is_pool(x->sources, x->n_sources, x->n_stages);
  const struct data_source *named = pool ? NULL : x->sources;
  bool ok = index_order_start(&order, x, s, side == VALIDATION, e) &&
            mixture_check_sources(&order.mixture, named, side == VALIDATION, e) && (content || no_memory(path, e)) &&
            (w->frame = frame_writer_open(path, "index", e)) != NULL;
  w->header = (struct index_header){.vocab_size = (int32_t)s->most_id + 1,
                                    .bos = shared_mark(x, true),
                                    .eos = shared_mark(x, false),
                                    .n_sources = x->n_sources,
                                    .settings = index_settings(x)};
  for (int i = 0; i < x->n_sources; i++) memcpy(w->source[i].name, x->sources[i].name, STREAM_NAME);
  ok = ok && write_records(w, &order, content, e);
  if (content) w->header.content = hash_close(content);
  ok = ok && mixture_check_end(&order.mixture, named, e) && check_length(x, s, w, side, e) && write_files(w, s, e);
  if (ok && side == TRAIN) {
    const int exhausted = mixture_exhausted(&order.mixture);
    done->exhausted = pool ? -1 : exhausted;
    for (int g = 0; g < order.mixture.n && !pool; g++) done->unused[g] = mixture_unused(&order.mixture, g);
  }
  index_order_free(&order);
  if (!ok) return false;
  const char *notes[STREAM_SOURCES];
  for (int i = 0; i < x->n_sources; i++) notes[i] = x->sources[i].path;
  char *text = stream_sources_encode(w->source, x->n_sources, notes, NULL);
  unsigned char header[FRAME_HEADER];
  index_header_encode(&w->header, header);
  ok = text ? frame_writer_finish(w->frame, header, text, e) : no_memory(path, e);
  free(text);
  done->documents[side] = w->header.documents;
  done->tokens[side] = w->header.tokens;
  return ok;
}

static bool check_request(const struct data_index *x, struct error *e) {
  if (x->n_sources < 1 || x->n_sources > STREAM_SOURCES)
    return error_set(e, ERROR_DATA, "%d sources: an index has 1 to %d", x->n_sources, STREAM_SOURCES);
  if (!file_make_parent(x->train_path, ERROR_DATA, e) || (x->validation_path && !file_make_parent(x->validation_path, ERROR_DATA, e))) return false;
  if (x->validation_path && file_same_place(x->train_path, x->validation_path))
    return error_set(e, ERROR_DATA, "training and validation index have the same path %s", x->train_path);
  if (x->validation_path && !(x->validation_fraction > 0 && x->validation_fraction < 1))
    return error_set(e, ERROR_DATA, "data.validation_fraction is %g, it must lie between 0 and 1", x->validation_fraction);
  return true;
}

bool data_index_build(const struct data_index *x, struct data_indexed *done, struct error *e) {
  const double began = clock_seconds();
  *done = (struct data_indexed){.exhausted = -1};
  if (!check_request(x, e)) return false;
  struct threads *threads = threads_create(x->threads, e);
  if (!threads) return false;
  struct index_scan scan;
  struct writing *w = calloc(2, sizeof *w);
  bool ok = index_scan(&scan, x, threads, e) && (w || no_memory(x->train_path, e));
  threads_destroy(threads);
  const int sides = x->validation_path ? 2 : 1;
  for (int side = 0; ok && side < sides; side++) ok = write_index(&w[side], x, &scan, side, done, e);
  for (int side = sides - 1; ok && side >= 0; side--) ok = frame_writer_publish(w[side].frame, e); /* training last: it is there when both are */
  for (int side = 0; w && side < 2; side++) frame_writer_close(w[side].frame);
  free(w);
  done->files = scan.files;
  done->bytes = scan.bytes;
  done->empty = scan.empty;
  index_scan_free(&scan);
  done->seconds = clock_seconds() - began;
  return ok;
}
