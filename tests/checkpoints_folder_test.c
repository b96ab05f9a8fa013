/* A folder of checkpoints that people and other programs had their hands in. */
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "tests/checkpoints_rig.h"

static void fresh(const char *folder) {
  CHECK(file_remove_tree(folder, ERROR_SYSTEM, &failure));
  CHECK(rig_save(folder, 3, 0) && rig_save(folder, 6, 0));
}

/* A step under another step's name would make a run go back, or jump, unseen. */
TEST(a_renamed_step_is_passed_over) {
  static const int64_t names[] = {4, 7, 900, 9999999999, INT64_MAX};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    fresh("r");
    char path[STORE_PATH];
    store_step_path("r", names[i], path);
    CHECK(rename("r/step-00000003", path) == 0);
    int was = rig_quiet_begin();
    CHECK_EQ_I64(rig_newest("r"), 6);
    CHECK(file_remove_tree("r/step-00000006", ERROR_SYSTEM, &failure));
    CHECK_EQ_I64(rig_newest("r"), -2);
    const char *text = rig_quiet_end(was);
    if (names[i] > 6) CHECK(strstr(text, path) && strstr(text, " holds update 3"));
    struct checkpoint *k = checkpoint_open(path, true, &failure); /* by its path it is what it is */
    CHECK(rig_holds(k, 3));
    checkpoint_close(k);
  }
}

/* ... and it stands for no step that is kept: the run's own would go in its favour. */
TEST(a_renamed_step_keeps_nothing_away) {
  fresh("n");
  CHECK(rename("n/step-00000003", "n/step-00000900") == 0);
  for (int64_t update = 9; update < 15; update += 3) CHECK(rig_save("n", update, 1));
  CHECK_STR(rig_names("n"), "latest step-00000012 step-00000900");
  int was = rig_quiet_begin();
  CHECK_EQ_I64(rig_newest("n"), 12);
  rig_quiet_end(was);
}

/* ---- what a power cut leaves ---------------------------------------------------- */

static char synced[8192]; /* names of what was synced, from this folder on, each with a space after it */

/* In the place of the library's: notes, and syncs nothing. */
int fsync(int fd) {
  char link[64], path[4096], here[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0 || !getcwd(here, sizeof here)) return 0;
  path[n] = 0;
  const size_t length = strlen(here), used = strlen(synced);
  const char *name = strncmp(path, here, length) != 0 ? path : path[length] ? path + length + 1 : ".";
  snprintf(synced + used, sizeof synced - used, "%s ", name);
  return 0;
}

/* Every folder on the way to a checkpoint is durable before the checkpoint is called saved. */
TEST(folders_are_durable) {
  synced[0] = 0;
  CHECK(rig_save("one/two/three", 3, 0));
  CHECK_STR(synced, ". one one/two one/two/three one/two/three/step-00000003.tmp/rank-00000.h5 "
                    "one/two/three/step-00000003.tmp/manifest.json.tmp one/two/three/step-00000003.tmp "
                    "one/two/three/step-00000003.tmp one/two/three one/two/three ");
  synced[0] = 0;
  CHECK(rig_save("one/two/three", 6, 0));
  CHECK(strncmp(synced, "one/two/three one/two/three/step-00000006.tmp/rank-00000.h5 ", 60) == 0);
}

/* Copies follow links; some file systems have none. */
TEST(latest_is_no_link) {
  for (int kind = 0; kind < 3; kind++) {
    fresh("l");
    CHECK(unlink("l/latest") == 0);
    if (kind < 2) CHECK(file_make_folder("l/latest", ERROR_SYSTEM, &failure));
    if (kind == 1) rig_put("l/latest/manifest.json", "{}");
    if (kind == 2) rig_put("l/latest", "step-00000003");
    int was = rig_quiet_begin();
    const bool saved = rig_save("l", 8, 2), back = checkpoint_set_aside("l", 6, &failure) && checkpoint_set_aside("l", 5, &failure);
    const char *text = rig_quiet_end(was);
    CHECK(saved && back);
    CHECK_EQ_I64(rig_newest("l"), -1);
    if (kind < 2) {
      CHECK(strstr(text, "warning: cannot point l/latest at step-00000008: "));
      CHECK_STR(rig_names("l"), "latest superseded-00000006 superseded-00000008");
    } else {
      CHECK_STR(rig_names("l"), "superseded-00000006 superseded-00000008");
    }
  }
}

/* A step moved to an archive and linked to: the link may go, the archive stays. */
TEST(a_linked_step_keeps_its_archive) {
  fresh("a");
  CHECK(file_remove_tree("archive", ERROR_SYSTEM, &failure));
  CHECK(rename("a/step-00000003", "archive") == 0 && symlink("../archive", "a/step-00000003") == 0);
  CHECK_EQ_I64(rig_newest("a"), 6);
  CHECK(rig_save("a", 9, 2));
  CHECK_STR(rig_names("a"), "latest step-00000006 step-00000009");
  struct checkpoint *k = checkpoint_open("archive", true, &failure);
  CHECK(rig_holds(k, 3));
  checkpoint_close(k);
}

/* Steps beyond `keep` make room before the next one is written. */
TEST(keep_makes_room_first) {
  fresh("room");
  CHECK(rig_save("room", 9, 0));
  struct rlimit was, limit;
  CHECK(getrlimit(RLIMIT_FSIZE, &was) == 0);
  limit = was;
  limit.rlim_cur = 1000;
  void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  CHECK(!rig_save("room", 12, 1));
  CHECK(setrlimit(RLIMIT_FSIZE, &was) == 0);
  signal(SIGXFSZ, handler);
  CHECK_STR(rig_names("room"), "latest step-00000009");
  CHECK_EQ_I64(rig_newest("room"), 9);
}

