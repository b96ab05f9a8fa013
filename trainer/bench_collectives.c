/* bench collectives: gradients summed into their owners' rows, weights copied to all; on GPUs
 * beside what NCCL's own collectives reach.
 *
 * What all ranks can see before they exchange anything fails in agreement.  A rank that fails in the
 * midst of an exchange says so and ends the job: the others wait for it.  One that is lost or stands
 * still is the watchdog's (comm.h). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/exchange.h"
#include "kernels/link.h"
#include "trainer/bench.h"
#include "trainer/machine.h"
#include "trainer/record.h"

enum { MEGABYTES = 64, GPU_MEGABYTES = 1024 };

/* The others do not ask how an exchange went here; and a library that has failed may not come back from its end. */
static void or_end_the_job(struct comm *c, bool good, const struct error *e) {
  if (good) return;
  log_failure(e);
  comm_abort(c, e->code);
}

static void measure(const struct bench *b, int times, bool (*body)(void *context, struct error *e), void *context,
                    struct bench_seconds *out) {
  struct error e;
  const bool good = bench_measure(b, times, body, context, out, &e);
  or_end_the_job(b->comm, good, &e);
}

/* ---- ranks on CPUs --------------------------------------------------------------- */

enum { ROW = 64 }; /* elements; every number of them here is its multiple */

struct summing {
  struct comm *comm;
  float *x, *copy;
  int64_t n;
};

/* An update's: sums into their owners' rows, which then go to all. */
static bool sum(void *context, struct error *e) {
  const struct summing *s = context;
  comm_enter(s->comm, COMM_UPDATE, "reduce-scatter, all-gather", -1);
  const struct comm_part part = {s->x, s->n / ROW, ROW, DTYPE_F32};
  return comm_finish(s->comm, comm_reduce_scatter_begin(s->comm, &part, 1), e) &&
         comm_finish(s->comm, comm_all_gather_begin(s->comm, &part, 1), e);
}

static bool copy(void *context, struct error *e) {
  struct summing *s = context;
  comm_enter(s->comm, COMM_UPDATE, "copy in memory", -1);
  (void)e;
  memcpy(s->copy, s->x, (size_t)s->n * sizeof(float));
  __asm__ volatile("" : : "r"(s->copy) : "memory");
  return true;
}

/* Before pages are touched: a rank that the kernel kills for memory says nothing. */
static bool fits_memory(const struct comm *c, int64_t elements, struct error *e) {
  const double wanted = 2.0 * sizeof(float) * (double)elements * comm_local_world(c), have = (double)machine_memory();
  if (wanted <= have) return true;
  error_set(e, ERROR_SYSTEM, "two times %.3f GB on each of this host's %d ranks are more than its memory, %.3f GB", (double)elements * sizeof(float) / 1e9,
            comm_local_world(c), have / 1e9);
  return error_hint(e, "give --megabytes N");
}

static bool through_memory(struct bench *b, const struct comm_device *host, struct error *e) {
  const int world = comm_world(b->comm);
  if (world == 1) {
    error_set(e, ERROR_USAGE, "bench collectives: a world of one has nothing to sum");
    return error_hint(e, "mpirun -np 2 fp4d bench collectives");
  }
  const int64_t most = (b->a.megabytes ? b->a.megabytes : MEGABYTES) << 18; /* elements */
  if (!comm_agree(b->comm, fits_memory(b->comm, most, e), e)) return false;
  struct summing s = {.comm = b->comm, .x = calloc((size_t)most, sizeof(float)), .copy = calloc((size_t)most, sizeof(float))};
  bool good = comm_agree(b->comm, (s.x && s.copy) || error_set(e, ERROR_SYSTEM, "out of memory"), e);
  good = good && comm_exchange_open(b->comm, host, 1, e);
  if (good) bench_title(b, "%s\n  reduce-scatter, then all-gather: every rank ends with the FP32 sum, taken in rank order\n  %12s %12s %14s %14s %14s", comm_topology(b->comm), "bytes", "ms", "GB/s", "bus GB/s", "copy GB/s");
  for (int64_t n = 1024; good && n <= most; n = n < most && 16 * n > most ? most : 16 * n) {
    struct bench_seconds t, c;
    s.n = n;
    const int times = n < 1 << 18 ? 20 : 1;
    measure(b, times, sum, &s, &t);
    measure(b, times, copy, &s, &c);
    const double bytes = (double)n * sizeof(float), rate = bytes / t.median, bus = rate * 2 * (world - 1) / world;
    json_t *o = json_object();
    record_text(o, "operation", "reduce-scatter, all-gather");
    record_integer(o, "world", world);
    record_integer(o, "bytes", n * (int64_t)sizeof(float));
    record_real(o, "bytes_per_second", rate);
    record_real(o, "bus_bytes_per_second", bus); /* what a ring moves over each link: 2 (n-1)/n of it */
    record_real(o, "copy_bytes_per_second", bytes / c.median);
    bench_row(b, o, &t, "%12" PRId64 " %12.4f %14.3f %14.3f %14.3f", n * (int64_t)sizeof(float), t.median * 1e3, rate * 1e-9, bus * 1e-9,
              bytes / c.median * 1e-9);
  }
  comm_exchange_close(b->comm);
  free(s.x);
  free(s.copy);
  return good;
}

