/* The CUDA devices: their table, memory, stream, faults, start and end. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"

extern "C" {
#include "base/log.h"
}

namespace {

void describe(const struct device *d, char *text, int size) {
  char contract[128];
  cuda_contract_describe(cuda_of(d), contract, sizeof contract);
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  snprintf(text, static_cast<size_t>(size), "GPU %d: %s, %d multiprocessors, CUDA %d.%d on a driver for %d.%d, contractions by %s, attention %s",
           cuda_of(d)->ordinal, cuda_of(d)->name, cuda_of(d)->sm_count, runtime / 1000, runtime / 10 % 100, driver / 1000,
           driver / 10 % 100, contract,
           strcmp(d->k->backend, "sm90") == 0 ? "without tensor cores but in bf16 of head_dim 64 and 128" : "without tensor cores");
}

int64_t scratch_bytes(const struct device *d, const struct extent *x) {
  const int64_t group[] = {cuda_contract_scratch_bytes(cuda_of(d), x), cuda_producer_scratch_bytes(x), cuda_attention_scratch_bytes(x),
                           sm90_attention_forward_scratch_bytes(x), sm90_attention_backward_scratch_bytes(cuda_of(d), x)};
  int64_t most = 0;
  for (int64_t bytes : group)
    if (bytes > most) most = bytes;
  return most;
}

void set_scratch(struct device *d, void *scratch, int64_t bytes) {
  cuda_of(d)->scratch = static_cast<char *>(scratch);
  cuda_of(d)->scratch_bytes = bytes;
}

void no_memory(struct error *e, size_t bytes) {
  size_t available = 0, total = 0;
  if (cudaMemGetInfo(&available, &total) != cudaSuccess) available = total = 0;
  error_set(e, ERROR_SYSTEM, "no GPU memory for %zu bytes: %zu of %zu are free", bytes, available, total);
  error_hint(e, "make the micro-batch or the model smaller, recompute more, or end what else holds this GPU's memory (nvidia-smi)");
}

void *allocate(struct device *d, size_t bytes, struct error *e) {
  (void)d;
  void *p = NULL;
  const cudaError_t code = cudaMalloc(&p, bytes ? bytes : 1);
  if (code == cudaSuccess) return p;
  (void)cudaGetLastError(); /* this one is reported here */
  if (code == cudaErrorMemoryAllocation) no_memory(e, bytes);
  else error_set(e, ERROR_DEVICE, "cudaMalloc of %zu bytes: %s (%s)", bytes, cudaGetErrorString(code), cudaGetErrorName(code));
  return NULL;
}

void release(struct device *d, void *p) { cuda_keep_fault(cuda_of(d), cudaFree(p), "cudaFree"); }

/* Of CUDA 13's context, of kernels' code and of cuBLASLt's, as seen on an H200. */
const int64_t OWN_BYTES = INT64_C(680) << 20;
/* All of Llama 8B's 32 heads over 8192 tokens (2.16 GB) are a pass of attention's backward. */
const int64_t KEPT_MOST = INT64_C(2304) << 20;

bool memory(struct device *d, int64_t *used, int64_t *total, struct error *e) {
  size_t available = 0, all = 0;
  const cudaError_t code = cudaMemGetInfo(&available, &all);
  if (code != cudaSuccess)
    return error_set(e, ERROR_DEVICE, "GPU %d: cudaMemGetInfo: %s (%s)", cuda_of(d)->ordinal, cudaGetErrorString(code), cudaGetErrorName(code));
  *used = static_cast<int64_t>(all - available);
  *total = static_cast<int64_t>(all);
  return true;
}

void clear(struct device *d, void *p, size_t bytes) {
  if (bytes) cuda_keep_fault(cuda_of(d), cudaMemsetAsync(p, 0, bytes, cuda_of(d)->stream), "clear");
}

void upload(struct device *d, void *to_device, const void *from_host, size_t bytes) {
  if (bytes)
    cuda_keep_fault(cuda_of(d), cudaMemcpyAsync(to_device, from_host, bytes, cudaMemcpyHostToDevice, cuda_of(d)->stream), "upload");
}

