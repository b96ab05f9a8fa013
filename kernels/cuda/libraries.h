/* NVIDIA's libraries, found when a CUDA backend opens and not before: the program
 * starts where they are absent. */
#ifndef FP4D_KERNELS_CUDA_LIBRARIES_H
#define FP4D_KERNELS_CUDA_LIBRARIES_H

#include <cublasLt.h>

#include "base/error.h"

/* cuBLASLt's functions that kernels/cuda/gemm.cu calls, by their names without "cublasLt". */
struct cuda_cublaslt {
  __typeof__(&cublasLtCreate) Create;
  __typeof__(&cublasLtDestroy) Destroy;
  __typeof__(&cublasLtGetVersion) GetVersion;
  __typeof__(&cublasLtGetStatusName) GetStatusName;
  __typeof__(&cublasLtMatmul) Matmul;
  __typeof__(&cublasLtMatmulDescCreate) MatmulDescCreate;
  __typeof__(&cublasLtMatmulDescDestroy) MatmulDescDestroy;
  __typeof__(&cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  __typeof__(&cublasLtMatrixLayoutCreate) MatrixLayoutCreate;
  __typeof__(&cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy;
  __typeof__(&cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate;
  __typeof__(&cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy;
  __typeof__(&cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;
  __typeof__(&cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  __typeof__(&cublasLtMatmulAlgoConfigGetAttribute) MatmulAlgoConfigGetAttribute;
};

/* The library, of the major version that this program was built with; looked for where
 * the system's loader looks, then in $CUDA_HOME/lib64, then where it was at the build.
 * It stays open.  NULL with *e = ERROR_DEVICE. */
#ifdef __cplusplus
extern "C"
#endif
const struct cuda_cublaslt *cuda_cublaslt_open(struct error *e);

#endif
