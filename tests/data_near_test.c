/* Near-duplicates and 13-gram overlap: golden files of an independent
 * implementation, the detection curve, extremes, threads, memory. */
#include <math.h>
#include <stdlib.h>

#include "data/minhash.h"
#include "data/overlap.h"
#include "tests/random.h"
#include "tests/test.h"

/* ---- golden ---------------------------------------------------------------- */

struct text {
  char *bytes;
  int64_t size;
};

/* "HEX", "N*HEX" or "-". */
static struct text parse_text(const char *word) {
  long times = 1;
  const char *star = strchr(word, '*');
  if (star) {
    times = strtol(word, NULL, 10);
    word = star + 1;
  }
  int64_t size = strcmp(word, "-") == 0 ? 0 : (int64_t)strlen(word) / 2;
  struct text t = {malloc((size_t)(size * times + 1)), size * times};
  for (int64_t i = 0; t.bytes && i < t.size; i++) {
    const char digits[3] = {word[i % size * 2], word[i % size * 2 + 1], 0};
    t.bytes[i] = (char)strtol(digits, NULL, 16);
  }
  return t;
}

enum { DOCUMENTS = 1000 };
static struct text documents[DOCUMENTS];
static struct minhash_signature signatures[DOCUMENTS];
static int n_documents;

static void check_sign(const char *word, const char *expected) {
  struct text t = parse_text(word);
  struct minhash_signature s;
  minhash_sign(t.bytes, t.size, &s);
  for (int i = 0; i < MINHASH_HASHES; i++) {
    char digits[5];
    snprintf(digits, sizeof digits, "%04x", (unsigned)s.position[i]);
    if (memcmp(digits, expected + 4 * i, 4) != 0) {
      FAIL("%.60s: position %d is %s, expected %.4s", word, i, digits, expected + 4 * i);
      break;
    }
  }
  free(t.bytes);
}

static void check_group(double threshold, int64_t groups, int64_t dropped, const char *survivors) {
  struct error e;
  for (int count = 0; count <= 3; count++) { /* without a pool, then pools */
    struct threads *t = count ? threads_create(count, &e) : NULL;
    uint64_t bits[DOCUMENTS / 64 + 1] = {0};
    struct minhash_groups done;
    CHECK(minhash_group(signatures, n_documents, threshold, t, bits, &done, &e));
    CHECK_EQ_I64(done.groups, groups);
    CHECK_EQ_I64(done.dropped, dropped);
    CHECK((done.compared > 0) == (threshold > 0));
    for (int d = 0; d < n_documents; d++)
      if ((bits[d / 64] >> d % 64 & 1) != (uint64_t)(survivors[d] - '0')) FAIL("threshold %g: document %d survives or not", threshold, d);
    if (t) threads_destroy(t);
  }
}