/* What this process may not open now is not damaged: the run must not go back for it. */
TEST(too_many_open_files) {
  fresh("f");
  struct rlimit was, limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &was) == 0);
  int refused = 0, opened = 0;
  for (rlim_t files = 3; files < 40; files++) {
    limit = was;
    limit.rlim_cur = files;
    int quiet = rig_quiet_begin();
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    struct checkpoint *k = checkpoint_open_newest("f", &failure);
    CHECK(setrlimit(RLIMIT_NOFILE, &was) == 0);
    const char *text = rig_quiet_end(quiet);
    if (k && checkpoint_update(k) != 6) FAIL("%d files: update %d", (int)files, (int)checkpoint_update(k));
    if (!k && !strstr(failure.message, "Too many open files")) FAIL("%d files: %s", (int)files, failure.message);
    if (text[0]) FAIL("%d files: %s", (int)files, text);
    opened += k != NULL;
    refused += !k;
    checkpoint_close(k);
  }
  CHECK(refused > 0 && opened > 0);
}

TEST(not_permitted) {
  if (geteuid() != 0) return; /* only root can become another */
  fresh("p");
  static const char *const closed[] = {"p/step-00000006/manifest.json", "p/step-00000006/rank-00000.h5", "p/step-00000006"};
  CHECK(chmod(".", 0755) == 0);
  for (size_t i = 0; i < sizeof closed / sizeof *closed; i++) {
    CHECK(chmod(closed[i], 0) == 0);
    CHECK(seteuid(65534) == 0);
    CHECK_EQ_I64(rig_newest("p"), -2);
    CHECK(seteuid(0) == 0);
    CHECK_EQ_I64(failure.code, ERROR_SYSTEM);
    if (!strstr(failure.message, closed[i]) || !strstr(failure.message, "Permission denied")) FAIL("%s", failure.message);
    CHECK(chmod(closed[i], i == 2 ? 0755 : 0644) == 0);
  }
  CHECK_EQ_I64(rig_newest("p"), 6);
}

/* A folder that may be entered and written, but not read, is good enough to make one in. */
TEST(a_parent_that_cannot_be_read) {
  if (geteuid() != 0) return;
  CHECK(mkdir("blind", 0333) == 0 && chmod("blind", 0333) == 0);
  CHECK(seteuid(65534) == 0);
  const bool made = file_make_folder("blind/a/b", ERROR_CHECKPOINT, &failure);
  CHECK(seteuid(0) == 0);
  if (!made) FAIL("%s", failure.message);
}

/* A path is used whole or refused, never cut. */
TEST(long_paths) {
  char name[4200] = "", part[101];
  memset(part, 'd', 100);
  part[100] = 0;
  int opened = 0, refused = 0;
  CHECK(rig_save("short", 3, 0));
  for (int i = 0; i < 40; i++) {
    snprintf(name + strlen(name), sizeof name - strlen(name), "%s%s", i ? "/" : "", part);
    char step[4300];
    snprintf(step, sizeof step, "%s/step-00000003", name);
    /* below PATH_MAX; the newest part is made from where we are by the system's own means */
    if (strlen(step) > 4000) break;
    CHECK(file_make_folder(name, ERROR_SYSTEM, &failure));
    char target[4300] = "";
    for (int j = 0; j <= i; j++) strcat(target, "../");
    strcat(target, "short/step-00000003");
    CHECK(symlink(target, step) == 0);
    for (int newest = 0; newest < 2; newest++) {
      struct checkpoint *k = newest ? checkpoint_open_newest(name, &failure) : checkpoint_open(step, true, &failure);
      if (k && !rig_holds(k, 3)) FAIL("%d bytes", (int)strlen(step));
      if (!k && !strstr(failure.message, "are accepted")) FAIL("%d bytes: %.300s", (int)strlen(step), failure.message);
      opened += k != NULL;
      refused += !k;
      checkpoint_close(k);
    }
  }
  CHECK(opened > 10 && refused > 10);
}

/* What keeps this process from reading now says nothing about the file. */
TEST(faults_that_are_no_damage) {
  static const int passing[] = {EACCES, EPERM, EMFILE, ENFILE, ENOMEM, EINTR, EAGAIN, ESTALE, ETIMEDOUT, ENOTCONN};
  for (size_t i = 0; i < sizeof passing / sizeof *passing; i++) CHECK_EQ_I64(store_fault(passing[i]), ERROR_SYSTEM);
  static const int damage[] = {0, ENOENT, ENOTDIR, EIO, ELOOP, EISDIR};
  for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) CHECK_EQ_I64(store_fault(damage[i]), ERROR_CHECKPOINT);
}

static void tests(void) {
  RUN(faults_that_are_no_damage);
  RUN(a_renamed_step_is_passed_over);
  RUN(a_renamed_step_keeps_nothing_away);
  RUN(folders_are_durable);
  RUN(latest_is_no_link);
  RUN(a_linked_step_keeps_its_archive);
  RUN(keep_makes_room_first);
  RUN(too_many_open_files);
  RUN(not_permitted);
  RUN(a_parent_that_cannot_be_read);
  RUN(long_paths);
}

int main(void) { return rig_main(tests); }
