/* One rank of the worlds that tests/comm_test.py launches: comm_world_main MODE [ARGUMENT].
 * The modes named after faults live like a training run until update 7. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/comm.h"
#include "tests/comm_rig.h"
#include "tests/test.h"

static const struct comm_limits quick = {.start_s = 60, .update_s = 60, .save_s = 60, .heartbeat_s = 2.5};

static const int64_t sizes[] = {0, 1, 3, 17, 1000, 65537, (1 << 19) - 1, (1 << 19) + 1, 3 * (1 << 19) + 4099};
#define N_SIZES (int)(sizeof sizes / sizeof *sizes)

static void check_sums(struct comm *c, int64_t n) {
  struct error e;
  int world = comm_world(c), rank = comm_rank(c);
  int64_t wrong64 = 0, wrong_i = 0, wrong_or = 0, wrong_max = 0;
  double *d = malloc((size_t)n * 8 + 8), *m = malloc((size_t)n * 8 + 8);
  int64_t *s = malloc((size_t)n * 8 + 8), *o = malloc((size_t)n * 8 + 8);
  for (int64_t i = 0; i < n; i++) {
    d[i] = m[i] = value_of(rank, i);
    if ((i + rank) % 97 == 5) m[i] = NAN;
    if ((i + rank) % 89 == 3) m[i] = -INFINITY;
    s[i] = (int64_t)bits_of(rank, i);
    o[i] = (int64_t)1 << ((i + rank) % 64);
  }
  d[n] = m[n] = 7;
  s[n] = o[n] = 7;
  CHECK(comm_sum_f64(c, d, n, &e));
  CHECK(comm_max_f64(c, m, n, &e));
  CHECK(comm_sum_i64(c, s, n, &e));
  CHECK(comm_or_i64(c, o, n, &e));
  for (int64_t i = 0; i < n; i++) {
    double sum = value_of(0, i), maximum = -INFINITY;
    uint64_t isum = 0, ior = 0;
    bool nan = false;
    for (int r = 0; r < world; r++) {
      double v = value_of(r, i);
      if (r) sum = sum + v;
      if ((i + r) % 89 == 3)
        v = -INFINITY;
      else if ((i + r) % 97 == 5)
        nan = true;
      if (v > maximum) maximum = v;
      isum += bits_of(r, i);
      ior |= (uint64_t)1 << ((i + r) % 64);
    }
    wrong64 += memcmp(&sum, &d[i], 8) != 0;
    wrong_max += nan ? !isnan(m[i]) : m[i] != maximum;
    wrong_i += (uint64_t)s[i] != isum;
    wrong_or += (uint64_t)o[i] != ior;
  }
  CHECK_EQ_I64(wrong64, 0);
  CHECK_EQ_I64(wrong_max, 0);
  CHECK_EQ_I64(wrong_i, 0);
  CHECK_EQ_I64(wrong_or, 0);
  CHECK(d[n] == 7 && m[n] == 7 && s[n] == 7 && o[n] == 7);
  free(d), free(m), free(s), free(o);
}

static void check_moves(struct comm *c) {
  struct error e;
  int world = comm_world(c), rank = comm_rank(c);
  const int64_t lengths[] = {0, 1, 999, ((int64_t)4 << 20) + 12345};
  for (int k = 0; k < 4; k++) {
    int64_t n = lengths[k];
    unsigned char *x = malloc((size_t)n + 1), *all = malloc((size_t)(n * world) + 1);
    for (int root = 0; root < world; root++) {
      int64_t wrong = 0;
      for (int64_t i = 0; i < n; i++) x[i] = (unsigned char)bits_of(rank, i);
      CHECK(comm_broadcast(c, x, n, root, &e));
      for (int64_t i = 0; i < n; i++) wrong += x[i] != (unsigned char)bits_of(root, i);
      CHECK_EQ_I64(wrong, 0);
    }
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) x[i] = (unsigned char)bits_of(rank, i);
    all[n * world] = 7;
    CHECK(comm_gather_all(c, all, x, n, &e));
    for (int r = 0; r < world; r++)
      for (int64_t i = 0; i < n; i++) wrong += all[r * n + i] != (unsigned char)bits_of(r, i);
    CHECK_EQ_I64(wrong, 0);
    CHECK(all[n * world] == 7);
    free(x), free(all);
  }
  CHECK(!comm_broadcast(c, NULL, 0, world, &e) && e.code == ERROR_INTERNAL);
  CHECK(!comm_sum_f64(c, NULL, -1, &e) && e.code == ERROR_INTERNAL);
  CHECK(comm_barrier(c, &e));
}

static void check_agreement(struct comm *c) {
  int world = comm_world(c), rank = comm_rank(c);
  struct error e;
  CHECK(comm_agree(c, true, &e));
  for (int bad = 0; bad < world && world > 1; bad++) {
    bool good = rank < bad; /* this rank and all after it fail; the first is told */
    if (!good) error_set(&e, ERROR_DATA, "shard %d is short", rank), error_hint(&e, "hint %d", rank);
    CHECK(!comm_agree(c, good, &e));
    char message[64], hint[64];
    snprintf(message, sizeof message, "rank %d: shard %d is short", bad, bad);
    snprintf(hint, sizeof hint, "hint %d", bad);
    CHECK_STR(e.message, message);
    CHECK_STR(e.hint, hint);
    CHECK_EQ_I64(e.code, ERROR_DATA);
    CHECK(!comm_agree(c, good, NULL));
  }
  CHECK(comm_agree(c, true, NULL));
}

