/* Reading a token stream's file.
 *
 * Nothing in the file is believed before the digest over header and block
 * table has been checked, and no block before its own digest has: that
 * happens when it is first touched.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "data/stream_file.h"
#include "data/stream_parts.h"

struct token_file {
  struct stream_layout layout;
  char *sources;
  unsigned char *table;     /* digests of blocks, as in the file */
  pthread_mutex_t mutex;    /* guards `buffer`; there when `done` is */
  unsigned char *buffer;    /* one block */
  atomic_uchar *done;       /* by block: it was checked */
};

static bool truncated(const struct stream *s, int64_t need, int64_t have, struct error *e) {
  error_set(e, ERROR_DATA, "%s: truncated or damaged: its header calls for %" PRId64 " bytes, the file has %" PRId64,
            s->path, need, have);
  return error_hint(e, "prepare the stream again or copy it anew");
}

/* Header, trailer, block table and sources; the payload is not read. */
static bool read_frame(struct stream *s, struct token_file *f, int64_t size, struct error *e) {
  unsigned char header[STREAM_HEADER], trailer[STREAM_TRAILER];
  if (size < STREAM_HEADER) {
    error_set(e, ERROR_DATA, "%s: %" PRId64 " bytes are too few for a token stream", s->path, size);
    return error_hint(e, "make one with `fp4d prepare`");
  }
  struct stream_header h;
  if (!stream_read_at(s->fd, s->path, header, STREAM_HEADER, 0, e) || !stream_header_decode(s->path, header, &h, e))
    return false;
  if (!stream_layout_of(&h, &f->layout)) return error_set(e, ERROR_INTERNAL, "%s: layout", s->path);
  const struct stream_layout *l = &f->layout;
  if (size < l->file_bytes) return truncated(s, l->file_bytes, size, e);
  if (!stream_read_at(s->fd, s->path, trailer, STREAM_TRAILER, size - STREAM_TRAILER, e)) return false;
  uint64_t sources_bytes = load_u64(trailer + 32);
  uint64_t extra = (uint64_t)(size - l->file_bytes);
  if (memcmp(trailer + 56, STREAM_END_MAGIC, 8) != 0 || load_u64(trailer + 40) || load_u64(trailer + 48) ||
      sources_bytes != extra || extra > STREAM_SOURCES_MOST) {
    error_set(e, ERROR_DATA, "%s: truncated or damaged: no valid trailer in its last %d bytes", s->path,
              STREAM_TRAILER);
    return error_hint(e, "prepare the stream again or copy it anew");
  }

  /* The counts fit the file's true size, so these allocations do too. */
  int64_t table_bytes = l->blocks * 16;
  f->table = malloc((size_t)table_bytes);
  f->sources = malloc((size_t)extra + 1);
  struct hash_state *digest = f->table && f->sources ? hash_open() : NULL;
  if (!digest) return error_set(e, ERROR_SYSTEM, "%s: out of memory for its block table", s->path);
  bool ok = stream_read_at(s->fd, s->path, f->table, table_bytes, STREAM_HEADER + l->payload, e) &&
            stream_read_at(s->fd, s->path, f->sources, (int64_t)extra, STREAM_HEADER + l->payload + table_bytes, e);
  if (ok) {
    hash_feed(digest, header, STREAM_HEADER);
    hash_feed(digest, f->table, (size_t)table_bytes);
  }
  s->info = (struct stream_info){.tokens = h.tokens,
                                 .documents = h.documents,
                                 .vocab_size = h.vocab_size,
                                 .bos = h.bos,
                                 .eos = h.eos,
                                 .digest = hash_close(digest),
                                 .n_sources = h.n_sources,
                                 .sources = f->sources};
  if (!ok) return false;
  f->sources[extra] = 0;
  memcpy(s->info.tokenizer, h.tokenizer, sizeof s->info.tokenizer);
  const char *part = NULL;
  if (!hash_equal(s->info.digest, load_hash(trailer)))
    part = "header and block table";
  else if (!hash_equal(hash_bytes(f->sources, (size_t)extra), load_hash(trailer + 16)))
    part = "list of sources";
  if (part) {
    error_set(e, ERROR_DATA, "%s: damaged: the digest of its %s does not match", s->path, part);
    return error_hint(e, "prepare the stream again or copy it anew");
  }
  return stream_sources_decode(s->path, f->sources, &s->info, e);
}

