/* The host model of CUDA: what kernels/cuda takes of the runtime's API, over
 * ordinary memory.  Streams are queues (streams.cpp): work is done when it is given
 * where nothing before it waits, or, where FP4D_MODEL_STREAMS is "lazy", when somebody
 * waits for it and not before, so that an order that was not asked for shows as a wrong
 * result.  Allocations begin as rubbish (0xFF: NaN) and end
 * at a page that may not be touched, but for at most 255 bytes that are looked at
 * on release.  Only kernels and copies reach them: anyone else's read or write of
 * device memory ends the process (of its first 4 MiB, where an allocation is larger). */
#ifndef FP4D_KERNELS_CUDA_MODEL_RUNTIME_H
#define FP4D_KERNELS_CUDA_MODEL_RUNTIME_H

#include <functional>

#include "kernels/cuda/model/device.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorUnknown = 999
};
typedef struct cuda_model_stream *cudaStream_t;
typedef struct cuda_model_event *cudaEvent_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  int major, minor, multiProcessorCount;
};
enum { cudaStreamNonBlocking = 1, cudaHostAllocDefault = 0, cudaEventDefault = 0, cudaEventDisableTiming = 2 };

const char *cudaGetErrorName(cudaError_t e);
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int ordinal);
cudaError_t cudaSetDevice(int ordinal);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);

/* The machine that is modelled, for tests to change.  `own` of its memory holds context
 * and code; `fault` is what synchronisations and queries report from now on. */
struct cuda_model_machine {
  int devices, major, minor, sm_count, driver;
  size_t memory, own;
  cudaError_t fault;
};
extern cuda_model_machine cuda_model_machine;

/* Work for a stream, after what it was given before: called, and again, until it says that
 * it is done.  A stream's work is one thread's at a time, whichever waits for it. */
void cuda_model_submit(cudaStream_t stream, std::function<bool()> work);
/* Until the stream has done all that it was given. */
void cuda_model_finish(cudaStream_t stream);
/* What `stream` has been given; whether it has done as much. */
uint64_t cuda_model_given(cudaStream_t stream);
bool cuda_model_reached(cudaStream_t stream, uint64_t given);

/* Whether these bytes lie in one allocation of device memory. */
bool cuda_model_owns(const void *p, size_t bytes);

/* Between them the device's memory can be read and written; pairs may nest. */
void cuda_model_enter();
void cuda_model_leave();

#endif
