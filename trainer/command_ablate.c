/* fp4d ablate: matched routes, trained one after the other, then compared.
 *
 * Each run is `fp4d train` in a process of its own (behind the launcher's words),
 * so a start goes on where the last one stopped, run by run. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "trainer/ablation.h"
#include "trainer/command.h"
#include "trainer/compare.h"
#include "trainer/plan.h"
#include "trainer/records.h"

struct ablate_arguments {
  const char *ablation;
  struct argument_list sets;
};

const struct argument command_ablate_arguments[] = {
    {.name = "ABLATION.yaml", .type = ARGUMENT_WORD, .offset = offsetof(struct ablate_arguments, ablation),
     .help = "base, folder, routes, launch, set"},
    ARGUMENT_SETS(struct ablate_arguments, sets),
    {0}};

enum { WORDS = ABLATION_WORDS + 2 * ABLATION_SETS + 16, PATH = 1100 };

/* What a run is called and where it goes, as --set takes it. */
struct own_sets {
  char route[96], name[96], folder[PATH + 16];
};

static void own_sets(const struct ablation *a, int route, struct own_sets *s) {
  char folder[PATH];
  ablation_run_folder(a, route, folder, sizeof folder);
  snprintf(s->route, sizeof s->route, "route=%s", a->route[route]);
  snprintf(s->name, sizeof s->name, "run.name=%.80s", strrchr(folder, '/') + 1);
  snprintf(s->folder, sizeof s->folder, "run.folder=%s", folder);
}

/* ---- before the first run ------------------------------------------------------------ */

/* A route that its backend refuses is found now, not after hours of others. */
static bool check_route(const struct ablation *a, int route, struct error *e) {
  static struct config c;
  const char *sets[ABLATION_SETS + 3];
  struct own_sets own;
  own_sets(a, route, &own);
  int n = 0;
  for (int i = 0; i < a->n_sets; i++) sets[n++] = a->set[i];
  sets[n++] = own.route;
  sets[n++] = own.name;
  sets[n++] = own.folder;
  if (!config_load(&c, a->base, sets, n, e)) return false;
  struct device *d = device_open_plan(c.run.backend, 1, e);
  if (!d) return false;
  const struct extent x = plan_extent(&c);
  const bool good = route_check(&c.route, (int)c.model.shape.n_layers, &x, d, e) || error_context(e, "route %s", a->route[route]);
  d->k->close(d);
  return good;
}

/* ---- one run --------------------------------------------------------------------------- */

static const int watched[] = {SIGCHLD, SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP};

/* Its own process group, so that a terminal's interrupt reaches this program alone,
 * which passes it on in the form that launchers forward at once. */
static void child(char *const *argv, const sigset_t *before) {
  const int null = open("/dev/null", O_RDONLY);
  setpgid(0, 0);
  if (null >= 0) dup2(null, 0);
  sigprocmask(SIG_SETMASK, before, NULL);
  execvp(argv[0], argv);
  log_error("cannot start %s: %s", argv[0], strerror(errno));
  _exit(ERROR_SYSTEM);
}

/* The exit code, or 128 and the signal. *stop is set where this program was told to stop. */
static bool run_child(char *const *argv, int *code, bool *stop, struct error *e) {
  sigset_t mask, before;
  sigemptyset(&mask);
  for (size_t i = 0; i < sizeof watched / sizeof *watched; i++) sigaddset(&mask, watched[i]);
  struct sigaction hangup; /* a signal that waits behind a mask is seen even where it is ignored (nohup) */
  if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler == SIG_IGN) sigdelset(&mask, SIGHUP);
  if (sigprocmask(SIG_BLOCK, &mask, &before) != 0) return error_errno(e, ERROR_SYSTEM, "cannot wait for signals");
  signal(SIGCHLD, SIG_DFL);
  fflush(NULL);
  const pid_t pid = fork();
  if (pid == 0) child(argv, &before);
  bool good = pid > 0 || error_errno(e, ERROR_SYSTEM, "cannot start a process");
  int status = 0;
  pid_t ended = 0;
  while (good && (ended = waitpid(pid, &status, WNOHANG)) == 0) {
    const int number = sigwaitinfo(&mask, NULL);
    if (number < 0 && errno != EINTR) good = error_errno(e, ERROR_SYSTEM, "cannot wait for a run");
    if (number <= 0 || number == SIGCHLD) continue;
    if (number != SIGUSR1) *stop = true;
    kill(pid, number == SIGUSR1 ? SIGUSR1 : SIGUSR2);
  }
  if (ended < 0) good = error_errno(e, ERROR_SYSTEM, "cannot wait for a run");
  const struct timespec none = {0};
  for (int number; good && (number = sigtimedwait(&mask, NULL, &none)) > 0;)
    *stop |= number != SIGCHLD && number != SIGUSR1; /* came while the run ended */
  sigprocmask(SIG_SETMASK, &before, NULL);
  *code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return good;
}

