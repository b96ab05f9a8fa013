/* Saving, listing and reading: values to the bit, any slicing, what stays and what goes. */
#include <errno.h>
#include <unistd.h>

#include "base/hash.h"
#include "tests/checkpoints_rig.h"

TEST(round_trip) {
  CHECK(rig_save("a", 7, 0));
  CHECK_STR(rig_names("a"), "latest step-00000007");
  CHECK_STR(rig_names("a/step-00000007"), "manifest.json rank-00000.h5");
  struct checkpoint *k = checkpoint_open("a/step-00000007", true, &failure);
  if (!k) {
    FAIL("%s", failure.message);
    return;
  }
  CHECK(rig_holds(k, 7));
  CHECK(!rig_holds(k, 8));
  CHECK_STR(checkpoint_meta(k), "{\"a\": \"\xc3\xa9\\n\"}");
  CHECK_STR(checkpoint_path(k), "a/step-00000007");
  for (int t = 0; t < RIG_TENSORS; t++) { /* in the order of names */
    const struct tensor_slice *s = checkpoint_tensor(k, t);
    CHECK_STR(s->name, rig_shape[t].name);
    CHECK(s->dtype == rig_shape[t].dtype && s->global_rows == rig_shape[t].rows && s->rows == rig_shape[t].rows);
    CHECK(s->cols == rig_shape[t].cols && s->first_row == 0);
  }
  checkpoint_close(k);
  CHECK_EQ_I64(rig_newest("a"), 7);
}

/* NaNs keep sign, kind and payload; zeros keep their sign. */
TEST(bit_patterns) {
  static uint32_t f32[] = {0x7fc00000, 0x7fc00001, 0xffc12345, 0x7f800001, 0xff812345, 0x7f800000, 0xff800000,
                           0x80000000, 0x00000001, 0x807fffff, 0x7f7fffff, 0};
  static uint16_t bf16[65536];
  static uint32_t f32_back[12];
  static uint16_t bf16_back[65536];
  for (int i = 0; i < 65536; i++) bf16[i] = (uint16_t)i;
  struct tensor_slice slices[] = {
      {.name = "adam_v/x", .dtype = DTYPE_F32, .global_rows = 12, .cols = 1, .rows = 12, .data = f32},
      {.name = "param/x", .dtype = DTYPE_BF16, .global_rows = 256, .cols = 256, .rows = 256, .data = bf16},
  };
  CHECK(checkpoint_save(world, "bits", 0, slices, 2, "{}", 0, &failure));
  struct checkpoint *k = checkpoint_open("bits/step-00000000", true, &failure);
  slices[0].data = f32_back;
  slices[1].data = bf16_back;
  CHECK(k && checkpoint_read(k, slices, 2, &failure));
  CHECK(memcmp(f32, f32_back, sizeof f32) == 0);
  CHECK(memcmp(bf16, bf16_back, sizeof bf16) == 0);
  checkpoint_close(k);
}

/* The state cut at `cuts` rows for each of `ranks` files, as that many ranks would write it. */
static void write_ranks(const char *folder, int ranks, int64_t update) {
  static char data[RIG_TENSORS][4 * RIG_LARGEST];
  struct manifest_file files[8] = {0};
  CHECK(file_make_folder(folder, ERROR_CHECKPOINT, &failure));
  for (int r = 0; r < ranks; r++) {
    struct tensor_slice slices[RIG_TENSORS];
    int n = 0;
    char path[1024];
    for (int t = 0; t < RIG_TENSORS; t++) {
      const int64_t first = rig_shape[t].rows * r / ranks, rows = rig_shape[t].rows * (r + 1) / ranks - first;
      rig_fill(data[t], t, first, rows, update);
      if (rows > 0) slices[n++] = rig_slice(t, first, rows, data[t]);
    }
    snprintf(files[r].name, sizeof files[r].name, "rank-%05d.h5", r);
    snprintf(path, sizeof path, "%s/%s", folder, files[r].name);
    CHECK(hdf5_write(path, slices, n, &failure) && manifest_measure(path, &files[r], &failure));
  }
  char meta[] = "{}";
  CHECK(manifest_write(folder, &(struct manifest){update, files, ranks, meta}, &failure));
}

