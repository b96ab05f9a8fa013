/* The host model of CUDA: a double of NCCL between processes of one host, over shared memory.
 *
 * It is strict: what NCCL's manual forbids, or leaves to luck, ends the process:
 *   - a call on a communicator whose last one is still in progress, or by another thread;
 *   - a send or receive outside a group, a group that is not ended, buffers that are no
 *     device memory or overlap, a collective that is not in place as the manual has it;
 *   - what the two sides of a message do not have alike: kind, place in the order, number
 *     and type of elements.
 * A group reaches its stream only when CommGetAsyncError has said that it is launched, which
 * takes some looks, so an event that is recorded earlier does not come after it.
 *
 * FP4D_MODEL_NCCL_ERROR=N/R: rank R's communicator meets an error after N groups;
 * FP4D_MODEL_NCCL_STUCK=1: ncclCommAbort does not come back;
 * FP4D_MODEL_FAULT=N/R: its device is in a fault after N groups, which the library tells of only
 * where FP4D_MODEL_NCCL_ERROR has it. */
#include "kernels/cuda/nccl.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "kernels/cuda/model/runtime.h"
#include "kernels/formats.h"

namespace {

enum { MOST = 8, RING = 32 << 10, UNHANDLED_CUDA_ERROR = 1, REMOTE_ERROR = 6 };

/* Bytes from one rank to another. */
struct ring {
  std::atomic<uint64_t> written, read;
  char data[RING];
};

struct area {
  std::atomic<int> attached;
  struct ring rings[MOST][MOST]; /* from, to */
};

enum kind { SEND_RECV, BROADCAST, ALL_GATHER, REDUCE_SCATTER };
const char *const kind_names[] = {"send/receive", "broadcast", "all-gather", "reduce-scatter"};

struct message {
  uint64_t number; /* between these two ranks, this way */
  int kind, type, root;
  uint64_t elements;
};

/* One direction with one rank. */
struct part {
  bool out;
  int peer;
  char *data;
  size_t bytes;
  struct message message;
  size_t done; /* of message and data */
  char *sum;   /* BF16 or FP32 elements that `data`, this double's own memory, is added to when it is there; else NULL */
};

}  // namespace

struct nccl_comm {
  struct area *area;
  int rank, world;
  pthread_t owner;
  int looks; /* at which the call in progress is over */
  bool joining, aborted, finalizing;
  std::vector<struct part> *pending; /* a group that is not launched yet, for `stream` */
  cudaStream_t stream;
  uint64_t sent[MOST], received[MOST], last;
  int error_after, fault_after; /* groups of this process; -1: never */
};

