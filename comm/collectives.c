/* Collectives over all ranks, in pieces that fit the buffer made at start-up.
 *
 * A reduction sends each rank one slice of every rank's data (all-to-all),
 * combines the slices in rank order - ((x0 + x1) + x2) + ... for each element -
 * and gathers the finished slices.  MPI only moves bytes, so the result cannot
 * depend on its algorithms, on the piece size or on which rank did the adding.
 */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "comm/internal.h"

#define SMALL_BYTES ((int64_t)256 << 10) /* all ranks' data together: one message, everybody adds */

bool comm_mpi_error(int result, const char *what, struct error *e) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(result, text, &length) != MPI_SUCCESS) snprintf(text, sizeof text, "MPI error %d", result);
  return error_set(e, ERROR_COMMUNICATION, "%s failed: %s", what, text);
}

bool comm_mpi_failed(struct comm *c, int result, const char *what, struct error *e) {
  c->broken = ERROR_COMMUNICATION;
  return comm_mpi_error(result, what, e);
}

/* into[i] = into[i] OP from[i]. */
typedef void combine_function(void *into, const void *from, int64_t n);

static void add_f64(void *restrict into, const void *restrict from, int64_t n) {
  double *restrict a = into;
  const double *restrict b = from;
  for (int64_t i = 0; i < n; i++) a[i] = a[i] + b[i];
}

static void add_i64(void *restrict into, const void *restrict from, int64_t n) {
  uint64_t *restrict a = into; /* wraps around */
  const uint64_t *restrict b = from;
  for (int64_t i = 0; i < n; i++) a[i] = a[i] + b[i];
}

static void max_f64(void *restrict into, const void *restrict from, int64_t n) {
  double *restrict a = into;
  const double *restrict b = from;
  for (int64_t i = 0; i < n; i++)
    if (!isnan(a[i]) && (isnan(b[i]) || b[i] > a[i])) a[i] = b[i];
}

static void or_i64(void *restrict into, const void *restrict from, int64_t n) {
  uint64_t *restrict a = into;
  const uint64_t *restrict b = from;
  for (int64_t i = 0; i < n; i++) a[i] = a[i] | b[i];
}

struct reduction {
  const char *what;
  combine_function *combine;
  MPI_Datatype type;
  int64_t size;
};

/* x[n] of what the ranks gave, `stride` bytes apart in c->buffer. */
static void combine_ranks(const struct comm *c, const struct reduction *r, char *x, int64_t stride, int64_t n) {
  memcpy(x, c->buffer, (size_t)(n * r->size));
  for (int rank = 1; rank < c->world; rank++) r->combine(x, c->buffer + rank * stride, n);
}

/* Few elements: everyone gets everything and combines for itself. */
static bool reduce_small(struct comm *c, const struct reduction *r, char *x, int64_t n, struct error *e) {
  int result = MPI_Allgather(x, (int)n, r->type, c->buffer, (int)n, r->type, c->ranks);
  if (result != MPI_SUCCESS) return comm_mpi_failed(c, result, r->what, e);
  combine_ranks(c, r, x, n * r->size, n);
  return true;
}

/* One piece whose slices fit the buffer. */
static bool reduce_piece(struct comm *c, const struct reduction *r, char *x, int64_t n, struct error *e) {
  int64_t slice = round_up(ceil_div(n, c->world), COMM_SLICE_ALIGNMENT);
  int64_t mine = 0;
  for (int rank = 0; rank < c->world; rank++) {
    int64_t from = rank * slice < n ? rank * slice : n;
    int64_t count = n - from < slice ? n - from : slice;
    c->places[rank] = (int)from;
    c->counts[rank] = (int)count;
    if (rank == c->rank) mine = count;
  }
  for (int rank = 0; rank < c->world; rank++) {
    c->receive_places[rank] = (int)(rank * slice);
    c->receive_counts[rank] = (int)mine;
  }
  int result = MPI_Alltoallv(x, c->counts, c->places, r->type, c->buffer, c->receive_counts, c->receive_places,
                             r->type, c->ranks);
  if (result != MPI_SUCCESS) return comm_mpi_failed(c, result, r->what, e);

  combine_ranks(c, r, x + c->places[c->rank] * r->size, slice * r->size, mine);

  result = MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, x, c->counts, c->places, r->type, c->ranks);
  if (result != MPI_SUCCESS) return comm_mpi_failed(c, result, r->what, e);
  return true;
}

static bool check_size(int64_t n, int64_t size, const char *what, struct error *e) {
  int64_t bytes = 0;
  if (n >= 0 && checked_mul(n, size, &bytes)) return true;
  return error_set(e, ERROR_INTERNAL, "%s over %lld elements", what, (long long)n);
}

