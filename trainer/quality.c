#include "trainer/quality.h"

#include <math.h>

#include "kernels/hadamard.h"

void quality_add(struct quality *q, double measured, double exact) {
  q->error += (measured - exact) * (measured - exact);
  q->reference += exact * exact;
  q->cross += measured * exact;
  q->own += measured * measured;
}

double quality_relative(const struct quality *q) {
  return q->error == 0 ? 0 : sqrt(q->error / q->reference);
}

double quality_cosine(const struct quality *q) {
  return q->error == 0 ? 1 : q->cross / sqrt(q->reference * q->own);
}

double quality_gain(const struct quality *q) { return q->error == 0 ? 1 : q->cross / q->reference; }

/* x = D H y of y = H D x: the signs, the transform, the signs (D D = 1). */
static void undo_transform(double *values, int64_t n, enum hadamard h) {
  const int width = hadamard_width(h);
  const bool sign = h != HADAMARD_PLAIN_16;
  for (int64_t first = 0; width > 0 && first < n; first += width) {
    float group[32];
    for (int i = 0; i < width; i++) {
      const bool minus = sign && (HADAMARD_SIGNS >> (i % 16) & 1u) == 0;
      group[i] = (float)(minus ? -values[first + i] : values[first + i]);
    }
    hadamard_transform(group, h);
    for (int i = 0; i < width; i++) {
      const bool minus = sign && (HADAMARD_SIGNS >> (i % 16) & 1u) == 0;
      values[first + i] = (double)(minus ? -group[i] : group[i]);
    }
  }
}

void quality_operand(struct quality *q, const struct operand *o, const float *source, double *values) {
  for (int64_t r = 0; r < o->rows; r++) {
    operand_decode(o, r, values);
    undo_transform(values, o->cols, o->encoding.hadamard);
    for (int64_t c = 0; c < o->cols; c++) {
      const int64_t at = o->view == VIEW_ROW ? r * o->cols + c : c * o->rows + r;
      quality_add(q, values[c], (double)source[at]);
    }
  }
}
