/* Backends by name.  The only file of kernels/ that knows which ones were built. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/probe.h"

struct device *cpu_open(int threads, struct error *e);
#ifdef FP4D_CUDA
#ifdef FP4D_CUDA_MODEL
#define cuda_open cuda_model_open_rank /* its GPU is of the backend that is asked for */
#endif
struct device *cuda_open(const char *backend, int ordinal, struct error *e);
struct device *cuda_open_plan(const char *backend, struct error *e);
#endif

/* local_rank < 0: to plan with. */
static struct device *open_backend(const char *backend, int threads, int local_rank, struct error *e) {
  if (strcmp(backend, "cpu") == 0) return cpu_open(threads, e);
  const bool cuda = strcmp(backend, "sm90") == 0 || strcmp(backend, "sm100") == 0;
#ifdef FP4D_CUDA
  if (cuda) return local_rank < 0 ? cuda_open_plan(backend, e) : cuda_open(backend, local_rank, e);
  error_set(e, ERROR_DEVICE, "backend \"%s\" is not built in", backend);
  error_hint(e, "this build has: cpu, sm90, sm100");
#else
  (void)local_rank;
  error_set(e, ERROR_DEVICE, "backend \"%s\" is not built in%s", backend, cuda ? ": this program was built without CUDA" : "");
  error_hint(e, cuda ? "build it where nvcc is installed (make NVCC=...), or set run.backend to cpu" : "this build has: cpu");
#endif
  return NULL;
}

struct device *device_open_rank(const char *backend, int threads, int local_rank, struct error *e) {
  return open_backend(backend, threads, local_rank, e);
}

struct device *device_open(const char *backend, int threads, struct error *e) { return device_open_rank(backend, threads, 0, e); }

struct device *device_open_plan(const char *backend, int threads, struct error *e) { return open_backend(backend, threads, -1, e); }

#ifdef FP4D_CUDA_MODEL
bool cuda_model_gpus_find(struct gpus_found *out, struct error *e);
bool cuda_model_nccl_version(char *text, int size, struct error *e);

bool gpus_find(struct gpus_found *out, struct error *e) { return cuda_model_gpus_find(out, e); }

void gpus_release(struct gpus_found *f) {
  free(f->gpu);
  memset(f, 0, sizeof *f);
}

bool gpu_cublaslt_version(char *text, int size, struct error *e) {
  (void)e;
  snprintf(text, (size_t)size, "the CPU backend in its place");
  return true;
}

bool gpu_nccl_version(char *text, int size, struct error *e) { return cuda_model_nccl_version(text, size, e); }
#elif !defined(FP4D_CUDA)
static bool without_cuda(struct error *e) { return error_set(e, ERROR_DEVICE, "this program was built without CUDA"); }

bool gpus_find(struct gpus_found *out, struct error *e) {
  memset(out, 0, sizeof *out);
  return without_cuda(e);
}

void gpus_release(struct gpus_found *f) { (void)f; }

bool gpu_cublaslt_version(char *text, int size, struct error *e) {
  (void)text, (void)size;
  return without_cuda(e);
}

bool gpu_nccl_version(char *text, int size, struct error *e) {
  (void)text, (void)size;
  return without_cuda(e);
}
#endif
