/* Emission: a strip of 32 source rows becomes plain rows and operands.
 *
 * A strip owns all bytes it writes, scale padding included: the padding
 * columns of its rows and, at the far edge, the padding rows and columns. So
 * operands may stand in memory that held something else.
 */
#include "kernels/cpu/emit.h"

#include <pthread.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/mxfp4.h"
#include "kernels/cpu/whole.h"

static bool packed(const struct operand *o) { return o && !encoding_is_plain(&o->encoding); }
static bool tiled(const struct operand *o) { return packed(o) && o->encoding.block == BLOCK_2D32; }

void emit_check_operand(const struct emission *out, const struct operand *o, enum view view, int64_t source_rows,
                        int64_t source_cols) {
  const struct encoding *e = &o->encoding;
  const int64_t rows = view == VIEW_ROW ? source_rows : source_cols, cols = view == VIEW_ROW ? source_cols : source_rows;
  CPU_REQUIRE(o->view == view, "the operand's view is not the one it is emitted as");
  CPU_REQUIRE(o->rows == rows && o->cols == cols, "the operand's shape is not the source's");
  CPU_REQUIRE(o->codes != NULL, "the operand has no memory");
  CPU_REQUIRE(cpu_refuse_encoding(NULL, e, view) == NULL, "the operand's encoding is not executable");
  if (!packed(o)) return;
  const int64_t block = encoding_block_cols(e), unit = block == 32 || e->hadamard == HADAMARD_SIGNED_32 ? 32 : 16;
  CPU_REQUIRE(block == 0 || o->scales != NULL, "the operand has no memory for scales");
  CPU_REQUIRE(e->format == FORMAT_MXFP4 || o->outer != NULL, "the operand has no memory for outer factors");
  CPU_REQUIRE(cols % unit == 0, "the contraction axis is not a multiple of the block and the transform");
  CPU_REQUIRE(!(e->block == BLOCK_2D16 || e->block == BLOCK_2D32) || rows % block == 0,
              "2D tiles need both axes in multiples of their side");
  if (e->rounding == ROUND_STOCHASTIC) {
    CPU_REQUIRE(out->draw.seq_len > 0, "stochastic rounding without a sequence length");
    CPU_REQUIRE(out->draw.seq_len <= ((int64_t)16 << 32) / source_cols, "a sample has more than 2^32 draws");
    CPU_REQUIRE(view == VIEW_ROW || out->draw.seq_len % 16 == 0, "a column view draws for 16 tokens of a sample");
  }
}

static void check(const struct emission *out, int64_t source_rows, int64_t first_row, const struct matrix *strip) {
  CPU_REQUIRE(first_row >= 0 && first_row % CPU_STRIP == 0, "a strip begins at a multiple of its height");
  CPU_REQUIRE(strip->rows > 0 && (strip->rows % CPU_STRIP == 0 || first_row + strip->rows == source_rows),
              "only the last strip may be lower than the others");
  CPU_REQUIRE(!out->plain || (out->plain->rows == source_rows && out->plain->cols == strip->cols),
              "the plain result's shape is not the source's");
  CPU_REQUIRE(!whole_wanted(out->row) && !whole_wanted(out->column), "an operand that a strip cannot make");
  if (out->row) emit_check_operand(out, out->row, VIEW_ROW, source_rows, strip->cols);
  if (out->column) {
    emit_check_operand(out, out->column, VIEW_COLUMN, source_rows, strip->cols);
    CPU_REQUIRE(!packed(out->column) || strip->cols % 32 == 0, "the source's columns are not a multiple of 32");
  }
}

static void copy_rows(struct matrix *to, int64_t first_row, const struct matrix *strip) {
  int64_t first = first_row * strip->cols, n = strip->rows * strip->cols;
  size_t size = dtype_bytes(to->dtype);
  char *target = (char *)to->data + (size_t)first * size;
  if (to->dtype == strip->dtype) {
    if (target != strip->data) memcpy(target, strip->data, (size_t)n * size);
  } else if (strip->dtype == DTYPE_F32) {
    cpu_store(to, first, strip->data, n);
  } else {
    cpu_load((float *)to->data + first, strip, 0, n);
  }
}

/* Plain operands are the source's rows in either view. */
static void copy_operand(const struct operand *o, int64_t first_row, const struct matrix *strip) {
  struct matrix m = {.data = o->codes, .dtype = o->encoding.format == FORMAT_BF16 ? DTYPE_BF16 : DTYPE_F32};
  copy_rows(&m, first_row, strip);
}

static void quantise_piece(const struct emission *out, const struct mxfp4_piece *p, struct quantise_counts *counts) {
  const struct operand *row = packed(out->row) ? out->row : NULL;
  const struct operand *column = packed(out->column) ? out->column : NULL;
  if (tiled(row) || tiled(column))
    mxfp4_quantise_tiles(tiled(row) ? row : NULL, tiled(column) ? column : NULL, p, &counts[VIEW_ROW],
                         &counts[VIEW_COLUMN]);
  if (row && !tiled(row)) {
    if (row->encoding.rounding == ROUND_STOCHASTIC)
      mxfp4_draw_rows(row, p, &out->draw, &counts[VIEW_ROW]);
    else
      mxfp4_quantise_rows(row, p, &counts[VIEW_ROW]);
  }
  if (column && !tiled(column)) mxfp4_quantise_columns(column, p, &counts[VIEW_COLUMN]);
}

