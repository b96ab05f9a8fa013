/* Samples: what documents decide of them.  The loader: the same samples read ahead,
 * errors at the update that wants them, no memory after the start, a clean end. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/philox.h"
#include "data/loader.h"
#include "data/stream_file.h"
#include "tests/test.h"

enum { VOCAB = 300, SOURCES = 3 };

static char root[256], path[512];

/* A document's tokens are its number, mod 250, over and over, first 250, last 251. */
struct corpus {
  int64_t documents, tokens;
  int64_t *first; /* [documents + 1] */
  int *source;
};

static struct corpus corpus_new(int64_t documents, int64_t longest, uint64_t seed) {
  struct corpus c = {.documents = documents};
  c.first = calloc((size_t)documents + 1, sizeof *c.first);
  c.source = calloc((size_t)documents, sizeof *c.source);
  if (!c.first || !c.source) exit(1);
  for (int64_t d = 0; d < documents; d++) {
    struct philox_block r = philox4x32_10(seed, (struct philox_block){{(uint32_t)d, 3, 3, 3}});
    c.first[d + 1] = c.first[d] + (r.word[0] % 4 == 0 ? 1 : 1 + (int64_t)(r.word[1] % (uint32_t)longest));
    c.source[d] = (int)(r.word[2] % SOURCES);
  }
  c.tokens = c.first[documents];
  return c;
}

static void corpus_free(struct corpus *c) {
  free(c->first);
  free(c->source);
}

static int64_t document_of(const struct corpus *c, int64_t token) {
  int64_t d = 0;
  while (c->first[d + 1] <= token) d++;
  return d;
}

static int32_t token_of(const struct corpus *c, int64_t token) {
  int64_t d = document_of(c, token);
  return token == c->first[d] ? 250 : token == c->first[d + 1] - 1 ? 251 : (int32_t)(d % 250);
}

static struct stream *stream_of(const struct corpus *c) {
  static const char *const names[SOURCES] = {"one", "two", "three"};
  const struct stream_start start = {VOCAB, -1, -1, "bytes", names, SOURCES, NULL};
  struct error e = {0};
  snprintf(path, sizeof path, "%s/loader.tokens", root);
  struct stream_writer *w = stream_writer_open(path, &start, &e);
  bool good = w != NULL;
  for (int64_t d = 0; good && d < c->documents; d++) {
    good = stream_writer_document(w, c->source[d], &e);
    for (int64_t t = c->first[d]; good && t < c->first[d + 1]; t++) {
      int32_t id = token_of(c, t);
      good = stream_writer_tokens(w, &id, 1, &e);
    }
  }
  good = good && stream_writer_finish(w, NULL, &e) && stream_writer_publish(w, &e);
  stream_writer_close(w);
  struct stream *s = good ? stream_open(path, VOCAB, &e) : NULL;
  if (!s) FAIL("%s", e.message);
  return s;
}

/* One position, from the corpus alone. */
static void check_position(const struct corpus *c, const struct data_order *o, int64_t first, int64_t j,
                           const struct data_sample *s) {
  int64_t t = first + j, own = c->first[document_of(c, t)], next = document_of(c, t + 1);
  bool edge = c->first[next] == t + 1;
  int32_t target = edge && o->boundary == DATA_BOUNDARY_MASK ? -1 : token_of(c, t + 1);
  if (s->inputs[j] != token_of(c, t) || s->targets[j] != target) FAIL("token %d: %d -> %d", (int)t, s->inputs[j], s->targets[j]);
  if (s->starts[j] != (own > first ? own - first : 0)) FAIL("token %d begins at %d", (int)t, s->starts[j]);
  if (s->source[j] != c->source[next]) FAIL("token %d: source %d", (int)t, s->source[j]);
}

