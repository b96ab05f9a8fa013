/* Emission from a strip in either type: what cpu_emit_strip and cpu_quantise share. */
#ifndef FP4D_KERNELS_CPU_EMIT_H
#define FP4D_KERNELS_CPU_EMIT_H

#include "kernels/cpu/cpu.h"

/* As cpu_emit_strip; `strip` holds the rows, FP32 or BF16, without a gap (scratch is
 * used for FP32 only).  It may be several strips: a multiple of CPU_STRIP rows. */
void cpu_emit_matrix_strip(const struct emission *out, int64_t source_rows, int64_t first_row,
                           const struct matrix *strip, struct quantise_counts *counts, void *scratch);

/* Aborts unless `o` can be emitted as `view` of a [source_rows, source_cols] result. */
void emit_check_operand(const struct emission *out, const struct operand *o, enum view view, int64_t source_rows,
                        int64_t source_cols);

#endif
