/* Compressed datasets: values to the bit through any window, one file for any number of
 * threads, HDF5's own pipeline on both sides, damage that names its tensor. */
#include <hdf5.h>
#include <time.h>

#include "base/hash.h"
#include "checkpoints/chunk.h"
#include "checkpoints/zstd_filter.h"
#include "tests/checkpoints_rig.h"
#include "tests/random.h"

static uint64_t below(uint64_t n) { return next() % n; }

static uint64_t noise(uint64_t i) { return hash_word(&i, sizeof i, 99); }

/* Every element has bits of its own; the upper ones are like weights'. */
static void *elements(enum dtype d, int64_t n, uint64_t seed) {
  char *data = malloc((size_t)n * dtype_bytes(d));
  for (int64_t i = 0; i < n; i++) {
    const uint32_t x = (uint32_t)noise(seed * 1000003 + (uint64_t)i);
    if (d == DTYPE_BF16)
      memcpy(data + 2 * i, &(uint16_t){(uint16_t)(0x3c00 | (x & 0x81ff))}, 2);
    else
      memcpy(data + 4 * i, &(uint32_t){0x3c000000 | (x & 0x81ffffff)}, 4);
  }
  return data;
}

static struct hash file_hash(const char *path) {
  struct manifest_file f;
  CHECK(manifest_measure(path, &f, &failure));
  return f.hash;
}

TEST(rows_of_a_chunk) {
  for (int i = 0; i < 2000; i++) {
    const int64_t rows = 1 + (int64_t)below(i % 2 ? 1 << 20 : 40);
    const size_t row_bytes = 2 * (1 + below(i % 3 ? 1 << 16 : 8 << 20));
    const int64_t r = chunk_rows(rows, row_bytes), chunks = (rows + r - 1) / r;
    CHECK(r >= 1 && r <= rows);
    if (r > 1) CHECK((size_t)r * row_bytes <= CHUNK_BYTES);
    if (chunks > 1 && r > 1) CHECK(((size_t)r + 1) * row_bytes > CHUNK_BYTES / 2);
    CHECK(chunks * r - rows < chunks); /* padding: less than a row a chunk */
  }
}

static void windows(struct hdf5_file *f, int i, const void *whole) {
  const struct tensor_slice *s = hdf5_slice(f, i);
  const size_t row = (size_t)s->cols * dtype_bytes(s->dtype);
  char *back = malloc((size_t)s->rows * row + 1);
  for (int trial = 0; trial < 12; trial++) {
    const int64_t first = trial ? (int64_t)below((uint64_t)s->rows) : 0;
    const int64_t rows = trial ? 1 + (int64_t)below((uint64_t)(s->rows - first)) : s->rows;
    memset(back, 0x5a, (size_t)rows * row + 1);
    if (!hdf5_read(f, i, first, rows, back, &failure)) FAIL("%s", failure.message);
    if (memcmp(back, (const char *)whole + (size_t)first * row, (size_t)rows * row) != 0) FAIL("%s: rows %d + %d", s->name, (int)first, (int)rows);
    if (back[(size_t)rows * row] != 0x5a) FAIL("%s: written past the window", s->name);
  }
  free(back);
}

TEST(any_window_any_threads) {
  static const struct {
    enum dtype dtype;
    int64_t rows, cols;
  } shape[] = {{DTYPE_F32, 1, 1}, {DTYPE_BF16, 3, 5}, {DTYPE_F32, 4099, 1537}, {DTYPE_BF16, 70001, 193}, {DTYPE_F32, 2, 2100001}, {DTYPE_F32, 61, 1}};
  enum { N = sizeof shape / sizeof *shape };
  struct tensor_slice s[N];
  for (int i = 0; i < N; i++) {
    s[i] = (struct tensor_slice){.dtype = shape[i].dtype, .global_rows = shape[i].rows, .cols = shape[i].cols, .rows = shape[i].rows,
                                 .data = elements(shape[i].dtype, shape[i].rows * shape[i].cols, (uint64_t)i)};
    snprintf(s[i].name, sizeof s[i].name, "param/t%d", i);
  }
  struct hash first = {0, 0};
  for (int threads = 0; threads <= 5; threads += threads < 2 ? 1 : 3) {
    struct threads *pool = threads ? threads_create(threads, &failure) : NULL;
    const struct hdf5_options o = {CHECKPOINT_ZSTD, pool};
    CHECK(hdf5_write_with("w.h5", &o, s, N, &failure));
    if (threads == 1) nanosleep(&(struct timespec){.tv_sec = 1, .tv_nsec = 1000000}, NULL); /* nor on the time */
    if (!threads) first = file_hash("w.h5");
    if (!hash_equal(first, file_hash("w.h5"))) FAIL("%d threads make another file", threads);
    struct hdf5_file *f = hdf5_open("w.h5", &failure);
    CHECK(f && hdf5_slice_count(f) == N);
    if (f) hdf5_use_threads(f, pool);
    for (int i = 0; f && i < N; i++) {
      int64_t stored;
      CHECK(hdf5_compressed(f, i, &stored));
      if (shape[i].rows > 1000 && stored > shape[i].rows * shape[i].cols * (int64_t)dtype_bytes(shape[i].dtype) * 9 / 10) FAIL("t%d does not shrink", i);
      windows(f, i, s[i].data);
    }
    hdf5_close(f);
    threads_destroy(pool);
  }
  for (int i = 0; i < N; i++) free(s[i].data);
}

