/* Where an update's time goes: phases in their order, their sum, what is outside. */
#include <time.h>

#include "tests/test.h"
#include "trainer/timeline.h"

static void rest(double seconds) { nanosleep(&(struct timespec){.tv_nsec = (long)(seconds * 1e9)}, NULL); }

TEST(phases) {
  struct error e = {0};
  struct timeline t;
  struct device *d = device_open("cpu", 1, &e);
  CHECK(d && timeline_make(&t, d, 2, 0, &e));
  for (int update = 0; update < 2; update++) { /* the second begins anew */
    timeline_enter(&t, PHASE_HEAD); /* a validation's */
    timeline_open(&t);
    timeline_enter(&t, PHASE_DATA);
    for (int pass = 0; pass < 2; pass++) {
      timeline_enter(&t, PHASE_FORWARD);
      rest(0.004);
      timeline_enter(&t, PHASE_HEAD);
      timeline_enter(&t, PHASE_BACKWARD);
      rest(0.008);
    }
    timeline_enter(&t, PHASE_REDUCE);
    timeline_enter(&t, PHASE_OPTIMIZER);
    rest(0.006);
    timeline_close(&t);
    timeline_enter(&t, PHASE_FORWARD);
  }
  CHECK(t.seconds[PHASE_FORWARD] >= 0.008 && t.seconds[PHASE_BACKWARD] >= 0.016 && t.seconds[PHASE_OPTIMIZER] >= 0.006);
  double sum = 0;
  for (int p = 0; p < PHASE_COUNT; p++) {
    CHECK(t.seconds[p] >= 0);
    sum += t.seconds[p];
  }
  CHECK_CLOSE(sum, t.total, 1e-6);
  CHECK(t.total >= 0.03 && t.seconds[PHASE_HEAD] + t.seconds[PHASE_REDUCE] + t.seconds[PHASE_DATA] < t.total - 0.03 + 1e-6);
  timeline_release(&t);
  d->k->close(d);
}

int main(void) {
  RUN(phases);
  return test_report();
}