namespace {

int groups; /* that this process has ended */
thread_local int depth;
thread_local struct nccl_comm *group_comm;
thread_local std::vector<struct part> *group;
thread_local cudaStream_t group_stream;

size_t type_bytes(int type) {
  if (type == NCCL_FLOAT32) return 4;
  if (type == NCCL_BFLOAT16) return 2;
  cuda_model_fail("NCCL: type %d", type);
}

void check_call(const struct nccl_comm *c, const char *what) {
  if (!pthread_equal(c->owner, pthread_self())) cuda_model_fail("NCCL: %s by another thread than the communicator's", what);
  if (c->looks) cuda_model_fail("NCCL: %s while an earlier call is in progress", what);
  if (c->aborted || c->finalizing) cuda_model_fail("NCCL: %s on a communicator that was ended", what);
}

/* ---- moving ---------------------------------------------------------------------- */

size_t least(size_t a, size_t b) { return a < b ? a : b; }

size_t ring_put(struct ring *r, const char *from, size_t bytes) {
  const uint64_t written = r->written.load(std::memory_order_relaxed), room = RING - (written - r->read.load(std::memory_order_acquire));
  const size_t n = least(least(bytes, room), RING - written % RING);
  memcpy(r->data + written % RING, from, n);
  r->written.store(written + n, std::memory_order_release);
  return n;
}

size_t ring_get(struct ring *r, char *to, size_t bytes) {
  const uint64_t read = r->read.load(std::memory_order_relaxed), there = r->written.load(std::memory_order_acquire) - read;
  const size_t n = least(least(bytes, there), RING - read % RING);
  memcpy(to, r->data + read % RING, n);
  r->read.store(read + n, std::memory_order_release);
  return n;
}

void compare(const struct nccl_comm *c, const struct part *p, const struct message *theirs) {
  const struct message *own = &p->message;
  if (memcmp(own, theirs, sizeof *own) == 0) return;
  cuda_model_fail("NCCL: rank %d gives rank %d message %llu, %s of %llu elements of type %d, which is taken for %llu, %s of %llu of type %d", p->peer,
                  c->rank, (unsigned long long)theirs->number, kind_names[theirs->kind], (unsigned long long)theirs->elements, theirs->type,
                  (unsigned long long)own->number, kind_names[own->kind], (unsigned long long)own->elements, own->type);
}

/* As far as it goes now: whether all of it is done. */
bool move(struct nccl_comm *c, struct part *p) {
  struct ring *r = p->out ? &c->area->rings[c->rank][p->peer] : &c->area->rings[p->peer][c->rank];
  for (;;) {
    size_t n;
    if (p->done < sizeof p->message) { /* the ring may end within it */
      static struct message arriving[MOST];
      char *m = p->out ? reinterpret_cast<char *>(&p->message) : reinterpret_cast<char *>(&arriving[p->peer]);
      n = p->out ? ring_put(r, m + p->done, sizeof p->message - p->done) : ring_get(r, m + p->done, sizeof p->message - p->done);
      p->done += n;
      if (!p->out && n && p->done == sizeof p->message) compare(c, p, &arriving[p->peer]);
    } else {
      const size_t at = p->done - sizeof p->message;
      n = p->out ? ring_put(r, p->data + at, p->bytes - at) : ring_get(r, p->data + at, p->bytes - at);
      p->done += n;
    }
    if (p->done == sizeof p->message + p->bytes) return true;
    if (!n) return false;
  }
}

void add_to(const struct part &p) {
  for (uint64_t i = 0; i < p.message.elements; i++) {
    if (p.message.type == NCCL_FLOAT32) {
      float a, b;
      memcpy(&a, p.sum + 4 * i, 4), memcpy(&b, p.data + 4 * i, 4);
      a = a + b;
      memcpy(p.sum + 4 * i, &a, 4);
    } else {
      uint16_t a, b;
      memcpy(&a, p.sum + 2 * i, 2), memcpy(&b, p.data + 2 * i, 2);
      a = bf16_encode(bf16_decode(a) + bf16_decode(b));
      memcpy(p.sum + 2 * i, &a, 2);
    }
  }
  free(p.data);
}

/* Messages between two ranks go one after another, each way. */
bool move_all(struct nccl_comm *c, std::vector<struct part> *parts) {
  bool held[2][MOST] = {}, all = true;
  if (c->aborted) return true;
  cuda_model_enter();
  for (struct part &p : *parts) {
    if (held[p.out][p.peer] || p.done == sizeof p.message + p.bytes) continue;
    const bool done = move(c, &p);
    if (done && p.sum) add_to(p);
    held[p.out][p.peer] = !done;
    all = all && done;
  }
  cuda_model_leave();
  return all;
}

/* ---- what is called -------------------------------------------------------------------- */

int get_version(int *version) {
  *version = 22803;
  return NCCL_SUCCESS;
}

int get_unique_id(struct nccl_id *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/fp4d-nccl-%d-%u", (int)getpid(), cuda_model_random());
  return NCCL_SUCCESS;
}

const char *error_string(int result) { return result == NCCL_INVALID_USAGE ? "invalid usage" : result == UNHANDLED_CUDA_ERROR ? "unhandled cuda error" : result == REMOTE_ERROR ? "remote process exited or there was a network error" : "no error"; }
const char *last_error(struct nccl_comm *) { return ""; }

/* After how many groups `variable` has something happen to this rank; -1: never. */
int groups_until(const char *variable, int rank) {
  int number, whose;
  const char *text = getenv(variable);
  return text && sscanf(text, "%d/%d", &number, &whose) == 2 && whose == rank ? number : -1;
}

int init_rank(struct nccl_comm **out, int world, struct nccl_id id, int rank, struct nccl_config *config) {
  if (config->size != sizeof *config || config->magic != (unsigned)NCCL_CONFIG_MAGIC || config->version != NCCL_CONFIG_VERSION)
    cuda_model_fail("NCCL: a configuration that was not initialised");
  if (config->blocking != 0) cuda_model_fail("NCCL: a blocking communicator");
  if (rank < 0 || rank >= world || world > MOST) cuda_model_fail("NCCL: rank %d of %d", rank, world);
  const int file = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(struct area)) != 0) cuda_model_fail("NCCL: no shared memory named %s", id.internal);
  void *area = mmap(NULL, sizeof(struct area), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (area == MAP_FAILED) cuda_model_fail("NCCL: no shared memory named %s", id.internal);
  struct nccl_comm *c = new nccl_comm{};
  c->area = static_cast<struct area *>(area);
  c->rank = rank;
  c->world = world;
  c->owner = pthread_self();
  c->looks = 3;
  c->joining = true;
  c->error_after = groups_until("FP4D_MODEL_NCCL_ERROR", rank);
  c->fault_after = groups_until("FP4D_MODEL_FAULT", rank);
  if (c->area->attached.fetch_add(1) + 1 == world) shm_unlink(id.internal);
  *out = c;
  return NCCL_IN_PROGRESS;
}

