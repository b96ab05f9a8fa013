/* Damage: what is broken is named and passed over, and the one before is used. */
#include <hdf5.h>

#include "tests/checkpoints_rig.h"

#define OLD "d/step-00000003"
#define NEW "d/step-00000006"
#define NEW_FILE NEW "/rank-00000.h5"

static void fresh(void) {
  CHECK(file_remove_tree("d", ERROR_SYSTEM, &failure));
  CHECK(rig_save("d", 3, 0) && rig_save("d", 6, 0));
}

/* The newest is passed over with a warning that says `what`, and 3 is used. */
static void passed_over(const char *what) {
  int was = rig_quiet_begin();
  int64_t update = rig_newest("d");
  const char *text = rig_quiet_end(was);
  if (update != 3 || !strstr(text, "warning: checkpoint passed over: ") || !strstr(text, what))
    FAIL("%s: newest is %d: %s", what, (int)update, text);
}

static void flip(const char *path, int64_t at, unsigned char mask) {
  unsigned char byte;
  int fd = open(path, O_RDWR);
  CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1);
  byte ^= mask;
  CHECK(pwrite(fd, &byte, 1, at) == 1);
  close(fd);
}

TEST(flipped) {
  fresh();
  const int64_t bytes = file_size(NEW_FILE);
  for (int i = 0; i < 64; i++) {
    const int64_t at = i < 8 ? i : i < 16 ? bytes - 1 - (i - 8) : rig_bits(1, i, 1) % bytes;
    flip(NEW_FILE, at, (unsigned char)(1 << i % 8));
    passed_over(NEW_FILE " is damaged: its checksum differs");
    struct checkpoint *k = checkpoint_open(NEW, true, &failure);
    if (k) FAIL("byte %d", (int)at);
    checkpoint_close(k);
    /* not verified: an error, or values; never a crash */
    k = checkpoint_open(NEW, false, &failure);
    if (k) {
      static char data[4 * RIG_LARGEST];
      for (int t = 0; t < checkpoint_tensor_count(k) && t < RIG_TENSORS; t++) {
        struct tensor_slice s = rig_slice(t, 0, rig_shape[t].rows, data);
        checkpoint_read(k, &s, 1, &failure);
      }
    }
    checkpoint_close(k);
    flip(NEW_FILE, at, (unsigned char)(1 << i % 8));
  }
  CHECK_EQ_I64(rig_newest("d"), 6);
}

TEST(truncated) {
  fresh();
  const int64_t bytes = file_size(NEW_FILE), at[] = {bytes - 1, bytes / 2, 4096, 100, 8, 1, 0};
  for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
    CHECK(truncate(NEW_FILE, at[i]) == 0);
    passed_over("bytes, the manifest says");
    struct hdf5_file *f = hdf5_open(NEW_FILE, &failure);
    if (f) FAIL("opens with %d of %d bytes", (int)at[i], (int)bytes);
    hdf5_close(f);
    CHECK(strstr(failure.message, "cannot open " NEW_FILE ": HDF5: "));
  }
  int fd = open(NEW_FILE, O_WRONLY | O_APPEND);
  for (int64_t i = 0; i <= bytes; i++) CHECK(write(fd, "", 1) == 1);
  close(fd);
  passed_over("bytes, the manifest says"); /* longer */
}

TEST(missing) {
  fresh();
  CHECK(unlink(NEW_FILE) == 0);
  passed_over(NEW_FILE " is missing");
  CHECK(file_make_folder(NEW_FILE, ERROR_SYSTEM, &failure));
  passed_over("rank-00000.h5");
  fresh();
  CHECK(unlink(NEW "/manifest.json") == 0);
  passed_over("cannot open " NEW "/manifest.json");
  CHECK(file_remove_tree(NEW, ERROR_SYSTEM, &failure));
  rig_put(NEW, "a file");
  passed_over(NEW);
}

