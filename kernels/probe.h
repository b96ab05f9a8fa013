/* What GPUs this machine shows and which of NVIDIA's libraries are here, for reports. */
#ifndef FP4D_KERNELS_PROBE_H
#define FP4D_KERNELS_PROBE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/fabric.h"

struct gpu_found {
  char name[256], uuid[48];  /* "GPU-…", as nvidia-smi has it */
  int major, minor;          /* compute capability */
  const char *backend;       /* that runs on it; NULL: none of ours */
  int64_t memory, available; /* bytes */
  int peers;                 /* other GPUs here whose memory it reaches by itself, over NVLink or PCIe */
  struct gpu_fabric fabric;
};

struct gpus_found {
  int driver, runtime; /* CUDA's versions, 13000 for 13.0; driver 0: none */
  int number;
  struct gpu_found *gpu; /* [number] */
};

/* Fills *out, to be freed by gpus_release.  It opens each GPU for a moment to ask for its
 * memory.  False with *e = ERROR_DEVICE: none can be used, or this program was built without CUDA. */
bool gpus_find(struct gpus_found *out, struct error *e);
void gpus_release(struct gpus_found *f);

/* Versions of the libraries that a CUDA backend loads when it opens, "13.1.0".  False with
 * *e = ERROR_DEVICE: it is absent, or too old, or this program was built without CUDA. */
bool gpu_cublaslt_version(char *text, int size, struct error *e);
bool gpu_nccl_version(char *text, int size, struct error *e);

#endif
