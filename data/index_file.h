/* The file format of an index (docs/formats.md, "Index"), shared by its writer
 * and its reader: where each document of a stream lies in token files that
 * others made. */
#ifndef FP4D_DATA_INDEX_FILE_H
#define FP4D_DATA_INDEX_FILE_H

#include "data/data.h"
#include "data/frame.h"
#include "data/little_endian.h"

#define INDEX_MAGIC "\x89" "FP4DIX\n" /* 8 bytes, no zero stored */
enum {
  INDEX_VERSION = 1,
  INDEX_BLOCK = 1 << 16, /* bytes of a token file under one digest */
  INDEX_RECORD = 24,     /* bytes of a document */
  INDEX_FILE = 48        /* bytes of a token file's entry */
};

struct index_header {
  int32_t vocab_size, bos, eos;
  int n_sources;
  int64_t tokens, documents;
  int64_t files, blocks; /* token files; their INDEX_BLOCKs in all */
  int64_t path_bytes;
  struct hash content;  /* digest of the stream, whatever files hold it */
  struct hash settings; /* of what was asked for */
};

/* Where things lie in the payload. */
struct index_layout {
  int64_t files_at, digests_at, paths_at, payload;
};

/* False when the counts are negative or the file would pass 2^63 bytes. */
bool index_layout_of(const struct index_header *h, struct index_layout *l);

void index_header_encode(const struct index_header *h, unsigned char bytes[FRAME_HEADER]);
bool index_header_decode(const char *path, const unsigned char bytes[FRAME_HEADER], struct index_header *h, struct error *e);

/* A document; record D, the end, has only `first`. */
struct index_record {
  int64_t first; /* in the stream */
  int64_t place; /* in the token file */
  int64_t file;
};
void index_record_encode(const struct index_record *r, unsigned char bytes[INDEX_RECORD]);
void index_record_decode(const unsigned char bytes[INDEX_RECORD], struct index_record *r);

struct index_file {
  int64_t size, data_at, tokens, first_block, beside;
  int width;
  bool is_signed;
  int source;
};
void index_file_encode(const struct index_file *f, unsigned char bytes[INDEX_FILE]);
void index_file_decode(const unsigned char bytes[INDEX_FILE], struct index_file *f);

/* Blocks of a token file of `size` bytes. */
static inline int64_t index_blocks(int64_t size) { return (size + INDEX_BLOCK - 1) / INDEX_BLOCK; }

#endif
