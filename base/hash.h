/* Content hashes: XXH3-128 (xxHash), shown as 32 hexadecimal digits. */
#ifndef FP4D_BASE_HASH_H
#define FP4D_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

struct hash {
  uint64_t high, low;
};

#define HASH_TEXT 33 /* bytes for hash_text, the final zero included */

struct hash hash_bytes(const void *data, size_t bytes);

/* XXH3-64 with a seed: for tables and sketches, not for identity. */
uint64_t hash_word(const void *data, size_t bytes, uint64_t seed);

/* Streaming: hash_open, hash_feed…, hash_close. NULL when out of memory. */
struct hash_state;
struct hash_state *hash_open(void);
void hash_feed(struct hash_state *s, const void *data, size_t bytes);
struct hash hash_close(struct hash_state *s); /* frees s */

/* A sum that does not depend on order: (high, low) as one 128-bit integer. */
struct hash hash_sum(struct hash a, struct hash b);

void hash_text(struct hash h, char text[HASH_TEXT]);
/* Reads what hash_text wrote; false for anything else, NULL too. */
int hash_parse(const char *text, struct hash *h);
int hash_equal(struct hash a, struct hash b);

#endif
