/* Operands: extents and the tiled layout of scales. */
#include "base/checked.h"
#include "kernels/formats.h"
#include "kernels/kernels.h"

struct operand operand_of_matrix(const struct matrix *m, enum view view) {
  struct operand o = {.view = view, .codes = m->data};
  o.encoding.format = m->dtype == DTYPE_BF16 ? FORMAT_BF16 : FORMAT_F32;
  o.rows = view == VIEW_ROW ? m->rows : m->cols;
  o.cols = view == VIEW_ROW ? m->cols : m->rows;
  return o;
}

int64_t operand_code_bytes(const struct encoding *e, int64_t rows, int64_t cols) {
  switch (e->format) {
    case FORMAT_F32: return rows * cols * 4;
    case FORMAT_BF16: return rows * cols * 2;
    case FORMAT_E4M3:
    case FORMAT_E5M2: return rows * cols;
    case FORMAT_MXFP4:
    case FORMAT_NVFP4:
    case FORMAT_NVFP4_LOCAL: return rows * ceil_div(cols, 2);
  }
  return 0;
}

int64_t operand_scale_bytes(const struct encoding *e, int64_t rows, int64_t cols) {
  int64_t block = encoding_block_cols(e);
  if (block == 0) return 0;
  return round_up(rows, 128) * round_up(ceil_div(cols, block), 4);
}

int64_t operand_outer_count(const struct operand *o) {
  const enum format f = o->encoding.format;
  if (f == FORMAT_F32 || f == FORMAT_BF16 || f == FORMAT_MXFP4) return 0;
  const int64_t strips = o->strip > 0 ? ceil_div(o->rows, o->strip) : 1;
  const int64_t segments = o->segment > 0 ? ceil_div(o->cols, o->segment) : 1;
  return strips * segments;
}

int64_t operand_scale_offset(int64_t r, int64_t c, int64_t scale_cols) {
  return ((r / 128) * ceil_div(scale_cols, 4) + c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4;
}

static double decode_plain(const struct operand *o, int64_t r, int64_t c) {
  const int64_t at = o->view == VIEW_ROW ? r * o->cols + c : c * o->rows + r;
  const uint8_t *p = o->codes;
  uint16_t half;
  float wide;
  if (o->encoding.format == FORMAT_BF16) {
    memcpy(&half, p + 2 * at, sizeof half);
    return (double)bf16_decode(half);
  }
  memcpy(&wide, p + 4 * at, sizeof wide);
  return (double)wide;
}

static double decode_code(const struct operand *o, int64_t r, int64_t c) {
  const enum format f = o->encoding.format;
  if (f == FORMAT_E4M3) return (double)e4m3_decode(o->codes[r * o->cols + c]);
  if (f == FORMAT_E5M2) return (double)e5m2_decode(o->codes[r * o->cols + c]);
  const int64_t block = encoding_block_cols(&o->encoding);
  const uint32_t both = o->codes[r * (o->cols / 2) + c / 2], code = c % 2 ? both >> 4 : both;
  const uint32_t scale = o->scales[operand_scale_offset(r, c / block, o->cols / block)];
  const float step = f == FORMAT_MXFP4 ? e8m0_decode(scale) : e4m3_decode(scale);
  return (double)e2m1_decode(code & 15u) * (double)step;
}

double operand_divisor(const struct encoding *e) {
  if (e->format == FORMAT_MXFP4) return e->scale == SCALE_MX_FLOOR ? 1 : 6;
  if (e->format == FORMAT_NVFP4) return e->scale == SCALE_TENSOR_4OVER6 ? 6 * 256 : 6 * 448;
  return 1;
}

void operand_decode(const struct operand *o, int64_t r, double *values) {
  const int64_t segment = o->segment > 0 ? o->segment : o->cols, segments = ceil_div(o->cols, segment);
  const float *outer = o->outer ? o->outer + (o->strip > 0 ? r / o->strip : 0) * segments : NULL;
  for (int64_t c = 0; c < o->cols; c++) {
    if (encoding_is_plain(&o->encoding)) {
      values[c] = decode_plain(o, r, c);
      continue;
    }
    double x = decode_code(o, r, c);
    if (outer) x *= (double)outer[c / segment];
    values[c] = x / operand_divisor(&o->encoding);
  }
}
