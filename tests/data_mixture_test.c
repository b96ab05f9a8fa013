/* The order of documents: golden keys and choices of an independent program, shares,
 * repetitions, stages. */
#include <math.h>
#include <stdlib.h>

#include "data/mixture.h"
#include "tests/test.h"

static FILE *golden;

static bool read_hash(struct hash *h) {
  char text[HASH_TEXT];
  return fscanf(golden, "%32s", text) == 1 && hash_parse(text, h);
}

static void check_key(void) {
  uint64_t seed, pass;
  struct hash content, wanted;
  CHECK(fscanf(golden, "%" SCNu64 " %" SCNu64, &seed, &pass) == 2 && read_hash(&content) && read_hash(&wanted));
  CHECK(hash_equal(mixture_key(seed, pass, content), wanted));
}

static void check_held(void) {
  struct hash content;
  double fraction;
  int wanted;
  CHECK(read_hash(&content) && fscanf(golden, "%la %d", &fraction, &wanted) == 2);
  CHECK(mixture_held_out(content, fraction) == wanted);
}

enum { LONGEST = 64 };

static void check_mix(void) {
  static struct data_source source[DATA_SOURCES];
  static struct data_stage stage[DATA_STAGES];
  static int64_t length[DATA_SOURCES][LONGEST];
  int64_t target, documents[DATA_SOURCES] = {0}, tokens[DATA_SOURCES] = {0};
  int n, n_stages, validation, count, wanted;
  CHECK(fscanf(golden, "%d %d %" SCNd64 " %d", &n, &n_stages, &target, &validation) == 4);
  for (int i = 0; i < n; i++) {
    CHECK(fscanf(golden, " source %la %la %" SCNd64, &source[i].weight, &source[i].max_repetition, &documents[i]) == 3);
    for (int64_t d = 0; d < documents[i]; d++) {
      CHECK(fscanf(golden, "%" SCNd64, &length[i][d]) == 1);
      tokens[i] += length[i][d];
    }
  }
  for (int k = 0; k < n_stages; k++) {
    CHECK(fscanf(golden, " stage %" SCNd64, &stage[k].at) == 1);
    for (int i = 0; i < n; i++) CHECK(fscanf(golden, "%la", &stage[k].weight[i]) == 1);
  }
  struct mixture m;
  mixture_start(&m, source, n, stage, n_stages, documents, tokens, target, validation);
  const bool pool = mixture_is_pool(source, n, n_stages);
  CHECK(fscanf(golden, " order %d", &count) == 1);
  for (int j = 0; j < count; j++) {
    CHECK(fscanf(golden, "%d", &wanted) == 1);
    const int group = mixture_choose(&m);
    CHECK_EQ_I64(group, wanted);
    if (group < 0) return;
    const int64_t place = mixture_place(&m, group), pass = mixture_pass(&m, group);
    int64_t taken = 0;
    if (pool) { /* documents of all sources, one after the other */
      int64_t left = place;
      int i = 0;
      for (; left >= documents[i]; i++) left -= documents[i];
      CHECK_EQ_I64(pass, 0);
      taken = length[i][left];
    } else {
      taken = length[group][(place + pass) % documents[group]];
    }
    mixture_take(&m, group, taken);
  }
  int64_t written, unused;
  CHECK(fscanf(golden, " end %d %" SCNd64, &wanted, &written) == 2);
  CHECK_EQ_I64(mixture_choose(&m), -1);
  CHECK_EQ_I64(mixture_exhausted(&m), wanted);
  CHECK_EQ_I64(m.written, written);
  for (int i = 0; i < m.n; i++) {
    CHECK(fscanf(golden, "%" SCNd64, &unused) == 1);
    CHECK_EQ_I64(mixture_unused(&m, i), unused);
  }
  struct error e = {0};
  const bool enough = validation || target == 0 || written >= target;
  CHECK(mixture_check_end(&m, pool ? NULL : source, &e) == enough);
  if (!enough) CHECK(e.code == ERROR_DATA && strstr(e.message, "data.tokens asks for"));
}

TEST(golden_orders) {
  golden = fopen("tests/golden/data_mixture.txt", "r");
  CHECK(golden != NULL);
  if (!golden) return;
  char kind[8];
  int lines = 0;
  for (; fscanf(golden, "%7s", kind) == 1; lines++) {
    if (strcmp(kind, "key") == 0)
      check_key();
    else if (strcmp(kind, "held") == 0)
      check_held();
    else if (strcmp(kind, "mix") == 0)
      check_mix();
    else
      FAIL("line of kind %s", kind);
  }
  CHECK_EQ_I64(lines, 300);
  fclose(golden);
}

