/* The definition of a contraction's sum.
 *
 *   acc = +0
 *   for each group of 32 consecutive k (the last one padded with zeros):
 *     even = +0;  for k even in the group, ascending: even = fma(a_k, b_k, even)
 *     odd  = +0;  for k odd  in the group, ascending: odd  = fma(a_k, b_k, odd)
 *     acc  = acc + (even + odd)
 *   out = round( acc * factor + add )          factor: 1, 1/36 (MX x MX), outer products …
 *                                              (factor and add in two FP32 operations)
 *
 * a_k, b_k are exactly decoded operands in FP32.  The order does not depend on
 * tiles, threads or instruction set, and it is the order in which Intel AMX
 * accumulates BF16 pairs, so machines that have it may use it (where no product
 * or sum can be subnormal, which is checked) with the same bits.
 */
#ifndef FP4D_KERNELS_CPU_GEMM_H
#define FP4D_KERNELS_CPU_GEMM_H

enum { CONTRACT_GROUP = 32 };

#endif
