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
 * Host memory is moved over MPI by a thread of this process and a communicator of its
 * own: collectives of the caller's thread (comm.h) may go on meanwhile.  Device memory is
 * moved by NCCL, beside the device's operations and in order with them: an exchange comes
 * after the operations that the device was told before it was begun, and what the device is
 * told after comm_finish comes after the exchange.  No host waits for a device.
 *
 * While the caller's thread stands in comm_finish it counts as waiting: the watchdog names
 * the rank that holds it up, with its operation and update.  An exchange of devices that is
 * under way longer than the limit of its phase ends the job, with rank, operation and update.
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

/* Whose memory is exchanged, and memory of its for what other ranks send: as many bytes as
 * comm_exchange_staging_bytes says, or other than 0 bytes that are fewer (and more rounds). */
struct comm_device {
  struct device *device;
  void *staging;
  int64_t staging_bytes;
};

/* 0 in a world of one, and where the device's memory is the host's. */
int64_t comm_exchange_staging_bytes(const struct device *d, int world);
/* What NCCL takes of a device for itself: a GiB, as 2.28.3 did on each of two H200s. */
int64_t comm_exchange_own_bytes(const struct device *d, int world);

/* Makes buffers and thread; once, by all ranks, before the first exchange.  At most
 * `most` exchanges are under way at once.  Nothing is allocated later.  Devices join
 * NCCL's world here: two ranks on one GPU are refused (ERROR_DEVICE). */
bool comm_exchange_open(struct comm *c, const struct comm_device *device, int most, struct error *e);

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
 * on this rank; of device memory: until it is certain that it comes before what the
 * device is told next.  False: ERROR_COMMUNICATION, or ERROR_DEVICE where this rank's device
 * is in a fault; a broken world (comm.h): no exchange after the one that failed is carried out. */
bool comm_finish(struct comm *c, int64_t ticket, struct error *e);
bool comm_finish_all(struct comm *c, struct error *e);

/* Seconds since comm_exchange_open that exchanges were waited for: by the caller's thread in
 * comm_finish, or by the device's operations, of which those count that are over. */
double comm_exchange_waited(const struct comm *c);

/* "NCCL 2.28.9, sums in rank order; ...", for the run's record; "" in a world of one. */
void comm_exchange_describe(const struct comm *c, char *text, int size);

/* Waits for what is under way and ends the thread; before the memory of a tensor is
 * released.  All ranks, in good order; nothing to do where it was not opened. */
void comm_exchange_close(struct comm *c);

#endif
