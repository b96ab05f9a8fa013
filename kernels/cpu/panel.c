/* Panels of a view: 16 of its rows, 128 elements along the contraction.
 *
 * A panel is made from tiles of 16 (32) contraction elements x 16 rows, in
 * which rows are lanes: the transform works on whole lanes there, and a
 * transposition of 16-bit elements makes rows of it.  A column view's tile is
 * a piece of the source as it stands; a row view is transposed twice, and not
 * at all without a transform.
 */
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/whole.h"
#include "kernels/formats.h"
#include "kernels/hadamard.h"

#define INLINE static inline __attribute__((always_inline))

enum { LANES = PANEL_ROWS, TILE = 16, WIDEST = 32, BITS_INFINITE = 0x7F80 };

typedef uint16_t lanes8 __attribute__((vector_size(16)));

INLINE lanes8 load8(const uint16_t *p) {
  lanes8 v;
  memcpy(&v, p, sizeof v);
  return v;
}

/* An element's row and column are six bits of an address; interleaving rows i
 * and i + 4 rotates it by one, so that three times exchange the two. */
INLINE void transpose8(uint16_t *restrict to, int64_t to_stride, const uint16_t *restrict from, int64_t from_stride) {
  lanes8 v[8], w[8];
  for (int i = 0; i < 8; i++) v[i] = load8(from + i * from_stride);
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 4; i++) {
      w[2 * i] = __builtin_shuffle(v[i], v[i + 4], (lanes8){0, 8, 1, 9, 2, 10, 3, 11});
      w[2 * i + 1] = __builtin_shuffle(v[i], v[i + 4], (lanes8){4, 12, 5, 13, 6, 14, 7, 15});
    }
    for (int i = 0; i < 8; i++) v[i] = w[i];
  }
  for (int i = 0; i < 8; i++) memcpy(to + i * to_stride, &v[i], sizeof v[i]);
}

INLINE void transpose16(uint16_t *restrict to, int64_t to_stride, const uint16_t *restrict from, int64_t from_stride) {
  for (int i = 0; i < TILE; i += 8)
    for (int j = 0; j < TILE; j += 8) transpose8(to + j * to_stride + i, to_stride, from + i * from_stride + j, from_stride);
}

/* As bf16_encode, but all NaNs are one: which of several an addition keeps
 * differs between machines. */
