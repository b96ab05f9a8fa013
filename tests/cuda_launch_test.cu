/* Launches: shared memory of a kernel's own and of its launch together. */
#include "tests/cuda_rig.h"

static const int OWN = 40 << 10, GIVEN = 16 << 10;

/* to[i] = i, by way of both. */
static __global__ void through_shared(int *to) {
  __shared__ int own[OWN / 4];
  CUDA_DYNAMIC_SHARED(int, given);
  for (int i = (int)threadIdx.x; i < OWN / 4; i += 256) own[i] = i;
  for (int i = (int)threadIdx.x; i < GIVEN / 4; i += 256) given[i] = OWN / 4 + i;
  __syncthreads();
  for (int i = (int)threadIdx.x; i < (OWN + GIVEN) / 4; i += 256) to[i] = i < OWN / 4 ? own[i] : given[i - OWN / 4];
}

/* Either is less than the 48 KiB that a launch has unasked, both are more. */
TEST(more_than_48_kib) {
  static const struct extent small = {64, 32, {2, 32, 4, 2, 24}, 96, 160, 100, {}};
  struct rig r = rig_open("sm90", &small);
  int *to = static_cast<int *>(rig_put(&r, NULL, OWN + GIVEN)), got[(OWN + GIVEN) / 4];
  CUDA_LAUNCH(cuda_of(r.gpu), through_shared, 1, 256, GIVEN, to);
  rig_synchronize(&r);
  rig_get(&r, got, to, sizeof got);
  for (int i = 0; i < (OWN + GIVEN) / 4; i++)
    if (got[i] != i) {
      FAIL("number %d is %d", i, got[i]);
      break;
    }
  rig_drop(&r, to);
  rig_close(&r);
}

/* More than a block may have is a fault that names the kernel; the model knows of dynamic memory alone. */
TEST(more_than_a_block_has) {
  if (!rig_on_gpu) return;
  struct error e = {};
  struct device *d = device_open("sm90", 1, &e);
  if (!d) rig_end(&e);
  CUDA_LAUNCH(cuda_of(d), through_shared, 1, 256, 200 << 10, static_cast<int *>(NULL));
  CHECK(!d->k->synchronize(d, &e) && strstr(e.message, "through_shared: "));
  d->k->close(d);
}

int main() {
  RUN(more_than_48_kib);
  RUN(more_than_a_block_has);
  return test_report();
}
