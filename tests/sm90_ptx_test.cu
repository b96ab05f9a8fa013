/* Every instruction of kernels/sm90/ptx.h beside plain loops, on exact integers.
 * Built by g++ the host model runs it, built by nvcc an H100 or H200: what holds on
 * both proves the model's reading of the instructions. */
#include <math.h>
#include <stdlib.h>

#include <vector>

#include "kernels/sm90/ptx.h"
#include "kernels/sm90/tensor_map.h"
#include "tests/sm90_rig.h"

namespace {

enum { K = 64, STEP = 16 };

/* Small integers, the same for the same place. */
int value_at(int seed, int i) {
  uint32_t x = (uint32_t)i * 2654435761u + (uint32_t)seed * 40503u + 12345u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  return (int)(x % 9) - 4;
}

uint16_t bf16_of(int value) { return (uint16_t)bf16_encode((float)value); }

std::vector<uint16_t> values(int seed, int n) {
  std::vector<uint16_t> v((size_t)n);
  for (int i = 0; i < n; i++) v[(size_t)i] = bf16_of(value_at(seed, i));
  return v;
}

/* A [rows, cols] matrix, copied in boxes of 64 columns and `box_rows` rows. */
CUtensorMap map_of(const void *data, int rows, int cols, int box_rows) {
  const struct sm90_tensor t = {data, 2, {cols, rows, 0}, {2, cols * 2, 0}, {64, box_rows, 0}};
  return sm90_tensor_map(sm90_device(), &t);
}

/* ---- products ------------------------------------------------------------- */
/* Where d[r] of this thread stands. */
__device__ int fragment_row(int r) { return (int)threadIdx.x / 32 * 16 + r / 2 % 2 * 8 + (int)threadIdx.x % 32 / 4; }
__device__ int fragment_column(int r) { return r / 4 * 8 + (int)threadIdx.x % 4 * 2 + r % 2; }

/* d[64][N] += A B twice over: the first product begins at zero or at d.  A [64][64], or
 * transposed; B [N][64], or transposed [64][N].  Groups of 8 rows of a tile stand `stride` bytes apart. */
template <int N, bool TransposeA, bool TransposeB>
__global__ void __launch_bounds__(128, 1) multiply_ss(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                                                      float *out, int stride, int accumulate) {
  CUDA_DYNAMIC_SHARED(char, shared);
  char *a = shared, *b = shared + 8 * stride;
  const int chunk = 8 * stride, chunks = (N + 63) / 64, b_groups = TransposeB ? 8 * chunks : N / 8;
  uint64_t *barrier = (uint64_t *)(b + b_groups * stride);
  float d[N / 2];
  for (int r = 0; r < N / 2; r++) d[r] = out[fragment_row(r) * N + fragment_column(r)];
  if (threadIdx.x == 0) {
    sm90_barrier_init(barrier, 1);
    sm90_barrier_init_fence();
    sm90_barrier_expect(barrier, (uint32_t)(8 + b_groups) * 1024);
    for (int g = 0; g < 8; g++) sm90_tma_load_2d(a + g * stride, &a_map, barrier, 0, 8 * g);
    for (int g = 0; g < b_groups; g++) {
      if (TransposeB) sm90_tma_load_2d(b + g * stride, &b_map, barrier, g / 8 * 64, g % 8 * 8);
      else sm90_tma_load_2d(b + g * stride, &b_map, barrier, 0, 8 * g);
    }
  }
  __syncthreads();
  sm90_barrier_wait(barrier, 0);
  const uint64_t at = sm90_descriptor(a, TransposeA ? (uint32_t)chunk : 16, (uint32_t)stride);
  const uint64_t bt = sm90_descriptor(b, TransposeB ? (uint32_t)chunk : 16, (uint32_t)stride);
  for (int pass = 0; pass < 2; pass++) {
    sm90_wgmma_registers(d);
    sm90_wgmma_fence();
    for (int k = 0; k < K / STEP; k++)
      sm90_wgmma_ss<N, TransposeA, TransposeB>(d, sm90_descriptor_advance(at, (uint32_t)(TransposeA ? 2 * stride * k : 32 * k)),
                                               sm90_descriptor_advance(bt, (uint32_t)(TransposeB ? 2 * stride * k : 32 * k)),
                                               accumulate || pass || k);
    sm90_wgmma_commit();
    sm90_wgmma_wait<0>();
    sm90_wgmma_registers(d);
  }
  for (int r = 0; r < N / 2; r++) out[fragment_row(r) * N + fragment_column(r)] = d[r];
}

/* The same with A [64][64] in registers. */
template <int N, bool TransposeB>
__global__ void __launch_bounds__(128, 1) multiply_rs(const uint16_t *a, const __grid_constant__ CUtensorMap b_map, float *out, int stride,
                                                      int accumulate) {
  CUDA_DYNAMIC_SHARED(char, b);
  const int chunks = (N + 63) / 64, b_groups = TransposeB ? 8 * chunks : N / 8;
  uint64_t *barrier = (uint64_t *)(b + b_groups * stride);
  float d[N / 2];
  uint32_t fragment[K / STEP][4];
  for (int r = 0; r < N / 2; r++) d[r] = out[fragment_row(r) * N + fragment_column(r)];
  for (int k = 0; k < K / STEP; k++)
    for (int i = 0; i < 4; i++) {
      const uint16_t *at = a + fragment_row(2 * i) * K + k * STEP + i / 2 * 8 + (int)threadIdx.x % 4 * 2;
      fragment[k][i] = (uint32_t)at[0] | (uint32_t)at[1] << 16;
    }
  if (threadIdx.x == 0) {
    sm90_barrier_init(barrier, 1);
    sm90_barrier_init_fence();
    sm90_barrier_expect(barrier, (uint32_t)b_groups * 1024);
    for (int g = 0; g < b_groups; g++) {
      if (TransposeB) sm90_tma_load_2d(b + g * stride, &b_map, barrier, g / 8 * 64, g % 8 * 8);
      else sm90_tma_load_2d(b + g * stride, &b_map, barrier, 0, 8 * g);
    }
  }
  __syncthreads();
  sm90_barrier_wait(barrier, 0);
  const uint64_t bt = sm90_descriptor(b, TransposeB ? (uint32_t)(8 * stride) : 16, (uint32_t)stride);
  for (int k = 0; k < K / STEP; k++) sm90_wgmma_registers(fragment[k]);
  sm90_wgmma_registers(d);
  sm90_wgmma_fence();
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < K / STEP; k++)
      sm90_wgmma_rs<N, TransposeB>(d, fragment[k], sm90_descriptor_advance(bt, (uint32_t)(TransposeB ? 2 * stride * k : 32 * k)),
                                   accumulate || pass || k);
  sm90_wgmma_commit();
  sm90_wgmma_wait<0>();
  sm90_wgmma_registers(d);
  for (int r = 0; r < N / 2; r++) out[fragment_row(r) * N + fragment_column(r)] = d[r];
}