void download(struct device *d, void *to_host, const void *from_device, size_t bytes) {
  if (bytes)
    cuda_keep_fault(cuda_of(d), cudaMemcpyAsync(to_host, from_device, bytes, cudaMemcpyDeviceToHost, cuda_of(d)->stream), "download");
}

void *allocate_host(struct device *d, size_t bytes, struct error *e) {
  (void)d;
  void *p = NULL;
  const cudaError_t code = cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocDefault);
  if (code == cudaSuccess) return p;
  (void)cudaGetLastError();
  error_set(e, ERROR_SYSTEM, "no pinned memory for %zu bytes: %s (%s)", bytes, cudaGetErrorString(code), cudaGetErrorName(code));
  error_hint(e, "free memory of this host, or raise the limit of locked memory (ulimit -l)");
  return NULL;
}

void release_host(struct device *d, void *p) { cuda_keep_fault(cuda_of(d), cudaFreeHost(p), "cudaFreeHost"); }

/* An error of a running kernel is only seen here, after others were launched. */
bool synchronize(struct device *dd, struct error *e) {
  struct cuda_device *d = cuda_of(dd);
  const cudaError_t kept = d->fault, code = cudaStreamSynchronize(d->stream);
  if (kept == cudaSuccess && code == cudaSuccess) return true;
  const cudaError_t first = kept != cudaSuccess ? kept : code;
  if (kept != cudaSuccess)
    error_set(e, ERROR_DEVICE, "GPU %d: %s: %s (%s)", d->ordinal, d->fault_at, cudaGetErrorString(first), cudaGetErrorName(first));
  else
    error_set(e, ERROR_DEVICE, "GPU %d: %s (%s) in what was launched up to %s", d->ordinal, cudaGetErrorString(first),
              cudaGetErrorName(first), d->last_kernel ? d->last_kernel : "the first kernel");
  error_hint(e, "CUDA_LAUNCH_BLOCKING=1 names the kernel; the state on this GPU is lost: resume from a checkpoint");
  return false;
}

void release_events(struct cuda_device *d) {
  for (int i = 0; i < d->n_events; i++) (void)cudaEventDestroy(d->event[i]);
  free(d->event);
  d->event = NULL;
  d->n_events = 0;
}

bool make_events(struct device *dd, int n, struct error *e) {
  struct cuda_device *d = cuda_of(dd);
  release_events(d);
  d->event = static_cast<cudaEvent_t *>(calloc(static_cast<size_t>(n), sizeof *d->event));
  if (!d->event) return error_set(e, ERROR_SYSTEM, "no memory for %d events", n);
  while (d->n_events < n) {
    const cudaError_t code = cudaEventCreateWithFlags(&d->event[d->n_events], cudaEventDefault);
    if (code != cudaSuccess)
      return error_set(e, ERROR_DEVICE, "GPU %d: cudaEventCreateWithFlags: %s (%s)", d->ordinal, cudaGetErrorString(code), cudaGetErrorName(code));
    d->n_events++;
  }
  return true;
}

void record_event(struct device *d, int event) {
  cuda_keep_fault(cuda_of(d), cudaEventRecord(cuda_of(d)->event[event], cuda_of(d)->stream), "cudaEventRecord");
}