INLINE uint16_t encode_sum(float x) {
  uint32_t u = f32_bits(x), rounded = (u + 0x7FFFu + (u >> 16 & 1u)) >> 16;
  return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

/* hadamard_transform (kernels/hadamard.h) of every lane. */
INLINE void transform_lanes(uint16_t (*restrict tile)[LANES], int n, bool with_signs, float scale) {
  float x[WIDEST][LANES];
  for (int i = 0; i < n; i++) {
    const uint16_t flip = with_signs && (HADAMARD_SIGNS >> (i % 16) & 1u) == 0 ? 0x8000 : 0;
    for (int l = 0; l < LANES; l++) x[i][l] = bf16_decode(tile[i][l] ^ flip);
  }
  for (int distance = 1; distance < n; distance *= 2)
    for (int i = 0; i < n; i++)
      if ((i & distance) == 0)
        for (int l = 0; l < LANES; l++) {
          const float low = x[i][l], high = x[i + distance][l];
          x[i][l] = low + high;
          x[i + distance][l] = low - high;
        }
  for (int i = 0; i < n; i++)
    for (int l = 0; l < LANES; l++) tile[i][l] = encode_sum(x[i][l] * scale);
}

INLINE void transform(uint16_t (*tile)[LANES], enum hadamard h) {
  switch (h) {
    case HADAMARD_NONE: break;
    case HADAMARD_PLAIN_16: transform_lanes(tile, 16, false, HADAMARD_SCALE_16); break;
    case HADAMARD_SIGNED_16: transform_lanes(tile, 16, true, HADAMARD_SCALE_16); break;
    case HADAMARD_SIGNED_32: transform_lanes(tile, 32, true, HADAMARD_SCALE_32); break;
  }
}

/* rows [n][LANES] from `source`, `stride` apart, of which the first `lanes` elements exist. */
INLINE void load_tile(uint16_t (*tile)[LANES], const uint16_t *source, int64_t stride, int n, int64_t lanes) {
  if (lanes == LANES) {
    for (int i = 0; i < n; i++) memcpy(tile[i], source + i * stride, sizeof *tile);
    return;
  }
  memset(tile, 0, (size_t)n * sizeof *tile);
  for (int i = 0; i < n; i++) memcpy(tile[i], source + i * stride, (size_t)lanes * sizeof **tile);
}

CPU_CLONES static void load_columns(uint16_t *bits, const uint16_t *source, int64_t stride, enum hadamard h,
                                    int64_t rows, int64_t cols) {
  const int width = h == HADAMARD_SIGNED_32 ? 32 : TILE;
  uint16_t tile[WIDEST][LANES];
  for (int64_t c = 0; c < cols; c += width) {
    if (h == HADAMARD_NONE && rows == LANES) {
      transpose16(bits + c, PANEL_COLS, source + c * stride, stride);
      continue;
    }
    load_tile(tile, source + c * stride, stride, width, rows);
    transform(tile, h);
    for (int i = 0; i < width; i += TILE) {
      if (rows == LANES) {
        transpose16(bits + c + i, PANEL_COLS, tile[i], LANES);
        continue;
      }
      uint16_t turned[TILE][TILE];
      transpose16(turned[0], TILE, tile[i], LANES);
      for (int64_t r = 0; r < rows; r++) memcpy(bits + r * PANEL_COLS + c + i, turned[r], sizeof turned[r]);
    }
  }
}

CPU_CLONES static void load_rows(uint16_t *bits, const uint16_t *source, int64_t stride, enum hadamard h, int64_t rows,
                                 int64_t cols) {
  const int width = h == HADAMARD_SIGNED_32 ? 32 : TILE;
  uint16_t tile[WIDEST][LANES], block[LANES][TILE] = {{0}};
  for (int64_t c = 0; c < cols; c += width) {
    for (int i = 0; i < width; i += TILE) {
      for (int64_t r = 0; r < rows; r++) memcpy(block[r], source + r * stride + c + i, sizeof block[r]);
      transpose16(tile[i], LANES, block[0], TILE);
    }
    transform(tile, h);
    for (int i = 0; i < width; i += TILE) {
      transpose16(block[0], TILE, tile[i], LANES);
      for (int64_t r = 0; r < rows; r++) memcpy(bits + r * PANEL_COLS + c + i, block[r], sizeof block[r]);
    }
  }
}

void panel_load(uint16_t *bits, const struct matrix *source, const struct operand *o, int64_t first_row, int64_t rows,
                int64_t first_col, int64_t cols) {
  const uint16_t *z = source->data;
  const enum hadamard h = o->encoding.hadamard;
  if (o->view == VIEW_COLUMN) {
    load_columns(bits, z + first_col * source->cols + first_row, source->cols, h, rows, cols);
    return;
  }
  z += first_row * source->cols + first_col;
  if (h != HADAMARD_NONE)
    load_rows(bits, z, source->cols, h, rows, cols);
  else
    for (int64_t r = 0; r < rows; r++)
      memcpy(bits + r * PANEL_COLS, z + r * source->cols, (size_t)cols * sizeof *bits);
}

/* ---- every panel of a view -------------------------------------------------- */

struct walk {
  const struct operand *o;
  const struct matrix *source;
  panel_visit *visit;
  void *rule;
  struct quantise_counts *counts;
};

/* A task takes source rows as they lie: 16 of them, or 128 for a column view. */
static void walk_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct walk *w = context;
  const bool by_rows = w->o->view == VIEW_ROW;
  struct quantise_counts counts = {0};
  uint16_t bits[PANEL_ROWS * PANEL_COLS] = {0};
  struct panel p = {.first_row = by_rows ? index * PANEL_ROWS : 0, .first_col = by_rows ? 0 : index * PANEL_COLS};
  while (p.first_row < w->o->rows && p.first_col < w->o->cols) {
    p.rows = w->o->rows - p.first_row < PANEL_ROWS ? w->o->rows - p.first_row : PANEL_ROWS;
    p.cols = w->o->cols - p.first_col < PANEL_COLS ? w->o->cols - p.first_col : PANEL_COLS;
    panel_load(bits, w->source, w->o, p.first_row, p.rows, p.first_col, p.cols);
    w->visit(w->rule, bits, &p, &counts);
    if (by_rows) p.first_col += PANEL_COLS;
    else p.first_row += PANEL_ROWS;
  }
  if (w->counts) cpu_counts_add(w->counts, &counts);
}