TEST(slices_of_other_worlds) {
  static char want[4 * RIG_LARGEST], have[4 * RIG_LARGEST + 4];
  for (int ranks = 1; ranks <= 7; ranks++) {
    char folder[64];
    snprintf(folder, sizeof folder, "ranks/step-%08d", ranks);
    write_ranks(folder, ranks, ranks);
    struct checkpoint *k = checkpoint_open(folder, true, &failure);
    if (!k) {
      FAIL("%s", failure.message);
      continue;
    }
    CHECK(rig_holds(k, ranks));
    for (int trial = 0; trial < 60; trial++) {
      const int t = trial % RIG_TENSORS;
      const int64_t first = rig_bits(9, trial, ranks) % rig_shape[t].rows;
      const int64_t rows = 1 + rig_bits(8, trial, ranks) % (rig_shape[t].rows - first);
      const size_t bytes = (size_t)(rows * rig_shape[t].cols) * dtype_bytes(rig_shape[t].dtype);
      struct tensor_slice s = rig_slice(t, first, rows, have);
      rig_fill(want, t, first, rows, ranks);
      memset(have, 0x5a, sizeof have);
      if (!checkpoint_read(k, &s, 1, &failure)) FAIL("%s", failure.message);
      if (memcmp(want, have, bytes) != 0) FAIL("%d ranks: rows %d + %d of tensor %d", ranks, (int)first, (int)rows, t);
      if (have[bytes] != 0x5a) FAIL("written past the slice");
    }
    checkpoint_close(k);
  }
}

/* Rows [first, end) of one tensor of ten rows in each file. */
static struct checkpoint *open_pieces(const int64_t (*piece)[2], int n) {
  static float data[32];
  struct manifest_file files[4] = {0};
  CHECK(file_make_folder("pieces", ERROR_CHECKPOINT, &failure));
  for (int r = 0; r < n; r++) {
    struct tensor_slice s = {.name = "param/x", .dtype = DTYPE_F32, .global_rows = 10, .cols = 2,
                             .first_row = piece[r][0], .rows = piece[r][1] - piece[r][0], .data = data};
    char path[1024];
    snprintf(files[r].name, sizeof files[r].name, "rank-%05d.h5", r);
    snprintf(path, sizeof path, "pieces/%s", files[r].name);
    CHECK(hdf5_write(path, &s, 1, &failure) && manifest_measure(path, &files[r], &failure));
  }
  char meta[] = "{}";
  CHECK(manifest_write("pieces", &(struct manifest){3, files, n, meta}, &failure));
  return checkpoint_open("pieces", true, &failure);
}

TEST(rows_missing_or_twice) {
  struct checkpoint *k = open_pieces((const int64_t[][2]){{4, 10}, {0, 4}}, 2); /* any order of files */
  CHECK(k != NULL);
  checkpoint_close(k);
  CHECK(!open_pieces((const int64_t[][2]){{0, 4}, {5, 10}}, 2));
  CHECK_STR(failure.message, "pieces: row 4 of param/x is missing");
  CHECK(!open_pieces((const int64_t[][2]){{1, 10}}, 1));
  CHECK_STR(failure.message, "pieces: row 0 of param/x is missing");
  CHECK(!open_pieces((const int64_t[][2]){{0, 4}, {4, 9}}, 2));
  CHECK_STR(failure.message, "pieces: row 9 of param/x is missing");
  CHECK(!open_pieces((const int64_t[][2]){{0, 6}, {5, 10}}, 2));
  CHECK_STR(failure.message, "pieces: row 5 of param/x is there twice");
  CHECK(!open_pieces((const int64_t[][2]){{0, 10}, {0, 10}}, 2));
  CHECK_EQ_I64(failure.code, ERROR_CHECKPOINT);
}

