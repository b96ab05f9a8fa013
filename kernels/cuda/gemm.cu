/* `contract` on the GPUs is to be cuBLASLt's.  Until it is, no CUDA backend opens. */
#include "kernels/cuda/cuda.h"

extern "C" {

bool cuda_contract_open(struct cuda_device *d, struct error *e) {
  error_set(e, ERROR_DEVICE, "backend \"%s\" has no contract yet", d->device.k->backend);
  return error_hint(e, "set run.backend to cpu");
}

void cuda_contract_close(struct cuda_device *) {}

void cuda_contract_describe(const struct cuda_device *, char *text, int size) {
  if (size > 0) text[0] = 0;
}

int64_t cuda_contract_scratch_bytes(const struct cuda_device *, const struct extent *) { return 0; }

void cuda_contract(struct device *, struct matrix *, const struct operand *, const struct operand *, const struct matrix *) {
  CUDA_REQUIRE(false, "no device of this backend was opened");
}
}
