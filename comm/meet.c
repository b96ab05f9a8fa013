#include "comm/meet.h"

#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"

enum { HEADER_TAG = 1 };
enum { PATIENCE = 2000 }; /* looks before a thread that somebody waits for begins to sleep */
enum { SLEEP_NS = 50000, LONG_SLEEP_NS = 200000 };

const char *exchange_kind_name(int64_t kind) { return kind == EXCHANGE_REDUCE_SCATTER ? "reduce-scatter" : "all-gather"; }

bool meeting_open(struct meeting *m, struct comm *c, int n_requests, struct error *e) {
  m->comm = c;
  m->ranks = MPI_COMM_NULL;
  m->requests = calloc((size_t)n_requests + 1, sizeof(MPI_Request));
  m->headers = calloc((size_t)c->world, sizeof *m->headers);
  bool good = m->requests && m->headers;
  good = comm_agree(c, good || error_set(e, ERROR_SYSTEM, "out of memory for the buffers of exchanges"), e);
  if (!good || c->world == 1) return good;
  const int result = MPI_Comm_dup(c->ranks, &m->ranks);
  return result == MPI_SUCCESS || comm_mpi_failed(c, result, "MPI_Comm_dup", e);
}

void meeting_close(struct meeting *m) {
  if (m->ranks != MPI_COMM_NULL && MPI_Comm_free(&m->ranks) != MPI_SUCCESS) log_warning("MPI_Comm_free failed");
  free(m->requests);
  free(m->headers);
}

static void sleep_ns(long nanoseconds) {
  const struct timespec t = {.tv_nsec = nanoseconds};
  nanosleep(&t, NULL);
}

void meet_rest(const struct meeting *m, bool together, int looks) {
  if (!together && !atomic_load(&m->wanted))
    sleep_ns(LONG_SLEEP_NS);
  else if (looks < PATIENCE)
    sched_yield();
  else
    sleep_ns(SLEEP_NS);
}

static struct meet_header header_of(const struct exchange_order *o) {
  struct meet_header h = {.ticket = o->ticket, .kind = o->kind, .n = o->n};
  for (int i = 0; i < o->n; i++) {
    const int64_t shape[3] = {o->parts[i].rows, o->parts[i].cols, o->parts[i].dtype};
    uint64_t mixed[5];
    memcpy(mixed, shape, sizeof shape);
    memcpy(mixed + 3, &h.shapes, sizeof h.shapes);
    h.shapes = hash_bytes(mixed, sizeof mixed);
  }
  return h;
}

bool meet_begin(struct meeting *m, const struct exchange_order *o, struct error *e) {
  const int world = m->comm->world, rank = m->comm->rank, bytes = (int)sizeof *m->headers;
  int n = 0;
  m->headers[rank] = header_of(o);
  for (int r = 0; r < world; r++) {
    if (r == rank) continue;
    int result = MPI_Irecv(&m->headers[r], bytes, MPI_BYTE, r, HEADER_TAG, m->ranks, &m->requests[n++]);
    if (result == MPI_SUCCESS) result = MPI_Isend(&m->headers[rank], bytes, MPI_BYTE, r, HEADER_TAG, m->ranks, &m->requests[n++]);
    if (result != MPI_SUCCESS) return comm_mpi_error(result, exchange_kind_name(o->kind), e);
  }
  return true;
}

enum meet_state meet_look(struct meeting *m, const struct exchange_order *o, struct error *e) {
  const int world = m->comm->world, rank = m->comm->rank;
  int all = 0;
  if (world == 1) return MEET_MET;
  const int result = MPI_Testall(2 * (world - 1), m->requests, &all, MPI_STATUSES_IGNORE);
  if (result != MPI_SUCCESS) {
    comm_mpi_error(result, exchange_kind_name(o->kind), e);
    return MEET_FAILED;
  }
  if (!all) return MEET_WAITS;
  const struct meet_header *own = &m->headers[rank];
  for (int r = 0; r < world; r++) {
    const struct meet_header *h = &m->headers[r];
    if (memcmp(h, own, sizeof *own) == 0) continue;
    error_set(e, ERROR_COMMUNICATION,
              "ranks do not exchange the same: rank %d begins a%s of %" PRId64 " tensors as its exchange %" PRId64
              ", rank %d a%s of %" PRId64 " as its %" PRId64 "%s",
              r, h->kind == EXCHANGE_REDUCE_SCATTER ? " reduce-scatter" : "n all-gather", h->n, h->ticket, rank,
              own->kind == EXCHANGE_REDUCE_SCATTER ? " reduce-scatter" : "n all-gather", own->n, own->ticket,
              hash_equal(h->shapes, own->shapes) ? "" : ", of other shapes");
    return MEET_FAILED;
  }
  return MEET_MET;
}
