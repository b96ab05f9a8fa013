/* Exchanges over MPI: a thread that sends rows of host memory from rank to rank.
 *
 * An exchange begins with a header to and from every other rank, which tells whether
 * all mean the same exchange and that all have come to it.  Until then the thread
 * sleeps most of the time: the processor belongs to the caller's computation.  Then
 * it goes in rounds of messages whose received copies fit the buffer:
 *
 *   reduce-scatter: the others' values of this rank's rows arrive in the buffer, and
 *     ((x0 + x1) + x2) + ... is taken for each element in FP32;
 *   all-gather: rows arrive where they belong.
 *
 * Only MPI_Isend, MPI_Irecv and MPI_Testall are used, so that results cannot depend on
 * MPI's algorithms, and nothing here blocks inside MPI. */
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/clones.h"
#include "base/hash.h"
#include "base/log.h"
#include "comm/internal.h"
#include "comm/transport.h"
#include "kernels/formats.h"

enum { HEADER_TAG = 1, DATA_TAG = 2 };
enum { SEGMENTS = 16 };    /* of a round, at most */
enum { CHUNK = 1024 };     /* elements that are summed at once */
enum { PATIENCE = 2000 };  /* looks before a thread that somebody waits for begins to sleep */
enum { ALIGNMENT = 64, PIECE_BYTES = COMM_PIECE_BYTES, BUFFER_BYTES = PIECE_BYTES + SEGMENTS * ALIGNMENT };
enum { SLEEP_NS = 50000, LONG_SLEEP_NS = 200000 };

/* Sent as bytes: all ranks run one binary on one kind of machine. */
struct header {
  int64_t ticket, kind, n;
  struct hash shapes;
};

/* Elements [at, at + length) of every rank's share of a tensor, as far as it has them. */
struct segment {
  const struct comm_part *part;
  int64_t at, length;
  char *received; /* reduce-scatter: the others' copies of this rank's, one after another */
};

struct engine {
  struct comm *comm;
  MPI_Comm ranks; /* this thread's own */
  char *buffer;           /* [BUFFER_BYTES] */
  MPI_Request *requests;  /* [2 * SEGMENTS * (world - 1)] */
  struct header *headers; /* [world] */
  const char **values;    /* [world] */
  struct segment segments[SEGMENTS];

  pthread_t thread;
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t begun_one, done_one;
  int most;
  struct exchange_order *orders; /* [most], order of ticket t at t % most */
  int64_t begun, done;           /* tickets */
  bool leave, failed;
  struct error error;
  atomic_bool wanted; /* the caller's thread stands still for an exchange */
};

/* ---- waiting for messages ------------------------------------------------------- */

static const char *kind_name(int64_t kind) { return kind == EXCHANGE_REDUCE_SCATTER ? "reduce-scatter" : "all-gather"; }

static void rest(long nanoseconds) {
  const struct timespec t = {.tv_nsec = nanoseconds};
  nanosleep(&t, NULL);
}

/* Until the first n requests are done.  `together`: all ranks are at it, so it will not take long. */
static bool complete(struct engine *g, int n, bool together, const char *what, struct error *e) {
  for (int looks = 0;; looks++) {
    int all = 0;
    const int result = MPI_Testall(n, g->requests, &all, MPI_STATUSES_IGNORE);
    if (result != MPI_SUCCESS) return comm_mpi_error(result, what, e);
    if (all) return true;
    if (!together && !atomic_load(&g->wanted))
      rest(LONG_SLEEP_NS);
    else if (looks < PATIENCE)
      sched_yield();
    else
      rest(SLEEP_NS);
  }
}

static bool receive(struct engine *g, int *n, void *to, int64_t bytes, int rank, int tag, const char *what, struct error *e) {
  const int result = MPI_Irecv(to, (int)bytes, MPI_BYTE, rank, tag, g->ranks, &g->requests[*n]);
  if (result != MPI_SUCCESS) return comm_mpi_error(result, what, e);
  ++*n;
  return true;
}

