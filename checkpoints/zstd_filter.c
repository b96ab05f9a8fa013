#include "checkpoints/zstd_filter.h"

#include <stdint.h>
#include <stdlib.h>
#include <zstd.h>

/* Replaces *buffer; 0 and nothing touched where there is no memory or zstd refuses. */
static size_t replace(void **buffer, size_t *room, void *made, size_t made_room, size_t made_bytes) {
  if (ZSTD_isError(made_bytes)) {
    free(made);
    return 0;
  }
  free(*buffer);
  *buffer = made;
  *room = made_room;
  return made_bytes;
}

static size_t unpack(size_t bytes, size_t *room, void **buffer) {
  const unsigned long long plain = ZSTD_getFrameContentSize(*buffer, bytes);
  if (plain == ZSTD_CONTENTSIZE_UNKNOWN || plain == ZSTD_CONTENTSIZE_ERROR || plain == 0 || plain > UINT32_MAX) return 0;
  void *made = malloc((size_t)plain);
  return made ? replace(buffer, room, made, (size_t)plain, ZSTD_decompress(made, (size_t)plain, *buffer, bytes)) : 0;
}

static size_t pack(int level, size_t bytes, size_t *room, void **buffer) {
  const size_t bound = ZSTD_compressBound(bytes);
  void *made = malloc(bound);
  ZSTD_CCtx *context = made ? ZSTD_createCCtx() : NULL;
  if (!context) {
    free(made);
    return 0;
  }
  ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, level);
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  const size_t n = ZSTD_compress2(context, made, bound, *buffer, bytes);
  ZSTD_freeCCtx(context);
  return replace(buffer, room, made, bound, n);
}

static size_t run(unsigned flags, size_t n_values, const unsigned values[], size_t bytes, size_t *room, void **buffer) {
  if (flags & H5Z_FLAG_REVERSE) return unpack(bytes, room, buffer);
  return pack(n_values > 0 ? (int)values[0] : ZSTD_CLEVEL_DEFAULT, bytes, room, buffer);
}

const H5Z_class2_t zstd_filter = {
    .version = H5Z_CLASS_T_VERS,
    .id = ZSTD_FILTER,
    .encoder_present = 1,
    .decoder_present = 1,
    .name = "zstd",
    .filter = run,
};