void check_product(const std::vector<float> &got, int n, bool ta, bool tb, bool accumulate, const char *form) {
  int wrong = 0;
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < n; c++) {
      int sum = 0;
      for (int k = 0; k < K; k++) sum += value_at(1, ta ? k * 64 + r : r * K + k) * value_at(2, tb ? k * n + c : c * K + k);
      const float expected = (float)(2 * sum + (accumulate ? value_at(3, r * n + c) : 0));
      if (got[(size_t)(r * n + c)] != expected && !wrong++)
        FAIL("%s N %d, A %s, B %s: [%d][%d] is %g, expected %g", form, n, ta ? "M-major" : "K-major", tb ? "N-major" : "K-major", r, c,
             (double)got[(size_t)(r * n + c)], (double)expected);
    }
}

template <int N, bool TransposeA, bool TransposeB> void check_ss() {
  device_array<uint16_t> a(values(1, 64 * K)), b(values(2, N * K));
  std::vector<float> initial((size_t)(64 * N));
  for (size_t i = 0; i < initial.size(); i++) initial[i] = (float)value_at(3, (int)i);
  for (int stride = 1024; stride <= 2048; stride += 1024)
    for (int accumulate = 0; accumulate < 2; accumulate++) {
      device_array<float> d(initial);
      const size_t bytes = (size_t)(8 + (TransposeB ? (N + 63) / 64 * 8 : N / 8)) * (size_t)stride + 8;
      CUDA_LAUNCH(sm90_device(), (multiply_ss<N, TransposeA, TransposeB>), 1, 128, bytes, map_of(a.data(), 64, 64, 8),
                  TransposeB ? map_of(b.data(), K, N, 8) : map_of(b.data(), N, K, 8), d.data(), stride, accumulate);
      check_product(d.read(), N, TransposeA, TransposeB, accumulate, "SS");
    }
}

