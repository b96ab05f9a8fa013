/* Panels of a view: 32 of its rows, 128 elements along the contraction, rows as lanes.
 *
 * Pieces of a column view's panel stand in the source as they are; a row view is
 * transposed.  What is done per element then needs no shuffle: amaxes of blocks,
 * the transform, codes.  Codes go back through a transposition of words of four.
 */
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/checked.h"
#include "kernels/cpu/transform.h"
#include "kernels/cpu/whole.h"

_Static_assert((int)TRANSFORM_ROWS == (int)PANEL_ROWS, "a panel's rows are transformed side by side");

#define INLINE static inline __attribute__((always_inline))

enum { SIDE = 8, TILE = 16, GROUP = 64 }; /* GROUP: rows of a column view that are read together, whole cache lines */

static int64_t at_most(int64_t n, int64_t most) { return n < most ? n : most; }

/* ---- transposition ------------------------------------------------------------ */

typedef uint16_t lanes8 __attribute__((vector_size(2 * SIDE)));

/* An element's row and column are six bits of an address; interleaving rows i
 * and i + 4 rotates it by one, so that three times exchange the two. */
INLINE void transpose8(lanes8 v[SIDE]) {
  for (int round = 0; round < 3; round++) {
    lanes8 w[SIDE];
    for (int i = 0; i < SIDE / 2; i++) {
      w[2 * i] = __builtin_shuffle(v[i], v[i + 4], (lanes8){0, 8, 1, 9, 2, 10, 3, 11});
      w[2 * i + 1] = __builtin_shuffle(v[i], v[i + 4], (lanes8){4, 12, 5, 13, 6, 14, 7, 15});
    }
    for (int i = 0; i < SIDE; i++) v[i] = w[i];
  }
}

void panel_turn_tiles(uint16_t *to, const uint16_t *from, int64_t cols) {
  for (int64_t c = 0; c < cols; c += SIDE)
    for (int64_t r = 0; r < PANEL_ROWS; r += SIDE) {
      const int64_t column = c / TILE * TILE + r % TILE, row = r / TILE * TILE + c % TILE; /* where it goes */
      lanes8 v[SIDE];
      for (int i = 0; i < SIDE; i++) memcpy(&v[i], from + (c + i) * PANEL_ROWS + r, sizeof v[i]);
      transpose8(v);
      for (int i = 0; i < SIDE; i++) memcpy(to + (column + i) * PANEL_ROWS + row, &v[i], sizeof v[i]);
    }
}

/* Codes of many more bytes than the second-level cache has are not in it when they are read, and
 * to write them through it each line is first fetched. */
enum { STREAM_FROM = 4 << 20, CACHE_LINE = 64, PIECES = CACHE_LINE / (2 * SIDE) };

bool panel_streams(const struct operand *o) {
  return operand_code_bytes(&o->encoding, o->rows, o->cols) >= STREAM_FROM;
}

#if defined(__x86_64__)
INLINE void stream16(uint8_t *to, lanes8 v) { _mm_stream_si128((__m128i *)(void *)to, (__m128i)v); }
void panel_finish(void) { _mm_sfence(); }
#else
INLINE void stream16(uint8_t *to, lanes8 v) { memcpy(to, &v, sizeof v); }
void panel_finish(void) {}
#endif

/* Whole cache lines, each at once. */
static void stream_lines(uint8_t *codes, int64_t row_bytes, const uint16_t *word, int64_t n) {
  for (int64_t r = 0; r < PANEL_ROWS; r += SIDE)
    for (int64_t w = 0; w < n; w += PIECES * SIDE) {
      lanes8 v[PIECES][SIDE];
      for (int k = 0; k < PIECES; k++) {
        for (int i = 0; i < SIDE; i++) memcpy(&v[k][i], word + (w + k * SIDE + i) * PANEL_ROWS + r, sizeof v[k][i]);
        transpose8(v[k]);
      }
      for (int i = 0; i < SIDE; i++)
        for (int k = 0; k < PIECES; k++) stream16(codes + (r + i) * row_bytes + 2 * (w + k * SIDE), v[k][i]);
    }
}

void panel_store(uint8_t *codes, int64_t row_bytes, int64_t rows, const uint16_t *word, int64_t n, bool stream) {
  if (stream && rows == PANEL_ROWS && n % (PIECES * SIDE) == 0 && row_bytes % CACHE_LINE == 0 &&
      (uintptr_t)codes % CACHE_LINE == 0) {
    stream_lines(codes, row_bytes, word, n);
    return;
  }
  for (int64_t r = 0; r < rows; r += SIDE)
    for (int64_t w = 0; w < n; w += SIDE) {
      lanes8 v[SIDE];
      uint8_t *to = codes + r * row_bytes + 2 * w;
      for (int i = 0; i < SIDE; i++) memcpy(&v[i], word + (w + i) * PANEL_ROWS + r, sizeof v[i]);
      transpose8(v);
      if (rows - r >= SIDE && n - w >= SIDE)
        for (int i = 0; i < SIDE; i++) memcpy(to + i * row_bytes, &v[i], sizeof v[i]);
      else
        for (int64_t i = 0; i < at_most(SIDE, rows - r); i++)
          memcpy(to + i * row_bytes, &v[i], (size_t)at_most(SIDE, n - w) * sizeof *word);
    }
}

