/* The host model of CUDA: a block's threads as fibers.
 *
 * Kernels are compiled as C++ for the host.  The blocks of a launch run one
 * after another in an order drawn at random; the threads of a block are fibers
 * that run until they wait (at a barrier, in a warp's exchange, for an mbarrier)
 * and are taken up again in an order drawn at random, so that a missing
 * synchronisation shows as a wrong result.  Shared memory begins as rubbish.
 *
 * Errors end the process with one line that names kernel, block and thread:
 * threads that wait for each other (who, where in the source), exchanges that
 * lanes enter at different places, reads of lanes that take no part, dynamic
 * shared memory that is overrun, launches that a GPU would refuse.
 *
 * The order is drawn from FP4D_MODEL_SEED (a number; 1 where unset).
 *
 * What it is not: a memory model (a store is seen at once), a clock, or a judge
 * of registers.  Blocks of one launch cannot wait for each other.
 */
#ifndef FP4D_KERNELS_CUDA_MODEL_FIBERS_H
#define FP4D_KERNELS_CUDA_MODEL_FIBERS_H

#include "kernels/cuda/model/types.h"

enum { CUDA_MODEL_BLOCK_MAX = 1024, CUDA_MODEL_SHARED_MAX = 232448, CUDA_MODEL_BARRIERS = 16 };

/* Runs body(context) for every thread of the launch. */
void cuda_model_launch(const char *kernel, dim3 grid, dim3 block, size_t dynamic_shared, void (*body)(void *), void *context);

/* The end: "KERNEL, block (x, y, z), thread (x, y, z): message", exit status 70. */
[[noreturn]] void cuda_model_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* This thread waits until ready(subject); `what` is what it waits for. */
void cuda_model_wait(bool (*ready)(const void *), const void *subject, const char *what, const char *file, int line);
template <class Ready>
static inline void cuda_model_wait_for(const Ready &ready, const char *what, const char *file, int line) {
  cuda_model_wait([](const void *r) { return (*static_cast<const Ready *>(r))(); }, &ready, what, file, line);
}

/* Lets other threads run before this one goes on. */
void cuda_model_yield();

/* What happens beside the threads (copies, tensor cores): called at random
 * between two threads and when all of them wait; returns whether anything
 * happened.  `reset` is called before each block, `ended` after it. */
struct cuda_model_agent {
  bool (*step)();
  void (*reset)();
  void (*ended)();
};
void cuda_model_agent_add(const cuda_model_agent *agent);

/* Number of this thread in its block, and the threads in it. */
int cuda_model_thread();
int cuda_model_threads();
/* A random number of the schedule's. */
uint32_t cuda_model_random();
void cuda_model_seed(uint64_t seed);

/* ---- shared memory: static variables first, then the dynamic part (at a multiple of 1024) ---- */
char *cuda_model_dynamic_shared();
size_t cuda_model_dynamic_shared_bytes();
uint32_t cuda_model_shared_address(const void *p);               /* fails where p is not shared */
void *cuda_model_shared_pointer(uint32_t address, size_t bytes); /* fails where it leaves shared memory */

/* ---- barriers ----------------------------------------------------------- */
/* Named barrier `id` (0..15) of `threads` threads, bar.sync and bar.arrive. */
void cuda_model_barrier(int id, int threads, bool wait, const char *file, int line);

/* ---- a warp's exchanges --------------------------------------------------- */
enum cuda_model_exchange { CUDA_MODEL_SYNC, CUDA_MODEL_SHUFFLE, CUDA_MODEL_BALLOT };
/* Waits for the lanes of `mask`; the value of lane `source` (shuffle), or the
 * mask of lanes whose value is not 0 (ballot). */
uint64_t cuda_model_warp(enum cuda_model_exchange kind, unsigned mask, uint64_t value, int source, const char *file, int line);

#endif
