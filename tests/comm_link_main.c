/* One rank of a world of devices, for tests/comm_link_test.py: comm_link_main MODE [RANK].
 *
 * On a GPU (make check-gpu) alone or under mpirun, one GPU a rank; on the host model of CUDA
 * under mpirun.  "exchange" compares with a plain loop, to the bit: what the MPI transport
 * gives.  Alone it opens the transport itself, which a world of one has no use for
 * otherwise, and every exchange goes through NCCL to this rank.  Other modes are faults. */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/log.h"
#include "comm/internal.h"
#include "comm/transport.h"
#include "kernels/formats.h"
#include "kernels/link.h"
#include "tests/comm_rig.h"
#include "tests/test.h"
#include "trainer/hello_link.h"

static struct comm *joined;
static struct device *device;
static void *transport; /* the state that is tested */
static int64_t tickets;
static char *filler; /* host memory, as large as the largest tensor */

/* Gains, matrices, more ranks than rows, nothing, several rounds, an odd width, equal shares and others. */
static const struct comm_part shapes[] = {{NULL, 64, 1, DTYPE_F32},     {NULL, 132, 64, DTYPE_F32}, {NULL, 37, 7, DTYPE_BF16},
                                          {NULL, 2, 8, DTYPE_F32},      {NULL, 0, 8, DTYPE_BF16},   {NULL, 1, 1, DTYPE_BF16},
                                          {NULL, 1031, 120, DTYPE_F32}, {NULL, 4099, 8, DTYPE_BF16}, {NULL, 9, 3, DTYPE_F32}};
enum { SHAPES = sizeof shapes / sizeof *shapes, GUARD = 16, STAGING = 64 << 10 };

static int64_t elements(const struct comm_part *p) { return p->rows * p->cols; }
static size_t bytes_of(const struct comm_part *p) { return (size_t)elements(p) * dtype_bytes(p->dtype); }
static float stored(float x, enum dtype dtype) { return dtype == DTYPE_F32 ? x : bf16_decode(bf16_encode(x)); }

static void put(void *data, enum dtype dtype, int64_t i, float x) {
  if (dtype == DTYPE_F32)
    ((float *)data)[i] = x;
  else
    ((uint16_t *)data)[i] = bf16_encode(x);
}

static float get(const void *data, enum dtype dtype, int64_t i) {
  return dtype == DTYPE_F32 ? ((const float *)data)[i] : bf16_decode(((const uint16_t *)data)[i]);
}

/* What rank r has at element i of tensor k before a sum, and the sum in rank order, rounded once. */
static float given(int r, int k, int64_t i) { return stored((float)value_of(r, i + 1000003 * k), shapes[k].dtype); }
static float expected(int k, int64_t i) {
  float sum = given(0, k, i);
  for (int r = 1; r < comm_world(joined); r++) sum = sum + given(r, k, i);
  return stored(sum, shapes[k].dtype);
}

static _Noreturn void end(const struct error *e) {
  log_failure(e);
  fflush(stdout);
  comm_abort(joined, e->code);
}

static void wait_for_device(void) {
  struct error e;
  if (!device->k->synchronize(device, &e)) end(&e);
}

static void *device_memory(size_t bytes) {
  struct error e;
  void *p = device->k->allocate(device, bytes, &e);
  if (!p) end(&e);
  return p;
}

/* A tensor on the device with bytes behind it that nobody may write.  The upload is not waited for: the exchange is. */
static char *host[SHAPES];
static void fill(struct comm_part *p, int k) {
  *p = shapes[k];
  p->data = device_memory(bytes_of(p) + GUARD);
  host[k] = calloc(bytes_of(p) + GUARD, 1);
  for (int64_t i = 0; i < elements(p); i++) put(host[k], p->dtype, i, given(comm_rank(joined), k, i));
  memset(host[k] + bytes_of(p), 0x5a, GUARD);
  device->k->upload(device, p->data, host[k], bytes_of(p) + GUARD);
}

