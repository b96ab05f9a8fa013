#include "kernels/cuda/libraries.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

bool cuda_nccl_version(int *version, struct error *e) {
  void *library = find(NCCL);
  if (!library) {
    not_found(NCCL, "NCCL 2", e);
    return false;
  }
  union {
    void *address;
    int (*call)(int *version); /* ncclResult_t, whose 0 is success */
  } get = {dlsym(library, "ncclGetVersion")};
  return (get.address && get.call(version) == 0) || error_set(e, ERROR_DEVICE, "%s does not tell its version", NCCL);
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
  static const struct {
    const char *name;
    size_t at;
  } entries[] = {
      ENTRY(Create), ENTRY(Destroy), ENTRY(GetVersion), ENTRY(GetStatusName), ENTRY(Matmul), ENTRY(MatmulDescCreate),
      ENTRY(MatmulDescDestroy), ENTRY(MatmulDescSetAttribute), ENTRY(MatrixLayoutCreate), ENTRY(MatrixLayoutDestroy),
      ENTRY(MatmulPreferenceCreate), ENTRY(MatmulPreferenceDestroy), ENTRY(MatmulPreferenceSetAttribute),
      ENTRY(MatmulAlgoGetHeuristic), ENTRY(MatmulAlgoConfigGetAttribute),
  };
#undef ENTRY
  _Static_assert(sizeof entries / sizeof entries[0] == sizeof table / sizeof(void *), "an entry for every function");
  for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
    void *function = dlsym(library, entries[i].name);
    if (!function) {
      error_set(e, ERROR_DEVICE, "%s has no %s", CUBLASLT, entries[i].name);
      error_hint(e, "install the cuBLAS of the CUDA toolkit that this program was built with (%d.%d)", CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR);
      return NULL;
    }
    memcpy((char *)&table + entries[i].at, &function, sizeof function);
  }
  loaded = true;
  return &table;
}
