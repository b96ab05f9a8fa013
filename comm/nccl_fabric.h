/* What the GPUs of a world say of the NVLink fabric, and what is known to go wrong with NCCL on it. */
#ifndef FP4D_COMM_NCCL_FABRIC_H
#define FP4D_COMM_NCCL_FABRIC_H

#include "kernels/fabric.h"

enum { NCCL_FABRIC_MOST = 2, NCCL_FABRIC_TEXT = 320 };

struct nccl_fabric {
  char summary[80]; /* "no NVLink fabric", "72 of 72 GPUs in a rack's NVLink fabric, 1 clique" */
  int n;            /* warnings */
  char warning[NCCL_FABRIC_MOST][NCCL_FABRIC_TEXT];
};

/* Of GPUs 0 .. n - 1, each called `name` and its number: "the GPU of rank ". */
struct nccl_fabric nccl_fabric(const struct gpu_fabric *gpu, int n, const char *name);

#endif
