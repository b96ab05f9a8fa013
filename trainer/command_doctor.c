/* `fp4d doctor`: what this machine has for fp4d, and a hello of each part. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/threads.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/store.h"
#include "comm/comm.h"
#include "comm/nccl_fabric.h"
#include "comm/nccl_known.h"
#include "kernels/probe.h"
#include "trainer/command.h"
#include "trainer/config.h"
#include "trainer/hello_link.h"
#include "trainer/machine.h"
#include "trainer/version.h"

#define START_S 300. /* of MPI, which has to reach every host */
#define HELLO_S 60. /* of each step of NCCL's */

struct doctor_arguments {
  const char *folder;
};

const struct argument command_doctor_arguments[] = {
    {.name = "FOLDER", .type = ARGUMENT_OPTIONAL_WORD, .offset = offsetof(struct doctor_arguments, folder),
     .help = "where checkpoints would go: 128 MiB are written there, read and removed (default: the current folder)"},
    {0},
};

struct visit {
  bool speaks; /* rank 0 */
  enum error_code first; /* kind of the first problem */
  int problems;
  bool stuck; /* a thread stands in NCCL for good */
};

static void say(const struct visit *v, const char *state, const char *subject, const char *format, ...) __attribute__((format(printf, 4, 5)));
static void say(const struct visit *v, const char *state, const char *subject, const char *format, ...) {
  va_list arguments;
  if (!v->speaks) return;
  printf("%-8s %-9s ", state, subject);
  va_start(arguments, format);
  vprintf(format, arguments);
  va_end(arguments);
  putchar('\n');
  fflush(stdout);
}

static void say_problem(struct visit *v, const char *subject, const struct error *e) {
  if (v->problems++ == 0) v->first = e->code;
  say(v, "PROBLEM", subject, e->hint[0] ? "%s (%s)" : "%s", e->message, e->hint);
}

/* What need not be there: its absence is no problem. */
static void say_absent(const struct visit *v, const char *subject, const struct error *e) {
  say(v, "absent", subject, e->hint[0] ? "%s (%s)" : "%s", e->message, e->hint);
}

static double gib(int64_t bytes) { return (double)bytes / (1 << 30); }

/* ---- a device says hello: small whole numbers, whose products are exact everywhere ---- */

enum { SIDE = 256 };

static int whole_number(int64_t i, int salt) { return (int)((i * 31 + salt) % 7) - 3; }

static bool contract_whole_numbers(struct device *d, char *memory, float *host, struct error *e) {
  const size_t bytes = (size_t)SIDE * SIDE * sizeof(float);
  struct matrix a = {memory, DTYPE_F32, SIDE, SIDE}, b = {memory + bytes, DTYPE_F32, SIDE, SIDE};
  struct matrix out = {memory + 2 * bytes, DTYPE_F32, SIDE, SIDE};
  for (int64_t i = 0; i < (int64_t)SIDE * SIDE; i++) host[i] = (float)whole_number(i, 1);
  d->k->upload(d, a.data, host, bytes);
  if (!d->k->synchronize(d, e)) return false;
  for (int64_t i = 0; i < (int64_t)SIDE * SIDE; i++) host[i] = (float)whole_number(i, 5);
  d->k->upload(d, b.data, host, bytes);
  const struct operand rows = operand_of_matrix(&a, VIEW_ROW), columns = operand_of_matrix(&b, VIEW_ROW);
  d->k->contract(d, &out, &rows, &columns, NULL);
  d->k->download(d, host, out.data, bytes);
  if (!d->k->synchronize(d, e)) return false;
  for (int64_t i = 0; i < SIDE; i++)
    for (int64_t j = 0; j < SIDE; j++) {
      int sum = 0;
      for (int64_t k = 0; k < SIDE; k++) sum += whole_number(i * SIDE + k, 1) * whole_number(j * SIDE + k, 5);
      if (host[i * SIDE + j] == (float)sum) continue;
      error_set(e, ERROR_DEVICE, "a contraction of whole numbers is wrong: %g where %d belongs", (double)host[i * SIDE + j], sum);
      return error_hint(e, "do not train on this device");
    }
  return true;
}

static bool hello_device(struct device *d, struct error *e) {
  const struct extent x = {.tokens = SIDE, .head_chunk = SIDE, .attention = {1, SIDE, 1, 1, 64}, .hidden_size = SIDE, .ffn_size = SIDE,
                           .vocab_size = SIDE};
  const size_t matrices = 3 * (size_t)SIDE * SIDE * sizeof(float);
  const int64_t scratch = d->k->scratch_bytes(d, &x);
  float *host = malloc((size_t)SIDE * SIDE * sizeof *host);
  char *memory = host ? d->k->allocate(d, matrices + (size_t)scratch, e) : NULL;
  bool good = memory != NULL || (host ? false : error_set(e, ERROR_SYSTEM, "out of memory"));
  if (good) {
    d->k->set_scratch(d, memory + matrices, scratch);
    good = contract_whole_numbers(d, memory, host, e);
  }
  if (memory) d->k->release(d, memory);
  free(host);
  return good;
}

