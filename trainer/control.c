#include "trainer/control.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>

static atomic_int requested;

static void on_signal(int number) {
  atomic_fetch_or(&requested, number == SIGUSR1 ? CONTROL_CHECKPOINT : CONTROL_STOP);
}

bool control_install(struct error *e) {
  static const int numbers[] = {SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP};
  struct sigaction action, before;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    bool good = sigaction(numbers[i], NULL, &before) == 0;
    if (good && numbers[i] == SIGHUP && before.sa_handler == SIG_IGN) continue; /* nohup */
    good = good && sigaction(numbers[i], &action, NULL) == 0;
    if (!good) return error_errno(e, ERROR_SYSTEM, "cannot handle signal %d", numbers[i]);
  }
  return signal(SIGPIPE, SIG_IGN) != SIG_ERR || error_errno(e, ERROR_SYSTEM, "cannot ignore SIGPIPE");
}

int64_t control_take(void) { return atomic_exchange(&requested, 0); }
