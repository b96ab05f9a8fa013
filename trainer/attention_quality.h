/* How far attention in few bits is from attention in FP64, head after head.
 *
 * Inputs are BF16 numbers drawn by Philox at (element, head, tensor), so a figure is a
 * function of shape, distribution, scale and seed.  Some queries of a head are measured,
 * evenly spaced: query floor(i seq_len / queries).
 */
#ifndef FP4D_TRAINER_ATTENTION_QUALITY_H
#define FP4D_TRAINER_ATTENTION_QUALITY_H

#include "base/threads.h"
#include "trainer/attention_formats.h"
#include "trainer/quality.h"

struct attention_inputs {
  int64_t seq_len, heads, head_dim, batch, queries;
  enum { INPUT_NORMAL, INPUT_STUDENT_T, INPUT_OUTLIER_CHANNELS } distribution;
  double scale; /* of Q and K */
  uint64_t seed;
};
extern const char *const input_distributions[]; /* ends with NULL */

/* values[seq_len][head_dim] of tensor 0 Q, 1 K, 2 V; head counts through the batch. */
void attention_input(float *values, const struct attention_inputs *x, int64_t head, int tensor);

struct attention_row {
  enum tensor_format qk, v;
  const struct p_format *p;
};

struct attention_measure {
  struct quality out;     /* against FP64; a number that is not finite is counted, and 0 here */
  int64_t numbers, nonfinite;
  struct p_counts p;
  struct quality p_error; /* of P against that of the same scores in FP64 */
  double lost;            /* probability mass at codes 0, summed over queries */
  int64_t queries;
};

/* Of memory that either of the two below takes for a head. */
int64_t attention_measure_bytes(const struct attention_inputs *x, int threads);

/* Without a mask.  Direct-P is the CPU's operator; other rows are FP64 of represented
 * numbers.  measure[rows] is added to.  False: no memory. */
bool attention_measure(struct attention_measure *measure, const struct attention_row *row, int rows,
                       const struct attention_inputs *x, int64_t head, struct threads *threads);

/* FP64, queries see keys up to their own: out[queries][head_dim]. */
bool attention_causal(double *out, const struct attention_inputs *x, int64_t head);

void attention_measure_out(struct attention_measure *m, const double *out, const double *exact, int64_t n);

#endif
