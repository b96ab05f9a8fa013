/* Little-endian numbers at any alignment, and digests as files hold them. */
#ifndef FP4D_DATA_LITTLE_ENDIAN_H
#define FP4D_DATA_LITTLE_ENDIAN_H

#include <stdint.h>

#include "base/hash.h"

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
