/* NCCL's functions that kernels/cuda/link.cu calls.
 *
 * Declared here, not taken from <nccl.h>: CUDA's toolkit does not have that header, and the
 * host model has a double of the library.  Names and numbers are NCCL's own without the
 * prefix; its ABI has kept them since 2.14 (libraries.c compares them with the header where
 * it is installed). */
#ifndef FP4D_KERNELS_CUDA_NCCL_H
#define FP4D_KERNELS_CUDA_NCCL_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "base/error.h"
#include "kernels/cuda/names.h"

enum { NCCL_SUCCESS = 0, NCCL_INVALID_USAGE = 5, NCCL_IN_PROGRESS = 7 };
enum { NCCL_UINT8 = 1, NCCL_FLOAT32 = 7, NCCL_BFLOAT16 = 9 };
enum { NCCL_SUM = 0 };
enum { NCCL_ID_BYTES = 128, NCCL_OLDEST = 21700 /* with all that is called here */ };

struct nccl_id {
  char internal[NCCL_ID_BYTES];
};

/* ncclConfig_t as versions 2.18 to 2.24 have it: 2.17's, which ends with netName, and splitShare.  A library copies
 * `size` bytes, or as many as it has itself, over its own defaults and wants the magic number there.  Attributes that it
 * knows to be younger than `version` are its defaults again: so `version`, below 2.25, keeps the padding behind
 * split_share from being taken for trafficClass, which stands there since.  (NCCL's src/init.cc, parseCommConfig.) */
struct nccl_config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share;
};
enum { NCCL_CONFIG_MAGIC = (int)0xcafebeef, NCCL_CONFIG_VERSION = 21700, NCCL_UNDEFINED = -2147483647 - 1 };

struct nccl_comm; /* ncclComm_t points to it */
struct CUstream_st;
#ifdef FP4D_CUDA_MODEL
typedef struct cuda_model_stream *nccl_stream;
#else
typedef struct CUstream_st *nccl_stream;
#endif

struct cuda_nccl {
  int (*GetVersion)(int *version);
  int (*GetUniqueId)(struct nccl_id *id);
  const char *(*GetErrorString)(int result);
  const char *(*GetLastError)(struct nccl_comm *c);
  int (*CommInitRankConfig)(struct nccl_comm **c, int world, struct nccl_id id, int rank, struct nccl_config *config);
  int (*CommGetAsyncError)(struct nccl_comm *c, int *result);
  int (*CommFinalize)(struct nccl_comm *c);
  int (*CommDestroy)(struct nccl_comm *c);
  int (*CommAbort)(struct nccl_comm *c);
  int (*GroupStart)(void);
  int (*GroupEnd)(void);
  int (*Send)(const void *from, size_t n, int type, int rank, struct nccl_comm *c, nccl_stream s);
  int (*Recv)(void *to, size_t n, int type, int rank, struct nccl_comm *c, nccl_stream s);
  int (*Broadcast)(const void *from, void *to, size_t n, int type, int root, struct nccl_comm *c, nccl_stream s);
  int (*AllGather)(const void *from, void *to, size_t n, int type, struct nccl_comm *c, nccl_stream s);
  int (*ReduceScatter)(const void *from, void *to, size_t n, int type, int operation, struct nccl_comm *c, nccl_stream s);
};

/* The library, looked for as cuBLASLt is (libraries.h).  NULL with *e = ERROR_DEVICE. */
const struct cuda_nccl *cuda_nccl_open(struct error *e);

/* "2.28.9".  False likewise. */
static inline bool cuda_nccl_version(char *text, int size, struct error *e) {
  const struct cuda_nccl *library = cuda_nccl_open(e);
  int version = 0;
  if (!library) return false;
  if (library->GetVersion(&version) != NCCL_SUCCESS) return error_set(e, ERROR_DEVICE, "NCCL does not tell its version");
  cuda_version_text((size_t)version, text, size);
  return true;
}

#ifdef __cplusplus
}
#endif

#endif