template <int N, bool TransposeB> void check_rs() {
  device_array<uint16_t> a(values(1, 64 * K)), b(values(2, N * K));
  std::vector<float> initial((size_t)(64 * N));
  for (size_t i = 0; i < initial.size(); i++) initial[i] = (float)value_at(3, (int)i);
  for (int accumulate = 0; accumulate < 2; accumulate++) {
    const int stride = accumulate ? 2048 : 1024;
    device_array<float> d(initial);
    const size_t bytes = (size_t)(TransposeB ? (N + 63) / 64 * 8 : N / 8) * (size_t)stride + 8;
    CUDA_LAUNCH(sm90_device(), (multiply_rs<N, TransposeB>), 1, 128, bytes, a.data(), TransposeB ? map_of(b.data(), K, N, 8) : map_of(b.data(), N, K, 8),
                d.data(), stride, accumulate);
    check_product(d.read(), N, false, TransposeB, accumulate, "RS");
  }
}

template <int N> void check_width() {
  check_ss<N, false, false>();
  check_ss<N, false, true>();
  check_ss<N, true, false>();
  check_ss<N, true, true>();
  check_rs<N, false>();
  check_rs<N, true>();
}

TEST(product_n64) { check_width<64>(); }
TEST(product_n96) { check_width<96>(); }
TEST(product_n128) { check_width<128>(); }
TEST(product_n256) { check_width<256>(); }

/* out[64][64] = (A B) C, the first product rounded to BF16 in registers. */
__global__ void __launch_bounds__(128, 1) chain(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                                                const __grid_constant__ CUtensorMap c_map, float *out) {
  CUDA_DYNAMIC_SHARED(char, shared);
  char *a = shared, *b = shared + 8192, *c = shared + 16384;
  uint64_t *barrier = (uint64_t *)(shared + 24576);
  if (threadIdx.x == 0) {
    sm90_barrier_init(barrier, 1);
    sm90_barrier_init_fence();
    sm90_barrier_expect(barrier, 24576);
    sm90_tma_load_2d(a, &a_map, barrier, 0, 0);
    sm90_tma_load_2d(b, &b_map, barrier, 0, 0);
    sm90_tma_load_2d(c, &c_map, barrier, 0, 0);
  }
  __syncthreads();
  sm90_barrier_wait(barrier, 0);
  float d[32], e[32];
  sm90_wgmma_fence();
  for (int k = 0; k < 4; k++)
    sm90_wgmma_ss<64, false, false>(d, sm90_descriptor(a + 32 * k, 16, 1024), sm90_descriptor(b + 32 * k, 16, 1024), k > 0);
  sm90_wgmma_commit();
  sm90_wgmma_wait<0>();
  sm90_wgmma_registers(d);
  uint32_t p[4][4];
  for (int k = 0; k < 4; k++)
    for (int i = 0; i < 4; i++)
      p[k][i] = (uint32_t)bf16_encode(d[8 * k + 2 * i]) | (uint32_t)bf16_encode(d[8 * k + 2 * i + 1]) << 16;
  for (int k = 0; k < 4; k++) sm90_wgmma_registers(p[k]);
  sm90_wgmma_fence();
  for (int k = 0; k < 4; k++) sm90_wgmma_rs<64, true>(e, p[k], sm90_descriptor(c + 2048 * k, 8192, 1024), k > 0);
  sm90_wgmma_commit();
  sm90_wgmma_wait<0>();
  sm90_wgmma_registers(e);
  for (int r = 0; r < 32; r++) out[fragment_row(r) * 64 + fragment_column(r)] = e[r];
}

