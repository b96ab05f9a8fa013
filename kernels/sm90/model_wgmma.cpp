/* The host model of Hopper's matrix products. */
#include <math.h>
#include <string.h>

#include <deque>
#include <map>
#include <vector>

#include "kernels/cuda/model/fibers.h"
#include "kernels/sm90/model.h"
#include "kernels/sm90/model_internal.h"

namespace {

enum { GROUP = 128, ROWS = 64, K = 16, GROUPS = CUDA_MODEL_BLOCK_MAX / GROUP };

/* What a register of a product in flight holds: a NaN of its own. */
const uint32_t POISON = 0x7FBADBAD;

/* A product of a warpgroup, with what each of its threads brought. */
struct product {
  sm90_model_product as; /* the first thread's: but for d and a_registers they must agree */
  size_t group;          /* groups closed before it */
  int arrived;
  bool here[GROUP];
  float *d[GROUP];
  const uint32_t *a[GROUP];
  uint32_t a_then[GROUP][4];
};

/* Accumulators in flight: what they will hold. */
struct accumulator {
  std::vector<float> value;
  uint64_t last; /* newest product on it */
};

struct thread {
  uint64_t issued;
  std::vector<uint64_t> groups; /* products before the end of each group it closed */
  bool fenced;
  std::map<float *, accumulator> flight;
};

struct warpgroup {
  std::deque<product> products; /* that have not been executed */
  uint64_t executed;            /* products before those */
  thread threads[GROUP];
};
warpgroup groups[GROUPS];

warpgroup *own_group() { return &groups[cuda_model_thread() / GROUP]; }
int own_thread() { return cuda_model_thread() % GROUP; }

/* ---- operands --------------------------------------------------------------------- */
float bf16(uint32_t bits) {
  float x;
  bits <<= 16;
  memcpy(&x, &bits, sizeof x);
  return x;
}

void check_descriptor(uint64_t descriptor) {
  if (descriptor >> 62 != 1) cuda_model_fail("a descriptor with swizzle %d: the model knows 1 (128 bytes)", (int)(descriptor >> 62));
  if (descriptor >> 49 & 7) cuda_model_fail("a descriptor with base offset %d", (int)(descriptor >> 49 & 7));
  const uint64_t field = 0x3FFF, fields = field | field << 16 | field << 32 | UINT64_C(7) << 49 | UINT64_C(3) << 62;
  if (descriptor & ~fields) cuda_model_fail("a descriptor with unknown bits: %016llx", (unsigned long long)descriptor);
  if ((descriptor & 0x3FFF) << 4 & 0x380) cuda_model_fail("a descriptor begins inside the swizzle's pattern of 8 rows");
}

/* to[mn][k] of an operand with `extent` rows of M or N: in chunks of 8 elements,
 * which the swizzle leaves whole, along K or along M or N. */
void load(float (*to)[K], uint64_t descriptor, int extent, bool mn_major) {
  const uint32_t start = (uint32_t)(descriptor & 0x3FFF) << 4, leading = (uint32_t)(descriptor >> 16 & 0x3FFF) << 4,
                 stride = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4;
  for (uint32_t r = 0; r < (uint32_t)extent; r += mn_major ? 8 : 1)
    for (uint32_t k = 0; k < K; k += mn_major ? 1 : 8) {
      const uint32_t at = mn_major ? r / 64 * leading + k / 8 * stride + k % 8 * 128 + r % 64 * 2 : r / 8 * stride + r % 8 * 128 + k * 2;
      uint16_t bits[8];
      memcpy(bits, sm90_model_published(sm90_model_swizzle(start + at), sizeof bits), sizeof bits);
      for (uint32_t i = 0; i < 8; i++) to[mn_major ? r + i : r][mn_major ? k : k + i] = bf16(bits[i]);
    }
}

/* to[row][k] of A in registers. */
void load_registers(float (*to)[K], const product *p) {
  for (int t = 0; t < GROUP; t++)
    for (int i = 0; i < 4; i++) {
      const int row = t / 32 * 16 + i % 2 * 8 + t % 32 / 4, k = i / 2 * 8 + t % 4 * 2;
      to[row][k] = bf16(p->a_then[t][i] & 0xFFFF);
      to[row][k + 1] = bf16(p->a_then[t][i] >> 16);
    }
}

int row_of(int t, int r) { return t / 32 * 16 + r / 2 % 2 * 8 + t % 32 / 4; }
int column_of(int t, int r) { return r / 4 * 8 + t % 4 * 2 + r % 2; }

/* ---- execution -------------------------------------------------------------------- */
/* 32 columns at a time, which the compiler makes vectors of. */
__attribute__((no_sanitize("undefined"))) void multiply(float *d, int n, const float (*a)[K], const float (*b)[K]) {
  enum { W = 32 };
  static float transposed[K][256];
  for (int c = 0; c < n; c++)
    for (int k = 0; k < K; k++) transposed[k][c] = b[c][k];
  for (int r = 0; r < ROWS; r++)
    for (int first = 0; first < n; first += W) {
      float sum[W] = {};
      for (int k = 0; k < K; k++)
        for (int c = 0; c < W; c++) sum[c] += a[r][k] * transposed[k][first + c];
      for (int c = 0; c < W; c++) d[r * n + first + c] += sum[c];
    }
}

void execute(warpgroup *g) {
  product *p = &g->products.front();
  static float a[ROWS][K], b[256][K], d[ROWS * 256];
  const int n = p->as.n;
  if (p->as.a_registers) load_registers(a, p);
  else load(a, p->as.a, ROWS, p->as.transpose_a);
  load(b, p->as.b, n, p->as.transpose_b);
  for (int t = 0; t < GROUP; t++) {
    const accumulator *x = &g->threads[t].flight.at(p->d[t]);
    for (int r = 0; r < n / 2; r++) d[row_of(t, r) * n + column_of(t, r)] = p->as.accumulate ? x->value[(size_t)r] : 0.0f;
    if (p->as.a_registers && memcmp(p->a[t], p->a_then[t], sizeof p->a_then[t]) != 0)
      cuda_model_fail("A's registers were written while a product read them (thread %d of its warpgroup)", t);
  }
  multiply(d, n, a, b);
  for (int t = 0; t < GROUP; t++) {
    accumulator *x = &g->threads[t].flight.at(p->d[t]);
    for (int r = 0; r < n / 2; r++) x->value[(size_t)r] = d[row_of(t, r) * n + column_of(t, r)];
  }
  g->products.pop_front();
  g->executed++;
}

bool executable(const warpgroup *g) { return !g->products.empty() && g->products.front().arrived == GROUP; }

/* ---- one thread's registers ------------------------------------------------------- */
void check_poison(const float *d, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (memcmp(&d[i], &POISON, sizeof POISON) != 0)
      cuda_model_fail("register %zu of an accumulator was written between a product and its wait", i);
}

void take_accumulator(thread *t, const sm90_model_product *p) {
  const size_t n = (size_t)p->n / 2;
  for (const auto &f : t->flight) {
    const float *begin = f.first, *end = begin + f.second.value.size();
    if (begin != p->d && begin < p->d + n && p->d < end) cuda_model_fail("a product on part of an accumulator that is in flight");
  }
  accumulator *x = &t->flight[p->d];
  if (x->value.empty()) {
    x->value.assign(p->d, p->d + n);
    for (size_t i = 0; i < n; i++) memcpy(&p->d[i], &POISON, sizeof POISON);
  }
  if (x->value.size() != n) cuda_model_fail("products of different shapes on one accumulator need a wait between them");
  check_poison(p->d, n);
  x->last = t->issued;
}

/* Hands over the accumulators whose products are all before `end`. */
void give_accumulators(thread *t, uint64_t end) {
  for (auto i = t->flight.begin(); i != t->flight.end();) {
    if (i->second.last >= end) {
      ++i;
      continue;
    }
    check_poison(i->first, i->second.value.size());
    memcpy(i->first, i->second.value.data(), i->second.value.size() * sizeof(float));
    i = t->flight.erase(i);
  }
}

}  // namespace

