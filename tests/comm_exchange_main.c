/* One rank of the worlds that tests/comm_exchange_test.py launches: comm_exchange_main MODE [RANK].
 * "exchange" compares with a plain loop; the modes named after faults live like a training
 * run until update 7, where RANK does what the name says. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/log.h"
#include "comm/exchange.h"
#include "kernels/formats.h"
#include "tests/comm_rig.h"
#include "tests/test.h"

static struct comm *joined;

/* Gains, matrices, more ranks than rows, nothing, more than a buffer, an odd width. */
static const struct comm_part shapes[] = {{NULL, 64, 1, DTYPE_F32},     {NULL, 130, 64, DTYPE_F32},  {NULL, 37, 7, DTYPE_BF16},
                                          {NULL, 2, 8, DTYPE_F32},      {NULL, 0, 8, DTYPE_BF16},    {NULL, 1, 1, DTYPE_BF16},
                                          {NULL, 4099, 520, DTYPE_F32}, {NULL, 4099, 8, DTYPE_BF16}, {NULL, 9, 3, DTYPE_F32}};
enum { SHAPES = sizeof shapes / sizeof *shapes, GUARD = 16 };

static int64_t elements(const struct comm_part *p) { return p->rows * p->cols; }

static float stored(float x, enum dtype dtype) { return dtype == DTYPE_F32 ? x : bf16_decode(bf16_encode(x)); }

static float get(const struct comm_part *p, int64_t i) {
  return p->dtype == DTYPE_F32 ? ((const float *)p->data)[i] : bf16_decode(((const uint16_t *)p->data)[i]);
}

static void put(const struct comm_part *p, int64_t i, float x) {
  if (p->dtype == DTYPE_F32)
    ((float *)p->data)[i] = x;
  else
    ((uint16_t *)p->data)[i] = bf16_encode(x);
}

/* What rank r has at element i of tensor k before a sum. */
static float given(int r, int k, int64_t i) { return stored((float)value_of(r, i + 1000003 * k), shapes[k].dtype); }

static void fill(struct comm_part *p, int k) {
  *p = shapes[k];
  p->data = calloc((size_t)elements(p) + GUARD, sizeof(float));
  for (int64_t i = 0; i < elements(p); i++) put(p, i, given(comm_rank(joined), k, i));
  memset((char *)p->data + (size_t)elements(p) * dtype_bytes(p->dtype), 0x5a, GUARD);
}

/* The sum over ranks in their order, rounded once. */
static float expected(int k, int64_t i) {
  float sum = given(0, k, i);
  for (int r = 1; r < comm_world(joined); r++) sum = sum + given(r, k, i);
  return stored(sum, shapes[k].dtype);
}

/* Elements of rows [from, to) that are not the sum, to the bit. */
static int64_t wrong_sums(const struct comm_part *p, int k, int64_t from, int64_t to) {
  int64_t wrong = 0;
  for (int64_t i = from * p->cols; i < to * p->cols; i++) {
    const float want = expected(k, i), have = get(p, i);
    wrong += memcmp(&want, &have, sizeof want) != 0;
  }
  return wrong;
}

static int64_t own_row(const struct comm_part *p, int more) {
  return share_row(p->rows, p->cols, comm_rank(joined) + more, comm_world(joined));
}

static void check_whole(const struct comm_part *p, int k) {
  const unsigned char *end = (const unsigned char *)p->data + (size_t)elements(p) * dtype_bytes(p->dtype);
  CHECK_EQ_I64(wrong_sums(p, k, 0, p->rows), 0);
  for (int i = 0; i < GUARD; i++) CHECK(end[i] == 0x5a);
  free(p->data);
}

/* Sums of all tensors in one exchange, then copies. */
TEST(sums_then_copies) {
  struct comm_part parts[SHAPES];
  struct error e;
  for (int k = 0; k < SHAPES; k++) fill(&parts[k], k);
  CHECK(comm_finish(joined, comm_reduce_scatter_begin(joined, parts, SHAPES), &e));
  for (int k = 0; k < SHAPES; k++) CHECK_EQ_I64(wrong_sums(&parts[k], k, own_row(&parts[k], 0), own_row(&parts[k], 1)), 0);
  const int64_t ticket = comm_all_gather_begin(joined, parts, SHAPES);
  CHECK(comm_finish_all(joined, &e) && comm_finish(joined, ticket, &e));
  for (int k = 0; k < SHAPES; k++) check_whole(&parts[k], k);
}

/* An exchange for each tensor, as many as may be under way, with collectives of this thread among them. */
TEST(many_at_once) {
  struct comm_part parts[SHAPES];
  struct error e;
  int64_t ticket[SHAPES];
  for (int k = 0; k < SHAPES; k++) fill(&parts[k], k);
  for (int k = 0; k < SHAPES; k++) {
    double x = k;
    ticket[k] = comm_reduce_scatter_begin(joined, &parts[k], 1);
    CHECK(comm_sum_f64(joined, &x, 1, &e) && x == k * comm_world(joined));
  }
  CHECK(comm_finish(joined, ticket[SHAPES / 2], &e)); /* those before it, too */
  for (int k = 0; k <= SHAPES / 2; k++) ticket[k] = comm_all_gather_begin(joined, &parts[k], 1);
  CHECK(comm_barrier(joined, &e) && comm_finish(joined, ticket[SHAPES - 1], &e));
  for (int k = SHAPES / 2 + 1; k < SHAPES; k++) ticket[k] = comm_all_gather_begin(joined, &parts[k], 1);
  for (int k = 0; k < SHAPES; k++) {
    CHECK(comm_finish(joined, ticket[k], &e));
    check_whole(&parts[k], k);
  }
  CHECK(comm_world(joined) == 1 ? comm_exchange_waited(joined) == 0 : comm_exchange_waited(joined) > 0);
}

