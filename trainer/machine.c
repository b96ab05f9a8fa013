#include "trainer/machine.h"

#include <stddef.h>
#include <string.h>

/* Dense figures (no sparsity).  H100/H200 SXM 989 TFLOP/s BF16; A100 312; B200
 * 2,250; GB200 and GB300 2,500.  GB300 is of compute capability 10.3.  Memory as in data
 * sheets, but an H200's: its driver offers 150.1 GB of what the sheet calls 141. */
static const struct machine machines[] = {
    {"a100", "NVIDIA A100 80GB SXM", 312e12, 312e12, 0, 80e9, 2.0e12, 8, 300e9, 25e9, NULL},
    {"h100", "NVIDIA H100 SXM", 989e12, 1979e12, 0, 80e9, 3.35e12, 8, 450e9, 50e9, "sm90"},
    {"h200", "NVIDIA H200 SXM", 989e12, 1979e12, 0, 150.1e9, 4.8e12, 8, 450e9, 50e9, "sm90"},
    {"b200", "NVIDIA B200", 2250e12, 4500e12, 9000e12, 180e9, 8e12, 8, 900e9, 50e9, "sm100"},
    {"gb200", "NVIDIA GB200 (one GPU of an NVL72)", 2500e12, 5000e12, 10000e12, 186e9, 8e12, 72, 900e9, 50e9, "sm100"},
    {"gb300", "NVIDIA GB300 (one GPU of an NVL72)", 2500e12, 5000e12, 15000e12, 279e9, 8e12, 72, 900e9, 100e9, NULL},
};

enum { MACHINES = sizeof machines / sizeof *machines };

const struct machine *machine_list(int *n) {
  *n = MACHINES;
  return machines;
}

const struct machine *machine_named(const char *name) {
  for (int i = 0; i < MACHINES; i++)
    if (strcmp(machines[i].name, name) == 0) return &machines[i];
  return NULL;
}

const struct machine *machine_of_product(const char *product) {
  /* Longer names first: "GB200" contains "B200". */
  static const char *const order[] = {"GB300", "GB200", "B200", "H200", "H100", "A100"};
  static const char *const name[] = {"gb300", "gb200", "b200", "h200", "h100", "a100"};
  /* Cards and slices whose peak is another, under names that look alike. */
  static const char *const other[] = {"PCIe", "NVL", "MIG", "GH200", "DGX", "GeForce", "RTX"};
  for (size_t i = 0; i < sizeof other / sizeof *other; i++)
    if (strcasestr(product, other[i])) return NULL;
  for (size_t i = 0; i < sizeof order / sizeof *order; i++)
    if (strstr(product, order[i])) return machine_named(name[i]);
  return NULL;
}

static double encoding_flops(const struct machine *m, const struct encoding *e) {
  switch (e->format) {
    case FORMAT_E4M3:
    case FORMAT_E5M2:
      return m->fp8_flops;
    case FORMAT_MXFP4:
      return m->fp4_flops > 0 ? m->fp4_flops : m->fp8_flops;
    case FORMAT_NVFP4:
    case FORMAT_NVFP4_LOCAL:
      return m->fp4_flops > 0 ? m->fp4_flops : m->bf16_flops;
    case FORMAT_F32:
    case FORMAT_BF16:
      break;
  }
  return m->bf16_flops;
}

double machine_contraction_flops(const struct machine *m, const struct encoding *a, const struct encoding *b) {
  double x = encoding_flops(m, a), y = encoding_flops(m, b);
  return x < y ? x : y;
}
