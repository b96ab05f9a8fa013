/* The header of a token stream and the layout that follows from it. */
#include "data/stream_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

/* Byte offsets in the header. */
enum {
  AT_MAGIC = 0,
  AT_VERSION = 8,
  AT_HEADER_BYTES = 12,
  AT_TOKEN_BYTES = 16,
  AT_VOCAB = 20,
  AT_TOKENS = 24,
  AT_DOCUMENTS = 32,
  AT_BLOCK = 40,
  AT_TOKENIZER = 48,
  AT_BOS = AT_TOKENIZER + STREAM_TOKENIZER,
  AT_EOS = AT_BOS + 4,
  AT_SOURCES = AT_EOS + 4,
  AT_RESERVED = AT_SOURCES + 4
};

/* An id of the vocabulary, or none. */
static bool mark_fits(int32_t id, int32_t vocab_size) { return id >= -1 && id < vocab_size; }

bool stream_layout_of(const struct stream_header *h, struct stream_layout *l) {
  if (h->vocab_size < 1 || h->tokens < 0 || h->documents < 0 || h->documents > h->tokens) return false;
  if ((h->documents == 0) != (h->tokens == 0)) return false;
  l->token_bytes = h->vocab_size <= 65536 ? 2 : 4;
  int64_t ids, padded, offsets;
  if (!checked_mul(h->tokens, l->token_bytes, &ids) || !checked_add(ids, 7, &padded)) return false;
  l->offsets_at = padded / 8 * 8;
  return checked_mul(h->documents + 1, 8, &offsets) && checked_add(l->offsets_at, offsets, &l->sources_at) &&
         checked_add(l->sources_at, h->documents, &l->payload) && frame_bytes(l->payload) > 0;
}

void stream_header_encode(const struct stream_header *h, unsigned char bytes[FRAME_HEADER]) {
  memset(bytes, 0, FRAME_HEADER);
  memcpy(bytes + AT_MAGIC, STREAM_MAGIC, 8);
  store_u32(bytes + AT_VERSION, STREAM_VERSION);
  store_u32(bytes + AT_HEADER_BYTES, FRAME_HEADER);
  store_u32(bytes + AT_TOKEN_BYTES, h->vocab_size <= 65536 ? 2 : 4);
  store_u32(bytes + AT_VOCAB, (uint32_t)h->vocab_size);
  store_u64(bytes + AT_TOKENS, (uint64_t)h->tokens);
  store_u64(bytes + AT_DOCUMENTS, (uint64_t)h->documents);
  store_u64(bytes + AT_BLOCK, FRAME_BLOCK);
  memcpy(bytes + AT_TOKENIZER, h->tokenizer, sizeof h->tokenizer);
  store_u32(bytes + AT_BOS, (uint32_t)h->bos);
  store_u32(bytes + AT_EOS, (uint32_t)h->eos);
  store_u32(bytes + AT_SOURCES, (uint32_t)h->n_sources);
}

static bool damaged(const char *path, const char *what, uint64_t value, struct error *e) {
  error_set(e, ERROR_DATA, "%s: damaged header: %s is %" PRIu64, path, what, value);
  return error_hint(e, "prepare the stream again or copy it anew");
}

bool stream_header_decode(const char *path, const unsigned char bytes[FRAME_HEADER], struct stream_header *h,
                          struct error *e) {
  if (memcmp(bytes + AT_MAGIC, STREAM_MAGIC, 8) != 0) {
    error_set(e, ERROR_DATA, "%s is not a token stream of fp4d (its first bytes differ)", path);
    return error_hint(e, "make one with `fp4d prepare`");
  }
  uint32_t version = load_u32(bytes + AT_VERSION);
  if (version != STREAM_VERSION) {
    error_set(e, ERROR_DATA, "%s: token stream of version %" PRIu32 ", this program reads version %d", path,
              version, STREAM_VERSION);
    return error_hint(e, "prepare the stream again with this program: `fp4d prepare CONFIG --force`");
  }
  uint32_t vocab = load_u32(bytes + AT_VOCAB), token_bytes = load_u32(bytes + AT_TOKEN_BYTES);
  uint64_t tokens = load_u64(bytes + AT_TOKENS), documents = load_u64(bytes + AT_DOCUMENTS);
  if (load_u32(bytes + AT_HEADER_BYTES) != FRAME_HEADER)
    return damaged(path, "its own size", load_u32(bytes + AT_HEADER_BYTES), e);
  if (vocab < 1 || vocab > INT32_MAX) return damaged(path, "the vocabulary size", vocab, e);
  if (token_bytes != (vocab <= 65536 ? 2 : 4)) return damaged(path, "the bytes of a token", token_bytes, e);
  if (load_u64(bytes + AT_BLOCK) != FRAME_BLOCK)
    return damaged(path, "the block size", load_u64(bytes + AT_BLOCK), e);
  if (tokens > INT64_MAX) return damaged(path, "the number of tokens", tokens, e);
  if (documents > tokens) return damaged(path, "the number of documents", documents, e);
  if ((documents == 0) != (tokens == 0)) return damaged(path, "the number of documents", documents, e);
  const int32_t bos = (int32_t)load_u32(bytes + AT_BOS), eos = (int32_t)load_u32(bytes + AT_EOS);
  if (!mark_fits(bos, (int32_t)vocab)) return damaged(path, "the id of BOS", (uint32_t)bos, e);
  if (!mark_fits(eos, (int32_t)vocab)) return damaged(path, "the id of EOS", (uint32_t)eos, e);
  const uint32_t sources = load_u32(bytes + AT_SOURCES);
  if (sources < 1 || sources > STREAM_SOURCES) return damaged(path, "the number of sources", sources, e);
  if (bytes[AT_TOKENIZER] == 0 || bytes[AT_BOS - 1] != 0)
    return damaged(path, "the tokenizer's name, in its first byte,", bytes[AT_TOKENIZER], e);
  for (int i = AT_TOKENIZER; bytes[i]; i++)
    if (bytes[i] <= ' ' || bytes[i] > '~') return damaged(path, "a byte of the tokenizer's name", bytes[i], e);
  *h = (struct stream_header){
      .vocab_size = (int32_t)vocab, .bos = bos, .eos = eos, .n_sources = (int)sources,
      .tokens = (int64_t)tokens, .documents = (int64_t)documents};
  memcpy(h->tokenizer, bytes + AT_TOKENIZER, sizeof h->tokenizer);
  struct stream_layout l;
  if (!stream_layout_of(h, &l)) return damaged(path, "the number of tokens", tokens, e);
  return true;
}

