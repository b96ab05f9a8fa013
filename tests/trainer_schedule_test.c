/* Learning rate schedules. */
#include "trainer/schedule.h"

#include <math.h>

#include "tests/test.h"

static struct config base(enum schedule_kind kind) {
  struct config c = {0};
  c.train.updates = 100;
  c.optimizer.lr = 1e-3;
  c.optimizer.min_lr = 1e-4;
  c.optimizer.warmup_updates = 10;
  c.optimizer.schedule = kind;
  return c;
}

TEST(warmup_is_linear_and_reaches_the_peak) {
  struct config c = base(SCHEDULE_CONSTANT);
  for (int64_t u = 1; u <= 10; u++) CHECK_CLOSE(schedule_lr(&c, u), 1e-3 * (double)u / 10, 1e-18);
  CHECK(schedule_lr(&c, 1) > 0);
  CHECK_CLOSE(schedule_lr(&c, 11), 1e-3, 0);
  CHECK_CLOSE(schedule_lr(&c, 100), 1e-3, 0);
  c.optimizer.warmup_updates = 0;
  CHECK_CLOSE(schedule_lr(&c, 1), 1e-3, 0);
}

TEST(cosine_ends_at_the_minimum) {
  struct config c = base(SCHEDULE_COSINE);
  CHECK_CLOSE(schedule_lr(&c, 10), 1e-3, 1e-18);
  CHECK_CLOSE(schedule_lr(&c, 55), 0.5 * (1e-3 + 1e-4), 1e-15);
  CHECK_CLOSE(schedule_lr(&c, 100), 1e-4, 1e-18);
  for (int64_t u = 11; u <= 100; u++) CHECK(schedule_lr(&c, u) < schedule_lr(&c, u - 1));
  c.optimizer.decay_updates = 45; /* shorter than the run: stays at the minimum */
  CHECK_CLOSE(schedule_lr(&c, 55), 1e-4, 1e-18);
  CHECK_CLOSE(schedule_lr(&c, 99), 1e-4, 1e-18);
}

TEST(wsd_is_flat_then_falls) {
  struct config c = base(SCHEDULE_WSD);
  c.optimizer.decay_updates = 20;
  CHECK_CLOSE(schedule_lr(&c, 80), 1e-3, 0);
  CHECK_CLOSE(schedule_lr(&c, 90), 0.5 * (1e-3 + 1e-4), 1e-15);
  CHECK_CLOSE(schedule_lr(&c, 100), 1e-4, 1e-18);
  c.optimizer.decay_updates = 0; /* a decay after the run's end: constant, as the reports' runs are */
  CHECK_CLOSE(schedule_lr(&c, 100), 1e-3, 0);
}

TEST(depends_on_the_update_alone) {
  struct config c = base(SCHEDULE_COSINE);
  double once = schedule_lr(&c, 42);
  for (int64_t u = 1; u < 100; u++) (void)schedule_lr(&c, u);
  CHECK(schedule_lr(&c, 42) == once);
}

TEST(bias_is_one_less_a_power) {
  static const double betas[] = {0, 1e-300, 0.5, 0.9, 0.95, 0.999, 0.9999, 0.999999};
  for (size_t b = 0; b < sizeof betas / sizeof *betas; b++)
    for (int64_t t = 1; t < (int64_t)1 << 31; t += 1 + t / 3)
      CHECK_CLOSE(schedule_bias(betas[b], t), (double)(1 - powl(betas[b], t)), 3e-16);
}

/* The same bits on every machine: libm's differ between processors with and without FMA. */
TEST(bits) {
  struct config c = base(SCHEDULE_COSINE);
  c.train.updates = 5000;
  uint64_t h = 0;
  for (int64_t u = 1; u <= 5000; u++) {
    const double values[] = {schedule_lr(&c, u), schedule_bias(0.9, u), schedule_bias(0.95, u)};
    const double exact = (double)(1e-4L + (1e-3L - 1e-4L) * 0.5L * (1 + cosl(3.14159265358979323846264L * (u - 10) / 4990)));
    if (u > 10) CHECK_CLOSE(values[0], exact, 3e-19);
    for (int i = 0; i < 3; i++) {
      uint64_t bits;
      memcpy(&bits, &values[i], sizeof bits);
      h = (h ^ bits) * 0x100000001B3u;
    }
  }
  if (h != 0x7ab64280b8655e98u) FAIL("bits changed: 0x%016" PRIx64, h);
}

int main(void) {
  RUN(warmup_is_linear_and_reaches_the_peak);
  RUN(cosine_ends_at_the_minimum);
  RUN(wsd_is_flat_then_falls);
  RUN(depends_on_the_update_alone);
  RUN(bias_is_one_less_a_power);
  RUN(bits);
  return test_report();
}
