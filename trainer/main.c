/* fp4d: the program. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "trainer/command.h"
#include "trainer/version.h"

static bool asks_for_help(int argc, char **argv) {
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return true;
  return false;
}

static int run(int argc, char **argv) {
  if (argc < 2) {
    help_overview(stderr);
    return ERROR_USAGE;
  }
  const char *name = argv[1];
  if (strcmp(name, "--version") == 0) {
    printf("fp4d %s\n", version_build());
    return ERROR_NONE;
  }
  if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
    help_overview(stdout);
    return ERROR_NONE;
  }
  const struct command *c = command_find(name);
  if (!c) {
    struct error e;
    command_unknown(name, NULL, &e);
    return command_fail(&e);
  }
  if (asks_for_help(argc - 1, argv + 1)) {
    help_command(c, stdout);
    return ERROR_NONE;
  }
  return c->run(argc - 1, argv + 1);
}

/* Started with a standard stream closed (`>&-`), the next file that is opened would
 * take its number, and log lines or text would go into a lock, a stream or a
 * checkpoint.  Closed ones are held by what can only fail: standard input by a file
 * to write, the others by a file to read. */
static bool hold_standard_streams(void) {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd) return false;
  return true;
}

int main(int argc, char **argv) {
  if (!hold_standard_streams()) return ERROR_SYSTEM; /* nowhere to say why */
  signal(SIGXFSZ, SIG_IGN); /* a write beyond `ulimit -f` fails like one on a full disk */
  int code = run(argc, argv);
  if ((fflush(stdout) != 0 || ferror(stdout)) && code == ERROR_NONE) {
    log_error("cannot write to standard output: %s", strerror(errno));
    code = ERROR_SYSTEM;
  }
  return code;
}