static bool bad_sources(const char *path, int line, const char *what, struct error *e) {
  error_set(e, ERROR_DATA, "%s: damaged list of sources: line %d %s", path, line, what);
  return error_hint(e, "prepare the stream again or copy it anew");
}

/* A count of at most 2^63 - 1 that ends at `end`. */
static bool decode_count(const char *text, const char *end, int64_t *value) {
  if (text >= end || *text < '0' || *text > '9') return false;
  char *stop;
  errno = 0;
  const long long n = strtoll(text, &stop, 10);
  *value = n;
  return errno == 0 && stop == end;
}

bool stream_sources_decode(const char *path, const char *text, struct stream_info *info, struct error *e) {
  int64_t documents = 0, tokens = 0;
  for (int i = 0; i < info->n_sources; i++) {
    struct stream_source *s = &info->source[i];
    const char *end = text + strcspn(text, "\n"), *name_end = text + strcspn(text, "\t\n");
    if (*end != '\n') return bad_sources(path, i + 1, "is absent or does not end", e);
    if (name_end == text || name_end == end || name_end - text >= STREAM_NAME)
      return bad_sources(path, i + 1, "has no name of a source", e);
    memcpy(s->name, text, (size_t)(name_end - text));
    s->name[name_end - text] = 0;
    const char *first = name_end + 1, *first_end = first + strcspn(first, "\t\n"), *second = first_end + 1;
    if (first_end == end || !decode_count(first, first_end, &s->documents) ||
        !decode_count(second, second + strcspn(second, "\t\n"), &s->tokens))
      return bad_sources(path, i + 1, "lacks its documents and tokens", e);
    if (!checked_add(documents, s->documents, &documents) || !checked_add(tokens, s->tokens, &tokens))
      return bad_sources(path, i + 1, "holds impossible counts", e);
    text = end + 1;
  }
  static const char settings[] = "settings\t";
  info->settings = "";
  if (strncmp(text, settings, sizeof settings - 1) == 0) {
    info->settings = text + sizeof settings - 1;
    text += strcspn(text, "\n");
    if (*text == 0) return bad_sources(path, info->n_sources + 1, "does not end", e);
    text++;
  }
  if (*text) return bad_sources(path, info->n_sources + 1, "is one too many", e);
  if (documents == info->documents && tokens == info->tokens) return true;
  return bad_sources(path, info->n_sources, "ends a sum that is not the stream's documents and tokens", e);
}

char *stream_sources_encode(const struct stream_source *source, int n_sources, const char *const *notes, const char *settings) {
  size_t room = 16 + (settings ? strlen(settings) : 0), at = 0;
  for (int i = 0; i < n_sources; i++) room += strlen(source[i].name) + 48 + (notes && notes[i] ? strlen(notes[i]) : 0);
  char *text = malloc(room);
  if (!text) return NULL;
  text[0] = 0;
  for (int i = 0; i < n_sources; i++) {
    const char *note = notes ? notes[i] : NULL;
    at += (size_t)snprintf(text + at, room - at, "%s\t%" PRId64 "\t%" PRId64 "%s%s\n", source[i].name, source[i].documents,
                           source[i].tokens, note ? "\t" : "", note ? note : "");
  }
  if (settings) snprintf(text + at, room - at, "settings\t%s\n", settings);
  return text;
}
