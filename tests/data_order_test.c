/* The order of samples: golden positions, permutations, epochs, and that a
 * batch is the same however ranks divide it. */
#include <stdlib.h>

#include "base/file.h"
#include "data/data.h"
#include "tests/data_stream_build.h"
#include "tests/test.h"

static char root[64], path[256];

static const char *at(const char *name) {
  snprintf(path, sizeof path, "%s/%s", root, name);
  return path;
}

/* A stream of `tokens` ids where id i is i mod 251 for the first 4096. */
static struct stream *make(const char *name, int64_t tokens) {
  static struct plant plants[4096];
  int n = tokens < 4096 ? (int)tokens : 4096;
  for (int i = 0; i < n; i++) plants[i] = (struct plant){i, (uint32_t)(i % 251)};
  struct build b = {.vocab_size = 258, .tokens = (uint64_t)tokens, .plants = plants, .n_plants = n};
  struct error e;
  if (!build_stream(at(name), &b)) {
    FAIL("cannot build %s", path);
    return NULL;
  }
  struct stream *s = stream_open(path, 258, &e);
  if (!s) FAIL("%s", e.message);
  return s;
}

TEST(golden_positions) {
  FILE *f = fopen("tests/golden/data_order.txt", "r");
  CHECK(f != NULL);
  if (!f) return;
  int64_t tokens, seq_len, index, position, open_tokens = -1;
  uint64_t seed;
  int lines = 0, shuffle;
  struct stream *s = NULL;
  while (fscanf(f, "%" SCNd64 " %" SCNd64 " %" SCNu64 " %d %" SCNd64 " %" SCNd64, &tokens, &seq_len, &seed, &shuffle, &index,
                &position) == 6) {
    if (tokens != open_tokens) {
      stream_close(s);
      s = make("golden", tokens);
      if (!s) break;
      open_tokens = tokens;
    }
    struct data_order o;
    struct error e;
    CHECK(data_order_make(&o, s, seq_len, seed, &e));
    o.shuffle_samples = shuffle;
    CHECK_EQ_I64(data_order_position(&o, index), position);
    lines++;
  }
  CHECK(lines > 300);
  stream_close(s);
  fclose(f);
}

TEST(each_epoch_is_another_permutation) {
  static const int sizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 127, 128, 129, 1000};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    int n = sizes[k];
    struct stream *s = make("perm", 3 * (int64_t)n + 2);
    if (!s) return;
    struct data_order o, other;
    struct error e;
    CHECK(data_order_make(&o, s, 3, 5, &e) && data_order_make(&other, s, 3, 6, &e));
    CHECK_EQ_I64(data_order_epoch_samples(&o), n);
    static int64_t before[1000];
    for (int epoch = 0; epoch < 4; epoch++) {
      static int seen[1000];
      memset(seen, 0, sizeof seen);
      int same = 0, same_seed = 0;
      for (int j = 0; j < n; j++) {
        int64_t p = data_order_position(&o, (int64_t)epoch * n + j);
        CHECK(p >= 0 && p < n);
        if (p < 0 || p >= n) return;
        seen[p]++;
        same += epoch > 0 && before[j] == p;
        same_seed += data_order_position(&other, (int64_t)epoch * n + j) == p;
        before[j] = p;
        if (epoch == 0) CHECK_EQ_I64(p, j);
      }
      for (int j = 0; j < n; j++) CHECK_EQ_I64(seen[j], 1);
      /* A random permutation agrees with another in one place on average. */
      if (n >= 31 && epoch > 0) CHECK(same < 10 && same_seed < 10);
    }
    stream_close(s);
  }
}