TEST(other_shapes) {
  static float data[4 * RIG_LARGEST];
  CHECK(rig_save("b", 1, 0));
  struct checkpoint *k = checkpoint_open("b/step-00000001", true, &failure);
  struct tensor_slice s = rig_slice(2, 0, 101, data);
  s.dtype = DTYPE_F32;
  CHECK(k && !checkpoint_read(k, &s, 1, &failure));
  CHECK(strstr(failure.message, "param/layers.0.attention.wq.weight is [101, 7] bf16, the model wants [101, 7] fp32"));
  CHECK(strstr(failure.hint, "train.param_dtype"));
  s = rig_slice(2, 0, 101, data);
  s.global_rows = 102;
  CHECK(k && !checkpoint_read(k, &s, 1, &failure));
  CHECK(strstr(failure.message, "[101, 7] bf16, the model wants [102, 7] bf16"));
  s = rig_slice(0, 0, 257, data);
  s.cols = 32;
  CHECK(k && !checkpoint_read(k, &s, 1, &failure));
  CHECK(strstr(failure.message, "[257, 33] fp32, the model wants [257, 32] fp32"));
  s = rig_slice(1, 0, 61, data);
  snprintf(s.name, sizeof s.name, "adam_m/nothing");
  CHECK(k && !checkpoint_read(k, &s, 1, &failure));
  CHECK(strstr(failure.message, "b/step-00000001 holds no tensor adam_m/nothing"));
  CHECK_EQ_I64(failure.code, ERROR_CHECKPOINT);
  checkpoint_close(k);
}

static int64_t only(const char *folder, int keep, int n, const int64_t *updates) {
  CHECK(file_remove_tree(folder, ERROR_SYSTEM, &failure));
  for (int i = 0; i < n; i++)
    if (!rig_save(folder, updates[i], keep)) FAIL("%s", failure.message);
  return rig_newest(folder);
}

TEST(keep) {
  const int64_t updates[] = {2, 4, 6, 8, 100000000};
  CHECK_EQ_I64(only("k", 0, 5, updates), 100000000);
  CHECK_STR(rig_names("k"), "latest step-00000002 step-00000004 step-00000006 step-00000008 step-100000000");
  CHECK_EQ_I64(only("k", 1, 5, updates), 100000000);
  CHECK_STR(rig_names("k"), "latest step-100000000");
  CHECK_EQ_I64(only("k", 3, 4, updates), 8);
  CHECK_STR(rig_names("k"), "latest step-00000004 step-00000006 step-00000008");
  CHECK_EQ_I64(only("k", 4, 4, updates), 8);
  CHECK_STR(rig_names("k"), "latest step-00000002 step-00000004 step-00000006 step-00000008");
  CHECK_EQ_I64(only("k", 1000000, 2, updates), 4); /* more than there are: nothing goes */
  CHECK_STR(rig_names("k"), "latest step-00000002 step-00000004");
  CHECK(rig_save("k", 6, 2)); /* a smaller number later */
  CHECK_STR(rig_names("k"), "latest step-00000004 step-00000006");
  CHECK(store_prune("k", 5, 0, &failure) && store_prune("k", 2, 0, &failure) && store_prune("k", 0, 0, &failure));
  CHECK_STR(rig_names("k"), "latest step-00000004 step-00000006");
  CHECK(store_prune("absent", 1, 0, &failure));
}

/* keep 3, every 4th for ever: what goes is neither among the newest nor a multiple. */
TEST(keep_every) {
  CHECK(file_remove_tree("every", ERROR_SYSTEM, &failure));
  for (int64_t update = 1; update <= 4; update++) CHECK(rig_save("every", update, 0));
  CHECK(store_prune("every", 3, 2, &failure)); /* fewer to remove than multiples */
  CHECK_STR(rig_names("every"), "latest step-00000002 step-00000003 step-00000004");
  for (int64_t update = 5; update <= 10; update++) CHECK(rig_save("every", update, 0) && store_prune("every", 1, 4, &failure));
  CHECK_STR(rig_names("every"), "latest step-00000004 step-00000008 step-00000010");
  CHECK(store_prune("every", 0, 3, &failure));
  CHECK_STR(rig_names("every"), "latest step-00000004 step-00000008 step-00000010");
}

