/* Versions of NVIDIA's libraries and identities of GPUs, in words. */
#ifndef FP4D_KERNELS_CUDA_NAMES_H
#define FP4D_KERNELS_CUDA_NAMES_H

#include <stddef.h>
#include <stdio.h>

/* "2.28.9" of 22809: NCCL and cuBLASLt count alike. */
static inline void cuda_version_text(size_t version, char *text, int size) {
  snprintf(text, (size_t)size, "%zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
}

/* "GPU-01234567-89ab-cdef-0123-456789abcdef", as nvidia-smi has it. */
static inline void cuda_uuid_text(const char uuid[16], char text[48]) {
  int n = snprintf(text, 48, "GPU-");
  for (int i = 0; i < 16; i++)
    n += snprintf(text + n, (size_t)(48 - n), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", (unsigned char)uuid[i]);
}

#endif