double seconds_between(struct device *d, int from, int to) {
  float milliseconds = 0;
  cuda_keep_fault(cuda_of(d), cudaEventElapsedTime(&milliseconds, cuda_of(d)->event[from], cuda_of(d)->event[to]), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

void close_device(struct device *dd) {
  if (!dd) return;
  struct cuda_device *d = cuda_of(dd);
  release_events(d);
  cuda_contract_close(d);
  if (d->stream) (void)cudaStreamDestroy(d->stream);
  free(d);
}

/* What both backends have. */
struct kernels shared_table(const char *backend) {
  struct kernels k = {};
  k.backend = backend;
  k.links = &cuda_links;
  k.describe = describe;
  k.choices = cuda_contract_choices;
  k.refuse_encoding = cuda_refuse_encoding;
  k.refuse_attention = cuda_refuse_attention;
  k.refuse_extent = cuda_refuse_extent;
  k.scratch_bytes = scratch_bytes;
  k.set_scratch = set_scratch;
  k.allocate = allocate;
  k.release = release;
  k.memory = memory;
  k.own_bytes = OWN_BYTES;
  k.allocate_host = allocate_host;
  k.release_host = release_host;
  k.clear = clear;
  k.upload = upload;
  k.download = download;
  k.synchronize = synchronize;
  k.make_events = make_events;
  k.record_event = record_event;
  k.seconds_between = seconds_between;
  k.quantise = cuda_quantise;
  k.embedding_forward = cuda_embedding_forward;
  k.embedding_backward = cuda_embedding_backward;
  k.add_rmsnorm_forward = cuda_add_rmsnorm_forward;
  k.add_rmsnorm_forward_cast = cuda_add_rmsnorm_forward_cast;
  k.add_rmsnorm_backward = cuda_add_rmsnorm_backward;
  k.rope_forward = cuda_rope_forward;
  k.rope_backward = cuda_rope_backward;
  k.swiglu_forward = cuda_swiglu_forward;
  k.swiglu_backward = cuda_swiglu_backward;
  k.attention_forward = cuda_attention_forward;
  k.attention_backward = cuda_attention_backward;
  k.contract = cuda_contract;
  k.cross_entropy = cuda_cross_entropy;
  k.cross_entropy_within = cuda_cross_entropy_within;
  k.adamw_update = cuda_adamw_update;
  k.measure = cuda_measure;
  k.sum = cuda_sum;
  k.close = close_device;
  return k;
}

struct kernels hopper_table() {
  struct kernels k = shared_table("sm90");
  k.refuse_extent = sm90_refuse_extent;
  k.attention_forward = sm90_choose_attention_forward;
  k.attention_backward = sm90_choose_attention_backward;
  k.attention_rope_backward = sm90_choose_attention_rope_backward;
  return k;
}

const struct kernels sm90_table = hopper_table();
const struct kernels sm100_table = shared_table("sm100");

bool choose_gpu(struct cuda_device *d, const char *backend, struct error *e) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  if (code == cudaErrorInsufficientDriver) {
    if (driver == 0) {
      error_set(e, ERROR_DEVICE, "backend \"%s\": this machine has no NVIDIA driver", backend);
      return error_hint(e, "run on a machine with a GPU, or set run.backend to cpu");
    }
    error_set(e, ERROR_DEVICE, "backend \"%s\": the driver is for CUDA %d.%d, this program was built with %d.%d", backend, driver / 1000,
              driver / 10 % 100, runtime / 1000, runtime / 10 % 100);
    return error_hint(e, "install a newer NVIDIA driver, or build with an older CUDA toolkit");
  }
  if (code == cudaErrorNoDevice || (code == cudaSuccess && count == 0)) {
    error_set(e, ERROR_DEVICE, "backend \"%s\": this machine shows no GPU", backend);
    return error_hint(e, "see what nvidia-smi lists and what CUDA_VISIBLE_DEVICES hides, or set run.backend to cpu");
  }
  if (code != cudaSuccess)
    return error_set(e, ERROR_DEVICE, "backend \"%s\": counting GPUs: %s (%s)", backend, cudaGetErrorString(code), cudaGetErrorName(code));
  if (d->ordinal < 0 || d->ordinal >= count) {
    error_set(e, ERROR_DEVICE, "backend \"%s\": rank %d of this host wants a GPU of its own, and it has %d", backend, d->ordinal, count);
    return error_hint(e, "start one rank a GPU, and let each see all of its host's GPUs");
  }
  struct cudaDeviceProp p;
  cudaError_t got = cudaGetDeviceProperties(&p, d->ordinal);
  if (got == cudaSuccess) got = cudaSetDevice(d->ordinal);
  if (got == cudaSuccess) got = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
  if (got != cudaSuccess) {
    (void)cudaGetLastError();
    error_set(e, ERROR_DEVICE, "backend \"%s\": GPU %d does not open: %s (%s)", backend, d->ordinal, cudaGetErrorString(got),
              cudaGetErrorName(got));
    return error_hint(e, "see with nvidia-smi whether another process holds it, or whether it is in a fault");
  }
  const int wanted = d->device.k == &sm90_table ? 9 : 10;
  if (p.major != wanted || p.minor != 0) {
    error_set(e, ERROR_DEVICE, "backend \"%s\" runs on compute capability %d.0; GPU %d is %s with %d.%d", backend, wanted, d->ordinal, p.name,
              p.major, p.minor);
    return error_hint(e, "set run.backend to %s", p.minor == 0 && p.major == 9    ? "sm90"
                                                  : p.minor == 0 && p.major == 10 ? "sm100"
                                                                                  : "cpu: no backend is for this GPU");
  }
  snprintf(d->name, sizeof d->name, "%s", p.name);
  d->sm_count = p.multiProcessorCount;
  return true;
}

struct cuda_device *make(const char *backend, int ordinal, struct error *e) {
  const struct kernels *table = strcmp(backend, "sm90") == 0 ? &sm90_table : strcmp(backend, "sm100") == 0 ? &sm100_table : NULL;
  if (!table) {
    error_set(e, ERROR_DEVICE, "backend \"%s\" is no CUDA backend", backend);
    return NULL;
  }
  struct cuda_device *d = static_cast<struct cuda_device *>(calloc(1, sizeof *d));
  if (!d) {
    error_set(e, ERROR_SYSTEM, "no memory for the %s device", backend);
    return NULL;
  }
  d->device.k = table;
  d->attention_kept_most = table == &sm90_table ? KEPT_MOST : 0;
  d->ordinal = ordinal;
  return d;
}

}  // namespace

