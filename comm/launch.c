/* Joining and leaving the world: how this process was launched, MPI's start
 * and end, the size that the configuration expects, hosts and local ranks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "comm/exchange.h"
#include "comm/internal.h"

/* Any of these in the environment: an MPI launcher started this process. */
static const char *const launcher_variables[] = {
    "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PALS_RANKID", "MPI_LOCALNRANKS"};

static bool launched_for_mpi(void) {
  for (size_t i = 0; i < sizeof launcher_variables / sizeof *launcher_variables; i++)
    if (getenv(launcher_variables[i])) return true;
  return false;
}

static long environment_number(const char *name) {
  const char *text = getenv(name);
  if (!text || !*text) return -1;
  char *end;
  long value = strtol(text, &end, 10);
  return *end == 0 && value >= 0 ? value : -1;
}

/* Tasks of the srun step that this process belongs to; 1 where it is no task of Slurm's.
 * A shell inside `salloc` has SLURM_NTASKS but is no task: no SLURM_PROCID.  A process
 * that an MPI launcher started in a batch script inherits the job's numbers; there
 * only the step's own count. */
static long slurm_tasks(bool launched) {
  if (getenv("OMPI_COMM_WORLD_SIZE") || environment_number("SLURM_PROCID") < 0) return 1;
  static const char *const names[] = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"};
  size_t n = launched ? 1 : sizeof names / sizeof *names;
  for (size_t i = 0; i < n; i++) {
    long tasks = environment_number(names[i]);
    if (tasks > 0) return tasks;
  }
  return 1;
}

/* What a launcher says that it started. */
struct launched {
  const char *by;
  long tasks;
};

static struct launched launched_tasks(bool launched) {
  const struct launched none = {NULL, 1}, slurm = {"srun", slurm_tasks(launched)};
  if (slurm.tasks > 1) return slurm;
  static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    const struct launched l = {"mpirun", environment_number(sizes[i])};
    if (l.tasks > 1) return l;
  }
  return none;
}

/* With as many ranks on a host as it has processors, a rank that waits must not hold one.
 * Read by Open MPI in MPI_Init; a choice of the user's stands. */
static bool yield_when_crowded(struct error *e) {
  long local = environment_number("OMPI_COMM_WORLD_LOCAL_SIZE");
  long processors = sysconf(_SC_NPROCESSORS_ONLN);
  if (local < 2 || processors < 1 || local < processors) return true;
  if (setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0) == 0) return true;
  return error_errno(e, ERROR_SYSTEM, "OMPI_MCA_mpi_yield_when_idle cannot be set");
}

/* ---- a start that does not end ---------------------------------------------- */

#define GUARD_TICK_S 0.25

static double start_limit_s = 1800;

void comm_start_limit(double seconds) { start_limit_s = seconds; }

static atomic_bool start_ended = false;

void comm_start_ended(void) { atomic_store(&start_ended, true); }

/* A clock beside comm_open and what ranks agree on before their watchdogs run, which nothing inside MPI can hold up. */
static void *guard_start(void *unused) {
  static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID", "SLURM_PROCID"};
  long rank = -1;
  for (size_t i = 0; i < sizeof ranks / sizeof *ranks && rank < 0; i++) rank = environment_number(ranks[i]);
  const double turn = COMM_TURN_S * (double)(rank < 0 ? 0 : rank < COMM_TURNS ? rank : COMM_TURNS);
  char who[32] = "a rank";
  if (rank >= 0) snprintf(who, sizeof who, "rank %ld", rank);
  /* Counted by naps: time in which the whole job stood still is nobody's fault. */
  for (double waited = 0; !atomic_load(&start_ended); waited += GUARD_TICK_S) {
    if (waited > start_limit_s + turn) {
      log_error("%s has been in the start of MPI for %.1f s (limit %g s): a rank, or the network, does not answer; ending the job", who, waited, start_limit_s);
      comm_abort(NULL, ERROR_COMMUNICATION);
    }
    nanosleep(&(struct timespec){.tv_nsec = (long)(GUARD_TICK_S * 1e9)}, NULL);
  }
  return unused;
}

static bool start_mpi(struct comm *c, struct error *e) {
  pthread_t guard;
  if (!yield_when_crowded(e) || !comm_start_thread(&guard, guard_start, NULL, "thread beside MPI's start", e)) return false;
  pthread_detach(guard); /* ends by itself */
  int provided = MPI_THREAD_SINGLE;
  int result = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
  if (result != MPI_SUCCESS) return comm_mpi_failed(c, result, "MPI_Init_thread", e);
  c->mpi = true;
  c->ranks = MPI_COMM_WORLD; /* until ours are made */
  atomic_store(&comm_mpi_live, true);
  if ((result = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN)) != MPI_SUCCESS)
    return comm_mpi_failed(c, result, "MPI_Comm_set_errhandler", e);
  if ((result = MPI_Comm_rank(MPI_COMM_WORLD, &c->rank)) != MPI_SUCCESS ||
      (result = MPI_Comm_size(MPI_COMM_WORLD, &c->world)) != MPI_SUCCESS)
    return comm_mpi_failed(c, result, "MPI_Comm_size", e);
  if (provided < MPI_THREAD_MULTIPLE)
    return error_set(e, ERROR_COMMUNICATION, "this MPI library does not offer MPI_THREAD_MULTIPLE") ||
           error_hint(e, "use an MPI built with thread support; the watchdog needs it");
  return true;
}