TEST(accumulators_as_operand) {
  /* B is a permutation with signs: the first product is exact in BF16 */
  std::vector<uint16_t> b(64 * 64, 0);
  for (int i = 0; i < 64; i++) b[(size_t)(i * 64 + (i * 29 + 7) % 64)] = bf16_of(i % 3 ? 1 : -2);
  device_array<uint16_t> a(values(1, 64 * 64)), bb(b), c(values(2, 64 * 64));
  device_array<float> out(64 * 64);
  CUDA_LAUNCH(sm90_device(), chain, 1, 128, 24576 + 8, map_of(a.data(), 64, 64, 64), map_of(bb.data(), 64, 64, 64), map_of(c.data(), 64, 64, 64),
              out.data());
  const std::vector<float> got = out.read();
  int wrong = 0;
  for (int r = 0; r < 64; r++)
    for (int col = 0; col < 64; col++) {
      int sum = 0;
      for (int j = 0; j < 64; j++) sum += value_at(1, r * 64 + (j * 29 + 7) % 64) * (j % 3 ? 1 : -2) * value_at(2, j * 64 + col);
      if (got[(size_t)(r * 64 + col)] != (float)sum && !wrong++) FAIL("[%d][%d] is %g, expected %d", r, col, (double)got[(size_t)(r * 64 + col)], sum);
    }
}

/* ---- TMA -------------------------------------------------------------------- */
enum { BOX_ROWS = 24 };

/* One box in, as it lies in shared memory, and out again elsewhere where `store` says so. */
__global__ void copy_box(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, uint16_t *seen, int rank, bool store, int x,
                         int y, int z) {
  CUDA_DYNAMIC_SHARED(char, shared);
  uint16_t *tile = (uint16_t *)shared, *back = tile + BOX_ROWS * 64 + 512;
  uint64_t *barrier = (uint64_t *)(back + BOX_ROWS * 64);
  if (threadIdx.x == 0) {
    sm90_barrier_init(barrier, 1);
    sm90_barrier_init_fence();
    sm90_barrier_expect(barrier, BOX_ROWS * 128);
    if (rank == 3) sm90_tma_load_3d(tile, &from, barrier, x, y, z);
    else sm90_tma_load_2d(tile, &from, barrier, x, y);
  }
  __syncthreads();
  sm90_barrier_wait(barrier, 0);
  for (int i = (int)threadIdx.x; i < BOX_ROWS * 64; i += 32) {
    seen[i] = tile[i];
    back[sm90_swizzled((uint32_t)i / 64, (uint32_t)i % 64)] = tile[sm90_swizzled((uint32_t)i / 64, (uint32_t)i % 64)];
  }
  sm90_fence_async_shared();
  __syncthreads();
  if (store && threadIdx.x == 0) {
    if (rank == 3) sm90_tma_store_3d(&to, back, x, y, z);
    else sm90_tma_store_2d(&to, back, x, y);
    sm90_bulk_commit();
    sm90_bulk_wait_read<0>();
  }
}