int async_error(struct nccl_comm *c, int *result) {
  if (c->aborted) cuda_model_fail("NCCL: ncclCommGetAsyncError after ncclCommAbort");
  *result = NCCL_SUCCESS;
  if (c->error_after >= 0 && groups > c->error_after) {
    *result = cuda_model_machine.fault != cudaSuccess ? UNHANDLED_CUDA_ERROR : REMOTE_ERROR;
    return NCCL_SUCCESS;
  }
  const bool waits = (c->joining && c->area->attached.load() < c->world) || (c->finalizing && !cuda_model_reached(c->stream, c->last));
  if (c->looks > 1 || waits) {
    if (c->looks > 1) c->looks--;
    *result = NCCL_IN_PROGRESS;
    return NCCL_SUCCESS;
  }
  c->looks = 0;
  c->joining = false;
  if (c->pending) {
    std::vector<struct part> *parts = c->pending;
    c->pending = NULL;
    cuda_model_submit(c->stream, [c, parts] {
      if (!move_all(c, parts)) return false;
      delete parts;
      return true;
    });
    c->last = cuda_model_given(c->stream);
  }
  return NCCL_SUCCESS;
}

int finalize(struct nccl_comm *c) {
  check_call(c, "ncclCommFinalize");
  c->finalizing = c->stream != NULL;
  c->looks = 2;
  return NCCL_IN_PROGRESS;
}

int destroy(struct nccl_comm *c) {
  if (c->looks) cuda_model_fail("NCCL: ncclCommDestroy before ncclCommFinalize is over");
  munmap(c->area, sizeof *c->area);
  delete c;
  return NCCL_SUCCESS;
}

int abort_comm(struct nccl_comm *c) {
  while (getenv("FP4D_MODEL_NCCL_STUCK")) pause();
  c->aborted = true; /* the memory stays: work that stands in a stream looks at it */
  return NCCL_SUCCESS;
}

int group_start() {
  if (depth++ == 0) group = new std::vector<struct part>;
  return NCCL_SUCCESS;
}

bool overlap(const struct part &a, const struct part &b) { return a.data < b.data + b.bytes && b.data < a.data + a.bytes; }

void check_buffers() {
  for (size_t i = 0; i < group->size(); i++) {
    const struct part &a = (*group)[i];
    if (!cuda_model_owns(a.sum ? a.sum : a.data, a.bytes)) cuda_model_fail("NCCL: a buffer of %zu bytes that is no device memory", a.bytes);
    for (size_t j = 0; j < i; j++)
      if ((!a.out || !(*group)[j].out) && overlap(a, (*group)[j])) cuda_model_fail("NCCL: buffers of one group overlap");
  }
}

int group_end() {
  if (depth == 0) cuda_model_fail("NCCL: ncclGroupEnd without ncclGroupStart");
  if (--depth) return NCCL_SUCCESS;
  struct nccl_comm *c = group_comm;
  check_buffers();
  group_comm = NULL;
  if (!c) {
    delete group;
    return NCCL_SUCCESS;
  }
  if (c->stream && c->stream != group_stream) cuda_model_fail("NCCL: a communicator on two streams");
  c->stream = group_stream;
  c->pending = group;
  if (++groups > c->fault_after && c->fault_after >= 0) cuda_model_machine.fault = cudaErrorIllegalAddress;
  c->looks = 1 + (int)(cuda_model_random() % 3);
  return NCCL_IN_PROGRESS;
}

