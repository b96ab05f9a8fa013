/* A small run state for the checkpoint tests: three tensors whose every element
 * says which tensor, element and update it is of. */
#ifndef FP4D_TESTS_CHECKPOINTS_RIG_H
#define FP4D_TESTS_CHECKPOINTS_RIG_H

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/hdf5.h"
#include "checkpoints/manifest.h"
#include "checkpoints/store.h"
#include "tests/test.h"

static struct error failure;
static struct comm *world;

enum { RIG_TENSORS = 3, RIG_LARGEST = 257 * 33 };

static const struct {
  const char *name;
  enum dtype dtype;
  int64_t rows, cols;
} rig_shape[RIG_TENSORS] = {
    {"adam_m/layers.0.attention.wq.weight", DTYPE_F32, 257, 33},
    {"adam_m/norm.weight", DTYPE_F32, 61, 1},
    {"param/layers.0.attention.wq.weight", DTYPE_BF16, 101, 7},
};

/* The bits of element i: any pattern, NaNs with payload and subnormals among them. */
static inline uint32_t rig_bits(int tensor, int64_t i, int64_t update) {
  uint32_t x = (uint32_t)(update * 1000003 + tensor * 7919 + i) * 2654435761u;
  return x ^ x >> 15;
}

/* Rows [first, first + rows) of tensor t into memory, as its dtype. */
static inline void rig_fill(void *to, int t, int64_t first, int64_t rows, int64_t update) {
  const int64_t cols = rig_shape[t].cols;
  for (int64_t i = 0; i < rows * cols; i++) {
    uint32_t bits = rig_bits(t, first * cols + i, update);
    if (rig_shape[t].dtype == DTYPE_BF16)
      memcpy((char *)to + 2 * i, &bits, 2); /* little-endian hosts: the low half */
    else
      memcpy((char *)to + 4 * i, &bits, 4);
  }
}

static inline struct tensor_slice rig_slice(int t, int64_t first, int64_t rows, void *data) {
  struct tensor_slice s = {.dtype = rig_shape[t].dtype,
                           .global_rows = rig_shape[t].rows,
                           .cols = rig_shape[t].cols,
                           .first_row = first,
                           .rows = rows,
                           .data = data};
  snprintf(s.name, sizeof s.name, "%s", rig_shape[t].name);
  return s;
}

static char rig_memory[RIG_TENSORS][4 * RIG_LARGEST];

/* Whole tensors of `update`. */
static inline void rig_slices(struct tensor_slice slices[RIG_TENSORS], int64_t update) {
  for (int t = 0; t < RIG_TENSORS; t++) {
    rig_fill(rig_memory[t], t, 0, rig_shape[t].rows, update);
    slices[t] = rig_slice(t, 0, rig_shape[t].rows, rig_memory[t]);
  }
}

static inline bool rig_save(const char *folder, int64_t update, int keep) {
  struct tensor_slice slices[RIG_TENSORS];
  rig_slices(slices, update);
  return checkpoint_save(world, folder, update, slices, RIG_TENSORS, "{\"a\": \"\xc3\xa9\\n\"}", keep, &failure);
}

/* Does the checkpoint hold `update`, to the bit? */
static inline bool rig_holds(struct checkpoint *k, int64_t update) {
  static char want[4 * RIG_LARGEST], have[4 * RIG_LARGEST];
  if (!k || checkpoint_update(k) != update || checkpoint_tensor_count(k) != RIG_TENSORS) return false;
  for (int t = 0; t < RIG_TENSORS; t++) {
    const size_t bytes = (size_t)(rig_shape[t].rows * rig_shape[t].cols) * dtype_bytes(rig_shape[t].dtype);
    struct tensor_slice s = rig_slice(t, 0, rig_shape[t].rows, have);
    rig_fill(want, t, 0, rig_shape[t].rows, update);
    memset(have, 0, sizeof have);
    if (!checkpoint_read(k, &s, 1, &failure)) {
      printf("# %s\n", failure.message);
      return false;
    }
    if (memcmp(have, want, bytes) != 0) return false;
  }
  return true;
}

/* The newest whole one's update; -1 none at all, -2 an error. */
static inline int64_t rig_newest(const char *folder) {
  struct checkpoint *k = checkpoint_open_newest(folder, &failure);
  int64_t update = k ? checkpoint_update(k) : failure.code == ERROR_NONE ? -1 : -2;
  if (k && !rig_holds(k, update)) FAIL("%s does not hold what was saved", checkpoint_path(k));
  checkpoint_close(k);
  return update;
}

/* Names in a folder, sorted, separated by spaces. */
static inline const char *rig_names(const char *folder) {
  static char text[4096];
  struct dirent **entries;
  text[0] = 0;
  int n = scandir(folder, &entries, NULL, alphasort);
  for (int i = 0; i < n; i++) {
    if (entries[i]->d_name[0] != '.') {
      if (text[0]) strcat(text, " ");
      strcat(text, entries[i]->d_name);
    }
    free(entries[i]);
  }
  if (n >= 0) free(entries);
  return text;
}

static inline void rig_put(const char *path, const char *content) {
  if (!file_publish(path, content, strlen(content), ERROR_SYSTEM, &failure)) FAIL("%s", failure.message);
}

/* Standard error goes to a file meanwhile; its text. */
static inline int rig_quiet_begin(void) {
  fflush(stderr);
  int was = dup(2), file = open("stderr.txt", O_RDWR | O_CREAT | O_TRUNC, 0600);
  dup2(file, 2);
  close(file);
  return was;
}
static inline const char *rig_quiet_end(int was) {
  static char text[20000];
  fflush(stderr);
  ssize_t n = pread(2, text, sizeof text - 1, 0);
  text[n > 0 ? n : 0] = 0;
  dup2(was, 2);
  close(was);
  return text;
}

/* Runs body(argument) in a child that leaves with its result, atexit handlers run; its wait status. */
static inline int rig_child(int (*body)(void *argument), void *argument) {
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) exit(body(argument));
  int status = -1;
  waitpid(pid, &status, 0);
  return status;
}

/* main's frame: a folder of its own, a world of one. */
static inline int rig_main(void (*tests)(void)) {
  char folder[64];
  snprintf(folder, sizeof folder, "%s/fp4d-checkpoints-XXXXXX", P_tmpdir);
  if (!mkdtemp(folder) || chdir(folder) != 0) return 1;
  world = comm_open(0, &failure);
  if (!world) {
    printf("not ok comm_open: %s\n", failure.message);
    return 1;
  }
  tests();
  comm_close(world);
  if (chdir("/") != 0 || !file_remove_tree(folder, ERROR_SYSTEM, &failure)) return 1;
  return test_report();
}

#endif
