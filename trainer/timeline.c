#include "trainer/timeline.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

/* Of a micro-batch: forward, head, backward. Of a unit: reduce, optimizer and what goes on
 * after it. Of an update: those around them. */
enum { PASS_EVENTS = 3, UNIT_EVENTS = 3, UPDATE_EVENTS = 8 };

bool timeline_make(struct timeline *t, struct device *d, int64_t passes, int units, struct error *e) {
  memset(t, 0, sizeof *t);
  if (passes > INT32_MAX / 8) return error_set(e, ERROR_CONFIG, "an update of %lld micro-batches", (long long)passes);
  t->device = d;
  t->room = (int)passes * PASS_EVENTS + units * UNIT_EVENTS + UPDATE_EVENTS;
  t->phase = calloc((size_t)t->room, sizeof *t->phase);
  if (!t->phase) return error_set(e, ERROR_SYSTEM, "no memory for the phases of an update");
  return d->k->make_events(d, t->room, e);
}

void timeline_release(struct timeline *t) {
  free(t->phase);
  memset(t, 0, sizeof *t);
}

void timeline_open(struct timeline *t) {
  memset(t->seconds, 0, sizeof t->seconds);
  t->n = 0;
  t->running = true;
  t->opened = clock_seconds();
  timeline_enter(t, PHASE_BETWEEN);
}

void timeline_enter(struct timeline *t, enum phase phase) {
  t->current = phase;
  if (!t->running) return;
  assert(t->n < t->room);
  t->phase[t->n] = phase;
  t->device->k->record_event(t->device, t->n++);
}

void timeline_close(struct timeline *t) {
  const struct kernels *k = t->device->k;
  t->total = clock_seconds() - t->opened;
  t->running = false;
  for (int i = 0; i + 1 < t->n; i++) t->seconds[t->phase[i]] += k->seconds_between(t->device, i, i + 1);
  t->seconds[t->phase[t->n - 1]] += t->total - k->seconds_between(t->device, 0, t->n - 1);
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