TEST(golden) {
  FILE *f = fopen("tests/golden/near_duplicates.txt", "r");
  CHECK(f != NULL);
  if (!f) return;
  static char line[8192], a[4096], b[4096];
  struct overlap *o = NULL;
  struct overlap_total sum = {0};
  struct error e;
  int next_document = 0, kinds[5] = {0};
  while (fgets(line, sizeof line, f)) {
    double threshold;
    int64_t x, y, z;
    if (sscanf(line, "sign %4095s %4095s", a, b) == 2) {
      check_sign(a, b);
      kinds[0]++;
    } else if (sscanf(line, "document %4095s", a) == 1 && n_documents < DOCUMENTS) {
      documents[n_documents] = parse_text(a);
      minhash_sign(documents[n_documents].bytes, documents[n_documents].size, &signatures[n_documents]);
      n_documents++;
    } else if (sscanf(line, "group %lf %" SCNd64 " %" SCNd64 " %4095s", &threshold, &x, &y, a) == 4) {
      check_group(threshold, x, y, a);
      kinds[1]++;
    } else if (sscanf(line, "split %" SCNd64, &x) == 1) {
      o = overlap_open(1 << 20, &e);
      CHECK(o != NULL);
      for (next_document = 0; o && next_document < x; next_document++)
        CHECK(overlap_add(o, documents[next_document].bytes, documents[next_document].size, &e));
      kinds[2]++;
    } else if (o && sscanf(line, "overlap %" SCNd64 " %" SCNd64, &x, &y) == 2) {
      struct overlap_total t = {0};
      struct text *d = &documents[next_document++];
      CHECK(overlap_count(o, d->bytes, d->size, &t) == (y > 0));
      CHECK_EQ_I64(t.grams, x);
      CHECK_EQ_I64(t.shared, y);
      CHECK_EQ_I64(t.documents, 1);
      CHECK_EQ_I64(t.touched, y > 0);
      overlap_total_add(&sum, &t);
      kinds[3]++;
    } else if (o && sscanf(line, "side %" SCNd64 " %" SCNd64 " %" SCNd64, &x, &y, &z) == 3) {
      struct overlap_side side = overlap_side(o);
      CHECK_EQ_I64(side.grams, x);
      CHECK_EQ_I64(side.distinct, y);
      CHECK_EQ_I64(side.met, z);
      overlap_close(o);
      o = NULL;
      kinds[4]++;
    } else {
      FAIL("a line that is not understood: %.60s", line);
    }
  }
  fclose(f);
  CHECK(kinds[0] > 15 && kinds[1] == 5 && kinds[2] == 2 && kinds[3] > 100 && kinds[4] == 2);
  CHECK_EQ_I64(sum.documents, kinds[3]);
  CHECK(sum.touched > 0 && sum.shared > sum.touched && sum.grams > sum.shared);
  for (int d = 0; d < n_documents; d++) free(documents[d].bytes);
}

/* ---- the sketch -------------------------------------------------------------- */

/* A text of `n` words, each from `next`, as "wNNNNNNNN "; returns its bytes. */
static int64_t write_words(char *out, int n) {
  char *at = out;
  for (int i = 0; i < n; i++) at += sprintf(at, "w%08x ", next());
  return at - out;
}

static bool same_signature(const struct minhash_signature *a, const struct minhash_signature *b) { return memcmp(a, b, sizeof *a) == 0; }

TEST(pieces_make_no_difference) {
  enum { WORDS = 3000, BYTES = 10 * WORDS };
  char *text = malloc(BYTES + 1);
  int64_t bytes = write_words(text, WORDS);
  for (int64_t i = 5000; i < 9500; i++) text[i] = 'A'; /* a word that crosses feeds */
  struct minhash_signature whole, s;
  minhash_sign(text, bytes, &whole);
  static struct minhash m;
  for (int64_t piece = 1; piece < bytes; piece = piece * 3 + 2) {
    minhash_begin(&m);
    for (int64_t at = 0; at < bytes; at += piece) minhash_feed(&m, text + at, bytes - at < piece ? bytes - at : piece);
    minhash_feed(&m, NULL, 0);
    minhash_end(&m, &s);
    CHECK(same_signature(&s, &whole));
  }
  free(text);
}

TEST(what_normalising_ignores) {
  struct minhash_signature a, b;
  minhash_sign("The quick BROWN fox jumps", 25, &a);
  minhash_sign("\n the\tquick  brown\v\f\r\nfox jumps ", 32, &b);
  CHECK(same_signature(&a, &b));
  minhash_sign("the quick brown fox-jumps", 25, &b);
  CHECK(minhash_similarity(&a, &b) < .1);
  /* Words' borders count: "ab c" is not "a bc". */
  minhash_sign("ab c d e f", 10, &a);
  minhash_sign("a bc d e f", 10, &b);
  CHECK(minhash_similarity(&a, &b) < .1);
  /* A repeated text has the shingles of its period. */
  char text[6 * 8 * 40 + 1] = "";
  for (int i = 0; i < 40; i++) strcat(text, "aa bb cc dd ee ff ");
  minhash_sign(text, 18 * 2, &a);
  minhash_sign(text, 18 * 40, &b);
  CHECK(minhash_similarity(&a, &b) > .5);
  minhash_sign(text, 18 * 3, &a);
  CHECK(same_signature(&a, &b));
}

