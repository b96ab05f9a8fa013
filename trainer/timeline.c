#include "trainer/timeline.h"

#include <string.h>

#include "base/clock.h"

void timeline_open(struct timeline *t) {
  memset(t, 0, sizeof *t);
  t->current = PHASE_BETWEEN;
  t->since = clock_seconds();
}

void timeline_enter(struct timeline *t, enum phase phase) {
  double now = clock_seconds();
  t->seconds[t->current] += now - t->since;
  t->current = phase;
  t->since = now;
}

void timeline_close(struct timeline *t) {
  timeline_enter(t, PHASE_BETWEEN);
  t->total = 0;
  for (int i = 0; i < PHASE_COUNT; i++) t->total += t->seconds[i];
}

const char *timeline_name(enum phase phase) {
  static const char *const names[PHASE_COUNT] = {"data", "forward", "head", "backward", "reduce", "optimizer", "between"};
  return names[phase];
}

enum phase timeline_of_model(enum model_phase phase) {
  static const enum phase phases[] = {
      [MODEL_FORWARD] = PHASE_FORWARD, [MODEL_HEAD] = PHASE_HEAD, [MODEL_BACKWARD] = PHASE_BACKWARD};
  return phases[phase];
}
