/* Links over NCCL: a communicator, two streams beside the operations' own, and events.
 *
 *   wire     what NCCL moves, one exchange after another
 *   adding   sums of what has arrived, while the next round is on the wire
 *
 * The communicator is a non-blocking one (config.blocking = 0): a call begins something, and
 * `state` says when the library has launched it.  Until then no event may be recorded behind
 * it, so each of transfer and gather is followed by looks at `state`.
 *
 * NCCL's own reductions add in an order of its choice, so sums are taken here: every rank's
 * values of this rank's elements come into the staging memory, and a kernel adds them. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/cuda/fabric.h"
#include "kernels/cuda/names.h"
#include "kernels/cuda/nccl.h"
#include "kernels/cuda/rows.cuh"

enum { HALVES = 2, WAITS = 256, SUM_THREADS = 256 };

struct link {
  struct cuda_device *device;
  struct cuda_device lane; /* the device as this link's thread sees it: the stream `adding`, faults of its own */
  const struct cuda_nccl *nccl;
  struct nccl_comm *comm;
  int rank, world, most;
  cudaStream_t wire, adding;
  cudaEvent_t arrived[HALVES], summed[HALVES];
  cudaEvent_t *computed, *done; /* [most] */
  /* Pairs around each wait of the operations' stream: [first, last) are not added up yet. */
  cudaEvent_t before[WAITS], after[WAITS];
  int64_t first, last;
  double waited;
};

namespace {

bool cuda_failed(const struct link *l, cudaError_t code, const char *what, struct error *e) {
  (void)cudaGetLastError();
  return error_set(e, ERROR_DEVICE, "GPU %d: %s: %s (%s)", l->device->ordinal, what, cudaGetErrorString(code), cudaGetErrorName(code));
}

/* Where the device is in a fault the library only passes on that one of its calls failed. */
bool nccl_failed(const struct link *l, int result, const char *what, struct error *e) {
  const cudaError_t fault = l->wire ? cudaStreamQuery(l->wire) : cudaSuccess;
  if (fault != cudaSuccess && fault != cudaErrorNotReady) return cuda_failed(l, fault, what, e);
  (void)cudaGetLastError();
  const char *last = l->comm ? l->nccl->GetLastError(l->comm) : NULL;
  error_set(e, ERROR_COMMUNICATION, "NCCL: %s: %s%s%.200s", what, l->nccl->GetErrorString(result), last && last[0] ? ": " : "", last ? last : "");
  return error_hint(e, "NCCL_DEBUG=INFO has the library say more");
}

bool nccl_good(int result) { return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS; }

int nccl_type(enum dtype t) { return t == DTYPE_BF16 ? NCCL_BFLOAT16 : NCCL_FLOAT32; }

/* ---- joining and leaving ------------------------------------------------------------ */

void identity_of(int ordinal, char text[LINK_NAME]) {
  struct cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, ordinal) != cudaSuccess) {
    (void)cudaGetLastError();
    snprintf(text, LINK_NAME, "unknown");
    return;
  }
  cuda_uuid_text(p.uuid.bytes, text);
}

void identity(const struct device *d, char text[LINK_NAME]) { identity_of(cuda_of(d)->ordinal, text); }

void fabric(const struct device *d, struct gpu_fabric *out) {
  char text[LINK_NAME];
  identity(d, text);
  cuda_fabric(text, out);
}

int reaches(const struct device *d, char (*wanted)[LINK_NAME], int n) {
  const int own = cuda_of(d)->ordinal;
  int count = 0, found = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return -1;
  for (int other = 0; other < count; other++) {
    char text[LINK_NAME];
    int can = 0;
    identity_of(other, text);
    if (other == own || cudaDeviceCanAccessPeer(&can, own, other) != cudaSuccess || !can) continue;
    for (int i = 0; i < n; i++) found += strcmp(text, wanted[i]) == 0;
  }
  (void)cudaGetLastError();
  return found;
}

bool make_id(char id[LINK_ID_BYTES], struct error *e) {
  static_assert((int)LINK_ID_BYTES == (int)NCCL_ID_BYTES, "a world's name is NCCL's");
  const struct cuda_nccl *library = cuda_nccl_open(e);
  struct nccl_id made;
  if (!library) return false;
  const int result = library->GetUniqueId(&made);
  if (result != NCCL_SUCCESS) {
    error_set(e, ERROR_COMMUNICATION, "NCCL: ncclGetUniqueId: %s", library->GetErrorString(result));
    return error_hint(e, "NCCL_SOCKET_IFNAME names the network interface that hosts reach each other by");
  }
  memcpy(id, made.internal, LINK_ID_BYTES);
  return true;
}

