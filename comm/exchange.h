/* Exchanges: sums and copies of whole tensors that go on while the caller computes.
 *
 *   ticket = comm_reduce_scatter_begin(...) -> [the caller computes] -> comm_finish(ticket)
 *
 * Tensors are shared by rows (comm/share.h).  All ranks begin the same exchanges in
 * the same order, which is checked; they are carried out in that order, one at a
 * time.  Sums are taken in rank order, so the same world size gives the same bits.
 *
 * Sharding of gradients and optimizer state follows Rajbhandari et al., "ZeRO: Memory
 * Optimizations Toward Training Trillion Parameter Models" (stage 1).
 *
 * Over MPI a thread of this process moves the data, through host memory and a
 * communicator of its own: collectives of the caller's thread (comm.h) may go on
 * meanwhile.  While the caller's thread stands in comm_finish it counts as waiting:
 * the watchdog names the rank that holds it up, with its operation and update.
 */
#ifndef FP4D_COMM_EXCHANGE_H
#define FP4D_COMM_EXCHANGE_H

#include "comm/comm.h"
#include "comm/share.h"
#include "kernels/kernels.h"

/* A whole tensor [rows, cols], row-major, in every rank's memory. */
struct comm_part {
  void *data;
  int64_t rows, cols;
  enum dtype dtype;
};

/* Makes buffers and thread; once, by all ranks, before the first exchange.  At most
 * `most` exchanges are under way at once.  Nothing is allocated later. */
bool comm_exchange_open(struct comm *c, int most, struct error *e);

/* Begin an exchange of n parts, which (the array and what it points at) must stay as
 * they are until it is finished; only the rows named here may be written meanwhile,
 * and by the exchange.  Return its ticket.  What goes wrong is reported by comm_finish.
 *
 * reduce_scatter: this rank's rows become the sum of all ranks' in FP32, in rank order,
 *   rounded once to the dtype; the other rows are undefined afterwards.
 * all_gather: every rank's rows are copied to all.
 *
 * In a world of one both are done at once: a sum of one and a copy to nobody. */
int64_t comm_reduce_scatter_begin(struct comm *c, const struct comm_part *parts, int n);
int64_t comm_all_gather_begin(struct comm *c, const struct comm_part *parts, int n);

/* Waits until this exchange, and with it every one that was begun before it, is done
 * on this rank.  False: ERROR_COMMUNICATION, a broken world (comm.h): no exchange
 * after the one that failed is carried out. */
bool comm_finish(struct comm *c, int64_t ticket, struct error *e);
bool comm_finish_all(struct comm *c, struct error *e);

/* Seconds that the caller's thread has stood in comm_finish since comm_exchange_open. */
double comm_exchange_waited(const struct comm *c);

/* Waits for what is under way and ends the thread; before the memory of a tensor is
 * released.  All ranks, in good order; nothing to do where it was not opened. */
void comm_exchange_close(struct comm *c);

#endif