static bool train(const struct ablation *a, int route, int *code, bool *stop, struct error *e) {
  char program[PATH], *argv[WORDS], set[] = "--set", command[] = "train";
  struct own_sets own;
  own_sets(a, route, &own);
  const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  if (length <= 0) return error_errno(e, ERROR_SYSTEM, "cannot tell where this program is");
  program[length] = 0;
  int n = 0;
  for (int i = 0; i < a->n_words; i++) argv[n++] = a->launch_word[i];
  argv[n++] = program;
  argv[n++] = command;
  argv[n++] = a->base;
  for (int i = 0; i < a->n_sets; i++) {
    argv[n++] = set;
    argv[n++] = a->set[i];
  }
  char *const last[] = {own.route, own.name, own.folder};
  for (int i = 0; i < 3; i++) {
    argv[n++] = set;
    argv[n++] = last[i];
  }
  argv[n] = NULL;
  return run_child(argv, code, stop, e);
}

/* A run that halted would only halt again. */
static bool has_diverged(const char *folder) {
  struct records r;
  struct error none;
  if (!records_read(&r, folder, &none)) return false;
  const bool diverged = strcmp(r.reason, error_code_name(ERROR_DIVERGED)) == 0;
  records_free(&r);
  return diverged;
}

static bool run_all(const struct ablation *a, struct error *e) {
  for (int i = 0; i < a->n_routes; i++) {
    char folder[PATH];
    int code = 0;
    bool stop = false;
    ablation_run_folder(a, i, folder, sizeof folder);
    if (has_diverged(folder)) {
      log_info("route %s (%d of %d): diverged before, not run again", a->route[i], i + 1, a->n_routes);
      continue;
    }
    log_info("route %s (%d of %d): %s", a->route[i], i + 1, a->n_routes, folder);
    if (!train(a, i, &code, &stop, e)) return false;
    if (code == ERROR_PREEMPTED || (stop && (code != ERROR_NONE || i + 1 < a->n_routes))) {
      error_set(e, ERROR_PREEMPTED, "stopped in route %s, %d of %d", a->route[i], i + 1, a->n_routes);
      return error_hint(e, "start the same command again to go on");
    }
    if (code == ERROR_DIVERGED) {
      log_warning("route %s diverged; the others go on", a->route[i]);
    } else if (code != ERROR_NONE) {
      const bool known = code > 0 && code < 128;
      error_set(e, known ? (enum error_code)code : ERROR_SYSTEM, "the run of route %s ended with exit code %d", a->route[i], code);
      return error_hint(e, "what is against it was said above; the same command goes on from here");
    }
  }
  return true;
}

static bool compare(const struct ablation *a, struct error *e) {
  char folder[ABLATION_ROUTES][PATH], markdown[PATH];
  const char *runs[ABLATION_ROUTES];
  for (int i = 0; i < a->n_routes; i++) {
    ablation_run_folder(a, i, folder[i], PATH);
    runs[i] = folder[i];
  }
  snprintf(markdown, sizeof markdown, "%s/compare.md", a->folder);
  const struct compare c = {.runs = runs, .n = a->n_routes, .markdown = markdown};
  return compare_runs(&c, e);
}

int command_ablate(int argc, char **argv) {
  struct ablate_arguments args = {0};
  struct error e = {0};
  struct ablation a;
  if (!arguments_parse(command_ablate_arguments, argc, argv, &args, &e)) return command_fail(&e);
  bool good = ablation_read(&a, args.ablation, &e);
  for (int i = 0; good && i < args.sets.n; i++) good = ablation_set(&a, args.sets.item[i], &e);
  for (int i = 0; good && i < a.n_routes; i++) good = check_route(&a, i, &e);
  good = good && run_all(&a, &e) && compare(&a, &e);
  ablation_free(&a);
  return good ? ERROR_NONE : command_fail(&e);
}
