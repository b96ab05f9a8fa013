/* Where an update's time goes: seconds of the device that a phase's work takes, by events
 * between phases, which the device meets in order while the host is ahead of it.  What
 * the device stands still for counts in the phase in which the host was late. */
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
  double seconds[PHASE_COUNT]; /* once it is closed */
  double total;                /* from open to close: the sum of these */
  enum phase current;
  struct device *device;
  enum phase *phase; /* that begins with event i, [room] */
  int n, room;
  bool running;
  double opened;
};

/* Over the events of a device, which it makes, for updates of so many micro-batches, the
 * first of which makes operands of so many units anew. */
bool timeline_make(struct timeline *t, struct device *d, int64_t passes, int units, struct error *e);
void timeline_release(struct timeline *t);

/* While the device has nothing to do. */
void timeline_open(struct timeline *t);
void timeline_enter(struct timeline *t, enum phase phase); /* outside of open and close: nothing */
/* The device was synchronized since the last phase began; that one lasts till now. */
void timeline_close(struct timeline *t);

const char *timeline_name(enum phase phase);
enum phase timeline_of_model(enum model_phase phase);

#endif
