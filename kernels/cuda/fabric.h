/* A GPU's fabric, asked of the driver's management library where it is there. */
#ifndef FP4D_KERNELS_CUDA_FABRIC_H
#define FP4D_KERNELS_CUDA_FABRIC_H

#include "kernels/fabric.h"

#ifdef __cplusplus
extern "C"
#endif
/* Of the GPU with this "GPU-…"; FABRIC_NONE where the driver does not tell. */
void cuda_fabric(const char *uuid, struct gpu_fabric *out);

#endif
