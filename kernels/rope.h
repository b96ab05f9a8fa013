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

/* Where an angle is rounded: training takes EXACT. */
enum rope_angles {
  ROPE_ANGLES_EXACT, /* nowhere: FP64 up to cosine and sine */
  ROPE_ANGLES_FP32   /* to FP32 after every operation, as Hugging Face transformers takes them */
};

/* Fills cos_sin [seq_len, head_dim/2, 2] (host memory): cos and sin of
 * position * theta^(-2i/head_dim), computed in double by our own correctly
 * reproducible sine and cosine (kernels/elementary.h) and rounded to FP32. */
void rope_table(float *cos_sin, int64_t seq_len, int64_t head_dim, double theta,
                const struct rope_scaling *scaling);

/* The same table as transformers' LlamaRotaryEmbedding makes it: frequency, scaling (by
 * wavelength) and angle are rounded to FP32 after every operation, in its order.  Power,
 * cosine and sine are the FP32 numbers nearest to the true ones, a library's may be one place off:
 * torch's cosines and sines are at one in thirty, its powers at one in eighty, none of them with
 * theta 10,000 or 500,000 and a head_dim of 64 or 128.  Positions up to 2^24. */
void rope_table_fp32(float *cos_sin, int64_t seq_len, int64_t head_dim, double theta,
                     const struct rope_scaling *scaling);

#endif