/* Steps that are not whole are no reason to remove one that is. */
TEST(keep_counts_whole_ones) {
  CHECK(file_remove_tree("whole", ERROR_SYSTEM, &failure));
  for (int64_t update = 1; update <= 5; update++) CHECK(rig_save("whole", update, 0));
  CHECK(unlink("whole/step-00000005/rank-00000.h5") == 0 && unlink("whole/step-00000004/manifest.json") == 0);
  CHECK(truncate("whole/step-00000003/rank-00000.h5", 100) == 0);
  CHECK(store_prune("whole", 1, 0, &failure));
  CHECK_STR(rig_names("whole"), "latest step-00000002 step-00000003 step-00000004 step-00000005");
  int was = rig_quiet_begin();
  CHECK_EQ_I64(rig_newest("whole"), 2);
  rig_quiet_end(was);
}

TEST(the_same_update_again) {
  CHECK(rig_save("again", 3, 0) && rig_save("again", 5, 0));
  struct tensor_slice slices[RIG_TENSORS];
  rig_slices(slices, 5);
  CHECK(checkpoint_save(world, "again", 5, slices, RIG_TENSORS, "{\"second\": 1}", 0, &failure));
  CHECK_STR(rig_names("again"), "latest step-00000003 step-00000005");
  struct checkpoint *k = checkpoint_open_newest("again", &failure);
  CHECK(k && rig_holds(k, 5));
  if (k) CHECK_STR(checkpoint_meta(k), "{\"second\": 1}");
  checkpoint_close(k);
}

/* A run that goes back does not go on from what it left. */
TEST(going_back) {
  const int64_t updates[] = {3, 6, 9};
  CHECK_EQ_I64(only("back", 0, 3, updates), 9);
  int was = rig_quiet_begin();
  bool good = checkpoint_set_aside("back", 3, &failure);
  const char *text = rig_quiet_end(was);
  CHECK(good && strstr(text, "back/superseded-00000009"));
  CHECK_STR(rig_names("back"), "latest step-00000003 superseded-00000006 superseded-00000009");
  char target[64] = "";
  CHECK(readlink("back/latest", target, sizeof target - 1) > 0);
  CHECK_STR(target, "step-00000003");
  CHECK(rig_save("back", 4, 1));
  CHECK_STR(rig_names("back"), "latest step-00000004 superseded-00000006 superseded-00000009");
  CHECK_EQ_I64(rig_newest("back"), 4);
  CHECK(rig_save("back", 9, 0));
  was = rig_quiet_begin();
  CHECK(checkpoint_set_aside("back", 9, &failure) && checkpoint_set_aside("back", 8, &failure));
  CHECK(checkpoint_set_aside("back", 0, &failure) && checkpoint_set_aside("absent", 0, &failure));
  rig_quiet_end(was);
  CHECK_STR(rig_names("back"), "superseded-00000004 superseded-00000006 superseded-00000009 superseded-00000009.2");
  CHECK_EQ_I64(rig_newest("back"), -1);
}

TEST(latest_and_list) {
  char target[64] = "", list[64];
  CHECK(rig_save("l", 3, 0) && rig_save("l", 6, 0));
  CHECK(readlink("l/latest", target, sizeof target - 1) > 0);
  CHECK_STR(target, "step-00000006");
  struct checkpoint *k = checkpoint_open("l/latest", true, &failure);
  CHECK(rig_holds(k, 6));
  checkpoint_close(k);
  CHECK(file_make_folder("l/step-12", ERROR_SYSTEM, &failure)); /* no name that we give */
  CHECK(file_make_folder("l/step-00000012.bak", ERROR_SYSTEM, &failure));
  CHECK(file_make_folder("l/step-", ERROR_SYSTEM, &failure));
  checkpoint_list("l", list, sizeof list);
  CHECK_STR(list, "step-00000003, step-00000006");
  checkpoint_list("l", list, 12);
  CHECK_STR(list, "step-000000");
  checkpoint_list("absent", list, sizeof list);
  CHECK_STR(list, "");
  CHECK_EQ_I64(rig_newest("absent"), -1);
  CHECK(file_make_folder("none", ERROR_SYSTEM, &failure));
  CHECK_EQ_I64(rig_newest("none"), -1);
  CHECK_EQ_I64(rig_newest("l"), 6);
}

