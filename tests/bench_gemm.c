/* The contraction's speed beside OpenBLAS's sgemm, one line a shape.
 *
 *   bench_gemm [SECONDS]     time spent on a figure (default 0.3)
 *
 * Figures are the best run: other work on the machine only makes them worse.
 * FP4D_ISA chooses our instruction set, OPENBLAS_CORETYPE (better unset) theirs. */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/cpu/cpu.h"

static const struct shape {
  int64_t m, n, k;
} shapes[] = {{512, 512, 512}, {1024, 1024, 1024}, {2048, 2048, 2048}, {64, 256, 256}};

static double seconds = 0.3;

static void *zeros(int64_t bytes) {
  void *p = calloc(1, (size_t)bytes);
  if (!p) {
    fprintf(stderr, "bench_gemm: out of memory\n");
    exit(1);
  }
  return p;
}

static struct operand make_operand(enum format format, enum view view, int64_t rows, int64_t cols) {
  static float one = 1;
  struct operand o = {.encoding = {.format = format}, .view = view, .rows = rows, .cols = cols, .outer = &one};
  int64_t bytes = operand_code_bytes(&o.encoding, rows, cols), scale_bytes = operand_scale_bytes(&o.encoding, rows, cols);
  o.codes = zeros(bytes);
  if (encoding_is_plain(&o.encoding))
    for (int64_t i = 0; i < rows * cols; i++) {
      float x = (float)(i * 7919 % 2001 - 1000) * 0x1p-8f;
      if (format == FORMAT_F32) memcpy(o.codes + 4 * i, &x, 4);
      else memcpy(o.codes + 2 * i, (char *)&x + 2, 2);
    }
  else
    for (int64_t i = 0; i < bytes; i++) o.codes[i] = (uint8_t)(i * 7919 >> 3) & 0xbf;
  if (scale_bytes) {
    o.scales = zeros(scale_bytes);
    for (int64_t i = 0; i < scale_bytes; i++) o.scales[i] = (uint8_t)((format == FORMAT_MXFP4 ? 120 : 50) + i * 7919 % 11);
  }
  return o;
}

static double ours(struct cpu_device *d, const struct shape *s, enum format format, enum view view) {
  struct operand a = make_operand(format, view, s->m, s->k), b = make_operand(format, view, s->n, s->k);
  struct matrix out = {zeros(4 * s->m * s->n), DTYPE_F32, s->m, s->n};
  double best = 1e30, begin = clock_seconds();
  while (clock_seconds() - begin < seconds) {
    double t = clock_seconds();
    cpu_contract(&d->device, &out, &a, &b, NULL);
    t = clock_seconds() - t;
    if (t < best) best = t;
  }
  free(a.codes), free(a.scales), free(b.codes), free(b.scales), free(out.data);
  return 2e-9 * (double)(s->m * s->n * s->k) / best;
}

static double theirs(const struct shape *s) {
  struct operand a = make_operand(FORMAT_F32, VIEW_ROW, s->m, s->k), b = make_operand(FORMAT_F32, VIEW_ROW, s->n, s->k);
  float *out = zeros(4 * s->m * s->n);
  double best = 1e30, begin = clock_seconds();
  while (clock_seconds() - begin < seconds) {
    double t = clock_seconds();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)s->m, (int)s->n, (int)s->k, 1, (float *)(void *)a.codes,
                (int)s->k, (float *)(void *)b.codes, (int)s->k, 0, out, (int)s->n);
    t = clock_seconds() - t;
    if (t < best) best = t;
  }
  free(a.codes), free(b.codes), free(out);
  return 2e-9 * (double)(s->m * s->n * s->k) / best;
}

int main(int argc, char **argv) {
  if (argc > 1) seconds = atof(argv[1]);
  static const struct {
    const char *name;
    enum format format;
    enum view view;
  } kinds[] = {{"fp32", FORMAT_F32, VIEW_ROW}, {"bf16", FORMAT_BF16, VIEW_ROW}, {"bf16 columns", FORMAT_BF16, VIEW_COLUMN},
               {"mxfp4", FORMAT_MXFP4, VIEW_ROW}, {"nvfp4", FORMAT_NVFP4, VIEW_ROW}, {"e4m3", FORMAT_E4M3, VIEW_ROW}};
  struct error e;
  if (!cpu_isa_choose(NULL, &e)) {
    fprintf(stderr, "bench_gemm: %s\n", e.message);
    return 1;
  }
  printf("# %s against OpenBLAS %s; GF/s and ratio\n", cpu_isa_name(), openblas_get_corename());
  for (int threads = 1; threads <= 2; threads++) {
    struct cpu_device d = {.threads = threads_create(threads, &e)};
    d.scratch_bytes = cpu_contract_scratch_bytes(NULL, threads);
    d.scratch = zeros(d.scratch_bytes);
    if (!d.threads) return 1;
    openblas_set_num_threads(threads);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
      double reference = theirs(&shapes[i]);
      printf("%d thread%s %5ld x %5ld x %5ld  sgemm %7.1f", threads, threads > 1 ? "s" : " ", (long)shapes[i].m,
             (long)shapes[i].n, (long)shapes[i].k, reference);
      for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        double figure = ours(&d, &shapes[i], kinds[k].format, kinds[k].view);
        printf(" | %s %7.1f %5.2f", kinds[k].name, figure, figure / reference);
        fflush(stdout);
      }
      printf("\n");
    }
    threads_destroy(d.threads);
    free(d.scratch);
  }
  return 0;
}