/* 82/18 with documents of very different lengths: at every moment within one document of the share. */
TEST(shares_hold_all_along) {
  struct data_source source[2] = {{.weight = 82, .max_repetition = 1}, {.weight = 18, .max_repetition = 1}};
  const int64_t documents[2] = {1000000, 1000000}, tokens[2] = {INT64_C(500000000), INT64_C(40000000000)};
  struct mixture m;
  mixture_start(&m, source, 2, NULL, 0, documents, tokens, 400000000, false);
  uint64_t state = 1;
  double worst = 0;
  for (int group; (group = mixture_choose(&m)) >= 0;) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    mixture_take(&m, group, 1 + (int64_t)(state >> 33) % (group == 0 ? 999 : 79999));
    const double off = fabs((double)m.taken[0] - 0.82 * (double)m.written);
    if (off > worst) worst = off;
  }
  CHECK(mixture_exhausted(&m) == -1 && m.written >= 400000000 && worst <= 80000);
  CHECK(fabs((double)m.taken[0] / (double)m.written - 0.82) < 0.0005);
}

/* Counts that 32 bits do not hold. */
TEST(large_counts) {
  struct data_source source[2] = {{.weight = 1, .max_repetition = 3, .name = "a"}, {.weight = 1, .max_repetition = 1, .name = "b"}};
  const int64_t documents[2] = {2, 100}, tokens[2] = {INT64_C(6) << 32, INT64_C(1) << 50};
  struct mixture m;
  mixture_start(&m, source, 2, NULL, 0, documents, tokens, INT64_C(1) << 60, false);
  int taken = 0;
  for (int group; (group = mixture_choose(&m)) >= 0; taken++) {
    if (group == 0) CHECK(mixture_pass(&m, 0) == m.taken_documents[0] / 2 && mixture_pass(&m, 0) < 3);
    mixture_take(&m, group, INT64_C(3) << 32);
  }
  CHECK_EQ_I64(taken, 12);
  CHECK_EQ_I64(mixture_exhausted(&m), 0);
  CHECK_EQ_I64(m.written, 36 * (INT64_C(1) << 32));
  struct error e = {0};
  CHECK(!mixture_check_end(&m, source, &e) && strstr(e.message, "1152921504606846976") && strstr(e.message, "154618822656") && strstr(e.message, "a has 25769803776"));
}

/* A stream would end as soon as the turn of a source without documents came. */
TEST(sources_without_documents) {
  struct data_source source[2] = {{.weight = 0.82, .max_repetition = 1, .name = "a"}, {.weight = 0.18, .max_repetition = 9, .name = "b"}};
  const struct data_stage stage[2] = {{.weight = {1, 0}, .n_weights = 2}, {.at = 50, .weight = {0, 1}, .n_weights = 2}};
  const int64_t documents[2] = {3, 0}, tokens[2] = {30, 0};
  struct mixture m;
  struct error e = {0};
  mixture_start(&m, source, 2, NULL, 0, documents, tokens, 0, true);
  CHECK(!mixture_check_sources(&m, source, true, &e) && e.code == ERROR_DATA);
  CHECK(strstr(e.message, "b has no document") && strstr(e.message, "held out") && strstr(e.hint, "data.validation_fraction"));
  mixture_start(&m, source, 2, NULL, 0, documents, tokens, 0, false);
  CHECK(!mixture_check_sources(&m, source, false, &e) && strstr(e.message, "b has no document") && !strstr(e.hint, "fraction"));
  mixture_start(&m, source, 2, stage, 2, documents, tokens, 0, false);
  CHECK(!mixture_check_sources(&m, source, false, &e));
  mixture_start(&m, source, 2, stage, 2, documents, tokens, 0, true); /* the first stage alone */
  CHECK(mixture_check_sources(&m, source, true, &e));
  source[0].weight = source[1].weight = 0;
  mixture_start(&m, source, 2, NULL, 0, documents, tokens, 0, false);
  CHECK(mixture_check_sources(&m, NULL, false, &e));
  /* A pool has nothing to repeat. */
  mixture_start(&m, source, 2, NULL, 0, documents, tokens, 31, false);
  for (int i = 0; i < 3; i++) mixture_take(&m, 0, 10);
  CHECK(!mixture_check_end(&m, NULL, &e) && !strstr(e.hint, "raise") && strstr(e.hint, "lower data.tokens") && strstr(e.hint, "weight"));
}

int main(void) {
  RUN(sources_without_documents);
  RUN(golden_orders);
  RUN(shares_hold_all_along);
  RUN(large_counts);
  return test_report();
}