static bool send(struct engine *g, int *n, const void *from, int64_t bytes, int rank, int tag, const char *what, struct error *e) {
  const int result = MPI_Isend(from, (int)bytes, MPI_BYTE, rank, tag, g->ranks, &g->requests[*n]);
  if (result != MPI_SUCCESS) return comm_mpi_error(result, what, e);
  ++*n;
  return true;
}

/* ---- the same exchange on all ranks ------------------------------------------------ */

static struct header header_of(const struct exchange_order *o) {
  struct header h = {.ticket = o->ticket, .kind = o->kind, .n = o->n};
  for (int i = 0; i < o->n; i++) {
    const int64_t shape[3] = {o->parts[i].rows, o->parts[i].cols, o->parts[i].dtype};
    uint64_t mixed[5];
    memcpy(mixed, shape, sizeof shape);
    memcpy(mixed + 3, &h.shapes, sizeof h.shapes);
    h.shapes = hash_bytes(mixed, sizeof mixed);
  }
  return h;
}

static bool meet(struct engine *g, const struct exchange_order *o, struct error *e) {
  const int world = g->comm->world, rank = g->comm->rank;
  const struct header own = header_of(o);
  const char *what = kind_name(o->kind);
  int n = 0;
  g->headers[rank] = own;
  for (int r = 0; r < world; r++)
    if (r != rank && (!receive(g, &n, &g->headers[r], sizeof own, r, HEADER_TAG, what, e) ||
                      !send(g, &n, &g->headers[rank], sizeof own, r, HEADER_TAG, what, e)))
      return false;
  if (!complete(g, n, false, what, e)) return false;
  for (int r = 0; r < world; r++) {
    const struct header *h = &g->headers[r];
    if (memcmp(h, &own, sizeof own) == 0) continue;
    return error_set(e, ERROR_COMMUNICATION,
                     "ranks do not exchange the same: rank %d begins a%s of %" PRId64 " tensors as its exchange %" PRId64
                     ", rank %d a%s of %" PRId64 " as its %" PRId64 "%s",
                     r, h->kind == EXCHANGE_REDUCE_SCATTER ? " reduce-scatter" : "n all-gather", h->n, h->ticket, rank,
                     own.kind == EXCHANGE_REDUCE_SCATTER ? " reduce-scatter" : "n all-gather", own.n, own.ticket,
                     hash_equal(h->shapes, own.shapes) ? "" : ", of other shapes");
  }
  return true;
}

/* ---- rounds ---------------------------------------------------------------------------- */

static int64_t share_begin(const struct comm_part *p, int rank, int world) {
  return share_row(p->rows, p->cols, rank, world) * p->cols;
}

static int64_t largest_share(const struct comm_part *p, int world) {
  int64_t most = 0;
  for (int r = 0; r < world; r++) {
    const int64_t n = share_begin(p, r + 1, world) - share_begin(p, r, world);
    if (n > most) most = n;
  }
  return most;
}

/* How many elements of `rank`'s share the segment has, and where in the tensor they begin. */
static int64_t segment_of(const struct segment *s, int rank, int world, char **data) {
  const int64_t first = share_begin(s->part, rank, world), left = share_begin(s->part, rank + 1, world) - first - s->at;
  *data = (char *)s->part->data + (size_t)(first + s->at) * dtype_bytes(s->part->dtype);
  return left < 0 ? 0 : left < s->length ? left : s->length;
}

/* The next round from element *at of every share of part *i on: segments, as many on all ranks. */
static int plan_round(struct engine *g, const struct exchange_order *o, int *i, int64_t *at) {
  const int others = g->comm->world - 1;
  int64_t used = 0;
  int n = 0;
  while (*i < o->n && n < SEGMENTS) {
    const struct comm_part *p = &o->parts[*i];
    const int64_t size = (int64_t)dtype_bytes(p->dtype) * others, room = (PIECE_BYTES - used) / size;
    const int64_t left = largest_share(p, g->comm->world) - *at, length = left < room ? left : room;
    if (length == 0 && left > 0) break;
    g->segments[n++] = (struct segment){p, *at, length, g->buffer + used};
    used += round_up(length * size, ALIGNMENT);
    *at += length;
    if (length < left) break;
    ++*i;
    *at = 0;
  }
  return n;
}

