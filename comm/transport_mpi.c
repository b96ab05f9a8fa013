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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clones.h"
#include "base/log.h"
#include "comm/internal.h"
#include "comm/meet.h"
#include "comm/rounds.h"
#include "kernels/formats.h"

enum { DATA_TAG = 2 };
enum { CHUNK = 1024 }; /* elements that are summed at once */
enum { ALIGNMENT = 64, PIECE_BYTES = COMM_PIECE_BYTES, BUFFER_BYTES = PIECE_BYTES + ROUND_SEGMENTS * ROUND_ALIGNMENT };

struct engine {
  struct comm *comm;
  struct meeting meeting; /* requests: [2 * ROUND_SEGMENTS * (world - 1)] */
  char *buffer;           /* [BUFFER_BYTES] */
  const char **values;    /* [world] */
  struct segment segments[ROUND_SEGMENTS];

  pthread_t thread;
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t begun_one, done_one;
  int most;
  struct exchange_order *orders; /* [most], order of ticket t at t % most */
  int64_t begun, done;           /* tickets */
  bool leave, failed;
  struct error error;
};

/* ---- waiting for messages ------------------------------------------------------- */

/* Until the first n requests are done. */
static bool complete(struct engine *g, int n, const char *what, struct error *e) {
  for (int looks = 0;; looks++) {
    int all = 0;
    const int result = MPI_Testall(n, g->meeting.requests, &all, MPI_STATUSES_IGNORE);
    if (result != MPI_SUCCESS) return comm_mpi_error(result, what, e);
    if (all) return true;
    meet_rest(&g->meeting, true, looks);
  }
}

static bool receive(struct engine *g, int *n, void *to, int64_t bytes, int rank, const char *what, struct error *e) {
  const int result = MPI_Irecv(to, (int)bytes, MPI_BYTE, rank, DATA_TAG, g->meeting.ranks, &g->meeting.requests[*n]);
  if (result != MPI_SUCCESS) return comm_mpi_error(result, what, e);
  ++*n;
  return true;
}

static bool send(struct engine *g, int *n, const void *from, int64_t bytes, int rank, const char *what, struct error *e) {
  const int result = MPI_Isend(from, (int)bytes, MPI_BYTE, rank, DATA_TAG, g->meeting.ranks, &g->meeting.requests[*n]);
  if (result != MPI_SUCCESS) return comm_mpi_error(result, what, e);
  ++*n;
  return true;
}

/* Until all ranks have come. */
static bool meet(struct engine *g, const struct exchange_order *o, struct error *e) {
  if (!meet_begin(&g->meeting, o, e)) return false;
  for (int looks = 0;; looks++) {
    const enum meet_state s = meet_look(&g->meeting, o, e);
    if (s != MEET_WAITS) return s == MEET_MET;
    meet_rest(&g->meeting, false, looks);
  }
}

/* ---- rounds ---------------------------------------------------------------------------- */

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
      const char *values = r == rank ? own : s->received + (size_t)((r < rank ? r : r - 1) * s->stride) * size;
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
  const char *what = exchange_kind_name(kind);
  int n = 0;
  for (int k = 0; k < n_segments; k++) {
    const struct segment *s = &g->segments[k];
    const int64_t size = (int64_t)dtype_bytes(s->part->dtype);
    char *own, *theirs;
    const int64_t mine = segment_of(s, rank, world, &own);
    for (int r = 0; r < world; r++) {
      if (r == rank) continue;
      const int64_t of_r = segment_of(s, r, world, &theirs);
      char *slot = s->received + (r < rank ? r : r - 1) * s->stride * size;
      const int64_t in = reducing ? mine : of_r, out = reducing ? of_r : mine;
      if (in > 0 && !receive(g, &n, reducing ? slot : theirs, in * size, r, what, e)) return false;
      if (out > 0 && !send(g, &n, reducing ? theirs : own, out * size, r, what, e)) return false;
    }
  }
  if (!complete(g, n, what, e)) return false;
  for (int k = 0; reducing && k < n_segments; k++) sum_segment(g, &g->segments[k]);
  return true;
}

static bool carry_out(struct engine *g, const struct exchange_order *o, struct error *e) {
  const int world = g->comm->world;
  struct round_place at = {0};
  bool good = meet(g, o, e);
  for (int n; good && (n = round_next(g->segments, o, &at, world - 1, world, g->buffer, PIECE_BYTES)) > 0;)
    good = round_of(g, o->kind, n, e);
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
  meeting_close(&g->meeting);
  free(g->orders);
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
  pthread_cond_destroy(&g->begun_one);
  pthread_cond_destroy(&g->done_one);
  pthread_mutex_destroy(&g->lock);
  discard(g);
}

static void *mpi_open(struct comm *c, const struct comm_device *device, int most, struct error *e) {
  (void)device; /* its memory is the host's */
  struct engine *g = calloc(1, sizeof *g);
  if (!comm_agree(c, g != NULL || error_set(e, ERROR_SYSTEM, "out of memory for exchanges"), e)) {
    free(g);
    return NULL;
  }
  g->comm = c;
  g->most = most;
  g->meeting.ranks = MPI_COMM_NULL;
  g->orders = calloc((size_t)most, sizeof *g->orders);
  g->values = calloc((size_t)c->world, sizeof *g->values);
  if (posix_memalign((void **)&g->buffer, ALIGNMENT, BUFFER_BYTES) != 0) g->buffer = NULL;
  bool good = (g->orders && g->values && g->buffer) || error_set(e, ERROR_SYSTEM, "out of memory for the buffers of exchanges");
  good = comm_agree(c, good, e) && meeting_open(&g->meeting, c, 2 * ROUND_SEGMENTS * (c->world - 1), e);
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
    discard(g);
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
  atomic_store(&g->meeting.wanted, true);
  while (g->done < ticket && !g->failed) pthread_cond_wait(&g->done_one, &g->lock);
  atomic_store(&g->meeting.wanted, false);
  const bool good = g->done >= ticket;
  if (!good && e) *e = g->error;
  pthread_mutex_unlock(&g->lock);
  return good;
}

static void mpi_describe(const void *state, char *text, int size) {
  (void)state;
  snprintf(text, (size_t)size, "MPI, through host memory");
}

const struct comm_transport comm_transport_mpi = {
    .open = mpi_open, .begin = mpi_begin, .done = mpi_done, .finish = mpi_finish, .describe = mpi_describe, .close = mpi_close};
