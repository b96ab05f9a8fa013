/* The contraction out = A B^T (+ add): blocks, slices of segments, tasks.
 *
 * Operands are packed a block at a time, in parallel, into panels that all
 * workers then read: no decoded copy of an operand exists, and an element is
 * packed again only as often as the other operand has blocks.  Within a block
 * the tasks are output tiles.  kernels/cpu/gemm.h defines the sum and says
 * what a micro-kernel is.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/formats.h"

enum {
  BLOCK_BYTES = 4 << 20, /* of the panels of one operand's block */
  ROW_BYTES = 4096,      /* of a packed row, at most: columns (k) packed at once */
  STRIPS_MOST = 1 << 10, /* of a block; bounds the table of exponents */
  /* Strips of a block whose sums are kept between slices of k. */
  DEEP_ROWS = 10, DEEP_COLS = 16,
  /* Of the second operand's panels, what tasks stay with while they go through the
   * first's: it lies in the cache of one processor. */
  RESIDENT_BYTES = 512 << 10,
  TILE = GEMM_TILE_ROWS * GEMM_TILE_COLS,
  UNPACK_GROUPS = 8,
  UNPACK_BYTES = UNPACK_GROUPS * CONTRACT_GROUP * (GEMM_TILE_ROWS + GEMM_TILE_COLS) * (int)sizeof(float),
  WORKER_BYTES = TILE * (int)sizeof(float) + UNPACK_BYTES,
  HALF_GROUP = CONTRACT_GROUP / 2,
  ALIGNMENT = 64
};

/* ---- choice of instruction set ------------------------------------------- */

struct choice {
  const struct gemm_kernel *fma, *bf16; /* bf16: NULL where AMX is absent or not wanted */
};

static struct choice chosen;
static atomic_bool chosen_is_set;

static const struct gemm_kernel *best_fma(const char *name) {
  for (int i = 0; gemm_fma_kernel(i); i++) {
    const struct gemm_kernel *k = gemm_fma_kernel(i);
    if (k->usable() && (!name || strcmp(name, k->name) == 0)) return k;
  }
  return NULL;
}

bool cpu_isa_choose(const char *name, struct error *e) {
  if (!name) name = getenv("FP4D_ISA");
  const struct gemm_kernel *amx = gemm_amx_kernel();
  struct choice c = {best_fma(NULL), NULL};
  if (!name || !*name) {
    if (amx && amx->usable()) c.bf16 = amx;
  } else if (amx && strcmp(name, amx->name) == 0 && amx->usable()) {
    c.bf16 = amx;
  } else if (strcmp(name, "portable") != 0) {
    c.fma = best_fma(name);
    if (!c.fma) {
      error_set(e, ERROR_DEVICE, "FP4D_ISA: no kernel \"%s\" runs on this processor", name);
      char list[256] = "use portable";
      for (int i = 0; gemm_fma_kernel(i); i++)
        if (gemm_fma_kernel(i)->usable()) {
          strncat(list, ", ", sizeof list - strlen(list) - 1);
          strncat(list, gemm_fma_kernel(i)->name, sizeof list - strlen(list) - 1);
        }
      if (amx && amx->usable()) {
        strncat(list, ", ", sizeof list - strlen(list) - 1);
        strncat(list, amx->name, sizeof list - strlen(list) - 1);
      }
      return error_hint(e, "%s, or leave it unset", list);
    }
  }
  chosen = c;
  atomic_store(&chosen_is_set, true);
  return true;
}

static struct choice current_choice(void) {
  if (!atomic_load(&chosen_is_set)) {
    struct error e;
    if (!cpu_isa_choose(NULL, &e)) cpu_defect(__func__, e.message);
  }
  return chosen;
}

const char *cpu_isa_name(void) {
  struct choice c = current_choice();
  return c.bf16 ? c.bf16->name : c.fma->name;
}

/* ---- a contraction --------------------------------------------------------- */

struct span {
  int64_t first, count;
};

struct contraction {
  struct matrix *out;
  const struct operand *a, *b;
  const struct matrix *add;
  int64_t deepest; /* columns of a slice, at most */
  const struct gemm_kernel *kernel; /* packs, and runs where it is exact */
  const struct gemm_kernel *in_f32; /* runs where it is not */
  /* The block. */
  struct span rows, cols, depth;
  bool pack_a, pack_b;
  bool first_slice, last_slice; /* of the segment */
  bool first_segment, last_segment;
  int64_t groups;             /* of the slice */
  int64_t resident;           /* strips of b that tasks stay with */
  char *panels_a, *panels_b;  /* strips of GEMM_TILE_ROWS or _COLS rows */
  float *sums;                /* of every tile, between slices; NULL when k is one slice */
  float *totals;              /* of every tile, between segments; NULL when there is one segment */
  char *workers;              /* WORKER_BYTES each */
  /* Smallest exponent field in each strip of the block, over the segment's slices so far. */
  int *exponent_a, *exponent_b;
};

