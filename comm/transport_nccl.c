/* Exchanges between devices: a thread that hands them to the device's link (kernels/link.h).
 *
 * `begin` marks the device's operations so far and leaves the rest to the thread: it meets
 * the other ranks (meet.h), so that nothing is handed to NCCL that another rank does not
 * begin, then hands over the exchange in rounds:
 *
 *   reduce-scatter: the others' values of this rank's rows arrive in one half of the staging
 *     memory while those in the other half are summed in rank order;
 *   all-gather: rows are copied to all, in place.
 *
 * `finish` waits until the exchange was handed over, which takes as long as the others' hosts
 * take to begin it, and has the device's later operations come after it.  The thread looks at
 * what is under way until it is done, and tells the watchdog (internal.h), which ends the job
 * when it takes too long.
 *
 * In a world of one, which only tests have, this rank sends to itself. */
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/meet.h"
#include "comm/nccl_fabric.h"
#include "comm/nccl_known.h"
#include "comm/rounds.h"
#include "kernels/link.h"

enum { LOOK_NS = 500000 };           /* between two looks at what is under way */
enum { SPINS = 1000, NAP_NS = 20000 }; /* while the library launches something */
enum { STOP_NS = 20000000 };          /* from the word to stop to the library's abort */
enum { TELL_S = 5 };                  /* for the caller's thread to take a failure up */

struct engine {
  struct comm *comm;
  struct device *device;
  const struct links *links;
  struct link *link; /* the thread's to make and to close */
  struct meeting meeting;
  char id[LINK_ID_BYTES], description[384];
  int copies;     /* of a share, that are received */
  char *half[2];  /* of the staging memory */
  int64_t half_bytes;
  int next_half;
  struct segment segments[ROUND_SEGMENTS];
  struct link_transfer *transfers; /* [ROUND_SEGMENTS * world] */
  struct link_sum sums[ROUND_SEGMENTS];
  struct link_gather gathers[ROUND_SEGMENTS];
  int64_t *begins; /* [ROUND_SEGMENTS * (world + 1)] */
  int64_t done;    /* tickets */
  atomic_bool aborting; /* the communicator goes away: no more calls on it */

  pthread_t thread;
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t thread_wake, caller_wake;
  int most;
  struct exchange_order *orders; /* [most], order of ticket t at t % most */
  int64_t begun, handed;         /* tickets */
  bool joined, leave, failed, told, abandoned; /* abandoned: its thread may not end */
  struct error error;
};

/* Of the link, twice as many as exchanges that are not finished: one that is finished may still be under way on the device. */
static int slots(const struct engine *g) { return 2 * g->most; }
static int slot_of(const struct engine *g, int64_t ticket) { return (int)(ticket % slots(g)); }
static struct exchange_order *order_of(const struct engine *g, int64_t ticket) { return &g->orders[ticket % g->most]; }

static void nap(long nanoseconds) {
  const struct timespec t = {.tv_nsec = nanoseconds};
  nanosleep(&t, NULL);
}

/* The process is ending, and the link with it: this thread's part is over. */
static void stop_where_aborting(const struct engine *g) {
  while (atomic_load(&g->aborting)) nap(STOP_NS);
}

/* ---- what is under way ------------------------------------------------------------- */

/* Exchanges that are done, and whether the library has met an error meanwhile. */
static bool look(struct engine *g, int64_t handed, struct error *e) {
  stop_where_aborting(g);
  if (g->links->state(g->link, e) == LINK_FAILED) return false;
  while (g->done < handed) {
    bool computed = false, done = false;
    if (!g->links->look(g->link, slot_of(g, g->done + 1), &computed, &done, e)) return false;
    if (!done) {
      comm_watch_exchange(g->comm, g->done + 1, computed);
      return true;
    }
    g->done++;
    comm_watch_exchange(g->comm, 0, false);
  }
  return true;
}