bool make_event(struct link *l, cudaEvent_t *event, unsigned flags, struct error *e) {
  const cudaError_t code = cudaEventCreateWithFlags(event, flags);
  return code == cudaSuccess || cuda_failed(l, code, "cudaEventCreateWithFlags", e);
}

bool make_streams(struct link *l, struct error *e) {
  int least = 0, greatest = 0;
  cudaError_t code = cudaSetDevice(l->device->ordinal);
  if (code == cudaSuccess) code = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (code == cudaSuccess) code = cudaStreamCreateWithPriority(&l->wire, cudaStreamNonBlocking, greatest);
  if (code == cudaSuccess) code = cudaStreamCreateWithPriority(&l->adding, cudaStreamNonBlocking, greatest);
  if (code != cudaSuccess) return cuda_failed(l, code, "streams of exchanges", e);
  bool good = true;
  for (int h = 0; good && h < HALVES; h++)
    good = make_event(l, &l->arrived[h], cudaEventDisableTiming, e) && make_event(l, &l->summed[h], cudaEventDisableTiming, e);
  for (int s = 0; good && s < l->most; s++)
    good = make_event(l, &l->computed[s], cudaEventDisableTiming, e) && make_event(l, &l->done[s], cudaEventDisableTiming, e);
  for (int w = 0; good && w < WAITS; w++)
    good = make_event(l, &l->before[w], cudaEventDefault, e) && make_event(l, &l->after[w], cudaEventDefault, e);
  return good;
}

void drop_event(cudaEvent_t event) {
  if (event) (void)cudaEventDestroy(event);
}

void discard(struct link *l) {
  for (int h = 0; h < HALVES; h++) drop_event(l->arrived[h]), drop_event(l->summed[h]);
  for (int s = 0; s < l->most && l->done; s++) drop_event(l->computed[s]), drop_event(l->done[s]);
  for (int w = 0; w < WAITS; w++) drop_event(l->before[w]), drop_event(l->after[w]);
  if (l->wire) (void)cudaStreamDestroy(l->wire);
  if (l->adding) (void)cudaStreamDestroy(l->adding);
  (void)cudaGetLastError();
  free(l->computed);
  free(l->done);
  free(l);
}

struct link *open_link(struct device *d, const char id[LINK_ID_BYTES], int rank, int world, int most, struct error *e) {
  const struct cuda_nccl *library = cuda_nccl_open(e);
  if (!library) return NULL;
  struct link *l = static_cast<struct link *>(calloc(1, sizeof *l));
  if (l) {
    l->computed = static_cast<cudaEvent_t *>(calloc((size_t)most, sizeof *l->computed));
    l->done = static_cast<cudaEvent_t *>(calloc((size_t)most, sizeof *l->done));
  }
  if (!l || !l->computed || !l->done) {
    if (l) free(l->computed), free(l->done), free(l);
    error_set(e, ERROR_SYSTEM, "out of memory for exchanges");
    return NULL;
  }
  l->device = cuda_of(d);
  l->nccl = library;
  l->rank = rank;
  l->world = world;
  l->most = most;
  if (!make_streams(l, e)) {
    discard(l);
    return NULL;
  }
  l->lane = *l->device;
  l->lane.stream = l->adding;
  l->lane.fault = cudaSuccess;
  struct nccl_id name;
  memcpy(name.internal, id, sizeof name.internal);
  struct nccl_config config = {sizeof config, (unsigned)NCCL_CONFIG_MAGIC, NCCL_CONFIG_VERSION, 0, NCCL_UNDEFINED, NCCL_UNDEFINED, NCCL_UNDEFINED,
                               NULL, NCCL_UNDEFINED};
  const int result = library->CommInitRankConfig(&l->comm, world, name, rank, &config);
  if (nccl_good(result)) return l;
  nccl_failed(l, result, "ncclCommInitRankConfig", e);
  discard(l);
  return NULL;
}

enum link_state state(struct link *l, struct error *e) {
  int result = NCCL_SUCCESS;
  const int asked = l->nccl->CommGetAsyncError(l->comm, &result);
  if (asked != NCCL_SUCCESS) result = asked;
  if (result == NCCL_SUCCESS) return LINK_IDLE;
  if (result == NCCL_IN_PROGRESS) return LINK_BUSY;
  nccl_failed(l, result, "asynchronous error", e);
  return LINK_FAILED;
}

void abort_link(struct link *l) { (void)l->nccl->CommAbort(l->comm); }

void close_link(struct link *l, bool finish) {
  if (finish) {
    struct error ignored;
    if (nccl_good(l->nccl->CommFinalize(l->comm)))
      while (state(l, &ignored) == LINK_BUSY) usleep(1000);
    (void)l->nccl->CommDestroy(l->comm);
  } else {
    abort_link(l);
  }
  discard(l);
}

