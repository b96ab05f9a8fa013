/* The embedding table: rows by token id, and their gradient. */
#include "base/checked.h"
#include "kernels/cpu/cpu.h"

#include <string.h>

enum { ROWS = 32, COLUMNS = 128 };

struct forward {
  struct matrix *x;
  const struct matrix *table;
  const int32_t *tokens;
};

static void copy_rows(void *context, int64_t index, int worker) {
  (void)worker;
  const struct forward *f = context;
  int64_t n = f->x->cols, end = (index + 1) * ROWS < f->x->rows ? (index + 1) * ROWS : f->x->rows;
  for (int64_t t = index * ROWS; t < end; t++) {
    int32_t id = f->tokens[t];
    CPU_REQUIRE(id >= 0 && id < f->table->rows, "token id outside the vocabulary");
    float piece[COLUMNS];
    for (int64_t c = 0; c < n; c += COLUMNS) {
      int64_t count = n - c < COLUMNS ? n - c : COLUMNS;
      cpu_load(piece, f->table, id * n + c, count);
      cpu_store(f->x, t * n + c, piece, count);
    }
  }
}

void cpu_embedding_forward(struct device *d, struct matrix *x, const struct matrix *table, const int32_t *tokens) {
  CPU_REQUIRE(x->cols == table->cols, "x and table differ in width");
  struct forward f = {x, table, tokens};
  threads_run(cpu_of(d)->threads, ceil_div(x->rows, ROWS), copy_rows, &f);
}

struct backward {
  float *d_table;
  const struct matrix *dx;
  const int32_t *tokens;
  int64_t vocab_size;
};

/* A task owns columns of the whole table and walks the tokens in order. */
static void add_columns(void *context, int64_t index, int worker) {
  (void)worker;
  const struct backward *b = context;
  int64_t n = b->dx->cols, c = index * COLUMNS, count = n - c < COLUMNS ? n - c : COLUMNS;
  for (int64_t t = 0; t < b->dx->rows; t++) {
    int32_t id = b->tokens[t];
    CPU_REQUIRE(id >= 0 && id < b->vocab_size, "token id outside the vocabulary");
    float piece[COLUMNS], *sum = b->d_table + id * n + c;
    cpu_load(piece, b->dx, t * n + c, count);
    for (int64_t i = 0; i < count; i++) sum[i] += piece[i];
  }
}

void cpu_embedding_backward(struct device *d, float *d_table, const struct matrix *dx, const int32_t *tokens,
                            int64_t vocab_size) {
  struct backward b = {d_table, dx, tokens, vocab_size};
  threads_run(cpu_of(d)->threads, ceil_div(dx->cols, COLUMNS), add_columns, &b);
}
