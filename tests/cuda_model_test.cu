/* The host model of CUDA itself: that it computes what the machine would, and that
 * it finds what it is there to find.  Not for a GPU. */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda/cuda.h"
#include "tests/test.h"

static struct cuda_device *open_device(void) {
  struct error e = {};
  struct device *d = cuda_model_open("sm90", &e);
  if (!d) {
    printf("not ok device: %s\n", e.message);
    exit(1);
  }
  return cuda_of(d);
}

static void close_device(struct cuda_device *d) { d->device.k->close(&d->device); }

/* What a child process that runs `act` says on standard error; "" where it ends well. */
static const char *said(void (*act)(struct cuda_device *)) {
  static char text[4096];
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    close(ends[0]);
    struct cuda_device *d = open_device();
    act(d);
    close_device(d);
    _exit(0);
  }
  close(ends[1]);
  size_t n = 0;
  for (ssize_t got; n < sizeof text - 1 && (got = read(ends[0], text + n, sizeof text - 1 - n)) > 0;) n += (size_t)got;
  text[n] = 0;
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK((status == 0) == (n == 0));
  return text;
}

#define CHECK_SAYS(act, words)                                                                        \
  do {                                                                                                \
    const char *test_text = said(act);                                                                \
    if (!strstr(test_text, words)) FAIL("%s said \"%s\", expected \"%s\"", #act, test_text, words);   \
  } while (0)

/* ---- what kernels compute -------------------------------------------------- */

static __global__ void places(int64_t *out) {
  const int64_t block = blockIdx.x + (int64_t)gridDim.x * (blockIdx.y + (int64_t)gridDim.y * blockIdx.z);
  const int64_t thread = threadIdx.x + blockDim.x * (threadIdx.y + (int64_t)blockDim.y * threadIdx.z);
  const int64_t threads = (int64_t)blockDim.x * blockDim.y * blockDim.z;
  out[block * threads + thread] += block * 1000 + thread;
}

TEST(every_thread_runs_once) {
  struct cuda_device *d = open_device();
  static int64_t out[3 * 2 * 4 * 60];
  memset(out, 0, sizeof out);
  CUDA_LAUNCH(d, places, dim3(3, 2, 4), dim3(5, 6, 2), 0, out);
  for (int64_t i = 0; i < 3 * 2 * 4 * 60; i++) CHECK_EQ_I64(out[i], i / 60 * 1000 + i % 60);
  close_device(d);
}

/* A sum through shuffles, shared memory and barriers. */
template <int THREADS>
static __global__ void block_sum(double *out, const float *in, int64_t n) {
  __shared__ double partial[THREADS / 32];
  double sum = 0;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n; i += (int64_t)THREADS * gridDim.x) sum += in[i];
  for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    double all = 0;
    for (double p : partial) all += p;
    atomicAdd(out, all);
  }
}

TEST(sums_by_shuffles_and_shared_memory) {
  struct cuda_device *d = open_device();
  static float in[10000];
  double out = 0, want = 0;
  for (int i = 0; i < 10000; i++) want += (double)(in[i] = (float)(i % 97));
  CUDA_LAUNCH(d, (block_sum<256>), 7, 256, 0, &out, in, 10000);
  CHECK_CLOSE(out, want, 0);
  out = 0;
  CUDA_LAUNCH(d, (block_sum<1024>), 3, 1024, 0, &out, in, 9999);
  CHECK_CLOSE(out, want - (double)in[9999], 0);
  close_device(d);
}

static __global__ void exchanges(unsigned *out) {
  const int lane = (int)threadIdx.x;
  out[lane] = __ballot_sync(0xFFFFFFFFu, lane % 3 == 0);
  out[32 + lane] = (unsigned)__shfl_sync(0xFFFFFFFFu, lane * 10, lane + 5);
  out[64 + lane] = (unsigned)__shfl_down_sync(0xFFFFFFFFu, lane, 3, 8);
  out[96 + lane] = (unsigned)__shfl_up_sync(0xFFFFFFFFu, lane, 3);
  const unsigned half = lane < 16 ? 0xFFFFu : 0xFFFF0000u;
  out[128 + lane] = (unsigned)__shfl_xor_sync(half, lane, 8) + 100u * (unsigned)__any_sync(half, lane == 20);
}