static bool check_world(const struct comm *c, struct launched l, int expected, struct error *e) {
  if (c->world == 1 && l.tasks > 1) {
    error_set(e, ERROR_COMMUNICATION,
              "%s started %ld tasks, but each of them is an MPI world of one: they would train %ld times over", l.by, l.tasks,
              l.tasks);
    if (strcmp(l.by, "srun") == 0)
      return error_hint(e, "start with `srun --mpi=pmix` (if `srun --mpi=list` has it) or with mpirun; "
                           "for one process on purpose, `srun -n 1`");
    return error_hint(e, "this mpirun is not that of the MPI library which fp4d was built with; use that one");
  }
  if (expected && c->world != expected) {
    error_set(e, ERROR_COMMUNICATION, "the configuration expects %d rank%s, but the launcher started %d", expected,
              expected == 1 ? "" : "s", c->world);
    return error_hint(e, "start with `mpirun -np %d`, or change the expected number", expected);
  }
  return true;
}

static bool allocate(struct comm *c, struct error *e) {
  if (!comm_watch_prepare(c, e)) return false;
  if (c->world == 1) return true;
  size_t world = (size_t)c->world;
  c->buffer_bytes = COMM_PIECE_BYTES + c->world * (COMM_SLICE_ALIGNMENT + 1) * (int64_t)sizeof(double);
  c->counts = calloc(4 * world, sizeof *c->counts);
  if (c->counts) {
    c->places = c->counts + world;
    c->receive_counts = c->places + world;
    c->receive_places = c->receive_counts + world;
  }
  if (posix_memalign((void **)&c->buffer, 64, (size_t)c->buffer_bytes) != 0) c->buffer = NULL;
  if (!c->counts || !c->buffer)
    return error_set(e, ERROR_SYSTEM, "out of memory for the buffers of communication (%lld bytes)",
                     (long long)c->buffer_bytes);
  return true;
}

static bool make_communicators(struct comm *c, struct error *e) {
  MPI_Comm ranks, host;
  int result = MPI_Comm_dup(MPI_COMM_WORLD, &ranks);
  if (result != MPI_SUCCESS) return comm_mpi_failed(c, result, "MPI_Comm_dup", e);
  c->ranks = ranks;
  if ((result = MPI_Comm_dup(MPI_COMM_WORLD, &c->beats)) != MPI_SUCCESS)
    return comm_mpi_failed(c, result, "MPI_Comm_dup", e);
  if ((result = MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &host)) != MPI_SUCCESS ||
      (result = MPI_Comm_rank(host, &c->local_rank)) != MPI_SUCCESS ||
      (result = MPI_Comm_size(host, &c->local_world)) != MPI_SUCCESS || (result = MPI_Comm_free(&host)) != MPI_SUCCESS)
    return comm_mpi_failed(c, result, "MPI_Comm_split_type", e);
  return true;
}

/* "Open MPI v4.1.4, 4 ranks on 2 hosts: node1 x2, node2 x2" from all ranks' host names. */
static char *topology_text(const char *library, const char *names, int world) {
  size_t size = MPI_MAX_LIBRARY_VERSION_STRING + 64 + (size_t)world * (MPI_MAX_PROCESSOR_NAME + 16);
  char *text = malloc(size), *hosts = malloc(size);
  if (text && hosts) {
    size_t used = 0;
    int n_hosts = 0;
    hosts[0] = 0;
    for (int i = 0; i < world; i++) {
      const char *name = names + (size_t)i * MPI_MAX_PROCESSOR_NAME;
      int before = 0, ranks = 0;
      for (int j = 0; j < world; j++) {
        if (strcmp(name, names + (size_t)j * MPI_MAX_PROCESSOR_NAME) != 0) continue;
        before += j < i;
        ranks++;
      }
      if (before) continue;
      used += (size_t)snprintf(hosts + used, size - used, "%s%s x%d", n_hosts ? ", " : "", name, ranks);
      n_hosts++;
    }
    snprintf(text, size, "%.*s, %d rank%s on %d host%s: %s", (int)strcspn(library, ",\n"), library, world,
             world == 1 ? "" : "s", n_hosts, n_hosts == 1 ? "" : "s", hosts);
  }
  free(hosts);
  return text;
}