static void see_device(struct visit *v, const char *subject, const char *backend, int ordinal) {
  struct error e = {0};
  char text[512];
  struct device *d = device_open_rank(backend, 0, ordinal, &e);
  bool good = d != NULL;
  if (good) {
    d->k->describe(d, text, sizeof text);
    good = hello_device(d, &e);
  }
  if (good)
    say(v, "ok", subject, "backend %s computes right: %s", backend, text);
  else
    say_problem(v, subject, &e);
  if (d) d->k->close(d);
}

/* NCCL: what is known of its version here, and a hello on the first GPU that a backend is for. */
static void see_nccl(struct visit *v, const struct gpus_found *found) {
  struct error e = {0};
  char version[64];
  const char *wrong[NCCL_KNOWN_MOST];
  int first = 0;
  if (!gpu_nccl_version(version, sizeof version, &e)) {
    say_problem(v, "nccl", &e);
    return;
  }
  const struct nccl_known_machine here = nccl_known_here();
  for (int i = nccl_known(version, &here, wrong) - 1; i >= 0; i--) say(v, "WARNING", "nccl", "%s", wrong[i]);
  while (first < found->number && !found->gpu[first].backend) first++;
  if (first == found->number) {
    say(v, "ok", "nccl", "%s", version);
    return;
  }
  const char *multicast = getenv("NCCL_NVLS_ENABLE");
  const double t0 = clock_seconds();
  struct device *d = device_open_rank(found->gpu[first].backend, 0, first, &e);
  if (d && hello_link(d, HELLO_S, &v->stuck, &e))
    say(v, "ok", "nccl", "%s: GPU %d joined a world of one, sent to itself, summed, gathered and aborted it in %.1f s; NCCL_NVLS_ENABLE %s", version, first,
        clock_seconds() - t0, multicast ? multicast : "not set");
  else
    say_problem(v, "nccl", &e);
  if (d && !v->stuck) d->k->close(d);
}

static void see_fabric(struct visit *v, const struct gpus_found *found) {
  struct gpu_fabric *of = calloc((unsigned)found->number, sizeof *of);
  if (!of) return;
  for (int i = 0; i < found->number; i++) of[i] = found->gpu[i].fabric;
  const struct nccl_fabric fabric = nccl_fabric(of, found->number, "GPU ");
  say(v, "ok", "fabric", "%s", fabric.summary);
  for (int i = 0; i < fabric.n; i++) say(v, "WARNING", "fabric", "%s", fabric.warning[i]);
  free(of);
}

static void see_gpus(struct visit *v) {
  struct gpus_found found;
  struct error e = {0};
  char version[64];
  if (!gpus_find(&found, &e)) {
    say_absent(v, "gpu", &e);
    return;
  }
  say(v, "ok", "driver", "for CUDA %d.%d; this program was built with %d.%d", found.driver / 1000, found.driver / 10 % 100,
      found.runtime / 1000, found.runtime / 10 % 100);
  for (int i = 0; i < found.number; i++) {
    const struct gpu_found *g = &found.gpu[i];
    say(v, "ok", "gpu", "%d: %s, %.1f GiB, %.1f free, compute capability %d.%d, reaches %d of %d others by itself, %s", i, g->name,
        gib(g->memory), gib(g->available), g->major, g->minor, g->peers, found.number - 1, g->uuid);
    if (g->backend)
      see_device(v, "gpu", g->backend, i);
    else
      say(v, "absent", "gpu", "no backend of this program runs on compute capability %d.%d: sm90 is for 9.0, sm100 for 10.0", g->major, g->minor);
  }
  see_fabric(v, &found);
  if (gpu_cublaslt_version(version, sizeof version, &e))
    say(v, "ok", "cublaslt", "%s", version);
  else
    say_problem(v, "cublaslt", &e);
  see_nccl(v, &found);
  gpus_release(&found);
}

/* ---- ranks ------------------------------------------------------------------------------ */

static void see_ranks(struct visit *v, struct comm *c) {
  struct error e = {0};
  const int world = comm_world(c);
  int64_t sum = comm_rank(c) + 1;
  if (world == 1) {
    say(v, "ok", "mpi", "one process; start this under mpirun to have ranks say hello (%s)", comm_library());
    return;
  }
  const double t0 = clock_seconds();
  bool good = comm_sum_i64(c, &sum, 1, &e);
  const int64_t wanted = (int64_t)world * (world + 1) / 2;
  if (good && sum != wanted) good = error_set(&e, ERROR_COMMUNICATION, "ranks sum up to %" PRId64 ", not %" PRId64, sum, wanted);
  if (good)
    say(v, "ok", "mpi", "%s; a sum of all ranks took %.3f ms", comm_topology(c), (clock_seconds() - t0) * 1e3);
  else
    say_problem(v, "mpi", &e);
}