/* ---- order beside the operations ------------------------------------------------------- */

void ready(struct link *l, int slot) { cuda_keep_fault(l->device, cudaEventRecord(l->computed[slot], l->device->stream), "cudaEventRecord"); }

bool begin(struct link *l, int slot, struct error *e) {
  const cudaError_t code = cudaStreamWaitEvent(l->wire, l->computed[slot], 0);
  return code == cudaSuccess || cuda_failed(l, code, "cudaStreamWaitEvent", e);
}

bool end(struct link *l, int slot, struct error *e) {
  cudaError_t code = cudaSuccess;
  for (int h = 0; code == cudaSuccess && h < HALVES; h++) code = cudaStreamWaitEvent(l->wire, l->summed[h], 0);
  if (code == cudaSuccess) code = cudaEventRecord(l->done[slot], l->wire);
  return code == cudaSuccess || cuda_failed(l, code, "cudaEventRecord", e);
}

/* Pairs whose second event has come; of all, where there is no place for another. */
void add_waits(struct link *l) {
  for (; l->first < l->last; l->first++) {
    const int64_t w = l->first % WAITS;
    float milliseconds = 0;
    if (l->last - l->first == WAITS) cuda_keep_fault(l->device, cudaEventSynchronize(l->after[w]), "cudaEventSynchronize");
    if (cudaEventElapsedTime(&milliseconds, l->before[w], l->after[w]) != cudaSuccess) {
      (void)cudaGetLastError(); /* not yet; a fault of the device is `synchronize`'s to report */
      return;
    }
    l->waited += (double)milliseconds * 1e-3;
  }
}

void follow(struct link *l, int slot) {
  if (l->last - l->first == WAITS) add_waits(l);
  const int64_t w = l->last++ % WAITS;
  const cudaStream_t s = l->device->stream;
  cuda_keep_fault(l->device, cudaEventRecord(l->before[w], s), "cudaEventRecord");
  cuda_keep_fault(l->device, cudaStreamWaitEvent(s, l->done[slot], 0), "cudaStreamWaitEvent");
  cuda_keep_fault(l->device, cudaEventRecord(l->after[w], s), "cudaEventRecord");
}

double waited(struct link *l) {
  add_waits(l);
  return l->waited;
}

/* Whether an event has come; anything but yes and no is an error. */
bool come(const struct link *l, cudaEvent_t event, bool *yes, struct error *e) {
  const cudaError_t code = cudaEventQuery(event);
  *yes = code == cudaSuccess;
  if (code == cudaErrorNotReady) (void)cudaGetLastError();
  return *yes || code == cudaErrorNotReady || cuda_failed(l, code, "an exchange", e);
}

bool look(struct link *l, int slot, bool *computed, bool *done, struct error *e) {
  return come(l, l->computed[slot], computed, e) && come(l, l->done[slot], done, e);
}

/* ---- what is moved ------------------------------------------------------------------------ */

bool transfer(struct link *l, int half, const struct link_transfer *t, int n, struct error *e) {
  const struct cuda_nccl *k = l->nccl;
  const cudaError_t code = cudaStreamWaitEvent(l->wire, l->summed[half], 0);
  if (code != cudaSuccess) return cuda_failed(l, code, "cudaStreamWaitEvent", e);
  int result = k->GroupStart();
  for (int i = 0; nccl_good(result) && i < n; i++) {
    if (t[i].n_out > 0) result = k->Send(t[i].out, (size_t)t[i].n_out, nccl_type(t[i].dtype), t[i].rank, l->comm, l->wire);
    if (nccl_good(result) && t[i].n_in > 0) result = k->Recv(t[i].in, (size_t)t[i].n_in, nccl_type(t[i].dtype), t[i].rank, l->comm, l->wire);
  }
  const int ended = k->GroupEnd();
  if (nccl_good(result)) result = ended;
  return nccl_good(result) || nccl_failed(l, result, "a group of sends and receives", e);
}

/* Shares of one size are one call in place; others one for each rank that has any. */
int gather_one(struct link *l, const struct link_gather *g) {
  const int64_t first = g->begin[1] - g->begin[0];
  const size_t size = dtype_bytes(g->dtype);
  bool equal = true;
  for (int r = 1; r < l->world; r++) equal = equal && g->begin[r + 1] - g->begin[r] == first;
  char *data = static_cast<char *>(g->data);
  int result = NCCL_SUCCESS;
  if (equal && first > 0)
    return l->nccl->AllGather(data + (size_t)g->begin[l->rank] * size, data, (size_t)first, nccl_type(g->dtype), l->comm, l->wire);
  for (int r = 0; nccl_good(result) && r < l->world; r++) {
    const int64_t elements = g->begin[r + 1] - g->begin[r];
    char *share = data + (size_t)g->begin[r] * size;
    if (elements > 0) result = l->nccl->Broadcast(share, share, (size_t)elements, nccl_type(g->dtype), r, l->comm, l->wire);
  }
  return result;
}