static struct comm *joined;
TEST(reductions) {
  for (int k = 0; k < N_SIZES; k++) check_sums(joined, sizes[k]);
}
TEST(moves) { check_moves(joined); }
TEST(agreement) { check_agreement(joined); }

static int collectives(struct comm *c) {
  joined = c;
  RUN(reductions);
  RUN(moves);
  RUN(agreement);
  printf("local %d of %d\n", comm_local_rank(c), comm_local_world(c));
  if (comm_rank(c) == 0) printf("topology %s\n", comm_topology(c));
  return test_report();
}

/* Nine updates: forward, then a sum.  At update 7 the victim does what `fault` says. */
enum fault { FAULT_NONE, FAULT_STOP, FAULT_KILL, FAULT_STALL, FAULT_SLOW_SAVE, FAULT_COMPUTE, FAULT_ABORT, FAULT_EXIT };
static int train(struct comm *c, enum fault fault, int victim, const struct comm_limits *limits) {
  struct error e;
  double *gradients = calloc(100000, sizeof *gradients);
  if (!gradients || !comm_watch(c, limits, &e)) return 1;
  bool me = comm_rank(c) == victim;
  for (int64_t update = 1; update <= 9; update++) {
    enum comm_phase phase = update == 1 ? COMM_START : COMM_UPDATE;
    bool now = me && update == 7;
    comm_enter(c, phase, "forward", update);
    sleep_s(fault == FAULT_SLOW_SAVE && update == 8 ? 0.5 : 0.02);
    if (now && fault == FAULT_STALL) sleep_s(300);
    if (now && fault == FAULT_COMPUTE)
      for (double until = clock_seconds() + 4; clock_seconds() < until;) continue;
    comm_enter(c, phase, "reduce gradients", update);
    if (now && fault == FAULT_STOP) {
      for (int i = 0; i < 50; i++) sleep_s(0.02); /* time for a heartbeat from here, on a machine that stands still now and then, too */
      raise(SIGSTOP);
    }
    if (now && fault == FAULT_KILL) raise(SIGKILL);
    if (now && fault == FAULT_ABORT) comm_abort(c, ERROR_DATA);
    if (now && fault == FAULT_EXIT) return ERROR_DATA;
    if (!comm_sum_f64(c, gradients, 100000, &e)) {
      log_failure(&e);
      comm_abort(c, e.code);
    }
    if (update == 7 && fault == FAULT_SLOW_SAVE) {
      if (me) {
        comm_enter(c, COMM_SAVE, "save", update);
        sleep_s(4);
      } /* the others go on and wait in the next update */
    }
  }
  free(gradients);
  if (fault == FAULT_NONE && me) sleep_s(4); /* late at comm_close */
  return 0;
}

static volatile sig_atomic_t stop_asked;
static void take_signal(int signal_number) { stop_asked |= signal_number == SIGUSR2; }