/* HDF5's pipeline undoes what we make, and makes what we undo. */
TEST(the_library_agrees) {
  enum { ROWS = 5003, COLS = 701 };
  float *data = elements(DTYPE_F32, ROWS * COLS, 5), *back = calloc(ROWS * COLS, sizeof *back);
  struct tensor_slice s = {.name = "x", .dtype = DTYPE_F32, .global_rows = ROWS, .cols = COLS, .rows = ROWS, .data = data};
  CHECK(hdf5_write("ours.h5", &s, 1, &failure));
  hid_t file = H5Fopen("ours.h5", H5F_ACC_RDONLY, H5P_DEFAULT), set = H5Dopen2(file, "x", H5P_DEFAULT);
  CHECK(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, back) >= 0);
  CHECK(memcmp(data, back, sizeof(float) * ROWS * COLS) == 0);
  hid_t list = H5Dget_create_plist(set);
  H5Dclose(set);
  H5Fclose(file);

  file = H5Fcreate("theirs.h5", H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  const hsize_t shape[2] = {ROWS, COLS};
  hid_t space = H5Screate_simple(2, shape, NULL), scalar = H5Screate(H5S_SCALAR);
  set = H5Dcreate2(file, "x", H5T_IEEE_F32LE, space, H5P_DEFAULT, list, H5P_DEFAULT);
  CHECK(H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
  static const char *const names[] = {"global_rows", "cols", "first_row", "dtype"};
  const int64_t values[] = {ROWS, COLS, 0, DTYPE_F32};
  for (int i = 0; i < 4; i++) {
    hid_t attribute = H5Acreate2(set, names[i], H5T_STD_I64LE, scalar, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, H5T_NATIVE_INT64, &values[i]);
    H5Aclose(attribute);
  }
  H5Dclose(set);
  H5Pclose(list);
  H5Sclose(space);
  H5Sclose(scalar);
  H5Fclose(file);
  struct hdf5_file *f = hdf5_open("theirs.h5", &failure);
  int64_t stored;
  CHECK(f && hdf5_compressed(f, 0, &stored));
  if (f) windows(f, 0, data);
  hdf5_close(f);
  free(data);
  free(back);
}

/* Any byte of a chunk: the frame's checksum finds it without a manifest, and the tensor is named. */
TEST(damage_names_its_tensor) {
  enum { ROWS = 3001, COLS = 33 };
  struct tensor_slice s[2];
  for (int i = 0; i < 2; i++) {
    s[i] = (struct tensor_slice){.dtype = DTYPE_F32, .global_rows = ROWS, .cols = COLS, .rows = ROWS, .data = elements(DTYPE_F32, ROWS * COLS, (uint64_t)i)};
    snprintf(s[i].name, sizeof s[i].name, "param/t%d", i);
  }
  CHECK(hdf5_write("d.h5", s, 2, &failure));
  int64_t start[2], size[2];
  struct hdf5_file *f = hdf5_open("d.h5", &failure);
  for (int i = 0; i < 2; i++) hdf5_compressed(f, i, &size[i]);
  hdf5_close(f);
  char *content;
  size_t bytes;
  CHECK(file_read("d.h5", 1 << 24, ERROR_SYSTEM, &content, &bytes, &failure));
  for (size_t at = 0, found = 0; at + 4 < bytes && found < 2; at++) /* a frame's magic number */
    if (memcmp(content + at, "\x28\xb5\x2f\xfd", 4) == 0) start[found++] = (int64_t)at;
  float *back = calloc(ROWS * COLS, sizeof *back);
  for (int trial = 0; trial < 60; trial++) {
    const int which = trial % 2;
    const int64_t at = start[which] + (trial < 8 ? trial / 2 : (int64_t)below((uint64_t)size[which]));
    const char was = content[at];
    content[at] = (char)(content[at] ^ 1 << below(8));
    rig_put("d.h5", "");
    CHECK(file_publish("d.h5", content, bytes, ERROR_SYSTEM, &failure));
    content[at] = was;
    f = hdf5_open("d.h5", &failure);
    for (int i = 0; f && i < 2; i++) {
      const bool good = hdf5_read(f, i, 0, ROWS, back, &failure);
      if (good && memcmp(back, s[i].data, sizeof(float) * ROWS * COLS) != 0) FAIL("byte %d: other values", (int)at);
      if (!good && (i != which || !strstr(failure.message, s[i].name))) FAIL("byte %d of t%d: %s", (int)at, which, failure.message);
      /* a frame has spare bits that nothing depends on: its values are then the same */
    }
    hdf5_close(f);
  }
  free(back);
  free(content);
  free(s[0].data);
  free(s[1].data);
}

/* ---- a save apart ---------------------------------------------------------------------- */

static struct checkpoint_saver *apart(const char *folder, const struct checkpoint_policy *p) {
  struct checkpoint_saver *s = checkpoint_saver_open(world, folder, p, true, &failure);
  if (!s) FAIL("%s", failure.message);
  return s;
}

static bool to_the_end(struct checkpoint_saver *s, struct checkpoint_saved *out) {
  bool done = false, good = true;
  while (good && !done) {
    checkpoint_saver_wait(s);
    CHECK(!checkpoint_saver_busy(s));
    good = checkpoint_saver_advance(s, &done, out, &failure);
  }
  CHECK(!checkpoint_saver_under_way(s));
  return good;
}

TEST(saved_apart) {
  struct threads *pool = threads_create(3, &failure);
  const struct checkpoint_policy p = {.keep = 2, .compression = CHECKPOINT_ZSTD, .threads = pool};
  struct checkpoint_saver *s = apart("apart", &p);
  struct tensor_slice slices[RIG_TENSORS];
  struct checkpoint_saved saved;
  for (int64_t update = 1; update <= 4; update++) {
    rig_slices(slices, update);
    CHECK(checkpoint_saver_begin(s, update, slices, RIG_TENSORS, "{}", &failure));
    CHECK(checkpoint_saver_under_way(s));
    CHECK_EQ_I64(rig_newest("apart"), update == 1 ? -1 : update - 1); /* nothing is published before it is asked for */
    CHECK(to_the_end(s, &saved));
    CHECK(saved.update == update && saved.file_bytes > 0 && saved.seconds >= 0);
    CHECK_EQ_I64(saved.tensor_bytes, 257 * 33 * 4 + 61 * 4 + 101 * 7 * 2);
    CHECK_EQ_I64(rig_newest("apart"), update);
  }
  CHECK_STR(rig_names("apart"), "latest step-00000003 step-00000004");

  /* the disk is full: the error comes at advance, nothing is left, the next one works */
  CHECK(file_remove_tree("apart/step-00000009.tmp", ERROR_SYSTEM, &failure));
  rig_slices(slices, 9);
  CHECK(checkpoint_saver_begin(s, 9, slices, RIG_TENSORS, "{}", &failure));
  checkpoint_saver_wait(s);
  CHECK(file_remove_tree("apart/step-00000009.tmp", ERROR_SYSTEM, &failure)); /* somebody removes it */
  CHECK(!to_the_end(s, &saved));
  CHECK_EQ_I64(failure.code, ERROR_CHECKPOINT);
  CHECK_STR(rig_names("apart"), "latest step-00000003 step-00000004");
  rig_slices(slices, 10);
  CHECK(checkpoint_saver_begin(s, 10, slices, RIG_TENSORS, "{}", &failure) && to_the_end(s, &saved));
  CHECK_EQ_I64(rig_newest("apart"), 10);

  /* closed while it is under way: not published */
  rig_slices(slices, 11);
  CHECK(checkpoint_saver_begin(s, 11, slices, RIG_TENSORS, "{}", &failure));
  checkpoint_saver_close(s);
  CHECK_EQ_I64(rig_newest("apart"), 10);
  threads_destroy(pool);
  rig_put("blocked", "");
  s = apart("blocked", &p);
  CHECK(!checkpoint_saver_begin(s, 1, slices, RIG_TENSORS, "{}", &failure) && !checkpoint_saver_under_way(s));
  checkpoint_saver_close(s);
}

TEST(stored) {
  struct tensor_slice slices[RIG_TENSORS];
  struct manifest_file file = {.name = "rank-00000.h5"};
  char meta[] = "{}";
  rig_slices(slices, 5);
  CHECK(file_make_folder("old/step-00000005", ERROR_SYSTEM, &failure));
  const struct hdf5_options store = {CHECKPOINT_STORE, NULL};
  CHECK(hdf5_write_with("old/step-00000005/rank-00000.h5", &store, slices, RIG_TENSORS, &failure));
  CHECK(manifest_measure("old/step-00000005/rank-00000.h5", &file, &failure));
  CHECK(manifest_write("old/step-00000005", &(struct manifest){5, &file, 1, meta}, &failure));
  CHECK_EQ_I64(rig_newest("old"), 5);
}

static void tests(void) {
  RUN(rows_of_a_chunk);
  RUN(any_window_any_threads);
  RUN(the_library_agrees);
  RUN(damage_names_its_tensor);
  RUN(saved_apart);
  RUN(stored);
}

int main(void) {
  state = 20261130;
  return rig_main(tests);
}
