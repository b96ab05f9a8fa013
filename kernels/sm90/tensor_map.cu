#include "kernels/sm90/tensor_map.h"

namespace {

void require_mappable(const struct sm90_tensor *t) {
  CUDA_REQUIRE(t->rank == 2 || t->rank == 3, "a tensor map has 2 or 3 dimensions");
  CUDA_REQUIRE(reinterpret_cast<uintptr_t>(t->data) % 16 == 0, "a mapped tensor begins at a multiple of 16 bytes");
  CUDA_REQUIRE(t->box[0] == 64 && t->stride[0] == 2, "a box's row is 64 BF16 elements");
  for (int i = 0; i < t->rank; i++) {
    CUDA_REQUIRE(t->extent[i] > 0 && t->extent[i] <= INT64_C(1) << 31, "a mapped extent is 1..2^31");
    CUDA_REQUIRE(t->box[i] > 0 && t->box[i] <= 256, "a box's extent is 1..256");
    CUDA_REQUIRE(i == 0 || (t->stride[i] % 16 == 0 && t->stride[i] < INT64_C(1) << 40), "a mapped stride is a multiple of 16 bytes");
  }
}

#ifndef FP4D_CUDA_MODEL
typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                 const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver is not linked: a machine without one still runs the CPU backend. */
encode_tiled find_encode_tiled() {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return code == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<encode_tiled>(function) : nullptr;
}
#endif

}  // namespace

CUtensorMap sm90_tensor_map(struct cuda_device *d, const struct sm90_tensor *t) {
  require_mappable(t);
  CUtensorMap map = {};
#ifdef FP4D_CUDA_MODEL
  (void)d;
  map.data = static_cast<char *>(const_cast<void *>(t->data));
  map.rank = t->rank;
  for (int i = 0; i < 3; i++) {
    map.extent[i] = i < t->rank ? t->extent[i] : 1;
    map.stride[i] = i < t->rank ? t->stride[i] : 0;
    map.box[i] = i < t->rank ? t->box[i] : 1;
  }
#else
  static const encode_tiled encode = find_encode_tiled();
  CUDA_REQUIRE(encode, "the driver has no cuTensorMapEncodeTiled: sm90 needs a driver for CUDA 12 or later");
  cuuint64_t extent[3], stride[2];
  cuuint32_t box[3];
  const cuuint32_t step[3] = {1, 1, 1};
  for (int i = 0; i < t->rank; i++) {
    extent[i] = static_cast<cuuint64_t>(t->extent[i]);
    box[i] = static_cast<cuuint32_t>(t->box[i]);
    if (i > 0) stride[i - 1] = static_cast<cuuint64_t>(t->stride[i]);
  }
  const CUresult code = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<cuuint32_t>(t->rank), const_cast<void *>(t->data),
                               extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) cuda_keep_fault(d, cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
#endif
  return map;
}
