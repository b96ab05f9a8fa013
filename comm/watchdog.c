/* The watch thread: finds a silent rank or an operation beyond its limit, says
 * so in one line, and ends the job.
 *
 * It compares clocks and never calls MPI.  Rank 0 hears every rank and judges
 * for all; the others judge rank 0's silence, in turns by rank that leave the
 * launcher time to end the job, so that one line is printed: the lowest living
 * rank's.  Where the launcher takes longer more ranks may say the same.  A limit is held against the rank that holds the others up,
 * not against those that wait for it: they may wait for as long as it may save.
 */
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/internal.h"

#define STOPPED_S 1.0     /* a look that comes this late: this process itself was stopped */
#define CLOSE_LIMIT_S 60. /* from the last barrier to the end of MPI_Finalize */
#define REPORT_BYTES 1024

double comm_tick(const struct comm_limits *limits) {
  double tick = limits->heartbeat_s / 8;
  return tick < 0.02 ? 0.02 : tick > 0.5 ? 0.5 : tick;
}

void comm_watch_wait(struct watch *w, double seconds) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  int64_t nanoseconds = until.tv_nsec + (int64_t)(seconds * 1e9);
  until.tv_sec += (time_t)(nanoseconds / 1000000000);
  until.tv_nsec = (long)(nanoseconds % 1000000000);
  pthread_cond_timedwait(&w->wake, &w->lock, &until);
}

/* One rank as the judgement sees it. */
struct place {
  int rank;
  const char *operation;
  int64_t update;
  double operation_s, limit_s;
  bool waiting;
};

static double limit_of(const struct watch *w, enum comm_phase phase) {
  const struct comm_limits *l = &w->limits;
  if (!w->watching_peers) return CLOSE_LIMIT_S;
  switch (phase) {
    case COMM_START: return l->start_s;
    case COMM_UPDATE: return l->update_s;
    case COMM_SAVE: return l->save_s;
    case COMM_UNTIMED: return INFINITY;
    case COMM_FINISH: break;
  }
  return fmax(l->start_s, fmax(l->update_s, l->save_s)); /* another rank may be in any of these */
}

static struct place own_place(const struct comm *c, double now) {
  const struct watch *w = &c->watch;
  return (struct place){.rank = c->rank,
                        .operation = w->operation,
                        .update = w->update,
                        .operation_s = now - w->operation_began,
                        .limit_s = limit_of(w, w->phase),
                        .waiting = atomic_load(&c->waiting)};
}

static struct place peer_place(const struct watch *w, const struct peer *p, double now) {
  double silent_s = now - p->heard;
  if (!p->known)
    return (struct place){
        .rank = p->rank, .operation = "start", .update = -1, .operation_s = silent_s, .limit_s = limit_of(w, COMM_START)};
  return (struct place){.rank = p->rank,
                        .operation = p->beat.operation,
                        .update = p->beat.update,
                        .operation_s = p->beat.operation_s + silent_s,
                        .limit_s = limit_of(w, (enum comm_phase)p->beat.phase),
                        .waiting = p->beat.waiting};
}

static bool same_place(const struct place *a, const struct place *b) {
  return a->update == b->update && a->waiting == b->waiting && strcmp(a->operation, b->operation) == 0;
}

static size_t append(char *text, size_t used, const char *format, ...) __attribute__((format(printf, 3, 4)));
static size_t append(char *text, size_t used, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(text + used, REPORT_BYTES - used, format, arguments);
  va_end(arguments);
  if (length < 0) return used;
  return used + (size_t)length < REPORT_BYTES ? used + (size_t)length : REPORT_BYTES - 1;
}

static size_t append_place(char *text, size_t used, const struct place *p) {
  used = append(text, used, "%sin '%s'", p->waiting ? "waiting " : "", p->operation);
  return p->update < 0 ? used : append(text, used, " of update %lld", (long long)p->update);
}