void panels_visit(struct cpu_device *d, const struct operand *o, const struct matrix *source, panel_visit *visit,
                  void *rule, struct quantise_counts *counts) {
  struct walk w = {o, source, visit, rule, counts};
  threads_run(d->threads, o->view == VIEW_ROW ? ceil_div(o->rows, PANEL_ROWS) : ceil_div(o->cols, PANEL_COLS), walk_task,
              &w);
}

/* ---- the largest magnitude ---------------------------------------------------- */

CPU_CLONES static uint16_t amax_of(const uint16_t *bits, int64_t n) {
  uint16_t amax = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint16_t a = bits[i] & 0x7FFF;
    amax = a > amax ? a : amax;
  }
  return amax;
}

uint16_t panel_amax(const uint16_t *bits, const struct panel *p) {
  uint16_t amax = 0;
  for (int64_t r = 0; r < p->rows; r++) {
    const uint16_t a = amax_of(bits + r * PANEL_COLS, p->cols);
    amax = a > amax ? a : amax;
  }
  return amax;
}

void panel_count_amax(struct quantise_counts *counts, const uint16_t *bits, const struct panel *p) {
  uint32_t amax = panel_amax(bits, p);
  if (amax >= BITS_INFINITE) {
    amax = 0;
    for (int64_t r = 0; r < p->rows; r++)
      for (int64_t c = 0; c < p->cols; c++) {
        const uint32_t a = bits[r * PANEL_COLS + c] & 0x7FFFu;
        if (a > amax && a < BITS_INFINITE) amax = a;
      }
  }
  const float finite = bf16_decode((uint16_t)amax);
  if (finite > counts->amax) counts->amax = finite;
}

struct maximum {
  _Atomic uint16_t amax;
  const uint16_t *bits; /* of a view without a transform, as it lies */
  int64_t count;
};

static void raise_to(struct maximum *m, uint16_t amax) {
  uint16_t seen = atomic_load(&m->amax);
  while (amax > seen && !atomic_compare_exchange_weak(&m->amax, &seen, amax)) {
  }
}

static void visit_amax(void *rule, const uint16_t *bits, const struct panel *p, struct quantise_counts *counts) {
  (void)counts;
  raise_to(rule, panel_amax(bits, p));
}

enum { AMAX_PIECE = 1 << 16 };

static void amax_task(void *context, int64_t index, int worker) {
  (void)worker;
  struct maximum *m = context;
  const int64_t first = index * AMAX_PIECE, left = m->count - first;
  raise_to(m, amax_of(m->bits + first, left < AMAX_PIECE ? left : AMAX_PIECE));
}

uint16_t view_amax(struct cpu_device *d, const struct operand *o, const struct matrix *source) {
  struct maximum m = {.bits = source->data, .count = source->rows * source->cols};
  if (o->encoding.hadamard == HADAMARD_NONE)
    threads_run(d->threads, ceil_div(m.count, AMAX_PIECE), amax_task, &m);
  else
    panels_visit(d, o, source, visit_amax, &m, NULL);
  return atomic_load(&m.amax);
}