TEST(exchanges_of_a_warp) {
  struct cuda_device *d = open_device();
  unsigned out[160];
  CUDA_LAUNCH(d, exchanges, 1, 32, 0, out);
  unsigned votes = 0;
  for (int l = 0; l < 32; l += 3) votes |= 1u << l;
  for (int l = 0; l < 32; l++) {
    CHECK_EQ_I64(out[l], votes);
    CHECK_EQ_I64(out[32 + l], (l + 5) % 32 * 10);
    CHECK_EQ_I64(out[64 + l], l % 8 + 3 < 8 ? l + 3 : l);
    CHECK_EQ_I64(out[96 + l], l >= 3 ? l - 3 : l);
    CHECK_EQ_I64(out[128 + l], (l ^ 8) + (l >= 16 ? 100 : 0));
  }
  close_device(d);
}

static __global__ void dynamic_reverse(int *data) {
  CUDA_DYNAMIC_SHARED(int, held);
  held[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}

TEST(dynamic_shared_memory) {
  struct cuda_device *d = open_device();
  int data[500];
  for (int i = 0; i < 500; i++) data[i] = i;
  CUDA_LAUNCH(d, dynamic_reverse, 1, 500, sizeof data, data);
  for (int i = 0; i < 500; i++) CHECK_EQ_I64(data[i], 499 - i);
  close_device(d);
}

/* Threads arrive at named barriers 1 and 2 in turn: one warp makes, one takes. */
static __global__ void hand_over(int *out) {
  __shared__ int held[32];
  for (int round = 0; round < 5; round++) {
    if (threadIdx.x < 32) {
      held[threadIdx.x] = round * 100 + (int)threadIdx.x;
      cuda_model_barrier(1, 64, false, __FILE__, __LINE__);
      cuda_model_barrier(2, 64, true, __FILE__, __LINE__);
    } else {
      cuda_model_barrier(1, 64, true, __FILE__, __LINE__);
      out[round * 32 + (int)threadIdx.x - 32] = held[63 - (int)threadIdx.x];
      cuda_model_barrier(2, 64, false, __FILE__, __LINE__);
    }
  }
}

TEST(named_barriers) {
  struct cuda_device *d = open_device();
  int out[160];
  CUDA_LAUNCH(d, hand_over, 1, 64, 0, out);
  for (int i = 0; i < 160; i++) CHECK_EQ_I64(out[i], i / 32 * 100 + 31 - i % 32);
  close_device(d);
}

/* ---- what it finds ----------------------------------------------------------- */

/* Neighbours through shared memory, with the barrier or without. */
static __global__ void neighbours(int *out, bool barrier) {
  __shared__ int held[256];
  held[threadIdx.x] = (int)threadIdx.x;
  if (barrier) __syncthreads();
  out[threadIdx.x] = held[(threadIdx.x + 100) % 256];
}

TEST(a_missing_barrier_shows) {
  struct cuda_device *d = open_device();
  for (int barrier = 0; barrier < 2; barrier++) {
    int out[256], wrong = 0;
    CUDA_LAUNCH(d, neighbours, 1, 256, 0, out, barrier != 0);
    for (int i = 0; i < 256; i++) wrong += out[i] != (i + 100) % 256;
    CHECK(barrier ? wrong == 0 : wrong > 0);
  }
  close_device(d);
}

static __global__ void some_leave() {
  if (threadIdx.x < 40) return;
  __syncthreads();
}
static __global__ void apart() {
  if (threadIdx.x < 32) __syncthreads();
  else cuda_model_barrier(3, 64, true, __FILE__, __LINE__);
}
static __global__ void lane_absent(int *out) {
  if (threadIdx.x != 7) out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1, 1);
}
static __global__ void reads_outsider(int *out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xFFFFu, 1, 20);
}
static __global__ void two_places(int *out) {
  if (threadIdx.x < 16)
    out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1, 1);
  else
    out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 2, 1);
}
static __global__ void writes_dynamic(int at) {
  CUDA_DYNAMIC_SHARED(char, held);
  if (threadIdx.x == 3) held[at] = 1;
}
static __global__ void writes_static(int at, int *out) {
  __shared__ int held[32];
  held[at] = 1;
  *out = held[0];
}
static __global__ void writes_global(char *p, int64_t at) { p[at] = 1; }
static __global__ void reads_vector(float *out, const float *in) {
  const float4 v = *reinterpret_cast<const float4 *>(in + 1);
  *out = v.x + v.w;
}
static __global__ void requires_small(int x) { CUDA_DEVICE_REQUIRE(x < 3, "x is large"); }