static bool describe(struct comm *c, struct error *e) {
  char library[MPI_MAX_LIBRARY_VERSION_STRING] = "", name[MPI_MAX_PROCESSOR_NAME] = "";
  int length = 0;
  int result = MPI_Get_library_version(library, &length);
  if (result != MPI_SUCCESS) return comm_mpi_failed(c, result, "MPI_Get_library_version", e);
  if ((result = MPI_Get_processor_name(name, &length)) != MPI_SUCCESS)
    return comm_mpi_failed(c, result, "MPI_Get_processor_name", e);
  char *names = calloc((size_t)c->world, sizeof name);
  if (!comm_agree(c, names != NULL || error_set(e, ERROR_SYSTEM, "out of memory for %d host names", c->world), e) ||
      !comm_gather_all(c, names, name, sizeof name, e)) {
    free(names);
    return false;
  }
  c->topology = topology_text(library, names, c->world);
  free(names);
  return comm_agree(c, c->topology || error_set(e, ERROR_SYSTEM, "out of memory for the list of hosts"), e);
}

static void discard(struct comm *c) {
  comm_watch_discard(c);
  free(c->topology);
  free(c->buffer);
  free(c->counts);
  free(c);
}

/* Frees what MPI holds and finalises it; all ranks come here. */
static void finish_mpi(struct comm *c) {
  MPI_Comm *const made[] = {&c->beats, &c->ranks};
  for (int i = 0; i < 2; i++)
    if (*made[i] != MPI_COMM_NULL && *made[i] != MPI_COMM_WORLD && MPI_Comm_free(made[i]) != MPI_SUCCESS) log_warning("MPI_Comm_free failed");
  atomic_store(&comm_mpi_live, false);
  if (MPI_Finalize() != MPI_SUCCESS) log_warning("MPI_Finalize failed");
}

/* Everything after MPI_Init, in agreement: all ranks come out of it with the same answer. */
static bool join(struct comm *c, struct launched l, int expected_world, struct error *e) {
  struct error own;
  bool fits = check_world(c, l, expected_world, &own);
  if (!fits && e) *e = own;
  if (!comm_agree(c, fits, e)) {
    if (!fits && !c->broken && e) *e = own; /* in its own words, not as rank 0's */
    return false;
  }
  if (c->mpi && !make_communicators(c, e)) return false;
  if (!comm_agree(c, allocate(c, e), e)) return false;
  if (c->mpi) return describe(c, e);
  c->topology = strdup("single process");
  return c->topology || error_set(e, ERROR_SYSTEM, "out of memory");
}

struct comm *comm_open(int expected_world, struct error *e) {
  struct comm *c = calloc(1, sizeof *c);
  if (!c) {
    error_set(e, ERROR_SYSTEM, "out of memory for the communicator");
    return NULL;
  }
  c->world = c->local_world = 1;
  c->ranks = c->beats = MPI_COMM_NULL;
  bool launched = launched_for_mpi();
  const struct launched tasks = launched_tasks(launched); /* before MPI_Init, which may add to the environment */

  const bool joined = (!launched || start_mpi(c, e)) && join(c, tasks, expected_world, e);
  if (joined && c->world == 1) comm_start_ended();
  if (joined) return c;

  if (c->broken) { /* the others may be waiting for this rank */
    if (e) log_failure(e);
    comm_abort(c, c->broken);
  }
  if (c->world > 1 && e) {
    if (c->rank == 0) log_failure(e);
    e->message[0] = e->hint[0] = 0;
    struct error none;
    if (!comm_barrier(c, &none)) comm_abort(c, ERROR_COMMUNICATION);
  }
  if (c->mpi) finish_mpi(c);
  comm_start_ended();
  discard(c);
  return NULL;
}

void comm_close(struct comm *c) {
  struct error e;
  if (c->broken) comm_abort(c, c->broken);
  comm_start_ended(); /* of a world that nobody watched */
  comm_enter(c, COMM_FINISH, "close", c->watch.update);
  comm_exchange_close(c);
  if (!comm_barrier(c, &e)) {
    log_failure(&e);
    comm_abort(c, ERROR_COMMUNICATION);
  }
  comm_watch_end_heartbeats(c);
  if (c->mpi) finish_mpi(c);
  comm_watch_end(c);
  discard(c);
}

int comm_rank(const struct comm *c) { return c->rank; }
int comm_world(const struct comm *c) { return c->world; }
int comm_local_rank(const struct comm *c) { return c->local_rank; }
int comm_local_world(const struct comm *c) { return c->local_world; }
const char *comm_library(void) {
  static char library[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  if (MPI_Get_library_version(library, &length) != MPI_SUCCESS) return "an MPI library that does not tell its version";
  library[strcspn(library, ",\n")] = 0;
  return library;
}

const char *comm_topology(const struct comm *c) { return c->topology; }