/* A peer that has said nothing for too long. */
static bool find_silence(const struct comm *c, double now, char *text) {
  const struct watch *w = &c->watch;
  /* Judge nobody while our own ears may be shut. */
  if (!w->watching_peers || now - w->heartbeat_alive > w->limits.heartbeat_s / 2) return false;
  const int turn = c->rank == 0 ? 0 : c->rank - 1 < COMM_TURNS ? c->rank - 1 : COMM_TURNS;
  const struct peer *first = NULL;
  int more = 0;
  for (int i = 0; i < w->n_peers; i++) {
    const struct peer *p = &w->peers[i];
    if (p->left || now - p->heard <= w->limits.heartbeat_s + COMM_TURN_S * turn) continue;
    if (first)
      more++;
    else
      first = p;
  }
  if (!first) return false;
  struct place place = peer_place(w, first, now);
  place.waiting = false; /* for whom, if so, it does not say */
  size_t used = append(text, 0, "rank %d has been silent for %.1f s ", first->rank, now - first->heard);
  used = append_place(text, used, &place);
  if (more) append(text, used, ", and %d more rank%s with it", more, more > 1 ? "s" : "");
  return true;
}

/* "; elsewhere: 3 ranks waiting in 'x' of update 7, rank 2 in 'y' of update 7", or
 * ", as have all other ranks". */
static void append_elsewhere(char *text, size_t used, const struct place *places, int n, const struct place *culprit) {
  const char *lead = "; elsewhere: ";
  int groups = 0;
  for (int i = 0; i < n; i++) {
    bool seen = same_place(&places[i], culprit);
    for (int j = 0; j < i && !seen; j++) seen = same_place(&places[i], &places[j]);
    if (seen) continue;
    if (++groups > 6) {
      append(text, used, ", ...");
      return;
    }
    int count = 0;
    for (int j = i; j < n; j++) count += same_place(&places[i], &places[j]);
    if (count == 1)
      used = append(text, used, "%srank %d ", lead, places[i].rank);
    else
      used = append(text, used, "%s%d ranks ", lead, count);
    used = append_place(text, used, &places[i]);
    lead = ", ";
  }
  if (groups == 0 && n > 1) append(text, used, ", as have all other ranks");
}

/* The rank that holds the others up: among those at the lowest update one that waits for nobody
 * and is furthest beyond its limit, or, where all wait, the one that came last. */
static const struct place *find_laggard(const struct place *places, int n) {
  int64_t update = places[0].update;
  for (int i = 1; i < n; i++)
    if (places[i].update < update) update = places[i].update;
  const struct place *busy = NULL, *waiting = NULL;
  for (int i = 0; i < n; i++) {
    const struct place *p = &places[i];
    if (p->update != update) continue;
    if (p->waiting) {
      if (!waiting || p->operation_s < waiting->operation_s) waiting = p;
    } else {
      if (!busy || p->operation_s - p->limit_s > busy->operation_s - busy->limit_s) busy = p;
    }
  }
  return busy ? busy : waiting;
}

/* An operation beyond its limit, on the rank that holds the others up. */
static bool find_overrun(struct comm *c, double now, char *text) {
  struct watch *w = &c->watch;
  struct place *places = w->places;
  int n = 0;
  places[n++] = own_place(c, now);
  if (w->watching_peers && w->n_peers) {
    if (c->rank != 0 && w->peers[0].known) return false; /* rank 0 judges, on the whole picture */
    if (c->rank == 0)
      for (int i = 0; i < w->n_peers; i++) places[n++] = peer_place(w, &w->peers[i], now);
  }
  const struct place *laggard = find_laggard(places, n);
  if (laggard->operation_s <= laggard->limit_s) {
    w->overrun = false;
    return false;
  }
  /* What others said may be as old as heartbeat_s (or they count as silent): let it be said anew. */
  if (!w->overrun) w->overrun_seen = now;
  w->overrun = true;
  if (n > 1 && now - w->overrun_seen < w->limits.heartbeat_s) return false;
  size_t used = append(text, 0, "rank %d has been ", laggard->rank);
  used = append_place(text, used, laggard);
  used = append(text, used, " for %.1f s (limit %g s)", laggard->operation_s, laggard->limit_s);
  append_elsewhere(text, used, places, n, laggard);
  return true;
}