TEST(manifests) {
  static const char *const broken[] = {
      "", "{", "[]", "{}", "nul\0", "{\"format\":\"fp4d-checkpoint\",\"version\":2,\"update\":6,\"files\":[],\"meta\":\"{}\"}",
      "{\"format\":\"other\",\"version\":1,\"update\":6,\"files\":[{\"name\":\"rank-00000.h5\",\"bytes\":1,"
      "\"xxh3_128\":\"00000000000000000000000000000000\"}],\"meta\":\"{}\"}",
      "{\"format\":\"fp4d-checkpoint\",\"version\":1,\"update\":6,\"files\":[],\"meta\":\"{}\"}",
      "{\"format\":\"fp4d-checkpoint\",\"version\":1,\"update\":6,\"files\":[{}],\"meta\":\"{}\"}",
      "{\"format\":\"fp4d-checkpoint\",\"version\":1,\"update\":6,\"files\":[{\"name\":\"../../etc/passwd\",\"bytes\":1,"
      "\"xxh3_128\":\"00000000000000000000000000000000\"}],\"meta\":\"{}\"}",
      "{\"format\":\"fp4d-checkpoint\",\"version\":1,\"update\":6,\"files\":[{\"name\":\"rank-00000.h5\",\"bytes\":1,"
      "\"xxh3_128\":\"zz\"}],\"meta\":\"{}\"}",
      "{\"format\":\"fp4d-checkpoint\",\"version\":1,\"update\":6,\"files\":[{\"name\":\"rank-00000.h5\",\"bytes\":1,"
      "\"xxh3_128\":\"00000000000000000000000000000000\"}]}",
      "{\"format\":\"fp4d-checkpoint\",\"format\":\"fp4d-checkpoint\"}",
  };
  fresh();
  char *whole;
  size_t bytes;
  CHECK(file_read(NEW "/manifest.json", 1 << 20, ERROR_SYSTEM, &whole, &bytes, &failure));
  for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
    rig_put(NEW "/manifest.json", broken[i]);
    passed_over("manifest.json");
  }
  for (size_t cut = 0; cut < bytes - 1; cut += 7) { /* any beginning of it; only the last line break may go */
    CHECK(file_publish(NEW "/manifest.json", whole, cut, ERROR_SYSTEM, &failure));
    passed_over("manifest.json");
  }
  CHECK(file_publish(NEW "/manifest.json", whole, bytes, ERROR_SYSTEM, &failure));
  CHECK_EQ_I64(rig_newest("d"), 6);
  free(whole);
}

/* Manifests whose own digest holds but that no save writes. */
TEST(forged_manifests) {
  fresh();
  struct manifest m;
  CHECK(manifest_load(NEW, &m, &failure));
  const struct manifest_file whole = m.files[0];
  static const struct {
    const char *name, *second; /* of the files */
    int64_t bytes;             /* 0: as they are */
  } forged[] = {
      {"rank-00000.h5", "rank-00000.h5", 0}, {"rank-00000.h5", "rank-00002.h5", 0}, {"rank-00001.h5", NULL, 0}, {"", NULL, 4096},
      {".", NULL, 4096},                     {"..", NULL, 4096},                    {"manifest.json", NULL, 0}, {"rank-0.h5", NULL, 0},
      {"rank-00000.h5", NULL, -1},           {"rank-00000.h5", NULL, INT64_MIN},    {"rank-00000.h5", NULL, INT64_MAX},
      {"rank-00000.h5", "rank-00001.h5", INT64_MAX},
  };
  for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
    struct manifest_file files[2] = {whole, whole};
    for (int j = 0; j < 2; j++) {
      const char *name = j ? forged[i].second : forged[i].name;
      snprintf(files[j].name, sizeof files[j].name, "%s", name ? name : "");
      if (forged[i].bytes) files[j].bytes = forged[i].bytes;
    }
    const struct manifest other = {.update = 6, .files = files, .n_files = forged[i].second ? 2 : 1, .meta = m.meta};
    CHECK(manifest_write(NEW, &other, &failure));
    passed_over(forged[i].bytes == INT64_MAX ? "bytes, the manifest says" : "manifest.json is not a manifest");
  }
  const struct manifest back = {.update = -6, .files = m.files, .n_files = 1, .meta = m.meta};
  CHECK(manifest_write(NEW, &back, &failure));
  passed_over("manifest.json is not a manifest");
  manifest_free(&m);
}