/* Against the plain meaning: walk the order, leave out what is in a range. */
TEST(samples_left_out) {
  struct stream *s = make("skip", 3 * 50 + 1);
  if (!s) return;
  static const struct data_skip none[1], first[] = {{{0, 9}}}, many[] = {{{3, 3}}, {{4, 4}}, {{10, 29}}, {{49, 51}}, {{99, 180}}};
  static const struct {
    const struct data_skip *skip;
    int n;
  } cases[] = {{none, 0}, {first, 1}, {many, 5}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    struct data_order o, plain;
    struct error e;
    CHECK(data_order_make(&o, s, 3, 5, &e));
    plain = o;
    o.skip = cases[c].skip;
    o.n_skips = cases[c].n;
    int64_t sample = 0;
    for (int64_t index = 0; index < 300; index++) {
      bool left_out = false;
      for (int i = 0; i < o.n_skips; i++) left_out = left_out || (index >= o.skip[i].range[0] && index <= o.skip[i].range[1]);
      CHECK_EQ_I64(data_order_samples_before(&o, index), sample);
      if (left_out) continue;
      CHECK_EQ_I64(data_order_index(&o, sample), index);
      CHECK_EQ_I64(data_order_position(&o, sample), data_order_position(&plain, index));
      sample++;
    }
    /* A resume elsewhere in between: the next sample is the first one not left out, whatever was added before. */
    for (int64_t index = 0; index < 300; index++) {
      const int64_t k = data_order_samples_before(&o, index);
      CHECK(data_order_index(&o, k) >= index && (k == 0 || data_order_index(&o, k - 1) < index));
    }
  }
  /* All that is left. */
  static const struct data_skip rest[] = {{{7, INT64_MAX}}}, all[] = {{{0, INT64_MAX}}};
  struct data_order o;
  struct error e = {0};
  CHECK(data_order_make(&o, s, 3, 5, &e));
  o.skip = rest;
  o.n_skips = 1;
  CHECK(data_order_index(&o, 6) == 6 && data_order_index(&o, 7) == -1 && data_order_position(&o, 8) == -1);
  o.skip = all;
  CHECK(data_order_index(&o, 0) == -1);
  stream_close(s);
}

TEST(positions_are_spread_evenly) {
  /* Where does sample 0 of epoch 1 go, over seeds?  Chi-square, 9 degrees of
   * freedom: above 40 once in a hundred thousand. */
  struct stream *s = make("even", 10 * 4 + 1);
  if (!s) return;
  int count[10] = {0}, pairs[10][10] = {{0}};
  enum { SEEDS = 9000 };
  for (uint64_t seed = 0; seed < SEEDS; seed++) {
    struct data_order o;
    struct error e;
    CHECK(data_order_make(&o, s, 4, seed, &e));
    int64_t a = data_order_position(&o, 10), b = data_order_position(&o, 11);
    count[a]++;
    pairs[a][b]++;
  }
  double chi = 0, chi_pairs = 0;
  for (int i = 0; i < 10; i++) {
    chi += (count[i] - SEEDS / 10.0) * (count[i] - SEEDS / 10.0) / (SEEDS / 10.0);
    for (int j = 0; j < 10; j++)
      if (i != j) chi_pairs += (pairs[i][j] - SEEDS / 90.0) * (pairs[i][j] - SEEDS / 90.0) / (SEEDS / 90.0);
  }
  CHECK(chi < 40);
  CHECK(chi_pairs < 155); /* 89 degrees of freedom */
  stream_close(s);
}

TEST(samples_are_shifted_windows) {
  struct stream *s = make("windows", 1003);
  if (!s) return;
  struct data_order o;
  struct error e;
  CHECK(data_order_make(&o, s, 50, 9, &e));
  CHECK_EQ_I64(data_order_epoch_samples(&o), 20);
  CHECK_EQ_I64(data_order_dropped_tokens(&o), 2); /* 1003 = 20 * 50 + 1 + 2 */
  for (int64_t i = 0; i < 60; i++) {
    int32_t inputs[50], targets[50];
    CHECK(data_sample(&o, i, &(struct data_sample){inputs, targets, NULL, NULL}, &e));
    int64_t first = data_order_position(&o, i) * 50;
    for (int k = 0; k < 50; k++) {
      CHECK_EQ_I64(inputs[k], (first + k) % 251);
      CHECK_EQ_I64(targets[k], (first + k + 1) % 251);
    }
  }
  int32_t inputs[50], targets[50];
  CHECK(!data_sample(&o, -1, &(struct data_sample){inputs, targets, NULL, NULL}, &e));
  /* One sample exactly, and one token too few. */
  CHECK(data_order_make(&o, s, 1002, 9, &e));
  CHECK_EQ_I64(data_order_epoch_samples(&o), 1);
  CHECK_EQ_I64(data_order_dropped_tokens(&o), 0);
  CHECK(!data_order_make(&o, s, 1003, 9, &e));
  CHECK_EQ_I64(e.code, ERROR_DATA);
  CHECK(strstr(e.message, path) != NULL && strstr(e.message, "1004") != NULL && strstr(e.message, "1003") != NULL);
  CHECK(!data_order_make(&o, s, INT64_MAX, 9, &e));
  CHECK(!data_order_make(&o, s, 0, 9, &e));
  stream_close(s);
}