static void clear_scales(const struct operand *o, int64_t first_row, int64_t end_row, int64_t first_col,
                         int64_t end_col) {
  for (int64_t c = first_col; c < end_col; c++)
    for (int64_t r = first_row; r < end_row; r++) o->scales[operand_scale_offset(r, c, o->cols / 32)] = 0;
}

static void clear_padding(const struct operand *o, int64_t source_rows, int64_t first_row, int64_t rows) {
  int64_t scale_cols = o->cols / 32, all_cols = round_up(scale_cols, 4), all_rows = round_up(o->rows, 128);
  bool last = first_row + rows == source_rows;
  if (o->view == VIEW_ROW) {
    clear_scales(o, first_row, first_row + rows, scale_cols, all_cols);
    if (last) clear_scales(o, o->rows, all_rows, 0, all_cols);
  } else {
    clear_scales(o, o->rows, all_rows, first_row / 32, (first_row + rows) / 32);
    if (last) clear_scales(o, 0, all_rows, scale_cols, all_cols);
  }
}

void cpu_emit_matrix_strip(const struct emission *out, int64_t source_rows, int64_t first_row,
                           const struct matrix *strip, struct quantise_counts *counts, void *scratch) {
  check(out, source_rows, first_row, strip);
  int64_t cols = strip->cols;
  if (out->plain) copy_rows(out->plain, first_row, strip);
  if (out->row && !packed(out->row)) copy_operand(out->row, first_row, strip);
  if (out->column && !packed(out->column)) copy_operand(out->column, first_row, strip);
  if (!packed(out->row) && !packed(out->column)) return;

  struct quantise_counts ignored[2] = {{0}};
  const uint16_t *bits = NULL; /* the strip in BF16, where that exists */
  if (strip->dtype == DTYPE_BF16)
    bits = strip->data;
  else if (out->plain && out->plain->dtype == DTYPE_BF16)
    bits = (const uint16_t *)out->plain->data + first_row * cols;

  /* Strips of the same columns follow each other, while the cache holds the lines of
   * codes that a column view shares among them. */
  for (int64_t col = 0; col < cols; col += MXFP4_CHUNK)
    for (int64_t r = 0; r < strip->rows; r += CPU_STRIP) {
      struct mxfp4_piece p = {.first_row = first_row + r,
                              .rows = strip->rows - r < CPU_STRIP ? strip->rows - r : CPU_STRIP,
                              .source_rows = source_rows,
                              .first_col = col,
                              .cols = cols - col < MXFP4_CHUNK ? cols - col : MXFP4_CHUNK,
                              .source_cols = cols};
      if (bits) {
        p.bits = bits + r * cols + col;
        p.stride = cols;
      } else {
        struct matrix chunk = {.data = scratch, .dtype = DTYPE_BF16, .rows = p.rows, .cols = p.cols};
        for (int64_t i = 0; i < p.rows; i++)
          cpu_store(&chunk, i * p.cols, (const float *)strip->data + (r + i) * cols + col, p.cols);
        p.bits = scratch;
        p.stride = p.cols;
      }
      quantise_piece(out, &p, counts ? counts : ignored);
    }
  if (packed(out->row)) clear_padding(out->row, source_rows, first_row, strip->rows);
  if (packed(out->column)) clear_padding(out->column, source_rows, first_row, strip->rows);
}

void cpu_emit_strip(const struct emission *out, int64_t source_rows, int64_t cols, int64_t first_row, int64_t rows,
                    const float *values, struct quantise_counts *counts, void *scratch) {
  struct matrix strip = {.data = (void *)(uintptr_t)values, .dtype = DTYPE_F32, .rows = rows, .cols = cols};
  cpu_emit_matrix_strip(out, source_rows, first_row, &strip, counts, scratch);
}

/* One chunk in BF16, however wide the strip is. */
int64_t cpu_emit_scratch_bytes(int64_t cols) {
  return CPU_STRIP * (cols < MXFP4_CHUNK ? cols : MXFP4_CHUNK) * (int64_t)sizeof(uint16_t);
}

void cpu_counts_add(struct quantise_counts *to, const struct quantise_counts *from) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  CPU_REQUIRE(pthread_mutex_lock(&lock) == 0, "the counts cannot be locked");
  to->elements += from->elements;
  to->saturated += from->saturated;
  to->underflowed += from->underflowed;
  to->blocks += from->blocks;
  to->zero_blocks += from->zero_blocks;
  if (from->amax > to->amax) to->amax = from->amax;
  CPU_REQUIRE(pthread_mutex_unlock(&lock) == 0, "the counts cannot be unlocked");
}
