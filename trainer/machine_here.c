/* The machine that fp4d runs on, as `plan` and `check` see it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "kernels/kernels.h"
#include "trainer/machine.h"

int64_t machine_memory(void) {
  int64_t limit = (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE);
  char *text;
  size_t bytes;
  struct error e;
  if (file_exists("/sys/fs/cgroup/memory.max") &&
      file_read("/sys/fs/cgroup/memory.max", 4096, ERROR_SYSTEM, &text, &bytes, &e)) {
    int64_t group = strtoll(text, NULL, 10); /* "max": 0 */
    if (group > 0 && group < limit) limit = group;
    free(text);
  }
  return limit;
}

enum { SIDE = 1024, TRIALS = 5 };

static double contraction_flops(struct device *d, void *memory, struct error *e) {
  char *base = memory;
  struct matrix a = {base, DTYPE_BF16, SIDE, SIDE}, out = {base + 2 * SIDE * SIDE, DTYPE_BF16, SIDE, SIDE};
  const struct operand row = operand_of_matrix(&a, VIEW_ROW);
  double best = 0;
  for (int i = 0; i < TRIALS; i++) {
    const double t0 = clock_seconds();
    d->k->contract(d, &out, &row, &row, NULL);
    if (!d->k->synchronize(d, e)) return 0;
    const double rate = 2.0 * SIDE * SIDE * SIDE / (clock_seconds() - t0);
    if (rate > best) best = rate;
  }
  return best;
}

/* Bytes read and written per second by one copying thread. */
static double copy_bandwidth(char *memory, size_t bytes) {
  double best = 0;
  for (int i = 0; i < TRIALS; i++) {
    const double t0 = clock_seconds();
    memcpy(memory + bytes, memory, bytes);
    __asm__ volatile("" : : "r"(memory) : "memory");
    const double rate = 2.0 * (double)bytes / (clock_seconds() - t0);
    if (rate > best) best = rate;
  }
  return best;
}

bool machine_here(int threads, struct machine *out, struct error *e) {
  enum { COPY = 32 << 20 };
  static char title[192];
  const struct extent x = {.tokens = SIDE, .head_chunk = SIDE, .attention = {1, SIDE, 1, 1, 64}, .hidden_size = SIDE,
                           .ffn_size = SIDE, .vocab_size = SIDE};
  struct device *d = device_open("cpu", threads, e);
  if (!d) return false;
  const int64_t scratch_bytes = d->k->scratch_bytes(d, &x);
  void *scratch = d->k->allocate(d, (size_t)scratch_bytes, e), *memory = d->k->allocate(d, 2 * (size_t)COPY, e);
  bool good = scratch && memory;
  if (good) {
    char text[128];
    d->k->set_scratch(d, scratch, scratch_bytes);
    d->k->clear(d, memory, 2 * (size_t)COPY);
    const double flops = contraction_flops(d, memory, e), bandwidth = copy_bandwidth(memory, COPY);
    good = flops > 0;
    d->k->describe(d, text, sizeof text);
    snprintf(title, sizeof title, "This machine's processors (%s), measured now", text);
    *out = (struct machine){"cpu", title, flops, flops, 0, (double)machine_memory(), bandwidth, 1, bandwidth, bandwidth, "cpu"};
  }
  d->k->release(d, memory);
  d->k->release(d, scratch);
  d->k->close(d);
  return good;
}

const struct machine *machine_of_device(const struct device *d) {
  char text[256], product[64];
  if (strcmp(d->k->backend, "cpu") == 0) return NULL;
  d->k->describe(d, text, sizeof text);
  return sscanf(text, "GPU %*d: %63[^,]", product) == 1 ? machine_of_product(product) : NULL;
}
