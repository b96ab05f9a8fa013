/* The host model of Hopper's instructions: barriers, TMA, proxies. */
#include "kernels/sm90/model.h"

#include <math.h>
#include <string.h>

#include <deque>
#include <map>
#include <vector>

#include "kernels/cuda/model/device.h"
#include "kernels/sm90/model_internal.h"

namespace {

/* ---- what TMA and wgmma see of shared memory ------------------------------- */
std::vector<char> published; /* by shared address; dynamic shared memory alone is ever published */
uint32_t dynamic_at;         /* the address at which it begins */
size_t dynamic_bytes;

char *published_at(uint32_t address, size_t bytes) {
  if (address < dynamic_at || address + bytes > dynamic_at + dynamic_bytes)
    cuda_model_fail("TMA or wgmma at shared address %u: outside the %zu bytes of dynamic shared memory at %u", address, dynamic_bytes,
                    dynamic_at);
  return published.data() + (address - dynamic_at);
}

/* ---- barriers ---------------------------------------------------------------- */
struct barrier {
  uint32_t count;
  int64_t pending, bytes; /* arrivals and bytes that are missing */
  uint32_t phase;         /* parity of the phase that has not ended */
  int thread; /* that initialised it, and whether it has fenced since */
  bool fenced;
};
std::map<uint32_t, barrier> barriers;

barrier *barrier_of(uint64_t *b) {
  auto found = barriers.find(cuda_model_shared_address(b));
  if (found == barriers.end()) cuda_model_fail("an mbarrier is used that was not initialised");
  return &found->second;
}

void end_phase(barrier *b) {
  if (b->pending < 0) cuda_model_fail("an mbarrier of %u arrivals got one more", b->count);
  if (b->pending > 0 || b->bytes != 0) return;
  b->phase ^= 1;
  b->pending = b->count;
}

/* ---- TMA ----------------------------------------------------------------------- */
struct copy {
  CUtensorMap map;
  uint32_t address;
  int at[3];
  uint64_t *barrier; /* NULL: a store */
  int thread, group; /* of a store */
  const char *from;  /* contiguous bytes that are loaded; NULL: a box of the map */
  uint32_t bytes;    /* of them */
  int delay;         /* turns that it still lets pass */
};
std::vector<copy> copies;
int store_group[CUDA_MODEL_BLOCK_MAX];

int64_t box_bytes(const CUtensorMap *map) { return (int64_t)map->box[0] * map->box[1] * map->box[2] * 2; }

/* A box is rows of box[0] elements, one after the other. */
void move(const copy *c) {
  if (c->from) {
    memcpy(published_at(c->address, c->bytes), c->from, c->bytes);
    memcpy(cuda_model_shared_pointer(c->address, c->bytes), c->from, c->bytes);
    return;
  }
  const CUtensorMap *m = &c->map;
  const int row_bytes = m->box[0] * 2, rows = m->box[1] * m->box[2];
  for (int r = 0; r < rows; r++) {
    const int64_t y = c->at[1] + r % m->box[1], z = c->at[2] + r / m->box[1];
    const bool row_inside = y >= 0 && y < m->extent[1] && z >= 0 && z < m->extent[2];
    for (int e = 0; e < m->box[0]; e++) {
      const uint32_t address = sm90_model_swizzle(c->address + (uint32_t)(r * row_bytes + e * 2));
      const int64_t x = c->at[0] + e;
      const bool inside = row_inside && x >= 0 && x < m->extent[0];
      char *global = inside ? m->data + z * m->stride[2] + y * m->stride[1] + x * m->stride[0] : nullptr;
      if (!c->barrier) {
        if (inside) memcpy(global, published_at(address, 2), 2);
        continue;
      }
      char *seen = published_at(address, 2);
      if (inside) memcpy(seen, global, 2);
      else memset(seen, 0, 2);
      memcpy(cuda_model_shared_pointer(address, 2), seen, 2);
    }
  }
}

void complete(size_t i) {
  const copy c = copies[i];
  copies.erase(copies.begin() + (std::ptrdiff_t)i);
  move(&c);
  if (!c.barrier) return;
  barrier *b = barrier_of(c.barrier);
  b->bytes -= c.from ? c.bytes : box_bytes(&c.map);
  end_phase(b);
}

/* Most copies are fast; some take as long as a tile's whole computation. */
int delay() { return cuda_model_random() % 8 ? 0 : (int)(cuda_model_random() % 512); }

copy copy_new(const CUtensorMap *map, const void *shared, int rank, int x, int y, int z) {
  copy c = {*map, cuda_model_shared_address(shared), {x, y, z}, nullptr, cuda_model_thread(), 0, nullptr, 0, delay()};
  if (map->rank != rank) cuda_model_fail("TMA of %d dimensions with a map of %d", rank, map->rank);
  if (c.address % 1024) cuda_model_fail("TMA at shared address %u: the 128-byte swizzle wants a multiple of 1024", c.address);
  published_at(c.address, (size_t)box_bytes(map));
  return c;
}

/* ---- registers ------------------------------------------------------------------ */
int registers[CUDA_MODEL_BLOCK_MAX]; /* a thread has, where setmaxnreg said so */

/* ---- the block ------------------------------------------------------------------ */
bool step() {
  const bool product = sm90_model_products_step();
  if (copies.empty()) return product;
  /* some copies take longer than others that were asked for later */
  const size_t i = cuda_model_random() % copies.size();
  if (copies[i].delay > 0) copies[i].delay--;
  else complete(i);
  return true;
}

void reset() {
  barriers.clear();
  copies.clear();
  memset(store_group, 0, sizeof store_group);
  memset(registers, 0, sizeof registers);
  dynamic_bytes = cuda_model_dynamic_shared_bytes();
  if (dynamic_bytes) dynamic_at = cuda_model_shared_address(cuda_model_dynamic_shared());
  published.assign(dynamic_bytes, (char)0xF6);
  sm90_model_products_reset();
}

void ended() {
  sm90_model_products_ended();
  for (const auto &b : barriers)
    if (b.second.bytes) cuda_model_fail("ended with an mbarrier that expects %lld more bytes", (long long)b.second.bytes);
  long long sum = 0;
  bool any = false;
  for (int i = 0; i < cuda_model_threads(); i++) {
    any = any || registers[i];
    sum += registers[i];
    if (registers[i] != registers[i / 128 * 128]) cuda_model_fail("setmaxnreg: thread %d has not what its warpgroup has", i);
  }
  if (any && sum > 65536) cuda_model_fail("setmaxnreg: %lld registers in all, an SM has 65536", sum);
}

const cuda_model_agent agent = {step, reset, ended};
const struct joiner {
  joiner() { cuda_model_agent_add(&agent); }
} joined;

}  // namespace