/* ---- ranks on GPUs ------------------------------------------------------------------ */

enum { GPU_ROW = 4096, RANKS_MOST = 4096 }; /* BF16 elements */

struct wire {
  struct comm *comm;
  struct comm_device own;
  struct matrix x;   /* shares of equal size */
  struct link *link; /* NCCL itself; while the exchanges' is closed */
  const char *operation;
};

static bool ours(void *context, bool copies, struct error *e) {
  const struct wire *w = context;
  const struct kernels *k = w->own.device->k;
  comm_enter(w->comm, COMM_UPDATE, w->operation, -1);
  const struct comm_part part = {w->x.data, w->x.rows, w->x.cols, w->x.dtype};
  const int64_t ticket = copies ? comm_all_gather_begin(w->comm, &part, 1) : comm_reduce_scatter_begin(w->comm, &part, 1);
  return comm_finish(w->comm, ticket, e) && k->synchronize(w->own.device, e);
}
static bool our_sum(void *context, struct error *e) { return ours(context, false, e); }
static bool our_copy(void *context, struct error *e) { return ours(context, true, e); }

static bool launched(const struct wire *w, struct error *e) {
  for (;;) {
    const enum link_state s = w->own.device->k->links->state(w->link, e);
    if (s != LINK_BUSY) return s == LINK_IDLE;
    nanosleep(&(struct timespec){.tv_nsec = 10000}, NULL);
  }
}

/* One call of the library's between the device's operations, and its end. */
static bool library(const struct wire *w, bool (*call)(const struct wire *w, struct error *e), struct error *e) {
  const struct links *k = w->own.device->k->links;
  comm_enter(w->comm, COMM_UPDATE, w->operation, -1);
  k->ready(w->link, 0);
  if (!k->begin(w->link, 0, e) || !call(w, e) || !launched(w, e) || !k->end(w->link, 0, e)) return false;
  k->follow(w->link, 0);
  return w->own.device->k->synchronize(w->own.device, e);
}

static int64_t share_of(const struct wire *w) { return w->x.rows / comm_world(w->comm) * w->x.cols; }

static bool call_sum(const struct wire *w, struct error *e) {
  return w->own.device->k->links->native_sum(w->link, w->x.data, share_of(w), w->x.dtype, e);
}
static bool call_copy(const struct wire *w, struct error *e) {
  int64_t begin[RANKS_MOST + 1];
  for (int r = 0; r <= comm_world(w->comm); r++) begin[r] = r * share_of(w);
  return w->own.device->k->links->gather(w->link, &(struct link_gather){w->x.data, w->x.dtype, begin}, 1, e);
}
/* In a world of one: what our sums do beside the links, in rounds of half the staging memory. */
static bool call_self(const struct wire *w, struct error *e) {
  const struct links *k = w->own.device->k->links;
  const int64_t room = w->own.staging_bytes / 2 / (int64_t)dtype_bytes(w->x.dtype), n = w->x.rows * w->x.cols;
  bool good = true;
  int half = 0;
  for (int64_t at = 0; good && at < n; at += room, half = !half) {
    const int64_t count = n - at < room ? n - at : room;
    uint16_t *own = (uint16_t *)w->x.data + at, *staged = (uint16_t *)w->own.staging + half * room;
    good = k->transfer(w->link, half, &(struct link_transfer){0, w->x.dtype, own, staged, count, count}, 1, e) && launched(w, e) &&
           k->sum(w->link, half, &(struct link_sum){own, staged, count, count, w->x.dtype}, 1, e);
  }
  return good;
}

static bool native_sum(void *context, struct error *e) { return library(context, call_sum, e); }
static bool library_copy(void *context, struct error *e) { return library(context, call_copy, e); }
static bool self_sum(void *context, struct error *e) { return library(context, call_self, e); }

static void gpu_row(const struct bench *b, struct wire *w, const char *name, bool (*body)(void *, struct error *)) {
  struct bench_seconds t;
  const int world = comm_world(w->comm);
  w->operation = name;
  measure(b, 1, body, w, &t);
  const double bytes = (double)(w->x.rows * w->x.cols) * (double)dtype_bytes(w->x.dtype), rate = bytes / t.median;
  const double bus = rate * (world - 1) / world;
  json_t *o = json_object();
  record_text(o, "operation", name);
  record_integer(o, "world", world);
  record_integer(o, "bytes", (int64_t)bytes);
  record_real(o, "bytes_per_second", rate);
  record_real(o, "bus_bytes_per_second", bus); /* what a rank sends of it, and receives */
  bench_row(b, o, &t, "  %-44s %12.0f %12.4f %12.3f %12.3f", name, bytes, t.median * 1e3, rate * 1e-9, bus * 1e-9);
}

