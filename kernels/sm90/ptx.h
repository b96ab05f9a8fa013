/* The Hopper (sm_90a) instructions that the attention kernels use, each as one
 * inline function with two meanings: inline PTX for nvcc, and with
 * FP4D_CUDA_MODEL the host model of kernels/sm90/model.h, which executes them on
 * the CPU and reports what the hardware would leave undefined.  No other file
 * of kernels/sm90 contains `asm`.
 *
 * Facts are those of the PTX ISA: "Asynchronous Warpgroup Level Matrix
 * Instructions", "mbarrier", "cp.async.bulk.tensor", "setmaxnreg", "bar".
 *
 * Shared memory
 *   sm90_shared(p)                the shared-space address of p
 *   sm90_fence_async_shared()     what this thread stored to shared memory becomes visible to TMA and
 *                                 wgmma; then a barrier, then the thread that issues them
 *
 * Barriers in shared memory (mbarrier; 8 bytes, 8-aligned)
 *   sm90_barrier_init(b, count)   a phase ends when `count` arrivals and all expected bytes are in;
 *                                 one thread, then sm90_barrier_init_fence(), then __syncthreads()
 *   sm90_barrier_arrive(b)        one arrival; releases what this thread did before
 *   sm90_barrier_expect(b, n)     n more bytes, and one arrival
 *   sm90_warp_barrier_init(b, n)  of n warps that arrive by sm90_warp_arrive(b): when all lanes are there, one does
 *                                 for them.  compute-sanitizer's racecheck takes an arrival for that lane's alone
 *                                 and does not see the __syncwarp() before it, of which ptxas leaves no instruction
 *                                 where a warp runs together: with FP4D_EVERY_LANE_ARRIVES each lane arrives.
 *   sm90_barrier_wait(b, parity)  until the phase of this parity has ended: the first is 0, then 1, 0, …
 *                                 On a new barrier parity 1 returns at once.
 *
 * TMA: tiles between global and shared memory by one thread, through a map (kernels/sm90/tensor_map.h).
 *   sm90_tma_load_2d(to, map, b, x, y)        elements outside the tensor are zero; counts the whole box's
 *   sm90_tma_load_3d(to, map, b, x, y, z)     bytes on b.  x counts elements of the contiguous dimension
 *   sm90_tma_store_2d(map, from, x, y), _3d   elements outside are not written; no coordinate is negative
 *   sm90_bulk_load(to, from, b, bytes)        contiguous bytes of global memory, without a map; all multiples of 16
 *   sm90_bulk_commit()                        closes this thread's group of stores
 *   sm90_bulk_wait_read<N>()                  all but its N newest groups have read their shared memory
 *   sm90_bulk_wait<N>()                       … and have written
 *
 * Matrix products (wgmma m64nNk16, BF16 -> FP32), by the 128 threads of a warpgroup together
 *   sm90_wgmma_fence()            before the first product, and after registers of one were written
 *   sm90_wgmma_ss<N, TA, TB>(d, a, b, accumulate)   d[64, N] = A B (+ d); A [64, 16] and B [16, N] by descriptor
 *   sm90_wgmma_rs<N, TB>(d, a, b, accumulate)       A in registers
 *   sm90_wgmma_commit()           closes a group of products
 *   sm90_wgmma_wait<N>()          all but the N newest groups are done; only then may their registers be
 *                                 read or written
 *   sm90_wgmma_registers(d)       no instruction: keeps the compiler from moving uses of d across this point.
 *                                 Stands after the last write before a fence, and after a wait.
 *
 *   Fragments.  Lane l of warp w, g = l / 4, q = l % 4:
 *     d[4 j + 2 i + e]   row 16 w + 8 i + g, column 8 j + 2 q + e     (i, e in 0..1)
 *     a[2 h + i]         row 16 w + 8 i + g, columns 8 h + 2 q (low half) and 8 h + 2 q + 1 of the 16
 *   So d[8 k + 4 h + 2 i + e] of one product is, rounded and paired, a[2 h + i] of the k-th 16 columns of the next.
 *
 *   Descriptors of tiles in the 128-byte swizzle, as TMA writes them: rows of 64 elements (128 bytes), in which
 *   the 16-byte chunk c of row r stands at chunk c ^ (r % 8); a tile begins at a multiple of 1024.
 *     sm90_descriptor(tile, leading_bytes, stride_bytes)
 *   K-major (T false): a tile's row is a row of A (a column of B), its 64 elements run along K.
 *     stride_bytes: from 8 rows to the next 8 (1024 where rows are dense); leading_bytes is not used.
 *     The next 16 of K: tile + 32 bytes.
 *   MN-major (T true): a tile's row is one k, its 64 elements run along M or N.
 *     leading_bytes: from 64 of M or N to the next 64;  stride_bytes: from 8 k to the next 8.
 *     The next 16 of K: tile + 2048 bytes where rows are dense.
 *
 * Others
 *   sm90_registers_more<R>(), sm90_registers_fewer<R>()   registers a thread from here on; a whole warpgroup
 *   sm90_named_barrier_sync(id, n), _arrive(id, n)        hardware barrier 1..15 of n threads, whole warps
 *   sm90_transpose_8x8(x)         of 8 x 8 16-bit elements in a warp, lane l with columns 2 (l % 4) (low half) and
 *                                 2 (l % 4) + 1 of row l / 4, the same of the transposed matrix; all 32 lanes
 *   sm90_bf16_pair(low, high)     both rounded to nearest even, in the halves of a register
 *   sm90_exp2(x)                  2^x, relative error within 2^-22; subnormal arguments and results are zero
 */