void join_group(struct nccl_comm *c, cudaStream_t s, const char *what) {
  check_call(c, what);
  if (depth == 0) cuda_model_fail("NCCL: %s outside a group", what);
  if (group_comm && (group_comm != c || group_stream != s)) cuda_model_fail("NCCL: one group on two communicators or streams");
  group_comm = c;
  group_stream = s;
}

void add(struct nccl_comm *c, bool out, int peer, const void *data, size_t elements, int type, enum kind kind, int root, char *sum = NULL) {
  if (peer < 0 || peer >= c->world) cuda_model_fail("NCCL: rank %d of %d", peer, c->world);
  struct message m;
  memset(&m, 0, sizeof m);
  m.number = out ? c->sent[peer]++ : c->received[peer]++;
  m.kind = kind;
  m.type = type;
  m.root = root;
  m.elements = elements;
  group->push_back(part{out, peer, static_cast<char *>(const_cast<void *>(data)), elements * type_bytes(type), m, 0, sum});
}

int send(const void *from, size_t n, int type, int rank, struct nccl_comm *c, cudaStream_t s) {
  join_group(c, s, "ncclSend");
  add(c, true, rank, from, n, type, SEND_RECV, -1);
  return NCCL_SUCCESS;
}

int recv(void *to, size_t n, int type, int rank, struct nccl_comm *c, cudaStream_t s) {
  join_group(c, s, "ncclRecv");
  add(c, false, rank, to, n, type, SEND_RECV, -1);
  return NCCL_SUCCESS;
}

int broadcast(const void *from, void *to, size_t n, int type, int root, struct nccl_comm *c, cudaStream_t s) {
  join_group(c, s, "ncclBroadcast");
  if (from != to) cuda_model_fail("NCCL: a broadcast that is not in place");
  if (root < 0 || root >= c->world) cuda_model_fail("NCCL: root %d of %d", root, c->world);
  for (int r = 0; r < c->world; r++)
    if (r != root && c->rank == root) add(c, true, r, from, n, type, BROADCAST, root);
  if (c->rank != root) add(c, false, root, to, n, type, BROADCAST, root);
  return NCCL_SUCCESS;
}

int all_gather(const void *from, void *to, size_t n, int type, struct nccl_comm *c, cudaStream_t s) {
  join_group(c, s, "ncclAllGather");
  char *all = static_cast<char *>(to);
  const size_t bytes = n * type_bytes(type);
  if (from != all + (size_t)c->rank * bytes) cuda_model_fail("NCCL: an all-gather that is not in place");
  for (int r = 0; r < c->world; r++) {
    if (r == c->rank) continue;
    add(c, true, r, from, n, type, ALL_GATHER, -1);
    add(c, false, r, all + (size_t)r * bytes, n, type, ALL_GATHER, -1);
  }
  return NCCL_SUCCESS;
}

/* Summed as values come, in whatever order. */
int reduce_scatter(const void *from, void *to, size_t n, int type, int operation, struct nccl_comm *c, cudaStream_t s) {
  join_group(c, s, "ncclReduceScatter");
  const char *all = static_cast<const char *>(from);
  const size_t bytes = n * type_bytes(type);
  if (to != all + (size_t)c->rank * bytes || operation != NCCL_SUM) cuda_model_fail("NCCL: a reduce-scatter that is no sum in place");
  for (int r = c->world - 1; r >= 0; r--) {
    if (r == c->rank) continue;
    add(c, true, r, all + (size_t)r * bytes, n, type, REDUCE_SCATTER, -1);
    add(c, false, r, malloc(bytes ? bytes : 1), n, type, REDUCE_SCATTER, -1, static_cast<char *>(to));
  }
  return NCCL_SUCCESS;
}

}  // namespace

const struct cuda_nccl *cuda_nccl_open(struct error *) {
  static const struct cuda_nccl table = {get_version, get_unique_id, error_string, last_error, init_rank,  async_error, finalize,       destroy,
                                         abort_comm,  group_start,   group_end,    send,       recv,       broadcast,   all_gather,     reduce_scatter};
  return &table;
}

extern "C" bool cuda_model_nccl_version(char *text, int size, struct error *e) { return cuda_nccl_version(text, size, e); }