void check_box(int rank, int x, int y, int z) {
  const int cols = 96, rows = 40, planes = rank == 3 ? 3 : 1, n = cols * rows * planes;
  const bool store = x >= 0 && y >= 0 && z >= 0;
  device_array<uint16_t> from(values(5, n)), to(std::vector<uint16_t>((size_t)n, 0x7FFF)), seen(BOX_ROWS * 64);
  const struct sm90_tensor in = {from.data(), rank, {cols, rows, planes}, {2, cols * 2, cols * rows * 2}, {64, BOX_ROWS, 1}};
  struct sm90_tensor out = in;
  out.data = to.data();
  CUDA_LAUNCH(sm90_device(), copy_box, 1, 32, (2 * BOX_ROWS * 64 + 512) * 2 + 8, sm90_tensor_map(sm90_device(), &in), sm90_tensor_map(sm90_device(), &out), seen.data(),
              rank, store, x, y, z);
  const std::vector<uint16_t> tile = seen.read(), copied = to.read();
  int wrong = 0;
  for (int r = 0; r < BOX_ROWS; r++)
    for (int c = 0; c < 64; c++) {
      const bool inside = x + c >= 0 && x + c < cols && y + r >= 0 && y + r < rows && z >= 0 && z < planes;
      const uint16_t expected = inside ? bf16_of(value_at(5, (z * rows + y + r) * cols + x + c)) : (uint16_t)0;
      const int at = r * 64 + (c / 8 ^ r % 8) * 8 + c % 8;
      if (tile[(size_t)at] != expected && !wrong++) FAIL("box at %d, %d, %d: row %d, column %d is %04x, expected %04x", x, y, z, r, c, tile[(size_t)at], expected);
    }
  for (int i = 0; i < n; i++) {
    const int c = i % cols - x, r = i / cols % rows - y;
    const bool inside = store && c >= 0 && c < 64 && r >= 0 && r < BOX_ROWS && i / cols / rows == z;
    const uint16_t expected = inside ? bf16_of(value_at(5, i)) : (uint16_t)0x7FFF;
    if (copied[(size_t)i] != expected && !wrong++) FAIL("box at %d, %d, %d: element %d of the copy is %04x, expected %04x", x, y, z, i, copied[(size_t)i], expected);
  }
}

TEST(copies_and_edges) {
  const int at[][2] = {{0, 0}, {32, 16}, {8, 3}, {64, 0}, {0, 32}, {80, 39}, {-16, 0}, {0, -5}, {-64, 0}, {96, 0}, {40, 500}};
  for (const auto &p : at) check_box(2, p[0], p[1], 0);
  for (int z = 0; z < 3; z++) check_box(3, 48, 20, z);
  check_box(3, 0, 0, 3);
  check_box(3, 0, -3, -1);
}

/* Two contiguous pieces on one barrier, the second at 16 bytes off the first's end. */
__global__ void copy_bytes(const int *from, int *seen, int n) {
  CUDA_DYNAMIC_SHARED(int, shared);
  uint64_t *barrier = (uint64_t *)(shared + 2 * n + 4);
  if (threadIdx.x == 0) {
    sm90_barrier_init(barrier, 1);
    sm90_barrier_init_fence();
    sm90_barrier_expect(barrier, (uint32_t)n * 8);
    sm90_bulk_load(shared, from + n, barrier, (uint32_t)n * 4);
    sm90_bulk_load(shared + n + 4, from, barrier, (uint32_t)n * 4);
  }
  __syncthreads();
  sm90_barrier_wait(barrier, 0);
  for (int i = (int)threadIdx.x; i < n; i += 32) {
    seen[i] = shared[i];
    seen[n + i] = shared[n + 4 + i];
  }
}

TEST(copies_of_bytes) {
  for (int n : {4, 16, 128, 1028}) {
    std::vector<int> numbers((size_t)n * 2);
    for (int i = 0; i < 2 * n; i++) numbers[(size_t)i] = i * 7 - 3;
    device_array<int> from(numbers), seen(2 * n);
    CUDA_LAUNCH(sm90_device(), copy_bytes, 1, 32, (size_t)(2 * n + 4) * 4 + 8, from.data(), seen.data(), n);
    const std::vector<int> got = seen.read();
    for (int i = 0; i < 2 * n; i++) CHECK_EQ_I64(got[(size_t)i], numbers[(size_t)((i + n) % (2 * n))]);
  }
}

