#include "trainer/schedule.h"

#include <math.h>

double schedule_lr(const struct config *c, int64_t update) {
  const double lr = c->optimizer.lr, low = c->optimizer.min_lr;
  const int64_t warmup = c->optimizer.warmup_updates, last = c->train.updates;
  if (update <= warmup) return lr * (double)update / (double)warmup;

  int64_t decay = c->optimizer.decay_updates;
  switch (c->optimizer.schedule) {
    case SCHEDULE_CONSTANT:
      return lr;
    case SCHEDULE_COSINE: {
      if (decay == 0) decay = last - warmup;
      int64_t done = update - warmup;
      if (done >= decay) return low;
      return low + (lr - low) * 0.5 * (1.0 + cos(3.14159265358979323846 * (double)done / (double)decay));
    }
    case SCHEDULE_WSD: {
      int64_t left = last - update;
      if (decay == 0 || left >= decay) return lr;
      if (left < 0) return low;
      return low + (lr - low) * (double)left / (double)decay;
    }
  }
  return lr;
}
