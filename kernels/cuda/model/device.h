/* The host model of CUDA: the functions that device code calls. */
#ifndef FP4D_KERNELS_CUDA_MODEL_DEVICE_H
#define FP4D_KERNELS_CUDA_MODEL_DEVICE_H

#include "kernels/cuda/model/fibers.h"

#define CUDA_MODEL_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

static inline void __syncthreads(CUDA_MODEL_HERE) { cuda_model_barrier(0, cuda_model_threads(), true, file, line); }
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, CUDA_MODEL_HERE) { cuda_model_warp(CUDA_MODEL_SYNC, mask, 0, 0, file, line); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

static inline unsigned __ballot_sync(unsigned mask, int vote, CUDA_MODEL_HERE) {
  return (unsigned)cuda_model_warp(CUDA_MODEL_BALLOT, mask, vote != 0, 0, file, line);
}
static inline int __any_sync(unsigned mask, int vote, CUDA_MODEL_HERE) {
  return cuda_model_warp(CUDA_MODEL_BALLOT, mask, vote != 0, 0, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int vote, CUDA_MODEL_HERE) {
  return cuda_model_warp(CUDA_MODEL_BALLOT, mask, vote == 0, 0, file, line) == 0;
}

template <class T>
static inline T cuda_model_shuffle(unsigned mask, T value, int source, const char *file, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = cuda_model_warp(CUDA_MODEL_SHUFFLE, mask, bits, source, file, line);
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline int cuda_model_lane() { return cuda_model_thread() % 32; }
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_MODEL_HERE) {
  const int first = cuda_model_lane() / width * width;
  return cuda_model_shuffle(mask, value, first + (source & (width - 1)), file, line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CUDA_MODEL_HERE) {
  const int own = cuda_model_lane(), from = own ^ lanes, end = own / width * width + width;
  return cuda_model_shuffle(mask, value, from < end ? from : own, file, line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, CUDA_MODEL_HERE) {
  const int own = cuda_model_lane(), end = own / width * width + width;
  return cuda_model_shuffle(mask, value, own + (int)by < end ? own + (int)by : own, file, line);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, CUDA_MODEL_HERE) {
  const int own = cuda_model_lane(), first = own / width * width;
  return cuda_model_shuffle(mask, value, own - (int)by >= first ? own - (int)by : own, file, line);
}

template <class T>
static inline T __ldg(const T *p) { return *p; }
template <class T>
static inline T __ldcs(const T *p) { return *p; }
template <class T>
static inline void __stcs(T *p, T value) { *p = value; }

/* Other threads run first now and then: a read and a write that should have
 * been one atomic operation come apart. */
static inline void cuda_model_atomic_turn() {
  if (cuda_model_random() % 16 == 0) cuda_model_yield();
}
#define CUDA_MODEL_ATOMIC(name, type, expression)       \
  static inline type name(type *p, type value) {        \
    cuda_model_atomic_turn();                           \
    const type old = *p;                                \
    *p = (expression);                                  \
    return old;                                         \
  }
CUDA_MODEL_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)value))
CUDA_MODEL_ATOMIC(atomicAdd, unsigned, old + value)
CUDA_MODEL_ATOMIC(atomicAdd, unsigned long long, old + value)
CUDA_MODEL_ATOMIC(atomicAdd, float, old + value)
CUDA_MODEL_ATOMIC(atomicAdd, double, old + value)
CUDA_MODEL_ATOMIC(atomicMax, int, old > value ? old : value)
CUDA_MODEL_ATOMIC(atomicMax, unsigned, old > value ? old : value)
CUDA_MODEL_ATOMIC(atomicMax, unsigned long long, old > value ? old : value)
CUDA_MODEL_ATOMIC(atomicMin, int, old < value ? old : value)
CUDA_MODEL_ATOMIC(atomicMin, unsigned, old < value ? old : value)
CUDA_MODEL_ATOMIC(atomicOr, unsigned, old | value)
CUDA_MODEL_ATOMIC(atomicExch, unsigned, value)
static inline unsigned atomicCAS(unsigned *p, unsigned expected, unsigned value) {
  cuda_model_atomic_turn();
  const unsigned old = *p;
  if (old == expected) *p = value;
  return old;
}

static inline unsigned __float_as_uint(float x) {
  unsigned u;
  memcpy(&u, &x, sizeof u);
  return u;
}
static inline float __uint_as_float(unsigned u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }

#endif