/* ---- rounding ------------------------------------------------------------------ */
__global__ void round_pairs(const float *x, uint32_t *pair) { pair[threadIdx.x] = sm90_bf16_pair(x[2 * threadIdx.x], x[2 * threadIdx.x + 1]); }

TEST(pairs_in_bf16) {
  const std::vector<float> x = {1.0f,      -2.5f,        0x1.01p0f, 0x1.03p0f,  0x1.010002p0f, -0x1.01p0f, 0.0f,   -0.0f,
                                0x1p-133f, 0x1.fep-127f, INFINITY,  -INFINITY, 0x1.fffp127f,  0x1p-149f,  3e-39f, 1e30f};
  device_array<float> from(x);
  device_array<uint32_t> to(8);
  CUDA_LAUNCH(sm90_device(), round_pairs, 1, 8, 0, from.data(), to.data());
  const std::vector<uint32_t> got = to.read();
  for (size_t i = 0; i < x.size(); i++) CHECK_EQ_I64(got[i / 2] >> 16 * (i % 2) & 0xFFFF, bf16_encode(x[i]));
}

/* ---- barriers ---------------------------------------------------------------- */
enum { STAGES = 3, TURNS = 40 };

/* A producer warpgroup fills a ring of tiles, two consumer warpgroups sum them and
 * take turns by named barriers: their order of arrival is written down. */
__global__ void __launch_bounds__(384, 1) ring(const __grid_constant__ CUtensorMap map, float *sums, int *order) {
  CUDA_DYNAMIC_SHARED(char, shared);
  uint64_t *full = (uint64_t *)(shared + STAGES * 1024), *empty = full + STAGES;
  int *turn = (int *)(empty + STAGES);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      sm90_barrier_init(&full[s], 1);
      sm90_barrier_init(&empty[s], 2);
    }
    sm90_barrier_init_fence();
    *turn = 0;
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    sm90_registers_fewer<24>();
    if (threadIdx.x == 0)
      for (int t = 0; t < TURNS; t++) {
        const int s = t % STAGES;
        sm90_barrier_wait(&empty[s], (uint32_t)(t / STAGES + 1) % 2);
        sm90_barrier_expect(&full[s], 1024);
        sm90_tma_load_2d(shared + s * 1024, &map, &full[s], 0, 8 * t);
      }
  } else {
    sm90_registers_more<240>();
    const int group = (int)threadIdx.x / 128 - 1, lane = (int)threadIdx.x % 128;
    if (group == 1) sm90_named_barrier_arrive(1, 256);
    for (int t = 0; t < TURNS; t++) {
      const int s = t % STAGES;
      sm90_barrier_wait(&full[s], (uint32_t)(t / STAGES) % 2);
      float sum = 0;
      for (int i = lane; i < 512; i += 128) sum += bf16_decode(((const uint16_t *)(shared + s * 1024))[i]) * (float)(t + 1);
      sm90_named_barrier_sync(3 + group, 128);
      if (lane == 0) sm90_barrier_arrive(&empty[s]);
      sm90_named_barrier_sync(1 + group, 256);
      if (lane == 0) order[atomicAdd(turn, 1)] = group;
      if (t + 1 < TURNS || group == 0) sm90_named_barrier_arrive(2 - group, 256);
      sums[(t * 2 + group) * 128 + lane] = sum;
    }
  }
}

