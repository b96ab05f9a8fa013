/* What tests of the CUDA backends share.  The same source runs on the host model
 * (FP4D_CUDA_MODEL, `make check`) and, built with nvcc, on a GPU (`make check-gpu`). */
#ifndef FP4D_TESTS_CUDA_RIG_H
#define FP4D_TESTS_CUDA_RIG_H

#include <math.h>
#include <stdlib.h>

#include <initializer_list>

#include "kernels/cuda/cuda.h"
#include "tests/test.h"

#ifdef FP4D_CUDA_MODEL
static const bool rig_on_gpu = false;
#else
static const bool rig_on_gpu = true;
#endif

/* The CUDA device and the CPU's, each with scratch for the same extents. */
struct rig {
  struct device *gpu, *cpu;
  void *gpu_scratch, *cpu_scratch;
};

[[noreturn]] static inline void rig_end(const struct error *e) {
  printf("not ok device: %s (%s)\n", e->message, e->hint);
  exit(1);
}

static inline struct device *rig_device(const char *backend, const struct extent *x, void **scratch) {
  struct error e = {};
#ifdef FP4D_CUDA_MODEL
  struct device *d = strcmp(backend, "cpu") ? cuda_model_open(backend, &e) : device_open(backend, 1, &e);
#else
  struct device *d = device_open(backend, 0, &e);
#endif
  if (!d) rig_end(&e);
  const size_t bytes = (size_t)d->k->scratch_bytes(d, x);
  *scratch = d->k->allocate(d, bytes, &e);
  if (!*scratch) rig_end(&e);
  d->k->set_scratch(d, *scratch, (int64_t)bytes);
  return d;
}

static inline struct rig rig_open(const char *backend, const struct extent *x) {
  struct rig r = {};
  r.gpu = rig_device(backend, x, &r.gpu_scratch);
  r.cpu = rig_device("cpu", x, &r.cpu_scratch);
  return r;
}

static inline void rig_close(struct rig *r) {
  r->gpu->k->release(r->gpu, r->gpu_scratch);
  r->cpu->k->release(r->cpu, r->cpu_scratch);
  r->gpu->k->close(r->gpu);
  r->cpu->k->close(r->cpu);
}

/* Ends the test with the reason where the device has a fault. */
static inline void rig_synchronize(struct rig *r) {
  struct error e = {};
  if (!r->gpu->k->synchronize(r->gpu, &e)) rig_end(&e);
}

static inline void *rig_host(size_t bytes) {
  void *p = calloc(bytes ? bytes : 1, 1);
  if (!p) exit(1);
  return p;
}

/* Device memory with a copy of the host's; NULL: all bytes 0xA5. */
static inline void *rig_put(struct rig *r, const void *host, size_t bytes) {
  struct error e = {};
  void *p = r->gpu->k->allocate(r->gpu, bytes, &e);
  if (!p) rig_end(&e);
  if (host) {
    r->gpu->k->upload(r->gpu, p, host, bytes);
    rig_synchronize(r);
    return p;
  }
  void *filler = rig_host(bytes);
  memset(filler, 0xA5, bytes);
  r->gpu->k->upload(r->gpu, p, filler, bytes);
  rig_synchronize(r);
  free(filler);
  return p;
}
static inline void rig_get(struct rig *r, void *host, const void *device, size_t bytes) {
  r->gpu->k->download(r->gpu, host, device, bytes);
  rig_synchronize(r);
}
static inline void rig_drop(struct rig *r, void *device) { r->gpu->k->release(r->gpu, device); }

static inline size_t rig_bytes(const struct matrix *m) { return (size_t)(m->rows * m->cols) * dtype_bytes(m->dtype); }

/* Matrices in host memory: rubbish, or bell-shaped random numbers. */
static inline struct matrix rig_matrix(enum dtype t, int64_t rows, int64_t cols) {
  struct matrix m = {NULL, t, rows, cols};
  m.data = rig_host(rig_bytes(&m));
  memset(m.data, 0xA5, rig_bytes(&m));
  return m;
}
static inline void rig_set(struct matrix *m, int64_t i, double v) {
  if (m->dtype == DTYPE_F32) static_cast<float *>(m->data)[i] = (float)v;
  else static_cast<uint16_t *>(m->data)[i] = bf16_encode((float)v);
}
static inline double rig_value(const struct matrix *m, int64_t i) {
  return m->dtype == DTYPE_F32 ? (double)static_cast<const float *>(m->data)[i] : (double)bf16_decode(static_cast<const uint16_t *>(m->data)[i]);
}
static inline struct matrix rig_random(enum dtype t, int64_t rows, int64_t cols, uint64_t key, double scale) {
  struct matrix m = rig_matrix(t, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) {
    struct philox_block r = philox4x32_10(key, philox_counter(1, 0, 0, 0, (uint32_t)i));
    rig_set(&m, i, 2.0 * scale * (((double)r.word[0] + (double)r.word[1] + (double)r.word[2]) * 0x1p-32 - 1.5));
  }
  return m;
}

/* A device copy of a host matrix, and back into one of the same shape. */
static inline struct matrix rig_matrix_put(struct rig *r, const struct matrix *host) {
  struct matrix m = *host;
  m.data = rig_put(r, host->data, rig_bytes(host));
  return m;
}
static inline struct matrix rig_matrix_get(struct rig *r, const struct matrix *device) {
  struct matrix m = rig_matrix(device->dtype, device->rows, device->cols);
  rig_get(r, m.data, device->data, rig_bytes(device));
  return m;
}

/* The two have the same bits; says where the first difference is. */
static inline bool rig_same(const char *what, const struct matrix *got, const struct matrix *want) {
  if (got->dtype != want->dtype || got->rows != want->rows || got->cols != want->cols) {
    FAIL("%s: other shapes", what);
    return false;
  }
  const size_t element = dtype_bytes(got->dtype);
  const char *a = static_cast<const char *>(got->data), *b = static_cast<const char *>(want->data);
  for (int64_t i = 0; i < got->rows * got->cols; i++)
    if (memcmp(a + (size_t)i * element, b + (size_t)i * element, element) != 0) {
      FAIL("%s: row %" PRId64 " column %" PRId64 " is %a, expected %a", what, i / got->cols, i % got->cols, rig_value(got, i), rig_value(want, i));
      return false;
    }
  return true;
}

#endif
