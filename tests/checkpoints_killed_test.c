/* A process that dies while it writes. */
#include <sys/mman.h>
#include <time.h>

#include "tests/checkpoints_rig.h"

static void die(int signal_number) {
  (void)signal_number;
  kill(getpid(), SIGKILL);
}

/* Writes a large slice, then one whose memory is not there: the process dies
 * inside the second H5Dwrite, before H5Fclose. */
static int write_and_die(void *argument) {
  signal(SIGSEGV, die);
  const int64_t rows = 1 << 20;
  float *large = calloc((size_t)rows, sizeof *large);
  void *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  struct tensor_slice slices[] = {
      {.name = "param/large", .dtype = DTYPE_F32, .global_rows = rows, .cols = 1, .rows = rows, .data = large},
      {.name = "param/nowhere", .dtype = DTYPE_F32, .global_rows = 8, .cols = 1, .rows = 8, .data = nowhere},
  };
  return hdf5_write_with("unclosed.h5", &(struct hdf5_options){*(const enum checkpoint_compression *)argument, NULL}, slices, 2, &failure);
}

TEST(unclosed) {
  enum checkpoint_compression kind = CHECKPOINT_ZSTD;
  int status = rig_child(write_and_die, &kind);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  CHECK(!hdf5_open("unclosed.h5", &failure));
  CHECK(strstr(failure.message, "cannot open unclosed.h5: HDF5: "));
  kind = CHECKPOINT_STORE;
  status = rig_child(write_and_die, &kind);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  CHECK(file_size("unclosed.h5") >= 4 << 20); /* the large one is there */
  CHECK(!hdf5_open("unclosed.h5", &failure));
  CHECK(strstr(failure.message, "cannot open unclosed.h5: HDF5: "));

  /* What was flushed meanwhile could pass for whole in formats before 1.10:
   * only superblock version 3 says on the disk that a file is being written. */
  char superblock[9] = "";
  int fd = open("unclosed.h5", O_RDONLY);
  CHECK(pread(fd, superblock, 9, 0) == 9);
  close(fd);
  CHECK_EQ_I64(superblock[8], 3);
}

enum { RACE_ROWS = 1 << 19 };

static int save_many(void *argument) {
  static float data[RACE_ROWS];
  const int64_t first = *(int64_t *)argument;
  for (int64_t update = first; update < first + 100; update++) {
    for (int i = 0; i < RACE_ROWS; i++) data[i] = (float)update;
    struct tensor_slice s = {.name = "param/x", .dtype = DTYPE_F32, .global_rows = RACE_ROWS, .cols = 1,
                             .rows = RACE_ROWS, .data = data};
    if (!checkpoint_save(world, "race", update, &s, 1, "{}", 2, &failure)) return 1;
  }
  return 0;
}

/* Killed at any moment of a save, the folder always holds a whole checkpoint,
 * and the next saver cleans up. */
TEST(killed_at_random_moments) {
  static float data[RACE_ROWS];
  int64_t newest = 0;
  uint32_t random = 12345;
  long most = 20000000; /* nanoseconds; grows where the machine is too slow for a save in that time */
  for (int trial = 0; trial < 20 || (newest == 0 && trial < 200); trial++) {
    int64_t first = newest + 1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) _exit(save_many(&first));
    random = random * 1664525u + 1013904223u;
    const long nanoseconds = 1000000 + (long)((uint64_t)(random >> 8) * (uint64_t)most >> 24);
    nanosleep(&(struct timespec){.tv_sec = nanoseconds / 1000000000, .tv_nsec = nanoseconds % 1000000000}, NULL);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    int was = rig_quiet_begin();
    struct checkpoint *k = checkpoint_open_newest("race", &failure);
    rig_quiet_end(was);
    if (!k) {
      if (failure.code != ERROR_NONE || newest > 0) FAIL("trial %d: %s", trial, failure.message);
      if (most < 20000000000) most *= 2;
      continue;
    }
    struct tensor_slice s = {.name = "param/x", .dtype = DTYPE_F32, .global_rows = RACE_ROWS, .cols = 1,
                             .rows = RACE_ROWS, .data = data};
    CHECK(checkpoint_update(k) >= newest);
    newest = checkpoint_update(k);
    CHECK(checkpoint_read(k, &s, 1, &failure));
    for (int i = 0; i < RACE_ROWS; i++)
      if (data[i] != (float)newest) {
        FAIL("trial %d: element %d of update %d is %g", trial, i, (int)newest, (double)data[i]);
        break;
      }
    checkpoint_close(k);
  }
  CHECK(newest > 0);
  struct tensor_slice s = {.name = "param/x", .dtype = DTYPE_F32, .global_rows = 1, .cols = 1, .rows = 1, .data = data};
  CHECK(checkpoint_save(world, "race", newest + 1, &s, 1, "{}", 1, &failure));
  char left[64];
  snprintf(left, sizeof left, "latest step-%08d", (int)newest + 1);
  CHECK_STR(rig_names("race"), left);
}

static void tests(void) {
  RUN(unclosed);
  RUN(killed_at_random_moments);
}

int main(void) { return rig_main(tests); }
