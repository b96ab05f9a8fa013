/* Largest magnitudes: of panels, of the source, of a view after its transform. */
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/transform.h"
#include "kernels/cpu/whole.h"

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 64, BITS_INFINITE = 0x7F80 };

CPU_CLONES static uint16_t amax_of_rows(const uint16_t *z, int64_t stride, int64_t rows, int64_t cols) {
  uint16_t lane[LANES] = {0}, amax = 0;
  for (int64_t r = 0; r < rows; r++, z += stride) {
    int64_t c = 0;
    for (; c + LANES <= cols; c += LANES) {
      if (stride > cols) { /* a piece of rows: the next one beside it */
        __builtin_prefetch(z + cols + c, 0, 2);
        __builtin_prefetch(z + cols + c + LANES / 2, 0, 2);
      }
      for (int l = 0; l < LANES; l++) {
        const uint16_t a = z[c + l] & 0x7FFF;
        lane[l] = a > lane[l] ? a : lane[l];
      }
    }
    for (; c < cols; c++) {
      const uint16_t a = z[c] & 0x7FFF;
      amax = a > amax ? a : amax;
    }
  }
  for (int l = 0; l < LANES; l++) amax = lane[l] > amax ? lane[l] : amax;
  return amax;
}

/* amax[t] is raised to the largest of columns [t * PANEL_COLS, (t + 1) * PANEL_COLS). */
CPU_CLONES void amax_of_tiles(uint16_t *restrict amax, const uint16_t *restrict z, int64_t stride, int64_t rows,
                              int64_t cols) {
  const int64_t whole = cols / PANEL_COLS;
  for (int64_t t = 0; t < whole; t++) {
    uint16_t lane[LANES] = {0};
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < PANEL_COLS; c += LANES)
        for (int l = 0; l < LANES; l++) {
          const uint16_t a = z[r * stride + t * PANEL_COLS + c + l] & 0x7FFF;
          lane[l] = a > lane[l] ? a : lane[l];
        }
    for (int l = 0; l < LANES; l++) amax[t] = lane[l] > amax[t] ? lane[l] : amax[t];
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = whole * PANEL_COLS; c < cols; c++) {
      const uint16_t a = z[r * stride + c] & 0x7FFF;
      amax[whole] = a > amax[whole] ? a : amax[whole];
    }
}

uint16_t panel_amax(const uint16_t *bits, const struct panel *p) {
  return amax_of_rows(bits, 0, 1, p->cols * PANEL_ROWS);
}

CPU_CLONES void panel_amax_of_16(uint16_t *restrict amax, const uint16_t *restrict bits, int64_t places) {
  for (int64_t g = 0; g < places; g++, amax += PANEL_ROWS, bits += 16 * PANEL_ROWS)
    for (int r = 0; r < PANEL_ROWS; r++) {
      uint16_t m = 0;
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        const uint16_t a = bits[i * PANEL_ROWS + r] & 0x7FFF;
        m = a > m ? a : m;
      }
      amax[r] = m;
    }
}

void panel_count_amax(struct quantise_counts *counts, uint32_t amax, const uint16_t *bits, const struct panel *p) {
  if (amax >= BITS_INFINITE) {
    amax = 0;
    for (int64_t i = 0; i < p->cols * PANEL_ROWS; i++) {
      const uint32_t a = bits[i] & 0x7FFFu;
      if (a > amax && a < BITS_INFINITE) amax = a;
    }
  }
  const float finite = bf16_decode((uint16_t)amax);
  if (finite > counts->amax) counts->amax = finite;
}

/* Raises to[] to the magnitudes of x. */
TRANSFORM_INLINE void raise_lanes(bit_lanes *to, const lanes *x) {
  const bit_lanes a = (bit_lanes)*x & 0x7FFFFFFFu, larger = ABOVE(a, *to);
  *to = (a & larger) | (*to & ~larger);
}

/* Where a transform's elements stand above each other, the largest sum does:
 * scaling and rounding keep the order.  Of a last butterfly's p + q and p - q the larger
 * is |p| + |q|, unless that is not finite (`exact`: both are looked at).  Rows may be far
 * apart, so pieces of them, whole cache lines, are first laid side by side. */
