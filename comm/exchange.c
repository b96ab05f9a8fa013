/* Tickets of exchanges, over whichever transport moves them. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/internal.h"
#include "comm/transport.h"

struct exchange {
  const struct comm_transport *transport;
  void *state;
  int most;
  int64_t begun, finished; /* tickets */
  double waited;
};

int64_t comm_exchange_staging_bytes(const struct device *d, int world) {
  return world <= 1 || d->k->host_memory ? 0 : (int64_t)256 << 20;
}

int64_t comm_exchange_own_bytes(const struct device *d, int world) { return world <= 1 || d->k->host_memory ? 0 : INT64_C(1) << 30; }

bool comm_exchange_open(struct comm *c, const struct comm_device *device, int most, struct error *e) {
  if (c->world == 1 || c->exchange) return true;
  struct exchange *x = calloc(1, sizeof *x);
  if (!comm_agree(c, x != NULL || error_set(e, ERROR_SYSTEM, "out of memory for exchanges"), e)) {
    free(x);
    return false;
  }
  x->transport = device->device->k->host_memory ? &comm_transport_mpi : &comm_transport_nccl;
  x->most = most;
  x->state = x->transport->open(c, device, most, e);
  if (!x->state) {
    free(x);
    return false;
  }
  c->exchange = x;
  return true;
}

static int64_t begin(struct comm *c, enum exchange_kind kind, const struct comm_part *parts, int n) {
  struct exchange *x = c->exchange;
  if (c->world == 1) return 0;
  if (!x || x->begun - x->finished >= x->most) { /* a defect of the caller's that the others would wait for */
    log_error("more exchanges are begun than comm_exchange_open was told (%d)", x ? x->most : 0);
    comm_abort(c, ERROR_INTERNAL);
  }
  x->transport->begin(x->state, &(struct exchange_order){kind, parts, n, ++x->begun});
  return x->begun;
}

int64_t comm_reduce_scatter_begin(struct comm *c, const struct comm_part *parts, int n) {
  return begin(c, EXCHANGE_REDUCE_SCATTER, parts, n);
}

int64_t comm_all_gather_begin(struct comm *c, const struct comm_part *parts, int n) {
  return begin(c, EXCHANGE_ALL_GATHER, parts, n);
}

bool comm_finish(struct comm *c, int64_t ticket, struct error *e) {
  struct exchange *x = c->exchange;
  if (!x || ticket <= x->finished) return true;
  const double began = clock_seconds();
  if (!x->transport->done(x->state, ticket)) atomic_store(&c->waiting, true);
  const bool good = x->transport->finish(x->state, ticket, e);
  atomic_store(&c->waiting, false);
  x->waited += clock_seconds() - began;
  if (good)
    x->finished = ticket;
  else
    c->broken = e->code == ERROR_DEVICE ? ERROR_DEVICE : ERROR_COMMUNICATION;
  return good;
}

bool comm_finish_all(struct comm *c, struct error *e) { return !c->exchange || comm_finish(c, c->exchange->begun, e); }

double comm_exchange_waited(const struct comm *c) {
  const struct exchange *x = c->exchange;
  if (!x) return 0;
  return x->transport->waited ? x->transport->waited(x->state) : x->waited;
}

void comm_exchange_describe(const struct comm *c, char *text, int size) {
  text[0] = 0;
  if (c->exchange) c->exchange->transport->describe(c->exchange->state, text, size);
}

void comm_exchange_close(struct comm *c) {
  struct exchange *x = c->exchange;
  struct error e;
  if (!x) return;
  if (!c->broken && !comm_finish_all(c, &e)) log_failure(&e);
  if (c->broken) comm_abort(c, c->broken); /* the transport may hold memory of the caller's for ever */
  x->transport->close(x->state);
  c->exchange = NULL;
  free(x);
}