TEST(extremes) {
  enum { MANY = 1000000 };
  struct minhash_signature none, s, t;
  minhash_sign("", 0, &none);
  minhash_sign(" \n ", 3, &s);
  CHECK(same_signature(&none, &s));
  CHECK(minhash_similarity(&none, &none) == 0);
  minhash_sign("\0", 1, &s); /* NUL is a word */
  CHECK(!same_signature(&none, &s));
  CHECK(minhash_similarity(&s, &s) == 1);

  char *text = malloc(10 * MANY + 1);
  int64_t bytes = write_words(text, MANY);
  minhash_sign(text, bytes, &s);
  for (int i = 0; i < MANY / 100; i++) text[10 * (int64_t)(next() % MANY) + 1] = 'x'; /* 1 % of words: J about .905 */
  minhash_sign(text, bytes, &t);
  CHECK_CLOSE(minhash_similarity(&s, &t), .905, .12);
  bytes = write_words(text, MANY);
  minhash_sign(text, bytes, &t); /* nothing in common: 16 bits meet by chance */
  CHECK(minhash_similarity(&s, &t) < .02);
  memset(text, 255, (size_t)bytes); /* one word of 10 MB, invalid UTF-8 */
  minhash_sign(text, bytes, &s);
  text[bytes - 1] = 0;
  minhash_sign(text, bytes, &t);
  CHECK(minhash_similarity(&s, &t) < .1);
  free(text);
}

/* Pairs of texts with a planned Jaccard similarity: of `unit` shingles in the
 * union, `common` are shared.  Runs of words of 5 + (n - 1) words hold n shingles, so
 * both texts begin with common + 4 equal words, and each goes on with its own. */
static void sign_pair(int common, int own, struct minhash_signature *a, struct minhash_signature *b) {
  char text[12000];
  int64_t head = write_words(text, common + 4);
  minhash_sign(text, head + write_words(text + head, own), a);
  minhash_sign(text, head + write_words(text + head, own), b);
}

static bool share_band(const struct minhash_signature *a, const struct minhash_signature *b) {
  for (int band = 0; band < MINHASH_BANDS; band++)
    if (minhash_band_key(a, band) == minhash_band_key(b, band)) return true;
  return false;
}

TEST(detection_follows_the_curve) {
  enum { PAIRS = 1500 };
  state = 42;
  static const int shapes[][2] = {{60, 70}, {100, 50}, {130, 35}, {150, 25}, {160, 20}, {180, 10}, {10, 4}, {12, 1}};
  for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
    double jaccard = shapes[k][0] / (double)(shapes[k][0] + 2 * shapes[k][1]);
    double expected = 1 - pow(1 - pow(jaccard, MINHASH_ROWS), MINHASH_BANDS), found = 0, mean = 0, square = 0;
    for (int i = 0; i < PAIRS; i++) {
      struct minhash_signature a, b;
      sign_pair(shapes[k][0], shapes[k][1], &a, &b);
      double similarity = minhash_similarity(&a, &b);
      found += share_band(&a, &b);
      mean += similarity / PAIRS;
      square += similarity * similarity / PAIRS;
    }
    /* Five standard errors; positions are independent, so the estimate's variance is J (1 - J) / 112. */
    CHECK_CLOSE(found / PAIRS, expected, 5 * sqrt(expected * (1 - expected) / PAIRS) + 1e-9);
    double variance = jaccard * (1 - jaccard) / MINHASH_HASHES;
    CHECK_CLOSE(mean, jaccard, 5 * sqrt(variance / PAIRS));
    CHECK_CLOSE((square - mean * mean) / variance, 1, 5 * sqrt(2. / PAIRS) + .05);
  }
}

/* ---- groups ------------------------------------------------------------------ */

