/* Long sums: see longsum.h. */
#include "kernels/cpu/longsum.h"

#include "base/checked.h"

struct run {
  const void *op;
  void (*chunk)(const void *op, int64_t first, int64_t n, struct longsum_part *part);
  int64_t elements, first_chunk;
  struct longsum_part *parts;
};

static void run_chunk(void *context, int64_t index, int worker) {
  (void)worker;
  const struct run *r = context;
  int64_t first = (r->first_chunk + index) * REDUCE_CHUNK, left = r->elements - first;
  r->parts[index] = (struct longsum_part){0};
  r->chunk(r->op, first, left < REDUCE_CHUNK ? left : REDUCE_CHUNK, &r->parts[index]);
}

struct longsum_part cpu_longsum(struct device *d, int64_t elements, const void *op,
                                void (*chunk)(const void *op, int64_t first, int64_t n, struct longsum_part *part)) {
  struct cpu_device *c = cpu_of(d);
  CPU_REQUIRE(c->scratch_bytes >= LONGSUM_SCRATCH_BYTES, "scratch is too small");
  struct longsum_part total = {0};
  struct run r = {.op = op, .chunk = chunk, .elements = elements, .parts = (struct longsum_part *)(void *)c->scratch};
  int64_t chunks = ceil_div(elements, REDUCE_CHUNK);
  for (; r.first_chunk < chunks; r.first_chunk += LONGSUM_WAVE) {
    int64_t left = chunks - r.first_chunk, wave = left < LONGSUM_WAVE ? left : LONGSUM_WAVE;
    threads_run(c->threads, wave, run_chunk, &r);
    for (int64_t i = 0; i < wave; i++) {
      for (int s = 0; s < 2; s++) total.sum[s] += r.parts[i].sum[s];
      total.count += r.parts[i].count;
      if (r.parts[i].largest > total.largest) total.largest = r.parts[i].largest;
    }
  }
  return total;
}