TEST(ring_and_turns) {
  device_array<uint16_t> data(values(6, TURNS * 512));
  device_array<float> sums(TURNS * 256);
  device_array<int> order(2 * TURNS);
  CUDA_LAUNCH(sm90_device(), ring, 1, 384, STAGES * 1024 + 2 * STAGES * 8 + 8, map_of(data.data(), TURNS * 8, 64, 8), sums.data(), order.data());
  const std::vector<float> got = sums.read();
  const std::vector<int> turns = order.read();
  for (int t = 0; t < TURNS; t++)
    for (int group = 0; group < 2; group++) {
      float sum = 0;
      int expected = 0;
      for (int i = 0; i < 128; i++) sum += got[(size_t)((t * 2 + group) * 128 + i)];
      for (int i = 0; i < 512; i++) expected += value_at(6, t * 512 + i) * (t + 1);
      CHECK_EQ_I64((int64_t)sum, expected);
      CHECK_EQ_I64(turns[(size_t)(2 * t + group)], group);
    }
}

/* ---- transpose ---------------------------------------------------------------- */
__global__ void transpose(uint32_t *y, const uint32_t *x) {
  y[threadIdx.x] = sm90_transpose_8x8(x[threadIdx.x]);
}

TEST(transpose_in_a_warp) {
  std::vector<uint32_t> x(64);
  for (int i = 0; i < 64; i++) x[(size_t)i] = (uint32_t)(2 * i) | (uint32_t)(2 * i + 1) << 16; /* elements 8 row + column of two matrices */
  device_array<uint32_t> from(x), to(64);
  CUDA_LAUNCH(sm90_device(), transpose, 1, 64, 0, to.data(), from.data());
  const std::vector<uint32_t> y = to.read();
  for (int i = 0; i < 128; i++) {
    const int matrix = i / 64, row = i % 64 / 8, column = i % 8;
    CHECK_EQ_I64(y[(size_t)i / 2] >> i % 2 * 16 & 0xFFFF, matrix * 64 + 8 * column + row);
  }
}

/* ---- exp2 --------------------------------------------------------------------- */
__global__ void exponentials(float *y, const float *x, int n) {
  for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) y[i] = sm90_exp2(x[i]);
}

TEST(exp2_approximate) {
  std::vector<float> x;
  for (int i = -1300; i < 1290; i++) x.push_back((float)i * 0.0977f);
  for (float special : {-INFINITY, INFINITY, NAN, 0.0f, -0.0f, -200.0f, 128.0f, 1e-39f}) x.push_back(special);
  device_array<float> from(x), to((int)x.size());
  CUDA_LAUNCH(sm90_device(), exponentials, 1, 64, 0, to.data(), from.data(), (int)x.size());
  const std::vector<float> y = to.read();
  for (size_t i = 0; i < x.size(); i++) {
    const double exact = exp2((double)x[i]);
    if (isnan(x[i])) CHECK(isnan(y[i]));
    else if (exact < 0x1p-126) CHECK(y[i] == 0.0f);
    else if (exact > 0x1.fffffep127) CHECK(isinf(y[i]));
    else CHECK_CLOSE((double)y[i] / exact, 1.0, 0x1p-22);
  }
}

/* ---- what the model must refuse ---------------------------------------------- */
#ifdef FP4D_CUDA_MODEL
enum fault {
  NO_FAULT,
  WRITE_IN_FLIGHT,      /* an accumulator between product and wait */
  WRITE_A_IN_FLIGHT,    /* A's registers likewise */
  NO_FENCE,             /* registers written, then a product */
  NO_WAIT,              /* the block ends before */
  HALF_A_WARPGROUP,     /* one warp does not issue */
  OTHER_DESCRIPTOR,     /* one thread brings another */
  NO_SWIZZLE,           /* a descriptor without it */
  MISALIGNED_TMA,       /* inside the swizzle's pattern */
  NO_PROXY_FENCE,       /* stored by threads, then read by wgmma */
  NO_INIT_FENCE,        /* a barrier initialised, then TMA */
  TWO_ARRIVALS,         /* at a barrier of one */
  BYTES_MISSING,        /* expected, never copied */
  OUT_OF_SHARED,        /* a descriptor beyond the block's memory */
  EARLY_READ,           /* wgmma before the barrier: sometimes stale */
  UNEQUAL_REGISTERS,    /* a warpgroup divided over setmaxnreg */
  FAULTS
};