/* Every row belongs to one rank, and where it must a share begins at a multiple of 8 elements. */
TEST(shares) {
  for (int64_t cols = 1; cols <= 24; cols++)
    for (int64_t rows = 0; rows <= 70; rows++)
      for (int world = 1; world <= 9; world++) {
        int64_t before = 0;
        CHECK_EQ_I64(share_row(rows, cols, 0, world), 0);
        CHECK_EQ_I64(share_row(rows, cols, world, world), rows);
        for (int r = 1; r <= world; r++) {
          const int64_t row = share_row(rows, cols, r, world);
          CHECK(row >= before && row <= rows && (r == world || row * cols % 8 == 0));
          CHECK(r == world || cols % 8 != 0 || row == rows * r / world);
          before = row;
        }
      }
  CHECK_EQ_I64(share_row((int64_t)1 << 60, 8, 71, 72), ((int64_t)1 << 60) / 72 * 71 + (((int64_t)1 << 60) % 72) * 71 / 72);
}

static int exchange(void) {
  RUN(sums_then_copies);
  RUN(many_at_once);
  RUN(shares);
  return test_report();
}

/* Nine updates: backward, in whose midst a sum begins; it is waited for after it. */
enum fault { FAULT_NONE, FAULT_STOP, FAULT_KILL, FAULT_STALL, FAULT_ABORT, FAULT_DISORDER, FAULT_SHAPE };

static int train(enum fault fault, int victim, const struct comm_limits *limits) {
  enum { ROWS = 3000, COLS = 1000 };
  struct error e;
  struct comm_part part = {calloc(ROWS * COLS, sizeof(float)), ROWS, COLS, DTYPE_F32};
  if (!part.data || !comm_watch(joined, limits, &e)) return 1;
  for (int64_t update = 1; update <= 9; update++) {
    const bool now = comm_rank(joined) == victim && update == 7;
    comm_enter(joined, update == 1 ? COMM_START : COMM_UPDATE, "backward", update);
    if (now && fault == FAULT_STALL) sleep_s(300);
    if (now && fault == FAULT_SHAPE) part.rows--;
    const int64_t ticket = now && fault == FAULT_DISORDER ? comm_all_gather_begin(joined, &part, 1)
                                                          : comm_reduce_scatter_begin(joined, &part, 1);
    if (now && fault == FAULT_STOP) {
      for (int i = 0; i < 50; i++) sleep_s(0.02); /* time for a heartbeat from here, on a machine that stands still now and then, too */
      raise(SIGSTOP);
    }
    if (now && fault == FAULT_KILL) raise(SIGKILL);
    if (now && fault == FAULT_ABORT) comm_abort(joined, ERROR_DATA);
    sleep_s(0.02);
    comm_enter(joined, update == 1 ? COMM_START : COMM_UPDATE, "reduce gradients", update);
    if (comm_finish(joined, ticket, &e)) continue;
    log_failure(&e);
    const struct error first = e;
    if (comm_finish_all(joined, &e) || strcmp(first.message, e.message) != 0) log_error("the failure was forgotten");
    comm_abort(joined, e.code);
  }
  free(part.data);
  return 0;
}

static volatile sig_atomic_t signals;
static void take_signal(int number) { signals += number; }

int main(int argc, char **argv) {
  if (argc < 2) return ERROR_USAGE;
  static const char *const modes[] = {[FAULT_NONE] = "exchange", [FAULT_STOP] = "stop",         [FAULT_KILL] = "kill",
                                      [FAULT_STALL] = "stall",   [FAULT_ABORT] = "abort",       [FAULT_DISORDER] = "disorder",
                                      [FAULT_SHAPE] = "shape"};
  struct comm_limits limits = {.start_s = 60, .update_s = 60, .save_s = 60, .heartbeat_s = 2.5};
  struct sigaction action = {.sa_handler = take_signal}; /* as the trainer's: SIGTERM alone does not end a rank */
  sigaction(SIGTERM, &action, NULL);
  struct error e;
  joined = comm_open(0, &e);
  const struct comm_device host = {device_open("cpu", 1, &e), NULL, 0};
  if (!joined || !host.device || !comm_exchange_open(joined, &host, SHAPES, &e)) {
    log_failure(&e);
    return (int)e.code;
  }
  log_setup(comm_rank(joined), comm_world(joined), LOG_INFO);
  int status = ERROR_USAGE;
  for (int i = 0; i < (int)(sizeof modes / sizeof *modes); i++) {
    if (strcmp(argv[1], modes[i]) != 0) continue;
    if (i == FAULT_STALL) limits.update_s = 2;
    status = i == FAULT_NONE ? exchange() : train((enum fault)i, argc > 2 ? atoi(argv[2]) : -1, &limits);
  }
  fflush(stdout);
  comm_close(joined);
  return status;
}
