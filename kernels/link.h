/* Links: what moves device memory between the devices of several processes, beside the
 * operations and without the host (NCCL on the CUDA backends: kernels/cuda/link.cu).
 *
 * An exchange is a row of calls.  `slot` numbers the exchanges under way, below `most`:
 *
 *   ready(slot)                       after the operations that make what is exchanged
 *   begin(slot)                       what follows comes after ready's moment
 *     transfer, or gather; state until it is no longer LINK_BUSY; sum
 *     ... in rounds, over two halves of the staging memory in turn
 *   end(slot)
 *   follow(slot)                      operations begun from now on come after the exchange
 *
 * Errors are the library's, ERROR_COMMUNICATION, or ERROR_DEVICE: the device is in a fault,
 * which the library may be the first to meet.
 *
 * None of them waits for the device.  ready, follow and waited are the caller's thread's;
 * open and all others are those of one thread that carries exchanges out, but abort, which
 * any thread may call.  A device has one link at most.
 */
#ifndef FP4D_KERNELS_LINK_H
#define FP4D_KERNELS_LINK_H

#include "kernels/fabric.h"
#include "kernels/kernels.h"

enum { LINK_ID_BYTES = 128, LINK_NAME = 64, LINK_ALIGNMENT = 8 /* elements */ };

struct link; /* opaque */

enum link_state { LINK_BUSY, LINK_IDLE, LINK_FAILED };

/* To one rank and from it; n 0: nothing that way. */
struct link_transfer {
  int rank;
  enum dtype dtype;
  const void *out;
  void *in;
  int64_t n_out, n_in; /* elements */
};

/* A whole tensor of which rank r has elements [begin[r], begin[r + 1]), and is to have all. */
struct link_gather {
  void *data;
  enum dtype dtype;
  const int64_t *begin; /* [world + 1] */
};

/* own[n] = the sum of all ranks' in FP32, in rank order, rounded once to the dtype.  The
 * others' stand `stride` elements apart at `received`, in rank order, own left out; in a
 * world of one own is received like another's. */
struct link_sum {
  void *own;
  const void *received;
  int64_t n, stride;
  enum dtype dtype;
};

struct links {
  const char *name; /* "NCCL" */

  /* "2.28.9", of the library.  False with *e = ERROR_DEVICE: it is absent, or too old. */
  bool (*version)(char *text, int size, struct error *e);
  /* Which device this is, in all the world: "GPU-…" as nvidia-smi has it. */
  void (*identity)(const struct device *d, char text[LINK_NAME]);
  /* The NVLink fabric that it has joined. */
  void (*fabric)(const struct device *d, struct gpu_fabric *out);
  /* How many of `n` devices of this host, by identity, this one reaches by itself; -1: not told. */
  int (*reaches)(const struct device *d, char (*identity)[LINK_NAME], int n);

  /* A world's name, made by one of its ranks and told to the others. */
  bool (*make_id)(char id[LINK_ID_BYTES], struct error *e);
  /* Begins to join; state tells when it is done.  NULL with *e. */
  struct link *(*open)(struct device *d, const char id[LINK_ID_BYTES], int rank, int world, int most, struct error *e);

  /* The library's, without waiting. LINK_FAILED with *e. */
  enum link_state (*state)(struct link *l, struct error *e);

  void (*ready)(struct link *l, int slot);
  bool (*begin)(struct link *l, int slot, struct error *e);
  /* n transfers at once, of at most one half of the staging memory's; waits (on the device) until the half's last sums are done. */
  bool (*transfer)(struct link *l, int half, const struct link_transfer *t, int n, struct error *e);
  bool (*gather)(struct link *l, const struct link_gather *g, int n, struct error *e);
  /* After transfer and state: of what came into the half.  n may be 0. */
  bool (*sum)(struct link *l, int half, const struct link_sum *s, int n, struct error *e);
  /* The library's own sum into shares of `n` elements of every rank, in its order: to compare speeds with. */
  bool (*native_sum)(struct link *l, void *data, int64_t n, enum dtype dtype, struct error *e);
  bool (*end)(struct link *l, int slot, struct error *e);
  void (*follow)(struct link *l, int slot);
  /* Whether what the exchange needs has been computed, and whether it is done. */
  bool (*look)(struct link *l, int slot, bool *computed, bool *done, struct error *e);

  /* Seconds that the operations stood still for exchanges, as the device's clock has them,
   * of what is over. */
  double (*waited)(struct link *l);

  /* Ends what is under way, on the device, too; may hang.  Nothing but the process' end follows. */
  void (*abort)(struct link *l);
  /* Nothing is under way. `finish`: all ranks leave in good order. */
  void (*close)(struct link *l, bool finish);
};

#endif
