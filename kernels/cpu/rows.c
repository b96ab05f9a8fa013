/* Rows of a matrix in FP32, and back. */
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/formats.h"

CPU_CLONES static void load_bf16(float *restrict values, const uint16_t *restrict bits, int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] = bf16_decode(bits[i]);
}

CPU_CLONES static void store_bf16(uint16_t *restrict bits, const float *restrict values, int64_t n) {
  for (int64_t i = 0; i < n; i++) bits[i] = bf16_encode(values[i]);
}

CPU_CLONES static void round_bf16(float *values, int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] = bf16_decode(bf16_encode(values[i]));
}

void cpu_load(float *values, const struct matrix *m, int64_t first, int64_t n) {
  if (n <= 0) return;
  if (m->dtype == DTYPE_BF16)
    load_bf16(values, (const uint16_t *)m->data + first, n);
  else
    memcpy(values, (const float *)m->data + first, (size_t)n * sizeof *values);
}

void cpu_store(struct matrix *m, int64_t first, const float *values, int64_t n) {
  if (n <= 0) return;
  if (m->dtype == DTYPE_BF16)
    store_bf16((uint16_t *)m->data + first, values, n);
  else
    memcpy((float *)m->data + first, values, (size_t)n * sizeof *values);
}

void cpu_round(float *values, enum dtype type, int64_t n) {
  if (type == DTYPE_BF16) round_bf16(values, n);
}
