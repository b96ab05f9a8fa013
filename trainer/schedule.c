#include "trainer/schedule.h"

#include "kernels/elementary.h"

double schedule_lr(const struct config *c, int64_t update) {
  const double lr = c->optimizer.lr, low = c->optimizer.min_lr;
  const int64_t warmup = c->optimizer.warmup_updates, last = c->train.updates;
  if (update <= warmup) return lr * (double)update / (double)warmup;

  int64_t decay = c->optimizer.decay_updates;
  switch (c->optimizer.schedule) {
    case SCHEDULE_CONSTANT:
      return lr;
    case SCHEDULE_COSINE: { /* not libm's cosine: its bits differ from processor to processor */
      double sine, cosine;
      if (decay == 0) decay = last - warmup;
      int64_t done = update - warmup;
      if (done >= decay) return low;
      f64_sin_cos(3.14159265358979323846 * (double)done / (double)decay, &sine, &cosine);
      return low + (lr - low) * 0.5 * (1.0 + cosine);
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

double schedule_bias(double beta, int64_t t) {
  return 1 - f64_exp2((double)t * (f64_log(beta) * 1.44269504088896340736)); /* beta^t = 2^(t log2 beta) */
}
