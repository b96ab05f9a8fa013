/* The host model of CUDA: vector types, and the words of the language that C++ has not. */
#ifndef FP4D_KERNELS_CUDA_MODEL_TYPES_H
#define FP4D_KERNELS_CUDA_MODEL_TYPES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static
/* One copy for all threads; blocks run one after another.  The section is what
 * the model fills with rubbish before each block and gives addresses in. */
#define __shared__ static __attribute__((section("cuda_model_shared")))

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define CUDA_MODEL_VECTOR2(name, type, bytes)                       \
  struct alignas(bytes) name { type x, y; };                        \
  static inline name make_##name(type x, type y) { return name{x, y}; }
#define CUDA_MODEL_VECTOR4(name, type, bytes)                       \
  struct alignas(bytes) name { type x, y, z, w; };                  \
  static inline name make_##name(type x, type y, type z, type w) { return name{x, y, z, w}; }
CUDA_MODEL_VECTOR2(char2, signed char, 2)
CUDA_MODEL_VECTOR2(uchar2, unsigned char, 2)
CUDA_MODEL_VECTOR2(short2, short, 4)
CUDA_MODEL_VECTOR2(ushort2, unsigned short, 4)
CUDA_MODEL_VECTOR2(int2, int, 8)
CUDA_MODEL_VECTOR2(uint2, unsigned, 8)
CUDA_MODEL_VECTOR2(float2, float, 8)
CUDA_MODEL_VECTOR2(double2, double, 16)
CUDA_MODEL_VECTOR2(longlong2, long long, 16)
CUDA_MODEL_VECTOR2(ulonglong2, unsigned long long, 16)
CUDA_MODEL_VECTOR4(uchar4, unsigned char, 4)
CUDA_MODEL_VECTOR4(ushort4, unsigned short, 8)
CUDA_MODEL_VECTOR4(int4, int, 16)
CUDA_MODEL_VECTOR4(uint4, unsigned, 16)
CUDA_MODEL_VECTOR4(float4, float, 16)

/* This thread. */
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
enum { warpSize = 32 };

#endif