/* ---- where checkpoints would go ----------------------------------------------------------- */

enum { ROWS = 1 << 13, COLS = 1 << 12 }; /* 128 MiB of FP32 */

static bool hello_checkpoint(const char *folder, float *data, double *write, double *read, struct error *e) {
  char path[STORE_PATH];
  struct tensor_slice s = {.name = "param/hello", .dtype = DTYPE_F32, .global_rows = ROWS, .rows = ROWS, .cols = COLS, .data = data};
  const double t0 = clock_seconds();
  struct checkpoint_writer *w = checkpoint_create(folder, 0, CHECKPOINT_STORE, NULL, e);
  if (!w) return false;
  bool good = checkpoint_add(w, &s, 1, e);
  good = checkpoint_finish(w, good ? "{}" : NULL, e) && good;
  *write = clock_seconds() - t0;
  if (!good) return false;
  store_step_path(folder, 0, path);
  struct checkpoint *k = checkpoint_open(path, true, e);
  s.data = data + (size_t)ROWS * COLS;
  good = k && checkpoint_read(k, &s, 1, e);
  checkpoint_close(k);
  *read = clock_seconds() - t0 - *write;
  if (good && memcmp(data, s.data, sizeof(float) * ROWS * COLS) != 0)
    good = error_set(e, ERROR_CHECKPOINT, "a checkpoint reads back with other values");
  return good;
}

static void see_disk(struct visit *v, const char *folder) {
  struct error e = {0};
  char name[4096];
  struct statvfs fs;
  double write = 0, read = 0;
  float *data = NULL;
  bool good = snprintf(name, sizeof name, "%s/fp4d-doctor", folder) < (int)sizeof name || error_set(&e, ERROR_USAGE, "the name of FOLDER is too long");
  if (good && statvfs(folder, &fs) != 0) good = error_set(&e, ERROR_SYSTEM, "%s: %s", folder, strerror(errno));
  if (good && file_exists(name)) {
    good = error_set(&e, ERROR_SYSTEM, "%s is there already", name);
    error_hint(&e, "left by a doctor that was stopped, or another one is at work; remove it");
  }
  if (good && !(data = malloc(2 * sizeof(float) * ROWS * COLS))) good = error_set(&e, ERROR_SYSTEM, "no memory for a checkpoint of 128 MiB");
  if (good) {
    for (int64_t i = 0; i < (int64_t)ROWS * COLS; i++) data[i] = (float)(int32_t)((uint32_t)i * 2654435761u) * 0x1p-31f;
    good = hello_checkpoint(name, data, &write, &read, &e);
    struct error late = {0};
    if (!file_remove_tree(name, ERROR_SYSTEM, &late) && good) {
      e = late;
      good = false;
    }
  }
  free(data);
  if (!good) {
    say_problem(v, "disk", &e);
    return;
  }
  const double gigabytes = sizeof(float) * (double)ROWS * COLS / 1e9;
  say(v, "ok", "disk", "%s: %.1f GB free; a checkpoint of %.2f GB written, compressed and durable, at %.2f GB/s, verified and read at %.2f GB/s",
      folder, (double)fs.f_bavail * (double)fs.f_frsize / 1e9, gigabytes, gigabytes / write, gigabytes / read);
}

int command_doctor(int argc, char **argv) {
  struct doctor_arguments a = {.folder = "."};
  struct error e = {0};
  if (!arguments_parse(command_doctor_arguments, argc, argv, &a, &e)) return command_fail(&e);
  comm_start_limit(START_S);
  struct comm *c = comm_open(0, &e);
  if (!c) return command_fail(&e);
  struct comm_limits limits;
  config_default_limits(&limits);
  comm_enter(c, COMM_UNTIMED, "doctor", -1);
  if (!comm_agree(c, comm_watch(c, &limits, &e), &e)) {
    const int code = command_fail(&e);
    comm_close(c);
    return code;
  }
  struct visit v = {.speaks = comm_rank(c) == 0};
  say(&v, "ok", "program", "fp4d %s", version_build());
  say(&v, "ok", "host", "%d processor%s, %.1f GiB of memory", threads_available(), threads_available() == 1 ? "" : "s", gib(machine_memory()));
  if (v.speaks) see_device(&v, "cpu", "cpu", 0); /* of this host; the others' GPUs and disks are theirs to see */
  see_ranks(&v, c); /* before the GPUs: MPI may wait for a driver that NCCL is stuck in */
  if (v.speaks) see_gpus(&v);
  if (v.speaks) see_disk(&v, a.folder);
  if (v.speaks) printf("\n%d problem%s\n", v.problems, v.problems == 1 ? "" : "s");
  const enum error_code code = v.problems ? v.first : ERROR_NONE;
  if (v.stuck) {
    fflush(stdout);
    comm_abort(c, code);
  }
  comm_close(c);
  return (int)code;
}
