/* The bytes of a file of text: plain, gzip (also several members) or Zstandard
 * (also several frames), by the end of its name. */
#ifndef FP4D_DATA_CORPUS_BYTES_H
#define FP4D_DATA_CORPUS_BYTES_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum corpus_compression { CORPUS_PLAIN, CORPUS_GZIP, CORPUS_ZSTD };

/* By name: .gz, .zst.  *length loses the ending. */
enum corpus_compression corpus_compression_of(const char *name, size_t *length);

struct corpus_bytes; /* an open file */

/* NULL with *e filled: ERROR_DATA, naming the file. */
struct corpus_bytes *corpus_bytes_open(const char *path, struct error *e);
/* Up to `room` bytes of text into `buffer`; fewer only at the end; -1 with *e
 * filled.  A compressed file that ends too early, is damaged or has other bytes
 * after its last member or frame is an error; an empty one is empty text. */
int64_t corpus_bytes_read(struct corpus_bytes *b, void *buffer, int64_t room, struct error *e);
/* Bytes of the file itself that have been read. */
int64_t corpus_bytes_position(const struct corpus_bytes *b);
void corpus_bytes_close(struct corpus_bytes *b); /* NULL is fine */

#endif
