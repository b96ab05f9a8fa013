/* The host model of kernels/sm90/ptx.h: the same functions, executed by fibers of
 * kernels/cuda/model on the CPU.  It is strict where the hardware is silent:
 *
 *   wgmma   All 128 threads of a warpgroup must issue the same product.  Operands are read from the modelled
 *           shared memory by the descriptor's own fields, at a random time between issue and wait; between
 *           the two the accumulators hold NaNs that must stay untouched and A's registers must not change.
 *           A fence must stand between the last wait and a product.
 *   TMA     A load arrives at a random time and in any order, a store reads at a random time before its
 *           wait.  Both must lie in shared memory, at multiples of 1024 bytes (the swizzle's pattern).
 *   proxies TMA and wgmma see what threads stored to shared memory only after sm90_fence_async_shared().
 *           (Anybody's fence publishes everybody's stores: only a missing fence is found, not a misplaced one.)
 *   barriers  Use before init, init without fence, too many arrivals and wrong alignment are errors; so
 *           are named barriers of unequal thread counts, and whatever is unfinished when a block ends.
 *
 * It models no timing, no register or shared memory limits (ptxas checks those), and
 * proves the reading of the PTX ISA, not the silicon: tests/sm90_ptx_test.cu runs on both.
 */
#ifndef FP4D_KERNELS_SM90_MODEL_H
#define FP4D_KERNELS_SM90_MODEL_H

#include <stdint.h>

#include "kernels/formats.h"

#define SM90_DEVICE static inline
/* Where a thread waits, for the report of a deadlock. */
#define SM90_MODEL_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* What kernels/sm90/tensor_map.h encodes: BF16, 128-byte swizzle, dimension 0 contiguous. */
struct CUtensorMap {
  char *data;
  int rank;
  int64_t extent[3], stride[3]; /* elements; bytes */
  int box[3];
};

uint32_t sm90_shared(const void *p);
void sm90_fence_async_shared();

void sm90_barrier_init(uint64_t *b, uint32_t count);
void sm90_barrier_init_fence();
void sm90_barrier_expect(uint64_t *b, uint32_t bytes);
void sm90_barrier_arrive(uint64_t *b);
void sm90_barrier_wait(uint64_t *b, uint32_t parity, SM90_MODEL_HERE);

void sm90_model_load(void *to, const CUtensorMap *map, uint64_t *b, int rank, int x, int y, int z);
void sm90_model_store(const CUtensorMap *map, const void *from, int rank, int x, int y, int z);
void sm90_model_bulk_wait(int newest);
void sm90_bulk_load(void *to, const void *from, uint64_t *b, uint32_t bytes);
void sm90_bulk_commit();

SM90_DEVICE void sm90_tma_load_2d(void *to, const CUtensorMap *map, uint64_t *b, int x, int y) {
  sm90_model_load(to, map, b, 2, x, y, 0);
}
SM90_DEVICE void sm90_tma_load_3d(void *to, const CUtensorMap *map, uint64_t *b, int x, int y, int z) {
  sm90_model_load(to, map, b, 3, x, y, z);
}
SM90_DEVICE void sm90_tma_store_2d(const CUtensorMap *map, const void *from, int x, int y) {
  sm90_model_store(map, from, 2, x, y, 0);
}
SM90_DEVICE void sm90_tma_store_3d(const CUtensorMap *map, const void *from, int x, int y, int z) {
  sm90_model_store(map, from, 3, x, y, z);
}
template <int N> SM90_DEVICE void sm90_bulk_wait_read() { sm90_model_bulk_wait(N); }
template <int N> SM90_DEVICE void sm90_bulk_wait() { sm90_model_bulk_wait(N); }

/* A product as one thread issues it; a_registers NULL: A by descriptor. */
struct sm90_model_product {
  int n;
  bool transpose_a, transpose_b, accumulate;
  uint64_t a, b;
  const uint32_t *a_registers;
  float *d;
};
void sm90_model_wgmma(const struct sm90_model_product *p);
void sm90_model_wgmma_wait(int newest, const char *file, int line);
void sm90_wgmma_fence();
void sm90_wgmma_commit();
template <int N> SM90_DEVICE void sm90_wgmma_wait(SM90_MODEL_HERE) { sm90_model_wgmma_wait(N, file, line); }
template <int R> SM90_DEVICE void sm90_wgmma_registers(float (&)[R]) {}
template <int R> SM90_DEVICE void sm90_wgmma_registers(uint32_t (&)[R]) {}

template <int N, bool TransposeA, bool TransposeB>
SM90_DEVICE void sm90_wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 96 || N == 128 || N == 256, "N of a product");
  struct sm90_model_product p = {N, TransposeA, TransposeB, accumulate, a, b, nullptr, d};
  sm90_model_wgmma(&p);
}
template <int N, bool TransposeB>
SM90_DEVICE void sm90_wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 96 || N == 128 || N == 256, "N of a product");
  struct sm90_model_product p = {N, false, TransposeB, accumulate, 0, b, a, d};
  sm90_model_wgmma(&p);
}

void sm90_model_registers(int registers);
template <int R> SM90_DEVICE void sm90_registers_more() { sm90_model_registers(R); }
template <int R> SM90_DEVICE void sm90_registers_fewer() { sm90_model_registers(R); }
void sm90_named_barrier_sync(int id, int threads, SM90_MODEL_HERE);
void sm90_named_barrier_arrive(int id, int threads, SM90_MODEL_HERE);
uint32_t sm90_transpose_8x8(uint32_t x, SM90_MODEL_HERE);
SM90_DEVICE uint32_t sm90_bf16_pair(float low, float high) { return (uint32_t)bf16_encode(low) | (uint32_t)bf16_encode(high) << 16; }
float sm90_exp2(float x);

#endif