static char *strip_of(char *panels, const struct contraction *c, int64_t strip, int64_t strip_rows) {
  return panels + strip * strip_rows * c->groups * CONTRACT_GROUP * c->kernel->element_bytes;
}

static int64_t rows_of_strip(const struct span *s, int64_t strip, int64_t strip_rows) {
  int64_t left = s->count - strip * strip_rows;
  return left < strip_rows ? left : strip_rows;
}

static void note_exponent(int *table, int64_t strip, int exponent, bool first_slice) {
  if (first_slice || exponent < table[strip]) table[strip] = exponent;
}

static void pack_task(void *context, int64_t index, int worker) {
  const struct contraction *c = context;
  (void)worker;
  int64_t strips_a = c->pack_a ? ceil_div(c->rows.count, GEMM_TILE_ROWS) : 0;
  if (index < strips_a) {
    int exponent = c->kernel->pack_first(strip_of(c->panels_a, c, index, GEMM_TILE_ROWS), c->a,
                                         c->rows.first + index * GEMM_TILE_ROWS,
                                         rows_of_strip(&c->rows, index, GEMM_TILE_ROWS), c->depth.first, c->depth.count);
    note_exponent(c->exponent_a, index, exponent, c->first_slice);
  } else {
    int64_t strip = index - strips_a;
    int exponent = c->kernel->pack_second(strip_of(c->panels_b, c, strip, GEMM_TILE_COLS), c->b,
                                          c->cols.first + strip * GEMM_TILE_COLS,
                                          rows_of_strip(&c->cols, strip, GEMM_TILE_COLS), c->depth.first, c->depth.count);
    note_exponent(c->exponent_b, strip, exponent, c->first_slice);
  }
}

/* Adds `groups` groups to a tile's sums.  Panels are `stride` groups long and
 * begin with the first of these groups. */
static void run_panels(const struct gemm_kernel *k, float *acc, const char *a, const char *b, int64_t rows,
                       int64_t cols, int64_t stride, int64_t groups) {
  int64_t row_bytes = stride * CONTRACT_GROUP * k->element_bytes;
  for (int64_t j = 0; j < cols; j += k->nr)
    for (int64_t i = 0; i < rows; i += k->mr)
      k->run(acc + i * GEMM_TILE_COLS + j, a + i * row_bytes, b + j * row_bytes, groups);
}

static void add_slice(const struct contraction *c, float *acc, const char *a, const char *b, int64_t rows,
                      int64_t cols) {
  const struct gemm_kernel *k = c->kernel;
  int64_t group_bytes = (int64_t)CONTRACT_GROUP * k->element_bytes;
  if (k->begin) k->begin();
  for (int64_t g = 0; g < c->groups; g += k->chunk) {
    int64_t n = c->groups - g < k->chunk ? c->groups - g : k->chunk;
    run_panels(k, acc, a + g * k->mr * group_bytes, b + g * k->nr * group_bytes, rows, cols, c->groups, n);
  }
  if (k->end) k->end();
}

/* The same where the packing kernel would not give the definition's bits. */
static void add_slice_in_f32(const struct contraction *c, float *acc, const char *a, const char *b, int64_t rows,
                             int64_t cols, char *buffer) {
  const struct gemm_kernel *k = c->in_f32;
  float *first = (float *)(void *)buffer, *second = first + UNPACK_GROUPS * CONTRACT_GROUP * GEMM_TILE_ROWS;
  for (int64_t g = 0; g < c->groups; g += UNPACK_GROUPS) {
    int64_t n = c->groups - g < UNPACK_GROUPS ? c->groups - g : UNPACK_GROUPS;
    c->kernel->unpack_first(first, k->mr, a, rows, c->groups, g, n);
    c->kernel->unpack_second(second, k->nr, b, cols, c->groups, g, n);
    run_panels(k, acc, (const char *)first, (const char *)second, rows, cols, n, n);
  }
}

