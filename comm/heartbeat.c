/* Heartbeats: every rank tells rank 0 where it is, and rank 0 answers with
 * where it is itself.  A star costs rank 0 two small messages per rank and
 * tick and gives it the whole picture for its report.
 *
 * The thread only ever calls MPI_Isend, MPI_Irecv and MPI_Test*, so it goes
 * on while the caller's thread waits inside a collective.  Should MPI hold it
 * up all the same, the watch thread sees `heartbeat_alive` grow old.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "comm/internal.h"

#define BEAT_TAG 1
#define LEAVING_POLL_S 0.002

/* One line of talk with one peer. */
struct line {
  MPI_Request send, receive;
  struct beat sending, receiving;
  bool sent_last; /* the leaving beat is on its way */
};

static struct beat beat_of(const struct comm *c, double now) {
  const struct watch *w = &c->watch;
  struct beat b = {.update = w->update,
                   .operation_s = now - w->operation_began,
                   .phase = (int32_t)w->phase,
                   .leaving = w->stop_heartbeat,
                   .waiting = atomic_load(&c->waiting)};
  snprintf(b.operation, sizeof b.operation, "%s", w->operation);
  return b;
}

/* Sends the next beat unless the last one is still under way. */
static int send_beat(struct comm *c, const struct peer *peer, struct line *line, const struct beat *beat) {
  int done = 1;
  int result = MPI_Test(&line->send, &done, MPI_STATUS_IGNORE); /* a null request is done */
  if (result != MPI_SUCCESS || !done || line->sent_last) return result;
  line->sending = *beat;
  line->sent_last = beat->leaving;
  return MPI_Isend(&line->sending, (int)sizeof line->sending, MPI_BYTE, peer->rank, BEAT_TAG, c->beats, &line->send);
}

/* Takes in all beats that have come; *pending = the line is not yet at rest. */
static int receive_beats(struct comm *c, struct peer *peer, struct line *line, bool *pending) {
  for (;;) {
    if (line->receive == MPI_REQUEST_NULL && !peer->left) {
      int result = MPI_Irecv(&line->receiving, (int)sizeof line->receiving, MPI_BYTE, peer->rank, BEAT_TAG, c->beats,
                             &line->receive);
      if (result != MPI_SUCCESS) return result;
    }
    if (line->receive == MPI_REQUEST_NULL) break;
    int done = 0;
    int result = MPI_Test(&line->receive, &done, MPI_STATUS_IGNORE);
    if (result != MPI_SUCCESS) return result;
    if (!done) break;
    line->receiving.operation[sizeof line->receiving.operation - 1] = 0;
    pthread_mutex_lock(&c->watch.lock);
    peer->beat = line->receiving;
    peer->known = true;
    peer->left = line->receiving.leaving;
    peer->heard = clock_seconds();
    pthread_mutex_unlock(&c->watch.lock);
  }
  int sent = 1;
  int result = MPI_Test(&line->send, &sent, MPI_STATUS_IGNORE);
  *pending = !sent || !line->sent_last || !peer->left;
  return result;
}

void *comm_heartbeat_run(void *argument) {
  struct comm *c = argument;
  struct watch *w = &c->watch;
  struct line *lines = calloc((size_t)w->n_peers, sizeof *lines);
  int result = lines ? MPI_SUCCESS : MPI_ERR_NO_MEM;
  if (lines)
    for (int i = 0; i < w->n_peers; i++) lines[i].send = lines[i].receive = MPI_REQUEST_NULL;

  bool at_rest = false;
  while (result == MPI_SUCCESS && !at_rest) {
    pthread_mutex_lock(&w->lock);
    struct beat beat = beat_of(c, clock_seconds());
    double tick = comm_tick(&w->limits);
    pthread_mutex_unlock(&w->lock);

    at_rest = true;
    for (int i = 0; i < w->n_peers && result == MPI_SUCCESS; i++) {
      bool pending = true;
      result = send_beat(c, &w->peers[i], &lines[i], &beat);
      if (result == MPI_SUCCESS) result = receive_beats(c, &w->peers[i], &lines[i], &pending);
      at_rest = at_rest && !pending;
    }

    pthread_mutex_lock(&w->lock);
    w->heartbeat_alive = clock_seconds();
    if (!at_rest) comm_watch_wait(w, w->stop_heartbeat ? LEAVING_POLL_S : tick);
    pthread_mutex_unlock(&w->lock);
  }

  if (result != MPI_SUCCESS) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (MPI_Error_string(result, text, &length) != MPI_SUCCESS) snprintf(text, sizeof text, "MPI error %d", result);
    pthread_mutex_lock(&w->lock);
    snprintf(w->heartbeat_failure, sizeof w->heartbeat_failure, "%s", text);
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);
    return NULL; /* MPI may still hold the lines; the watch ends the process */
  }
  free(lines);
  return NULL;
}