TEST(groups_at_random) {
  enum { N = 4000, FAMILIES = 900 };
  static struct minhash_signature s[N];
  static int family[N];
  /* Members of a family share all but a few positions with its first; order is mixed. */
  for (int d = 0; d < N; d++) {
    family[d] = (int)(next() % FAMILIES);
    uint64_t keep = state;
    state = (uint64_t)family[d] * 7919 + 5;
    for (int i = 0; i < 20; i++) next();
    for (int i = 0; i < MINHASH_HASHES; i++) s[d].position[i] = (uint16_t)next();
    state = keep;
    for (int i = (int)(next() % 6); i > 0; i--) s[d].position[next() % MINHASH_HASHES] = (uint16_t)next();
  }
  uint64_t bits[2][(N + 63) / 64];
  struct minhash_groups done[2];
  struct error e;
  struct threads *t = threads_create(3, &e);
  CHECK(t && minhash_group(s, N, .75, NULL, bits[0], &done[0], &e) && minhash_group(s, N, .75, t, bits[1], &done[1], &e));
  CHECK(memcmp(bits[0], bits[1], sizeof bits[0]) == 0 && memcmp(&done[0], &done[1], sizeof done[0]) == 0);
  int64_t survivors = 0, repeated = 0;
  static int seen[FAMILIES];
  for (int d = 0; d < N; d++) { /* five of 112 positions changed always leave whole bands */
    bool first = seen[family[d]]++ == 0;
    repeated += seen[family[d]] == 2;
    survivors += first;
    if ((bits[0][d / 64] >> d % 64 & 1) != first) FAIL("document %d of family %d survives or not", d, family[d]);
  }
  CHECK_EQ_I64(done[0].dropped, N - survivors);
  CHECK_EQ_I64(done[0].groups, repeated);
  /* A threshold that two changed copies miss, and one that all miss. */
  CHECK(minhash_group(s, N, .98, t, bits[1], &done[1], &e));
  CHECK(done[1].dropped < done[0].dropped && done[1].dropped > 0);
  for (int i = 0; i < (N + 63) / 64; i++) CHECK((bits[0][i] & ~bits[1][i]) == 0); /* fewer joins, more survivors */
  threads_destroy(t);
}

TEST(groups_of_extremes) {
  struct minhash_signature s[3] = {0};
  uint64_t bits[1] = {5};
  struct minhash_groups done;
  struct error e;
  CHECK(minhash_group(s, 0, .75, NULL, bits, &done, &e));
  CHECK(done.groups == 0 && done.dropped == 0 && bits[0] == 5);
  for (int i = 0; i < 3; i++) minhash_sign("", 0, &s[i]); /* no words: like no other */
  CHECK(minhash_group(s, 3, 0, NULL, bits, &done, &e));
  CHECK(done.dropped == 0 && bits[0] == 7);
  for (int i = 0; i < 3; i++) minhash_sign("word", 4, &s[i]);
  CHECK(minhash_group(s, 3, 1, NULL, bits, &done, &e));
  CHECK(done.groups == 1 && done.dropped == 2 && done.compared == 2 * MINHASH_BANDS && bits[0] == 1);
  CHECK(minhash_group(s, 1, 1, NULL, bits, &done, &e));
  CHECK(done.dropped == 0 && bits[0] == 1);
  CHECK_EQ_I64(minhash_group_bytes(1000001) - minhash_group_bytes(1), 24000000);
}

/* ---- overlap ----------------------------------------------------------------- */

struct lookup {
  const struct overlap *set;
  const char *text;
  struct overlap_total totals[4];
};

static void count_piece(void *context, int64_t index, int worker) {
  struct lookup *l = context;
  overlap_count(l->set, l->text + 90 * index, 900, &l->totals[worker]); /* 90 words, 9 of them new each time */
}