/* Until the library has launched what it was given. */
static bool launched(struct engine *g, struct error *e) {
  for (int looks = 0;; looks++) {
    stop_where_aborting(g);
    const enum link_state s = g->links->state(g->link, e);
    if (s != LINK_BUSY) return s == LINK_IDLE;
    if (looks < SPINS)
      sched_yield();
    else
      nap(NAP_NS);
  }
}

/* ---- handing an exchange over ---------------------------------------------------------- */

/* Where the others' values of a segment stand; in a world of one, this rank's own. */
static char *received_from(const struct engine *g, const struct segment *s, int rank) {
  const int own = g->comm->rank, place = g->comm->world == 1 || rank < own ? rank : rank - 1;
  return s->received + (size_t)(place * s->stride) * dtype_bytes(s->part->dtype);
}

static bool sum_round(struct engine *g, int n_segments, struct error *e) {
  const int world = g->comm->world, rank = g->comm->rank, half = g->next_half;
  int n = 0;
  for (int k = 0; k < n_segments; k++) {
    const struct segment *s = &g->segments[k];
    char *own, *theirs;
    const int64_t mine = segment_of(s, rank, world, &own);
    g->sums[k] = (struct link_sum){own, s->received, mine, s->stride, s->part->dtype};
    for (int r = 0; r < world; r++) {
      if (r == rank && world > 1) continue;
      const int64_t of_r = segment_of(s, r, world, &theirs);
      if (mine > 0 || of_r > 0)
        g->transfers[n++] = (struct link_transfer){r, s->part->dtype, theirs, received_from(g, s, r), of_r, mine};
    }
  }
  g->next_half = !half;
  return g->links->transfer(g->link, half, g->transfers, n, e) && launched(g, e) && g->links->sum(g->link, half, g->sums, n_segments, e);
}

static bool sum_all(struct engine *g, const struct exchange_order *o, struct error *e) {
  struct round_place at = {0};
  bool good = true;
  for (int n; good && (n = round_next(g->segments, o, &at, g->copies, g->comm->world, g->half[g->next_half], g->half_bytes)) > 0;)
    good = sum_round(g, n, e);
  return good;
}

static bool copy_all(struct engine *g, const struct exchange_order *o, struct error *e) {
  const int world = g->comm->world;
  bool good = true;
  for (int from = 0; good && from < o->n; from += ROUND_SEGMENTS) {
    const int n = o->n - from < ROUND_SEGMENTS ? o->n - from : ROUND_SEGMENTS;
    for (int k = 0; k < n; k++) {
      const struct comm_part *p = &o->parts[from + k];
      int64_t *begin = g->begins + (size_t)k * (size_t)(world + 1);
      for (int r = 0; r <= world; r++) begin[r] = share_begin(p, r, world);
      g->gathers[k] = (struct link_gather){p->data, p->dtype, begin};
    }
    good = g->links->gather(g->link, g->gathers, n, e) && launched(g, e);
  }
  return good;
}

/* Until all ranks have come; what is under way is looked at meanwhile. */
static bool meet(struct engine *g, const struct exchange_order *o, struct error *e) {
  if (!meet_begin(&g->meeting, o, e)) return false;
  for (int looks = 0;; looks++) {
    const enum meet_state s = meet_look(&g->meeting, o, e);
    if (s != MEET_WAITS) return s == MEET_MET;
    if (!look(g, o->ticket - 1, e)) return false;
    meet_rest(&g->meeting, false, looks);
  }
}

static bool hand_over(struct engine *g, const struct exchange_order *o, struct error *e) {
  const int slot = slot_of(g, o->ticket);
  if (!meet(g, o, e)) return false;
  if (g->done == o->ticket - 1) comm_watch_exchange(g->comm, o->ticket, false);
  return g->links->begin(g->link, slot, e) && (o->kind == EXCHANGE_REDUCE_SCATTER ? sum_all(g, o, e) : copy_all(g, o, e)) &&
         g->links->end(g->link, slot, e);
}