TEST(documents) {
  static const int64_t lengths[] = {1, 2, 7, 64, 200};
  for (int n = 0; n < 10; n++) {
    int64_t S = lengths[n % 5];
    struct corpus c = corpus_new(60, n < 5 ? 3 : 40, (uint64_t)n);
    struct stream *s = stream_of(&c);
    struct data_order o;
    struct error e = {0};
    if (!s || c.tokens <= S || !data_order_make(&o, s, S, 5, &e)) {
      stream_close(s);
      corpus_free(&c);
      continue;
    }
    CHECK(o.boundary == DATA_BOUNDARY_PREDICT);
    o.boundary = n % 2 ? DATA_BOUNDARY_MASK : DATA_BOUNDARY_PREDICT;
    int32_t inputs[200], targets[200], starts[200], plain[200];
    uint8_t source[200];
    const struct data_sample all = {inputs, targets, starts, source};
    int64_t epoch = data_order_epoch_samples(&o);
    for (int64_t i = 0; i < 2 * epoch; i++) {
      int64_t first = data_order_position(&o, i) * S;
      CHECK(data_sample(&o, i, &all, &e));
      for (int64_t j = 0; j < S; j++) check_position(&c, &o, first, j, &all);
      CHECK(data_sample(&o, i, &(struct data_sample){inputs, plain, NULL, NULL}, &e));
      CHECK(memcmp(plain, targets, (size_t)S * 4) == 0);
    }
    stream_close(s);
    corpus_free(&c);
  }
}

/* ---- the loader ------------------------------------------------------------------- */

static atomic_int allocated, released;

static void *count_allocate(void *context, size_t bytes, struct error *e) {
  atomic_fetch_add(&allocated, 1);
  *(size_t *)context = bytes;
  return loader_memory_plain.allocate(NULL, bytes, e);
}
static void count_release(void *context, void *p) {
  (void)context;
  atomic_fetch_add(&released, 1);
  free(p);
}

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); }

/* Two ranks' updates from any update on are those that data_sample gives; the sums add up. */
TEST(updates) {
  struct corpus c = corpus_new(300, 30, 7);
  struct stream *s = stream_of(&c);
  struct data_order o;
  struct error e = {0};
  if (!s || !data_order_make(&o, s, 33, 5, &e)) return;
  o.boundary = DATA_BOUNDARY_MASK;
  for (int n = 0; n < 6; n++) {
    int64_t share = 1 + n % 3, resumed = n * 5, rank = n % 2, stride = n == 5 ? 0 : 2 * share;
    size_t bytes = 0;
    const struct loader_memory memory = {count_allocate, count_release, &bytes};
    const struct loader_plan plan = {.order = &o, .first = resumed * stride + share * rank, .share = share, .stride = stride,
                                     .updates = 20, .documents = n % 2 == 0};
    struct loader *l = loader_open(&plan, &memory, &e);
    if (!l) {
      FAIL("%s", e.message);
      break;
    }
    CHECK_EQ_I64(bytes, loader_bytes(share, 33, plan.documents));
    for (int64_t u = 0; u < 20; u++) {
      double waited = -1;
      const struct loader_batch *b = loader_next(l, &waited, &e);
      CHECK(b && waited >= 0 && b->first == plan.first + u * stride && (b->starts != NULL) == plan.documents);
      if (u % 5 == 0) nap(); /* what is in use stays */
      struct hash sum = {0, 0};
      int64_t tokens = 0, targets = 0;
      for (int64_t i = 0; b && i < share; i++) {
        int32_t inputs[33], wanted[33], starts[33];
        uint8_t source[33];
        CHECK(data_sample(&o, b->first + i, &(struct data_sample){inputs, wanted, starts, source}, &e));
        CHECK(memcmp(inputs, b->inputs + i * 33, sizeof inputs) == 0 && memcmp(wanted, b->targets + i * 33, sizeof wanted) == 0);
        CHECK(memcmp(source, b->source + i * 33, sizeof source) == 0);
        CHECK(!b->starts || memcmp(starts, b->starts + i * 33, sizeof starts) == 0);
        sum = hash_sum(sum, data_sample_hash(b->first + i, inputs, wanted, 33));
        for (int j = 0; j < 33; j++) targets += wanted[j] >= 0;
      }
      for (int k = 0; b && k < STREAM_SOURCES; k++) {
        tokens += b->tokens_of[k];
        targets -= b->targets_of[k];
        CHECK(k < SOURCES || b->tokens_of[k] == 0);
      }
      CHECK(b && hash_equal(sum, b->hash) && tokens == share * 33 && targets == 0);
    }
    double waited;
    CHECK(!loader_next(l, &waited, &e) && e.code == ERROR_INTERNAL);
    loader_close(l);
  }
  CHECK_EQ_I64(atomic_load(&allocated), 6);
  CHECK_EQ_I64(atomic_load(&released), 6);
  stream_close(s);
  corpus_free(&c);
}

