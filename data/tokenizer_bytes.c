/* The byte tokenizer: a token is a byte. */
#include "data/data.h"

int64_t tokenizer_bytes_encode(const void *text, int64_t bytes, int32_t *ids) {
  const unsigned char *byte = text;
  for (int64_t i = 0; i < bytes; i++) ids[i] = byte[i];
  return bytes;
}

int tokenizer_bytes_decode(int32_t id, char out[8]) {
  if (id < 0 || id > 255) return 0;
  out[0] = (char)(unsigned char)id;
  return 1;
}
