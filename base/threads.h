/* A pool of worker threads.
 *
 * A loop hands out task numbers; which thread runs which task is not defined,
 * so a task writes only what belongs to its number (the rule that makes
 * results identical for any number of threads).
 */
#ifndef FP4D_BASE_THREADS_H
#define FP4D_BASE_THREADS_H

#include <stdint.h>

#include "base/error.h"

struct threads; /* opaque */

/* `count` workers in all, the caller being one of them (1 = no extra thread).
 * NULL with *e filled when a thread cannot be made. */
struct threads *threads_create(int count, struct error *e);
void threads_destroy(struct threads *t);
int threads_count(const struct threads *t);

/* Runs task(context, index, worker) for index 0..n-1, worker in
 * 0..threads_count-1 (for per-worker scratch), and returns when all are done.
 * Not reentrant: a task must not start a loop on the same pool. */
void threads_run(struct threads *t, int64_t n, void (*task)(void *context, int64_t index, int worker),
                 void *context);

/* Processors this process may run on, and those that the host has. */
int threads_available(void);
int threads_of_host(void);

#endif
