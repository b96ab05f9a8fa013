/* A double of cuBLASLt for the host model: the functions that kernels/cuda/gemm.cu
 * calls, as NVIDIA's header and manual describe them, by plain loops over
 * column-major matrices.  It is strict: dimensions, leading dimensions, types and
 * alignments that the library would refuse or misread are errors.  It stands in the
 * place of kernels/cuda/libraries.h. */
#ifndef FP4D_TESTS_CUBLASLT_DOUBLE_H
#define FP4D_TESTS_CUBLASLT_DOUBLE_H
#define FP4D_KERNELS_CUDA_LIBRARIES_H

#include "kernels/cuda/cuda.h"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
enum cublasLtMatmulDescAttributes_t { CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4 };
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};
enum cublasLtMatmulTile_t { CUBLASLT_MATMUL_TILE_UNDEFINED = 0, CUBLASLT_MATMUL_TILE_128x128 = 20, CUBLASLT_MATMUL_TILE_256x128 = 24 };
enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_INPLACE = 1, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };
enum cublasLtMatmulAlgoConfigAttributes_t {
  CUBLASLT_ALGO_CONFIG_ID,
  CUBLASLT_ALGO_CONFIG_TILE_ID,
  CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
  CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
  CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
  CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
  CUBLASLT_ALGO_CONFIG_STAGES_ID,
  CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID,
  CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID
};

typedef struct double_handle {
  int open;
} *cublasLtHandle_t;
typedef struct double_operation {
  cublasOperation_t trans[2];
} *cublasLtMatmulDesc_t;
typedef struct double_layout {
  cudaDataType type;
  uint64_t rows, cols;
  int64_t ld;
} *cublasLtMatrixLayout_t;
typedef struct double_preference {
  uint64_t workspace;
  uint32_t scheme, align[4]; /* A, B, C, D */
} *cublasLtMatmulPreference_t;
/* An algorithm remembers what it was chosen for. */
struct cublasLtMatmulAlgo_t {
  double_operation operation;
  double_layout layout[3];
  uint32_t align[4];
  uint32_t tile;
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
};

struct double_counts {
  int descriptors, heuristics, products; /* descriptors: made and not destroyed */
};
static double_counts double_seen;
static bool double_finds_nothing;

static float double_read(const void *p, cudaDataType t, uint64_t i) {
  return t == CUDA_R_16BF ? bf16_decode(static_cast<const uint16_t *>(p)[i]) : static_cast<const float *>(p)[i];
}