/* An exchange of this rank's device that takes longer than its phase allows.  All ranks that take part
 * may see it: they speak in turns, too. */
static bool find_slow_exchange(const struct comm *c, double now, char *text) {
  const struct watch *w = &c->watch;
  const struct place own = own_place(c, now);
  if (!w->exchange || now - w->exchange_since <= own.limit_s + COMM_TURN_S * (c->rank < COMM_TURNS ? c->rank : COMM_TURNS)) return false;
  size_t used = append(text, 0, "rank %d has had its exchange %lld under way for %.1f s (limit %g s) ", c->rank, (long long)w->exchange,
                       now - w->exchange_since, own.limit_s);
  used = append_place(text, used, &own);
  append(text, used, w->exchange_computed ? ", which other ranks or the links between them hold up" : ", and its device has not come to it");
  return true;
}

static bool find_fault(struct comm *c, double now, char *text) {
  const struct watch *w = &c->watch;
  if (w->heartbeat_failure[0]) {
    append(text, 0, "heartbeats failed in MPI: %s", w->heartbeat_failure);
    return true;
  }
  if (w->heartbeats && now - w->heartbeat_alive > w->limits.heartbeat_s) {
    struct place place = own_place(c, now);
    size_t used = append(text, 0, "the heartbeat thread of rank %d has been held up inside MPI for %.1f s ", c->rank,
                         now - w->heartbeat_alive);
    append_place(text, used, &place);
    return true;
  }
  return find_silence(c, now, text) || find_slow_exchange(c, now, text) || find_overrun(c, now, text);
}

/* This process was stopped (a debugger, a suspended job) and goes on: the time is nobody's fault. */
static void forgive(struct watch *w, double seconds) {
  w->operation_began += seconds;
  w->heartbeat_alive += seconds;
  w->exchange_since += seconds;
  for (int i = 0; i < w->n_peers; i++) w->peers[i].heard += seconds;
}

static void *watch_run(void *argument) {
  struct comm *c = argument;
  struct watch *w = &c->watch;
  char text[REPORT_BYTES];
  pthread_mutex_lock(&w->lock);
  double last = clock_seconds();
  while (!w->stop_watch) {
    double tick = comm_tick(&w->limits);
    comm_watch_wait(w, tick);
    double now = clock_seconds();
    if (now - last > tick + STOPPED_S) forgive(w, now - last - tick);
    last = now;
    if (w->stop_watch || !find_fault(c, now, text)) continue;
    pthread_mutex_unlock(&w->lock);
    log_error("%s; ending the job", text);
    comm_abort(c, ERROR_COMMUNICATION);
  }
  pthread_mutex_unlock(&w->lock);
  return NULL;
}

void comm_enter(struct comm *c, enum comm_phase phase, const char *operation, int64_t update) {
  struct watch *w = &c->watch;
  double now = clock_seconds();
  pthread_mutex_lock(&w->lock);
  w->phase = phase;
  w->operation = operation;
  w->update = update;
  w->operation_began = now;
  pthread_mutex_unlock(&w->lock);
}

void comm_watch_exchange(struct comm *c, int64_t ticket, bool computed) {
  struct watch *w = &c->watch;
  pthread_mutex_lock(&w->lock);
  if (w->exchange != ticket) w->exchange_since = clock_seconds();
  w->exchange = ticket;
  w->exchange_computed = computed;
  pthread_mutex_unlock(&w->lock);
}

void comm_place_text(struct comm *c, char text[COMM_PLACE_TEXT]) {
  char all[REPORT_BYTES];
  pthread_mutex_lock(&c->watch.lock);
  const struct place own = own_place(c, clock_seconds());
  append_place(all, 0, &own);
  pthread_mutex_unlock(&c->watch.lock);
  snprintf(text, COMM_PLACE_TEXT, "%.*s", COMM_PLACE_TEXT - 1, all);
}

