/* The definition of a contraction's outputs, and what the files that compute them share.
 *
 *   for each segment of the columns, ascending:
 *     acc = +0
 *     for each group of 32 consecutive k of the segment, the first at its beginning
 *     (the last one padded with zeros):
 *       even = +0;  for k even in the group, ascending: even = fma(a_k, b_k, even)
 *       odd  = +0;  for k odd  in the group, ascending: odd  = fma(a_k, b_k, odd)
 *       acc  = acc + (even + odd)
 *     t = acc * ((outer_a * outer_b) * constant)
 *     r = t               in the first segment, after it
 *     r = r + t
 *   r = r + add           where there is an addend
 *   out = round(r)        a NaN becomes the quiet NaN 7fc00000 (BF16 7fc0)
 *
 * in FP32 throughout.  a_k, b_k are the operands' elements, decoded exactly:
 *
 *   format               element                   outer      divisor
 *   F32, BF16            the number                1          1
 *   E4M3, E5M2           the code                  its own    1
 *   MXFP4                code * 2^(byte - 127)     1          6 (1 by SCALE_MX_FLOOR)
 *   NVFP4                code * E4M3 scale         its own    2688 (1536 by SCALE_TENSOR_4OVER6)
 *   NVFP4_LOCAL          code * E4M3 scale         its own    1
 *
 *   constant = (float)(1.0 / (divisor_a * divisor_b))   the quotient in FP64
 *
 * A NaN scale makes its whole block NaN; formats.h says where MXFP4 is infinite.
 * An outer factor belongs to a row of its operand and a segment: a run of
 * columns over which neither operand's outer changes (one, of all columns,
 * where no operand has segments).  Its columns begin at a multiple of 16, and
 * of 32 unless an NVFP4 operand has segments.  An outer of 0 makes t a zero,
 * whatever the codes say, unless acc is not finite.  With one segment this is
 * Transformer Engine's order: amax_a * amax_b * (1 / (6 * 6 * 448 * 448)), once,
 * after full accumulation, then D += C.
 *
 * The order does not depend on tiles, threads or instruction set.  It is the
 * order in which Intel AMX accumulates BF16 pairs (Intel's description of
 * TDPBF16PS, and verified by test on the machine), so machines that have it
 * use it, with the same bits: only where no product or sum can be subnormal,
 * which AMX would flush and the definition keeps (gemm_amx.c).
 */
#ifndef FP4D_KERNELS_CPU_GEMM_H
#define FP4D_KERNELS_CPU_GEMM_H

#include "kernels/kernels.h"

enum { CONTRACT_GROUP = 32 };

/* Outputs are computed in tiles of GEMM_TILE_ROWS x GEMM_TILE_COLS, one task
 * each; operands are packed in strips of as many rows.  A strip is a row of
 * panels, a panel is what a micro-kernel reads: `mr` (or `nr`) rows of the
 * operand, all of the block's groups, in the kernel's own layout. */
enum { GEMM_TILE_ROWS = 96, GEMM_TILE_COLS = 64 };

/* A micro-kernel: mr x nr sums, rows GEMM_TILE_COLS apart at acc, accumulate
 * `groups` groups.  mr divides GEMM_TILE_ROWS and nr GEMM_TILE_COLS. */
struct gemm_kernel {
  const char *name; /* "avx512-fma", as cpu_isa_name gives it */
  int mr, nr;
  int chunk;         /* groups to do per visit of a panel, so that it stays in the nearest cache */
  int element_bytes; /* of a packed element */
  bool (*usable)(void);
  /* Packs rows [row, row + rows) and columns [k, k + cols) of an operand into
   * panels of mr (first operand) or nr (second) rows; pads rows with zeros to
   * whole panels and columns to whole groups.  Returns the smallest exponent
   * field of a nonzero element where the kernel needs it, else 255. */
  int (*pack_first)(void *panels, const struct operand *o, int64_t row, int64_t rows, int64_t k, int64_t cols);
  int (*pack_second)(void *panels, const struct operand *o, int64_t row, int64_t rows, int64_t k, int64_t cols);
  void (*begin)(void), (*end)(void); /* around the runs of a task; NULL: nothing to do */
  void (*run)(float *acc, const void *a, const void *b, int64_t groups);
  /* NULL: run always gives the definition's bits.  Else whether it does for panels
   * with these smallest exponent fields, and, for those where it does not: groups
   * [group, group + groups) of a strip of `rows` rows, whose panels are
   * `panel_groups` long, again as FP32 panels of `width` rows. */
  bool (*exact)(int first_exponent, int second_exponent);
  void (*unpack_first)(float *panels, int width, const void *packed, int64_t rows, int64_t panel_groups, int64_t group,
                       int64_t groups);
  void (*unpack_second)(float *panels, int width, const void *packed, int64_t rows, int64_t panel_groups,
                        int64_t group, int64_t groups);
};

/* The constant of a pair. */
float gemm_constant(const struct encoding *a, const struct encoding *b);

/* ---- the end of a tile's sums (gemm_epilogue.c) ----------------------------
 * Sums and totals are whole tiles, rows GEMM_TILE_COLS apart. */

/* A tile's outputs, and a column of the segment that has ended. */
struct gemm_place {
  int64_t row, col, rows, cols, k;
};

/* A segment's sums become t of the definition in `totals` (first: assigned; else added). */
void gemm_end_segment(float *totals, const float *sums, const struct operand *a, const struct operand *b,
                      const struct gemm_place *p, bool first);

/* The last segment's (totals NULL: the only one's) become outputs. */
void gemm_write(struct matrix *out, const struct matrix *add, const float *totals, const float *sums,
                const struct operand *a, const struct operand *b, const struct gemm_place *p);

/* ---- kernels ---------------------------------------------------------------- */

/* True where an operand's encoding has outer factors. */
bool gemm_has_outer(const struct encoding *e);

/* Kernels for operands of any format, packed as FP32, best first (gemm_fma.c).
 * NULL past the last. */
const struct gemm_kernel *gemm_fma_kernel(int index);

/* Packs into FP32 panels of `width` rows, element (r, k) of a panel at
 * [k * width + r] (gemm_pack.c). */
void gemm_pack_f32(float *panels, int width, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                   int64_t cols);

/* The kernel for pairs whose elements are exact in BF16 (gemm_amx.c); NULL where
 * there is none for this architecture. */
const struct gemm_kernel *gemm_amx_kernel(void);

#endif