extern "C" struct device *cuda_open(const char *backend, int ordinal, struct error *e) {
  struct cuda_device *d = make(backend, ordinal, e);
  if (!d) return NULL;
  if (choose_gpu(d, backend, e) && cuda_contract_open(d, e)) return &d->device;
  close_device(&d->device);
  return NULL;
}

extern "C" struct device *cuda_open_plan(const char *backend, struct error *e) {
  struct cuda_device *d = make(backend, -1, e);
  return d ? &d->device : NULL;
}

#ifdef FP4D_CUDA_MODEL
extern "C" struct device *cuda_model_open_rank(const char *backend, int ordinal, struct error *e) {
  cuda_model_machine.major = strcmp(backend, "sm100") == 0 ? 10 : 9;
  return cuda_open(backend, ordinal, e);
}

extern "C" struct device *cuda_model_open(const char *backend, struct error *e) { return cuda_model_open_rank(backend, 0, e); }
#endif

extern "C" const char *cuda_refuse_encoding(const struct device *d, const struct encoding *e, enum view view) {
  (void)d;
  (void)view;
  if (!encoding_is_plain(e)) return "this backend executes bf16 and fp32 operands alone";
  if (e->block != BLOCK_NONE || e->scale != SCALE_NONE) return "a plain format has no blocks and no scales";
  if (e->rounding != ROUND_NEAREST) return "a plain format is rounded to nearest only";
  if (e->hadamard != HADAMARD_NONE) return "a plain format takes no transform";
  return NULL;
}

extern "C" const char *cuda_refuse_attention(const struct device *d, const struct attention_formats *f, enum attention_part part,
                                             const struct attention_shape *s) {
  (void)d;
  (void)f;
  (void)part;
  (void)s;
  return "this backend executes attention in bf16 alone";
}

/* The limits of kernels/cuda/attention_plain.cu. */
extern "C" const char *cuda_refuse_extent(const struct device *d, const struct extent *x, enum dtype activations) {
  (void)d;
  (void)activations;
  const struct attention_shape *s = &x->attention;
  if (s->head_dim > 256) return "a head_dim above 256";
  if (s->n_heads > 65535 || s->batch > 65535 / s->n_heads) return "local_batch x n_heads above 65535";
  return NULL;
}

extern "C" void cuda_defect(const char *function, const char *what) {
  log_error("defect in %s: %s", function, what);
  abort();
}
