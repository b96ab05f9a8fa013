/* That all ranks begin the same exchange, and that all have come to it (transports' own header).
 *
 * A header goes over MPI to and from every other rank before anything is moved. */
#ifndef FP4D_COMM_MEET_H
#define FP4D_COMM_MEET_H

#include <mpi.h>
#include <stdatomic.h>

#include "base/hash.h"
#include "comm/internal.h"
#include "comm/transport.h"

/* Sent as bytes: all ranks run one binary on one kind of machine. */
struct meet_header {
  int64_t ticket, kind, n;
  struct hash shapes;
};

struct meeting {
  struct comm *comm;
  MPI_Comm ranks;              /* of the thread that meets */
  MPI_Request *requests;       /* [2 * (world - 1)] at least */
  struct meet_header *headers; /* [world] */
  atomic_bool wanted;          /* the caller's thread stands still for an exchange */
};

/* Allocates requests ([n_requests]) and headers; the communicator is a duplicate of the
 * ranks'.  All ranks, in agreement. */
bool meeting_open(struct meeting *m, struct comm *c, int n_requests, struct error *e);
void meeting_close(struct meeting *m);

enum meet_state { MEET_WAITS, MEET_MET, MEET_FAILED };

/* Sends the header, then looks whether the others' have come; between looks the thread may do something else. */
bool meet_begin(struct meeting *m, const struct exchange_order *o, struct error *e);
enum meet_state meet_look(struct meeting *m, const struct exchange_order *o, struct error *e);

/* Rests between two looks at something that others do: short while somebody waits for it. */
void meet_rest(const struct meeting *m, bool together, int looks);

const char *exchange_kind_name(int64_t kind);

#endif
