/* What kernels/sm90/model.cpp (memory) and model_wgmma.cpp (products) ask of each other. */
#ifndef FP4D_KERNELS_SM90_MODEL_INTERNAL_H
#define FP4D_KERNELS_SM90_MODEL_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

/* Address bits 4-6 are exchanged by exclusive or with bits 7-9. */
static inline uint32_t sm90_model_swizzle(uint32_t address) { return address ^ (address >> 3 & 0x70); }

/* Shared memory as TMA and wgmma see it; fails outside. */
char *sm90_model_published(uint32_t address, size_t bytes);

bool sm90_model_products_step();
void sm90_model_products_reset();
void sm90_model_products_ended();

#endif
