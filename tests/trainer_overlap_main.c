/* The program, which writes down what it computes and exchanges, and in which order: on
 * trainer_device_rig.h's device, and linked with --wrap of what comm/exchange.h begins and finishes.  At its end each rank prints
 *
 *   trace R: ...   E, f, h: embedding, a block's attention, loss (forward); b, e: a block's attention, embedding
 *                  (backward); o: optimizer; S3, C3: the sum, the copy of a unit of 3 parameters begins; w: waits for a
 *                  copy; W: waits for everything.  What comes many times in a row (h, o) stands once.
 *
 *   FP4D_TEST_STOP="R N"   rank R is stopped (SIGSTOP) when it has begun its N-th exchange, heartbeats after it
 *   FP4D_TEST_SLOW="R N S" rank R's N-th forward takes S seconds longer
 *   FP4D_TEST_HOLD="R N"   rank R's N-th exchange sends nothing for longer than anybody waits
 */
#include <mpi.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/exchange.h"
#include "tests/trainer_device_rig.h"
#include "trainer/main.c"

enum { MOST = 1 << 16 };

static char trace[MOST];
static int length;
static long begun;
static atomic_bool held;

static int rank_here(void) {
  const char *text = getenv("OMPI_COMM_WORLD_RANK");
  return text ? atoi(text) : 0;
}

static void note(const char *what) {
  const int n = (int)strlen(what);
  if (length + n < MOST) memcpy(trace + length, what, (size_t)n + 1);
  length += n;
}

static void note_once(const char *what) {
  if (length == 0 || trace[length - 1] != *what) note(what);
}

static void tell(void) {
  char line[MOST + 32];
  fwrite(line, 1, (size_t)snprintf(line, sizeof line, "trace %d: %s\n", rank_here(), trace), stdout);
}

/* ---- computing -------------------------------------------------------------------- */

static void slow_down(void) {
  static long forwards;
  const char *text = getenv("FP4D_TEST_SLOW");
  int rank;
  long number, seconds;
  forwards++;
  if (text && sscanf(text, "%d %ld %ld", &rank, &number, &seconds) == 3 && rank == rank_here() && number == forwards)
    nanosleep(&(struct timespec){.tv_sec = seconds}, NULL);
}

static void embedding_forward(struct device *d, struct matrix *x, const struct matrix *table, const int32_t *tokens) {
  note("E");
  slow_down();
  real->embedding_forward(d, x, table, tokens);
}

static void embedding_backward(struct device *d, struct matrix *d_table, const struct matrix *dx, const int32_t *tokens) {
  note("e");
  real->embedding_backward(d, d_table, dx, tokens);
}

static void attention_forward(struct device *d, struct matrix *out, float *lse, float *max_logit, struct quantise_counts *counts,
                              const struct matrix *qkv, const struct attention_payload *payload, const int32_t *starts,
                              const struct attention_shape *s) {
  note("f");
  real->attention_forward(d, out, lse, max_logit, counts, qkv, payload, starts, s);
}

static void attention_backward(struct device *d, struct matrix *d_qkv, struct quantise_counts *counts, const struct matrix *d_out,
                               const struct attention_gradient *g, const struct matrix *out, const float *lse, const struct matrix *qkv,
                               const struct attention_payload *payload, const int32_t *starts, const struct attention_shape *s) {
  note("b");
  real->attention_backward(d, d_qkv, counts, d_out, g, out, lse, qkv, payload, starts, s);
}

static void cross_entropy(struct device *d, float *nll, struct matrix *d_logits, const struct matrix *logits, const int32_t *targets,
                          float grad_scale) {
  note_once("h");
  real->cross_entropy(d, nll, d_logits, logits, targets, grad_scale);
}

static void adamw_update(struct device *d, const struct adamw_tensor *tensors, int count, enum dtype param_dtype, enum dtype grad_dtype,
                         const struct adamw *a, const struct draw *draw) {
  note_once("o");
  real->adamw_update(d, tensors, count, param_dtype, grad_dtype, a, draw);
}

static void replace(struct kernels *k) {
  k->embedding_forward = embedding_forward;
  k->embedding_backward = embedding_backward;
  k->attention_forward = attention_forward;
  k->attention_backward = attention_backward;
  k->cross_entropy = cross_entropy;
  k->adamw_update = adamw_update;
}

/* ---- exchanging ------------------------------------------------------------------- */

int64_t __real_comm_reduce_scatter_begin(struct comm *c, const struct comm_part *parts, int n);
int64_t __wrap_comm_reduce_scatter_begin(struct comm *c, const struct comm_part *parts, int n);
int64_t __real_comm_all_gather_begin(struct comm *c, const struct comm_part *parts, int n);
int64_t __wrap_comm_all_gather_begin(struct comm *c, const struct comm_part *parts, int n);
bool __real_comm_finish(struct comm *c, int64_t ticket, struct error *e);
bool __wrap_comm_finish(struct comm *c, int64_t ticket, struct error *e);
bool __real_comm_finish_all(struct comm *c, struct error *e);
bool __wrap_comm_finish_all(struct comm *c, struct error *e);

/* Is the exchange that is begun now the one that the variable speaks of? */
static bool meant(const char *variable) {
  const char *text = getenv(variable);
  int rank;
  long number;
  return text && sscanf(text, "%d %ld", &rank, &number) == 2 && rank == rank_here() && number == begun;
}

static int64_t begin(struct comm *c, const char *format, int64_t (*real_begin)(struct comm *, const struct comm_part *, int),
                     const struct comm_part *parts, int n) {
  char text[16];
  snprintf(text, sizeof text, format, n);
  note(text);
  begun++;
  if (meant("FP4D_TEST_HOLD")) atomic_store(&held, true);
  const int64_t ticket = real_begin(c, parts, n);
  if (meant("FP4D_TEST_STOP")) {
    for (int i = 0; i < 50; i++) nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL); /* time for a heartbeat from here */
    raise(SIGSTOP);
  }
  return ticket;
}

int64_t __wrap_comm_reduce_scatter_begin(struct comm *c, const struct comm_part *parts, int n) {
  return begin(c, "S%d", __real_comm_reduce_scatter_begin, parts, n);
}

int64_t __wrap_comm_all_gather_begin(struct comm *c, const struct comm_part *parts, int n) {
  return begin(c, "C%d", __real_comm_all_gather_begin, parts, n);
}

bool __wrap_comm_finish(struct comm *c, int64_t ticket, struct error *e) {
  note("w");
  return __real_comm_finish(c, ticket, e);
}

bool __wrap_comm_finish_all(struct comm *c, struct error *e) {
  note("W");
  return __real_comm_finish_all(c, e);
}

/* What the exchanges' thread sends, through MPI's profiling interface: its data have tag 2 (comm/transport_mpi.c). */
int MPI_Isend(const void *buffer, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) {
  while (tag == 2 && atomic_load(&held)) nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
  return PMPI_Isend(buffer, count, type, to, tag, comm, request);
}
