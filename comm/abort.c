/* Leaving at once.  MPI_Abort may hang (a dead host, a library waiting for a
 * rank that will not answer), so it runs in a thread of its own and the
 * process goes when its time is up; before it, NCCL's abort in the same way. */
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "comm/internal.h"

#define FIRST_DEADLINE_S 3
#define ABORT_DEADLINE_S 5

atomic_bool comm_mpi_live = false;

static void sleep_seconds(time_t seconds) {
  struct timespec left = {.tv_sec = seconds, .tv_nsec = 0};
  while (nanosleep(&left, &left) != 0) {
  }
}

/* ---- what is tried first ------------------------------------------------------- */

static struct {
  pthread_mutex_t lock;
  void (*what)(void *);
  void *argument;
} first = {.lock = PTHREAD_MUTEX_INITIALIZER};

void comm_abort_first(void (*what)(void *), void *argument) {
  pthread_mutex_lock(&first.lock);
  first.what = what;
  first.argument = argument;
  pthread_mutex_unlock(&first.lock);
}

static void *run_first(void *unused) {
  pthread_mutex_lock(&first.lock); /* held for good: nobody takes it away meanwhile */
  if (first.what) first.what(first.argument);
  return unused;
}

static void try_first(void) {
  struct timespec until;
  pthread_t thread;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += FIRST_DEADLINE_S;
  if (pthread_create(&thread, NULL, run_first, NULL) == 0) (void)pthread_timedjoin_np(thread, NULL, &until);
}

/* ---- the job ------------------------------------------------------------------------ */

static void *abort_job(void *argument) {
  const int *code = argument;
  MPI_Abort(MPI_COMM_WORLD, *code);
  _exit(*code);
}

void comm_abort(struct comm *c, enum error_code code) {
  (void)c;
  static atomic_flag leaving = ATOMIC_FLAG_INIT;
  static int exit_code;
  if (atomic_flag_test_and_set(&leaving)) {
    sleep_seconds(FIRST_DEADLINE_S + 2 * ABORT_DEADLINE_S); /* another thread is ending this process */
    _exit((int)code);
  }
  exit_code = (int)code;
  try_first();
  if (!atomic_load(&comm_mpi_live)) _exit(exit_code);
  pthread_t thread;
  if (pthread_create(&thread, NULL, abort_job, &exit_code) == 0) sleep_seconds(ABORT_DEADLINE_S);
  _exit(exit_code);
}
