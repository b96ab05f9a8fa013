/* A captured linear as a route reads it: X, W and dY on a device, and the six
 * operands that a route makes of them, quantised as in training. */
#ifndef FP4D_TRAINER_CAPTURED_H
#define FP4D_TRAINER_CAPTURED_H

#include "trainer/capture.h"

/* A linear's tensors at one update, on the device and here. */
struct captured {
  const struct capture_entry *entry[TENSOR_COUNT];
  struct matrix half[TENSOR_COUNT], wide[TENSOR_COUNT]; /* BF16, FP32 */
  float *values[TENSOR_COUNT];
};

/* The tensors of the linear whose X is `x`.  False with ERROR_DATA where W or dY
 * is missing; captured_release is due in any case. */
bool captured_load(struct captured *t, struct device *d, const struct capture_file *c, const struct capture_entry *x,
                   struct error *e);
void captured_release(struct captured *t, struct device *d);

/* A tensor as it is, as an operand: FORMAT_BF16 or FORMAT_F32. */
struct operand captured_plain(const struct captured *t, enum operand_role role, enum format f);

/* One route's operands; plain ones are the tensors themselves. */
struct captured_operands {
  struct operand of[OPERAND_ROLE_COUNT];
  struct quantise_counts counts[OPERAND_ROLE_COUNT];
};

/* Is it packed, with memory of its own? */
bool captured_packed(const struct operand *o);

/* Room for the packed operands; captured_drop is due in any case. */
bool captured_take(struct captured_operands *o, struct device *d, const struct capture_header *h,
                   const struct linear_route *route, const struct captured *t, struct error *e);
void captured_drop(struct captured_operands *o, struct device *d);

/* Both views of one tensor in one call, as its producer makes them in training. */
void captured_quantise(struct captured_operands *o, struct device *d, const struct capture_header *h,
                       const struct captured *t, enum tensor which);

/* An operand's bytes here, to be decoded; free its three arrays in any case. */
bool captured_fetch(const struct operand *o, struct device *d, struct operand *here, struct error *e);

#endif
