/* Commands of the program inside a test: their words, exit code and all that
 * they print; in a folder of their own. */
#ifndef FP4D_TESTS_COMMAND_RIG_H
#define FP4D_TESTS_COMMAND_RIG_H

#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/test.h"
#include "trainer/command.h"

static struct error failure;
static char text[40000]; /* what the last command printed, both streams */

/* The exit code of command(name, words...); words end with NULL. */
static inline int command_run(int (*command)(int, char **), const char *name, const char *const *words) {
  char *argv[32] = {(char *)name};
  int argc = 1;
  for (; words[argc - 1]; argc++) argv[argc] = (char *)words[argc - 1];
  fflush(stdout);
  int out = dup(1), err = dup(2), file = open("output", O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (out < 0 || err < 0 || file < 0) return -1;
  dup2(file, 1);
  dup2(file, 2);
  int code = command(argc, argv);
  fflush(stdout);
  dup2(out, 1);
  dup2(err, 2);
  ssize_t n = pread(file, text, sizeof text - 1, 0);
  text[n > 0 ? n : 0] = 0;
  close(out);
  close(err);
  close(file);
  return code;
}

/* The same in a process of its own: a world is joined once per process. */
static inline int command_run_apart(int (*command)(int, char **), const char *name, const char *const *words) {
  int status = -1;
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) _exit(command_run(command, name, words));
  char *output;
  size_t n;
  if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return -1;
  text[0] = 0;
  if (file_read("output", sizeof text - 1, ERROR_SYSTEM, &output, &n, &failure)) {
    memcpy(text, output, n + 1);
    free(output);
  }
  return WEXITSTATUS(status);
}

#define COMMAND(command, ...) command_run(command_##command, #command, (const char *const[]){__VA_ARGS__, NULL})
#define COMMAND_APART(command, ...) \
  command_run_apart(command_##command, #command, (const char *const[]){__VA_ARGS__, NULL})

static inline bool said(const char *what) {
  if (strstr(text, what)) return true;
  printf("# said:\n%s", text);
  return false;
}

static inline void put(const char *path, const char *content) {
  if (!file_publish(path, content, strlen(content), ERROR_SYSTEM, &failure)) FAIL("%s", failure.message);
}

/* Six documents in FOLDER. */
static inline void put_corpus(const char *folder) {
  char words[9000] = "", name[64];
  for (int i = 0; i < 800; i++) strcat(words, "some text ");
  CHECK(file_make_folder(folder, ERROR_SYSTEM, &failure));
  for (int i = 0; i < 6; i++) {
    snprintf(name, sizeof name, "%s/%d.txt", folder, i);
    words[0] = (char)('a' + i);
    put(name, words);
  }
}

static char rig_folder[64];

/* The test program's own folder, which it goes into and which is gone at its end. */
static inline bool rig_enter(void) {
  snprintf(rig_folder, sizeof rig_folder, "%s/fp4d-test-XXXXXX", P_tmpdir);
  return mkdtemp(rig_folder) && chdir(rig_folder) == 0;
}

static inline bool rig_leave(void) { return chdir("/") == 0 && file_remove_tree(rig_folder, ERROR_SYSTEM, &failure); }

#endif
