/* What the files of comm/ share: the communicator and its watch.
 *
 * Three threads may look at a `struct comm`: the caller's (collectives), the
 * heartbeat thread (sends and receives beats over MPI) and the watch thread
 * (compares clocks, never calls MPI, so nothing can hold it up).  What they
 * share lies in `struct watch`, under its lock.  A fourth moves exchanges
 * (transport_mpi.c, transport_nccl.c); it has a communicator of its own.
 */
#ifndef FP4D_COMM_INTERNAL_H
#define FP4D_COMM_INTERNAL_H

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "comm/comm.h"

#define COMM_PIECE_BYTES ((int64_t)4 << 20) /* of a collective's working buffer */
#define COMM_SLICE_ALIGNMENT 16             /* elements; keeps every rank's slice on 64 bytes */

/* Where a rank is.  Sent as bytes: all ranks run one binary on one kind of machine. */
struct beat {
  int64_t update;
  double operation_s; /* how long in `operation` at the time of sending */
  int32_t phase;
  int32_t leaving; /* the last beat of a rank that closes in good order */
  int32_t waiting; /* inside a collective: held up by another rank, perhaps */
  char operation[64];
};

/* What is known of a rank whose beats arrive here. */
struct peer {
  int rank;
  bool known, left;
  double heard; /* clock_seconds of the last beat */
  struct beat beat;
};

struct watch {
  pthread_mutex_t lock;
  pthread_cond_t wake; /* CLOCK_MONOTONIC */
  bool prepared, started, stop_watch, stop_heartbeat;
  bool watching_peers; /* false once all ranks have come to comm_close */
  bool heartbeats;     /* the heartbeat thread runs */
  double heartbeat_alive;
  char heartbeat_failure[512]; /* an MPI error met by the heartbeat thread */
  struct comm_limits limits;
  enum comm_phase phase;
  const char *operation;
  int64_t update;
  double operation_began;
  int64_t exchange; /* ticket of the oldest of the device's that is under way; 0: none */
  double exchange_since;
  bool exchange_computed; /* the device has come to it */
  bool overrun; /* an operation is beyond its limit, since overrun_seen; the watch thread's own */
  double overrun_seen;
  pthread_t watch_thread, heartbeat_thread;
  int n_peers; /* rank 0: all others; another rank: rank 0 alone */
  struct peer *peers;
  struct place *places; /* world; the watch thread's own (watchdog.c) */
};

struct comm {
  int rank, world, local_rank, local_world;
  bool mpi;          /* MPI is initialised and ours to finalise */
  enum error_code broken; /* a collective or an exchange failed with this: no more agreement is possible; 0: whole */
  MPI_Comm ranks;    /* collectives of the caller's thread */
  MPI_Comm beats;    /* heartbeats */
  char *topology;
  char *buffer;      /* buffer_bytes, for collectives */
  int64_t buffer_bytes;
  int *counts, *places, *receive_counts, *receive_places; /* world each */
  atomic_bool waiting; /* the caller's thread is inside a collective or waits for an exchange */
  struct exchange *exchange; /* exchange.c's; NULL: not opened */
  struct watch watch;
};

/* An MPI result as an error: "WHAT failed: MPI's words". */
bool comm_mpi_error(int result, const char *what, struct error *e);
/* The same, in the caller's thread; marks the world broken. */
bool comm_mpi_failed(struct comm *c, int result, const char *what, struct error *e);

/* The heartbeat thread's body (heartbeat.c); `argument` is the struct comm. */
void *comm_heartbeat_run(void *argument);

/* Of the thread that moves device memory: its oldest exchange under way (0: none), and whether
 * the device has come to it. */
void comm_watch_exchange(struct comm *c, int64_t ticket, bool computed);

/* "in 'forward' of update 7", of this rank. */
enum { COMM_PLACE_TEXT = 128 };
void comm_place_text(struct comm *c, char text[COMM_PLACE_TEXT]);

/* What comm_abort tries first, for at most three seconds, in a thread of its own; NULL: nothing. */
void comm_abort_first(void (*what)(void *), void *argument);

/* Ranks that end the job speak in turns.  After MPI_Abort mpirun sends SIGTERM, which a rank
 * outlives, and a second later SIGKILL: a turn must be longer. */
#define COMM_TURN_S 3.0
#define COMM_TURNS 8

/* The clock beside MPI's start (launch.c) stops: the watchdog watches from here on, or nobody waits for anybody. */
void comm_start_ended(void);

/* Seconds between two beats, and between two looks of the watch. */
double comm_tick(const struct comm_limits *limits);

/* Waits for at most `seconds` on the watch's condition; the lock is held. */
void comm_watch_wait(struct watch *w, double seconds);

bool comm_watch_prepare(struct comm *c, struct error *e);
/* In comm_close's order: ends heartbeats in agreement with the others, then the clocks. */
void comm_watch_end_heartbeats(struct comm *c);
void comm_watch_end(struct comm *c);
void comm_watch_discard(struct comm *c);

/* A thread that leaves every signal to the caller's thread.  Its name is for the error. */
bool comm_start_thread(pthread_t *thread, void *(*body)(void *), void *argument, const char *name, struct error *e);

/* Whether MPI_Abort may be called: set by comm_open, cleared before MPI_Finalize. */
extern atomic_bool comm_mpi_live;

#endif
