#include "kernels/cuda/fabric.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

/* NVML's structure of version 2: 36 bytes, its size and version in the first four. */
struct fabric_info {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};
_Static_assert(sizeof(struct fabric_info) == 36, "what NVML is told");
enum { FABRIC_INFO_2 = 2 << 24 | 36, NVML_SUCCESS = 0 };

struct nvml {
  int (*init)(void);
  int (*by_uuid)(const char *uuid, void **device);
  int (*fabric)(void *device, struct fabric_info *info);
};

static bool find(void *library, const char *name, void *function) {
  void *found = dlsym(library, name);
  if (found) memcpy(function, &found, sizeof found);
  return found != NULL;
}

/* NULL: there is none, or it is of a driver that knows no fabric's health (before 545). */
static const struct nvml *nvml_open(void) {
  static struct nvml table;
  static bool tried, good;
  if (tried) return good ? &table : NULL;
  tried = true;
  void *library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  good = library && find(library, "nvmlInit_v2", &table.init) && find(library, "nvmlDeviceGetHandleByUUID", &table.by_uuid) &&
         find(library, "nvmlDeviceGetGpuFabricInfoV", &table.fabric) && table.init() == NVML_SUCCESS;
  return good ? &table : NULL;
}

void cuda_fabric(const char *uuid, struct gpu_fabric *out) {
  const struct nvml *nvml = nvml_open();
  struct fabric_info info = {.version = FABRIC_INFO_2};
  void *device;
  memset(out, 0, sizeof *out);
  if (!nvml || nvml->by_uuid(uuid, &device) != NVML_SUCCESS || nvml->fabric(device, &info) != NVML_SUCCESS) return;
  out->state = info.state;
  memcpy(out->cluster, info.cluster, sizeof out->cluster);
  out->clique = info.clique;
  out->status = (uint32_t)info.status;
  out->health = info.health;
}
