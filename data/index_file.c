/* The header of an index, its entries, and the layout that follows from it. */
#include "data/index_file.h"

#include <inttypes.h>
#include <string.h>

#include "base/checked.h"

/* Byte offsets in the header. */
enum {
  AT_MAGIC = 0,
  AT_VERSION = 8,
  AT_HEADER_BYTES = 12,
  AT_BLOCK = 16,
  AT_VOCAB = 20,
  AT_TOKENS = 24,
  AT_DOCUMENTS = 32,
  AT_FILES = 40,
  AT_BLOCKS = 48,
  AT_BOS = 56,
  AT_EOS = 60,
  AT_SOURCES = 64,
  AT_CONTENT = 72,
  AT_SETTINGS = 88,
  AT_PATH_BYTES = 104
};

bool index_layout_of(const struct index_header *h, struct index_layout *l) {
  if (h->tokens < 1 || h->documents < 1 || h->documents > h->tokens || h->files < 1 || h->blocks < h->files || h->path_bytes < 2 * h->files)
    return false;
  int64_t files, digests;
  return checked_mul(h->documents + 1, INDEX_RECORD, &l->files_at) && checked_mul(h->files, INDEX_FILE, &files) &&
         checked_add(l->files_at, files, &l->digests_at) && checked_mul(h->blocks, 16, &digests) &&
         checked_add(l->digests_at, digests, &l->paths_at) && checked_add(l->paths_at, h->path_bytes, &l->payload) &&
         frame_bytes(l->payload) > 0;
}

void index_header_encode(const struct index_header *h, unsigned char bytes[FRAME_HEADER]) {
  memset(bytes, 0, FRAME_HEADER);
  memcpy(bytes + AT_MAGIC, INDEX_MAGIC, 8);
  store_u32(bytes + AT_VERSION, INDEX_VERSION);
  store_u32(bytes + AT_HEADER_BYTES, FRAME_HEADER);
  store_u32(bytes + AT_BLOCK, INDEX_BLOCK);
  store_u32(bytes + AT_VOCAB, (uint32_t)h->vocab_size);
  store_u64(bytes + AT_TOKENS, (uint64_t)h->tokens);
  store_u64(bytes + AT_DOCUMENTS, (uint64_t)h->documents);
  store_u64(bytes + AT_FILES, (uint64_t)h->files);
  store_u64(bytes + AT_BLOCKS, (uint64_t)h->blocks);
  store_u32(bytes + AT_BOS, (uint32_t)h->bos);
  store_u32(bytes + AT_EOS, (uint32_t)h->eos);
  store_u32(bytes + AT_SOURCES, (uint32_t)h->n_sources);
  store_hash(bytes + AT_CONTENT, h->content);
  store_hash(bytes + AT_SETTINGS, h->settings);
  store_u64(bytes + AT_PATH_BYTES, (uint64_t)h->path_bytes);
}

static bool damaged(const char *path, const char *what, uint64_t value, struct error *e) {
  error_set(e, ERROR_DATA, "%s: damaged header: %s is %" PRIu64, path, what, value);
  return error_hint(e, "make the index again with `fp4d index CONFIG --force`");
}

bool index_header_decode(const char *path, const unsigned char bytes[FRAME_HEADER], struct index_header *h, struct error *e) {
  const uint32_t version = load_u32(bytes + AT_VERSION);
  if (version != INDEX_VERSION) {
    error_set(e, ERROR_DATA, "%s: index of version %" PRIu32 ", this program reads version %d", path, version, INDEX_VERSION);
    return error_hint(e, "make it again with `fp4d index CONFIG --force`");
  }
  if (load_u32(bytes + AT_HEADER_BYTES) != FRAME_HEADER) return damaged(path, "its own size", load_u32(bytes + AT_HEADER_BYTES), e);
  if (load_u32(bytes + AT_BLOCK) != INDEX_BLOCK) return damaged(path, "the block size", load_u32(bytes + AT_BLOCK), e);
  const uint32_t vocab = load_u32(bytes + AT_VOCAB), sources = load_u32(bytes + AT_SOURCES);
  if (vocab < 1 || vocab > INT32_MAX) return damaged(path, "the vocabulary size", vocab, e);
  if (sources < 1 || sources > STREAM_SOURCES) return damaged(path, "the number of sources", sources, e);
  static const struct {
    int at;
    const char *what;
  } counts[] = {{AT_TOKENS, "the number of tokens"}, {AT_DOCUMENTS, "the number of documents"}, {AT_FILES, "the number of files"},
                {AT_BLOCKS, "the number of blocks"}, {AT_PATH_BYTES, "the bytes of paths"}};
  for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
    const uint64_t n = load_u64(bytes + counts[k].at);
    if (n < 1 || n > INT64_MAX / 64) return damaged(path, counts[k].what, n, e);
  }
  *h = (struct index_header){.vocab_size = (int32_t)vocab,
                             .bos = (int32_t)load_u32(bytes + AT_BOS),
                             .eos = (int32_t)load_u32(bytes + AT_EOS),
                             .n_sources = (int)sources,
                             .tokens = (int64_t)load_u64(bytes + AT_TOKENS),
                             .documents = (int64_t)load_u64(bytes + AT_DOCUMENTS),
                             .files = (int64_t)load_u64(bytes + AT_FILES),
                             .blocks = (int64_t)load_u64(bytes + AT_BLOCKS),
                             .path_bytes = (int64_t)load_u64(bytes + AT_PATH_BYTES),
                             .content = load_hash(bytes + AT_CONTENT),
                             .settings = load_hash(bytes + AT_SETTINGS)};
  struct index_layout l;
  if (!index_layout_of(h, &l)) return damaged(path, "the number of documents", (uint64_t)h->documents, e);
  return true;
}

void index_record_encode(const struct index_record *r, unsigned char bytes[INDEX_RECORD]) {
  store_u64(bytes, (uint64_t)r->first);
  store_u64(bytes + 8, (uint64_t)r->place);
  store_u64(bytes + 16, (uint64_t)r->file);
}

void index_record_decode(const unsigned char bytes[INDEX_RECORD], struct index_record *r) {
  *r = (struct index_record){(int64_t)load_u64(bytes), (int64_t)load_u64(bytes + 8), (int64_t)load_u64(bytes + 16)};
}

void index_file_encode(const struct index_file *f, unsigned char bytes[INDEX_FILE]) {
  store_u64(bytes, (uint64_t)f->size);
  store_u64(bytes + 8, (uint64_t)f->data_at);
  store_u64(bytes + 16, (uint64_t)f->tokens);
  store_u64(bytes + 24, (uint64_t)f->first_block);
  store_u64(bytes + 32, (uint64_t)f->beside);
  store_u16(bytes + 40, (uint32_t)f->width);
  store_u16(bytes + 42, f->is_signed);
  store_u32(bytes + 44, (uint32_t)f->source);
}

void index_file_decode(const unsigned char bytes[INDEX_FILE], struct index_file *f) {
  *f = (struct index_file){.size = (int64_t)load_u64(bytes),
                           .data_at = (int64_t)load_u64(bytes + 8),
                           .tokens = (int64_t)load_u64(bytes + 16),
                           .first_block = (int64_t)load_u64(bytes + 24),
                           .beside = (int64_t)load_u64(bytes + 32),
                           .width = (int)load_u16(bytes + 40),
                           .is_signed = load_u16(bytes + 42) != 0,
                           .source = (int)load_u32(bytes + 44)};
}