static int64_t wrong_sums(const struct comm_part *p, int k, int64_t from, int64_t to) {
  int64_t wrong = 0;
  for (int64_t i = from * p->cols; i < to * p->cols; i++) {
    const float want = expected(k, i), have = get(filler, p->dtype, i);
    wrong += memcmp(&want, &have, sizeof want) != 0;
  }
  return wrong;
}

static void fetch(const struct comm_part *p) {
  device->k->download(device, filler, p->data, bytes_of(p) + GUARD);
  wait_for_device();
}

static void check_own(const struct comm_part *p, int k) {
  const int rank = comm_rank(joined), world = comm_world(joined);
  fetch(p);
  CHECK_EQ_I64(wrong_sums(p, k, share_row(p->rows, p->cols, rank, world), share_row(p->rows, p->cols, rank + 1, world)), 0);
}

static void check_whole(const struct comm_part *p, int k) {
  fetch(p);
  CHECK_EQ_I64(wrong_sums(p, k, 0, p->rows), 0);
  for (int i = 0; i < GUARD; i++) CHECK(filler[bytes_of(p) + (size_t)i] == 0x5a);
  device->k->release(device, p->data);
  free(host[k]);
}

static int64_t begin(enum exchange_kind kind, const struct comm_part *parts, int n) {
  comm_transport_nccl.begin(transport, &(struct exchange_order){kind, parts, n, ++tickets});
  return tickets;
}

static void finish(int64_t ticket) {
  struct error e;
  if (!comm_transport_nccl.finish(transport, ticket, &e)) end(&e);
}

TEST(sums_then_copies) {
  struct comm_part parts[SHAPES];
  for (int k = 0; k < SHAPES; k++) fill(&parts[k], k);
  finish(begin(EXCHANGE_REDUCE_SCATTER, parts, SHAPES));
  for (int k = 0; k < SHAPES; k++) check_own(&parts[k], k);
  finish(begin(EXCHANGE_ALL_GATHER, parts, SHAPES));
  for (int k = 0; k < SHAPES; k++) check_whole(&parts[k], k);
}

/* An exchange for each tensor, as many as may be under way, a copy right behind each sum, collectives of this thread among
 * them; the device is waited for at the end alone. */
TEST(many_at_once) {
  struct comm_part parts[SHAPES];
  struct error e;
  int64_t ticket[SHAPES];
  for (int k = 0; k < SHAPES; k++) {
    double x = k;
    fill(&parts[k], k);
    ticket[k] = begin(EXCHANGE_REDUCE_SCATTER, &parts[k], 1);
    CHECK(comm_sum_f64(joined, &x, 1, &e) && x == k * comm_world(joined));
  }
  for (int k = 0; k < SHAPES; k++) {
    finish(ticket[k]);
    ticket[k] = begin(EXCHANGE_ALL_GATHER, &parts[k], 1);
  }
  for (int k = 0; k < SHAPES; k++) {
    finish(ticket[k]);
    check_whole(&parts[k], k);
  }
  CHECK(comm_transport_nccl.waited(transport) >= 0);
}

/* What the device does after finish sees the exchange, what it does before begin is in it. */
TEST(in_order_with_operations) {
  struct comm_part p = shapes[1];
  const size_t bytes = bytes_of(&p);
  float *ones = malloc(bytes);
  for (int64_t i = 0; i < elements(&p); i++) ones[i] = 1;
  p.data = device_memory(bytes);
  for (int time = 0; time < 20; time++) {
    device->k->clear(device, p.data, bytes);
    device->k->upload(device, p.data, ones, bytes);
    finish(begin(EXCHANGE_REDUCE_SCATTER, &p, 1));
    finish(begin(EXCHANGE_ALL_GATHER, &p, 1));
    device->k->download(device, filler, p.data, bytes);
    device->k->clear(device, p.data, bytes);
    wait_for_device();
    int64_t wrong = 0;
    for (int64_t i = 0; i < elements(&p); i++) wrong += get(filler, DTYPE_F32, i) != (float)comm_world(joined);
    CHECK_EQ_I64(wrong, 0);
  }
  device->k->release(device, p.data);
  free(ones);
}

/* ---- faults --------------------------------------------------------------------------- */

static struct kernels table; /* the device's, of which a fault replaces something */
static struct links links;
static const struct links *real;

