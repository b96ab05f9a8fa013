/* Producers: strips of rows over the workers, and the scratch they need. */
#include "kernels/cpu/producer.h"

#include "base/checked.h"
#include "kernels/cpu/longsum.h"

/* ROWS_OF_SCRATCH: most rows of the result's width that an operation asks for. */
enum { ALIGN = 256, ROWS_OF_SCRATCH = 3 };

struct layout {
  int64_t shared, counts, values, rows, emission; /* bytes of each part */
};

static struct layout lay_out(int64_t cols, int64_t row_floats, int64_t shared_floats) {
  return (struct layout){
      .shared = round_up(shared_floats * (int64_t)sizeof(float), ALIGN),
      .counts = round_up(2 * (int64_t)sizeof(struct quantise_counts), ALIGN),
      .values = round_up(CPU_STRIP * cols * (int64_t)sizeof(float), ALIGN),
      .rows = round_up(row_floats * (int64_t)sizeof(float), ALIGN),
      .emission = round_up(cpu_emit_scratch_bytes(cols), ALIGN),
  };
}

static int64_t worker_bytes(const struct layout *l) { return l->counts + l->values + l->rows + l->emission; }

struct run {
  const struct producer *p;
  struct layout layout;
  char *scratch;
};

static void run_strip(void *context, int64_t index, int worker) {
  const struct run *r = context;
  const struct producer *p = r->p;
  char *base = r->scratch + r->layout.shared + worker * worker_bytes(&r->layout);
  struct quantise_counts *counts = (struct quantise_counts *)(void *)base;
  float *values = (float *)(void *)(base + r->layout.counts);
  float *rows = (float *)(void *)(base + r->layout.counts + r->layout.values);
  char *emission = base + r->layout.counts + r->layout.values + r->layout.rows;
  int64_t first = index * CPU_STRIP;
  int64_t n = p->rows - first < CPU_STRIP ? p->rows - first : CPU_STRIP;
  for (int64_t i = 0; i < n; i++) {
    p->compute(p->op, first + i, values + i * p->cols, rows, (float *)(void *)r->scratch);
    cpu_round(values + i * p->cols, p->type, p->cols);
  }
  cpu_emit_strip(p->out, p->rows, p->cols, first, n, values, p->out->counts ? counts : NULL, emission);
}

void cpu_produce(struct device *d, const struct producer *p) {
  struct cpu_device *c = cpu_of(d);
  int workers = threads_count(c->threads);
  struct run r = {.p = p, .layout = lay_out(p->cols, p->row_floats, p->shared_floats), .scratch = c->scratch};
  CPU_REQUIRE(r.layout.shared + workers * worker_bytes(&r.layout) <= c->scratch_bytes, "scratch is too small");
  const struct matrix *plain = p->out->plain;
  CPU_REQUIRE(!plain || (plain->dtype == p->type && plain->rows == p->rows && plain->cols == p->cols),
              "the emission's plain matrix is not of the result's type and shape");
  for (int w = 0; w < workers; w++)
    memset(c->scratch + r.layout.shared + w * worker_bytes(&r.layout), 0, (size_t)r.layout.counts);
  threads_run(c->threads, ceil_div(p->rows, CPU_STRIP), run_strip, &r);
  if (!p->out->counts) return;
  for (int w = 0; w < workers; w++) {
    const void *base = c->scratch + r.layout.shared + w * worker_bytes(&r.layout);
    const struct quantise_counts *from = base;
    for (int v = 0; v < 2; v++) {
      struct quantise_counts *to = p->out->counts + v;
      to->elements += from[v].elements;
      to->saturated += from[v].saturated;
      to->underflowed += from[v].underflowed;
      to->blocks += from[v].blocks;
      to->zero_blocks += from[v].zero_blocks;
    }
  }
}

float *cpu_producer_shared(struct device *d) { return (float *)(void *)cpu_of(d)->scratch; }

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t cpu_producer_scratch_bytes(const struct extent *x, int threads) {
  const struct attention_shape *a = &x->attention;
  int64_t qkv = (a->n_heads + 2 * a->n_kv_heads) * a->head_dim;
  int64_t cols = largest(largest(x->hidden_size, 2 * x->ffn_size), qkv);
  int64_t gain_and_sums = (1 + ceil_div(x->tokens, CPU_STRIP)) * x->hidden_size;
  struct layout l = lay_out(cols, ROWS_OF_SCRATCH * cols, gain_and_sums);
  int64_t produce = l.shared + threads * worker_bytes(&l);
  int64_t quantise = threads * round_up(cpu_emit_scratch_bytes(largest(cols, x->vocab_size)), ALIGN);
  return largest(largest(produce, quantise), LONGSUM_SCRATCH_BYTES);
}
