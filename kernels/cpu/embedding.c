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

/* Positions of tokens by id, those of one id in token order. */
enum { SORT_BITS = 11, SORT_BUCKETS = 1 << SORT_BITS };

int64_t cpu_embedding_scratch_bytes(int64_t tokens) { return 2 * tokens * (int64_t)sizeof(int32_t); }

/* One stable pass of a radix sort, by SORT_BITS bits of the ids from `shift` on. */
static void sort_pass(int32_t *to, const int32_t *from, const int32_t *tokens, int64_t n, int shift) {
  int32_t place[SORT_BUCKETS + 1] = {0};
  for (int64_t i = 0; i < n; i++) place[(tokens[i] >> shift) % SORT_BUCKETS + 1]++;
  for (int b = 0; b < SORT_BUCKETS; b++) place[b + 1] += place[b];
  for (int64_t i = 0; i < n; i++) to[place[(tokens[from[i]] >> shift) % SORT_BUCKETS]++] = from[i];
}

static const int32_t *sort_by_id(struct device *d, const int32_t *tokens, int64_t n, int64_t vocab_size) {
  CPU_REQUIRE(n <= INT32_MAX && cpu_embedding_scratch_bytes(n) <= cpu_of(d)->scratch_bytes, "scratch is too small");
  int32_t *order = (int32_t *)(void *)cpu_of(d)->scratch, *other = order + n;
  for (int64_t t = 0; t < n; t++) {
    CPU_REQUIRE(tokens[t] >= 0 && tokens[t] < vocab_size, "token id outside the vocabulary");
    order[t] = (int32_t)t;
  }
  for (int shift = 0; shift < 31 && vocab_size > (int64_t)1 << shift; shift += SORT_BITS) {
    sort_pass(other, order, tokens, n, shift);
    int32_t *sorted = other;
    other = order;
    order = sorted;
  }
  return order;
}

struct backward {
  struct matrix *d_table;
  const struct matrix *dx;
  const int32_t *tokens, *order;
};

/* A task owns columns of the whole table and makes one row's sum after the other. */
static void add_columns(void *context, int64_t index, int worker) {
  (void)worker;
  const struct backward *b = context;
  int64_t n = b->dx->cols, c = index * COLUMNS, count = n - c < COLUMNS ? n - c : COLUMNS;
  for (int64_t t = 0; t < b->dx->rows;) {
    int32_t id = b->tokens[b->order[t]];
    float sum[COLUMNS], piece[COLUMNS];
    cpu_load(sum, b->d_table, id * n + c, count);
    for (; t < b->dx->rows && b->tokens[b->order[t]] == id; t++) {
      cpu_load(piece, b->dx, b->order[t] * n + c, count);
      for (int64_t i = 0; i < count; i++) sum[i] += piece[i];
    }
    cpu_store(b->d_table, id * n + c, sum, count);
  }
}

void cpu_embedding_backward(struct device *d, struct matrix *d_table, const struct matrix *dx, const int32_t *tokens) {
  CPU_REQUIRE(dx->cols == d_table->cols, "dx and d_table differ in width");
  struct backward b = {d_table, dx, tokens, sort_by_id(d, tokens, dx->rows, d_table->rows)};
  threads_run(cpu_of(d)->threads, ceil_div(dx->cols, COLUMNS), add_columns, &b);
}
