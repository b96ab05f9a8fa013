/* Reading a token stream's file. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/little_endian.h"
#include "data/stream_file.h"
#include "data/stream_parts.h"

struct token_file {
  struct stream_layout layout;
  struct frame frame;
};

bool stream_tokens_open(struct stream *s, int64_t size, struct error *e) {
  unsigned char bytes[FRAME_HEADER];
  if (size < FRAME_HEADER) {
    error_set(e, ERROR_DATA, "%s: %" PRId64 " bytes are too few for a token stream", s->path, size);
    return error_hint(e, "make one with `fp4d prepare`");
  }
  struct token_file *f = s->part = calloc(1, sizeof *f);
  if (!f) return error_set(e, ERROR_SYSTEM, "%s: out of memory", s->path);
  struct stream_header h;
  if (!frame_read_at(s->fd, s->path, bytes, FRAME_HEADER, 0, e) || !stream_header_decode(s->path, bytes, &h, e)) return false;
  if (!stream_layout_of(&h, &f->layout)) return error_set(e, ERROR_INTERNAL, "%s: layout", s->path);
  f->frame.path = s->path;
  f->frame.fd = s->fd;
  f->frame.again = "prepare the stream again or copy it anew";
  if (!frame_open(&f->frame, bytes, f->layout.payload, size, e)) return false;
  s->info = (struct stream_info){.tokens = h.tokens,
                                 .documents = h.documents,
                                 .vocab_size = h.vocab_size,
                                 .bos = h.bos,
                                 .eos = h.eos,
                                 .digest = f->frame.digest,
                                 .blocks = f->frame.blocks,
                                 .n_sources = h.n_sources,
                                 .sources = f->frame.text};
  memcpy(s->info.tokenizer, h.tokenizer, sizeof s->info.tokenizer);
  return stream_sources_decode(s->path, f->frame.text, &s->info, e);
}

static void close_tokens(struct stream *s) {
  struct token_file *f = s->part;
  if (f) frame_close(&f->frame);
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
            token, FRAME_HEADER + token * f->layout.token_bytes, (uint32_t)id, s->info.vocab_size);
  return error_hint(e, "prepare the stream again");
}

static bool read_tokens(const struct stream *s, int64_t first, int64_t count, int32_t *ids, struct error *e) {
  struct token_file *f = s->part;
  const int width = f->layout.token_bytes;
  if (!frame_check(&f->frame, first * width, count * width, e)) return false;
  unsigned char raw[16384];
  int64_t most = (int64_t)sizeof raw / width;
  for (int64_t done = 0; done < count;) {
    int64_t n = count - done < most ? count - done : most;
    if (!frame_read_at(s->fd, s->path, raw, n * width, FRAME_HEADER + (first + done) * width, e)) return false;
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
  struct token_file *f = s->part;
  unsigned char raw[16], source;
  if (!frame_read(&f->frame, raw, f->layout.offsets_at + 8 * number, 16, e) ||
      !frame_read(&f->frame, &source, f->layout.sources_at + number, 1, e))
    return false;
  const uint64_t first = load_u64(raw), end = load_u64(raw + 8);
  if (first > end || end > (uint64_t)s->info.tokens) return bad_document(s, number, first, e);
  if (source >= s->info.n_sources) return bad_source(s, number, source, e);
  *d = (struct stream_document){.first = (int64_t)first, .end = (int64_t)end, .source = source, .number = number};
  return true;
}

/* What stream_verify has seen so far. */
struct verification {
  const struct stream *stream;
  int64_t previous;                  /* the last document offset; -1: none */
  int64_t documents[STREAM_SOURCES]; /* by source */
};

/* The ids, document offsets and sources in a block of payload that begins at `begin`. */
static bool verify_block(void *context, const unsigned char *bytes, int64_t begin, int64_t count, struct error *e) {
  struct verification *v = context;
  const struct stream *s = v->stream;
  const struct token_file *f = s->part;
  const struct stream_layout *l = &f->layout;
  const int64_t end = begin + count, token = begin / l->token_bytes;
  const int64_t tokens_end = end / l->token_bytes < s->info.tokens ? end / l->token_bytes : s->info.tokens;
  for (int64_t i = 0; token + i < tokens_end; i++)
    if (!check_id(s, id_at(f, bytes, i), token + i, e)) return false;
  const int64_t offsets_end = end < l->sources_at ? end : l->sources_at;
  for (int64_t at = begin > l->offsets_at ? begin : l->offsets_at; at < offsets_end; at += 8) {
    const uint64_t offset = load_u64(bytes + (at - begin));
    const int64_t document = (at - l->offsets_at) / 8;
    const bool last = document == s->info.documents;
    if (offset > (uint64_t)s->info.tokens || (int64_t)offset < v->previous || (document == 0 && offset != 0) ||
        (last && (int64_t)offset != s->info.tokens))
      return bad_document(s, document, offset, e);
    v->previous = (int64_t)offset;
  }
  for (int64_t at = begin > l->sources_at ? begin : l->sources_at; at < end; at++) {
    const int source = bytes[at - begin];
    if (source >= s->info.n_sources) return bad_source(s, at - l->sources_at, source, e);
    v->documents[source]++;
  }
  return true;
}

static bool verify_tokens(struct stream *s, struct error *e) {
  struct token_file *f = s->part;
  struct verification v = {.stream = s, .previous = -1};
  bool ok = frame_verify(&f->frame, verify_block, &v, e);
  for (int i = 0; ok && i < s->info.n_sources; i++)
    if (v.documents[i] != s->info.source[i].documents)
      ok = error_set(e, ERROR_DATA, "%s: source %s has %" PRId64 " documents, its list of sources says %" PRId64, s->path,
                     s->info.source[i].name, v.documents[i], s->info.source[i].documents);
  return ok;
}

const struct stream_kind stream_kind_tokens = {read_tokens, read_document, verify_tokens, close_tokens};
