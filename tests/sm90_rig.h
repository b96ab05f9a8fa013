/* What tests of kernels/sm90 share: the device, arrays on it, and whether the host
 * model refuses a kernel. */
#ifndef FP4D_TESTS_SM90_RIG_H
#define FP4D_TESTS_SM90_RIG_H

#include <vector>

#include "tests/cuda_rig.h"

#ifdef FP4D_CUDA_MODEL
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

static inline struct rig *sm90_rig() {
  static const struct extent extents = {1200, 32, {3, 400, 8, 8, 128}, 96, 160, 100, DTYPE_BF16};
  static struct rig r = rig_open("sm90", &extents);
  return &r;
}
static inline struct cuda_device *sm90_device() { return cuda_of(sm90_rig()->gpu); }

/* An array in device memory, begun with rubbish or with a copy. */
template <class T> struct device_array {
  explicit device_array(int n) : count((size_t)n), p((T *)rig_put(sm90_rig(), nullptr, count * sizeof(T))) {}
  explicit device_array(const std::vector<T> &host) : count(host.size()), p((T *)rig_put(sm90_rig(), host.data(), count * sizeof(T))) {}
  ~device_array() { rig_drop(sm90_rig(), p); }
  device_array(const device_array &) = delete;
  device_array &operator=(const device_array &) = delete;
  T *data() const { return p; }
  std::vector<T> read() const {
    std::vector<T> host(count);
    rig_get(sm90_rig(), host.data(), p, count * sizeof(T));
    return host;
  }

 private:
  size_t count;
  T *p;
};

#ifdef FP4D_CUDA_MODEL
/* Whether the model ends a process that does this, or it says itself that it is wrong. */
template <class Work> static inline bool sm90_refused(const Work &work) {
  fflush(stdout);
  const pid_t child = fork();
  if (child < 0) exit(1);
  if (child == 0) {
    const int null = open("/dev/null", O_WRONLY);
    dup2(null, STDERR_FILENO);
    _exit(work() ? 0 : 1);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) exit(1);
  if (WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 1 || WEXITSTATUS(status) == 70)) return WEXITSTATUS(status) != 0;
  FAIL("the process ended with status %d", status);
  return false;
}
#endif

#endif
