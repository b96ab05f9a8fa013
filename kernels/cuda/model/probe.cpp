/* The host model's machine, for kernels/device.c: what kernels/cuda/probe.c asks of a real one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/model/runtime.h"
#include "kernels/cuda/names.h"

extern "C" {
#include "kernels/probe.h"
}

extern "C" bool cuda_model_gpus_find(struct gpus_found *out, struct error *e) {
  memset(out, 0, sizeof *out);
  (void)cudaRuntimeGetVersion(&out->runtime);
  (void)cudaDriverGetVersion(&out->driver);
  if (cudaGetDeviceCount(&out->number) != cudaSuccess) return error_set(e, ERROR_DEVICE, "this machine shows no GPU");
  out->gpu = static_cast<struct gpu_found *>(calloc((size_t)out->number, sizeof *out->gpu));
  if (!out->gpu) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (int i = 0; i < out->number; i++) {
    struct gpu_found *g = &out->gpu[i];
    struct cudaDeviceProp p;
    size_t available, total;
    (void)cudaGetDeviceProperties(&p, i);
    (void)cudaMemGetInfo(&available, &total);
    snprintf(g->name, sizeof g->name, "%s", p.name);
    cuda_uuid_text(p.uuid.bytes, g->uuid);
    g->major = p.major;
    g->minor = p.minor;
    g->backend = p.major == 9 ? "sm90" : "sm100";
    g->memory = (int64_t)total;
    g->available = (int64_t)available;
    g->peers = out->number - 1;
  }
  return true;
}