static void tile_task(void *context, int64_t index, int worker) {
  const struct contraction *c = context;
  int64_t strips_a = ceil_div(c->rows.count, GEMM_TILE_ROWS), strips_b = ceil_div(c->cols.count, GEMM_TILE_COLS);
  int64_t resident = index / (strips_a * c->resident) * c->resident, rest = index - resident * strips_a;
  int64_t width = strips_b - resident < c->resident ? strips_b - resident : c->resident;
  int64_t i = rest / width, j = resident + rest % width;
  int64_t rows = rows_of_strip(&c->rows, i, GEMM_TILE_ROWS), cols = rows_of_strip(&c->cols, j, GEMM_TILE_COLS);
  const char *a = strip_of(c->panels_a, c, i, GEMM_TILE_ROWS), *b = strip_of(c->panels_b, c, j, GEMM_TILE_COLS);
  char *own = c->workers + worker * WORKER_BYTES;
  /* Tasks come in an order of the slice's depth; a tile's place is its own. */
  int64_t tile = i * strips_b + j;
  float *acc = c->sums ? c->sums + tile * TILE : (float *)(void *)own;
  if (c->first_slice) memset(acc, 0, TILE * sizeof *acc);
  if (c->kernel->exact && !c->kernel->exact(c->exponent_a[i], c->exponent_b[j]))
    add_slice_in_f32(c, acc, a, b, rows, cols, own + TILE * sizeof *acc);
  else
    add_slice(c, acc, a, b, rows, cols);
  if (!c->last_slice) return;
  struct gemm_place place = {c->rows.first + i * GEMM_TILE_ROWS, c->cols.first + j * GEMM_TILE_COLS, rows, cols, c->depth.first};
  float *totals = c->totals ? c->totals + tile * TILE : NULL;
  if (c->last_segment)
    gemm_write(c->out, c->add, totals, acc, c->a, c->b, &place);
  else
    gemm_end_segment(totals, acc, c->a, c->b, &place, c->first_segment);
}

/* Where the segment of column k ends. */
static int64_t segment_end(const struct operand *o, int64_t k) {
  return gemm_has_outer(&o->encoding) && o->segment > 0 ? (k / o->segment + 1) * o->segment : o->cols;
}

static int64_t pair_segment_end(const struct contraction *c, int64_t k) {
  int64_t a = segment_end(c->a, k), b = segment_end(c->b, k);
  return a < b ? a : b;
}

static void run_slice(struct cpu_device *d, struct contraction *c) {
  int64_t strips_a = ceil_div(c->rows.count, GEMM_TILE_ROWS), strips_b = ceil_div(c->cols.count, GEMM_TILE_COLS);
  c->groups = ceil_div(c->depth.count, CONTRACT_GROUP);
  int64_t strip_bytes = GEMM_TILE_COLS * c->groups * CONTRACT_GROUP * c->kernel->element_bytes;
  c->resident = strip_bytes < RESIDENT_BYTES ? RESIDENT_BYTES / strip_bytes : 1;
  int64_t packs = (c->pack_a ? strips_a : 0) + (c->pack_b ? strips_b : 0);
  if (packs) threads_run(d->threads, packs, pack_task, c);
  threads_run(d->threads, strips_a * strips_b, tile_task, c);
}

static void run_block(struct cpu_device *d, struct contraction *c) {
  int64_t k = c->a->cols;
  for (int64_t begin = 0, end; begin < k; begin = end) {
    end = pair_segment_end(c, begin);
    c->first_segment = begin == 0;
    c->last_segment = end == k;
    for (int64_t at = begin; at < end; at += c->deepest) {
      c->depth = (struct span){at, end - at < c->deepest ? end - at : c->deepest};
      c->first_slice = at == begin;
      c->last_slice = at + c->deepest >= end;
      run_slice(d, c);
    }
  }
}

/* Strips of a block: whole operand if it fits. */
static int64_t strips_at_once(int64_t rows, int64_t strip_rows, int64_t depth, int element_bytes, int64_t most) {
  int64_t strips = BLOCK_BYTES / (strip_rows * round_up(depth, CONTRACT_GROUP) * element_bytes);
  if (strips > most) strips = most;
  int64_t all = ceil_div(rows, strip_rows);
  return strips < all ? strips : all;
}

/* ---- what is asked ----------------------------------------------------------- */

/* Columns are whole blocks; segments are of whole groups, or of whole blocks of NVFP4. */
static bool is_whole(const struct operand *o) {
  switch (o->encoding.format) {
    case FORMAT_F32:
    case FORMAT_BF16: return true;
    case FORMAT_E4M3:
    case FORMAT_E5M2: return o->segment <= 0 || (o->cols % o->segment == 0 && o->segment % CONTRACT_GROUP == 0);
    case FORMAT_MXFP4: return o->cols % CONTRACT_GROUP == 0;
    case FORMAT_NVFP4:
    case FORMAT_NVFP4_LOCAL:
      return o->cols % HALF_GROUP == 0 && (o->segment <= 0 || (o->cols % o->segment == 0 && o->segment % HALF_GROUP == 0));
  }
  return false;
}