bool comm_watch_prepare(struct comm *c, struct error *e) {
  struct watch *w = &c->watch;
  pthread_condattr_t monotonic;
  if (pthread_condattr_init(&monotonic) != 0 || pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC) != 0 ||
      pthread_cond_init(&w->wake, &monotonic) != 0 || pthread_mutex_init(&w->lock, NULL) != 0)
    return error_set(e, ERROR_SYSTEM, "the watchdog's lock cannot be made");
  pthread_condattr_destroy(&monotonic);
  w->prepared = true;
  w->watching_peers = true;
  w->phase = COMM_START;
  w->operation = "start";
  w->update = -1;
  w->operation_began = clock_seconds();
  w->n_peers = c->world == 1 ? 0 : c->rank == 0 ? c->world - 1 : 1;
  w->peers = calloc((size_t)w->n_peers + 1, sizeof *w->peers);
  w->places = calloc((size_t)c->world, sizeof *w->places);
  if (!w->peers || !w->places) return error_set(e, ERROR_SYSTEM, "out of memory for the watch over %d ranks", c->world);
  for (int i = 0; i < w->n_peers; i++) w->peers[i].rank = c->rank == 0 ? i + 1 : 0;
  return true;
}

void comm_watch_discard(struct comm *c) {
  if (!c->watch.prepared) return;
  free(c->watch.peers);
  free(c->watch.places);
  pthread_cond_destroy(&c->watch.wake);
  pthread_mutex_destroy(&c->watch.lock);
}

bool comm_start_thread(pthread_t *thread, void *(*body)(void *), void *argument, const char *name, struct error *e) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int result = pthread_create(thread, NULL, body, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (result == 0) return true;
  return error_set(e, ERROR_SYSTEM, "the %s cannot be made: %s", name, strerror(result));
}

bool comm_watch(struct comm *c, const struct comm_limits *limits, struct error *e) {
  struct watch *w = &c->watch;
  const double all[] = {limits->start_s, limits->update_s, limits->save_s, limits->heartbeat_s};
  for (int i = 0; i < 4; i++)
    if (!(all[i] > 0) || all[i] > 1e9)
      return error_set(e, ERROR_CONFIG, "watchdog limits must be positive numbers of seconds, not %g", all[i]);
  double now = clock_seconds();
  pthread_mutex_lock(&w->lock);
  bool started = w->started;
  w->limits = *limits;
  w->started = true;
  if (!started)
    for (int i = 0; i < w->n_peers; i++) w->peers[i].heard = now;
  pthread_cond_broadcast(&w->wake);
  pthread_mutex_unlock(&w->lock);
  if (started) return true;

  if (!comm_start_thread(&w->watch_thread, watch_run, c, "watchdog's thread", e)) {
    w->started = false;
    return false;
  }
  bool good = true;
  if (w->n_peers > 0) {
    pthread_mutex_lock(&w->lock);
    w->heartbeat_alive = now;
    good = comm_start_thread(&w->heartbeat_thread, comm_heartbeat_run, c, "watchdog's thread", e);
    w->heartbeats = good;
    pthread_mutex_unlock(&w->lock);
  }
  if (good) comm_start_ended();
  return good;
}

void comm_watch_end_heartbeats(struct comm *c) {
  struct watch *w = &c->watch;
  if (!w->started) return;
  pthread_mutex_lock(&w->lock);
  w->watching_peers = false;
  w->stop_heartbeat = true;
  w->operation_began = clock_seconds();
  pthread_cond_broadcast(&w->wake);
  pthread_mutex_unlock(&w->lock);
  if (w->heartbeats) pthread_join(w->heartbeat_thread, NULL);
  pthread_mutex_lock(&w->lock);
  w->heartbeats = false;
  pthread_mutex_unlock(&w->lock);
}

void comm_watch_end(struct comm *c) {
  struct watch *w = &c->watch;
  if (!w->started) return;
  pthread_mutex_lock(&w->lock);
  w->stop_watch = true;
  pthread_cond_broadcast(&w->wake);
  pthread_mutex_unlock(&w->lock);
  pthread_join(w->watch_thread, NULL);
  w->started = false;
}