/* sum[n] = values[0] + values[1] + ..., each [n] of the dtype. */
CLONES __attribute__((flatten)) static void sum_f32(float *sum, const char *const *values, int world, int64_t n) {
  memcpy(sum, values[0], (size_t)n * sizeof *sum);
  for (int r = 1; r < world; r++) {
    const float *x = (const float *)(const void *)values[r];
    for (int64_t i = 0; i < n; i++) sum[i] = sum[i] + x[i];
  }
}

CLONES __attribute__((flatten)) static void sum_bf16(float *sum, const char *const *values, int world, int64_t n) {
  const uint16_t *first = (const uint16_t *)(const void *)values[0];
  for (int64_t i = 0; i < n; i++) sum[i] = bf16_decode(first[i]);
  for (int r = 1; r < world; r++) {
    const uint16_t *x = (const uint16_t *)(const void *)values[r];
    for (int64_t i = 0; i < n; i++) sum[i] = sum[i] + bf16_decode(x[i]);
  }
}

CLONES __attribute__((flatten)) static void round_bf16(uint16_t *to, const float *sum, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = bf16_encode(sum[i]);
}

/* This rank's elements of the segment: the sum over ranks, in their order. */
static void sum_segment(struct engine *g, const struct segment *s) {
  const int world = g->comm->world, rank = g->comm->rank;
  const size_t size = dtype_bytes(s->part->dtype);
  char *own;
  const int64_t mine = segment_of(s, rank, world, &own);
  float sum[CHUNK];
  for (int64_t i = 0; i < mine; i += CHUNK) {
    const int64_t n = mine - i < CHUNK ? mine - i : CHUNK;
    for (int r = 0; r < world; r++) {
      const char *values = r == rank ? own : s->received + (size_t)((r < rank ? r : r - 1) * s->length) * size;
      g->values[r] = values + (size_t)i * size;
    }
    if (s->part->dtype == DTYPE_F32) {
      sum_f32(sum, g->values, world, n);
      memcpy(own + (size_t)i * size, sum, (size_t)n * size);
    } else {
      sum_bf16(sum, g->values, world, n);
      round_bf16((uint16_t *)(void *)(own + (size_t)i * size), sum, n);
    }
  }
}

static bool round_of(struct engine *g, enum exchange_kind kind, int n_segments, struct error *e) {
  const int world = g->comm->world, rank = g->comm->rank;
  const bool reducing = kind == EXCHANGE_REDUCE_SCATTER;
  const char *what = kind_name(kind);
  int n = 0;
  for (int k = 0; k < n_segments; k++) {
    const struct segment *s = &g->segments[k];
    const int64_t size = (int64_t)dtype_bytes(s->part->dtype);
    char *own, *theirs;
    const int64_t mine = segment_of(s, rank, world, &own);
    for (int r = 0; r < world; r++) {
      if (r == rank) continue;
      const int64_t of_r = segment_of(s, r, world, &theirs);
      char *slot = s->received + (r < rank ? r : r - 1) * s->length * size;
      const int64_t in = reducing ? mine : of_r, out = reducing ? of_r : mine;
      if (in > 0 && !receive(g, &n, reducing ? slot : theirs, in * size, r, DATA_TAG, what, e)) return false;
      if (out > 0 && !send(g, &n, reducing ? theirs : own, out * size, r, DATA_TAG, what, e)) return false;
    }
  }
  if (!complete(g, n, true, what, e)) return false;
  for (int k = 0; reducing && k < n_segments; k++) sum_segment(g, &g->segments[k]);
  return true;
}

static bool carry_out(struct engine *g, const struct exchange_order *o, struct error *e) {
  bool good = meet(g, o, e);
  int i = 0;
  int64_t at = 0;
  while (good && i < o->n) good = round_of(g, o->kind, plan_round(g, o, &i, &at), e);
  return good;
}

/* ---- the thread -------------------------------------------------------------------------- */

