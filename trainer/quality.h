/* How far a result is from what it should be. */
#ifndef FP4D_TRAINER_QUALITY_H
#define FP4D_TRAINER_QUALITY_H

#include "kernels/kernels.h"

/* Energies: sums over elements of (y' - y)^2, y^2, y' y and y'^2. */
struct quality {
  double error, reference, cross, own;
};

void quality_add(struct quality *q, double measured, double exact);

/* sqrt(error / reference); the cosine of y' and y; the factor g that makes g y the
 * projection of y' on y.  0, 1, 1 where all is zero. */
double quality_relative(const struct quality *q);
double quality_cosine(const struct quality *q);
double quality_gain(const struct quality *q);

/* An operand in host memory against its source [rows, cols] (FP32, host): decoded,
 * its transform undone. `values`: o->cols doubles of scratch. */
void quality_operand(struct quality *q, const struct operand *o, const float *source, double *values);

#endif