#ifndef FP4D_KERNELS_SM90_PTX_H
#define FP4D_KERNELS_SM90_PTX_H

#include <stdint.h>

#ifdef FP4D_CUDA_MODEL
#include "kernels/cuda/model/device.h"
#include "kernels/sm90/model.h"
#else
#include "kernels/sm90/ptx_device.h"
#endif

#ifdef FP4D_EVERY_LANE_ARRIVES
enum { SM90_WARP_ARRIVALS = 32 };
#else
enum { SM90_WARP_ARRIVALS = 1 };
#endif
SM90_DEVICE void sm90_warp_barrier_init(uint64_t *b, uint32_t warps) { sm90_barrier_init(b, warps * SM90_WARP_ARRIVALS); }
SM90_DEVICE void sm90_warp_arrive(uint64_t *b) {
  __syncwarp();
  if (threadIdx.x % 32 < SM90_WARP_ARRIVALS) sm90_barrier_arrive(b);
}

/* A matrix descriptor: start / 16 in bits 0-13, leading / 16 in 16-29, stride / 16
 * in 32-45, base offset 0 (tiles are 1024-aligned), swizzle 1 (128 bytes) in 62-63. */
SM90_DEVICE uint64_t sm90_descriptor(const void *tile, uint32_t leading_bytes, uint32_t stride_bytes) {
  return (uint64_t)((sm90_shared(tile) & 0x3FFFF) >> 4) | (uint64_t)(leading_bytes >> 4 & 0x3FFF) << 16 |
         (uint64_t)(stride_bytes >> 4 & 0x3FFF) << 32 | UINT64_C(1) << 62;
}

/* The same tile, `bytes` further on: the start alone changes, without a carry. */
SM90_DEVICE uint64_t sm90_descriptor_advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & ~UINT64_C(0xFFFFFFFF)) | ((uint32_t)descriptor + (bytes >> 4));
}

/* Where column c (of 64) of row r stands in a tile of the 128-byte swizzle, in BF16 elements. */
SM90_DEVICE uint32_t sm90_swizzled(uint32_t r, uint32_t c) { return r * 64 + ((c / 8 ^ r % 8) * 8 + c % 8); }

#endif
