/* Rotary position tables (Su et al., "RoFormer"), Llama-3.1 frequency scaling. */
#include "kernels/rope.h"

#include "kernels/elementary.h"

#define LOG2_E 0x1.71547652b82fep+0
#define TWO_PI 0x1.921fb54442d18p+2

/* Long wavelengths (few turns within the original context) are stretched by
 * `factor`, short ones kept, those between blended linearly in the number of
 * turns. */
static double scale_frequency(double frequency, const struct rope_scaling *s) {
  double turns = (double)s->original_max_position * frequency / TWO_PI;
  if (turns > s->high_freq_factor) return frequency;
  if (turns < s->low_freq_factor) return frequency / s->factor;
  double kept = (turns - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
  return (1.0 - kept) * (frequency / s->factor) + kept * frequency;
}

/* Column i of the table: cosines and sines of angle(t) for all positions. */
static void fill_pair(float *cos_sin, int64_t seq_len, int64_t pairs, int64_t i, double frequency, bool fp32) {
  for (int64_t t = 0; t < seq_len; t++) {
    const double angle = fp32 ? (double)((float)t * (float)frequency) : (double)t * frequency;
    double sine, cosine;
    f64_sin_cos(angle, &sine, &cosine);
    cos_sin[(t * pairs + i) * 2] = (float)cosine;
    cos_sin[(t * pairs + i) * 2 + 1] = (float)sine;
  }
}

void rope_table(float *cos_sin, int64_t seq_len, int64_t head_dim, double theta, const struct rope_scaling *scaling) {
  double log2_theta = f64_log(theta) * LOG2_E;
  int64_t pairs = head_dim / 2;
  for (int64_t i = 0; i < pairs; i++) {
    double frequency = f64_exp2(-(2.0 * (double)i / (double)head_dim) * log2_theta);
    if (scaling && scaling->enabled) frequency = scale_frequency(frequency, scaling);
    fill_pair(cos_sin, seq_len, pairs, i, frequency, false);
  }
}

/* ---- in FP32 ---------------------------------------------------------------- */

/* The scaling by wavelength: 2 pi / f and original / wavelength are products with a
 * reciprocal there, which is one rounding more. */
static float scale_frequency_fp32(float frequency, const struct rope_scaling *s) {
  const float original = (float)s->original_max_position, factor = (float)s->factor, low = (float)s->low_freq_factor;
  const float wavelength = (1.0f / frequency) * (float)TWO_PI;
  const bool is_long = wavelength > (float)((double)s->original_max_position / s->low_freq_factor);
  if (is_long) return frequency / factor;
  if (wavelength < (float)((double)s->original_max_position / s->high_freq_factor)) return frequency;
  const float kept = ((1.0f / wavelength) * original - low) / (float)(s->high_freq_factor - s->low_freq_factor);
  return (1.0f - kept) * frequency / factor + kept * frequency;
}

void rope_table_fp32(float *cos_sin, int64_t seq_len, int64_t head_dim, double theta, const struct rope_scaling *scaling) {
  const double log2_theta = f64_log((double)(float)theta) * LOG2_E;
  const int64_t pairs = head_dim / 2;
  for (int64_t i = 0; i < pairs; i++) {
    const float exponent = (float)(2 * i) / (float)head_dim;
    float frequency = 1.0f / (float)f64_exp2((double)exponent * log2_theta);
    if (scaling && scaling->enabled) frequency = scale_frequency_fp32(frequency, scaling);
    fill_pair(cos_sin, seq_len, pairs, i, (double)frequency, true);
  }
}
