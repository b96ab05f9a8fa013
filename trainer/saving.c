#include "trainer/saving.h"

#include <inttypes.h>

#include "base/clock.h"
#include "base/log.h"
#include "trainer/control.h"

void saving_open(struct saving *s, struct run *run, struct state *state, struct record_file *records) {
  const int64_t have = run->update > 0 ? run->update : -1;
  *s = (struct saving){.run = run, .state = state, .records = records, .saved = have, .begun = have};
}

bool saving_tolerates(const struct saving *s, const struct error *e) {
  return e->code == ERROR_CHECKPOINT && s->run->config.checkpoint.on_failure == CHECKPOINT_CONTINUE;
}

int64_t saving_busy(struct saving *s) { return checkpoint_saver_busy(state_saver(s->state)) ? CONTROL_SAVING : 0; }

/* Whatever kept it from being saved, memory or the disk, it is a failed save; a lost rank or device is more than that. */
static bool failed(struct saving *s, int64_t update, struct error *e) {
  if (e->code != ERROR_COMMUNICATION && e->code != ERROR_DEVICE) e->code = ERROR_CHECKPOINT;
  s->begun = s->saved;
  if (s->run->rank == 0) log_warning("update %" PRId64 ": checkpoint not saved: %s", update, e->message);
  return false;
}

static bool published(struct saving *s, const struct checkpoint_saved *saved, struct error *e) {
  const double ratio = saved->tensor_bytes > 0 ? (double)saved->file_bytes / (double)saved->tensor_bytes : 1;
  s->saved = saved->update;
  if (s->run->rank == 0)
    log_info("update %6" PRId64 "  saved in %.2f s, stalled %.0f ms, %.3f GB (%.3f of the tensors' size)", saved->update,
             saved->seconds, 1e3 * s->stall, (double)saved->file_bytes / 1e9, ratio);
  json_t *o = json_object();
  record_text(o, "kind", "checkpoint");
  record_integer(o, "update", saved->update);
  record_integer(o, "published", s->run->update);
  record_real(o, "seconds", saved->seconds);
  record_real(o, "stall_ms", 1e3 * s->stall);
  record_integer(o, "bytes", saved->file_bytes);
  record_real(o, "ratio", ratio);
  return record_write_together(s->records, s->run->comm, o, e);
}

static bool advance(struct saving *s, struct error *e) {
  struct checkpoint_saved saved;
  bool done;
  if (!checkpoint_saver_advance(state_saver(s->state), &done, &saved, e)) return failed(s, s->begun, e);
  return !done || published(s, &saved, e);
}

bool saving_poll(struct saving *s, bool busy, struct error *e) {
  const double limit = s->run->config.limits.save_s;
  if (!checkpoint_saver_under_way(state_saver(s->state))) return true;
  if (!busy) return advance(s, e);
  if (!s->slow && clock_seconds() - s->began > limit && s->run->rank == 0)
    log_warning("update %" PRId64 ": its checkpoint is being written for more than limits.save_s, %g s", s->begun, limit);
  s->slow = s->slow || clock_seconds() - s->began > limit;
  return true;
}

bool saving_finish(struct saving *s, struct error *e) {
  struct checkpoint_saver *saver = state_saver(s->state);
  if (!checkpoint_saver_under_way(saver)) return true;
  const double t0 = clock_seconds(), before = s->stall;
  comm_enter(s->run->comm, COMM_SAVE, "checkpoint", s->begun);
  bool good = true;
  while (good && checkpoint_saver_under_way(saver)) {
    checkpoint_saver_wait(saver);
    s->stall = before + clock_seconds() - t0;
    good = advance(s, e);
  }
  return good;
}

bool saving_begin(struct saving *s, struct error *e) {
  struct run *run = s->run;
  if (s->begun == run->update) return true;
  if (checkpoint_saver_under_way(state_saver(s->state)) && run->rank == 0)
    log_info("update %6" PRId64 "  waits for the checkpoint of update %" PRId64, run->update, s->begun);
  if (!saving_finish(s, e) && !saving_tolerates(s, e)) return false;
  comm_enter(run->comm, COMM_SAVE, "checkpoint", run->update);
  s->began = clock_seconds();
  s->slow = false;
  bool good = !run_fault(run, "save-error", run->update) || error_set(e, ERROR_CHECKPOINT, "save refused by the configured fault");
  good = comm_agree(run->comm, good, e) && state_save(s->state, run, e);
  s->stall = clock_seconds() - s->began;
  if (!good) return failed(s, run->update, e);
  s->begun = run->update;
  return run->config.checkpoint.async || saving_finish(s, e);
}