bool stream_tokens_open(struct stream *s, int64_t size, struct error *e) {
  struct token_file *f = s->part = calloc(1, sizeof *f);
  if (!f) return error_set(e, ERROR_SYSTEM, "%s: out of memory", s->path);
  if (!read_frame(s, f, size, e)) return false;
  f->buffer = malloc(STREAM_BLOCK);
  f->done = malloc((size_t)f->layout.blocks * sizeof *f->done);
  int why = f->buffer && f->done ? pthread_mutex_init(&f->mutex, NULL) : ENOMEM;
  if (why) {
    free(f->done);
    f->done = NULL; /* no mutex either */
    return error_set(e, ERROR_SYSTEM, "%s: %s", s->path, strerror(why));
  }
  for (int64_t b = 0; b < f->layout.blocks; b++) atomic_init(&f->done[b], 0);
  return true;
}

static void close_tokens(struct stream *s) {
  struct token_file *f = s->part;
  if (!f) return;
  if (f->done) pthread_mutex_destroy(&f->mutex);
  free(f->done);
  free(f->buffer);
  free(f->table);
  free(f->sources);
  free(f);
}

static int32_t id_at(const struct token_file *f, const unsigned char *raw, int64_t i) {
  return f->layout.token_bytes == 2 ? (int32_t)load_u16(raw + 2 * i) : (int32_t)load_u32(raw + 4 * i);
}

/* Refuses an id that would index past the embedding. */
static bool check_id(const struct stream *s, int32_t id, int64_t token, struct error *e) {
  if (id >= 0 && id < s->info.vocab_size) return true;
  const struct token_file *f = s->part;
  error_set(e, ERROR_DATA, "%s: token %" PRId64 " (byte %" PRId64 ") is id %" PRIu32 ", the vocabulary has %d", s->path,
            token, STREAM_HEADER + token * f->layout.token_bytes, (uint32_t)id, s->info.vocab_size);
  return error_hint(e, "prepare the stream again");
}

static int64_t block_bytes(const struct token_file *f, int64_t b) {
  int64_t left = f->layout.payload - b * STREAM_BLOCK;
  return left < STREAM_BLOCK ? left : STREAM_BLOCK;
}

/* Reads block b into the buffer and checks it. The mutex is held. */
static bool load_block(const struct stream *s, int64_t b, struct error *e) {
  struct token_file *f = s->part;
  int64_t bytes = block_bytes(f, b), offset = STREAM_HEADER + b * STREAM_BLOCK;
  if (!stream_read_at(s->fd, s->path, f->buffer, bytes, offset, e)) return false;
  if (!hash_equal(hash_bytes(f->buffer, (size_t)bytes), load_hash(f->table + 16 * b))) {
    error_set(e, ERROR_DATA,
              "%s: damaged: block %" PRId64 " of %" PRId64 " (bytes %" PRId64 " to %" PRId64 ") does not match its digest",
              s->path, b, f->layout.blocks, offset, offset + bytes - 1);
    return error_hint(e, "prepare the stream again or copy it anew");
  }
  atomic_store_explicit(&f->done[b], 1, memory_order_release);
  return true;
}

static bool check_blocks(const struct stream *s, int64_t at, int64_t bytes, struct error *e) {
  struct token_file *f = s->part;
  for (int64_t b = at / STREAM_BLOCK; b <= (at + bytes - 1) / STREAM_BLOCK; b++) {
    if (atomic_load_explicit(&f->done[b], memory_order_acquire)) continue;
    pthread_mutex_lock(&f->mutex);
    bool ok = atomic_load_explicit(&f->done[b], memory_order_relaxed) || load_block(s, b, e);
    pthread_mutex_unlock(&f->mutex);
    if (!ok) return false;
  }
  return true;
}

/* `bytes` of the payload, from its byte `at` on. */
static bool read_payload(const struct stream *s, void *to, int64_t at, int64_t bytes, struct error *e) {
  return check_blocks(s, at, bytes, e) && stream_read_at(s->fd, s->path, to, bytes, STREAM_HEADER + at, e);
}

