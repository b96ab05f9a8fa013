/* A look in a process of its own: the HDF5 library may crash on a damaged file. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "trainer/inspect.h"

/* What the child tells: written whole, so a pipe without it is a crash. */
struct answer {
  bool good;
  struct error error;
};

static void look_and_tell(bool (*look)(const struct inspection *i, struct error *e), const struct inspection *i, int to) {
  struct answer a = {.good = false};
  a.good = look(i, &a.error);
  fflush(stdout);
  const char *at = (const char *)&a;
  for (size_t left = sizeof a; left > 0;) {
    const ssize_t n = write(to, at, left);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) _exit(1);
    at += n;
    left -= (size_t)n;
  }
  _exit(0);
}

static bool hear(int from, struct answer *a) {
  size_t done = 0;
  while (done < sizeof *a) {
    const ssize_t n = read(from, (char *)a + done, sizeof *a - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += (size_t)n;
  }
  return true;
}

bool inspect_apart(bool (*look)(const struct inspection *i, struct error *e), const struct inspection *i, struct error *e) {
  static struct answer a;
  int ends[2], status = 0;
  fflush(stdout);
  if (pipe(ends) != 0) return error_errno(e, ERROR_SYSTEM, "cannot make a pipe");
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    look_and_tell(look, i, ends[1]);
  }
  close(ends[1]);
  if (child < 0) {
    error_errno(e, ERROR_SYSTEM, "cannot start a process");
    close(ends[0]);
    return false;
  }
  const bool heard = hear(ends[0], &a);
  close(ends[0]);
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (heard) {
    if (!a.good) *e = a.error;
    return a.good;
  }
  const int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  if (number == SIGKILL) return error_set(e, ERROR_SYSTEM, "%s: the process that read it was killed (out of memory?)", i->path);
  if (number == SIGPIPE) raise(SIGPIPE); /* the reader of standard output has gone */
  error_set(e, ERROR_CHECKPOINT, "%s is damaged: the HDF5 library crashed on it%s%s", i->path, number ? ": " : "",
            number ? strsignal(number) : "");
  if (!i->verify) error_hint(e, "--verify compares checksums before HDF5 reads, and names the file");
  return false;
}