/* Defects that "exchange" must find, or NCCL's double: DEFECT in the environment. */
static void never_ready(struct link *l, int slot) { (void)l, (void)slot; }
static void never_follow(struct link *l, int slot) { (void)l, (void)slot; }
static bool begin_at_once(struct link *l, int slot, struct error *e) {
  (void)l, (void)slot, (void)e;
  return true;
}
static bool end_before_sums(struct link *l, int half, const struct link_sum *s, int n, struct error *e) {
  (void)half, (void)s, (void)n;
  return real->sum(l, half, s, n - 1, e);
}
static bool sum_beside(struct link *l, int half, const struct link_sum *s, int n, struct error *e) {
  struct link_sum shifted[16];
  for (int i = 0; i < n; i++) {
    shifted[i] = s[i];
    if (s[i].n > 8) shifted[i].received = (const char *)s[i].received + 16;
  }
  return real->sum(l, half, shifted, n, e);
}
static bool transfer_one_less(struct link *l, int half, const struct link_transfer *t, int n, struct error *e) {
  struct link_transfer changed[64];
  memcpy(changed, t, (size_t)n * sizeof *t);
  if (comm_rank(joined) == 0 && n > 0) changed[n - 1].n_out--;
  return real->transfer(l, half, changed, n, e);
}
static bool transfer_swapped(struct link *l, int half, const struct link_transfer *t, int n, struct error *e) {
  struct link_transfer changed[64];
  memcpy(changed, t, (size_t)n * sizeof *t);
  for (int i = 1; i < n; i++) /* the first two ranks' values of a segment change places: another order of the sum */
    if (t[i].n_in == t[i - 1].n_in && t[i].dtype == t[i - 1].dtype && t[i].rank != t[i - 1].rank) {
      changed[i].in = t[i - 1].in;
      changed[i - 1].in = t[i].in;
      break;
    }
  return real->transfer(l, half, changed, n, e);
}
static bool gather_beside(struct link *l, const struct link_gather *g, int n, struct error *e) {
  struct link_gather changed[16];
  memcpy(changed, g, (size_t)n * sizeof *g);
  for (int i = 0; i < n; i++)
    if (g[i].begin[comm_world(joined)] > 64) changed[i].data = (char *)g[i].data + (comm_rank(joined) == 1 ? 32 : 0);
  return real->gather(l, changed, n, e);
}
static enum link_state always_idle(struct link *l, struct error *e) {
  return real->state(l, e) == LINK_FAILED ? LINK_FAILED : LINK_IDLE;
}
static void same_device(const struct device *d, char text[LINK_NAME]) {
  (void)d;
  snprintf(text, LINK_NAME, "GPU-1");
}

static bool stuck_transfer(struct link *l, int half, const struct link_transfer *t, int n, struct error *e) {
  (void)l, (void)half, (void)t, (void)n, (void)e;
  sleep_s(300);
  return true;
}
static void stuck_close(struct link *l, bool finish) {
  (void)l, (void)finish;
  sleep_s(300);
}
static enum link_state always_busy(struct link *l, struct error *e) {
  (void)l, (void)e;
  return LINK_BUSY;
}

static void take_defect(const char *name) {
  if (!name) return;
  if (strcmp(name, "no-ready") == 0) links.ready = never_ready;
  if (strcmp(name, "no-begin") == 0) links.begin = begin_at_once;
  if (strcmp(name, "no-follow") == 0) links.follow = never_follow;
  if (strcmp(name, "one-sum-less") == 0) links.sum = end_before_sums;
  if (strcmp(name, "sum-offset") == 0) links.sum = sum_beside;
  if (strcmp(name, "count") == 0) links.transfer = transfer_one_less;
  if (strcmp(name, "order") == 0) links.transfer = transfer_swapped;
  if (strcmp(name, "gather-offset") == 0) links.gather = gather_beside;
  if (strcmp(name, "no-look") == 0) links.state = always_idle;
  if (strcmp(name, "stuck-call") == 0) links.transfer = stuck_transfer;
  if (strcmp(name, "stuck-abort") == 0) links.close = stuck_close;
  if (strcmp(name, "busy") == 0) links.state = always_busy;
  if (strcmp(name, "one-gpu") == 0) links.identity = same_device;
}

