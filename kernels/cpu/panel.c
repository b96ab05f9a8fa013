/* Panels of a view: 32 of its rows, 128 elements along the contraction, rows as lanes.
 *
 * Pieces of a column view's panel stand in the source as they are; a row view is
 * transposed.  What is done per element then needs no shuffle: amaxes of blocks,
 * the transform, codes.  Codes go back through a transposition of words of four.
 */
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/transform.h"
#include "kernels/cpu/whole.h"

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

void panel_store(uint8_t *codes, int64_t row_bytes, int64_t rows, const uint16_t *word, int64_t n) {
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

/* A panel of a row view, from rows of the source; rows that are not there are 0.  What
 * the next one will be read from is asked for already. */
static void load_rows(uint16_t *bits, const uint16_t *z, int64_t stride, int64_t rows, int64_t cols) {
  static const uint16_t none[PANEL_COLS];
  for (int64_t r = 0; r < PANEL_ROWS; r += SIDE) {
    const uint16_t *row[SIDE];
    for (int64_t i = 0; i < SIDE; i++) row[i] = r + i < rows ? z + (r + i) * stride : none;
    for (int64_t c = 0; c < cols; c += SIDE) {
      lanes8 v[SIDE];
      for (int64_t i = c / SIDE % 4 * 2, end = i + 2; i < end; i++)
        __builtin_prefetch(row[i] + cols + c / (4 * SIDE) * (4 * SIDE), 0, 2);
      for (int i = 0; i < SIDE; i++) memcpy(&v[i], row[i] + c, sizeof v[i]);
      transpose8(v);
      for (int i = 0; i < SIDE; i++) memcpy(bits + (c + i) * PANEL_ROWS + r, &v[i], sizeof v[i]);
    }
  }
}

/* Panels of a column view that stand beside each other.  Rows of the source are far
 * apart: what the next ones will be read from is asked for already. */
static void load_columns(uint16_t *bits, const uint16_t *z, int64_t stride, int64_t rows, int64_t cols) {
  for (int64_t c = 0; c < cols; c++, z += stride) {
    for (int64_t r = 0; r < rows; r += PANEL_ROWS) __builtin_prefetch(z + rows + r, 0, 2);
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

INLINE void transform_panel(uint16_t *bits, int64_t cols, int n, bool with_signs, float scale) {
  for (int64_t c = 0; c < cols; c += n)
    for (int r = 0; r < PANEL_ROWS; r += TRANSFORM_LANES) {
      uint16_t *tile = bits + c * PANEL_ROWS + r;
      lanes x[TRANSFORM_WIDEST];
      transform_sums(x, tile, PANEL_ROWS, n, with_signs);
#pragma GCC unroll 32
      for (int i = 0; i < n; i++) {
        const lanes y = x[i] * scale;
        encode_lanes(tile + i * PANEL_ROWS, &y);
      }
    }
}

CPU_CLONES static void transform(uint16_t *bits, int64_t cols, enum hadamard h) {
  switch (h) {
    case HADAMARD_NONE: break;
    case HADAMARD_PLAIN_16: transform_panel(bits, cols, 16, false, HADAMARD_SCALE_16); break;
    case HADAMARD_SIGNED_16: transform_panel(bits, cols, 16, true, HADAMARD_SCALE_16); break;
    case HADAMARD_SIGNED_32: transform_panel(bits, cols, 32, true, HADAMARD_SCALE_32); break;
  }
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

/* ---- every panel of a view or two ------------------------------------------ */

enum { WIDTH = 8 * PANEL_COLS }; /* source columns a task */

struct walk {
  const struct panel_rule *rules;
  int n;
  const struct matrix *source;
  int64_t height, across; /* of a task; tasks side by side */
};

/* The panels of a piece that is loaded at once. */
static void visit_piece(const struct panel_rule *rule, const struct matrix *source, const struct panel *p,
                        struct quantise_counts *counts) {
  uint16_t bits[GROUP / PANEL_ROWS * PANEL_ELEMENTS];
  panels_load(bits, source, rule->o->view, rule->o->encoding.hadamard, p);
  for (int64_t r = 0; r < p->rows; r += PANEL_ROWS)
    rule->visit(rule, bits + r * PANEL_COLS,
                &(struct panel){p->first_row + r, at_most(p->rows - r, PANEL_ROWS), p->first_col, p->cols}, counts);
}

/* A view's part of the source's [first_row, rows), [first_col, cols); either at most PANEL_COLS. */
static void visit_part(const struct panel_rule *rule, const struct matrix *source, const struct panel *s,
                       struct quantise_counts *counts) {
  const bool by_rows = rule->o->view == VIEW_ROW;
  const struct panel v = by_rows ? *s : (struct panel){s->first_col, s->cols, s->first_row, s->rows};
  const int64_t step = by_rows ? PANEL_ROWS : GROUP;
  for (int64_t r = 0; r < v.rows; r += step)
    visit_piece(rule, source, &(struct panel){v.first_row + r, at_most(v.rows - r, step), v.first_col, v.cols}, counts);
}

static void walk_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct walk *w = context;
  const struct matrix *source = w->source;
  const int64_t first = index / w->across * w->height, left = index % w->across * WIDTH;
  const int64_t end = at_most(source->cols, left + WIDTH);
  struct quantise_counts counts[2] = {{0}};
  for (int64_t c = left; c < end; c += PANEL_COLS) {
    const struct panel s = {first, at_most(source->rows - first, w->height), c, at_most(end - c, PANEL_COLS)};
    for (int i = 0; i < w->n; i++) visit_part(&w->rules[i], source, &s, &counts[i]);
  }
  for (int i = 0; i < w->n; i++)
    if (w->rules[i].counts) cpu_counts_add(w->rules[i].counts, &counts[i]);
}

void panels_visit(struct cpu_device *d, const struct panel_rule *rules, int n, const struct matrix *source) {
  const bool by_rows = n == 1 && rules[0].o->view == VIEW_ROW;
  struct walk w = {rules, n, source, by_rows ? PANEL_ROWS : PANEL_COLS, ceil_div(source->cols, WIDTH)};
  threads_run(d->threads, ceil_div(source->rows, w.height) * w.across, walk_task, &w);
}