INLINE uint32_t largest_sum(const uint16_t *z, int64_t stride, int64_t rows, int64_t cols, int n, bool with_signs,
                            bool exact) {
  bit_lanes top = {0};
  for (int64_t r = 0; r < rows; r += n, z += n * stride)
    for (int64_t c = 0; c < cols; c += LANES) {
      uint16_t tile[TRANSFORM_WIDEST][LANES];
      const int64_t width = cols - c < LANES ? cols - c : LANES;
      if (width == LANES) {
        for (int i = 0; i < n; i++) memcpy(tile[i], z + i * stride + c, sizeof tile[i]);
      } else {
        memset(tile, 0, sizeof tile);
        for (int i = 0; i < n; i++) memcpy(tile[i], z + i * stride + c, (size_t)width * sizeof *z);
      }
      const uint16_t *next = c + LANES < cols ? z + c + LANES : z + n * stride;
      for (int64_t k = 0; k < width; k += TRANSFORM_ROWS)
        for (int odd = 0; odd < 2; odd++) {
          lanes x[TRANSFORM_WIDEST];
          for (int64_t i = (k + odd * TRANSFORM_LANES) * n / LANES, end = i + TRANSFORM_LANES * n / LANES; i < end; i++) {
            __builtin_prefetch(next + i * stride, 0, 2);
            __builtin_prefetch(next + i * stride + LANES / 2, 0, 2);
          }
          decode_half(x, tile[0] + k, LANES, n, with_signs, odd);
          transform_most(x, n);
#pragma GCC unroll 16
          for (int i = 0; i < n / 2; i++) {
            const lanes p = x[i], q = x[i + n / 2], sum = p + q, difference = p - q;
            const lanes larger = (lanes)((bit_lanes)p & 0x7FFFFFFFu) + (lanes)((bit_lanes)q & 0x7FFFFFFFu);
            raise_lanes(&top, exact ? &sum : &larger);
            if (exact) raise_lanes(&top, &difference);
          }
        }
    }
  uint32_t most = 0;
  for (int l = 0; l < TRANSFORM_LANES; l++) most = top[l] > most ? top[l] : most;
  return most;
}

INLINE uint16_t amax_of_sums(const uint16_t *z, int64_t stride, int64_t rows, int64_t cols, int n, bool with_signs,
                             float scale) {
  uint32_t most = largest_sum(z, stride, rows, cols, n, with_signs, false);
  if (most >= 0x7F800000u) most = largest_sum(z, stride, rows, cols, n, with_signs, true);
  return most > 0x7F800000u ? 0x7FC0 : bf16_encode(f32_from_bits(most) * scale);
}

CPU_CLONES uint16_t amax_of_source(const uint16_t *z, int64_t stride, int64_t rows, int64_t cols, enum hadamard columns) {
  switch (columns) {
    case HADAMARD_NONE: break;
    case HADAMARD_PLAIN_16: return amax_of_sums(z, stride, rows, cols, 16, false, HADAMARD_SCALE_16);
    case HADAMARD_SIGNED_16: return amax_of_sums(z, stride, rows, cols, 16, true, HADAMARD_SCALE_16);
    case HADAMARD_SIGNED_32: return amax_of_sums(z, stride, rows, cols, 32, true, HADAMARD_SCALE_32);
  }
  return amax_of_rows(z, stride, rows, cols);
}

/* ---- of whole views ---------------------------------------------------------------- */

enum { STRIP = 32 }; /* source rows a task: a multiple of any transform's width */

struct maxima {
  _Atomic uint16_t amax[2];
  bool wanted[2];
  enum hadamard hadamard[2];
  const struct matrix *source;
};

static void raise_to(_Atomic uint16_t *most, uint16_t amax) {
  uint16_t seen = atomic_load(most);
  while (amax > seen && !atomic_compare_exchange_weak(most, &seen, amax)) {
  }
}

static void strip_task(void *context, int64_t index, int worker) {
  (void)worker;
  struct maxima *m = context;
  const int64_t cols = m->source->cols, left = m->source->rows - index * STRIP, rows = left < STRIP ? left : STRIP;
  const uint16_t *z = (const uint16_t *)m->source->data + index * STRIP * cols;
  for (int v = 0; v < 2; v++) {
    if (!m->wanted[v]) continue;
    const bool plain = m->hadamard[v] == HADAMARD_NONE;
    raise_to(&m->amax[v], plain ? amax_of_rows(z, 0, 1, rows * cols) : amax_of_source(z, cols, rows, cols, m->hadamard[v]));
  }
}

static void visit(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                  struct quantise_counts *counts, struct ahead *ahead) {
  (void)counts, (void)ahead;
  raise_to(rule->context, panel_amax(bits, p));
}