/* Nine updates; in the seventh RANK's exchange is not handed over, its device never comes to it, or its caller's thread does not ("away"). */
static int train(const char *mode, int victim) {
  struct error e;
  struct comm_part p = {NULL, 300, 100, DTYPE_F32};
  struct comm_limits limits = {.start_s = 60, .update_s = 2, .save_s = 60, .heartbeat_s = 2.5};
  const bool device_stalls = strcmp(mode, "stall-device") == 0;
  p.data = device_memory(bytes_of(&p));
  const int64_t side = 8192;
  struct matrix a = {NULL, DTYPE_F32, side, side}, out = a;
  if (device_stalls) {
    const struct extent x = {.tokens = side, .head_chunk = side, .attention = {1, side, 1, 1, 64}, .hidden_size = side, .ffn_size = side, .vocab_size = side};
    const int64_t scratch = device->k->scratch_bytes(device, &x);
    device->k->set_scratch(device, device_memory((size_t)scratch), scratch);
    a.data = device_memory((size_t)(side * side) * 4);
    out.data = device_memory((size_t)(side * side) * 4);
    device->k->clear(device, a.data, (size_t)(side * side) * 4);
  }
  device->k->clear(device, p.data, bytes_of(&p));
  const bool away = strcmp(mode, "away") == 0;
  if (away) limits.update_s = 60; /* the exchanges' thread is to speak, not the watchdog */
  if (!comm_watch(joined, &limits, &e)) end(&e);
  for (int64_t update = 1; update <= 9; update++) {
    const bool now = comm_rank(joined) == victim && update == 7;
    comm_enter(joined, update == 1 ? COMM_START : COMM_UPDATE, "backward", update);
    if (now && device_stalls) {
      const struct operand rows = operand_of_matrix(&a, VIEW_ROW);
      for (int i = 0; i < 400; i++) device->k->contract(device, &out, &rows, &rows, NULL); /* seconds; no more launches than a stream holds */
    } else if (now && strcmp(mode, "stall-call") == 0) {
      links.transfer = stuck_transfer;
    }
    const int64_t ticket = begin(EXCHANGE_REDUCE_SCATTER, &p, 1);
    if (now && away) sleep_s(300);
    comm_enter(joined, update == 1 ? COMM_START : COMM_UPDATE, "optimizer", update);
    finish(ticket);
    wait_for_device();
  }
  return 0;
}

static int hello(void) {
  struct error e = {0};
  bool stuck;
  if (!hello_link(device, 2, &stuck, &e)) {
    log_failure(&e);
    if (stuck) _exit((int)e.code);
  }
  device->k->close(device);
  comm_close(joined);
  return (int)e.code;
}

int main(int argc, char **argv) {
  struct error e = {0};
  if (argc < 2) return ERROR_USAGE;
  joined = comm_open(0, &e);
  if (!joined) {
    log_failure(&e);
    return (int)e.code;
  }
  log_setup(comm_rank(joined), comm_world(joined), LOG_INFO);
  device = device_open_rank("sm90", 1, comm_local_rank(joined), &e);
  if (!device) end(&e);
  real = device->k->links;
  links = *real;
  table = *device->k;
  table.links = &links;
  take_defect(getenv("DEFECT"));
  device->k = &table;
  if (strcmp(argv[1], "hello") == 0) return hello();
  const struct comm_device whose = {device, device_memory(STAGING), STAGING};
  transport = comm_transport_nccl.open(joined, &whose, SHAPES, &e);
  if (!transport) end(&e);
  filler = malloc(4 << 20);
  int status = 0;
  if (strcmp(argv[1], "exchange") == 0) {
    RUN(sums_then_copies);
    RUN(many_at_once);
    RUN(in_order_with_operations);
    status = test_report();
  } else {
    status = train(argv[1], argc > 2 ? atoi(argv[2]) : 0);
  }
  fflush(stdout);
  comm_transport_nccl.close(transport);
  free(filler);
  device->k->release(device, whose.staging);
  comm_close(joined);
  return status;
}
