/* Intel AMX is not used yet: there is no kernel for BF16 pairs. */
#include "kernels/cpu/gemm.h"

const struct gemm_kernel *gemm_amx_kernel(void) { return NULL; }
bool gemm_amx_exact(int first_exponent, int second_exponent) { return first_exponent + second_exponent >= 142; }
void gemm_amx_unpack_first(float *panels, int width, const void *packed, int64_t rows, int64_t panel_groups,
                           int64_t group, int64_t groups) {
  (void)panels, (void)width, (void)packed, (void)rows, (void)panel_groups, (void)group, (void)groups;
}
void gemm_amx_unpack_second(float *panels, int width, const void *packed, int64_t rows, int64_t panel_groups,
                            int64_t group, int64_t groups) {
  (void)panels, (void)width, (void)packed, (void)rows, (void)panel_groups, (void)group, (void)groups;
}