/* A rank's file of another step of the run: the same name, tensors and often size. */
TEST(swapped) {
  fresh();
  CHECK(rename(NEW_FILE, "swap.h5") == 0 && rename(OLD "/rank-00000.h5", NEW_FILE) == 0 && rename("swap.h5", OLD "/rank-00000.h5") == 0);
  int was = rig_quiet_begin();
  CHECK_EQ_I64(rig_newest("d"), -2);
  CHECK(strstr(rig_quiet_end(was), "warning: checkpoint passed over: d/step-00000003/rank-00000.h5"));
}

static void put_bytes(const char *path, const char *data, size_t bytes) {
  FILE *f = fopen(path, "wb");
  CHECK(f && fwrite(data, 1, bytes, f) == bytes);
  if (f) CHECK(fclose(f) == 0);
}

/* Any byte, or some, of any file: what was saved, or one line that it is not whole. */
TEST(mutated) {
  enum { TRIALS = 500 }; /* 2,000 were run once, under sanitizers too */
  static const char *const path[] = {NEW "/manifest.json", NEW_FILE};
  fresh();
  char *whole[2];
  size_t bytes[2];
  int same = 0;
  for (int f = 0; f < 2; f++) CHECK(file_read(path[f], 1 << 30, ERROR_SYSTEM, &whole[f], &bytes[f], &failure));
  for (int i = 0; i < TRIALS; i++) {
    const int f = i % 4 == 3, changes = i % 3 == 0 ? 1 : 1 + (int)(rig_bits(2, i, 7) % 8); /* the manifest more often: it has no digest before its own */
    char *copy = malloc(bytes[f] + 8);
    size_t size = bytes[f];
    if (!copy) return;
    memcpy(copy, whole[f], size);
    for (int c = 0; c < changes; c++) {
      const size_t at = rig_bits(3, i, c) % size;
      const uint32_t bits = rig_bits(4, i, c);
      const int kind = bits % 4;
      if (kind == 0) copy[at] = (char)(bits >> 8);
      if (kind == 1) copy[at] ^= (char)(1 << (bits >> 8) % 8);
      if (kind == 2 && size > 8) memmove(copy + at, copy + at + 1, --size - at);                          /* one less */
      if (kind == 3 && size < bytes[f] + 8) memmove(copy + at + 1, copy + at, size++ - at), copy[at] = '0'; /* one more */
    }
    put_bytes(path[f], copy, size);
    free(copy);
    failure = (struct error){0};
    struct checkpoint *k = checkpoint_open(NEW, true, &failure);
    if (k && !rig_holds(k, 6)) FAIL("trial %d: another state", i);
    if (!k && (failure.code != ERROR_CHECKPOINT || !strstr(failure.message, path[f]) || strchr(failure.message, '\n')))
      FAIL("trial %d: code %d: %s", i, (int)failure.code, failure.message);
    same += k != NULL;
    checkpoint_close(k);
    put_bytes(path[f], whole[f], bytes[f]);
  }
  CHECK(same < TRIALS / 4); /* a change of white space, or of nothing */
  CHECK_EQ_I64(rig_newest("d"), 6);
  for (int f = 0; f < 2; f++) free(whole[f]);
}

TEST(all_damaged) {
  fresh();
  CHECK(truncate(NEW_FILE, 10) == 0 && unlink(OLD "/rank-00000.h5") == 0);
  int was = rig_quiet_begin();
  CHECK_EQ_I64(rig_newest("d"), -2);
  rig_quiet_end(was);
  CHECK_EQ_I64(failure.code, ERROR_CHECKPOINT);
  CHECK(strstr(failure.message, "d holds no whole checkpoint; the newest: " NEW_FILE));
  CHECK(failure.hint[0]);
}