/* The order-independent hash of update t's batch as `ranks` ranks see it, each
 * in micro-batches of `local`. */
static struct hash batch_hash(const struct data_order *o, int64_t t, int64_t global, int ranks, int64_t local) {
  struct hash total = {0, 0};
  int64_t share = global / ranks;
  for (int r = ranks - 1; r >= 0; r--) {
    struct hash mine = {0, 0};
    for (int64_t m = 0; m < share; m += local)
      for (int64_t k = 0; k < local; k++) {
        int64_t i = t * global + r * share + m + k;
        int32_t inputs[17], targets[17];
        struct error e;
        CHECK(data_sample(o, i, &(struct data_sample){inputs, targets, NULL, NULL}, &e));
        mine = hash_sum(mine, data_sample_hash(i, inputs, targets, 17));
      }
    total = hash_sum(total, mine);
  }
  return total;
}

TEST(batches_do_not_depend_on_the_division) {
  struct stream *s = make("batches", 17 * 11 + 9);
  if (!s) return;
  struct data_order o;
  struct error e;
  CHECK(data_order_make(&o, s, 17, 3, &e));
  struct hash first[6];
  /* 6 updates of 8 samples over 11 samples an epoch: edges of epochs inside. */
  for (int64_t t = 0; t < 6; t++) {
    first[t] = batch_hash(&o, t, 8, 1, 8);
    CHECK(hash_equal(first[t], batch_hash(&o, t, 8, 1, 1)));
    CHECK(hash_equal(first[t], batch_hash(&o, t, 8, 2, 2)));
    CHECK(hash_equal(first[t], batch_hash(&o, t, 8, 4, 1)));
    CHECK(hash_equal(first[t], batch_hash(&o, t, 8, 8, 1)));
    for (int64_t u = 0; u < t; u++) CHECK(!hash_equal(first[t], first[u]));
  }
  stream_close(s);
  /* Resume, twice, in any epoch: a new process that knows the index only. */
  for (int64_t t = 5; t >= 0; t--) {
    struct stream *again = stream_open(path, 258, &e);
    CHECK(again != NULL);
    if (!again) return;
    CHECK(data_order_make(&o, again, 17, 3, &e));
    CHECK(hash_equal(first[t], batch_hash(&o, t, 8, 2, 4)));
    stream_close(again);
  }
}

TEST(sample_hash_sees_everything) {
  int32_t inputs[4] = {1, 2, 3, 4}, targets[4] = {2, 3, 4, 5};
  struct hash h = data_sample_hash(7, inputs, targets, 4);
  CHECK(hash_equal(h, data_sample_hash(7, inputs, targets, 4)));
  CHECK(!hash_equal(h, data_sample_hash(8, inputs, targets, 4)));
  targets[3] = -1;
  CHECK(!hash_equal(h, data_sample_hash(7, inputs, targets, 4)));
  targets[3] = 5;
  inputs[0] = 0;
  CHECK(!hash_equal(h, data_sample_hash(7, inputs, targets, 4)));
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-order-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  RUN(golden_positions);
  RUN(each_epoch_is_another_permutation);
  RUN(samples_left_out);
  RUN(positions_are_spread_evenly);
  RUN(samples_are_shifted_windows);
  RUN(batches_do_not_depend_on_the_division);
  RUN(sample_hash_sees_everything);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