static void *engine_run(void *argument) {
  struct engine *g = argument;
  pthread_mutex_lock(&g->lock);
  for (;;) {
    while (!g->leave && (g->failed || g->done == g->begun)) pthread_cond_wait(&g->begun_one, &g->lock);
    if (g->leave) break;
    const struct exchange_order order = g->orders[(g->done + 1) % g->most];
    struct error e;
    pthread_mutex_unlock(&g->lock);
    const bool good = carry_out(g, &order, &e);
    pthread_mutex_lock(&g->lock);
    if (good) {
      g->done++;
    } else { /* messages of it may be under way for ever; nothing more is begun */
      g->failed = true;
      g->error = e;
    }
    pthread_cond_broadcast(&g->done_one);
  }
  pthread_mutex_unlock(&g->lock);
  return NULL;
}

static void discard(struct engine *g) {
  if (!g) return;
  free(g->orders);
  free(g->requests);
  free(g->headers);
  free(g->values);
  free(g->buffer);
  free(g);
}

static void mpi_close(void *state) {
  struct engine *g = state;
  pthread_mutex_lock(&g->lock);
  g->leave = true;
  pthread_cond_broadcast(&g->begun_one);
  pthread_mutex_unlock(&g->lock);
  pthread_join(g->thread, NULL);
  if (MPI_Comm_free(&g->ranks) != MPI_SUCCESS) log_warning("MPI_Comm_free failed");
  pthread_cond_destroy(&g->begun_one);
  pthread_cond_destroy(&g->done_one);
  pthread_mutex_destroy(&g->lock);
  discard(g);
}

static void *mpi_open(struct comm *c, int most, struct error *e) {
  struct engine *g = calloc(1, sizeof *g);
  const size_t world = (size_t)c->world;
  bool good = g != NULL;
  if (good) {
    g->comm = c;
    g->most = most;
    g->orders = calloc((size_t)most, sizeof *g->orders);
    g->requests = calloc(2 * SEGMENTS * (world - 1), sizeof(MPI_Request));
    g->headers = calloc(world, sizeof *g->headers);
    g->values = calloc(world, sizeof *g->values);
    if (posix_memalign((void **)&g->buffer, ALIGNMENT, BUFFER_BYTES) != 0) g->buffer = NULL;
    good = g->orders && g->requests && g->headers && g->values && g->buffer;
  }
  good = comm_agree(c, good || error_set(e, ERROR_SYSTEM, "out of memory for the buffers of exchanges"), e);
  if (good) {
    const int result = MPI_Comm_dup(c->ranks, &g->ranks);
    good = result == MPI_SUCCESS || comm_mpi_failed(c, result, "MPI_Comm_dup", e);
  }
  bool started = false;
  if (good) {
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->begun_one, NULL);
    pthread_cond_init(&g->done_one, NULL);
    started = comm_start_thread(&g->thread, engine_run, g, "exchanges' thread", e);
    good = comm_agree(c, started, e);
  }
  if (good) return g;
  if (started)
    mpi_close(g);
  else
    discard(g); /* its communicator goes with MPI_Finalize */
  return NULL;
}

static void mpi_begin(void *state, const struct exchange_order *order) {
  struct engine *g = state;
  pthread_mutex_lock(&g->lock);
  g->orders[order->ticket % g->most] = *order;
  g->begun = order->ticket;
  pthread_cond_signal(&g->begun_one);
  pthread_mutex_unlock(&g->lock);
}

static bool mpi_done(void *state, int64_t ticket) {
  struct engine *g = state;
  pthread_mutex_lock(&g->lock);
  const bool done = g->failed || g->done >= ticket;
  pthread_mutex_unlock(&g->lock);
  return done;
}

static bool mpi_finish(void *state, int64_t ticket, struct error *e) {
  struct engine *g = state;
  pthread_mutex_lock(&g->lock);
  atomic_store(&g->wanted, true);
  while (g->done < ticket && !g->failed) pthread_cond_wait(&g->done_one, &g->lock);
  atomic_store(&g->wanted, false);
  const bool good = g->done >= ticket;
  if (!good && e) *e = g->error;
  pthread_mutex_unlock(&g->lock);
  return good;
}

const struct comm_transport comm_transport_mpi = {
    .open = mpi_open, .begin = mpi_begin, .done = mpi_done, .finish = mpi_finish, .close = mpi_close};