char *sm90_model_published(uint32_t address, size_t bytes) { return published_at(address, bytes); }

uint32_t sm90_shared(const void *p) { return cuda_model_shared_address(p); }

void sm90_fence_async_shared() {
  if (dynamic_bytes) memcpy(published.data(), cuda_model_dynamic_shared(), dynamic_bytes);
  sm90_barrier_init_fence();
}

/* ---- barriers ---------------------------------------------------------------- */
void sm90_barrier_init(uint64_t *b, uint32_t count) {
  const uint32_t address = cuda_model_shared_address(b);
  if (address % 8) cuda_model_fail("an mbarrier at shared address %u: not a multiple of 8", address);
  if (!count || count >= 1u << 20) cuda_model_fail("an mbarrier of %u arrivals", count);
  if (!barriers.insert({address, barrier{count, count, 0, 0, cuda_model_thread(), false}}).second) cuda_model_fail("an mbarrier is initialised twice");
}

void sm90_barrier_init_fence() {
  for (auto &b : barriers)
    if (b.second.thread == cuda_model_thread()) b.second.fenced = true;
}

void sm90_barrier_arrive(uint64_t *p) {
  barrier *b = barrier_of(p);
  b->pending--;
  end_phase(b);
}

void sm90_barrier_expect(uint64_t *p, uint32_t bytes) {
  barrier *b = barrier_of(p);
  b->bytes += bytes;
  b->pending--;
  end_phase(b);
}

