/* Communicators: data parallelism over MPI (host memory).
 *
 * Every sum is taken in rank order by our own reduce-scatter, so the result
 * does not depend on which algorithm an MPI library picks: the same world
 * size gives the same bits.  Gradients and weights are exchanged beside the
 * computation: comm/exchange.h.
 *
 * A world of one needs no MPI: without a launcher's environment nothing of
 * MPI is initialised.
 *
 * Failure.  A watchdog thread on every rank knows the operation and update
 * that its rank is in (comm_enter) and hears the other ranks' heartbeats.
 * When a rank stops answering, or an operation outlives its limit, the
 * watchdog prints rank, operation and update, aborts the job within its own
 * deadline and leaves with ERROR_COMMUNICATION.
 */
#ifndef FP4D_COMM_COMM_H
#define FP4D_COMM_COMM_H

#include <stdint.h>

#include "base/error.h"

struct comm; /* opaque */

/* The longest that one operation (from one comm_enter to the next) may take in
 * each phase.  A limit is held against the rank that holds the others up, not
 * against ranks that wait for it in a collective: they may wait as long as it
 * may save.  The job ends at most heartbeat_s after the limit.  All > 0. */
struct comm_limits {
  double start_s;     /* COMM_START: until the first update has ended */
  double update_s;    /* COMM_UPDATE: a steady update */
  double save_s;      /* COMM_SAVE: a checkpoint save */
  double heartbeat_s; /* silence after which a rank counts as lost */
};

/* COMM_UNTIMED: of no known length (an index, an evaluation); a rank's silence alone is a fault. */
enum comm_phase { COMM_START, COMM_UPDATE, COMM_SAVE, COMM_FINISH, COMM_UNTIMED };

/* How long comm_open, and what follows until comm_watch, may take (at first 1800 s): a rank or a network
 * that does not answer MPI's start holds all others up inside it.  Then the process ends with ERROR_COMMUNICATION. */
void comm_start_limit(double seconds);

/* Joins the world. `expected_world` 0 = any; otherwise another size is refused
 * on every rank, within seconds, once.  Refuses a launch by srun without PMI
 * (N singletons) with the fix.  NULL with *e; in a world of several ranks rank 0
 * has logged it and the message is empty: a launcher kills all with the first
 * that leaves, so none may leave before it is said.
 * Once per process; the thread that calls it makes all later calls but
 * comm_abort. */
struct comm *comm_open(int expected_world, struct error *e);

int comm_rank(const struct comm *c);
int comm_world(const struct comm *c);
int comm_local_rank(const struct comm *c); /* among ranks of this host */
int comm_local_world(const struct comm *c);

/* "Open MPI v4.1.4, 2 ranks on 1 host: name x2" or "single process"; for the run header. */
const char *comm_topology(const struct comm *c);

/* "Open MPI v4.1.4", of the library that is loaded, whether it was initialised or not. */
const char *comm_library(void);

/* Starts the watchdog; all ranks call it at once after comm_open: one whose first heartbeat
 * does not come within heartbeat_s counts as lost.  May be called again with other limits. */
bool comm_watch(struct comm *c, const struct comm_limits *limits, struct error *e);

/* Tells the watchdog (and its reports) where this rank is.  `operation` must
 * be a string that lives for ever. */
void comm_enter(struct comm *c, enum comm_phase phase, const char *operation, int64_t update);

/* Collectives over all ranks; world 1 returns at once.  In place.  All ranks
 * pass the same n.  A false return (ERROR_COMMUNICATION) means a broken world:
 * end with comm_abort (comm_close does so by itself then, with the code of what broke it). */
bool comm_sum_f64(struct comm *c, double *x, int64_t n, struct error *e); /* in rank order */
bool comm_sum_i64(struct comm *c, int64_t *x, int64_t n, struct error *e); /* wraps around */
bool comm_max_f64(struct comm *c, double *x, int64_t n, struct error *e); /* NaN where any rank has NaN */
bool comm_or_i64(struct comm *c, int64_t *x, int64_t n, struct error *e); /* bitwise or */
bool comm_broadcast(struct comm *c, void *x, int64_t bytes, int root, struct error *e);
/* all[world * bytes] gets every rank's x[bytes], in rank order. */
bool comm_gather_all(struct comm *c, void *all, const void *x, int64_t bytes, struct error *e);
bool comm_barrier(struct comm *c, struct error *e);

/* Whether a collective or an exchange has failed on this rank, which the others may not know. */
bool comm_is_broken(const struct comm *c);

/* True on every rank iff `good` on every rank; where not, *e on every rank is
 * the first failing rank's error (its rank named). The way to fail together. */
bool comm_agree(struct comm *c, bool good, struct error *e);

/* Leaves in good order (all ranks call it). */
void comm_close(struct comm *c);

/* Ends every rank now with this exit code; does not return. For a fault that
 * other ranks do not know of. `c` may be NULL. */
void comm_abort(struct comm *c, enum error_code code) __attribute__((noreturn));

#endif