/* The watchdog names ranks that wait for nobody first. */
static void begin_wait(struct comm *c) { atomic_store(&c->waiting, true); }
static bool end_wait(struct comm *c, bool good) {
  atomic_store(&c->waiting, false);
  return good;
}

static bool reduce(struct comm *c, const struct reduction *r, void *x, int64_t n, struct error *e) {
  if (!check_size(n, r->size, r->what, e)) return false;
  if (c->world == 1 || n == 0) return true;
  begin_wait(c);
  if (n <= SMALL_BYTES / r->size / c->world) return end_wait(c, reduce_small(c, r, x, n, e));
  int64_t piece = COMM_PIECE_BYTES / r->size;
  bool good = true;
  for (int64_t done = 0; done < n && good; done += piece)
    good = reduce_piece(c, r, (char *)x + done * r->size, n - done < piece ? n - done : piece, e);
  return end_wait(c, good);
}

bool comm_sum_f64(struct comm *c, double *x, int64_t n, struct error *e) {
  return reduce(c, &(struct reduction){"sum of FP64", add_f64, MPI_DOUBLE, 8}, x, n, e);
}

bool comm_sum_i64(struct comm *c, int64_t *x, int64_t n, struct error *e) {
  return reduce(c, &(struct reduction){"sum of int64", add_i64, MPI_INT64_T, 8}, x, n, e);
}

bool comm_max_f64(struct comm *c, double *x, int64_t n, struct error *e) {
  return reduce(c, &(struct reduction){"maximum of FP64", max_f64, MPI_DOUBLE, 8}, x, n, e);
}

bool comm_or_i64(struct comm *c, int64_t *x, int64_t n, struct error *e) {
  return reduce(c, &(struct reduction){"or of int64", or_i64, MPI_INT64_T, 8}, x, n, e);
}

bool comm_broadcast(struct comm *c, void *x, int64_t bytes, int root, struct error *e) {
  if (!check_size(bytes, 1, "broadcast", e)) return false;
  if (root < 0 || root >= c->world)
    return error_set(e, ERROR_INTERNAL, "broadcast from rank %d of %d", root, c->world);
  if (c->world == 1) return true;
  const int64_t piece = (int64_t)64 << 20;
  int result = MPI_SUCCESS;
  begin_wait(c);
  for (int64_t done = 0; done < bytes && result == MPI_SUCCESS; done += piece)
    result = MPI_Bcast((char *)x + done, (int)(bytes - done < piece ? bytes - done : piece), MPI_BYTE, root, c->ranks);
  return end_wait(c, result == MPI_SUCCESS || comm_mpi_failed(c, result, "broadcast", e));
}

bool comm_gather_all(struct comm *c, void *all, const void *x, int64_t bytes, struct error *e) {
  if (!check_size(bytes, c->world, "gather", e)) return false;
  if (c->world == 1 || bytes == 0) {
    if (bytes) memmove(all, x, (size_t)bytes);
    return true;
  }
  int64_t piece = c->buffer_bytes / c->world;
  begin_wait(c);
  for (int64_t done = 0; done < bytes; done += piece) {
    int64_t count = bytes - done < piece ? bytes - done : piece;
    int result = MPI_Allgather((const char *)x + done, (int)count, MPI_BYTE, c->buffer, (int)count, MPI_BYTE, c->ranks);
    if (result != MPI_SUCCESS) return end_wait(c, comm_mpi_failed(c, result, "gather", e));
    for (int rank = 0; rank < c->world; rank++)
      memcpy((char *)all + rank * bytes + done, c->buffer + rank * count, (size_t)count);
  }
  return end_wait(c, true);
}

bool comm_barrier(struct comm *c, struct error *e) {
  if (c->world == 1) return true;
  begin_wait(c);
  int result = MPI_Barrier(c->ranks);
  return end_wait(c, result == MPI_SUCCESS || comm_mpi_failed(c, result, "barrier", e));
}

bool comm_is_broken(const struct comm *c) { return c->broken != ERROR_NONE; }

bool comm_agree(struct comm *c, bool good, struct error *e) {
  if (c->world == 1) return good;
  struct error mine;
  int first = good ? c->world : c->rank; /* the first failing rank: a minimum, exact in any order */
  begin_wait(c);
  int result = MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, c->ranks);
  end_wait(c, true);
  if (result != MPI_SUCCESS) return comm_mpi_failed(c, result, "agreement of all ranks", e);
  if (first == c->world) return true;
  if (first == c->rank && e)
    mine = *e;
  else
    error_set(&mine, ERROR_INTERNAL, "failed without saying why");
  if (!comm_broadcast(c, &mine, (int64_t)sizeof mine, first, e)) return false;
  error_context(&mine, "rank %d", first);
  if (e) *e = mine;
  return false;
}
