#include "checkpoints/chunk.h"

#include <stdlib.h>
#include <string.h>
#include <zstd.h>

struct chunk_coder {
  ZSTD_CCtx *compress;
  ZSTD_DCtx *decompress;
  unsigned char *planes, *packed;
  size_t planes_room, packed_room;
};

int64_t chunk_rows(int64_t rows, size_t row_bytes) {
  const int64_t most = row_bytes < CHUNK_BYTES ? (int64_t)(CHUNK_BYTES / row_bytes) : 1;
  const int64_t chunks = (rows + most - 1) / most;
  return (rows + chunks - 1) / chunks;
}

size_t chunk_coder_bytes(size_t bytes) {
  enum { CONTEXT = 2 << 20 }; /* level 1, measured generously */
  return bytes + ZSTD_compressBound(bytes) + CONTEXT;
}

struct chunk_coder *chunk_coder_open(void) { return calloc(1, sizeof(struct chunk_coder)); }

void chunk_coder_close(struct chunk_coder *c) {
  if (!c) return;
  ZSTD_freeCCtx(c->compress);
  ZSTD_freeDCtx(c->decompress);
  free(c->planes);
  free(c->packed);
  free(c);
}

static bool make_room(unsigned char **buffer, size_t *room, size_t bytes) {
  if (bytes <= *room && *buffer) return true;
  free(*buffer);
  *buffer = malloc(bytes ? bytes : 1);
  *room = *buffer ? bytes : 0;
  return *buffer != NULL;
}

void *chunk_room(struct chunk_coder *c, size_t bytes) { return make_room(&c->packed, &c->packed_room, bytes) ? c->packed : NULL; }

/* Plane p holds byte p of every element. */
static void shuffle_4(unsigned char *restrict to, const unsigned char *restrict from, size_t n, size_t whole) {
  unsigned char *restrict b = to + whole, *restrict c = b + whole, *restrict d = c + whole;
  for (size_t i = 0; i < n; i++) {
    uint32_t x;
    memcpy(&x, from + 4 * i, 4);
    to[i] = (unsigned char)x;
    b[i] = (unsigned char)(x >> 8);
    c[i] = (unsigned char)(x >> 16);
    d[i] = (unsigned char)(x >> 24);
  }
}

static void shuffle_2(unsigned char *restrict to, const unsigned char *restrict from, size_t n, size_t whole) {
  unsigned char *restrict b = to + whole;
  for (size_t i = 0; i < n; i++) {
    uint16_t x;
    memcpy(&x, from + 2 * i, 2);
    to[i] = (unsigned char)x;
    b[i] = (unsigned char)(x >> 8);
  }
}

static void unshuffle_4(unsigned char *restrict to, const unsigned char *restrict a, size_t n, size_t whole) {
  const unsigned char *restrict b = a + whole, *restrict c = b + whole, *restrict d = c + whole;
  for (size_t i = 0; i < n; i++) {
    const uint32_t x = a[i] | (uint32_t)b[i] << 8 | (uint32_t)c[i] << 16 | (uint32_t)d[i] << 24;
    memcpy(to + 4 * i, &x, 4);
  }
}

static void unshuffle_2(unsigned char *restrict to, const unsigned char *restrict a, size_t n, size_t whole) {
  const unsigned char *restrict b = a + whole;
  for (size_t i = 0; i < n; i++) {
    const uint16_t x = (uint16_t)(a[i] | b[i] << 8);
    memcpy(to + 2 * i, &x, 2);
  }
}

static bool no_memory(struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory for a checkpoint's chunk"); }

bool chunk_encode(struct chunk_coder *c, const void *data, int64_t count, int64_t whole, size_t element, const void **out,
                  size_t *bytes, struct error *e) {
  const size_t n = (size_t)count, all = (size_t)whole, plain = all * element;
  if (!c->compress) {
    c->compress = ZSTD_createCCtx();
    if (!c->compress) return no_memory(e);
    ZSTD_CCtx_setParameter(c->compress, ZSTD_c_compressionLevel, CHUNK_LEVEL);
    ZSTD_CCtx_setParameter(c->compress, ZSTD_c_checksumFlag, 1);
  }
  if (!make_room(&c->planes, &c->planes_room, plain) || !make_room(&c->packed, &c->packed_room, ZSTD_compressBound(plain)))
    return no_memory(e);
  if (element == 4)
    shuffle_4(c->planes, data, n, all);
  else
    shuffle_2(c->planes, data, n, all);
  for (size_t p = 0; p < element; p++) memset(c->planes + p * all + n, 0, all - n);
  *bytes = ZSTD_compress2(c->compress, c->packed, c->packed_room, c->planes, plain);
  *out = c->packed;
  if (!ZSTD_isError(*bytes)) return true;
  return error_set(e, ERROR_SYSTEM, "zstd cannot compress: %s", ZSTD_getErrorName(*bytes));
}

bool chunk_decode(struct chunk_coder *c, const void *in, size_t bytes, int64_t whole, size_t element, int64_t first, int64_t count,
                  void *data, struct error *e) {
  const size_t n = (size_t)count, all = (size_t)whole, plain = all * element;
  if (!c->decompress) c->decompress = ZSTD_createDCtx();
  if (!c->decompress || !make_room(&c->planes, &c->planes_room, plain)) return no_memory(e);
  const size_t made = ZSTD_decompressDCtx(c->decompress, c->planes, plain, in, bytes);
  if (ZSTD_isError(made)) return error_set(e, ERROR_CHECKPOINT, "zstd: %s", ZSTD_getErrorName(made));
  if (made != plain) return error_set(e, ERROR_CHECKPOINT, "a chunk has %zu bytes instead of %zu", made, plain);
  if (element == 4)
    unshuffle_4(data, c->planes + first, n, all);
  else
    unshuffle_2(data, c->planes + first, n, all);
  return true;
}
