/* One chunk of a compressed dataset: bytes shuffled into planes, then a zstd frame.
 *
 * This is what HDF5's own pipeline of shuffle and filter 32015 makes and reads,
 * done here so that threads can do it outside the library's lock.
 */
#ifndef FP4D_CHECKPOINTS_CHUNK_H
#define FP4D_CHECKPOINTS_CHUNK_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum { CHUNK_BYTES = 8 << 20, CHUNK_LEVEL = 1 };

/* Rows of a chunk: all of `rows`, or, where those are more than CHUNK_BYTES, whole
 * rows evenly divided over the fewest chunks of at most that (4 to 8 MiB, where a
 * row is no larger). */
int64_t chunk_rows(int64_t rows, size_t row_bytes);

/* The most memory that one coder takes for chunks of `bytes`. */
size_t chunk_coder_bytes(size_t bytes);

struct chunk_coder; /* one thread's contexts and buffers */
struct chunk_coder *chunk_coder_open(void);
void chunk_coder_close(struct chunk_coder *c);

/* Shuffles `count` elements of `element` bytes (2 or 4), followed by zeros up to
 * `whole` elements, and compresses: *out, of *bytes, holds until the next call. */
bool chunk_encode(struct chunk_coder *c, const void *data, int64_t count, int64_t whole, size_t element, const void **out,
                  size_t *bytes, struct error *e);

/* Room for a compressed chunk that is about to be read; NULL: out of memory. */
void *chunk_room(struct chunk_coder *c, size_t bytes);

/* Decompresses a chunk of `whole` elements (a frame whose checksum does not fit is
 * an error) and puts elements [first, first + count) into data. */
bool chunk_decode(struct chunk_coder *c, const void *in, size_t bytes, int64_t whole, size_t element, int64_t first, int64_t count,
                  void *data, struct error *e);

#endif
