/* The host model of CUDA: what kernels/cuda takes of the runtime's API, over
 * ordinary memory and in order.  Allocations begin as rubbish (0xFF: NaN) and end
 * at a page that may not be touched, but for at most 255 bytes that are looked at
 * on release.  Only kernels and copies reach them: anyone else's read or write of
 * device memory ends the process (of its first 4 MiB, where an allocation is larger). */
#ifndef FP4D_KERNELS_CUDA_MODEL_RUNTIME_H
#define FP4D_KERNELS_CUDA_MODEL_RUNTIME_H

#include "kernels/cuda/model/device.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorIllegalAddress = 700,
  cudaErrorUnknown = 999
};
typedef struct cuda_model_stream *cudaStream_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
struct cudaDeviceProp {
  char name[256];
  int major, minor, multiProcessorCount;
};
enum { cudaStreamNonBlocking = 1, cudaHostAllocDefault = 0 };

const char *cudaGetErrorName(cudaError_t e);
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int ordinal);
cudaError_t cudaSetDevice(int ordinal);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);

/* The machine that is modelled, for tests to change.  `fault` is what the next
 * synchronisation reports. */
struct cuda_model_machine {
  int devices, major, minor, sm_count, driver;
  size_t memory;
  cudaError_t fault;
};
extern cuda_model_machine cuda_model_machine;

/* Between them the device's memory can be read and written; pairs may nest. */
void cuda_model_enter();
void cuda_model_leave();

#endif
