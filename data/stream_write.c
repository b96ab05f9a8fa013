/* Writing a token stream: header and documents are known when the last token
 * is, so they come at the end. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/little_endian.h"
#include "data/stream_file.h"

struct stream_writer {
  char *path;
  struct frame_writer *frame;
  struct stream_header header;
  int token_bytes;
  int64_t *offsets;       /* first tokens of documents */
  unsigned char *sources; /* of documents */
  const char *settings;
  int64_t documents_room; /* of both */
  struct stream_source source[STREAM_SOURCES];
  int current; /* source of the document being written */
};

/* What the header and the sources' text can hold. */
static bool check_start(const char *path, const struct stream_start *start, struct error *e) {
  const size_t tokenizer = strlen(start->tokenizer);
  if (start->n_sources < 1 || start->n_sources > STREAM_SOURCES || tokenizer < 1 || tokenizer >= STREAM_TOKENIZER)
    return error_set(e, ERROR_INTERNAL, "%s: %d sources, tokenizer %s", path, start->n_sources, start->tokenizer);
  for (int i = 0; i < start->n_sources; i++) {
    const char *name = start->names[i];
    if (*name && strlen(name) < STREAM_NAME && !strpbrk(name, "\t\n")) continue;
    error_set(e, ERROR_DATA, "%s: \"%s\" cannot be the name of a source", path, name);
    return error_hint(e, "give 1 to %d bytes without tabs and line ends", STREAM_NAME - 1);
  }
  return true;
}

struct stream_writer *stream_writer_open(const char *path, const struct stream_start *start, struct error *e) {
  if (!check_start(path, start, e)) return NULL;
  struct stream_writer *w = calloc(1, sizeof *w);
  if (!w || !(w->path = strdup(path))) {
    error_set(e, ERROR_SYSTEM, "%s: out of memory", path);
    stream_writer_close(w);
    return NULL;
  }
  w->header = (struct stream_header){
      .vocab_size = start->vocab_size, .bos = start->bos, .eos = start->eos, .n_sources = start->n_sources};
  snprintf(w->header.tokenizer, sizeof w->header.tokenizer, "%s", start->tokenizer);
  for (int i = 0; i < start->n_sources; i++) snprintf(w->source[i].name, STREAM_NAME, "%s", start->names[i]);
  w->settings = start->settings;
  w->token_bytes = start->vocab_size <= 65536 ? 2 : 4;
  w->frame = frame_writer_open(path, "stream", e);
  if (w->frame) return w;
  stream_writer_close(w);
  return NULL;
}

bool stream_writer_document(struct stream_writer *w, int source, struct error *e) {
  if (source < 0 || source >= w->header.n_sources)
    return error_set(e, ERROR_INTERNAL, "%s: a document of source %d of %d", w->path, source, w->header.n_sources);
  if (w->header.documents == w->documents_room) {
    int64_t room = w->documents_room ? 2 * w->documents_room : 1024;
    int64_t *offsets = realloc(w->offsets, (size_t)room * sizeof *offsets);
    if (offsets) w->offsets = offsets;
    unsigned char *sources = realloc(w->sources, (size_t)room);
    if (sources) w->sources = sources;
    if (!offsets || !sources) return error_set(e, ERROR_SYSTEM, "%s: out of memory for its documents", w->path);
    w->documents_room = room;
  }
  w->offsets[w->header.documents] = w->header.tokens;
  w->sources[w->header.documents++] = (unsigned char)source;
  w->source[source].documents++;
  w->current = source;
  return true;
}

bool stream_writer_tokens(struct stream_writer *w, const int32_t *ids, int64_t count, struct error *e) {
  const int width = w->token_bytes; /* divides a block */
  if (w->header.documents == 0 && count > 0)
    return error_set(e, ERROR_INTERNAL, "%s: tokens before the first document", w->path);
  w->source[w->current].tokens += count;
  for (int64_t i = 0; i < count;) {
    int64_t room;
    unsigned char *slot = frame_writer_slot(w->frame, &room, e);
    if (!slot) return false;
    const int64_t n = count - i < room / width ? count - i : room / width;
    for (int64_t j = 0; j < n; j++) {
      const int32_t id = ids[i + j];
      if (id < 0 || id >= w->header.vocab_size)
        return error_set(e, ERROR_INTERNAL, "%s: id %d outside a vocabulary of %d", w->path, id, w->header.vocab_size);
      if (width == 2)
        store_u16(slot + 2 * j, (uint32_t)id);
      else
        store_u32(slot + 4 * j, (uint32_t)id);
    }
    frame_writer_filled(w->frame, n * width);
    w->header.tokens += n;
    i += n;
  }
  return true;
}

int64_t stream_writer_count(const struct stream_writer *w) { return w->header.tokens; }

/* What follows the ids in the payload. */
static bool write_documents(struct stream_writer *w, const struct stream_layout *l, struct error *e) {
  static const unsigned char zeros[8];
  const int64_t documents = w->header.documents;
  bool ok = frame_writer_put(w->frame, zeros, l->offsets_at - frame_writer_payload(w->frame), e);
  for (int64_t d = 0; ok && d <= documents; d++) {
    unsigned char offset[8];
    store_u64(offset, (uint64_t)(d < documents ? w->offsets[d] : w->header.tokens));
    ok = frame_writer_put(w->frame, offset, sizeof offset, e);
  }
  return ok && frame_writer_put(w->frame, w->sources, documents, e);
}

bool stream_writer_finish(struct stream_writer *w, const char *const *notes, struct error *e) {
  struct stream_layout l;
  if (!stream_layout_of(&w->header, &l))
    return error_set(e, ERROR_INTERNAL, "%s: %" PRId64 " tokens in %" PRId64 " documents", w->path, w->header.tokens,
                     w->header.documents);
  unsigned char header[FRAME_HEADER];
  stream_header_encode(&w->header, header);
  char *sources = stream_sources_encode(w->source, w->header.n_sources, notes, w->settings);
  if (!sources) return error_set(e, ERROR_SYSTEM, "%s: out of memory for its sources", w->path);
  const bool ok = write_documents(w, &l, e) && frame_writer_finish(w->frame, header, sources, e);
  free(sources);
  return ok;
}

bool stream_writer_publish(struct stream_writer *w, struct error *e) { return frame_writer_publish(w->frame, e); }

void stream_writer_close(struct stream_writer *w) {
  if (!w) return;
  frame_writer_close(w->frame);
  free(w->offsets);
  free(w->sources);
  free(w->path);
  free(w);
}
