/* The NVLink fabric that a GPU has joined: NVSwitches of its host, or of a rack of hosts.
 * Numbers are NVML's (nvmlDeviceGetGpuFabricInfoV). */
#ifndef FP4D_KERNELS_FABRIC_H
#define FP4D_KERNELS_FABRIC_H

#include <stdint.h>

enum fabric_state { FABRIC_NONE, FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS, FABRIC_COMPLETED };

struct gpu_fabric {
  uint8_t state;       /* enum fabric_state; FABRIC_NONE also where the driver does not tell */
  uint8_t cluster[16]; /* all zero: of this host alone */
  uint32_t clique;     /* GPUs of one cluster and clique reach each other over NVLink */
  uint32_t status;     /* how joining ended; 0: well */
  uint32_t health;     /* troubles, two bits each: 1 yes, 2 no, 0 not told */
};

#endif