/* All ranks join; the id of rank 0 names the world. */
static bool join_library(struct wire *w, struct error *e) {
  const struct links *k = w->own.device->k->links;
  char id[LINK_ID_BYTES] = {0};
  const bool made = comm_rank(w->comm) != 0 || k->make_id(id, e);
  if (!comm_agree(w->comm, made, e) || !comm_broadcast(w->comm, id, sizeof id, 0, e)) return false;
  comm_enter(w->comm, COMM_START, "joining NCCL's world", -1);
  w->link = k->open(w->own.device, id, comm_rank(w->comm), comm_world(w->comm), 1, e);
  or_end_the_job(w->comm, w->link && launched(w, e), e);
  return true;
}

static void sizes(const struct bench *b, struct wire *w, bool of_library) {
  const int64_t wanted[2] = {b->a.megabytes ? b->a.megabytes : MEGABYTES, b->a.megabytes ? 0 : GPU_MEGABYTES};
  const bool alone = comm_world(w->comm) == 1;
  for (int i = 0; i < 2 && wanted[i]; i++) {
    w->x.rows = (wanted[i] << 20) / (2 * GPU_ROW) / comm_world(w->comm) * comm_world(w->comm);
    if (!of_library) {
      gpu_row(b, w, "ours: reduce-scatter, in rank order", our_sum);
      gpu_row(b, w, "ours: all-gather", our_copy);
      continue;
    }
    gpu_row(b, w, "NCCL's own reduce-scatter", native_sum);
    gpu_row(b, w, "NCCL's own all-gather", library_copy);
    if (alone) gpu_row(b, w, "ours: sent to itself, and a sum of one", self_sum);
  }
}

/* Every rank has a row or more of the smallest size. */
static bool fits_ranks(const struct bench *b, struct error *e) {
  const int64_t megabytes = b->a.megabytes ? b->a.megabytes : MEGABYTES, world = comm_world(b->comm);
  if (world <= RANKS_MOST && world <= (megabytes << 20) / (2 * GPU_ROW)) return true;
  error_set(e, ERROR_USAGE, "bench collectives: %" PRId64 " ranks are too many for %" PRId64 " MB", world, megabytes);
  return error_hint(e, "%d ranks at most, and 128 for each of --megabytes", RANKS_MOST);
}

static bool on_gpus(struct bench *b, struct comm_device *own, struct error *e) {
  const struct kernels *k = own->device->k;
  struct wire w = {.comm = b->comm, .x = {NULL, DTYPE_BF16, 0, GPU_ROW}};
  char text[384];
  const size_t bytes = (size_t)(b->a.megabytes ? b->a.megabytes : GPU_MEGABYTES) << 20;
  if (!fits_ranks(b, e)) return false; /* alike on all ranks */
  own->staging_bytes = (int64_t)256 << 20;
  own->staging = k->allocate(own->device, (size_t)own->staging_bytes, e);
  w.x.data = own->staging ? k->allocate(own->device, bytes, e) : NULL;
  w.own = *own;
  bool good = comm_agree(b->comm, w.x.data != NULL, e) && comm_exchange_open(b->comm, own, 1, e);
  if (good) {
    k->clear(own->device, w.x.data, bytes);
    comm_exchange_describe(b->comm, text, sizeof text);
    bench_title(b, "%s\n%s\n  BF16; bus: what a rank sends, (n-1)/n.  Two H200 over NVLink, multicast off, at 1 GiB, by NCCL's own test: reduce-scatter 257,\n"
                   "  all-gather 266 GB/s bus\n  %-44s %12s %12s %12s %12s", comm_topology(b->comm), text[0] ? text : "a world of one exchanges nothing; what it can do:",
                "", "bytes", "ms", "GB/s", "bus GB/s");
    if (comm_world(b->comm) > 1) sizes(b, &w, false);
    comm_exchange_close(b->comm);
    good = join_library(&w, e);
    if (good) sizes(b, &w, true);
  }
  comm_enter(b->comm, COMM_FINISH, "leaving NCCL's world", -1);
  if (w.link) k->links->close(w.link, true);
  if (w.x.data) k->release(own->device, w.x.data);
  if (own->staging) k->release(own->device, own->staging);
  return good;
}

bool bench_collectives(struct bench *b, struct error *e) {
  const char *backend = b->config ? b->config->run.backend : "cpu";
  struct comm_device own = {device_open_rank(backend, 1, comm_local_rank(b->comm), e), NULL, 0};
  bool good = comm_agree(b->comm, own.device != NULL, e);
  if (good) good = own.device->k->host_memory ? through_memory(b, &own, e) : on_gpus(b, &own, e);
  if (own.device) own.device->k->close(own.device);
  return good;
}