__global__ void faulty(const __grid_constant__ CUtensorMap map, float *out, int fault) {
  CUDA_DYNAMIC_SHARED(char, shared);
  uint64_t *barrier = (uint64_t *)(shared + 16384), *other = barrier + 1;
  for (int i = (int)threadIdx.x; i < 4096; i += 128) ((uint16_t *)shared)[i] = 0x3F80;
  if (fault != NO_PROXY_FENCE) sm90_fence_async_shared();
  if (threadIdx.x == 0) {
    sm90_barrier_init(barrier, 1);
    sm90_barrier_init(other, 1);
    if (fault != NO_INIT_FENCE) sm90_barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    sm90_barrier_expect(barrier, 8192);
    sm90_tma_load_2d(shared + 8192 + (fault == MISALIGNED_TMA ? 128 : 0), &map, barrier, 0, 0);
    if (fault == TWO_ARRIVALS) {
      sm90_barrier_expect(other, 8);
      sm90_barrier_arrive(other);
    }
    if (fault == BYTES_MISSING) sm90_barrier_expect(other, 8);
  }
  if (fault != EARLY_READ) sm90_barrier_wait(barrier, 0);
  if (fault == UNEQUAL_REGISTERS && threadIdx.x < 64) sm90_registers_more<240>();
  float d[32];
  uint32_t a[4] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80}; /* ones, as all of B */
  const char *b = shared + (fault == OUT_OF_SHARED ? 16384 : fault == NO_PROXY_FENCE ? 0 : 8192);
  uint64_t descriptor = sm90_descriptor(b + (fault == OTHER_DESCRIPTOR && threadIdx.x == 77 ? 32 : 0), 16, 1024);
  if (fault == NO_SWIZZLE) descriptor &= ~(UINT64_C(3) << 62);
  if (fault != NO_FENCE) sm90_wgmma_fence();
  if (fault != HALF_A_WARPGROUP || threadIdx.x < 96) {
    sm90_wgmma_rs<64, false>(d, a, descriptor, false);
    sm90_wgmma_commit();
  }
  if (fault == WRITE_IN_FLIGHT && threadIdx.x == 5) d[3] = 1;
  if (fault == WRITE_A_IN_FLIGHT && threadIdx.x == 5) a[2] = 0;
  if (fault != NO_WAIT) sm90_wgmma_wait<0>();
  for (int r = 0; r < 32; r++)
    if (d[r] != 16) out[0] = NAN;
  if (fault == EARLY_READ) sm90_barrier_wait(barrier, 0);
}

TEST(model_refuses) {
  for (int fault = 0; fault < FAULTS; fault++) {
    const bool refused = sm90_refused([fault] {
      device_array<uint16_t> data(std::vector<uint16_t>(64 * 64, 0x3F80));
      device_array<float> out(std::vector<float>(1, 0.0f));
      for (int turn = 0; turn < (fault == EARLY_READ ? 32 : 1); turn++)
        CUDA_LAUNCH(sm90_device(), faulty, 1, 128, 16384 + 16, map_of(data.data(), 64, 64, 64), out.data(), fault);
      return !isnan(out.read()[0]);
    });
    if (refused != (fault != NO_FAULT)) FAIL("fault %d: %s", fault, refused ? "refused" : "not seen");
  }
}
#endif

}  // namespace

int main() {
  RUN(product_n64);
  RUN(product_n96);
  RUN(product_n128);
  RUN(product_n256);
  RUN(accumulators_as_operand);
  RUN(copies_and_edges);
  RUN(copies_of_bytes);
  RUN(pairs_in_bf16);
  RUN(ring_and_turns);
  RUN(transpose_in_a_warp);
  RUN(exp2_approximate);
#ifdef FP4D_CUDA_MODEL
  RUN(model_refuses);
#endif
  return test_report();
}
