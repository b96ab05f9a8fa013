#include "trainer/attention_formats.h"

#include <math.h>
#include <stddef.h>

#include "kernels/attention.h"

const char *const tensor_format_names[] = {"bf16", "e4m3", "nvfp4", "nvfp4-k64", "mxfp4"};

/* ---- Q, K, V ------------------------------------------------------------------------ */

static uint32_t amax_of(const float *x, int64_t n, int64_t stride) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t a = bf16_encode(x[i * stride]) & 0x7FFFu;
    amax = a > amax ? a : amax;
  }
  return amax;
}

static float by_scale(float x, uint32_t scale) {
  return e2m1_decode(e2m1_encode(x * attention_k16_factor(scale))) * e4m3_decode(scale);
}

static void represent_e4m3(float *to, const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = e4m3_decode(attention_e4m3(x[i], ATTENTION_LIFT)) / ATTENTION_LIFT;
}

static void represent_k16(float *to, const float *x, int64_t n, int64_t stride) {
  const uint32_t scale = attention_k16_scale(amax_of(x, n, stride));
  for (int64_t i = 0; i < n; i++) to[i * stride] = by_scale(x[i * stride], scale);
}

static void represent_k64(float *to, const float *x, int64_t n) {
  double least = INFINITY;
  uint32_t best = 0;
  for (int64_t b = 0; b < n; b += ATTENTION_K16) {
    const uint32_t scale = attention_k16_scale(amax_of(x + b, n - b < ATTENTION_K16 ? n - b : ATTENTION_K16, 1));
    double error = 0;
    for (int64_t i = 0; i < n; i++) {
      const double d = (double)by_scale(x[i], scale) - (double)x[i];
      error += d * d;
    }
    if (error < least) least = error, best = scale;
  }
  for (int64_t i = 0; i < n; i++) to[i] = by_scale(x[i], best);
}

/* six times */
static void represent_mx(float *to, const float *x, int64_t n, int64_t stride, uint32_t byte) {
  for (int64_t i = 0; i < n; i++) to[i * stride] = mxfp4_decode(e2m1_encode(x[i * stride] * mxfp4_coefficient(byte)), byte);
}

void tensor_represent(float *to, const float *values, int64_t rows, int64_t cols, enum tensor_format format) {
  static const int64_t block_of[] = {0, 0, 16, 64, 32};
  const int64_t block = block_of[format] ? block_of[format] : cols;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c += block) {
      const float *x = values + r * cols + c;
      float *y = to + r * cols + c;
      const int64_t n = cols - c < block ? cols - c : block;
      switch (format) {
        case TENSOR_BF16:
          for (int64_t i = 0; i < n; i++) y[i] = x[i];
          break;
        case TENSOR_E4M3: represent_e4m3(y, x, n); break;
        case TENSOR_NVFP4: represent_k16(y, x, n, 1); break;
        case TENSOR_NVFP4_64: represent_k64(y, x, n); break;
        case TENSOR_MXFP4:
          represent_mx(y, x, n, 1, mxfp4_scale_encode(amax_of(x, n, 1)));
          for (int64_t i = 0; i < n; i++) y[i] /= 6.0f;
          break;
      }
    }
}

void tensor_represent_v(float *to, const float *values, int64_t tokens, int64_t cols, enum tensor_format format) {
  if (format != TENSOR_NVFP4 && format != TENSOR_MXFP4) {
    tensor_represent(to, values, tokens, cols, format);
    return;
  }
  const int64_t block = format == TENSOR_MXFP4 ? ATTENTION_MX : ATTENTION_K16;
  for (int64_t t = 0; t < tokens; t += block)
    for (int64_t c = 0; c < cols; c++) {
      const int64_t n = tokens - t < block ? tokens - t : block;
      const float *x = values + t * cols + c;
      if (format == TENSOR_MXFP4)
        represent_mx(to + t * cols + c, x, n, cols, attention_v_scale(amax_of(x, n, cols)));
      else
        represent_k16(to + t * cols + c, x, n, cols);
    }
}

/* ---- P -------------------------------------------------------------------------------- */

static double log2_of(double x) { return f64_log(x) * 1.4426950408889634; }

/* A block's codes times `step`; t: of p, shift: log2 step. */
static void encode(double *p, const double *t, int64_t n, double step, double shift, bool affine, struct p_counts *counts) {
  for (int64_t j = 0; j < n; j++) {
    const double x = t[j] - shift, u = affine ? 1.5 * x + 1.2 : f64_exp2(x);
    const float code = e2m1_decode(e2m1_encode((float)(u > 0 ? u : 0)));
    counts->zero_codes += code == 0;
    p[j] = (double)code * step;
  }
}

static void block_nvfp4(double *p, const double *t, int64_t n, double top, const struct p_format *f, struct p_counts *counts) {
  const float scale = e4m3_decode(e4m3_encode((float)(f64_exp2(top) * (double)f->lift / 6)));
  const double step = (double)scale / (double)f->lift;
  if (scale == 0) {
    for (int64_t j = 0; j < n; j++) p[j] = 0;
    counts->zero_codes += n;
    counts->zero_blocks++;
  } else {
    encode(p, t, n, step, log2_of(step), f->affine, counts);
  }
}

static void block_mxfp4(double *p, const double *t, int64_t n, double top, const struct p_format *f, struct p_counts *counts) {
  const double e = floor(top + (f->affine ? 0 : (double)ATTENTION_RAISE_EXP2));
  if (e < -126) {
    for (int64_t j = 0; j < n; j++) p[j] = 0;
    counts->zero_codes += n;
    counts->zero_blocks++;
  } else {
    encode(p, t, n, e > 127 ? F64_NAN : f64_exp2(e) / 6, e - log2_of(6), f->affine, counts);
  }
}

void p_represent(double *p, double *denominator, struct p_counts *counts, const double *t, int64_t n, const struct p_format *format) {
  double top = -INFINITY, sum = 0, shift = 0;
  for (int64_t j = 0; j < n; j++) top = t[j] > top ? t[j] : top;
  if (format->reference == P_MAXIMUM) shift = top;
  if (format->reference == P_NORMALISED) {
    for (int64_t j = 0; j < n; j++) sum += f64_exp2(t[j] - top);
    shift = top + log2_of(sum);
  }
  const int64_t block = format->block > 0 ? format->block : n;
  *denominator = 0;
  counts->codes += n;
  for (int64_t first = 0; first < n; first += block) {
    const int64_t some = n - first < block ? n - first : block;
    double *q = p + first, x[64] = {0}, most = -INFINITY;
    const bool scaled = format->kind == P_NVFP4 || format->kind == P_MXFP4;
    for (int64_t j = 0; scaled && j < some; j++) {
      x[j] = t[first + j] - shift;
      most = x[j] > most ? x[j] : most;
    }
    counts->blocks += scaled;
    if (format->kind == P_NVFP4) block_nvfp4(q, x, some, most, format, counts);
    if (format->kind == P_MXFP4) block_mxfp4(q, x, some, most, format, counts);
    for (int64_t j = 0; !scaled && j < some; j++) {
      q[j] = f64_exp2(t[first + j] - shift);
      *denominator += q[j];
      if (format->kind == P_E4M3) q[j] = (double)e4m3_decode(e4m3_encode((float)q[j]));
      counts->zero_codes += q[j] == 0;
    }
    for (int64_t j = 0; scaled && j < some; j++) *denominator += q[j];
  }
}
