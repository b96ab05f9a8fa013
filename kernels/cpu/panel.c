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

enum { LANES = PANEL_ROWS, TILE = 16, WIDEST = 32, BITS_INFINITE = 0x7F80, STAGED = 64 };

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

typedef uint16_t half_lanes __attribute__((vector_size(2 * LANES)));
typedef uint32_t bit_lanes __attribute__((vector_size(4 * LANES)));
typedef float lanes __attribute__((vector_size(4 * LANES)));

INLINE void decode_lanes(lanes *to, const uint16_t *from, uint16_t flip) {
  half_lanes half;
  memcpy(&half, from, sizeof half);
  *to = (lanes)(__builtin_convertvector(half ^ flip, bit_lanes) << 16);
}

/* As bf16_encode, but all NaNs are one: which of several an addition keeps
 * differs between machines. */
INLINE void encode_lanes(uint16_t *to, const lanes *from) {
  const bit_lanes u = (bit_lanes)*from, nan = (bit_lanes)((u & 0x7FFFFFFFu) > 0x7F800000u);
  const bit_lanes rounded = (u + 0x7FFFu + (u >> 16 & 1u)) >> 16;
  const half_lanes half = __builtin_convertvector((rounded & ~nan) | (0x7FC0u & nan), half_lanes);
  memcpy(to, &half, sizeof half);
}

INLINE void butterflies(lanes *x, int n, int distance) {
#pragma GCC unroll 32
  for (int i = 0; i < n; i++)
    if ((i & distance) == 0) {
      const lanes low = x[i], high = x[i + distance];
      x[i] = low + high;
      x[i + distance] = low - high;
    }
}

INLINE void all_butterflies(lanes *x, int n) {
  butterflies(x, n, 1);
  butterflies(x, n, 2);
  butterflies(x, n, 4);
  butterflies(x, n, 8);
  if (n == 32) butterflies(x, n, 16);
}

/* What the transform's sign does to the bits of element i. */
INLINE uint16_t flip_of(int i, bool with_signs) {
  return with_signs && (HADAMARD_SIGNS >> (i % 16) & 1u) == 0 ? 0x8000 : 0;
}

/* hadamard_transform (kernels/hadamard.h) of every lane. */
INLINE void transform_lanes(uint16_t (*restrict tile)[LANES], int n, bool with_signs, float scale) {
  lanes x[WIDEST];
#pragma GCC unroll 32
  for (int i = 0; i < n; i++) decode_lanes(&x[i], tile[i], flip_of(i, with_signs));
  all_butterflies(x, n);
#pragma GCC unroll 32
  for (int i = 0; i < n; i++) {
    x[i] = x[i] * scale;
    encode_lanes(tile[i], &x[i]);
  }
}

INLINE void transform(uint16_t (*tile)[LANES], enum hadamard h) {
  switch (h) {
    case HADAMARD_NONE: break;
    case HADAMARD_PLAIN_16: transform_lanes(tile, 16, false, HADAMARD_SCALE_16); break;
    case HADAMARD_SIGNED_16: transform_lanes(tile, 16, true, HADAMARD_SCALE_16); break;
    case HADAMARD_SIGNED_32: transform_lanes(tile, 32, true, HADAMARD_SCALE_32); break;
  }
}

