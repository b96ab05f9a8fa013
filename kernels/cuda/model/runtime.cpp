#include "kernels/cuda/model/runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <mutex>

struct cuda_model_machine cuda_model_machine = {1, 9, 0, 4, 13000, (size_t)4 << 30, (size_t)680 << 20, cudaSuccess};

/* FP4D_MODEL_GPUS: how many the machine has, for worlds of several ranks. */
static const int gpus = [] {
  const char *text = getenv("FP4D_MODEL_GPUS");
  return cuda_model_machine.devices = text ? atoi(text) : 1;
}();

namespace {

/* Before each allocation: one page that says how large it is. */
struct head {
  size_t asked, mapped;
  struct head *before, *after;
};
enum { PAGE = 4096, SLACK = 0xFF };
const size_t PROTECTED = 4 << 20;
size_t in_use;
head *first;

/* Calls that let the device's memory be read and written, and have not ended, of any thread. */
int inside;
std::mutex allocations;

/* Of a large allocation the beginning alone: the system takes milliseconds for hundreds of megabytes. */
void protect(const head *h) {
  const size_t inner = h->mapped - 2 * PAGE;
  mprotect(reinterpret_cast<char *>(const_cast<head *>(h)) + PAGE, inner < PROTECTED ? inner : PROTECTED,
           inside ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void look_at_slack(const char *from, const char *to, const char *begin, size_t asked) {
  for (const char *c = from; c < to; c++)
    if (*c != (char)SLACK) cuda_model_fail("an allocation of %zu bytes was written outside, at byte %td", asked, c - begin);
}

size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

void cuda_model_enter() {
  const std::lock_guard<std::mutex> held(allocations);
  if (inside++) return;
  for (const head *h = first; h; h = h->after) protect(h);
}

void cuda_model_leave() {
  const std::lock_guard<std::mutex> held(allocations);
  if (--inside) return;
  for (const head *h = first; h; h = h->after) protect(h);
}

const char *cudaGetErrorName(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorUnknown: return "cudaErrorUnknown";
  }
  return "unknown";
}

const char *cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorUnknown: return "unknown error";
  }
  return "unknown";
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int *count) {
  *count = cuda_model_machine.devices;
  if (cuda_model_machine.driver < 13000) return cudaErrorInsufficientDriver;
  return *count ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int ordinal) {
  snprintf(p->name, sizeof p->name, "host model");
  memset(&p->uuid, 0, sizeof p->uuid);
  p->uuid.bytes[15] = (char)ordinal;
  p->major = cuda_model_machine.major;
  p->minor = cuda_model_machine.minor;
  p->multiProcessorCount = cuda_model_machine.sm_count;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaDriverGetVersion(int *version) {
  *version = cuda_model_machine.driver;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *total = cuda_model_machine.memory;
  *available = cuda_model_machine.memory - cuda_model_machine.own - in_use;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  *p = NULL;
  if (!bytes) return cudaSuccess;
  if (bytes > cuda_model_machine.memory - cuda_model_machine.own - in_use) return cudaErrorMemoryAllocation;
  const size_t inner = (rounded(bytes) + PAGE - 1) / PAGE * PAGE, mapped = inner + 2 * PAGE;
  void *area = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) return cudaErrorMemoryAllocation;
  char *end = static_cast<char *>(area) + PAGE + inner, *begin = end - rounded(bytes);
  mprotect(end, PAGE, PROT_NONE);
  memset(static_cast<char *>(area) + PAGE, SLACK, inner);
  const std::lock_guard<std::mutex> held(allocations);
  head *h = static_cast<head *>(area);
  *h = head{bytes, mapped, NULL, first};
  if (first) first->before = h;
  first = h;
  protect(h);
  in_use += bytes;
  *p = begin;
  return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
  if (!p) return cudaSuccess;
  char *begin = static_cast<char *>(p);
  char *area = begin - (uintptr_t)begin % PAGE - PAGE;
  const std::lock_guard<std::mutex> held(allocations);
  const head h = *reinterpret_cast<head *>(area);
  (h.before ? h.before->after : first) = h.after;
  if (h.after) h.after->before = h.before;
  mprotect(area, h.mapped - PAGE, PROT_READ);
  look_at_slack(area + PAGE, begin, begin, h.asked);
  look_at_slack(begin + h.asked, area + h.mapped - PAGE, begin, h.asked);
  in_use -= h.asked;
  munmap(area, h.mapped);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
  *p = aligned_alloc(256, rounded(bytes ? bytes : 1));
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *p) {
  free(p);
  return cudaSuccess;
}

bool cuda_model_owns(const void *p, size_t bytes) {
  const std::lock_guard<std::mutex> held(allocations);
  for (const head *h = first; h; h = h->after) {
    const char *end = reinterpret_cast<const char *>(h) + h->mapped - PAGE, *begin = end - rounded(h->asked);
    if (p >= begin && static_cast<const char *>(p) + bytes <= begin + h->asked) return true;
  }
  return false;
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
  cuda_model_submit(stream, [=] {
    cuda_model_enter();
    memset(p, value, bytes);
    cuda_model_leave();
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  cuda_model_submit(stream, [=] {
    cuda_model_enter();
    memcpy(to, from, bytes);
    cuda_model_leave();
    return true;
  });
  return cudaSuccess;
}
