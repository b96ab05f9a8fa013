/* The file format of a token stream (docs/formats.md, "Token stream"), shared
 * by its writer and its reader. */
#ifndef FP4D_DATA_STREAM_FILE_H
#define FP4D_DATA_STREAM_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"
#include "data/data.h"

#define STREAM_MAGIC "\x89" "FP4DTK\n" /* 8 bytes, no zero stored */
#define STREAM_END_MAGIC "FP4DEND\n"
enum {
  STREAM_VERSION = 2,
  STREAM_HEADER = 256,
  STREAM_TRAILER = 64,
  STREAM_BLOCK = 1 << 20,       /* bytes under one digest */
  STREAM_SOURCES_MOST = 1 << 20 /* bytes of the sources' text */
};

/* What the header says. */
struct stream_header {
  int32_t vocab_size;
  int32_t bos, eos; /* -1: none */
  int n_sources;    /* 1..STREAM_SOURCES */
  int64_t tokens, documents;
  char tokenizer[STREAM_TOKENIZER]; /* zero-terminated, zeros after it */
};

/* Where things lie.  Payload: ids, zeros up to a multiple of 8 bytes,
 * documents + 1 offsets (u64, in tokens), a source (u8) for each document. */
struct stream_layout {
  int token_bytes;     /* 2 when every id fits 16 bits, else 4 */
  int64_t offsets_at;  /* of the document offsets, in the payload */
  int64_t sources_at;  /* of the documents' sources, in the payload */
  int64_t payload;     /* bytes */
  int64_t blocks;      /* of STREAM_BLOCK payload bytes; the last may be short */
  int64_t file_bytes;  /* without the sources' text */
};

/* False when the counts are negative or the file would pass 2^63 bytes. */
bool stream_layout_of(const struct stream_header *h, struct stream_layout *l);

void stream_header_encode(const struct stream_header *h, unsigned char bytes[STREAM_HEADER]);

/* Refuses a wrong magic, version, width, block size and counts that no file can
 * have; messages begin with `path`. */
bool stream_header_decode(const char *path, const unsigned char bytes[STREAM_HEADER], struct stream_header *h,
                          struct error *e);

/* A line of the sources' text: NAME, documents and tokens, with tabs between; what comes
 * after a third tab says where the source came from. Fills info->source from it; refuses
 * text that is not n_sources such lines or does not add up to info->documents and tokens. */
bool stream_sources_decode(const char *path, const char *text, struct stream_info *info, struct error *e);
/* The text; notes[i] (may be NULL, as notes may) comes last on line i. malloc'ed; NULL: out of memory. */
char *stream_sources_encode(const struct stream_source *source, int n_sources, const char *const *notes);

/* ---- writing ----------------------------------------------------------- */
struct stream_writer; /* opaque */

/* What is known before the first token. */
struct stream_start {
  int32_t vocab_size, bos, eos; /* bos, eos: -1 where documents have none */
  const char *tokenizer;        /* printable ASCII without spaces, below STREAM_TOKENIZER bytes */
  const char *const *names;     /* [n_sources], 1..STREAM_SOURCES of them; below STREAM_NAME bytes */
  int n_sources;
};

/* Starts PATH under a temporary name beside it; removes, and logs, what killed writers
 * of PATH left. NULL with *e filled. */
struct stream_writer *stream_writer_open(const char *path, const struct stream_start *start, struct error *e);
/* The next token begins a document of source number `source`. */
bool stream_writer_document(struct stream_writer *w, int source, struct error *e);
bool stream_writer_tokens(struct stream_writer *w, const int32_t *ids, int64_t count, struct error *e);
int64_t stream_writer_count(const struct stream_writer *w); /* tokens so far */
/* Writes what is left and makes it durable, still under the temporary name. notes[n_sources]:
 * where each source came from, one line without tabs; NULL, or NULL for one: nothing. */
bool stream_writer_finish(struct stream_writer *w, const char *const *notes, struct error *e);
/* Renames the finished file to PATH, durably. */
bool stream_writer_publish(struct stream_writer *w, struct error *e);
/* Frees; removes the temporary file unless it was published. NULL is fine. */
void stream_writer_close(struct stream_writer *w);

/* ---- little-endian numbers, at any alignment --------------------------- */
static inline void store_u16(unsigned char *p, uint32_t x) {
  p[0] = (unsigned char)x;
  p[1] = (unsigned char)(x >> 8);
}
static inline void store_u32(unsigned char *p, uint32_t x) {
  store_u16(p, x);
  store_u16(p + 2, x >> 16);
}
static inline void store_u64(unsigned char *p, uint64_t x) {
  store_u32(p, (uint32_t)x);
  store_u32(p + 4, (uint32_t)(x >> 32));
}
static inline uint32_t load_u16(const unsigned char *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }
static inline uint32_t load_u32(const unsigned char *p) { return load_u16(p) | load_u16(p + 2) << 16; }
static inline uint64_t load_u64(const unsigned char *p) { return load_u32(p) | (uint64_t)load_u32(p + 4) << 32; }

static inline void store_hash(unsigned char *p, struct hash h) {
  store_u64(p, h.high);
  store_u64(p + 8, h.low);
}
static inline struct hash load_hash(const unsigned char *p) {
  return (struct hash){.high = load_u64(p), .low = load_u64(p + 8)};
}

#endif