/* rows [n][LANES] from `source`, `stride` apart, of which the first `count` elements exist. */
INLINE void load_tile(uint16_t (*tile)[LANES], const uint16_t *source, int64_t stride, int n, int64_t count) {
  if (count == LANES) {
    for (int i = 0; i < n; i++) memcpy(tile[i], source + i * stride, sizeof *tile);
    return;
  }
  memset(tile, 0, (size_t)n * sizeof *tile);
  for (int i = 0; i < n; i++) memcpy(tile[i], source + i * stride, (size_t)count * sizeof **tile);
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

static int64_t at_most(int64_t n, int64_t most) { return n < most ? n : most; }

/* A task takes source rows as they lie: 16 of them, or 128 for a column view. */
static void walk_rows(const struct walk *w, int64_t index, struct quantise_counts *counts) {
  uint16_t bits[PANEL_ROWS * PANEL_COLS] = {0};
  struct panel p = {.first_row = index * PANEL_ROWS};
  p.rows = at_most(w->o->rows - p.first_row, PANEL_ROWS);
  for (; p.first_col < w->o->cols; p.first_col += PANEL_COLS) {
    p.cols = at_most(w->o->cols - p.first_col, PANEL_COLS);
    panel_load(bits, w->source, w->o, p.first_row, p.rows, p.first_col, p.cols);
    w->visit(w->rule, bits, &p, counts);
  }
}

/* Some columns at a time are copied to where they stand close together: rows of
 * the source are far apart, and would push each other out of the caches. */
static void walk_columns(const struct walk *w, int64_t index, struct quantise_counts *counts) {
  uint16_t bits[PANEL_ROWS * PANEL_COLS] = {0}, stage[PANEL_COLS * STAGED];
  const uint16_t *z = w->source->data;
  struct panel p = {.first_col = index * PANEL_COLS};
  p.cols = at_most(w->o->cols - p.first_col, PANEL_COLS);
  for (int64_t first = 0; first < w->o->rows; first += STAGED) {
    const int64_t staged = at_most(w->o->rows - first, STAGED);
    const struct matrix piece = {.data = stage, .dtype = DTYPE_BF16, .rows = p.cols, .cols = staged};
    for (int64_t i = 0; i < p.cols; i++) {
      const uint16_t *from = z + (p.first_col + i) * w->source->cols + first;
      if (first + 2 * STAGED <= w->o->rows) {
        __builtin_prefetch(from + STAGED, 0, 2);
        __builtin_prefetch(from + STAGED + STAGED / 2, 0, 2);
      }
      if (staged == STAGED) memcpy(stage + i * STAGED, from, STAGED * sizeof *z);
      else memcpy(stage + i * staged, from, (size_t)staged * sizeof *z);
    }
    for (int64_t row = 0; row < staged; row += PANEL_ROWS) {
      p.first_row = first + row;
      p.rows = at_most(staged - row, PANEL_ROWS);
      panel_load(bits, &piece, w->o, row, p.rows, 0, p.cols);
      w->visit(w->rule, bits, &p, counts);
    }
  }
}

static void walk_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct walk *w = context;
  struct quantise_counts counts = {0};
  if (w->o->view == VIEW_ROW) walk_rows(w, index, &counts);
  else walk_columns(w, index, &counts);
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

void panel_count_amax(struct quantise_counts *counts, uint32_t amax, const uint16_t *bits, const struct panel *p) {
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
  const uint16_t *bits; /* the source, of `count` elements in rows of `cols` */
  int64_t count, cols;
  enum hadamard hadamard;
};

static void raise_to(struct maximum *m, uint16_t amax) {
  uint16_t seen = atomic_load(&m->amax);
  while (amax > seen && !atomic_compare_exchange_weak(&m->amax, &seen, amax)) {
  }
}

/* For a column view, where a transform's elements stand above each other, the
 * largest sum of each lane does: scaling and rounding keep the order. */
INLINE uint32_t amax_of_sums(const uint16_t *z, int64_t stride, int64_t cols, int n, bool with_signs, float scale) {
  bit_lanes top = {0};
  for (int64_t c = 0; c < cols; c += LANES) {
    uint16_t tile[WIDEST][LANES];
    lanes x[WIDEST];
    const bool whole = cols - c >= LANES;
    if (!whole) load_tile(tile, z + c, stride, n, cols - c);
#pragma GCC unroll 32
    for (int i = 0; i < n; i++) decode_lanes(&x[i], whole ? z + i * stride + c : tile[i], flip_of(i, with_signs));
    all_butterflies(x, n);
#pragma GCC unroll 32
    for (int i = 0; i < n; i++) {
      const bit_lanes a = (bit_lanes)x[i] & 0x7FFFFFFFu, larger = (bit_lanes)(a > top);
      top = (a & larger) | (top & ~larger);
    }
  }
  uint32_t most = 0;
  for (int l = 0; l < LANES; l++) most = top[l] > most ? top[l] : most;
  return most > 0x7F800000u ? 0x7FC0u : bf16_encode(f32_from_bits(most) * scale);
}

CPU_CLONES static uint32_t amax_of_columns(const uint16_t *z, int64_t stride, int64_t cols, enum hadamard h) {
  switch (h) {
    case HADAMARD_NONE: break;
    case HADAMARD_PLAIN_16: return amax_of_sums(z, stride, cols, 16, false, HADAMARD_SCALE_16);
    case HADAMARD_SIGNED_16: return amax_of_sums(z, stride, cols, 16, true, HADAMARD_SCALE_16);
    case HADAMARD_SIGNED_32: return amax_of_sums(z, stride, cols, 32, true, HADAMARD_SCALE_32);
  }
  return 0;
}

static void column_amax_task(void *context, int64_t index, int worker) {
  (void)worker;
  struct maximum *m = context;
  const int width = hadamard_width(m->hadamard);
  raise_to(m, (uint16_t)amax_of_columns(m->bits + index * width * m->cols, m->cols, m->cols, m->hadamard));
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
  const enum hadamard h = o->encoding.hadamard;
  struct maximum m = {
      .bits = source->data, .count = source->rows * source->cols, .cols = source->cols, .hadamard = h};
  if (h == HADAMARD_NONE)
    threads_run(d->threads, ceil_div(m.count, AMAX_PIECE), amax_task, &m);
  else if (o->view == VIEW_COLUMN)
    threads_run(d->threads, source->rows / hadamard_width(h), column_amax_task, &m);
  else
    panels_visit(d, o, source, visit_amax, &m, NULL);
  return atomic_load(&m.amax);
}
