#include "kernels/cuda/libraries.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/nccl.h"

#define WORD_(x) #x
#define WORD(x) WORD_(x)
#define CUBLASLT "libcublasLt.so." WORD(CUBLAS_VER_MAJOR)
#define NCCL "libnccl.so.2"

static void *find(const char *name) {
  const char *const folders[] = {NULL, getenv("CUDA_HOME"), FP4D_CUDA_HOME};
  for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
    char path[4096];
    if (i > 0 && !folders[i]) continue;
    if (snprintf(path, sizeof path, "%s%s%s", i > 0 ? folders[i] : "", i > 0 ? "/lib64/" : "", name) >= (int)sizeof path) continue;
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (library) return library;
  }
  return NULL;
}

static void not_found(const char *name, const char *package, struct error *e) {
  const char *why = dlerror();
  error_set(e, ERROR_DEVICE, "%s was not found: %s", name, why ? why : "no reason given");
  error_hint(e, "install %s, or set CUDA_HOME or LD_LIBRARY_PATH to where it is", package);
}

/* A library's functions by name into a table of pointers. */
struct entry {
  const char *name;
  size_t at;
};

static bool take(void *table, const struct entry *entries, size_t n, void *library, const char *name, struct error *e) {
  for (size_t i = 0; i < n; i++) {
    void *function = dlsym(library, entries[i].name);
    if (!function) return error_set(e, ERROR_DEVICE, "%s has no %s", name, entries[i].name);
    memcpy((char *)table + entries[i].at, &function, sizeof function);
  }
  return true;
}

_Static_assert(offsetof(struct nccl_config, split_share) == 40 && sizeof(struct nccl_config) == 48 && NCCL_CONFIG_VERSION < 22500,
               "what a library of 2.25 or newer reads behind split_share is padding, and it must know that");

#if __has_include(<nccl.h>)
#include <nccl.h>
_Static_assert((int)ncclSuccess == NCCL_SUCCESS && (int)ncclInProgress == NCCL_IN_PROGRESS && (int)ncclInvalidUsage == NCCL_INVALID_USAGE &&
                   (int)ncclUint8 == NCCL_UINT8 && (int)ncclFloat32 == NCCL_FLOAT32 && (int)ncclBfloat16 == NCCL_BFLOAT16 &&
                   (int)ncclSum == NCCL_SUM && NCCL_UNIQUE_ID_BYTES == NCCL_ID_BYTES,
               "NCCL's numbers");
#define SAME_PLACE(ours, theirs) (offsetof(struct nccl_config, ours) == offsetof(ncclConfig_t, theirs))
_Static_assert(SAME_PLACE(magic, magic) && SAME_PLACE(version, version) && SAME_PLACE(blocking, blocking) &&
                   SAME_PLACE(max_ctas, maxCTAs) && SAME_PLACE(net_name, netName) && SAME_PLACE(split_share, splitShare),
               "NCCL's configuration");
#endif

const struct cuda_nccl *cuda_nccl_open(struct error *e) {
  static struct cuda_nccl table;
  static bool loaded;
  int version = 0;
  if (loaded) return &table;
  void *library = find(NCCL);
  if (!library) {
    not_found(NCCL, "NCCL 2", e);
    return NULL;
  }
#define ENTRY(name) {"nccl" #name, offsetof(struct cuda_nccl, name)}
  static const struct entry entries[] = {
      ENTRY(GetVersion), ENTRY(GetUniqueId), ENTRY(GetErrorString), ENTRY(GetLastError), ENTRY(CommInitRankConfig), ENTRY(CommGetAsyncError),
      ENTRY(CommFinalize), ENTRY(CommDestroy), ENTRY(CommAbort), ENTRY(GroupStart), ENTRY(GroupEnd), ENTRY(Send), ENTRY(Recv),
      ENTRY(Broadcast), ENTRY(AllGather), ENTRY(ReduceScatter),
  };
#undef ENTRY
  _Static_assert(sizeof entries / sizeof entries[0] == sizeof table / sizeof(void *), "an entry for every function");
  const bool good = take(&table, entries, sizeof entries / sizeof entries[0], library, NCCL, e);
  if (good && table.GetVersion(&version) != NCCL_SUCCESS) {
    error_set(e, ERROR_DEVICE, "%s does not tell its version", NCCL);
    return NULL;
  }
  if (!good || version < NCCL_OLDEST) {
    char text[64];
    cuda_version_text((size_t)version, text, sizeof text);
    if (good) error_set(e, ERROR_DEVICE, "%s is %s", NCCL, text);
    error_hint(e, "install NCCL %d.%d or newer, or set LD_LIBRARY_PATH to where it is", NCCL_OLDEST / 10000, NCCL_OLDEST / 100 % 100);
    return NULL;
  }
  loaded = true;
  return &table;
}

const struct cuda_cublaslt *cuda_cublaslt_open(struct error *e) {
  static struct cuda_cublaslt table;
  static bool loaded;
  if (loaded) return &table;
  void *library = find(CUBLASLT);
  if (!library) {
    not_found(CUBLASLT, "cuBLAS of CUDA " WORD(CUBLAS_VER_MAJOR), e);
    return NULL;
  }
#define ENTRY(name) {"cublasLt" #name, offsetof(struct cuda_cublaslt, name)}
  static const struct entry entries[] = {
      ENTRY(Create), ENTRY(Destroy), ENTRY(GetVersion), ENTRY(GetStatusName), ENTRY(Matmul), ENTRY(MatmulDescCreate),
      ENTRY(MatmulDescDestroy), ENTRY(MatmulDescSetAttribute), ENTRY(MatrixLayoutCreate), ENTRY(MatrixLayoutDestroy),
      ENTRY(MatmulPreferenceCreate), ENTRY(MatmulPreferenceDestroy), ENTRY(MatmulPreferenceSetAttribute),
      ENTRY(MatmulAlgoGetHeuristic), ENTRY(MatmulAlgoConfigGetAttribute),
  };
#undef ENTRY
  _Static_assert(sizeof entries / sizeof entries[0] == sizeof table / sizeof(void *), "an entry for every function");
  if (!take(&table, entries, sizeof entries / sizeof entries[0], library, CUBLASLT, e)) {
    error_hint(e, "install the cuBLAS of the CUDA toolkit that this program was built with (%d.%d)", CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR);
    return NULL;
  }
  loaded = true;
  return &table;
}