TEST(temporaries) {
  CHECK(rig_save("t", 3, 0));
  CHECK(file_make_folder("t/step-00000005.tmp", ERROR_SYSTEM, &failure));
  CHECK(file_make_folder("t/replaced-00000003.tmp", ERROR_SYSTEM, &failure));
  rig_put("t/step-00000005.tmp/rank-00000.h5", "half");
  rig_put("t/latest.tmp", "");
  rig_put("t/notes", "mine");
  CHECK_EQ_I64(rig_newest("t"), 3);
  CHECK(rig_save("t", 5, 0));
  CHECK_STR(rig_names("t"), "latest notes step-00000003 step-00000005");
  CHECK_EQ_I64(rig_newest("t"), 5);
}

/* Every rename of this program (Makefile): was the watched file there after it? */
static const char *watched;
static int renames, missing;
int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) {
  const int result = __real_rename(from, to), number = errno;
  renames++;
  if (watched && access(watched, R_OK) != 0) missing++;
  errno = number;
  return result;
}

/* A run that went back saves an update again: at no time is there no checkpoint of it. */
TEST(replaced_at_once) {
  CHECK(rig_save("anew", 7, 0));
  watched = "anew/step-00000007/manifest.json";
  renames = missing = 0;
  CHECK(rig_save("anew", 7, 0));
  CHECK(renames > 0);
  CHECK_EQ_I64(missing, 0);
  watched = NULL;
  CHECK_STR(rig_names("anew"), "latest step-00000007");
  CHECK_EQ_I64(rig_newest("anew"), 7);
}

TEST(refused_folders) {
  rig_put("file", "");
  CHECK(!rig_save("file/x", 1, 0));
  CHECK_EQ_I64(failure.code, ERROR_CHECKPOINT);
  CHECK(strstr(failure.message, "file"));
  CHECK(!rig_save("file", 1, 0));
}

/* Not a view's whole storage, not twice: tensor bytes and a little (1 %), compressed or not. */
TEST(file_size) {
  const int64_t rows = 4 << 20;
  uint32_t *noise = calloc((size_t)rows, sizeof *noise);
  for (int64_t i = 0; noise && i < rows; i++) noise[i] = (uint32_t)hash_word(&i, sizeof i, 7);
  struct tensor_slice s = {.name = "param/large", .dtype = DTYPE_F32, .global_rows = 8 * rows, .cols = 1, .rows = rows, .data = noise};
  const struct hdf5_options options[] = {{CHECKPOINT_ZSTD, NULL}, {CHECKPOINT_STORE, NULL}};
  for (int i = 0; i < 2; i++) {
    CHECK(noise && hdf5_write_with("large.h5", &options[i], &s, 1, &failure)); /* an eighth of a tensor */
    CHECK(file_size("large.h5") >= 4 * rows && file_size("large.h5") <= 4 * rows + 4 * rows / 100);
  }
  free(noise);
  CHECK(rig_save("size", 1, 0));
  CHECK(file_size("size/step-00000001/rank-00000.h5") <= 40000); /* the three are 36 KB */
}

static void tests(void) {
  RUN(round_trip);
  RUN(bit_patterns);
  RUN(slices_of_other_worlds);
  RUN(rows_missing_or_twice);
  RUN(other_shapes);
  RUN(keep);
  RUN(keep_every);
  RUN(keep_counts_whole_ones);
  RUN(the_same_update_again);
  RUN(going_back);
  RUN(latest_and_list);
  RUN(temporaries);
  RUN(replaced_at_once);
  RUN(refused_folders);
  RUN(file_size);
}

int main(void) { return rig_main(tests); }
