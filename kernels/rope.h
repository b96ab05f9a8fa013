/* Rotary position tables. */
#ifndef FP4D_KERNELS_ROPE_H
#define FP4D_KERNELS_ROPE_H

#include <stdbool.h>
#include <stdint.h>

/* Llama-3.1 frequency scaling ("llama3" in Hugging Face configs). */
struct rope_scaling {
  bool enabled;
  double factor, low_freq_factor, high_freq_factor;
  int64_t original_max_position;
};

/* Fills cos_sin [seq_len, head_dim/2, 2] (host memory): cos and sin of
 * position * theta^(-2i/head_dim), computed in double by our own correctly
 * reproducible sine and cosine (kernels/elementary.h) and rounded to FP32. */
void rope_table(float *cos_sin, int64_t seq_len, int64_t head_dim, double theta,
                const struct rope_scaling *scaling);

#endif
