/* Producers: strips of rows over the workers, and the scratch they need. */
#include "kernels/cpu/producer.h"

#include "base/checked.h"
#include "kernels/cpu/longsum.h"
#include "kernels/cpu/whole.h"

/* ROWS_OF_SCRATCH: most rows of the result's width that an operation asks for. */
enum { ALIGN = 256, ROWS_OF_SCRATCH = 3 };

struct layout {
  int64_t shared, values, rows, emission; /* bytes of each part */
};

static struct layout lay_out(int64_t cols, int64_t row_floats, int64_t shared_floats) {
  return (struct layout){
      .shared = round_up(shared_floats * (int64_t)sizeof(float), ALIGN),
      .values = round_up(CPU_STRIP * cols * (int64_t)sizeof(float), ALIGN),
      .rows = round_up(row_floats * (int64_t)sizeof(float), ALIGN),
      .emission = round_up(cpu_emit_scratch_bytes(cols), ALIGN),
  };
}

static int64_t worker_bytes(const struct layout *l) { return l->values + l->rows + l->emission; }

struct run {
  const struct producer *p;
  const struct emission *out; /* what strips write of p->out */
  struct layout layout;
  char *scratch;
};

static void run_strip(void *context, int64_t index, int worker) {
  const struct run *r = context;
  const struct producer *p = r->p;
  char *base = r->scratch + r->layout.shared + worker * worker_bytes(&r->layout);
  float *values = (float *)(void *)base;
  float *rows = (float *)(void *)(base + r->layout.values);
  char *emission = base + r->layout.values + r->layout.rows;
  int64_t first = index * CPU_STRIP;
  int64_t n = p->rows - first < CPU_STRIP ? p->rows - first : CPU_STRIP;
  for (int64_t i = 0; i < n; i++) {
    p->compute(p->op, first + i, values + i * p->cols, rows, (float *)(void *)r->scratch);
    cpu_round(values + i * p->cols, p->type, p->cols);
  }
  struct quantise_counts counts[2] = {{0}};
  cpu_emit_strip(r->out, p->rows, p->cols, first, n, values, counts, emission);
  for (int v = 0; p->out->counts && v < 2; v++) cpu_counts_add(&p->out->counts[v], &counts[v]);
}

void cpu_produce(struct device *d, const struct producer *p) {
  struct cpu_device *c = cpu_of(d);
  struct run r = {.p = p, .layout = lay_out(p->cols, p->row_floats, p->shared_floats), .scratch = c->scratch};
  int64_t used = r.layout.shared + threads_count(c->threads) * worker_bytes(&r.layout);
  CPU_REQUIRE(used <= c->scratch_bytes, "scratch is too small");
  const struct matrix *plain = p->out->plain;
  CPU_REQUIRE(!plain || (plain->dtype == p->type && plain->rows == p->rows && plain->cols == p->cols),
              "the emission's plain matrix is not of the result's type and shape");
  struct whole_emission e;
  whole_begin(&e, d, p->out, p->rows, p->cols, used);
  r.out = &e.strips;
  threads_run(c->threads, ceil_div(p->rows, CPU_STRIP), run_strip, &r);
  if (e.wanted) whole_quantise(d, p->out, &e.result);
}

float *cpu_producer_shared(struct device *d) { return (float *)(void *)cpu_of(d)->scratch; }

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

/* The whole result in BF16 stands behind what strips need: of a producer, and of
 * a matrix in FP32 that `quantise` is given. */
int64_t cpu_producer_scratch_bytes(const struct extent *x, int threads) {
  const struct attention_shape *a = &x->attention;
  int64_t qkv = (a->n_heads + 2 * a->n_kv_heads) * a->head_dim;
  int64_t cols = largest(largest(x->hidden_size, 2 * x->ffn_size), qkv);
  int64_t gain_and_sums = (1 + ceil_div(x->tokens, CPU_STRIP)) * x->hidden_size;
  struct layout l = lay_out(cols, ROWS_OF_SCRATCH * cols, gain_and_sums);
  int64_t whole = whole_scratch_bytes(x->tokens, cols);
  int64_t produce = l.shared + threads * worker_bytes(&l) + whole;
  int64_t weights = whole_scratch_bytes(largest(x->vocab_size, cols), x->hidden_size);
  int64_t logits = whole_scratch_bytes(x->head_chunk, x->vocab_size);
  int64_t quantise = threads * round_up(cpu_emit_scratch_bytes(largest(cols, x->vocab_size)), ALIGN) +
                     largest(largest(weights, logits), whole);
  int64_t sums = largest(cpu_embedding_scratch_bytes(x->tokens), LONGSUM_SCRATCH_BYTES);
  return largest(largest(produce, quantise), sums);
}
