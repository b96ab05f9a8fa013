/* Philox4x32-10: random bits as a function of (key, counter).
 *
 * Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3"
 * (SC11).  Static inline, in the common subset of C17, C++ and CUDA, so that
 * every backend draws the same bits.
 */
#ifndef FP4D_BASE_PHILOX_H
#define FP4D_BASE_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define FP4D_INLINE static __host__ __device__ __forceinline__
#else
#define FP4D_INLINE static inline
#endif

#define PHILOX_ROUNDS 10

struct philox_block {
  uint32_t word[4];
};

FP4D_INLINE struct philox_block philox4x32_10(uint64_t key, struct philox_block counter) {
  uint32_t k0 = (uint32_t)key;
  uint32_t k1 = (uint32_t)(key >> 32);
  struct philox_block c = counter;
  for (int round = 0; round < PHILOX_ROUNDS; round++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c.word[0];
    uint64_t p1 = (uint64_t)0xCD9E8D57u * c.word[2];
    struct philox_block n;
    n.word[0] = (uint32_t)(p1 >> 32) ^ c.word[1] ^ k0;
    n.word[1] = (uint32_t)p1;
    n.word[2] = (uint32_t)(p0 >> 32) ^ c.word[3] ^ k1;
    n.word[3] = (uint32_t)p0;
    c = n;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

/* Where a draw stands.  The counter is made of these fields alone, so a draw
 * does not depend on launch geometry, local batch, world size or resume:
 *   word 0  block: index of the group of elements inside the sample
 *   word 1  sample index in the run, low 32 bits
 *   word 2  update
 *   word 3  sample index bits 32-39 (8) | layer (12) | operand (12)          */
FP4D_INLINE struct philox_block philox_counter(uint32_t update, uint64_t sample, uint32_t layer,
                                               uint32_t operand, uint32_t block) {
  struct philox_block c;
  c.word[0] = block;
  c.word[1] = (uint32_t)sample;
  c.word[2] = update;
  c.word[3] = ((uint32_t)(sample >> 32) & 0xFFu) << 24 | (layer & 0xFFFu) << 12 | (operand & 0xFFFu);
  return c;
}

#endif