struct cuda_cublaslt {
  static cublasStatus_t Create(cublasLtHandle_t *h) {
    *h = new double_handle{1};
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t Destroy(cublasLtHandle_t h) {
    delete h;
    return CUBLAS_STATUS_SUCCESS;
  }
  static size_t GetVersion() { return 130102; }
  static const char *GetStatusName(cublasStatus_t s) {
    return s == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS"
           : s == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
                                              : "CUBLAS_STATUS_INVALID_VALUE";
  }
  static cublasStatus_t MatmulDescCreate(cublasLtMatmulDesc_t *o, cublasComputeType_t, cudaDataType scale) {
    if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *o = new double_operation{{CUBLAS_OP_N, CUBLAS_OP_N}};
    double_seen.descriptors++;
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t MatmulDescDestroy(cublasLtMatmulDesc_t o) {
    delete o;
    double_seen.descriptors--;
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t MatmulDescSetAttribute(cublasLtMatmulDesc_t o, cublasLtMatmulDescAttributes_t which, const void *value, size_t bytes) {
    if (bytes != 4) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&o->trans[which - CUBLASLT_MATMUL_DESC_TRANSA], value, 4);
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t MatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    if (!rows || !cols || ld < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
    *l = new double_layout{type, rows, cols, ld};
    double_seen.descriptors++;
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t MatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    delete l;
    double_seen.descriptors--;
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t MatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    *p = new double_preference{0, 7, {256, 256, 256, 256}};
    double_seen.descriptors++;
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t MatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    delete p;
    double_seen.descriptors--;
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t MatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t which,
                                                     const void *value, size_t bytes) {
    const bool workspace = which == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    if (bytes != (workspace ? 8 : 4)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(workspace ? static_cast<void *>(&p->workspace)
           : which == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK ? &p->scheme
                                                                 : &p->align[which - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES],
           value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  }
  /* The first candidate does not fit the machine, as may be. */
  static cublasStatus_t MatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t o, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                               cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t p, int wanted,
                                               cublasLtMatmulHeuristicResult_t *found, int *count) {
    double_seen.heuristics++;
    *count = 0;
    if (p->scheme & CUBLASLT_REDUCTION_SCHEME_INPLACE) return CUBLAS_STATUS_INVALID_VALUE;
    const bool types = a->type == b->type && c->type == d->type && (d->type == CUDA_R_32F || a->type == CUDA_R_16BF);
    if (!types || double_finds_nothing || wanted < 2) return double_finds_nothing ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
    found[0].state = CUBLAS_STATUS_NOT_SUPPORTED;
    found[1] = {{*o, {*a, *b, *d}, {p->align[0], p->align[1], p->align[2], p->align[3]}, CUBLASLT_MATMUL_TILE_128x128}, p->workspace, CUBLAS_STATUS_SUCCESS};
    *count = 2;
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t MatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoConfigAttributes_t which, void *value, size_t bytes,
                                                     size_t *written) {
    if (bytes != (which >= CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID ? 2 : 4)) return CUBLAS_STATUS_INVALID_VALUE;
    const uint32_t v = which == CUBLASLT_ALGO_CONFIG_TILE_ID ? a->tile : 100 + which;
    memcpy(value, &v, bytes);
    *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
  }
  static cublasStatus_t Matmul(cublasLtHandle_t h, cublasLtMatmulDesc_t o, const float *alpha, const void *A, cublasLtMatrixLayout_t a,
                               const void *B, cublasLtMatrixLayout_t b, const float *beta, const void *C, cublasLtMatrixLayout_t c, void *D,
                               cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes, cudaStream_t) {
    double_seen.products++;
    const uint64_t m = o->trans[0] == CUBLAS_OP_N ? a->rows : a->cols, ka = o->trans[0] == CUBLAS_OP_N ? a->cols : a->rows;
    const uint64_t n = o->trans[1] == CUBLAS_OP_N ? b->cols : b->rows, kb = o->trans[1] == CUBLAS_OP_N ? b->rows : b->cols;
    const double_layout layouts[3] = {*a, *b, *d};
    const void *pointers[4] = {A, B, C, D};
    bool good = h->open && ka == kb && d->rows == m && d->cols == n && c->rows == m && c->cols == n && workspace && bytes >= 32 << 20;
    good = good && memcmp(&algo->operation, o, sizeof *o) == 0;
    for (int i = 0; i < 3; i++)
      good = good && algo->layout[i].type == layouts[i].type && algo->layout[i].rows == layouts[i].rows &&
             algo->layout[i].cols == layouts[i].cols && algo->layout[i].ld == layouts[i].ld;
    for (int i = 0; i < 4; i++) good = good && reinterpret_cast<uintptr_t>(pointers[i]) % algo->align[i] == 0;
    if (!good) return CUBLAS_STATUS_INVALID_VALUE;
    cuda_model_enter();
    memset(workspace, 0xC3, 4096);
    for (uint64_t j = 0; j < n; j++)
      for (uint64_t i = 0; i < m; i++) {
        float sum = 0;
        for (uint64_t k = 0; k < ka; k++) {
          const uint64_t at_a = o->trans[0] == CUBLAS_OP_N ? k * (uint64_t)a->ld + i : i * (uint64_t)a->ld + k;
          const uint64_t at_b = o->trans[1] == CUBLAS_OP_N ? j * (uint64_t)b->ld + k : k * (uint64_t)b->ld + j;
          sum += double_read(A, a->type, at_a) * double_read(B, b->type, at_b);
        }
        const uint64_t at = j * (uint64_t)d->ld + i;
        const float v = *alpha * sum + (*beta != 0 ? *beta * double_read(C, c->type, j * (uint64_t)c->ld + i) : 0);
        if (d->type == CUDA_R_16BF) static_cast<uint16_t *>(D)[at] = bf16_encode(v);
        else static_cast<float *>(D)[at] = v;
      }
    cuda_model_leave();
    return CUBLAS_STATUS_SUCCESS;
  }
};

static inline const struct cuda_cublaslt *cuda_cublaslt_open(struct error *) {
  static const struct cuda_cublaslt one = {};
  return &one;
}

#endif
