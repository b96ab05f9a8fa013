/* The header of a token stream and the layout that follows from it. */
#include "data/stream_file.h"

#include <inttypes.h>
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
  AT_RESERVED = 80
};

bool stream_layout_of(const struct stream_header *h, struct stream_layout *l) {
  if (h->vocab_size < 1 || h->tokens < 0 || h->documents < 0 || h->documents > h->tokens) return false;
  l->token_bytes = h->vocab_size <= 65536 ? 2 : 4;
  int64_t ids, padded, offsets, table;
  if (!checked_mul(h->tokens, l->token_bytes, &ids) || !checked_add(ids, 7, &padded)) return false;
  l->offsets_at = padded / 8 * 8;
  if (!checked_mul(h->documents + 1, 8, &offsets) || !checked_add(l->offsets_at, offsets, &l->payload))
    return false;
  l->blocks = l->payload / STREAM_BLOCK + (l->payload % STREAM_BLOCK != 0);
  table = l->blocks * (int64_t)sizeof(struct hash);
  return checked_add(l->payload, table + STREAM_HEADER + STREAM_TRAILER, &l->file_bytes);
}

void stream_header_encode(const struct stream_header *h, unsigned char bytes[STREAM_HEADER]) {
  memset(bytes, 0, STREAM_HEADER);
  memcpy(bytes + AT_MAGIC, STREAM_MAGIC, 8);
  store_u32(bytes + AT_VERSION, STREAM_VERSION);
  store_u32(bytes + AT_HEADER_BYTES, STREAM_HEADER);
  store_u32(bytes + AT_TOKEN_BYTES, h->vocab_size <= 65536 ? 2 : 4);
  store_u32(bytes + AT_VOCAB, (uint32_t)h->vocab_size);
  store_u64(bytes + AT_TOKENS, (uint64_t)h->tokens);
  store_u64(bytes + AT_DOCUMENTS, (uint64_t)h->documents);
  store_u64(bytes + AT_BLOCK, STREAM_BLOCK);
  memcpy(bytes + AT_TOKENIZER, h->tokenizer, sizeof h->tokenizer);
}

static bool damaged(const char *path, const char *what, uint64_t value, struct error *e) {
  error_set(e, ERROR_DATA, "%s: damaged header: %s is %" PRIu64, path, what, value);
  return error_hint(e, "prepare the stream again or copy it anew");
}

bool stream_header_decode(const char *path, const unsigned char bytes[STREAM_HEADER], struct stream_header *h,
                          struct error *e) {
  if (memcmp(bytes + AT_MAGIC, STREAM_MAGIC, 8) != 0) {
    error_set(e, ERROR_DATA, "%s is not a token stream of fp4d (its first bytes differ)", path);
    return error_hint(e, "make one with `fp4d prepare`");
  }
  uint32_t version = load_u32(bytes + AT_VERSION);
  if (version != STREAM_VERSION) {
    error_set(e, ERROR_DATA, "%s: token stream of version %" PRIu32 ", this program reads version %d", path,
              version, STREAM_VERSION);
    return error_hint(e, "prepare the stream again with this program");
  }
  uint32_t vocab = load_u32(bytes + AT_VOCAB), token_bytes = load_u32(bytes + AT_TOKEN_BYTES);
  uint64_t tokens = load_u64(bytes + AT_TOKENS), documents = load_u64(bytes + AT_DOCUMENTS);
  if (load_u32(bytes + AT_HEADER_BYTES) != STREAM_HEADER)
    return damaged(path, "its own size", load_u32(bytes + AT_HEADER_BYTES), e);
  if (vocab < 1 || vocab > INT32_MAX) return damaged(path, "the vocabulary size", vocab, e);
  if (token_bytes != (vocab <= 65536 ? 2 : 4)) return damaged(path, "the bytes of a token", token_bytes, e);
  if (load_u64(bytes + AT_BLOCK) != STREAM_BLOCK)
    return damaged(path, "the block size", load_u64(bytes + AT_BLOCK), e);
  if (tokens > INT64_MAX) return damaged(path, "the number of tokens", tokens, e);
  if (documents > tokens) return damaged(path, "the number of documents", documents, e);
  if (bytes[AT_TOKENIZER] == 0 || bytes[AT_RESERVED - 1] != 0)
    return damaged(path, "the tokenizer's name, in its first byte,", bytes[AT_TOKENIZER], e);
  for (int i = AT_TOKENIZER; bytes[i]; i++)
    if (bytes[i] <= ' ' || bytes[i] > '~') return damaged(path, "a byte of the tokenizer's name", bytes[i], e);
  *h = (struct stream_header){
      .vocab_size = (int32_t)vocab, .tokens = (int64_t)tokens, .documents = (int64_t)documents};
  memcpy(h->tokenizer, bytes + AT_TOKENIZER, sizeof h->tokenizer);
  struct stream_layout l;
  if (!stream_layout_of(h, &l)) return damaged(path, "the number of tokens", tokens, e);
  return true;
}
