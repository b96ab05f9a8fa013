/* A matrix twice: in host memory, where the CPU backend computes, and on the
 * device.  What both made of it must have the same bits, but that a NaN may be
 * another NaN. */
#ifndef FP4D_TESTS_CUDA_TWIN_H
#define FP4D_TESTS_CUDA_TWIN_H

#include "tests/cuda_rig.h"

static struct rig rig;

struct twin {
  struct matrix host, device;
  void *allocation; /* the device's; its matrix may begin some elements later */
};

/* Copies `host`, which belongs to the twin from now on, to a place `shift` elements
 * into an allocation: not aligned to vectors where that is odd. */
static inline struct twin twin_shifted(struct matrix host, int64_t shift) {
  struct twin t = {host, host, NULL};
  const size_t before = (size_t)shift * dtype_bytes(host.dtype), bytes = rig_bytes(&host);
  t.allocation = rig_put(&rig, NULL, before + bytes);
  t.device.data = static_cast<char *>(t.allocation) + before;
  rig.gpu->k->upload(rig.gpu, t.device.data, host.data, bytes);
  rig_synchronize(&rig);
  return t;
}
static inline struct twin twin_of(struct matrix host) { return twin_shifted(host, 0); }

static inline void twin_drop(struct twin *t) {
  rig_drop(&rig, t->allocation);
  free(t->host.data);
}

static inline bool twin_is_nan(const struct matrix *m, int64_t i) { return isnan(rig_value(m, i)); }

/* Says where the device's first other element is. */
static inline bool twin_same(const char *what, const struct twin *t) {
  struct matrix got = rig_matrix_get(&rig, &t->device);
  const struct matrix *want = &t->host;
  const size_t element = dtype_bytes(want->dtype);
  const char *a = static_cast<const char *>(got.data), *b = static_cast<const char *>(want->data);
  bool same = true;
  for (int64_t i = 0; i < want->rows * want->cols && same; i++) {
    same = memcmp(a + (size_t)i * element, b + (size_t)i * element, element) == 0 || (twin_is_nan(&got, i) && twin_is_nan(want, i));
    if (!same)
      FAIL("%s [%" PRId64 ", %" PRId64 "] %s: row %" PRId64 " column %" PRId64 " is %a, expected %a", what, want->rows, want->cols,
           dtype_name(want->dtype), i / want->cols, i % want->cols, rig_value(&got, i), rig_value(want, i));
  }
  free(got.data);
  return same;
}

/* Random numbers; of every four rows one holds zeros and the smallest numbers, one
 * the largest, one what is not finite, here and there. */
static inline struct matrix twin_values(enum dtype t, int64_t rows, int64_t cols, uint64_t key, double scale) {
  static const float small[] = {0.0f, -0.0f, 0x1p-149f, -0x1p-149f, 0x1.fffffcp-127f, -0x1p-133f, 0x1p-126f, -0x1p-75f};
  static const float large[] = {0x1.fep127f, -0x1.fep127f, 0x1p64f, -0x1p64f, 0x1p100f, 1.0f, -1.0f, 0x1p-100f};
  static const float beyond[] = {NAN, INFINITY, -INFINITY};
  struct matrix m = rig_random(t, rows, cols, key, scale);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) {
      const uint32_t word = philox4x32_10(key + 77, philox_counter(2, (uint64_t)r, 0, 0, (uint32_t)c)).word[0];
      const uint64_t kind = ((uint64_t)r + key) % 4;
      if (kind == 1) rig_set(&m, r * cols + c, (double)small[word % 8]);
      if (kind == 2 && word % 3 == 0) rig_set(&m, r * cols + c, (double)large[word / 3 % 8]);
      if (kind == 3 && word % 61 == 0) rig_set(&m, r * cols + c, (double)beyond[word / 61 % 3]);
    }
  return m;
}

static const enum dtype twin_types[2] = {DTYPE_F32, DTYPE_BF16};

/* An emission to three places, of which `which` (bits) are wanted: the plain matrix,
 * and operands of BF16 and FP32. */
struct twin_emission {
  struct twin plain, row, column;
  struct operand host_row, host_column, device_row, device_column;
  struct emission host, device;
};

static inline struct operand twin_operand(const struct matrix *m, enum view view, int64_t rows, int64_t cols) {
  struct matrix shaped = *m;
  shaped.rows = rows, shaped.cols = cols;
  return operand_of_matrix(&shaped, view);
}

static inline struct twin_emission *twin_emission_of(int which, enum dtype t, int64_t rows, int64_t cols, int64_t shift) {
  struct twin_emission *e = static_cast<struct twin_emission *>(rig_host(sizeof *e));
  e->plain = twin_shifted(rig_matrix(t, rows, cols), shift);
  e->row = twin_shifted(rig_matrix(DTYPE_BF16, rows, cols), shift);
  e->column = twin_shifted(rig_matrix(DTYPE_F32, rows, cols), shift);
  e->host_row = twin_operand(&e->row.host, VIEW_ROW, rows, cols);
  e->device_row = twin_operand(&e->row.device, VIEW_ROW, rows, cols);
  e->host_column = twin_operand(&e->column.host, VIEW_COLUMN, rows, cols);
  e->device_column = twin_operand(&e->column.device, VIEW_COLUMN, rows, cols);
  if (which & 1) e->host.plain = &e->plain.host, e->device.plain = &e->plain.device;
  if (which & 2) e->host.row = &e->host_row, e->device.row = &e->device_row;
  if (which & 4) e->host.column = &e->host_column, e->device.column = &e->device_column;
  return e;
}

/* What was not wanted must be as it was, which is how both began. */
static inline void twin_emission_check(const char *what, struct twin_emission *e) {
  twin_same(what, &e->plain);
  twin_same(what, &e->row);
  twin_same(what, &e->column);
  twin_drop(&e->plain), twin_drop(&e->row), twin_drop(&e->column);
  free(e);
}

#endif
