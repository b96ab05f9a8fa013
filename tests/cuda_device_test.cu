/* The CUDA device: memory, copies, and what it says where it cannot open.  The
 * machines are the host model's. */
#include <math.h>

#include "kernels/cuda/cuda.h"
#include "tests/test.h"

extern "C" {
#include "comm/exchange.h"
}

static const struct cuda_model_machine usual = cuda_model_machine;

static void check_refused(const char *backend, const char *message, const char *hint) {
  struct error e = {};
  CHECK(cuda_open(backend, 0, &e) == NULL);
  CHECK_EQ_I64(e.code, ERROR_DEVICE);
  if (!strstr(e.message, message) || !strstr(e.hint, hint)) FAIL("said \"%s\" (%s), expected \"%s\" (%s)", e.message, e.hint, message, hint);
  cuda_model_machine = usual;
}

TEST(machines_it_does_not_open_on) {
  cuda_model_machine.devices = 0;
  check_refused("sm90", "this machine shows no GPU", "nvidia-smi");
  cuda_model_machine.driver = 0;
  check_refused("sm90", "no NVIDIA driver", "run.backend");
  cuda_model_machine.driver = 12080;
  check_refused("sm90", "the driver is for CUDA 12.8, this program was built with 13.0", "newer NVIDIA driver");
  cuda_model_machine.devices = 4;
  struct error e = {};
  CHECK(cuda_open("sm90", 4, &e) == NULL);
  CHECK_STR(e.message, "backend \"sm90\": rank 4 of this host wants a GPU of its own, and it has 4");
  cuda_model_machine.major = 10;
  check_refused("sm90", "\"sm90\" runs on compute capability 9.0; GPU 0 is host model with 10.0", "sm100");
  check_refused("sm100", "\"sm100\" runs on compute capability 10.0; GPU 0 is host model with 9.0", "sm90");
  cuda_model_machine.major = 8;
  cuda_model_machine.minor = 6;
  check_refused("sm90", "with 8.6", "cpu");
  check_refused("sm110", "\"sm110\"", "");
}

/* Several ranks alone exchange something: neither one nor a device that no world has. */
TEST(memory_for_exchanges) {
  struct error e = {};
  struct device *d = cuda_model_open("sm90", &e);
  for (int world = 0; world < 3; world++) CHECK((comm_exchange_staging_bytes(d, world) > 0) == (world > 1) && (comm_exchange_own_bytes(d, world) > 0) == (world > 1));
  d->k->close(d);
}

TEST(memory_and_copies) {
  struct error e = {};
  struct device *d = cuda_model_open("sm90", &e);
  CHECK(d != NULL);
  if (!d) return;
  CHECK_STR(d->k->backend, "sm90");
  char text[256];
  d->k->describe(d, text, sizeof text);
  CHECK_STR(text, "GPU 0: host model, 4 multiprocessors, CUDA 13.0 on a driver for 13.0, contractions by the CPU backend, "
                  "attention without tensor cores but in bf16 of head_dim 64 and 128");
  char *host = static_cast<char *>(d->k->allocate_host(d, 100, &e)), back[100];
  for (int i = 0; i < 100; i++) host[i] = (char)i;
  void *p = d->k->allocate(d, 100, &e);
  CHECK(p && reinterpret_cast<uintptr_t>(p) % 256 == 0);
  d->k->upload(d, p, host, 100);
  d->k->clear(d, static_cast<char *>(p) + 40, 7);
  d->k->download(d, back, p, 100);
  CHECK(d->k->synchronize(d, &e));
  for (int i = 0; i < 100; i++) CHECK_EQ_I64(back[i], i >= 40 && i < 47 ? 0 : i);
  d->k->release(d, p);
  d->k->release_host(d, host);
  p = d->k->allocate(d, 0, &e);
  CHECK(p != NULL);
  d->k->release(d, p);
  cuda_model_machine.memory = 1000300, cuda_model_machine.own = 300;
  p = d->k->allocate(d, 400000, &e);
  CHECK(d->k->allocate(d, 600001, &e) == NULL);
  CHECK_EQ_I64(e.code, ERROR_SYSTEM);
  CHECK_STR(e.message, "no GPU memory for 600001 bytes: 600000 of 1000300 are free");
  int64_t used = 0, total = 0;
  CHECK(d->k->memory(d, &used, &total, &e) && used == 400300 && total == 1000300);
  d->k->release(d, p);
  cuda_model_machine = usual;
  d->k->close(d);
}

TEST(events) {
  struct error e = {};
  struct device *d = cuda_model_open("sm90", &e);
  CHECK(d && d->k->make_events(d, 5, &e) && d->k->make_events(d, 3, &e));
  for (int i = 0; i < 3; i++) d->k->record_event(d, i);
  CHECK(d->k->synchronize(d, &e));
  const double a = d->k->seconds_between(d, 0, 1), b = d->k->seconds_between(d, 1, 2), both = d->k->seconds_between(d, 0, 2);
  CHECK(a >= 0 && b >= 0 && fabs(a + b - both) < 1e-9);
  CHECK(d->k->synchronize(d, &e));
  d->k->close(d);
}

static __global__ void nothing() {}

/* The first fault is kept, with its kernel. */
TEST(faults) {
  struct error e = {};
  struct device *d = cuda_model_open("sm100", &e);
  CHECK(d != NULL);
  if (!d) return;
  CUDA_LAUNCH(cuda_of(d), nothing, 1, 1, 0);
  cuda_model_machine.fault = cudaErrorIllegalAddress;
  CHECK(!d->k->synchronize(d, &e));
  CHECK_EQ_I64(e.code, ERROR_DEVICE);
  CHECK_STR(e.message, "GPU 0: an illegal memory access was encountered (cudaErrorIllegalAddress) in what was launched up to nothing");
  cuda_keep_fault(cuda_of(d), cudaErrorMemoryAllocation, "first");
  cuda_keep_fault(cuda_of(d), cudaErrorNoDevice, "second");
  CHECK(!d->k->synchronize(d, &e));
  CHECK_STR(e.message, "GPU 0: first: out of memory (cudaErrorMemoryAllocation)");
  cuda_model_machine = usual;
  d->k->close(d);
}

TEST(what_it_refuses) {
  struct error e = {};
  struct device *d = cuda_model_open("sm90", &e);
  CHECK(d != NULL);
  if (!d) return;
  struct encoding c = {FORMAT_BF16, BLOCK_NONE, SCALE_NONE, ROUND_NEAREST, HADAMARD_NONE, 0};
  CHECK(d->k->refuse_encoding(d, &c, VIEW_ROW) == NULL);
  c.format = FORMAT_F32;
  CHECK(d->k->refuse_encoding(d, &c, VIEW_COLUMN) == NULL);
  c.hadamard = HADAMARD_PLAIN_16;
  CHECK(d->k->refuse_encoding(d, &c, VIEW_ROW) != NULL);
  c = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE, 0};
  CHECK(d->k->refuse_encoding(d, &c, VIEW_ROW) != NULL);
  struct attention_formats f = {};
  f.qk = FORMAT_E4M3;
  CHECK(d->k->refuse_attention(d, &f, ATTENTION_PART_QK, NULL) != NULL);
  d->k->close(d);
}

int main(void) {
  RUN(machines_it_does_not_open_on);
  RUN(memory_for_exchanges);
  RUN(memory_and_copies);
  RUN(events);
  RUN(faults);
  RUN(what_it_refuses);
  return test_report();
}