/* ---- loading --------------------------------------------------------------------- */

/* A panel of a row view, from rows of the source; rows that are not there are 0. */
static void load_rows(uint16_t *bits, const uint16_t *z, int64_t stride, int64_t rows, int64_t cols) {
  static const uint16_t none[PANEL_COLS];
  for (int64_t r = 0; r < PANEL_ROWS; r += SIDE) {
    const uint16_t *row[SIDE];
    for (int64_t i = 0; i < SIDE; i++) row[i] = r + i < rows ? z + (r + i) * stride : none;
    for (int64_t c = 0; c < cols; c += SIDE) {
      lanes8 v[SIDE];
      for (int i = 0; i < SIDE; i++) memcpy(&v[i], row[i] + c, sizeof v[i]);
      transpose8(v);
      for (int i = 0; i < SIDE; i++) memcpy(bits + (c + i) * PANEL_ROWS + r, &v[i], sizeof v[i]);
    }
  }
}

/* Panels of a column view that stand beside each other. */
static void load_columns(uint16_t *bits, const uint16_t *z, int64_t stride, int64_t rows, int64_t cols) {
  for (int64_t c = 0; c < cols; c++, z += stride) {
    for (int64_t r = 0; r < rows; r += PANEL_ROWS) {
      uint16_t *to = bits + (r / PANEL_ROWS * PANEL_COLS + c) * PANEL_ROWS;
      if (rows - r >= PANEL_ROWS) {
        memcpy(to, z + r, PANEL_ROWS * sizeof *z);
      } else {
        memset(to, 0, PANEL_ROWS * sizeof *to);
        memcpy(to, z + r, (size_t)(rows - r) * sizeof *z);
      }
    }
  }
}

/* True if no sum of 32 elements is infinite or NaN: all are below 2^121. */
CPU_CLONES static bool all_calm(const uint16_t *bits, int64_t n) {
  uint16_t large = 0;
  for (int64_t i = 0; i < n; i++) large = (uint16_t)(large | ((bits[i] & 0x7FFF) + 0x400));
  return large < 0x8000;
}

INLINE void transform_panel(uint16_t *bits, int64_t cols, int n, bool with_signs, float scale, bool nans) {
  for (int64_t c = 0; c < cols; c += n) {
    uint16_t *tile = bits + c * PANEL_ROWS;
    bit_lanes even[TRANSFORM_WIDEST];
    lanes x[TRANSFORM_WIDEST];
    decode_half(x, tile, PANEL_ROWS, n, with_signs, false);
    transform_most(x, n);
    butterflies(x, n, n / 2);
#pragma GCC unroll 32
    for (int i = 0; i < n; i++) {
      const lanes y = x[i] * scale;
      encode_lanes(&even[i], &y, nans);
      even[i] >>= 16;
    }
    decode_half(x, tile, PANEL_ROWS, n, with_signs, true);
    transform_most(x, n);
    butterflies(x, n, n / 2);
#pragma GCC unroll 32
    for (int i = 0; i < n; i++) {
      const lanes y = x[i] * scale;
      bit_lanes both;
      encode_lanes(&both, &y, nans);
      both = (both & 0xFFFF0000u) | even[i];
      memcpy(tile + i * PANEL_ROWS, &both, sizeof both);
    }
  }
}

INLINE void transform_by(uint16_t *bits, int64_t cols, enum hadamard h, bool nans) {
  switch (h) {
    case HADAMARD_NONE: break;
    case HADAMARD_PLAIN_16: transform_panel(bits, cols, 16, false, HADAMARD_SCALE_16, nans); break;
    case HADAMARD_SIGNED_16: transform_panel(bits, cols, 16, true, HADAMARD_SCALE_16, nans); break;
    case HADAMARD_SIGNED_32: transform_panel(bits, cols, 32, true, HADAMARD_SCALE_32, nans); break;
  }
}

CPU_CLONES static void transform_calm(uint16_t *bits, int64_t cols, enum hadamard h) { transform_by(bits, cols, h, false); }

CPU_CLONES static void transform_any(uint16_t *bits, int64_t cols, enum hadamard h) { transform_by(bits, cols, h, true); }

static void transform(uint16_t *bits, int64_t cols, enum hadamard h) {
  if (h == HADAMARD_NONE) return;
  (all_calm(bits, cols * PANEL_ROWS) ? transform_calm : transform_any)(bits, cols, h);
}

void panels_load(uint16_t *bits, const struct matrix *source, enum view view, enum hadamard h, const struct panel *p) {
  const uint16_t *z = source->data;
  const int64_t stride = source->cols;
  if (view == VIEW_COLUMN) load_columns(bits, z + p->first_col * stride + p->first_row, stride, p->rows, p->cols);
  for (int64_t r = 0; r < p->rows; r += PANEL_ROWS, bits += PANEL_ELEMENTS) {
    if (view == VIEW_ROW) load_rows(bits, z + (p->first_row + r) * stride + p->first_col, stride, p->rows - r, p->cols);
    transform(bits, p->cols, h);
  }
}

