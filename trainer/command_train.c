/* fp4d train: the daemon. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "trainer/command.h"
#include "trainer/control.h"
#include "trainer/loop.h"
#include "trainer/report.h"
#include "trainer/state.h"

struct train_arguments {
  const char *config, *resume, *weights;
  struct argument_list sets;
  bool allow_data_change;
};

const struct argument command_train_arguments[] = {
    ARGUMENT_CONFIG(struct train_arguments, config),
    ARGUMENT_SETS(struct train_arguments, sets),
    {.name = "--resume", .value = "auto|none|PATH", .type = ARGUMENT_TEXT, .offset = offsetof(struct train_arguments, resume),
     .help = "go on from the newest whole checkpoint of the run's folder (auto), from the beginning (none), or from a step folder"},
    {.name = "--weights", .value = "PATH", .type = ARGUMENT_TEXT, .offset = offsetof(struct train_arguments, weights),
     .help = "begin with the parameters of a checkpoint (a step, a folder of steps, a run's folder), and with a fresh optimizer, schedule and data order; where the run's folder has checkpoints already the run goes on from those"},
    {.name = "--allow-data-change", .type = ARGUMENT_FLAG, .offset = offsetof(struct train_arguments, allow_data_change),
     .help = "go on although the training data changed since the checkpoint: data.allow_change, for this start"},
    {0}};

/* The state of a checkpoint; or initial parameters, or another run's. */
static bool start_state(struct run *run, const char *resume, const char *weights, bool *resumed, struct error *e) {
  const enum resume_kind kind = strcmp(resume, "auto") == 0   ? RESUME_AUTO
                                : strcmp(resume, "none") == 0 ? RESUME_NONE
                                                              : RESUME_PATH;
  if (!state_restore(run, kind, resume, resumed, e)) return false;
  if (*resumed && weights && run->rank == 0) log_warning("--weights %s is not used: this run goes on from a checkpoint of its own", weights);
  if (*resumed) return true;
  if (!comm_agree(run->comm, model_initialise(run->model, (uint64_t)run->config.run.seed, run->threads, e), e)) return false;
  if (weights && !state_take_weights(run, weights, e)) return false;
  if (!run_parameter_hash(run, &run->init_hash, e)) return false;
  model_refresh_weights(run->model);
  return true;
}

/* Does the file hold this text? */
static bool holds(const char *path, const char *text) {
  char *content;
  size_t bytes;
  struct error ignored;
  if (!file_read(path, 64, ERROR_SYSTEM, &content, &bytes, &ignored)) return false;
  const bool same = strcmp(content, text) == 0;
  free(content);
  return same;
}

/* Rank 0's folder is every rank's: what it writes there all can read.  A folder on each
 * host's own disk would be found out at the first save, hours later. */
static bool shared_folder(struct run *run, struct error *e) {
  if (run->world == 1) return true;
  enum { PATIENCE = 50 }; /* tenths of a second that a slow file system gets */
  char path[CONFIG_TEXT + 16], text[32];
  double token = clock_wall();
  if (!comm_broadcast(run->comm, &token, sizeof token, 0, e)) return false;
  snprintf(path, sizeof path, "%s/shared.tmp", run->config.run.folder);
  snprintf(text, sizeof text, "%.6f", token);
  bool good = run->rank != 0 || file_publish(path, text, strlen(text), ERROR_SYSTEM, e);
  if (!comm_agree(run->comm, good, e)) return false;
  for (int i = 0; i < PATIENCE && !holds(path, text); i++) nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
  if (!holds(path, text)) {
    good = error_set(e, ERROR_SYSTEM, "run.folder %s is not the folder that rank 0 has under this path", run->config.run.folder);
    error_hint(e, "it must lie on storage that all hosts share");
  }
  good = comm_agree(run->comm, good, e);
  if (run->rank == 0) unlink(path);
  return good;
}

/* The run's folder, for this process alone. */
static bool take_folder(struct run *run, struct record_file **records, struct error *e) {
  const char *folder = run->config.run.folder;
  bool good = true;
  if (run->rank == 0) {
    *records = file_make_folder(folder, ERROR_SYSTEM, e) ? record_open(folder, e) : NULL;
    good = *records != NULL;
  }
  return comm_agree(run->comm, good, e) && shared_folder(run, e);
}

static bool begin_records(struct run *run, bool resumed, struct record_file *records, struct error *e) {
  char folder[1024];
  state_folder(run->config.run.folder, folder, sizeof folder);
  const bool good = run->rank != 0 || ((!resumed || checkpoint_set_aside(folder, run->update, e)) && record_begin(records, run->update, e));
  if (!comm_agree(run->comm, good, e)) return false;
  return record_write_together(records, run->comm, report_start(run, resumed), e);
}

static bool train(struct run *run, const char *resume, const char *weights, struct error *e) {
  const struct config *c = &run->config;
  struct state *state = NULL;
  struct record_file *records = NULL;
  bool resumed = false;

  bool good = comm_agree(run->comm, comm_watch(run->comm, &c->limits, e), e);
  comm_enter(run->comm, COMM_START, "start", run->update);
  good = good && take_folder(run, &records, e) && start_state(run, resume, weights, &resumed, e);
  if (good && run->update >= c->train.updates) {
    if (run->rank == 0) log_info("run %s is finished: %lld of %lld updates done, nothing to do", c->run.name, (long long)run->update, (long long)c->train.updates);
    record_close(records);
    return true;
  }
  bool begun = good && begin_records(run, resumed, records, e);
  good = begun;
  if (good) {
    state = state_open(run, e);
    good = comm_agree(run->comm, state != NULL, e) && loop_train(run, state, records, e);
  }
  if (records && begun && (good || e->code == ERROR_PREEMPTED || e->code == ERROR_DIVERGED)) {
    json_t *end = json_object();
    struct error writing;
    record_text(end, "kind", "end");
    record_integer(end, "update", run->update);
    record_text(end, "reason", good ? "finished" : error_code_name(e->code));
    if (!record_write(records, end, &writing)) log_failure(&writing);
  }
  record_close(records);
  state_close(state);
  return good;
}

int command_train(int argc, char **argv) {
  struct train_arguments a = {.resume = "auto"};
  struct error e = {0};
  if (!arguments_parse(command_train_arguments, argc, argv, &a, &e)) return command_fail(&e);
  if (a.weights && strcmp(a.resume, "auto") != 0 && strcmp(a.resume, "none") != 0) {
    error_set(&e, ERROR_USAGE, "--weights begins a run, --resume PATH goes on with one: give one of them");
    return command_fail(&e);
  }
  if (a.allow_data_change) {
    if (a.sets.n == ARGUMENT_LIST) {
      error_set(&e, ERROR_USAGE, "no room for --allow-data-change beside %d --set", ARGUMENT_LIST);
      return command_fail(&e);
    }
    a.sets.item[a.sets.n++] = "data.allow_change=true";
  }

  struct config config;
  struct run run;
  if (!control_install(&e)) return command_fail(&e); /* before all: a request at any moment of the start counts */
  const bool loaded = config_load(&config, a.config, a.sets.item, a.sets.n, &e);
  if (!run_open(&run, &config, loaded, RUN_TRAIN, &e)) return run_leave(&run, false, &e);
  const bool good = train(&run, a.resume, a.weights, &e);
  return run_leave(&run, good, &e);
}
