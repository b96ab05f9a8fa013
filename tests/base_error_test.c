/* Errors as values, and the lines that show them. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "tests/test.h"

TEST(set_hint_context) {
  struct error e;
  memset(&e, 'x', sizeof e);
  CHECK(!error_set(&e, ERROR_CONFIG, "%s: line %d", "run.yaml", 7));
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  CHECK_STR(e.message, "run.yaml: line 7");
  CHECK_STR(e.hint, "");
  CHECK(!error_hint(&e, "set %s", "seq_len"));
  CHECK_STR(e.hint, "set seq_len");
  CHECK(!error_context(&e, "rank %d", 3));
  CHECK_STR(e.message, "rank 3: run.yaml: line 7");
  CHECK_STR(e.hint, "set seq_len");
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  error_set(&e, ERROR_DATA, "again");
  CHECK_STR(e.hint, "");
}

TEST(errno_message) {
  struct error e;
  errno = ENOENT;
  CHECK(!error_errno(&e, ERROR_DATA, "cannot open %s", "x"));
  CHECK_STR(e.message, "cannot open x: No such file or directory");
  CHECK_EQ_I64(errno, ENOENT);
}

TEST(null_is_allowed) {
  CHECK(!error_set(NULL, ERROR_DATA, "x"));
  CHECK(!error_hint(NULL, "x"));
  CHECK(!error_context(NULL, "x"));
  CHECK(!error_errno(NULL, ERROR_DATA, "x"));
}

TEST(long_text_is_cut) {
  struct error e;
  static char text[10000];
  memset(text, 'a', sizeof text - 1);
  error_set(&e, ERROR_DATA, "%s", text);
  CHECK_EQ_I64(strlen(e.message), sizeof e.message - 1);
  error_hint(&e, "%s", text);
  CHECK_EQ_I64(strlen(e.hint), sizeof e.hint - 1);
  error_context(&e, "front");
  CHECK(strncmp(e.message, "front: aaa", 10) == 0);
  CHECK_EQ_I64(strlen(e.message), sizeof e.message - 1);
  error_context(&e, "%s", text);
  CHECK_EQ_I64(strlen(e.message), sizeof e.message - 1);
  errno = ENOENT;
  error_errno(&e, ERROR_DATA, "%s", text);
  CHECK_EQ_I64(strlen(e.message), sizeof e.message - 1);
}

TEST(code_names) {
  static const enum error_code codes[] = {ERROR_NONE,    ERROR_USAGE,      ERROR_DATA,      ERROR_DEVICE,
                                          ERROR_INTERNAL, ERROR_SYSTEM,    ERROR_CHECKPOINT, ERROR_PREEMPTED,
                                          ERROR_COMMUNICATION, ERROR_CONFIG, ERROR_DIVERGED};
  int n = (int)(sizeof codes / sizeof *codes);
  for (int i = 0; i < n; i++) {
    CHECK(strcmp(error_code_name(codes[i]), "unknown") != 0);
    for (int j = 0; j < i; j++) CHECK(strcmp(error_code_name(codes[i]), error_code_name(codes[j])) != 0);
  }
  CHECK_STR(error_code_name(ERROR_CONFIG), "config");
  CHECK_STR(error_code_name((enum error_code)1), "unknown");
}

/* Standard error of the calls between the two, as text. */
static int saved_stderr = -1, pipe_out = -1;

static void capture_begin(void) {
  int ends[2];
  if (pipe2(ends, O_NONBLOCK) != 0) {
    FAIL("pipe");
    return;
  }
  saved_stderr = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  close(ends[1]);
  pipe_out = ends[0];
}

static void capture_end(char *text, size_t room) {
  dup2(saved_stderr, STDERR_FILENO);
  close(saved_stderr);
  size_t n = 0;
  for (;;) {
    ssize_t got = read(pipe_out, text + n, room - 1 - n);
    if (got <= 0) break;
    n += (size_t)got;
  }
  close(pipe_out);
  text[n] = 0;
}

TEST(log_lines) {
  static char text[60000];
  capture_begin();
  log_info("start %d", 1);
  log_debug("not shown");
  log_setup(3, 8, LOG_WARNING);
  log_info("not shown");
  log_warning("two\nlines");
  struct error e;
  error_set(&e, ERROR_DATA, "s.tok: bad");
  log_failure(&e);
  error_hint(&e, "prepare it again");
  log_failure(&e);
  log_setup(0, 1, LOG_DEBUG);
  errno = ENOSPC;
  log_debug("100%%");
  CHECK_EQ_I64(errno, ENOSPC);
  capture_end(text, sizeof text);
  CHECK_STR(text,
            "start 1\n"
            "[r3] warning: two lines\n"
            "[r3] error: s.tok: bad\n"
            "[r3] error: s.tok: bad (prepare it again)\n"
            "debug: 100%\n");
}

/* A terminal obeys none of what a file's name or a record holds; text in UTF-8 stays. */
TEST(control_characters) {
  static char text[1000];
  log_setup(0, 1, LOG_INFO);
  capture_begin();
  log_info("a\x1b[2Jb\tc\rd\x7f" "e\bf %s", "\a\x01\x1fg \xc2\x9b" "3h\xc3\xa9\xc2\xa0");
  capture_end(text, sizeof text);
  CHECK_STR(text, "a [2Jb c d e f    g   3h\xc3\xa9\xc2\xa0\n");
}

TEST(long_line_is_cut) {
  static char line[20000], text[30000];
  memset(line, 'b', sizeof line - 1);
  log_setup(0, 1, LOG_INFO);
  capture_begin();
  log_info("%s", line);
  log_info("next");
  capture_end(text, sizeof text);
  size_t n = strlen(text);
  CHECK(n > 4096 + 512 && n < sizeof line);
  CHECK_STR(text + n - 6, "\nnext\n");
}

int main(void) {
  RUN(set_hint_context);
  RUN(errno_message);
  RUN(null_is_allowed);
  RUN(long_text_is_cut);
  RUN(control_characters);
  RUN(code_names);
  RUN(log_lines);
  RUN(long_line_is_cut);
  return test_report();
}