/* ---- what is ahead ---------------------------------------------------------- */

enum { LINE = 32 }; /* elements of a cache line */

struct ahead ahead_of(const uint16_t *z, int64_t stride, int64_t rows, int64_t cols, int64_t times) {
  return (struct ahead){.row = z, .stride = stride, .rows = rows, .cols = cols,
                        .share = ceil_div(rows * ceil_div(cols, LINE), times)};
}

void ahead_ask(struct ahead *a) {
  if (!a) return;
  for (int64_t i = 0; i < a->share && a->rows > 0; i++) {
    __builtin_prefetch(a->row + a->col, 0, 2);
    a->col += LINE;
    if (a->col < a->cols) continue;
    a->col = 0;
    a->row += a->stride;
    a->rows--;
  }
}

/* ---- every panel of a view or two ------------------------------------------ */

enum { WIDTH = 8 * PANEL_COLS }; /* source columns a task */

struct walk {
  const struct panel_rule *rules;
  int n;
  const struct matrix *source;
  int64_t height, across, tasks; /* of a task; tasks side by side; all */
  int64_t workers;
};

/* The panels of a piece that is loaded at once. */
static void visit_piece(const struct panel_rule *rule, const struct matrix *source, const struct panel *p,
                        struct quantise_counts *counts, struct ahead *ahead) {
  uint16_t bits[GROUP / PANEL_ROWS * PANEL_ELEMENTS];
  panels_load(bits, source, rule->o->view, rule->o->encoding.hadamard, p);
  for (int64_t r = 0; r < p->rows; r += PANEL_ROWS)
    rule->visit(rule, bits + r * PANEL_COLS,
                &(struct panel){p->first_row + r, at_most(p->rows - r, PANEL_ROWS), p->first_col, p->cols}, counts, ahead);
}

/* A view's part of the source's [first_row, rows), [first_col, cols); either at most PANEL_COLS. */
static void visit_part(const struct panel_rule *rule, const struct matrix *source, const struct panel *s,
                       struct quantise_counts *counts, struct ahead *ahead) {
  const bool by_rows = rule->o->view == VIEW_ROW;
  const struct panel v = by_rows ? *s : (struct panel){s->first_col, s->cols, s->first_row, s->rows};
  const int64_t step = by_rows ? PANEL_ROWS : GROUP;
  for (int64_t r = 0; r < v.rows; r += step)
    visit_piece(rule, source, &(struct panel){v.first_row + r, at_most(v.rows - r, step), v.first_col, v.cols}, counts,
                ahead);
}

/* What a task is of. */
static struct panel task_at(const struct walk *w, int64_t index) {
  const int64_t row = index / w->across * w->height, col = index % w->across * WIDTH;
  return (struct panel){row, at_most(w->source->rows - row, w->height), col, at_most(w->source->cols - col, WIDTH)};
}

/* The task that this worker probably does next.  Its rows are asked for one after the other, not
 * tile by tile: lines that follow each other the processor also fetches by itself. */
static struct ahead after(const struct walk *w, int64_t index, int64_t times) {
  if (index + w->workers >= w->tasks) return (struct ahead){.rows = 0};
  const struct panel next = task_at(w, index + w->workers);
  const uint16_t *z = (const uint16_t *)w->source->data + next.first_row * w->source->cols + next.first_col;
  return ahead_of(z, w->source->cols, next.rows, next.cols, times);
}

static void walk_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct walk *w = context;
  const struct panel task = task_at(w, index);
  struct panel s = task;
  struct quantise_counts counts[2] = {{0}};
  struct ahead ahead = after(w, index, w->n * ceil_div(task.rows, PANEL_ROWS) * ceil_div(task.cols, 16));
  for (int64_t left = task.cols; left > 0; left -= PANEL_COLS, s.first_col += PANEL_COLS) {
    s.cols = at_most(left, PANEL_COLS);
    for (int i = 0; i < w->n; i++) visit_part(&w->rules[i], w->source, &s, &counts[i], &ahead);
  }
  for (int i = 0; i < w->n; i++)
    if (w->rules[i].counts) cpu_counts_add(w->rules[i].counts, &counts[i]);
  panel_finish();
}

void panels_visit(struct cpu_device *d, const struct panel_rule *rules, int n, const struct matrix *source) {
  const bool by_rows = n == 1 && rules[0].o->view == VIEW_ROW && !rules[0].in_order;
  struct walk w = {.rules = rules, .n = n, .source = source, .height = by_rows ? PANEL_ROWS : PANEL_COLS};
  w.across = ceil_div(source->cols, WIDTH);
  w.tasks = ceil_div(source->rows, w.height) * w.across;
  w.workers = threads_count(d->threads);
  threads_run(d->threads, w.tasks, walk_task, &w);
}
