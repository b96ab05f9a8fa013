/* What tests of CPU operations share: a device, matrices of random values,
 * and a hash of results. */
#ifndef FP4D_TESTS_CPU_DEVICE_H
#define FP4D_TESTS_CPU_DEVICE_H

#include <math.h>
#include <stdlib.h>

#include "base/philox.h"
#include "kernels/cpu/cpu.h"
#include "kernels/formats.h"
#include "tests/test.h"

static inline void *test_memory(size_t bytes) {
  void *p = calloc(bytes ? bytes : 1, 1);
  if (!p) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return p;
}

/* A CPU device with the scratch that the producers ask for. */
static inline struct device *test_device(int threads, const struct extent *x) {
  struct error e = {0};
  struct cpu_device *c = test_memory(sizeof *c);
  c->threads = threads_create(threads, &e);
  if (!c->threads) {
    fprintf(stderr, "%s\n", e.message);
    exit(1);
  }
  c->scratch_bytes = cpu_producer_scratch_bytes(x, threads);
  c->scratch = aligned_alloc(256, (size_t)(c->scratch_bytes + 255) / 256 * 256);
  if (!c->scratch) exit(1);
  memset(c->scratch, 0xA5, (size_t)c->scratch_bytes); /* what was there must not matter */
  return &c->device;
}

static inline void test_device_close(struct device *d) {
  threads_destroy(cpu_of(d)->threads);
  free(cpu_of(d)->scratch);
  free(d);
}

/* The backend as the program opens it, with scratch for `x`. */
static inline struct device *test_backend(int threads, const struct extent *x) {
  struct error e = {0};
  struct device *d = device_open("cpu", threads, &e);
  if (!d) {
    printf("not ok device: %s\n", e.message);
    exit(1);
  }
  const int64_t bytes = d->k->scratch_bytes(d, x);
  void *scratch = aligned_alloc(256, (size_t)(bytes + 255) / 256 * 256);
  if (!scratch) {
    printf("not ok memory: scratch of %" PRId64 " bytes\n", bytes);
    exit(1);
  }
  memset(scratch, 0xA5, (size_t)bytes); /* what was there must not matter */
  d->k->set_scratch(d, scratch, bytes);
  return d;
}

static inline void test_backend_close(struct device *d) {
  void *scratch = cpu_of(d)->scratch;
  d->k->close(d);
  free(scratch);
}

static inline double test_uniform(uint64_t key, int64_t i) { /* (0, 1) */
  struct philox_block r = philox4x32_10(key, philox_counter(7, 0, 0, 0, (uint32_t)i));
  return ((double)r.word[0] + 0.5) * 0x1p-32;
}

/* 1..most, as often small as large; half of them beside a multiple of a power of two. */
static inline int64_t test_size(uint64_t key, int64_t i, int64_t most) {
  int64_t size = (int64_t)exp(test_uniform(key, 4 * i) * log((double)most + 1));
  int64_t power = (int64_t)16 << (int)(test_uniform(key, 4 * i + 1) * 8);
  if (test_uniform(key, 4 * i + 2) < 0.5) size = (size + power) / power * power + (int64_t)(test_uniform(key, 4 * i + 3) * 3) - 1;
  return size > most ? most : size;
}

static inline struct matrix test_matrix(enum dtype t, int64_t rows, int64_t cols) {
  return (struct matrix){test_memory((size_t)(rows * cols) * dtype_bytes(t)), t, rows, cols};
}

static inline void test_set(struct matrix *m, int64_t i, double v) {
  if (m->dtype == DTYPE_F32) ((float *)m->data)[i] = (float)v;
  else ((uint16_t *)m->data)[i] = bf16_encode((float)v);
}

static inline double test_get(const struct matrix *m, int64_t i) {
  return m->dtype == DTYPE_F32 ? (double)((const float *)m->data)[i]
                               : (double)bf16_decode(((const uint16_t *)m->data)[i]);
}

/* Sums of three uniform numbers, scaled: bell-shaped, no libm. */
static inline struct matrix test_random(enum dtype t, int64_t rows, int64_t cols, uint64_t key, double scale) {
  struct matrix m = test_matrix(t, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) {
    struct philox_block r = philox4x32_10(key, philox_counter(1, 0, 0, 0, (uint32_t)i));
    double u = ((double)r.word[0] + (double)r.word[1] + (double)r.word[2]) * 0x1p-32 - 1.5;
    test_set(&m, i, 2.0 * scale * u);
  }
  return m;
}

static inline struct matrix test_copy(const struct matrix *m) {
  struct matrix c = test_matrix(m->dtype, m->rows, m->cols);
  memcpy(c.data, m->data, (size_t)(m->rows * m->cols) * dtype_bytes(m->dtype));
  return c;
}

static inline bool test_same(const struct matrix *a, const struct matrix *b) {
  return a->dtype == b->dtype && a->rows == b->rows && a->cols == b->cols &&
         memcmp(a->data, b->data, (size_t)(a->rows * a->cols) * dtype_bytes(a->dtype)) == 0;
}

/* FNV-1a over whole elements. */
static inline uint64_t test_hash(uint64_t h, const void *data, size_t count, size_t element) {
  const unsigned char *p = data;
  for (size_t i = 0; i < count; i++) {
    uint64_t v = 0;
    for (size_t b = 0; b < element; b++) v |= (uint64_t)p[element * i + b] << (8 * b);
    h = (h ^ v) * 0x100000001B3u;
  }
  return h;
}
#define TEST_HASH_START 0xCBF29CE484222325u

static inline uint64_t test_hash_matrix(uint64_t h, const struct matrix *m) {
  return test_hash(h, m->data, (size_t)(m->rows * m->cols), dtype_bytes(m->dtype));
}

#define CHECK_HASH(h, expected)                                                     \
  do {                                                                              \
    uint64_t test_h = (h);                                                          \
    if (test_h != (uint64_t)(expected)) FAIL("bits changed: 0x%016" PRIx64, test_h); \
  } while (0)

/* |got - want| <= bound, and not NaN. */
static inline bool test_near(double got, double want, double bound) { return fabs(got - want) <= bound; }

/* Rounding to nearest in `t`: the largest relative error. */
static inline double test_half_ulp(enum dtype t) { return t == DTYPE_BF16 ? 0x1p-8 : 0x1p-24; }

static const enum dtype test_types[2] = {DTYPE_F32, DTYPE_BF16};

#endif
