/* What moves the bytes of an exchange: a table of functions (comm/ alone includes it).
 *
 * The MPI transport moves host memory by a thread.  That of device memory (NCCL) comes
 * after what the device was told before `begin`, and what it is told after `finish`
 * comes after the exchange, without a wait of the host's. */
#ifndef FP4D_COMM_TRANSPORT_H
#define FP4D_COMM_TRANSPORT_H

#include "comm/exchange.h"

enum exchange_kind { EXCHANGE_REDUCE_SCATTER, EXCHANGE_ALL_GATHER };

/* An exchange; tickets count from 1. */
struct exchange_order {
  enum exchange_kind kind;
  const struct comm_part *parts;
  int n;
  int64_t ticket;
};

struct comm_transport {
  /* Its state; NULL with *e.  All ranks, in agreement. */
  void *(*open)(struct comm *c, const struct comm_device *device, int most, struct error *e);
  /* In the order of tickets; at most `most` are not yet done. */
  void (*begin)(void *state, const struct exchange_order *order);
  bool (*done)(void *state, int64_t ticket); /* whether finish would return at once */
  bool (*finish)(void *state, int64_t ticket, struct error *e); /* it and all before it */
  /* Seconds that the device stood still for exchanges; NULL: as long as finish took. */
  double (*waited)(void *state);
  /* What moves the memory, in words. */
  void (*describe)(const void *state, char *text, int size);
  void (*close)(void *state); /* nothing is under way */
};

extern const struct comm_transport comm_transport_mpi;  /* transport_mpi.c: host memory */
extern const struct comm_transport comm_transport_nccl; /* transport_nccl.c: devices with links (kernels/link.h) */

#endif
