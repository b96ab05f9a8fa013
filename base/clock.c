/* Clocks. */
#include "base/clock.h"

#include <time.h>

static double seconds_of(clockid_t clock) {
  struct timespec now = {0};
  clock_gettime(clock, &now); /* cannot fail for these two clocks */
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double clock_seconds(void) { return seconds_of(CLOCK_MONOTONIC); }
double clock_wall(void) { return seconds_of(CLOCK_REALTIME); }
