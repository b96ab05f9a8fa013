/* Which operands are made from the whole result, and by which rule. */
#include "kernels/cpu/whole.h"

#include "base/checked.h"
#include "kernels/cpu/emit.h"

enum { ALIGN = 256 };

/* MXFP4 groups of source rows, and 32x32 tiles, are done strip by strip (mxfp4.c). */
static bool made_by_strips(const struct encoding *e) {
  return e->format == FORMAT_MXFP4 && e->hadamard == HADAMARD_NONE &&
         (e->scale == SCALE_MX_ENCODE || e->scale == SCALE_MX_ADAPTIVE);
}

bool whole_wanted(const struct operand *o) {
  return o && !encoding_is_plain(&o->encoding) && !made_by_strips(&o->encoding);
}

bool whole_drop(struct emission *out) {
  const bool row = whole_wanted(out->row), column = whole_wanted(out->column);
  if (row) out->row = NULL;
  if (column) out->column = NULL;
  return row || column;
}

int64_t whole_scratch_bytes(int64_t rows, int64_t cols) { return ALIGN + rows * cols * (int64_t)sizeof(uint16_t); }

void whole_begin(struct whole_emission *e, struct device *d, const struct emission *out, int64_t rows, int64_t cols,
                 int64_t used) {
  const bool row = whole_wanted(out->row);
  *e = (struct whole_emission){.strips = *out};
  e->wanted = whole_drop(&e->strips);
  if (!e->wanted) return;
  if (out->plain && out->plain->dtype == DTYPE_BF16) {
    e->result = *out->plain;
    return;
  }
  const int64_t first = round_up(used, ALIGN);
  CPU_REQUIRE(first + rows * cols * (int64_t)sizeof(uint16_t) <= cpu_of(d)->scratch_bytes,
              "scratch is too small for the whole result");
  e->result = (struct matrix){.data = cpu_of(d)->scratch + first, .dtype = DTYPE_BF16, .rows = rows, .cols = cols};
  e->kept = operand_of_matrix(&e->result, row ? VIEW_ROW : VIEW_COLUMN);
  if (row) e->strips.row = &e->kept;
  else e->strips.column = &e->kept;
}

static whole_rule *rule_of(const struct encoding *e) {
  static const struct {
    enum format format;
    whole_rule *rule;
  } table[] = {
      {FORMAT_E4M3, fp8_quantise},
      {FORMAT_E5M2, fp8_quantise},
      {FORMAT_MXFP4, mxfp4_whole_quantise},
      {FORMAT_NVFP4, nvfp4_quantise},
      {FORMAT_NVFP4_LOCAL, nvfp4_local_quantise},
  };
  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
    if (table[i].format == e->format) return table[i].rule;
  return NULL;
}

static void clear_scales(const struct operand *o, int64_t scale_cols, int64_t first_row, int64_t end_row,
                         int64_t first_col, int64_t end_col) {
  for (int64_t r = first_row; r < end_row; r++)
    for (int64_t c = first_col; c < end_col; c++) o->scales[operand_scale_offset(r, c, scale_cols)] = 0;
}

static void clear_padding(const struct operand *o) {
  const int64_t block = encoding_block_cols(&o->encoding);
  if (block == 0) return;
  const int64_t scale_cols = o->cols / block, all_cols = round_up(scale_cols, 4), all_rows = round_up(o->rows, 128);
  clear_scales(o, scale_cols, 0, o->rows, scale_cols, all_cols);
  clear_scales(o, scale_cols, o->rows, all_rows, 0, all_cols);
}

static void begin(struct cpu_device *d, struct panel_rule *rule, const struct matrix *source) {
  whole_rule *begin_rule = rule_of(&rule->o->encoding);
  CPU_REQUIRE(begin_rule != NULL, "no rule makes this encoding");
  clear_padding(rule->o);
  begin_rule(d, rule, source);
}

/* Tiles: both views have the same codes and scales. */
static bool twins(const struct operand *row, const struct operand *column) {
  return row && column && encoding_equal(&row->encoding, &column->encoding) &&
         (row->encoding.block == BLOCK_2D16 || row->encoding.block == BLOCK_2D32);
}

/* Those whose scale is of a tensor. */
static const struct operand *of_tensor(const struct operand *o) {
  const bool is = o && (o->encoding.scale == SCALE_TENSOR || o->encoding.scale == SCALE_TENSOR_4OVER6);
  return is ? o : NULL;
}

/* Those whose scales are of chunks. */
static const struct operand *of_chunks(const struct operand *o) {
  return o && o->encoding.format == FORMAT_NVFP4_LOCAL ? o : NULL;
}

/* Those whose scale is of a row. */
static const struct operand *of_rows(const struct operand *o) {
  return o && o->encoding.scale == SCALE_ROW ? o : NULL;
}

void whole_quantise(struct device *d, const struct emission *out, const struct matrix *source) {
  const struct operand *row = whole_wanted(out->row) ? out->row : NULL;
  const struct operand *column = whole_wanted(out->column) ? out->column : NULL;
  CPU_REQUIRE(source->dtype == DTYPE_BF16, "the whole result is not in BF16");
  if (row) emit_check_operand(out, row, VIEW_ROW, source->rows, source->cols);
  if (column) emit_check_operand(out, column, VIEW_COLUMN, source->rows, source->cols);
  if (source->rows == 0) return;
  struct quantise_counts ignored[2] = {{0}}, *counts = out->counts ? out->counts : ignored;
  const bool twin = twins(row, column);
  struct draw draw[2] = {out->draw, out->draw};
  draw[VIEW_COLUMN].operand += DRAW_COLUMN;
  uint16_t amax[2] = {0};
  view_amaxes(cpu_of(d), of_tensor(row), twin ? NULL : of_tensor(column), source, amax);
  nvfp4_local_amaxes(cpu_of(d), of_chunks(row), of_chunks(column), source);
  row_amaxes(cpu_of(d), of_rows(row), of_rows(column), source);
  struct panel_rule rules[2];
  int n = 0;
  for (int v = 0; v < 2; v++) {
    const struct operand *o = v == VIEW_ROW ? row : column, *done = twin && v == VIEW_COLUMN ? row : NULL;
    if (!o) continue;
    rules[n] = (struct panel_rule){.o = o, .done = done, .counts = &counts[v], .amax = amax[done ? VIEW_ROW : v]};
    if (o->encoding.rounding == ROUND_STOCHASTIC && !done) rules[n].draw = &draw[v];
    begin(cpu_of(d), &rules[n], source);
    n += rules[n].visit != NULL;
  }
  if (n > 0) panels_visit(cpu_of(d), rules, n, source);
  for (int i = 0; i < n; i++)
    if (rules[i].finish) rules[i].finish(&rules[i]);
}
