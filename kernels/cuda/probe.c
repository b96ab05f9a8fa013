#include "kernels/probe.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/fabric.h"
#include "kernels/cuda/libraries.h"
#include "kernels/cuda/nccl.h"

static bool failed(const char *what, cudaError_t code, struct error *e) {
  return error_set(e, ERROR_DEVICE, "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code));
}

static const char *backend_of(const struct cudaDeviceProp *p) {
  if (p->minor != 0) return NULL;
  return p->major == 9 ? "sm90" : p->major == 10 ? "sm100" : NULL;
}

static bool look(struct gpu_found *g, int ordinal, int number, struct error *e) {
  struct cudaDeviceProp p;
  cudaError_t code = cudaGetDeviceProperties(&p, ordinal);
  if (code != cudaSuccess) return failed("cudaGetDeviceProperties", code, e);
  snprintf(g->name, sizeof g->name, "%s", p.name);
  cuda_uuid_text(p.uuid.bytes, g->uuid);
  cuda_fabric(g->uuid, &g->fabric);
  g->major = p.major;
  g->minor = p.minor;
  g->backend = backend_of(&p);
  g->memory = (int64_t)p.totalGlobalMem;
  for (int other = 0; other < number; other++) {
    int reaches = 0;
    if (other != ordinal && cudaDeviceCanAccessPeer(&reaches, ordinal, other) == cudaSuccess) g->peers += reaches;
  }
  size_t available = 0, total = 0;
  code = cudaSetDevice(ordinal);
  if (code == cudaSuccess) code = cudaMemGetInfo(&available, &total);
  if (code != cudaSuccess) {
    failed("cudaMemGetInfo", code, e);
    error_context(e, "GPU %d", ordinal);
    return error_hint(e, "see with nvidia-smi whether another process holds it, or whether it is in a fault");
  }
  g->available = (int64_t)available;
  return true;
}

bool gpus_find(struct gpus_found *out, struct error *e) {
  memset(out, 0, sizeof *out);
  (void)cudaRuntimeGetVersion(&out->runtime);
  (void)cudaDriverGetVersion(&out->driver);
  const cudaError_t code = cudaGetDeviceCount(&out->number);
  if (code == cudaErrorInsufficientDriver && out->driver == 0) return error_set(e, ERROR_DEVICE, "this machine has no NVIDIA driver");
  if (code != cudaSuccess) return failed("no GPU can be used", code, e);
  if (out->number == 0) return error_set(e, ERROR_DEVICE, "this machine shows no GPU");
  out->gpu = calloc((size_t)out->number, sizeof *out->gpu);
  if (!out->gpu) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (int i = 0; i < out->number; i++)
    if (!look(&out->gpu[i], i, out->number, e)) {
      gpus_release(out);
      return false;
    }
  return true;
}

void gpus_release(struct gpus_found *f) {
  free(f->gpu);
  memset(f, 0, sizeof *f);
}

bool gpu_cublaslt_version(char *text, int size, struct error *e) {
  const struct cuda_cublaslt *library = cuda_cublaslt_open(e);
  if (!library) return false;
  cuda_version_text(library->GetVersion(), text, size);
  return true;
}

bool gpu_nccl_version(char *text, int size, struct error *e) { return cuda_nccl_version(text, size, e); }
