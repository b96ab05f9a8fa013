/* The header of one safetensors file (safetensors_*.c only). */
#ifndef FP4D_CHECKPOINTS_SAFETENSORS_HEADER_H
#define FP4D_CHECKPOINTS_SAFETENSORS_HEADER_H

#include "checkpoints/safetensors.h"

/* Reads and checks the header of the open file `fd`, called `path` in errors; appends
 * its tensors to the *n of *tensors (malloc'ed, names too), each with `file`. */
bool safetensors_header_read(int fd, const char *path, int file, struct safetensors_tensor **tensors, int *n,
                             struct error *e);

#endif