static bool is_complete(const struct operand *o) {
  return o->codes && (o->scales || operand_scale_bytes(&o->encoding, o->rows, o->cols) == 0) &&
         (o->outer || !gemm_has_outer(&o->encoding));
}

static char *carve(char **at, int64_t bytes) {
  char *p = *at;
  *at += round_up(bytes, ALIGNMENT);
  return p;
}

int64_t cpu_contract_scratch_bytes(const struct extent *x, int threads) {
  (void)x; /* blocks are of a fixed size */
  return ALIGNMENT + 2 * (int64_t)BLOCK_BYTES + 2 * DEEP_ROWS * DEEP_COLS * TILE * (int64_t)sizeof(float) +
         2 * STRIPS_MOST * (int64_t)sizeof(int) + threads * (int64_t)WORKER_BYTES;
}

void cpu_contract(struct device *device, struct matrix *out, const struct operand *a, const struct operand *b,
                  const struct matrix *add) {
  struct cpu_device *d = cpu_of(device);
  CPU_REQUIRE(is_whole(a) && is_whole(b), "unknown format, or cols or segments are not whole blocks");
  CPU_REQUIRE(is_complete(a) && is_complete(b), "an operand lacks codes, scales or outer factors");
  CPU_REQUIRE(a->rows > 0 && b->rows > 0 && a->cols > 0, "empty operand");
  CPU_REQUIRE(a->cols == b->cols, "operands differ in cols");
  CPU_REQUIRE(out->rows == a->rows && out->cols == b->rows, "out is not [a.rows, b.rows]");
  CPU_REQUIRE(!add || ((add->dtype == out->dtype || add->dtype == DTYPE_F32) && add->rows == out->rows && add->cols == out->cols),
              "add differs from out in shape, or in type and is not FP32");
  CPU_REQUIRE(d->scratch_bytes >= cpu_contract_scratch_bytes(NULL, threads_count(d->threads)), "scratch too small");

  struct choice isa = current_choice();
  bool bf16 = isa.bf16 && a->encoding.format != FORMAT_F32 && b->encoding.format != FORMAT_F32;
  struct contraction c = {.out = out, .a = a, .b = b, .add = add, .kernel = bf16 ? isa.bf16 : isa.fma, .in_f32 = isa.fma};
  char *at = d->scratch + (-(uintptr_t)d->scratch & (ALIGNMENT - 1));
  c.panels_a = carve(&at, BLOCK_BYTES);
  c.panels_b = carve(&at, BLOCK_BYTES);
  char *sums = carve(&at, DEEP_ROWS * DEEP_COLS * TILE * (int64_t)sizeof(float));
  char *totals = carve(&at, DEEP_ROWS * DEEP_COLS * TILE * (int64_t)sizeof(float));
  c.exponent_a = (int *)(void *)carve(&at, STRIPS_MOST * sizeof(int));
  c.exponent_b = (int *)(void *)carve(&at, STRIPS_MOST * sizeof(int));
  c.workers = at;

  int bytes = c.kernel->element_bytes;
  c.deepest = ROW_BYTES / bytes;
  bool one_segment = pair_segment_end(&c, 0) == a->cols, one_slice = one_segment && a->cols <= c.deepest;
  if (!one_slice) c.sums = (float *)(void *)sums;
  if (!one_segment) c.totals = (float *)(void *)totals;
  int64_t depth = one_slice ? a->cols : c.deepest;
  int64_t rows = GEMM_TILE_ROWS * strips_at_once(a->rows, GEMM_TILE_ROWS, depth, bytes, one_slice ? STRIPS_MOST : DEEP_ROWS);
  int64_t cols = GEMM_TILE_COLS * strips_at_once(b->rows, GEMM_TILE_COLS, depth, bytes, one_slice ? STRIPS_MOST : DEEP_COLS);
  for (int64_t row = 0; row < a->rows; row += rows) {
    c.rows = (struct span){row, a->rows - row < rows ? a->rows - row : rows};
    for (int64_t col = 0; col < b->rows; col += cols) {
      c.cols = (struct span){col, b->rows - col < cols ? b->rows - col : cols};
      /* Panels of one slice stay valid while their block does. */
      c.pack_a = !one_slice || col == 0;
      c.pack_b = !one_slice || row == 0 || cols < b->rows;
      run_block(d, &c);
    }
  }
}
