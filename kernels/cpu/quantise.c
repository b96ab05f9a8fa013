/* Quantising (or copying) a matrix that has no fused producer: strips in
 * parallel, then what is made from the whole matrix. */
#include "base/checked.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/emit.h"
#include "kernels/cpu/whole.h"

enum { TALL = 4 * CPU_STRIP }; /* rows whose codes in a column view fill a cache line */

struct job {
  const struct emission *out; /* what strips write */
  const struct matrix *source;
  char *scratch;
  int64_t scratch_bytes; /* a worker's */
  int64_t height;        /* rows a task */
};

static void quantise_strip(void *context, int64_t index, int worker) {
  const struct job *job = context;
  const struct matrix *source = job->source;
  int64_t first = index * job->height;
  struct matrix strip = *source;
  strip.data = (char *)source->data + (size_t)(first * source->cols) * dtype_bytes(source->dtype);
  strip.rows = source->rows - first < job->height ? source->rows - first : job->height;
  struct quantise_counts counts[2] = {{0}};
  cpu_emit_matrix_strip(job->out, source->rows, first, &strip, counts,
                        job->scratch ? job->scratch + worker * job->scratch_bytes : NULL);
  for (int v = 0; job->out->counts && v < 2; v++) cpu_counts_add(&job->out->counts[v], &counts[v]);
}

/* An FP32 source is rounded to BF16 on the way to what is packed. */
void cpu_quantise(struct device *d, const struct emission *out, const struct matrix *source) {
  struct cpu_device *cpu = cpu_of(d);
  struct job job = {.source = source, .scratch = cpu->scratch};
  struct whole_emission e = {.strips = *out, .result = *source};
  bool bf16_plain = out->plain && out->plain->dtype == DTYPE_BF16;
  job.scratch_bytes = round_up(cpu_emit_scratch_bytes(source->cols), 64);
  if (source->dtype == DTYPE_F32) {
    int64_t used = threads_count(cpu->threads) * job.scratch_bytes;
    CPU_REQUIRE(cpu->scratch_bytes >= used, "not enough scratch");
    CPU_REQUIRE(!bf16_plain || ((!out->row || out->row->encoding.format != FORMAT_F32) &&
                                (!out->column || out->column->encoding.format != FORMAT_F32)),
                "an FP32 operand beside a plain result rounded to BF16");
    whole_begin(&e, d, out, source->rows, source->cols, used);
  } else {
    e.wanted = whole_drop(&e.strips);
  }
  job.out = &e.strips;
  job.height = ceil_div(source->rows, TALL) >= 4 * threads_count(cpu->threads) ? TALL : CPU_STRIP;
  if (e.strips.plain || e.strips.row || e.strips.column)
    threads_run(cpu->threads, ceil_div(source->rows, job.height), quantise_strip, &job);
  if (e.wanted) whole_quantise(d, out, &e.result);
}
