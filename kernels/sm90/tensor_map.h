/* Maps by which TMA finds tiles of BF16 tensors: PTX ISA "Tensors", CUDA driver API
 * cuTensorMapEncodeTiled. */
#ifndef FP4D_KERNELS_SM90_TENSOR_MAP_H
#define FP4D_KERNELS_SM90_TENSOR_MAP_H

#include "kernels/cuda/cuda.h"
#include "kernels/sm90/ptx.h"

/* A tensor of BF16 and the box that one copy moves, dimension 0 contiguous.  The
 * box's first extent is 64 (128 bytes: a row of the swizzle), the others 1..256;
 * data and strides are multiples of 16 bytes.  Elements of the box outside the
 * extents are read as zero and not written. */
struct sm90_tensor {
  const void *data;
  int rank;          /* 2 or 3 */
  int64_t extent[3]; /* elements */
  int64_t stride[3]; /* bytes from one to the next; stride[0] is 2 */
  int box[3];
};

/* The map of *t in the 128-byte swizzle; what the driver refuses is kept in d. */
CUtensorMap sm90_tensor_map(struct cuda_device *d, const struct sm90_tensor *t);

#endif
