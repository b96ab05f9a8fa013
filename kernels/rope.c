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

void rope_table(float *cos_sin, int64_t seq_len, int64_t head_dim, double theta, const struct rope_scaling *scaling) {
  double log2_theta = f64_log(theta) * LOG2_E;
  int64_t pairs = head_dim / 2;
  for (int64_t i = 0; i < pairs; i++) {
    double frequency = f64_exp2(-(2.0 * (double)i / (double)head_dim) * log2_theta);
    if (scaling && scaling->enabled) frequency = scale_frequency(frequency, scaling);
    for (int64_t t = 0; t < seq_len; t++) {
      double sine, cosine;
      f64_sin_cos((double)t * frequency, &sine, &cosine);
      cos_sin[(t * pairs + i) * 2] = (float)cosine;
      cos_sin[(t * pairs + i) * 2 + 1] = (float)sine;
    }
  }
}