TEST(overlap_of_many) {
  enum { WORDS = 60000, PIECES = WORDS / 9 - 10 };
  char *text = malloc(10 * WORDS + 1);
  int64_t bytes = write_words(text, WORDS);
  struct error e;
  struct overlap *o = overlap_open(4 << 20, &e);
  CHECK(o != NULL);
  if (!o) return;
  CHECK(overlap_add(o, text, bytes / 2, &e)); /* grows several times */
  CHECK(overlap_add(o, text + 100, bytes / 2 - 100, &e));
  struct overlap_side side = overlap_side(o);
  CHECK_EQ_I64(side.documents, 2);
  CHECK_EQ_I64(side.grams, WORDS - 24 - 10);
  CHECK_EQ_I64(side.distinct, WORDS / 2 - 12);
  CHECK_EQ_I64(side.met, 0);
  struct overlap_total one = {0};
  for (int count = 1; count <= 3; count++) {
    struct lookup l = {.set = o, .text = text};
    struct threads *t = threads_create(count, &e);
    threads_run(t, PIECES, count_piece, &l);
    threads_destroy(t);
    for (int i = 1; i < 4; i++) overlap_total_add(&l.totals[0], &l.totals[i]);
    if (count == 1) one = l.totals[0];
    CHECK(memcmp(&one, &l.totals[0], sizeof one) == 0);
    CHECK_EQ_I64(one.documents, PIECES);
    CHECK_EQ_I64(one.grams, (int64_t)PIECES * (90 - 12));
    CHECK_EQ_I64(overlap_side(o).met, side.distinct);
  }
  int64_t shared = 0, touched = 0;
  for (int64_t p = 0; p < PIECES; p++) {
    int64_t here = 0;
    for (int64_t w = 9 * p; w < 9 * p + 78; w++) here += w + 13 <= WORDS / 2;
    shared += here;
    touched += here > 0;
  }
  CHECK_EQ_I64(one.shared, shared);
  CHECK_EQ_I64(one.touched, touched);
  overlap_close(o);

  /* A limit: refused by name, and what was added stays. */
  o = overlap_open(100000, &e);
  CHECK(o && overlap_add(o, text, 10 * 4000, &e));
  CHECK(o && !overlap_add(o, text + 50000, 10 * 5000, &e) && e.code == ERROR_DATA);
  CHECK(strstr(e.message, "100000 are allowed") && strstr(e.hint, "data.prepare_memory"));
  struct overlap_total t = {0};
  CHECK(o && overlap_count(o, text, 10 * 4000, &t) && t.shared == t.grams && t.grams == 4000 - 12);
  overlap_close(o);
  CHECK(overlap_open(100, &e) == NULL && e.code == ERROR_DATA);
  free(text);
}

TEST(overlap_extremes) {
  struct error e;
  struct overlap *o = overlap_open(1 << 20, &e);
  CHECK(o != NULL);
  if (!o) return;
  static const char text[] = "A b\0c \xff\xfe d e f g h i j k l m n";
  struct overlap_total t = {0};
  CHECK(overlap_add(o, "", 0, &e) && !overlap_count(o, text, sizeof text - 1, &t) && t.grams == 2);
  static const char same[] = "a b\0c \xff\xfe\n d e f g h i j k l m "; /* 13 words */
  CHECK(overlap_add(o, same, sizeof same - 1, &e));
  CHECK(overlap_count(o, text, sizeof text - 1, &t) && t.grams == 4 && t.shared == 1 && t.touched == 1);
  CHECK(!overlap_count(o, text, 0, &t) && !overlap_count(o, text, 20, &t)); /* fewer than 13 words */
  CHECK(t.documents == 4 && t.grams == 4);
  CHECK(!overlap_count(o, text + 2, sizeof text - 3, &t) && t.grams == 5 && t.shared == 1);
  CHECK_EQ_I64(overlap_side(o).met, 1);
  overlap_close(o);
}

int main(void) {
  RUN(golden);
  RUN(pieces_make_no_difference);
  RUN(what_normalising_ignores);
  RUN(extremes);
  RUN(detection_follows_the_curve);
  RUN(groups_at_random);
  RUN(groups_of_extremes);
  RUN(overlap_of_many);
  RUN(overlap_extremes);
  return test_report();
}
