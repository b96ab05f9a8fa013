/* A world of one: no MPI, collectives as identities, the watchdog and the exits. */
#include <mpi.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/comm.h"
#include "tests/test.h"

static void sleep_ms(long ms) {
  struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

/* Runs body in a child with stderr caught in `text`; its exit status. */
static int child(void (*body)(void), char *text, size_t size) {
  int ends[2];
  text[0] = 0;
  if (pipe(ends) != 0) return -1;
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    body();
    _exit(1);
  }
  close(ends[1]);
  size_t used = 0;
  ssize_t got;
  while (used + 1 < size && (got = read(ends[0], text + used, size - 1 - used)) > 0) used += (size_t)got;
  text[used] = 0;
  close(ends[0]);
  int status = 0;
  if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(alone) {
  struct error e;
  struct comm *c = comm_open(0, &e);
  CHECK(c != NULL);
  if (!c) return;
  int initialised = 1;
  CHECK(MPI_Initialized(&initialised) == MPI_SUCCESS && !initialised);
  CHECK_EQ_I64(comm_rank(c), 0);
  CHECK_EQ_I64(comm_world(c), 1);
  CHECK_EQ_I64(comm_local_rank(c), 0);
  CHECK_EQ_I64(comm_local_world(c), 1);
  CHECK_STR(comm_topology(c), "single process");
  float f[3] = {1, -2, 3};
  double d[2] = {4, 5}, all[2] = {0, 0};
  int64_t i[2] = {6, 7};
  CHECK(comm_sum_f64(c, d, 2, &e) && comm_sum_i64(c, i, 2, &e));
  CHECK(comm_max_f64(c, d, 2, &e) && comm_or_i64(c, i, 2, &e) && comm_broadcast(c, f, 12, 0, &e));
  CHECK(comm_gather_all(c, all, d, 16, &e) && comm_barrier(c, &e));
  CHECK(f[0] == 1 && f[1] == -2 && f[2] == 3 && d[0] == 4 && d[1] == 5 && i[0] == 6 && i[1] == 7);
  CHECK(all[0] == 4 && all[1] == 5);
  CHECK(!comm_broadcast(c, f, 12, 1, &e) && e.code == ERROR_INTERNAL);
  CHECK(comm_agree(c, true, &e));
  error_set(&e, ERROR_DATA, "as it was");
  CHECK(!comm_agree(c, false, &e));
  CHECK_STR(e.message, "as it was");
  comm_close(c);
}

TEST(watch_inside_limits) {
  struct error e;
  struct comm *c = comm_open(1, &e);
  CHECK(c != NULL);
  if (!c) return;
  /* An operation may take two seconds more than it does here: a pause of the machine is shorter or is forgiven. */
  struct comm_limits limits = {.start_s = 60, .update_s = 3, .save_s = 60, .heartbeat_s = 0.2};
  struct comm_limits wrong = limits;
  wrong.save_s = 0;
  CHECK(!comm_watch(c, &wrong, &e) && e.code == ERROR_CONFIG);
  CHECK(comm_watch(c, &limits, &e));
  comm_enter(c, COMM_SAVE, "save", 1); /* longer than an update may take */
  sleep_ms(3500);
  for (int64_t update = 2; update < 6; update++) { /* each operation within the limit, together above it */
    comm_enter(c, COMM_UPDATE, "forward", update);
    sleep_ms(900);
  }
  limits.update_s = 60;
  CHECK(comm_watch(c, &limits, &e));
  sleep_ms(2600);
  comm_close(c);
}

static void stall(void) {
  struct error e;
  struct comm *c = comm_open(0, &e);
  struct comm_limits limits = {.start_s = 60, .update_s = 0.3, .save_s = 60, .heartbeat_s = 0.2};
  if (!c || !comm_watch(c, &limits, &e)) return;
  comm_enter(c, COMM_UPDATE, "optimizer", 41);
  sleep_ms(300000);
}

TEST(stall_ends_the_process) {
  char text[512];
  double began = clock_seconds();
  CHECK_EQ_I64(child(stall, text, sizeof text), ERROR_COMMUNICATION);
  CHECK(clock_seconds() - began < 100);
  const char *told = strstr(text, "rank 0 has been in 'optimizer' of update 41 for ");
  double seconds = 0;
  CHECK(told && sscanf(told, "rank 0 has been in 'optimizer' of update 41 for %lf", &seconds) == 1);
  CHECK(seconds >= 0.3 && seconds < 100);
  CHECK(strstr(text, " s (limit 0.3 s)") != NULL);
}

static void abort_without_world(void) { comm_abort(NULL, ERROR_DATA); }

TEST(abort_exits_with_the_code) {
  char text[512];
  CHECK_EQ_I64(child(abort_without_world, text, sizeof text), ERROR_DATA);
}

static bool refused(int expected, struct error *e) {
  struct comm *c = comm_open(expected, e);
  if (c) comm_close(c);
  return !c;
}

TEST(refusals) {
  struct error e;
  CHECK(refused(4, &e) && e.code == ERROR_COMMUNICATION);
  CHECK(strstr(e.message, "expects 4 ranks, but") && strstr(e.hint, "mpirun -np 4"));
  /* A shell inside salloc is no task of a step. */
  setenv("SLURM_NTASKS", "4", 1);
  CHECK(!refused(1, &e));
  /* A task of srun's without PMI. */
  setenv("SLURM_PROCID", "2", 1);
  CHECK(refused(0, &e) && e.code == ERROR_COMMUNICATION);
  CHECK(strstr(e.message, "srun started 4 tasks") && strstr(e.hint, "srun --mpi=pmix"));
  CHECK(refused(1, &e));
  /* `srun -n 1` in a job of four. */
  setenv("SLURM_STEP_NUM_TASKS", "1", 1);
  CHECK(!refused(0, &e));
  unsetenv("SLURM_STEP_NUM_TASKS");
  unsetenv("SLURM_NTASKS");
  setenv("SLURM_NPROCS", "3", 1);
  CHECK(refused(0, &e));
  setenv("SLURM_NPROCS", "three", 1);
  CHECK(!refused(0, &e));
  unsetenv("SLURM_NPROCS");
  unsetenv("SLURM_PROCID");
}

int main(void) {
  RUN(alone);
  RUN(watch_inside_limits);
  RUN(stall_ends_the_process);
  RUN(abort_exits_with_the_code);
  RUN(refusals);
  return test_report();
}
