/* The host model's machine: what kernels/cuda/probe.c and fabric.c ask of a real one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/fabric.h"
#include "kernels/cuda/model/runtime.h"
#include "kernels/cuda/names.h"

extern "C" {
#include "kernels/probe.h"
}

/* FP4D_MODEL_FABRIC=CLIQUE[/HEALTH], a comma, the next GPU's …; empty: that GPU is joining. */
extern "C" void cuda_fabric(const char *uuid, struct gpu_fabric *out) {
  const char *text = getenv("FP4D_MODEL_FABRIC");
  memset(out, 0, sizeof *out);
  for (long gpu = strtol(uuid + strlen(uuid) - 2, NULL, 16); text && gpu > 0; gpu--) {
    text = strchr(text, ',');
    if (text) text++;
  }
  if (!text) return;
  out->state = FABRIC_IN_PROGRESS;
  out->cluster[0] = 1;
  if (sscanf(text, "%u/%x", &out->clique, &out->health) > 0) out->state = FABRIC_COMPLETED;
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
    cuda_fabric(g->uuid, &g->fabric);
    g->major = p.major;
    g->minor = p.minor;
    g->backend = p.major == 9 ? "sm90" : "sm100";
    g->memory = (int64_t)total;
    g->available = (int64_t)available;
    g->peers = out->number - 1;
  }
  return true;
}