static bool read_tokens(const struct stream *s, int64_t first, int64_t count, int32_t *ids, struct error *e) {
  const struct token_file *f = s->part;
  int width = f->layout.token_bytes;
  if (!check_blocks(s, first * width, count * width, e)) return false;
  unsigned char raw[16384];
  int64_t most = (int64_t)sizeof raw / width;
  for (int64_t done = 0; done < count;) {
    int64_t n = count - done < most ? count - done : most;
    if (!stream_read_at(s->fd, s->path, raw, n * width, STREAM_HEADER + (first + done) * width, e)) return false;
    for (int64_t i = 0; i < n; i++) {
      int32_t id = id_at(f, raw, i);
      if (!check_id(s, id, first + done + i, e)) return false;
      ids[done + i] = id;
    }
    done += n;
  }
  return true;
}

static bool bad_document(const struct stream *s, int64_t number, uint64_t first, struct error *e) {
  return error_set(e, ERROR_DATA, "%s: document %" PRId64 " cannot begin at token %" PRIu64, s->path, number, first);
}

static bool bad_source(const struct stream *s, int64_t number, int source, struct error *e) {
  return error_set(e, ERROR_DATA, "%s: document %" PRId64 " is of source %d, the stream has %d", s->path, number,
                   source, s->info.n_sources);
}

static bool read_document(const struct stream *s, int64_t number, struct stream_document *d, struct error *e) {
  const struct token_file *f = s->part;
  unsigned char raw[16], source;
  if (!read_payload(s, raw, f->layout.offsets_at + 8 * number, 16, e) ||
      !read_payload(s, &source, f->layout.sources_at + number, 1, e))
    return false;
  const uint64_t first = load_u64(raw), end = load_u64(raw + 8);
  if (first > end || end > (uint64_t)s->info.tokens) return bad_document(s, number, first, e);
  if (source >= s->info.n_sources) return bad_source(s, number, source, e);
  *d = (struct stream_document){.first = (int64_t)first, .end = (int64_t)end, .source = source, .number = number};
  return true;
}

/* What stream_verify has seen so far. */
struct verification {
  int64_t previous;                  /* the last document offset; -1: none */
  int64_t documents[STREAM_SOURCES]; /* by source */
};

/* The ids, document offsets and sources in the block that the buffer holds. */
static bool verify_content(const struct stream *s, int64_t b, struct verification *v, struct error *e) {
  const struct token_file *f = s->part;
  const struct stream_layout *l = &f->layout;
  const int64_t begin = b * STREAM_BLOCK, end = begin + block_bytes(f, b);
  const int64_t token = begin / l->token_bytes;
  const int64_t tokens_end = end / l->token_bytes < s->info.tokens ? end / l->token_bytes : s->info.tokens;
  for (int64_t i = 0; token + i < tokens_end; i++)
    if (!check_id(s, id_at(f, f->buffer, i), token + i, e)) return false;
  const int64_t offsets_end = end < l->sources_at ? end : l->sources_at;
  for (int64_t at = begin > l->offsets_at ? begin : l->offsets_at; at < offsets_end; at += 8) {
    const uint64_t offset = load_u64(f->buffer + (at - begin));
    const int64_t document = (at - l->offsets_at) / 8;
    const bool last = document == s->info.documents;
    if (offset > (uint64_t)s->info.tokens || (int64_t)offset < v->previous || (document == 0 && offset != 0) ||
        (last && (int64_t)offset != s->info.tokens))
      return bad_document(s, document, offset, e);
    v->previous = (int64_t)offset;
  }
  for (int64_t at = begin > l->sources_at ? begin : l->sources_at; at < end; at++) {
    const int source = f->buffer[at - begin];
    if (source >= s->info.n_sources) return bad_source(s, at - l->sources_at, source, e);
    v->documents[source]++;
  }
  return true;
}

static bool verify_tokens(struct stream *s, struct error *e) {
  struct token_file *f = s->part;
  struct verification v = {.previous = -1};
  bool ok = true;
  pthread_mutex_lock(&f->mutex);
  for (int64_t b = 0; ok && b < f->layout.blocks; b++) ok = load_block(s, b, e) && verify_content(s, b, &v, e);
  pthread_mutex_unlock(&f->mutex);
  for (int i = 0; ok && i < s->info.n_sources; i++)
    if (v.documents[i] != s->info.source[i].documents)
      ok = error_set(e, ERROR_DATA, "%s: source %s has %" PRId64 " documents, its list of sources says %" PRId64, s->path,
                     s->info.source[i].name, v.documents[i], s->info.source[i].documents);
  return ok;
}

const struct stream_kind stream_kind_tokens = {read_tokens, read_document, verify_tokens, close_tokens};
