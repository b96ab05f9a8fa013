/* Files: whole or not at all, in the order that survives a power cut.
 *
 * The system calls of interest are defined here, in front of the C library's,
 * so that their order is seen and failures can be made.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/test.h"

static char calls[1024];  /* what was called, in order */
static int fail_rename;   /* errno for the next rename */
static int fail_fsync;

static void note(const char *name) {
  size_t n = strlen(calls);
  snprintf(calls + n, sizeof calls - n, "%s ", name);
}

int fsync(int fd) {
  struct stat st;
  note(fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) ? "fsync-folder" : "fsync-file");
  if (fail_fsync) {
    errno = fail_fsync;
    fail_fsync = 0;
    return -1;
  }
  return (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to) {
  note("rename");
  if (fail_rename) {
    errno = fail_rename;
    fail_rename = 0;
    return -1;
  }
  return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

static char root[64], path[256];

static const char *at(const char *name) {
  snprintf(path, sizeof path, "%s/%s", root, name);
  return path;
}

static bool holds(const char *file, const char *expected) {
  struct error e;
  char *text;
  size_t bytes;
  if (!file_read(file, 1 << 20, ERROR_DATA, &text, &bytes, &e)) return false;
  bool same = bytes == strlen(expected) && memcmp(text, expected, bytes + 1) == 0;
  free(text);
  return same;
}

TEST(publish_order) {
  struct error e;
  calls[0] = 0;
  CHECK(file_publish(at("a"), "first", 5, ERROR_CHECKPOINT, &e));
  CHECK_STR(calls, "fsync-file rename fsync-folder ");
  CHECK(holds(at("a"), "first"));
  CHECK(!file_exists(at("a.tmp")));
  CHECK(file_publish(at("a"), "", 0, ERROR_CHECKPOINT, &e));
  CHECK(holds(at("a"), ""));
  CHECK(file_publish(at("a"), "second", 6, ERROR_CHECKPOINT, &e));
  CHECK(holds(at("a"), "second"));
  CHECK_EQ_I64(file_size(at("a")), 6);
}

TEST(publish_in_current_folder) {
  struct error e;
  char here[4096];
  CHECK(getcwd(here, sizeof here) != NULL);
  CHECK(chdir(root) == 0);
  CHECK(file_publish("plain", "x", 1, ERROR_DATA, &e));
  CHECK(chdir(here) == 0);
  CHECK(holds(at("plain"), "x"));
}

TEST(publish_failures_keep_the_old_file) {
  struct error e;
  CHECK(file_publish(at("b"), "old", 3, ERROR_CHECKPOINT, &e));
  fail_fsync = EIO;
  CHECK(!file_publish(at("b"), "new", 3, ERROR_CHECKPOINT, &e));
  CHECK_EQ_I64(e.code, ERROR_CHECKPOINT);
  CHECK(strstr(e.message, "Input/output error") != NULL);
  CHECK(holds(at("b"), "old") && !file_exists(at("b.tmp")));
  fail_rename = EROFS;
  CHECK(!file_publish(at("b"), "new", 3, ERROR_CHECKPOINT, &e));
  CHECK(strstr(e.message, root) != NULL);
  CHECK(holds(at("b"), "old") && !file_exists(at("b.tmp")));
  CHECK(!file_publish(at("nowhere/b"), "new", 3, ERROR_CHECKPOINT, &e));
  CHECK(strstr(e.message, "No such file") != NULL);
}

TEST(publish_when_full) {
  /* A file-size limit stands for a full disk: write(2) takes some, then fails. */
  struct error e;
  static char big[100000];
  CHECK(file_publish(at("c"), "old", 3, ERROR_CHECKPOINT, &e));
  struct rlimit before, small;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  small = before;
  small.rlim_cur = 40000;
  signal(SIGXFSZ, SIG_IGN);
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  bool ok = file_publish(at("c"), big, sizeof big, ERROR_CHECKPOINT, &e);
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(!ok);
  if (!ok) CHECK(strstr(e.message, "File too large") != NULL && strstr(e.message, "c.tmp") != NULL);
  CHECK(holds(at("c"), "old") && !file_exists(at("c.tmp")));
}

TEST(folders_and_special_files) {
  struct error e;
  char *text;
  size_t bytes;
  CHECK(!file_read(root, 100, ERROR_CONFIG, &text, &bytes, &e));
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  CHECK(strstr(e.message, "a folder") != NULL);
  CHECK(!file_read("/dev/null", 100, ERROR_CONFIG, &text, &bytes, &e));
  CHECK(mkfifo(at("fifo"), 0600) == 0);
  CHECK(!file_read(at("fifo"), 100, ERROR_CONFIG, &text, &bytes, &e)); /* and does not wait for a writer */
  CHECK(!file_publish(root, "x", 1, ERROR_DATA, &e));
  CHECK(strstr(e.message, "a folder") != NULL);
  CHECK(!file_publish(at("fifo"), "x", 1, ERROR_DATA, &e));
  CHECK(!file_sync_folder(at("none"), ERROR_DATA, &e));
}

TEST(read_limits) {
  struct error e;
  char *text;
  size_t bytes;
  CHECK(file_publish(at("d"), "12345678", 8, ERROR_DATA, &e));
  CHECK(!file_read(at("d"), 7, ERROR_CONFIG, &text, &bytes, &e));
  CHECK(strstr(e.message, "8 bytes") != NULL);
  CHECK(file_read(at("d"), 8, ERROR_CONFIG, &text, &bytes, &e));
  CHECK(bytes == 8 && text[8] == 0);
  free(text);
  CHECK(!file_read(at("absent"), 8, ERROR_CONFIG, &text, &bytes, &e));
  CHECK(strstr(e.message, "absent") != NULL);
  CHECK_EQ_I64(file_size(at("absent")), -1);
  CHECK(!file_exists(at("absent")));
}

TEST(permissions) {
  /* As root nothing is forbidden: become nobody for the moment. */
  struct error e;
  char *text;
  size_t bytes;
  CHECK(file_publish(at("secret"), "x", 1, ERROR_DATA, &e));
  CHECK(chmod(at("secret"), 0) == 0);
  CHECK(file_make_folder(at("locked"), ERROR_DATA, &e));
  CHECK(chmod(at("locked"), 0555) == 0);
  CHECK(chmod(root, 0755) == 0);
  bool is_root = geteuid() == 0;
  if (is_root) CHECK(seteuid(65534) == 0);
  CHECK(!file_read(at("secret"), 100, ERROR_CONFIG, &text, &bytes, &e));
  CHECK(strstr(e.message, "Permission denied") != NULL);
  CHECK(!file_publish(at("locked/x"), "x", 1, ERROR_CHECKPOINT, &e));
  CHECK(strstr(e.message, "Permission denied") != NULL);
  CHECK(!file_make_folder(at("locked/sub/deep"), ERROR_CHECKPOINT, &e));
  CHECK(strstr(e.message, "locked/sub") != NULL);
  if (is_root) CHECK(seteuid(0) == 0);
  CHECK(chmod(at("locked"), 0755) == 0);
}

TEST(make_and_remove) {
  struct error e;
  CHECK(file_make_folder(at("x/y//z/"), ERROR_DATA, &e));
  CHECK(file_make_folder(at("x/y/z"), ERROR_DATA, &e));
  CHECK(file_exists(at("x/y/z")));
  CHECK(file_publish(at("x/y/f"), "1", 1, ERROR_DATA, &e));
  CHECK(!file_make_folder(at("x/y/f"), ERROR_DATA, &e));
  CHECK(!file_make_folder(at("x/y/f/g"), ERROR_DATA, &e));
  CHECK(!file_make_folder("", ERROR_DATA, &e));
  CHECK(file_make_parent(at("x/p/q/file"), ERROR_DATA, &e) && file_exists(at("x/p/q")) && !file_exists(at("x/p/q/file")));
  CHECK(file_make_parent("file", ERROR_DATA, &e) && file_make_parent("/file", ERROR_DATA, &e) && !file_exists("file"));
  CHECK(file_make_parent(at("x/r/s//"), ERROR_DATA, &e) && file_exists(at("x/r")) && !file_exists(at("x/r/s")));
  CHECK(!file_make_parent(at("x/y/f/file"), ERROR_DATA, &e));
  char other[300];
  snprintf(other, sizeof other, "%s/x/p/new", root);
  CHECK(file_same_place(other, at("x/p/new")) && file_same_place(other, at("x/./p/q/../new")) && file_same_place("new", "./new"));
  CHECK(!file_same_place(other, at("x/p/q/new")) && !file_same_place(other, at("x/p/newer")) && !file_same_place("none/new", "none/new"));
  CHECK(file_sync_parent(at("x/p/q/file"), ERROR_DATA, &e) && file_sync_parent("file", ERROR_DATA, &e));
  CHECK(!file_sync_parent(at("x/none/file"), ERROR_DATA, &e));
  /* A link is removed, never followed. */
  CHECK(file_publish(at("keep"), "1", 1, ERROR_DATA, &e));
  char target[256];
  snprintf(target, sizeof target, "%s", root);
  CHECK(symlink(target, at("x/link")) == 0);
  CHECK(file_remove_tree(at("x"), ERROR_DATA, &e));
  CHECK(!file_exists(at("x")));
  CHECK(file_exists(at("keep")));
  CHECK(file_remove_tree(at("keep"), ERROR_DATA, &e));
  CHECK(!file_exists(at("keep")));
  CHECK(file_remove_tree(at("never"), ERROR_DATA, &e));
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-file-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  RUN(publish_order);
  RUN(publish_in_current_folder);
  RUN(publish_failures_keep_the_old_file);
  RUN(publish_when_full);
  RUN(folders_and_special_files);
  RUN(read_limits);
  RUN(permissions);
  RUN(make_and_remove);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