/* Sometimes work happens before anybody waits for it. */
bool sm90_model_products_step() {
  bool any = false;
  for (warpgroup &g : groups)
    if (executable(&g) && cuda_model_random() % 2) {
      execute(&g);
      any = true;
    }
  return any;
}

void sm90_model_products_reset() {
  for (warpgroup &g : groups) g = warpgroup{};
}

void sm90_model_products_ended() {
  for (const warpgroup &g : groups) {
    if (!g.products.empty()) cuda_model_fail("ended with matrix products that nobody waited for");
    for (const thread &t : g.threads)
      if (!t.flight.empty()) cuda_model_fail("ended with accumulators that nobody waited for");
  }
}

void sm90_wgmma_fence() { own_group()->threads[own_thread()].fenced = true; }

void sm90_wgmma_commit() {
  thread *t = &own_group()->threads[own_thread()];
  t->groups.push_back(t->issued);
}

void sm90_model_wgmma(const sm90_model_product *p) {
  warpgroup *g = own_group();
  const int own = own_thread();
  thread *t = &g->threads[own];
  if (!t->fenced) cuda_model_fail("a product without sm90_wgmma_fence() after the last wait");
  if (!p->a_registers) check_descriptor(p->a);
  check_descriptor(p->b);
  take_accumulator(t, p);
  const uint64_t at = t->issued++ - g->executed;
  if (at >= g->products.size()) {
    g->products.emplace_back();
    g->products.back().as = *p;
    g->products.back().group = t->groups.size();
  }
  product *x = &g->products[(size_t)at];
  const bool same = x->as.n == p->n && x->as.transpose_a == p->transpose_a && x->as.transpose_b == p->transpose_b &&
                    x->as.accumulate == p->accumulate && x->as.a == p->a && x->as.b == p->b &&
                    !x->as.a_registers == !p->a_registers && x->group == t->groups.size();
  if (!same) cuda_model_fail("the threads of a warpgroup issue different products (the %llu-th)", (unsigned long long)t->issued);
  x->here[own] = true;
  x->d[own] = p->d;
  x->a[own] = p->a_registers;
  if (p->a_registers) memcpy(x->a_then[own], p->a_registers, sizeof x->a_then[own]);
  x->arrived++;
  if (cuda_model_random() % 2) return;
  while (executable(g)) execute(g); /* the hardware may be that fast */
}

void sm90_model_wgmma_wait(int newest, const char *file, int line) {
  warpgroup *g = own_group();
  thread *t = &g->threads[own_thread()];
  t->fenced = false;
  const uint64_t end = t->groups.size() > (size_t)newest ? t->groups[t->groups.size() - 1 - (size_t)newest] : 0;
  const warpgroup *all = g;
  auto ready = [all, end] {
    for (uint64_t i = all->executed; i < end; i++)
      if (all->products[(size_t)(i - all->executed)].arrived < GROUP) return false;
    return true;
  };
  if (!ready()) cuda_model_wait_for(ready, "its warpgroup to issue the same products", file, line);
  while (g->executed < end) execute(g);
  give_accumulators(t, end);
}
