/* XXH3, compiled in from xxHash's single header. */
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

struct hash_state {
  XXH3_state_t *xxh;
};

static struct hash of_xxh(XXH128_hash_t h) { return (struct hash){.high = h.high64, .low = h.low64}; }

struct hash hash_bytes(const void *data, size_t bytes) { return of_xxh(XXH3_128bits(data, bytes)); }

uint64_t hash_word(const void *data, size_t bytes, uint64_t seed) { return XXH3_64bits_withSeed(data, bytes, seed); }

struct hash_state *hash_open(void) {
  struct hash_state *s = malloc(sizeof *s);
  if (!s) return NULL;
  s->xxh = XXH3_createState();
  if (!s->xxh) {
    free(s);
    return NULL;
  }
  XXH3_128bits_reset(s->xxh);
  return s;
}

void hash_feed(struct hash_state *s, const void *data, size_t bytes) {
  if (bytes) XXH3_128bits_update(s->xxh, data, bytes);
}

struct hash hash_close(struct hash_state *s) {
  struct hash h = of_xxh(XXH3_128bits_digest(s->xxh));
  XXH3_freeState(s->xxh);
  free(s);
  return h;
}

struct hash hash_sum(struct hash a, struct hash b) {
  struct hash sum = {.high = a.high + b.high, .low = a.low + b.low};
  if (sum.low < a.low) sum.high++;
  return sum;
}

void hash_text(struct hash h, char text[HASH_TEXT]) {
  static const char digits[] = "0123456789abcdef";
  for (int i = 0; i < 16; i++) {
    text[i] = digits[h.high >> (60 - 4 * i) & 15];
    text[16 + i] = digits[h.low >> (60 - 4 * i) & 15];
  }
  text[32] = 0;
}

int hash_parse(const char *text, struct hash *h) {
  static const char digits[] = "0123456789abcdef";
  struct hash read = {0, 0};
  for (int i = 0; i < 32; i++) {
    const char *digit = text && text[i] ? strchr(digits, text[i]) : NULL;
    if (!digit) return 0;
    uint64_t *word = i < 16 ? &read.high : &read.low;
    *word = *word << 4 | (uint64_t)(digit - digits);
  }
  if (text[32]) return 0;
  *h = read;
  return 1;
}

int hash_equal(struct hash a, struct hash b) { return a.high == b.high && a.low == b.low; }