static void run_some_leave(struct cuda_device *d) { CUDA_LAUNCH(d, some_leave, 1, 64, 0); }
static void run_apart(struct cuda_device *d) { CUDA_LAUNCH(d, apart, dim3(1, 2), 64, 0); }
static void run_lane_absent(struct cuda_device *d) {
  int out[32];
  CUDA_LAUNCH(d, lane_absent, 1, 32, 0, out);
}
static void run_reads_outsider(struct cuda_device *d) {
  int out[32];
  CUDA_LAUNCH(d, reads_outsider, 1, 32, 0, out);
}
static void run_two_places(struct cuda_device *d) {
  int out[32];
  CUDA_LAUNCH(d, two_places, 1, 32, 0, out);
}
static void run_beyond(struct cuda_device *d) { CUDA_LAUNCH(d, writes_dynamic, 1, 32, 1000, 1001); }
static void run_far_beyond(struct cuda_device *d) { CUDA_LAUNCH(d, writes_dynamic, 1, 32, 1000, 3000); }
static void run_before(struct cuda_device *d) { CUDA_LAUNCH(d, writes_dynamic, 1, 32, 1000, -1); }
static void run_static_beyond(struct cuda_device *d) {
  int out;
  CUDA_LAUNCH(d, writes_static, 1, 1, 0, 32, &out);
}
static void run_no_blocks(struct cuda_device *d) { CUDA_LAUNCH(d, writes_dynamic, dim3(0), 32, 1000, 0); }
static void run_many_threads(struct cuda_device *d) { CUDA_LAUNCH(d, writes_dynamic, 1, 1025, 1000, 0); }
static void run_much_shared(struct cuda_device *d) { CUDA_LAUNCH(d, writes_dynamic, 1, 32, 232449, 0); }
static void run_global(struct cuda_device *d, size_t bytes, int64_t at) {
  struct error e = {};
  char *p = static_cast<char *>(d->device.k->allocate(&d->device, bytes, &e));
  CUDA_LAUNCH(d, writes_global, 1, 1, 0, p, at);
  d->device.k->release(&d->device, p);
}
static void run_global_within(struct cuda_device *d) { run_global(d, 5000, 4999); }
static void run_global_slack(struct cuda_device *d) { run_global(d, 5000, 5000); }
static void run_global_beyond(struct cuda_device *d) { run_global(d, 5000, 5120); }
static void run_misaligned(struct cuda_device *d) {
  alignas(16) float in[8] = {}, out;
  CUDA_LAUNCH(d, reads_vector, 1, 1, 0, &out, in);
}
static void run_requires(struct cuda_device *d) { CUDA_LAUNCH(d, requires_small, 1, 1, 0, 3); }

TEST(errors_name_kernel_block_and_thread) {
  CHECK_SAYS(run_some_leave, "cuda model: some_leave, block (0, 0, 0), thread (40, 0, 0): deadlock: waits for __syncthreads (tests/cuda_model_test.cu:");
  CHECK_SAYS(run_some_leave, "24 threads wait, 40 have ended");
  CHECK_SAYS(run_apart, "for a named barrier");
  CHECK_SAYS(run_lane_absent, "deadlock: waits for the other lanes of its warp");
  CHECK_SAYS(run_reads_outsider, "reads lane 20, which takes no part");
  CHECK_SAYS(run_two_places, "of one exchange");
  CHECK_SAYS(run_beyond, "wrote outside its 1000 bytes of dynamic shared memory, at byte 1001");
  CHECK_SAYS(run_far_beyond, "thread (3, 0, 0): an address outside its dynamic shared memory");
  CHECK_SAYS(run_before, "at byte -1");
  CHECK_SAYS(run_static_beyond, "writes_static, block (0, 0, 0), thread (0, 0, 0): undefined behaviour");
  CHECK_SAYS(run_no_blocks, "no grid has 0 x 1 x 1 blocks");
  CHECK_SAYS(run_many_threads, "no block has 1025");
  CHECK_SAYS(run_much_shared, "232449 bytes of dynamic shared memory");
  CHECK_STR(said(run_global_within), "");
  CHECK_SAYS(run_global_slack, "an allocation of 5000 bytes was written outside, at byte 5000");
  CHECK_SAYS(run_global_beyond, "writes_global, block (0, 0, 0), thread (0, 0, 0): an address outside every allocation");
  CHECK_SAYS(run_misaligned, "misaligned address");
  CHECK_SAYS(run_requires, "requires_small, block (0, 0, 0), thread (0, 0, 0): x is large");
}

int main(void) {
  RUN(every_thread_runs_once);
  RUN(sums_by_shuffles_and_shared_memory);
  RUN(exchanges_of_a_warp);
  RUN(dynamic_shared_memory);
  RUN(named_barriers);
  RUN(a_missing_barrier_shows);
  RUN(errors_name_kernel_block_and_thread);
  return test_report();
}
