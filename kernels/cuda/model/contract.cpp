/* In the host model `contract` is the CPU's: cuBLASLt is not modelled. */
#include "kernels/cuda/cuda.h"

#include <stdio.h>

#include <set>
#include <string>

struct cuda_gemm {
  struct device *cpu;
  std::set<std::string> products; /* in words */
};

bool cuda_contract_open(struct cuda_device *d, struct error *e) {
  struct device *cpu = device_open("cpu", 1, e);
  if (!cpu) return false;
  d->gemm = new cuda_gemm{cpu, {}};
  return true;
}

void cuda_contract_close(struct cuda_device *d) {
  if (!d->gemm) return;
  d->gemm->cpu->k->close(d->gemm->cpu);
  delete d->gemm;
}

void cuda_contract_describe(const struct cuda_device *, char *text, int size) {
  snprintf(text, static_cast<size_t>(size), "the CPU backend");
}

void cuda_contract_choices(const struct device *d, void (*take)(void *context, const char *contraction, const char *choice), void *context) {
  for (const std::string &product : cuda_of(d)->gemm->products) take(context, product.c_str(), "the CPU backend");
}

int64_t cuda_contract_scratch_bytes(const struct cuda_device *d, const struct extent *x) {
  if (d->gemm) return d->gemm->cpu->k->scratch_bytes(d->gemm->cpu, x);
  struct error e = {};
  struct device *cpu = device_open("cpu", 1, &e); /* of a plan */
  const int64_t bytes = cpu ? cpu->k->scratch_bytes(cpu, x) : 0;
  if (cpu) cpu->k->close(cpu);
  return bytes;
}

void cuda_contract(struct device *dd, struct matrix *out, const struct operand *a, const struct operand *b, const struct matrix *add) {
  struct cuda_device *d = cuda_of(dd);
  struct device *cpu = d->gemm->cpu;
  d->gemm->products.insert("[" + std::to_string(out->rows) + ", " + std::to_string(out->cols) + ", " + std::to_string(a->cols) + "]");
  cuda_model_finish(d->stream); /* the CPU's is not put off */
  cpu->k->set_scratch(cpu, d->scratch, d->scratch_bytes);
  cuda_model_enter();
  cpu->k->contract(cpu, out, a, b, add);
  cuda_model_leave();
}