/* ---- the thread --------------------------------------------------------------------------- */

/* The caller's thread takes a failure up in finish; where it does not come there, because it
 * waits for the device, this thread ends the job. */
static void fail(struct engine *g, const struct error *e) {
  struct timespec until;
  char place[COMM_PLACE_TEXT];
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += TELL_S;
  comm_place_text(g->comm, place);
  pthread_mutex_lock(&g->lock);
  g->failed = true;
  g->error = *e;
  if (e->code != ERROR_DEVICE) g->error.code = ERROR_COMMUNICATION;
  error_context(&g->error, "rank %d %s", g->comm->rank, place);
  pthread_cond_broadcast(&g->caller_wake);
  while (!g->told && !g->leave && pthread_cond_timedwait(&g->thread_wake, &g->lock, &until) != ETIMEDOUT) {
  }
  const bool told = g->told, leave = g->leave;
  pthread_mutex_unlock(&g->lock);
  if (told) return;
  log_failure(&g->error);
  if (leave) return; /* every exchange was finished by the caller */
  comm_abort(g->comm, g->error.code);
}

static void abort_link(void *argument) {
  struct engine *g = argument;
  atomic_store(&g->aborting, true);
  nap(STOP_NS);
  g->links->abort(g->link);
}

static bool join_world(struct engine *g, struct error *e) {
  g->link = g->links->open(g->device, g->id, g->comm->rank, g->comm->world, slots(g), e);
  if (!g->link) return false;
  comm_abort_first(abort_link, g);
  return launched(g, e);
}

/* With the lock held: until there is something to hand over or to look at. */
static void wait_for_work(struct engine *g) {
  struct timespec until;
  if (g->handed < g->begun) return;
  if (g->done == g->handed) {
    if (!g->leave) pthread_cond_wait(&g->thread_wake, &g->lock);
    return;
  }
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += LOOK_NS;
  if (until.tv_nsec >= 1000000000) {
    until.tv_nsec -= 1000000000;
    until.tv_sec++;
  }
  pthread_cond_timedwait(&g->thread_wake, &g->lock, &until);
}

static void carry_out(struct engine *g, struct error *e) {
  bool good = true;
  pthread_mutex_lock(&g->lock);
  g->joined = true;
  pthread_cond_broadcast(&g->caller_wake);
  while (good && (!g->leave || g->done < g->begun)) {
    wait_for_work(g);
    const int64_t handed = g->handed;
    const bool more = handed < g->begun;
    const struct exchange_order order = *order_of(g, handed + 1);
    pthread_mutex_unlock(&g->lock);
    good = (!more || hand_over(g, &order, e)) && look(g, handed + more, e);
    pthread_mutex_lock(&g->lock);
    if (!good) break;
    g->handed = handed + more;
    if (more) pthread_cond_broadcast(&g->caller_wake);
  }
  pthread_mutex_unlock(&g->lock);
  if (!good) fail(g, e);
}

static void *engine_run(void *argument) {
  struct engine *g = argument;
  struct error e;
  if (join_world(g, &e)) {
    carry_out(g, &e);
  } else {
    pthread_mutex_lock(&g->lock);
    g->failed = g->told = true;
    g->error = e;
    pthread_cond_broadcast(&g->caller_wake);
    pthread_mutex_unlock(&g->lock);
  }
  comm_abort_first(NULL, NULL);
  if (g->link) g->links->close(g->link, !g->failed);
  return NULL;
}

/* ---- opening ---------------------------------------------------------------------------------- */