void sm90_barrier_wait(uint64_t *p, uint32_t parity, const char *file, int line) {
  const barrier *b = barrier_of(p);
  if (parity > 1) cuda_model_fail("an mbarrier's parity %u", parity);
  cuda_model_wait_for([b, parity] { return b->phase != parity; }, "an mbarrier", file, line);
}

/* ---- TMA ----------------------------------------------------------------------- */
static void load_on(copy *c, uint64_t *b) {
  c->barrier = b;
  c->delay = delay();
  if (!barrier_of(b)->fenced) cuda_model_fail("TMA on an mbarrier without sm90_barrier_init_fence()");
  copies.push_back(*c);
}

void sm90_model_load(void *to, const CUtensorMap *map, uint64_t *b, int rank, int x, int y, int z) {
  copy c = copy_new(map, to, rank, x, y, z);
  load_on(&c, b);
}

void sm90_bulk_load(void *to, const void *from, uint64_t *b, uint32_t bytes) {
  copy c = {};
  c.address = cuda_model_shared_address(to);
  c.from = static_cast<const char *>(from);
  c.bytes = bytes;
  if (c.address % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    cuda_model_fail("a bulk load of %u bytes from %p to shared address %u: multiples of 16", bytes, from, c.address);
  published_at(c.address, bytes);
  load_on(&c, b);
}

void sm90_model_store(const CUtensorMap *map, const void *from, int rank, int x, int y, int z) {
  if (x < 0 || y < 0 || z < 0) cuda_model_fail("TMA store at %d, %d, %d: an H200 faults at negative coordinates", x, y, z);
  copy c = copy_new(map, from, rank, x, y, z);
  c.group = store_group[c.thread];
  copies.push_back(c);
}

void sm90_bulk_commit() { store_group[cuda_model_thread()]++; }

void sm90_model_bulk_wait(int newest) {
  const int thread = cuda_model_thread(), first_open = store_group[thread] - newest;
  for (size_t i = copies.size(); i-- > 0;)
    if (!copies[i].barrier && copies[i].thread == thread && copies[i].group < first_open) complete(i);
  for (const copy &c : copies)
    if (!c.barrier && c.thread == thread && c.group == store_group[thread]) cuda_model_fail("bulk_wait after a store without bulk_commit");
}

/* ---- others ---------------------------------------------------------------------- */
void sm90_model_registers(int r) {
  if (r < 24 || r > 256 || r % 8) cuda_model_fail("setmaxnreg %d: a multiple of 8 from 24 to 256", r);
  registers[cuda_model_thread()] = r;
}

static void named_barrier(int id, int threads, bool wait, const char *file, int line) {
  if (id < 1 || threads % 32) cuda_model_fail("named barrier %d of %d threads: 1..15, whole warps", id, threads);
  cuda_model_barrier(id, threads, wait, file, line);
}
void sm90_named_barrier_sync(int id, int threads, const char *file, int line) { named_barrier(id, threads, true, file, line); }
void sm90_named_barrier_arrive(int id, int threads, const char *file, int line) { named_barrier(id, threads, false, file, line); }

uint32_t sm90_transpose_8x8(uint32_t x, const char *file, int line) {
  const int lane = cuda_model_lane(), row = lane / 4, pair = lane % 4;
  uint32_t y = 0;
  for (int e = 0; e < 2; e++) /* from row 2 pair + e, column `row` */
    y |= (cuda_model_shuffle(0xFFFFFFFFu, x, (2 * pair + e) * 4 + row / 2, file, line) >> row % 2 * 16 & 0xFFFFu) << 16 * e;
  return y;
}

float sm90_exp2(float x) {
  const float y = exp2f(fabsf(x) < 0x1p-126f ? 0.0f : x);
  return y < 0x1p-126f ? 0.0f : y;
}
