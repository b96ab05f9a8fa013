/* GB/s of BF16 source that one core quantises, both views of a tensor in one call:
 * thread CPU time, the best of several calls, operands where training keeps them.
 *   bench_quantise [ROWS COLS] ...      (512 512  1024 2048  4096 4096) */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/philox.h"
#include "kernels/formats.h"
#include "kernels/kernels.h"

enum { ELEMENTS = 40000000, CALLS_LEAST = 5, CALLS_MOST = 80 };

#define MX(ROUND, HADAMARD) {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_##ROUND, HADAMARD_##HADAMARD, 0}
#define NV(ROUND, HADAMARD) {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_##ROUND, HADAMARD_##HADAMARD, 0}
#define LOCAL(ROUND, HADAMARD) \
  {FORMAT_NVFP4_LOCAL, BLOCK_1X16, SCALE_LOCAL_FAITHFUL, ROUND_##ROUND, HADAMARD_##HADAMARD, 128}
#define TILES(FORMAT, BLOCK, SCALE) {FORMAT_##FORMAT, BLOCK_##BLOCK, SCALE_##SCALE, ROUND_NEAREST, HADAMARD_NONE, 0}

static const struct encoding pairs[][2] = {
    {MX(NEAREST, NONE), MX(NEAREST, NONE)},
    {MX(STOCHASTIC, NONE), MX(NEAREST, NONE)},
    {MX(NEAREST, SIGNED_32), MX(NEAREST, SIGNED_32)},
    {MX(STOCHASTIC, NONE), MX(NEAREST, SIGNED_32)},
    {TILES(MXFP4, 2D32, MX_ADAPTIVE), TILES(MXFP4, 2D32, MX_ADAPTIVE)},
    {NV(NEAREST, NONE), NV(NEAREST, NONE)},
    {NV(STOCHASTIC, NONE), NV(NEAREST, NONE)},
    {NV(NEAREST, NONE), NV(NEAREST, SIGNED_16)},
    {NV(STOCHASTIC, NONE), NV(STOCHASTIC, SIGNED_16)},
    {TILES(NVFP4, 2D16, TENSOR), TILES(NVFP4, 2D16, TENSOR)},
    {TILES(NVFP4, 1X16, TENSOR_4OVER6), TILES(NVFP4, 1X16, TENSOR_4OVER6)},
    {TILES(NVFP4, 2D16, TENSOR_4OVER6), TILES(NVFP4, 2D16, TENSOR_4OVER6)},
    {LOCAL(NEAREST, NONE), LOCAL(NEAREST, NONE)},
    {LOCAL(STOCHASTIC, NONE), LOCAL(NEAREST, NONE)},
    {LOCAL(STOCHASTIC, NONE), LOCAL(NEAREST, SIGNED_16)},
    {LOCAL(STOCHASTIC, NONE), MX(NEAREST, SIGNED_32)},
    {TILES(NVFP4_LOCAL, 2D16, LOCAL_FAITHFUL), TILES(NVFP4_LOCAL, 2D16, LOCAL_FAITHFUL)},
    {TILES(E4M3, NONE, TENSOR), TILES(E4M3, NONE, TENSOR)},
    {TILES(E5M2, NONE, ROW), TILES(E5M2, NONE, ROW)},
};

static void *memory(struct device *d, int64_t bytes) {
  struct error e = {0};
  void *p = d->k->allocate(d, (size_t)bytes, &e);
  if (!p) {
    fprintf(stderr, "%s\n", e.message);
    exit(1);
  }
  memset(p, 0, (size_t)bytes);
  return p;
}

static struct operand operand_of(struct device *d, const struct encoding *e, enum view view, const struct matrix *m) {
  struct operand o = operand_of_matrix(m, view);
  o.encoding = *e;
  o.strip = e->scale == SCALE_ROW ? 1 : e->strip;
  o.codes = memory(d, operand_code_bytes(e, o.rows, o.cols));
  o.scales = memory(d, operand_scale_bytes(e, o.rows, o.cols));
  o.outer = memory(d, operand_outer_count(&o) * (int64_t)sizeof(float));
  return o;
}

static void release(struct device *d, struct operand *o) {
  d->k->release(d, o->codes);
  d->k->release(d, o->scales);
  d->k->release(d, o->outer);
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double speed(struct device *d, const struct encoding pair[2], const struct matrix *m) {
  struct operand row = operand_of(d, &pair[0], VIEW_ROW, m), column = operand_of(d, &pair[1], VIEW_COLUMN, m);
  struct quantise_counts counts[2] = {{0}};
  const struct emission out = {.row = &row, .column = &column, .draw = {.seq_len = m->rows}, .counts = counts};
  const int64_t n = m->rows * m->cols;
  double best = 0;
  for (int64_t i = 0; i < CALLS_LEAST || (i < CALLS_MOST && i * n < ELEMENTS); i++) {
    const double start = seconds();
    d->k->quantise(d, &out, m);
    const double rate = 2e-9 * (double)n / (seconds() - start);
    best = rate > best ? rate : best;
  }
  release(d, &row);
  release(d, &column);
  return best;
}

static struct matrix source_of(struct device *d, int64_t rows, int64_t cols) {
  struct matrix m = {memory(d, rows * cols * 2), DTYPE_BF16, rows, cols};
  for (int64_t i = 0; i < rows * cols; i++) {
    const struct philox_block r = philox4x32_10(1, philox_counter(0, 0, 0, 0, (uint32_t)i));
    ((uint16_t *)m.data)[i] = bf16_encode(((float)r.word[0] - (float)r.word[1]) * 0x1p-32f);
  }
  return m;
}

static void bench(struct device *d, int64_t rows, int64_t cols) {
  const struct matrix m = source_of(d, rows, cols);
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    char first[ENCODING_TEXT], second[ENCODING_TEXT];
    printf("[%" PRId64 ", %" PRId64 "]  %-40s %-40s %.3f GB/s\n", rows, cols,
           encoding_text(&pairs[i][0], first, sizeof first), encoding_text(&pairs[i][1], second, sizeof second),
           speed(d, pairs[i], &m));
    fflush(stdout);
  }
  d->k->release(d, m.data);
}

int main(int argc, char **argv) {
  struct error e = {0};
  struct device *d = device_open("cpu", 1, &e);
  if (!d) {
    fprintf(stderr, "%s\n", e.message);
    return 1;
  }
  for (int i = 1; i + 1 < argc; i += 2) bench(d, atoll(argv[i]), atoll(argv[i + 1]));
  if (argc < 3) {
    bench(d, 512, 512);
    bench(d, 1024, 2048);
    bench(d, 4096, 4096);
  }
  d->k->close(d);
  return 0;
}
