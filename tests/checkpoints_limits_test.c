/* Full disks, file systems without locks. */
#include <sys/file.h>
#include <sys/resource.h>

#include "base/hash.h"
#include "tests/checkpoints_rig.h"

/* ---- a file that may not grow -------------------------------------------------- */

/* Saves with files limited to *argument bytes, then without a limit. */
static int save_limited(void *argument) {
  const int64_t bytes = *(int64_t *)argument;
  struct rlimit limit, before;
  if (!rig_save("full", 3, 0)) return 2;
  signal(SIGXFSZ, SIG_IGN); /* then a write fails, as on a full disk */
  getrlimit(RLIMIT_FSIZE, &before);
  limit = before;
  limit.rlim_cur = (rlim_t)bytes;
  setrlimit(RLIMIT_FSIZE, &limit);
  failure = (struct error){0};
  if (rig_save("full", 6, 0)) return 3;
  if (failure.code != ERROR_CHECKPOINT || !failure.message[0]) return 4;
  if (strcmp(rig_names("full"), "latest step-00000003") != 0) return 5;
  setrlimit(RLIMIT_FSIZE, &before);
  if (rig_newest("full") != 3) return 6;
  if (!rig_save("full", 6, 0) || !rig_save("full", 9, 2)) return 7; /* room again: the same update, others */
  if (rig_newest("full") != 9) return 8;
  if (strcmp(rig_names("full"), "latest step-00000006 step-00000009") != 0) return 9;
  return 0;
}

TEST(full_disk) {
  CHECK(rig_save("measure", 6, 0));
  const int64_t whole = file_size("measure/step-00000006/rank-00000.h5");
  for (int i = 0; i < 24; i++) {
    int64_t bytes = i < 4 ? i * 40 : i < 20 ? whole * (i - 3) / 17 : whole - (i - 19);
    CHECK(file_remove_tree("full", ERROR_SYSTEM, &failure));
    int was = rig_quiet_begin();
    const int status = rig_child(save_limited, &bytes);
    const char *text = rig_quiet_end(was);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || text[0])
      FAIL("%d of %d bytes: wait status %d, said \"%s\"", (int)bytes, (int)whole, status, text);
  }
}

/* The rank's file fits and the manifest does not, by what `meta` takes. */
static int manifest_limited(void *argument) {
  enum { META = 1 << 20 };
  struct tensor_slice slices[RIG_TENSORS];
  struct rlimit limit;
  char *meta = malloc(META + 3);
  (void)argument;
  if (!meta || !rig_save("tight", 3, 0)) return 2;
  memset(meta, 'x', META + 2);
  meta[0] = meta[META + 1] = '"';
  meta[META + 2] = 0;
  signal(SIGXFSZ, SIG_IGN);
  getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = META / 2;
  setrlimit(RLIMIT_FSIZE, &limit);
  rig_slices(slices, 6);
  failure = (struct error){0};
  const bool saved = checkpoint_save(world, "tight", 6, slices, RIG_TENSORS, meta, 0, &failure);
  free(meta);
  if (saved) return 3;
  if (failure.code != ERROR_CHECKPOINT || !strstr(failure.message, "manifest.json")) return 4;
  if (strcmp(rig_names("tight"), "latest step-00000003") != 0) return 5;
  return rig_newest("tight") == 3 && rig_save("tight", 6, 0) && rig_newest("tight") == 6 ? 0 : 6;
}

TEST(full_disk_for_the_manifest) {
  const int status = rig_child(manifest_limited, NULL);
  CHECK(WIFEXITED(status));
  CHECK_EQ_I64(WEXITSTATUS(status), 0);
}

/* Nothing holds a failed file: its blocks go back to the disk with its name,
 * and a thousand failed saves need no descriptors. */
static int blocks_are_freed(void *argument) {
  (void)argument;
  const int64_t rows = 1 << 20;
  uint32_t *data = calloc((size_t)rows, sizeof *data);
  for (int64_t i = 0; data && i < rows; i++) data[i] = (uint32_t)(hash_word(&i, sizeof i, 1)); /* noise: it does not shrink */
  struct tensor_slice s = {.name = "param/x", .dtype = DTYPE_F32, .global_rows = rows, .cols = 1, .rows = rows, .data = data};
  struct rlimit limit;
  signal(SIGXFSZ, SIG_IGN);
  getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = 3 << 20;
  setrlimit(RLIMIT_FSIZE, &limit);
  bool good = false;
  const int before = dup(0);
  close(before);
  for (int i = 0; i < 20; i++) good = good || hdf5_write("part.h5", &s, 1, &failure);
  free(data);
  const int after = dup(0);
  if (good) return 2;
  if (after != before) return 3;
  return strstr(failure.message, "cannot write part.h5: File too large") ? 0 : 4;
}

TEST(blocks) {
  const int status = rig_child(blocks_are_freed, NULL);
  CHECK(WIFEXITED(status));
  CHECK_EQ_I64(WEXITSTATUS(status), 0);
}

/* ---- locks ----------------------------------------------------------------------- */

/* Somebody else's lock (or a file system that knows none) does not matter... */
static int write_locked(void *argument) {
  const char *setting = argument;
  if (setting)
    setenv("HDF5_USE_FILE_LOCKING", setting, 1);
  else
    unsetenv("HDF5_USE_FILE_LOCKING");
  struct tensor_slice slices[RIG_TENSORS];
  rig_slices(slices, 1);
  if (!hdf5_write("locked.h5", slices, RIG_TENSORS, &failure)) return 2;
  int fd = open("locked.h5", O_RDWR);
  if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0) return 3;
  struct hdf5_file *f = hdf5_open("locked.h5", &failure);
  const bool opened = f != NULL;
  hdf5_close(f);
  return opened ? 0 : 1;
}

TEST(locks) {
  int status = rig_child(write_locked, NULL);
  CHECK(WIFEXITED(status));
  CHECK_EQ_I64(WEXITSTATUS(status), 0);
  char yes[] = "TRUE"; /* ... unless the user wants HDF5 to look at locks */
  status = rig_child(write_locked, yes);
  CHECK(WIFEXITED(status));
  CHECK_EQ_I64(WEXITSTATUS(status), 1);
}

static void tests(void) {
  RUN(locks); /* first: the library reads its environment once */
  RUN(full_disk);
  RUN(full_disk_for_the_manifest);
  RUN(blocks);
}

int main(void) { return rig_main(tests); }
