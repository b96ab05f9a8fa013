/* Quantising (or copying) a matrix that has no fused producer: strips in parallel. */
#include <stdatomic.h>

#include "base/checked.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/emit.h"

struct job {
  const struct emission *out;
  const struct matrix *source;
  char *scratch;
  int64_t scratch_bytes; /* a worker's */
  struct {
    _Atomic int64_t elements, saturated, underflowed, blocks, zero_blocks;
  } counts[2];
};

static void quantise_strip(void *context, int64_t index, int worker) {
  struct job *job = context;
  const struct matrix *source = job->source;
  int64_t first = index * CPU_STRIP;
  struct matrix strip = *source;
  strip.data = (char *)source->data + (size_t)(first * source->cols) * dtype_bytes(source->dtype);
  strip.rows = source->rows - first < CPU_STRIP ? source->rows - first : CPU_STRIP;
  struct quantise_counts counts[2] = {{0}};
  cpu_emit_matrix_strip(job->out, source->rows, first, &strip, counts,
                        job->scratch ? job->scratch + worker * job->scratch_bytes : NULL);
  for (int v = 0; v < 2; v++) {
    atomic_fetch_add(&job->counts[v].elements, counts[v].elements);
    atomic_fetch_add(&job->counts[v].saturated, counts[v].saturated);
    atomic_fetch_add(&job->counts[v].underflowed, counts[v].underflowed);
    atomic_fetch_add(&job->counts[v].blocks, counts[v].blocks);
    atomic_fetch_add(&job->counts[v].zero_blocks, counts[v].zero_blocks);
  }
}

/* An FP32 source is rounded to BF16 on the way to MXFP4. */
void cpu_quantise(struct device *d, const struct emission *out, const struct matrix *source) {
  struct cpu_device *cpu = cpu_of(d);
  struct job job = {.out = out, .source = source, .scratch = cpu->scratch};
  job.scratch_bytes = round_up(cpu_emit_scratch_bytes(source->cols), 64);
  bool bf16_plain = out->plain && out->plain->dtype == DTYPE_BF16;
  if (source->dtype == DTYPE_F32) {
    CPU_REQUIRE(cpu->scratch_bytes >= threads_count(cpu->threads) * job.scratch_bytes, "not enough scratch");
    CPU_REQUIRE(!bf16_plain || ((!out->row || out->row->encoding.format != FORMAT_F32) &&
                                (!out->column || out->column->encoding.format != FORMAT_F32)),
                "an FP32 operand beside a plain result rounded to BF16");
  }
  threads_run(cpu->threads, ceil_div(source->rows, CPU_STRIP), quantise_strip, &job);
  if (!out->counts) return;
  for (int v = 0; v < 2; v++) {
    out->counts[v].elements += job.counts[v].elements;
    out->counts[v].saturated += job.counts[v].saturated;
    out->counts[v].underflowed += job.counts[v].underflowed;
    out->counts[v].blocks += job.counts[v].blocks;
    out->counts[v].zero_blocks += job.counts[v].zero_blocks;
  }
}