void view_amaxes(struct cpu_device *d, const struct operand *row, const struct operand *column,
                 const struct matrix *source, uint16_t amax[2]) {
  const bool turned = row && row->encoding.hadamard != HADAMARD_NONE; /* its transform needs panels */
  const bool same = row && column && !turned && column->encoding.hadamard == HADAMARD_NONE;
  struct maxima m = {.wanted = {row && !turned, column && !same}, .source = source};
  m.hadamard[VIEW_COLUMN] = column ? column->encoding.hadamard : HADAMARD_NONE;
  if (turned) panels_visit(d, &(struct panel_rule){.o = row, .visit = visit, .context = &m.amax[VIEW_ROW]}, 1, source);
  if (m.wanted[0] || m.wanted[1]) threads_run(d->threads, ceil_div(source->rows, STRIP), strip_task, &m);
  if (row) amax[VIEW_ROW] = atomic_load(&m.amax[VIEW_ROW]);
  if (column) amax[VIEW_COLUMN] = atomic_load(&m.amax[same ? VIEW_ROW : VIEW_COLUMN]);
}

/* ---- of each row of views ---------------------------------------------------------- */

enum { PIECE = 1024 }; /* source columns a task */

typedef uint32_t outer_bits __attribute__((may_alias));

static void raise_outer(float *outer, uint16_t amax) {
  outer_bits *most = (outer_bits *)outer;
  uint32_t seen = __atomic_load_n(most, __ATOMIC_RELAXED);
  while (amax > seen && !__atomic_compare_exchange_n(most, &seen, amax, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

/* Of each column of [rows][cols], whose largest are in column[] so far, and of each row. */
CPU_CLONES static void amax_both_ways(uint16_t *restrict column, uint16_t *restrict row, const uint16_t *restrict z,
                                      int64_t stride, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; r++, z += stride) {
    uint16_t most = 0;
    for (int64_t c = 0; c < cols; c++) {
      const uint16_t a = z[c] & 0x7FFF;
      column[c] = a > column[c] ? a : column[c];
      most = a > most ? a : most;
    }
    row[r] = most;
  }
}

struct pieces {
  float *outer[2]; /* of views without a transform, or NULL */
  const struct matrix *source;
};

static void piece_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct pieces *p = context;
  const int64_t across = ceil_div(p->source->cols, PIECE), first_row = index / across * STRIP, first_col = index % across * PIECE;
  const int64_t down = p->source->rows - first_row, left = p->source->cols - first_col;
  const int64_t rows = down < STRIP ? down : STRIP, cols = left < PIECE ? left : PIECE;
  uint16_t column[PIECE] = {0}, row[STRIP];
  amax_both_ways(column, row, (const uint16_t *)p->source->data + first_row * p->source->cols + first_col, p->source->cols,
                 rows, cols);
  for (int64_t r = 0; p->outer[VIEW_ROW] && r < rows; r++) raise_outer(p->outer[VIEW_ROW] + first_row + r, row[r]);
  for (int64_t c = 0; p->outer[VIEW_COLUMN] && c < cols; c++) raise_outer(p->outer[VIEW_COLUMN] + first_col + c, column[c]);
}

static void visit_rows(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                       struct quantise_counts *counts, struct ahead *ahead) {
  (void)counts, (void)ahead;
  uint16_t of_16[PANEL_ELEMENTS / 16];
  panel_amax_of_16(of_16, bits, p->cols / 16);
  for (int64_t r = 0; r < p->rows; r++) {
    uint16_t most = 0;
    for (int64_t g = 0; g < p->cols / 16; g++) most = of_16[g * PANEL_ROWS + r] > most ? of_16[g * PANEL_ROWS + r] : most;
    raise_outer(rule->o->outer + p->first_row + r, most);
  }
}

void row_amaxes(struct cpu_device *d, const struct operand *row, const struct operand *column,
                const struct matrix *source) {
  struct pieces p = {.source = source};
  struct panel_rule rules[2];
  int n = 0;
  for (int v = 0; v < 2; v++) {
    const struct operand *o = v == VIEW_ROW ? row : column;
    if (!o) continue;
    memset(o->outer, 0, (size_t)o->rows * sizeof *o->outer);
    if (o->encoding.hadamard == HADAMARD_NONE)
      p.outer[v] = o->outer;
    else
      rules[n++] = (struct panel_rule){.o = o, .visit = visit_rows};
  }
  if (p.outer[0] || p.outer[1])
    threads_run(d->threads, ceil_div(source->rows, STRIP) * ceil_div(source->cols, PIECE), piece_task, &p);
  if (n > 0) panels_visit(d, rules, n, source);
}
