/* Where an update's time goes. */
#ifndef FP4D_TRAINER_TIMELINE_H
#define FP4D_TRAINER_TIMELINE_H

#include "model/model.h"

enum phase {
  PHASE_DATA,
  PHASE_FORWARD,
  PHASE_HEAD,
  PHASE_BACKWARD,
  PHASE_REDUCE,
  PHASE_OPTIMIZER,
  PHASE_BETWEEN,
  PHASE_COUNT
};

struct timeline {
  double seconds[PHASE_COUNT];
  double total;
  enum phase current;
  double since;
};

void timeline_open(struct timeline *t);
void timeline_enter(struct timeline *t, enum phase phase);
void timeline_close(struct timeline *t); /* total is the sum from open to here */

const char *timeline_name(enum phase phase);
enum phase timeline_of_model(enum model_phase phase);

#endif