/* Works until some rank is told to stop; leaves in good order with 75.  Longer than any test waits. */
static int wait_for_signal(struct comm *c) {
  struct error e;
  if (comm_rank(c) == 0) printf("waiting\n"), fflush(stdout);
  for (double until = clock_seconds() + 300; clock_seconds() < until;) {
    int64_t asked = stop_asked;
    if (!comm_or_i64(c, &asked, 1, &e)) return 1;
    if (asked) return ERROR_PREEMPTED;
    sleep_s(0.05);
  }
  return 1;
}

int main(int argc, char **argv) {
  if (argc < 2) return ERROR_USAGE;
  const char *mode = argv[1];
  int argument = argc > 2 ? atoi(argv[2]) : 0;
  /* As the trainer's handler: SIGTERM alone does not end a rank. */
  struct sigaction action = {.sa_handler = take_signal};
  sigaction(SIGTERM, &action, NULL);
  sigaction(SIGUSR2, &action, NULL);

  if (strcmp(mode, "stop-before-mpi") == 0 || strcmp(mode, "stop-unwatched") == 0) comm_start_limit(3);
  if (strcmp(mode, "stop-before-mpi") == 0) {
    if (atoi(getenv("OMPI_COMM_WORLD_RANK")) == argument) raise(SIGSTOP);
  }

  struct error e;
  struct comm *c = comm_open(strcmp(mode, "open") == 0 ? argument : 0, &e);
  if (!c) {
    log_failure(&e);
    return (int)e.code;
  }
  log_setup(comm_rank(c), comm_world(c), LOG_INFO);
  struct comm_limits limits = quick;
  int status = 0;
  if (strcmp(mode, "open") == 0) { /* argument: the expected world */
    printf("world %d\n", comm_world(c));
  } else if (strcmp(mode, "collectives") == 0) {
    status = collectives(c);
  } else if (strcmp(mode, "late-close") == 0) {
    status = train(c, FAULT_NONE, argument, &limits);
  } else if (strcmp(mode, "compute") == 0) {
    status = train(c, FAULT_COMPUTE, argument, &limits);
  } else if (strcmp(mode, "stop") == 0) {
    status = train(c, FAULT_STOP, argument, &limits);
  } else if (strcmp(mode, "stop-before-watch") == 0) {
    if (comm_rank(c) == argument) raise(SIGSTOP);
    status = train(c, FAULT_NONE, -1, &limits);
  } else if (strcmp(mode, "stop-unwatched") == 0) {
    if (comm_rank(c) == argument) raise(SIGSTOP);
    status = !comm_barrier(c, &e);
  } else if (strcmp(mode, "untimed") == 0) { /* far beyond every limit, and then silent */
    limits = (struct comm_limits){.start_s = 0.5, .update_s = 0.5, .save_s = 0.5, .heartbeat_s = 2.5};
    if (!comm_watch(c, &limits, &e)) return 1;
    comm_enter(c, COMM_UNTIMED, "index", -1);
    if (comm_rank(c) == 0) sleep_s(5);
    if (!comm_barrier(c, &e)) return 1;
    if (comm_rank(c) == 0) printf("indexed\n"), fflush(stdout);
    if (comm_rank(c) == argument) raise(SIGSTOP);
    status = !comm_barrier(c, &e);
  } else if (strcmp(mode, "kill") == 0) {
    status = train(c, FAULT_KILL, argument, &limits);
  } else if (strcmp(mode, "abort") == 0) {
    status = train(c, FAULT_ABORT, argument, &limits);
  } else if (strcmp(mode, "exit") == 0) {
    status = train(c, FAULT_EXIT, argument, &limits);
    if (status) return status; /* without comm_close: a defect the others must not hang on */
  } else if (strcmp(mode, "stall") == 0) {
    limits.update_s = 2;
    status = train(c, FAULT_STALL, argument, &limits);
  } else if (strcmp(mode, "slow-save") == 0) {
    limits.update_s = 2;
    status = train(c, FAULT_SLOW_SAVE, argument, &limits);
  } else if (strcmp(mode, "signal") == 0) {
    status = wait_for_signal(c);
  } else if (strcmp(mode, "signal-watched") == 0) {
    status = comm_watch(c, &limits, &e) ? wait_for_signal(c) : 1;
  } else {
    status = ERROR_USAGE;
  }
  fflush(stdout);
  comm_close(c);
  return status;
}