/* The library, the way, and what is known to go wrong with it. */
static bool describe(struct engine *g, char (*all)[LINK_NAME], const struct gpu_fabric *fabrics, struct error *e) {
  const struct nccl_known_machine here = nccl_known_here();
  const char *wrong[NCCL_KNOWN_MOST], *multicast = getenv("NCCL_NVLS_ENABLE");
  const struct nccl_fabric fabric = nccl_fabric(fabrics, g->comm->world, "the GPU of rank ");
  char version[64];
  if (!g->links->version(version, sizeof version, e)) return false;
  for (int i = nccl_known(version, &here, wrong) - 1; i >= 0 && g->comm->rank == 0; i--) log_warning("%s", wrong[i]);
  for (int i = 0; i < fabric.n && g->comm->rank == 0; i++) log_warning("%s", fabric.warning[i]);
  snprintf(g->description, sizeof g->description, "%s %s, sums in rank order; rank %d's GPU reaches %d of %d others of its host directly; %s; NCCL_NVLS_ENABLE %s",
           g->links->name, version, g->comm->rank, g->links->reaches(g->device, all, g->comm->world), g->comm->local_world - 1,
           fabric.summary, multicast ? multicast : "not set");
  return true;
}

/* Two ranks on one device would wait for each other inside NCCL. */
static bool own_devices(struct engine *g, struct error *e) {
  const int world = g->comm->world, rank = g->comm->rank;
  char own[LINK_NAME] = "", (*all)[LINK_NAME] = calloc((size_t)world, LINK_NAME);
  struct gpu_fabric fabric, *fabrics = calloc((size_t)world, sizeof *fabrics);
  g->links->identity(g->device, own);
  g->links->fabric(g->device, &fabric);
  bool good = comm_agree(g->comm, (all && fabrics) || error_set(e, ERROR_SYSTEM, "out of memory"), e) &&
              comm_gather_all(g->comm, all, own, LINK_NAME, e) && comm_gather_all(g->comm, fabrics, &fabric, sizeof fabric, e);
  if (good)
    for (int r = 0; good && r < world; r++)
      if (r != rank && strcmp(all[r], own) == 0) {
        good = error_set(e, ERROR_DEVICE, "ranks %d and %d have one GPU (%s)", r < rank ? r : rank, r < rank ? rank : r, own);
        error_hint(e, "start one rank a GPU, and let each see all of its host's GPUs (CUDA_VISIBLE_DEVICES)");
      }
  good = comm_agree(g->comm, good && describe(g, all, fabrics, e), e);
  free(all);
  free(fabrics);
  return good;
}

static bool share_id(struct engine *g, struct error *e) {
  const bool made = g->comm->rank != 0 || g->links->make_id(g->id, e);
  return comm_agree(g->comm, made, e) && comm_broadcast(g->comm, g->id, sizeof g->id, 0, e);
}

static bool allocate(struct engine *g, const struct comm_device *device, struct error *e) {
  const size_t world = (size_t)g->comm->world;
  g->half_bytes = device->staging_bytes / 2 / ROUND_ALIGNMENT * ROUND_ALIGNMENT;
  g->half[0] = device->staging;
  g->half[1] = (char *)device->staging + g->half_bytes;
  g->orders = calloc((size_t)g->most, sizeof *g->orders);
  g->transfers = calloc(ROUND_SEGMENTS * world, sizeof *g->transfers);
  g->begins = calloc(ROUND_SEGMENTS * (world + 1), sizeof *g->begins);
  if (!g->orders || !g->transfers || !g->begins) return error_set(e, ERROR_SYSTEM, "out of memory for the lists of exchanges");
  if (g->half_bytes < (int64_t)ROUND_ALIGNMENT * g->copies)
    return error_set(e, ERROR_INTERNAL, "%" PRId64 " bytes of staging memory for %d ranks", device->staging_bytes, g->comm->world);
  return true;
}

static void discard(struct engine *g) {
  meeting_close(&g->meeting);
  free(g->orders);
  free(g->transfers);
  free(g->begins);
  free(g);
}

static void leave(struct engine *g) {
  pthread_mutex_lock(&g->lock);
  g->leave = true;
  pthread_cond_broadcast(&g->thread_wake);
  pthread_mutex_unlock(&g->lock);
  pthread_join(g->thread, NULL);
  pthread_cond_destroy(&g->thread_wake);
  pthread_cond_destroy(&g->caller_wake);
  pthread_mutex_destroy(&g->lock);
}

