/* What machines can do at best: dense peaks from their makers' data sheets. */
#ifndef FP4D_TRAINER_MACHINE_H
#define FP4D_TRAINER_MACHINE_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/encoding.h"

struct machine {
  const char *name;  /* "gb200", as `plan --machine` takes it */
  const char *title; /* "NVIDIA GB200 (one GPU of an NVL72)" */
  double bf16_flops, fp8_flops, fp4_flops; /* dense, of one GPU; fp4 0: no FP4 tensor cores */
  double memory_bytes, memory_bandwidth;   /* bytes, bytes/s */
  int domain;                              /* GPUs that share one NVLink domain */
  double link_bandwidth;                   /* bytes/s, one direction, inside the domain, a GPU */
  double network_bandwidth;                /* bytes/s, one direction, between domains, a GPU */
  const char *backend;                     /* that runs on it; NULL: none of ours */
};

/* NULL: no machine of that name. */
const struct machine *machine_named(const char *name);
const struct machine *machine_list(int *n);

/* The machine that a GPU's product name ("NVIDIA H200") means; NULL: unknown, or a
 * variant (PCIe, NVL, a MIG slice) with other peaks. */
const struct machine *machine_of_product(const char *product);
/* The same of the GPU that a device is; NULL for the cpu backend, too. */
struct device;
const struct machine *machine_of_device(const struct device *d);

/* "cpu": this machine with so many threads, its BF16 contraction and a copy in
 * memory measured now (a fraction of a second). The title lives until the next call. */
bool machine_here(int threads, struct machine *out, struct error *e);

/* Bytes of memory that this process may use: the machine's, or its control group's. */
int64_t machine_memory(void);

/* FLOP/s of a contraction whose operands have these encodings: the slower one's
 * rate. Where there are no FP4 tensor cores, MXFP4 runs as FP8 and the NVFP4
 * kinds as BF16 (their products are exact there). */
double machine_contraction_flops(const struct machine *m, const struct encoding *a, const struct encoding *b);

#endif
