/* The CPU device: its table, its memory, its start and end. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "kernels/cpu/cpu.h"

/* Blocks of some size lie in huge pages where the system has them: the panels
 * and rows of an operation span many small ones. */
enum { ALIGNMENT = 256, HUGE_PAGE = 2 << 20 };

static void describe(const struct device *d, char *text, int size) {
  snprintf(text, (size_t)size, "%d threads, contractions by %s",
           threads_count(((const struct cpu_device *)d)->threads), cpu_isa_name());
}

static const char *refuse_extent(const struct device *d, const struct extent *x, enum dtype activations) {
  (void)d, (void)x, (void)activations;
  return NULL;
}

static int64_t scratch_bytes(const struct device *d, const struct extent *x) {
  int threads = threads_count(((const struct cpu_device *)d)->threads);
  int64_t group[] = {cpu_contract_scratch_bytes(x, threads), cpu_attention_scratch_bytes(x, threads),
                     cpu_producer_scratch_bytes(x, threads)};
  int64_t most = 0;
  for (size_t i = 0; i < sizeof group / sizeof group[0]; i++)
    if (group[i] > most) most = group[i];
  return most;
}

static void set_scratch(struct device *d, void *scratch, int64_t bytes) {
  cpu_of(d)->scratch = scratch;
  cpu_of(d)->scratch_bytes = bytes;
}

static void *allocate(struct device *d, size_t bytes, struct error *e) {
  (void)d;
  const size_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
  const size_t whole = bytes <= SIZE_MAX - unit ? (bytes + unit - 1) / unit * unit : 0;
  void *p = whole || !bytes ? aligned_alloc(unit, whole ? whole : unit) : NULL;
#ifdef MADV_HUGEPAGE
  if (p && unit == HUGE_PAGE) (void)madvise(p, whole, MADV_HUGEPAGE); /* advice: a refusal changes nothing */
#endif
  if (!p) {
    error_set(e, ERROR_SYSTEM, "no memory for %zu bytes", bytes);
    error_hint(e, "make the micro-batch or the model smaller, or run fewer ranks on this machine");
  }
  return p;
}

static void release(struct device *d, void *p) {
  (void)d;
  free(p);
}

static void clear(struct device *d, void *p, size_t bytes) {
  (void)d;
  if (bytes) memset(p, 0, bytes);
}

static void upload(struct device *d, void *to_device, const void *from_host, size_t bytes) {
  (void)d;
  if (bytes) memcpy(to_device, from_host, bytes);
}

static void download(struct device *d, void *to_host, const void *from_device, size_t bytes) {
  (void)d;
  if (bytes) memcpy(to_host, from_device, bytes);
}

/* Operations are done when they return, and have no faults to keep. */
static bool synchronize(struct device *d, struct error *e) {
  (void)d;
  (void)e;
  return true;
}

static bool make_events(struct device *d, int n, struct error *e) {
  free(cpu_of(d)->event);
  cpu_of(d)->event = calloc((size_t)n, sizeof *cpu_of(d)->event);
  return cpu_of(d)->event || error_set(e, ERROR_SYSTEM, "no memory for %d events", n);
}

static void record_event(struct device *d, int event) { cpu_of(d)->event[event] = clock_seconds(); }

static double seconds_between(struct device *d, int from, int to) { return cpu_of(d)->event[to] - cpu_of(d)->event[from]; }

static void close_device(struct device *d) {
  if (!d) return;
  free(cpu_of(d)->event);
  threads_destroy(cpu_of(d)->threads);
  free(d);
}

static const struct kernels table = {
    .backend = "cpu",
    .host_memory = true,
    .describe = describe,
    .refuse_encoding = cpu_refuse_encoding,
    .refuse_attention = cpu_refuse_attention,
    .refuse_extent = refuse_extent,
    .scratch_bytes = scratch_bytes,
    .set_scratch = set_scratch,
    .allocate = allocate,
    .release = release,
    .allocate_host = allocate,
    .release_host = release,
    .clear = clear,
    .upload = upload,
    .download = download,
    .synchronize = synchronize,
    .make_events = make_events,
    .record_event = record_event,
    .seconds_between = seconds_between,
    .quantise = cpu_quantise,
    .embedding_forward = cpu_embedding_forward,
    .embedding_backward = cpu_embedding_backward,
    .add_rmsnorm_forward = cpu_add_rmsnorm_forward,
    .add_rmsnorm_forward_cast = cpu_add_rmsnorm_forward_cast,
    .add_rmsnorm_backward = cpu_add_rmsnorm_backward,
    .rope_forward = cpu_rope_forward,
    .rope_backward = cpu_rope_backward,
    .attention_forward = cpu_attention_forward,
    .attention_gradient = cpu_attention_gradient,
    .attention_backward = cpu_attention_backward,
    .swiglu_forward = cpu_swiglu_forward,
    .swiglu_backward = cpu_swiglu_backward,
    .contract = cpu_contract,
    .cross_entropy = cpu_cross_entropy,
    .cross_entropy_within = cpu_cross_entropy_within,
    .adamw_update = cpu_adamw_update,
    .measure = cpu_measure,
    .sum = cpu_sum,
    .close = close_device,
};

struct device *cpu_open(int threads, struct error *e) {
  if (threads < 0) {
    error_set(e, ERROR_DEVICE, "%d threads asked of the cpu backend", threads);
    error_hint(e, "give a positive number, or 0 for all processors");
    return NULL;
  }
  if (!cpu_isa_choose(NULL, e)) return NULL;
  struct cpu_device *d = calloc(1, sizeof *d);
  if (!d) {
    error_set(e, ERROR_SYSTEM, "no memory for the cpu device");
    return NULL;
  }
  d->device.k = &table;
  d->threads = threads_create(threads ? threads : threads_available(), e);
  if (!d->threads) {
    free(d);
    return NULL;
  }
  return &d->device;
}