static bool start(struct engine *g, struct error *e) {
  pthread_mutex_init(&g->lock, NULL);
  pthread_cond_init(&g->thread_wake, NULL);
  pthread_cond_init(&g->caller_wake, NULL);
  const bool started = comm_start_thread(&g->thread, engine_run, g, "exchanges' thread", e);
  if (!comm_agree(g->comm, started, e)) {
    g->abandoned = started; /* a thread that waits for the others: the process ends */
    return false;
  }
  pthread_mutex_lock(&g->lock);
  while (!g->joined && !g->failed) pthread_cond_wait(&g->caller_wake, &g->lock);
  const bool joined = g->joined;
  if (!joined && e) *e = g->error;
  pthread_mutex_unlock(&g->lock);
  if (comm_agree(g->comm, joined, e)) return true;
  leave(g);
  return false;
}

static void *nccl_open(struct comm *c, const struct comm_device *device, int most, struct error *e) {
  struct engine *g = calloc(1, sizeof *g);
  if (!comm_agree(c, g != NULL || error_set(e, ERROR_SYSTEM, "out of memory for exchanges"), e)) {
    free(g);
    return NULL;
  }
  g->comm = c;
  g->device = device->device;
  g->links = device->device->k->links;
  g->most = most;
  g->copies = c->world > 1 ? c->world - 1 : 1;
  g->meeting.ranks = MPI_COMM_NULL;
  if (comm_agree(c, allocate(g, device, e), e) && meeting_open(&g->meeting, c, 2 * (c->world - 1), e) && own_devices(g, e) &&
      share_id(g, e) && start(g, e))
    return g;
  if (!g->abandoned) discard(g);
  return NULL;
}

static void nccl_close(void *state) {
  struct engine *g = state;
  leave(g);
  discard(g);
}

/* ---- the caller's side ------------------------------------------------------------------------- */

static void nccl_begin(void *state, const struct exchange_order *order) {
  struct engine *g = state;
  g->links->ready(g->link, slot_of(g, order->ticket));
  pthread_mutex_lock(&g->lock);
  *order_of(g, order->ticket) = *order;
  g->begun = order->ticket;
  pthread_cond_signal(&g->thread_wake);
  pthread_mutex_unlock(&g->lock);
}

static bool nccl_done(void *state, int64_t ticket) {
  struct engine *g = state;
  pthread_mutex_lock(&g->lock);
  const bool done = g->failed || g->handed >= ticket;
  pthread_mutex_unlock(&g->lock);
  return done;
}

static bool nccl_finish(void *state, int64_t ticket, struct error *e) {
  struct engine *g = state;
  pthread_mutex_lock(&g->lock);
  atomic_store(&g->meeting.wanted, true);
  while (g->handed < ticket && !g->failed) pthread_cond_wait(&g->caller_wake, &g->lock);
  atomic_store(&g->meeting.wanted, false);
  const bool good = !g->failed;
  if (!good) {
    if (e) *e = g->error;
    g->told = true;
    pthread_cond_broadcast(&g->thread_wake);
  }
  pthread_mutex_unlock(&g->lock);
  if (good) g->links->follow(g->link, slot_of(g, ticket));
  return good;
}

static double nccl_waited(void *state) {
  const struct engine *g = state;
  return g->links->waited(g->link);
}

static void nccl_describe(const void *state, char *text, int size) {
  const struct engine *g = state;
  snprintf(text, (size_t)size, "%s", g->description);
}

const struct comm_transport comm_transport_nccl = {.open = nccl_open,
                                                   .begin = nccl_begin,
                                                   .done = nccl_done,
                                                   .finish = nccl_finish,
                                                   .waited = nccl_waited,
                                                   .describe = nccl_describe,
                                                   .close = nccl_close};