bool gather(struct link *l, const struct link_gather *g, int n, struct error *e) {
  int result = l->nccl->GroupStart();
  for (int i = 0; nccl_good(result) && i < n; i++) result = gather_one(l, &g[i]);
  const int ended = l->nccl->GroupEnd();
  if (nccl_good(result)) result = ended;
  return nccl_good(result) || nccl_failed(l, result, "a group of copies to all", e);
}

bool native_sum(struct link *l, void *data, int64_t n, enum dtype dtype, struct error *e) {
  char *own = static_cast<char *>(data) + (size_t)(l->rank * n) * dtype_bytes(dtype);
  int result = l->nccl->GroupStart();
  if (nccl_good(result)) result = l->nccl->ReduceScatter(data, own, (size_t)n, nccl_type(dtype), NCCL_SUM, l->comm, l->wire);
  const int ended = l->nccl->GroupEnd();
  if (nccl_good(result)) result = ended;
  return nccl_good(result) || nccl_failed(l, result, "ncclReduceScatter", e);
}

/* ---- sums ---------------------------------------------------------------------------------- */

/* Value r of a sum: own, or where it was received. */
template <typename T> CUDA_INLINE const T *value_of(const T *own, const T *received, int64_t stride, int r, int rank, int world) {
  if (world == 1) return received;
  return r == rank ? own : received + (int64_t)(r < rank ? r : r - 1) * stride;
}

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(SUM_THREADS)
    sum_ranks(T *own, const T *received, int64_t stride, int64_t n, int rank, int world) {
  constexpr int N = 16 / (int)sizeof(T);
  const int64_t step = (int64_t)gridDim.x * SUM_THREADS * N;
  for (int64_t i = ((int64_t)blockIdx.x * SUM_THREADS + threadIdx.x) * N; i < n; i += step) {
    packed<T, N> p;
    float sum[N];
    flat_load<ALIGNED>(p, value_of<T>(own, received, stride, 0, rank, world), i, n);
    unpack(sum, p);
    for (int r = 1; r < world; r++) {
      float x[N];
      flat_load<ALIGNED>(p, value_of<T>(own, received, stride, r, rank, world), i, n);
      unpack(x, p);
#pragma unroll
      for (int k = 0; k < N; k++) sum[k] = sum[k] + x[k];
    }
    pack(p, sum);
    flat_store<ALIGNED>(own, i, n, p);
  }
}

void add_up(struct link *l, const struct link_sum *s) {
  with_type(s->dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t vector = 16 / (int64_t)sizeof(T), tasks = (s->n + SUM_THREADS * vector - 1) / (SUM_THREADS * vector);
    const int64_t grid = tasks < 4 * l->lane.sm_count ? tasks : 4 * l->lane.sm_count;
    with_bool(cuda_whole(s->stride, vector, s->own, s->received), [&](auto aligned) {
      CUDA_LAUNCH(&l->lane, (sum_ranks<T, decltype(aligned)::value>), dim3(cuda_grid(grid)), SUM_THREADS, 0, static_cast<T *>(s->own),
                  static_cast<const T *>(s->received), s->stride, s->n, l->rank, l->world);
    });
  });
}

bool sum(struct link *l, int half, const struct link_sum *s, int n, struct error *e) {
  cudaError_t code = cudaEventRecord(l->arrived[half], l->wire);
  if (code == cudaSuccess) code = cudaStreamWaitEvent(l->adding, l->arrived[half], 0);
  for (int i = 0; code == cudaSuccess && i < n; i++)
    if (s[i].n > 0) add_up(l, &s[i]);
  if (code == cudaSuccess) code = l->lane.fault;
  if (code == cudaSuccess) code = cudaEventRecord(l->summed[half], l->adding);
  return code == cudaSuccess || cuda_failed(l, code, "sums of exchanges", e);
}

}  // namespace

extern "C" const struct links cuda_links = {
    .name = "NCCL",
    .version = cuda_nccl_version,
    .identity = identity,
    .fabric = fabric,
    .reaches = reaches,
    .make_id = make_id,
    .open = open_link,
    .state = state,
    .ready = ready,
    .begin = begin,
    .transfer = transfer,
    .gather = gather,
    .sum = sum,
    .native_sum = native_sum,
    .end = end,
    .follow = follow,
    .look = look,
    .waited = waited,
    .abort = abort_link,
    .close = close_link,
};