/* Foreign HDF5 files and datasets. */
TEST(foreign) {
  hid_t file = H5Fcreate("foreign.h5", H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  const hsize_t shape[3] = {2, 2, 2};
  hid_t space = H5Screate_simple(3, shape, NULL);
  hid_t dataset = H5Dcreate2(file, "x", H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  H5Dclose(dataset);
  H5Sclose(space);
  H5Fclose(file);
  CHECK(!hdf5_open("foreign.h5", &failure));
  CHECK_STR(failure.message, "foreign.h5 holds a dataset that is not a tensor slice of fp4d");
  /* sizes whose products overflow, and fewer rows in all than in the slice */
  static const struct {
    hsize_t shape[2];
    int64_t global_rows, cols;
  } huge[] = {{{(hsize_t)1 << 40, (hsize_t)1 << 40}, (int64_t)1 << 40, (int64_t)1 << 40}, {{8, 1}, INT64_MAX, 1},
              {{8, 1}, INT64_MIN, 1}, {{8, 1}, -1, 1}, {{8, 1}, 7, 1}};
  for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
    const hsize_t chunk[2] = {1, 1};
    const int64_t zero = 0, f32 = DTYPE_F32, *const values[] = {&huge[i].global_rows, &huge[i].cols, &zero, &f32};
    static const char *const names[] = {"global_rows", "cols", "first_row", "dtype"};
    file = H5Fcreate("huge.h5", H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t chunked = H5Pcreate(H5P_DATASET_CREATE), scalar = H5Screate(H5S_SCALAR);
    H5Pset_chunk(chunked, 2, chunk);
    space = H5Screate_simple(2, huge[i].shape, NULL);
    dataset = H5Dcreate2(file, "x", H5T_IEEE_F32LE, space, H5P_DEFAULT, chunked, H5P_DEFAULT);
    CHECK(dataset >= 0);
    for (int j = 0; j < 4; j++) {
      hid_t attribute = H5Acreate2(dataset, names[j], H5T_STD_I64LE, scalar, H5P_DEFAULT, H5P_DEFAULT);
      CHECK(H5Awrite(attribute, H5T_NATIVE_INT64, values[j]) >= 0);
      H5Aclose(attribute);
    }
    H5Dclose(dataset);
    H5Sclose(space);
    H5Sclose(scalar);
    H5Pclose(chunked);
    H5Fclose(file);
    struct hdf5_file *f = hdf5_open("huge.h5", &failure);
    if (f) FAIL("%d opens", (int)i);
    hdf5_close(f);
  }
  /* attributes of many values, where one is read; of another kind of number */
  for (int kind = 0; kind < 3; kind++) {
    const hsize_t rows[2] = {8, 1}, many = 4096;
    file = H5Fcreate("many.h5", H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    space = H5Screate_simple(2, rows, NULL);
    hid_t array = H5Screate_simple(1, &many, NULL), scalar = H5Screate(H5S_SCALAR);
    dataset = H5Dcreate2(file, "x", kind == 2 ? H5T_STD_I32LE : H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    static const char *const names[] = {"global_rows", "cols", "first_row", "dtype"};
    static const int64_t values[] = {8, 1, 0, DTYPE_F32};
    static int64_t filler[4096];
    for (int j = 0; j < 4; j++) {
      const bool wide = kind == 0 || (kind == 1 && j == 3);
      for (size_t v = 0; v < many; v++) filler[v] = values[j];
      hid_t attribute = H5Acreate2(dataset, names[j], H5T_STD_I64LE, wide ? array : scalar, H5P_DEFAULT, H5P_DEFAULT);
      CHECK(H5Awrite(attribute, H5T_NATIVE_INT64, filler) >= 0);
      H5Aclose(attribute);
    }
    H5Sclose(array);
    H5Sclose(scalar);
    H5Sclose(space);
    H5Dclose(dataset);
    H5Fclose(file);
    struct hdf5_file *f = hdf5_open("many.h5", &failure);
    if (f) FAIL("kind %d opens", kind);
    hdf5_close(f);
    CHECK_STR(failure.message, "many.h5 holds a dataset that is not a tensor slice of fp4d");
  }
  rig_put("text.h5", "nothing of the kind");
  CHECK(!hdf5_open("text.h5", &failure));
  CHECK(!hdf5_open("absent.h5", &failure));
  CHECK(strstr(failure.message, "absent.h5"));
}

static void tests(void) {
  RUN(flipped);
  RUN(truncated);
  RUN(missing);
  RUN(manifests);
  RUN(forged_manifests);
  RUN(swapped);
  RUN(mutated);
  RUN(all_damaged);
  RUN(foreign);
}

int main(void) { return rig_main(tests); }