/* A block of the stream beyond the first is damaged: updates before it are given. */
TEST(error_at_its_update) {
  struct corpus c = {.documents = 1};
  int64_t first[2] = {0, 1300000};
  int source[1] = {1};
  c.first = first;
  c.source = source;
  c.tokens = first[1];
  struct stream *s = stream_of(&c);
  struct data_order o;
  struct error e = {0};
  if (!s || !data_order_make(&o, s, 1000, 5, &e)) return;
  int fd = open(path, O_RDWR);
  unsigned char byte = 7;
  CHECK(fd >= 0 && pwrite(fd, &byte, 1, FRAME_HEADER + FRAME_BLOCK + 9) == 1); /* tokens from 524288 on: sample 524 */
  close(fd);
  const struct loader_plan plan = {.order = &o, .first = 500, .share = 4, .stride = 8, .updates = 100};
  struct loader *l = loader_open(&plan, &loader_memory_plain, &e);
  double waited;
  for (int u = 0; u < 3; u++) { /* 500, 508, 516 */
    nap();
    CHECK(loader_next(l, &waited, &e));
  }
  CHECK(!loader_next(l, &waited, &e) && strstr(e.message, "sample 524") && strstr(e.message, "block 1"));
  CHECK(!loader_next(l, &waited, &e));
  loader_close(l);
  stream_close(s);
}

/* Closed before, amid and after reading. */
TEST(ends) {
  struct corpus c = corpus_new(300, 30, 9);
  struct stream *s = stream_of(&c);
  struct data_order o;
  struct error e = {0};
  if (!s || !data_order_make(&o, s, 64, 5, &e)) return;
  for (int n = 0; n < 40; n++) {
    const struct loader_plan plan = {.order = &o, .share = 1 + n % 7 * 50, .stride = 400, .updates = n % 3 ? 1000 : 1, .documents = true};
    struct loader *l = loader_open(&plan, &loader_memory_plain, &e);
    double waited;
    CHECK(l);
    if (n % 2) CHECK(loader_next(l, &waited, &e));
    if (n % 5 == 0) nap();
    loader_close(l);
  }
  loader_close(NULL);
  stream_close(s);
  corpus_free(&c);
}

static void *refuse(void *context, size_t bytes, struct error *e) {
  (void)context;
  error_set(e, ERROR_SYSTEM, "no memory for %zu bytes", bytes);
  return NULL;
}

TEST(memory) {
  CHECK_EQ_I64(loader_bytes(3, 64, false), 3 * (2 * 3 * 64 * 4 + 3 * 64));
  CHECK_EQ_I64(loader_bytes(3, 64, true), 3 * (3 * 3 * 64 * 4 + 3 * 64));
  struct error e = {0};
  struct corpus c = corpus_new(300, 30, 9);
  struct stream *s = stream_of(&c);
  struct data_order o;
  if (!s || !data_order_make(&o, s, 64, 5, &e)) return;
  const struct loader_plan plan = {.order = &o, .share = 3, .stride = 3, .updates = 1};
  const struct loader_memory none = {refuse, count_release, NULL};
  int before = atomic_load(&released);
  CHECK(!loader_open(&plan, &none, &e) && e.code == ERROR_SYSTEM && strstr(e.message, "5184 bytes"));
  CHECK_EQ_I64(atomic_load(&released), before);
  stream_close(s);
  corpus_free(&c);
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-loader-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  RUN(documents);
  RUN(updates);
  RUN(error_at_its_update);
  RUN(ends);
  RUN(memory);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
