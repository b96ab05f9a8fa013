/* Token streams: the reader against an independent writer, large files, and
 * every way a file can be wrong. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/threads.h"
#include "data/data.h"
#include "data/stream_file.h"
#include "tests/data_stream_build.h"
#include "tests/test.h"

static char root[64], path[256];

static const char *at(const char *name) {
  snprintf(path, sizeof path, "%s/%s", root, name);
  return path;
}

/* One clear line of the right kind, which names the file. */
static bool good_error(const struct error *e) {
  return e->code == ERROR_DATA && strstr(e->message, path) && !strchr(e->message, '\n') && strlen(e->message) < 600;
}

static struct stream *open_or_fail(int32_t vocab_size) {
  struct error e;
  struct stream *s = stream_open(path, vocab_size, &e);
  if (!s) FAIL("%s", e.message);
  return s;
}

static const struct plant few[] = {{0, 256}, {1, 104}, {2, 105}, {3, 257}, {4, 256}, {5, 33}, {6, 257}};
static const uint64_t few_documents[] = {0, 4};
static const unsigned char few_sources[] = {1, 0};
static const struct build few_build = {258, 7, few, 7, few_documents, 2, few_sources};
static const char *const few_names[] = {"built", "other"};
static const char *const few_notes[] = {NULL, "from \xc3\xa4 place"};

/* What the product's writer is told to write the same. */
static struct stream_start start_of(int32_t vocab_size, const char *const *names, int n_sources) {
  return (struct stream_start){.vocab_size = vocab_size, .bos = 256, .eos = 257, .tokenizer = "bytes", .names = names, .n_sources = n_sources};
}

TEST(small_stream) {
  CHECK(build_stream(at("small"), &few_build));
  struct stream *s = open_or_fail(258);
  if (!s) return;
  const struct stream_info *info = stream_info(s);
  CHECK_EQ_I64(info->tokens, 7);
  CHECK_EQ_I64(info->documents, 2);
  CHECK_EQ_I64(info->vocab_size, 258);
  CHECK_STR(info->tokenizer, "bytes");
  CHECK_STR(info->sources, "built\t1\t3\nother\t1\t4\tfrom \xc3\xa4 place\n");
  CHECK_STR(info->settings, "");
  CHECK_EQ_I64(info->bos, 256);
  CHECK_EQ_I64(info->eos, 257);
  CHECK_EQ_I64(info->n_sources, 2);
  CHECK_STR(info->source[0].name, "built");
  CHECK_STR(info->source[1].name, "other");
  CHECK(info->source[0].documents == 1 && info->source[0].tokens == 3 && info->source[1].documents == 1 && info->source[1].tokens == 4);
  CHECK_STR(stream_path(s), path);
  int32_t ids[7];
  struct error e;
  CHECK(stream_read(s, 0, 7, ids, &e));
  for (int i = 0; i < 7; i++) CHECK_EQ_I64(ids[i], few[i].id);
  CHECK(stream_read(s, 7, 0, ids, &e));
  CHECK(!stream_read(s, 7, 1, ids, &e));
  CHECK(!stream_read(s, -1, 1, ids, &e));
  CHECK(!stream_read(s, INT64_MAX, 2, ids, &e));
  CHECK(!stream_read(s, 1, INT64_MAX, ids, &e));
  CHECK(stream_verify(s, &e));
  stream_close(s);
}

/* Writes the few tokens with the product's writer. */
static bool write_few(const char *name, const char *const *names, const char *const *notes) {
  struct error e = {0};
  const struct stream_start start = start_of(258, names, 2);
  struct stream_writer *w = stream_writer_open(at(name), &start, &e);
  bool ok = w != NULL;
  for (int i = 0; ok && i < 7; i++) {
    int32_t id = (int32_t)few[i].id;
    ok = (id != 256 || stream_writer_document(w, i == 0, &e)) && stream_writer_tokens(w, &id, 1, &e);
  }
  ok = ok && stream_writer_finish(w, notes, &e) && stream_writer_publish(w, &e);
  stream_writer_close(w);
  if (!ok) FAIL("%s", e.message);
  return ok;
}

static bool same_files(const char *a, const char *b) {
  char *x = NULL, *y = NULL;
  size_t nx = 0, ny = 0;
  struct error e;
  bool same = file_read(a, 1 << 20, ERROR_DATA, &x, &nx, &e) && file_read(b, 1 << 20, ERROR_DATA, &y, &ny, &e) &&
              nx == ny && memcmp(x, y, nx) == 0;
  free(x);
  free(y);
  return same;
}

TEST(two_writers_agree) {
  char other[256];
  CHECK(build_stream(at("built"), &few_build));
  snprintf(other, sizeof other, "%s", path);
  CHECK(write_few("written", few_names, few_notes));
  CHECK(same_files(other, path));
  /* The digest is that of the content: the sources' names do not matter. */
  struct error e;
  struct stream *a = stream_open(other, 0, &e);
  static const char *const elsewhere[] = {"else", "where"};
  CHECK(write_few("renamed", elsewhere, NULL));
  struct stream *b = stream_open(path, 0, &e);
  CHECK(a && b && hash_equal(stream_info(a)->digest, stream_info(b)->digest));
  stream_close(a);
  stream_close(b);
}

TEST(wide_ids) {
  static const struct plant plants[] = {{0, 70000}, {1, 128255}, {2, 65536}, {5, 1}};
  struct build b = {.vocab_size = 128256, .tokens = 6, .plants = plants, .n_plants = 4};
  CHECK(build_stream(at("wide"), &b));
  struct stream *s = open_or_fail(128256);
  if (!s) return;
  int32_t ids[6];
  struct error e;
  CHECK(stream_read(s, 0, 6, ids, &e));
  CHECK_EQ_I64(ids[0], 70000);
  CHECK_EQ_I64(ids[1], 128255);
  CHECK_EQ_I64(ids[2], 65536);
  CHECK_EQ_I64(ids[4], 0);
  CHECK_EQ_I64(ids[5], 1);
  stream_close(s);
  CHECK(stream_open(path, 128255, &e) == NULL);
  CHECK(good_error(&e) && strstr(e.message, "128255") && strstr(e.message, "128254"));
}

TEST(more_than_four_gigabytes) {
  /* More than 2^32 tokens, and samples far beyond 2^32 bytes. */
  int64_t tokens = (INT64_C(1) << 32) + 12345;
  enum { S = 8 };
  int64_t last = (tokens - 1) / S - 1;
  struct plant plants[2 * S + 2];
  int n = 0;
  for (int k = 0; k <= S; k++)
    plants[n++] = (struct plant){(INT64_C(1) << 31) + k, (uint32_t)(50 + k)}; /* byte offset 2^32 */
  for (int k = 0; k <= S; k++) plants[n++] = (struct plant){last * S + k, (uint32_t)(100 + k)};
  struct build b = {.vocab_size = 258, .tokens = (uint64_t)tokens, .plants = plants, .n_plants = n};
  CHECK(build_stream(at("large"), &b));
  CHECK(file_size(path) > INT64_C(8) << 30);
  const clock_t start = clock(); /* of this process: others may load the machine */
  struct stream *s = open_or_fail(258);
  if (!s) return;
  CHECK_EQ_I64(stream_info(s)->tokens, tokens);
  struct data_order o;
  struct error e;
  int32_t inputs[S], targets[S];
  CHECK(data_order_make(&o, s, S, 1, &e));
  CHECK_EQ_I64(data_order_epoch_samples(&o), last + 1);
  CHECK_EQ_I64(data_order_epoch_samples(&o) * S + 1 + data_order_dropped_tokens(&o), tokens);
  CHECK(data_sample(&o, last, &(struct data_sample){inputs, targets, NULL, NULL}, &e));
  for (int k = 0; k < S; k++) CHECK(inputs[k] == 100 + k && targets[k] == 101 + k);
  CHECK(data_sample(&o, (INT64_C(1) << 31) / S, &(struct data_sample){inputs, targets, NULL, NULL}, &e));
  for (int k = 0; k < S; k++) CHECK(inputs[k] == 50 + k && targets[k] == 51 + k);
  /* Sample 10^9 and one far away: at once. */
  CHECK(data_sample(&o, INT64_C(1000000000), &(struct data_sample){inputs, targets, NULL, NULL}, &e));
  CHECK(data_sample(&o, INT64_C(1) << 60, &(struct data_sample){inputs, targets, NULL, NULL}, &e));
  CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 5);
  stream_close(s);
  CHECK(unlink(path) == 0);
}

TEST(every_flipped_byte_is_found) {
  CHECK(write_few("flip", few_names, NULL));
  struct error e;
  char *bytes;
  size_t size;
  if (!file_read(path, 1 << 20, ERROR_DATA, &bytes, &size, &e)) {
    FAIL("%s", e.message);
    return;
  }
  for (size_t i = 0; i < size; i++)
    for (int bit = 0; bit < 8; bit += 3) {
      bytes[i] = (char)(bytes[i] ^ 1 << bit);
      CHECK(file_publish(path, bytes, size, ERROR_DATA, &e));
      bytes[i] = (char)(bytes[i] ^ 1 << bit);
      memset(&e, 0, sizeof e);
      struct stream *s = stream_open(path, 258, &e);
      int32_t id;
      /* The payload's damage shows on the first touch, the rest at once. */
      bool in_payload = i >= FRAME_HEADER && i < FRAME_HEADER + 16 + 24 + 2;
      CHECK((s != NULL) == in_payload);
      if (s) CHECK(!stream_read(s, 0, 1, &id, &e));
      CHECK(good_error(&e));
      if (s) {
        memset(&e, 0, sizeof e);
        CHECK(!stream_verify(s, &e) && good_error(&e));
      }
      stream_close(s);
    }
  free(bytes);
}

TEST(every_truncation_is_found) {
  CHECK(write_few("cut", few_names, NULL));
  struct error e;
  char *bytes;
  size_t size;
  if (!file_read(path, 1 << 20, ERROR_DATA, &bytes, &size, &e)) {
    FAIL("%s", e.message);
    return;
  }
  for (size_t n = 0; n < size; n++) {
    CHECK(file_publish(path, bytes, n, ERROR_DATA, &e));
    memset(&e, 0, sizeof e);
    CHECK(stream_open(path, 258, &e) == NULL && good_error(&e));
  }
  /* And bytes after the end. */
  char *longer = realloc(bytes, size + 64);
  CHECK(longer != NULL);
  if (longer) {
    memmove(longer + 64, longer + size - 64, 64 < size ? 64 : 0);
    CHECK(file_publish(path, longer, size + 1, ERROR_DATA, &e));
    CHECK(stream_open(path, 258, &e) == NULL && good_error(&e));
    bytes = longer;
  }
  free(bytes);
}

static const char few_text[] = "built\t1\t3\nother\t1\t4\tfrom \xc3\xa4 place\n";

TEST(absurd_headers) {
  /* A header that is wrong and yet has a matching digest. */
  static const struct {
    int at, bytes;
    uint64_t value;
  } wrong[] = {
      {24, 8, UINT64_MAX},      {24, 8, INT64_MAX},       {24, 8, INT64_MAX / 2}, {24, 8, INT64_MAX / 2 - 9},
      {24, 8, UINT64_C(1) << 61}, {24, 8, UINT64_C(1) << 45}, {24, 8, 9},           {24, 8, 0},
      {32, 8, UINT64_MAX},      {32, 8, UINT64_C(1) << 60}, {32, 8, 7},            {32, 8, 8},
      {32, 8, 0},               {20, 4, 0},               {20, 4, UINT32_MAX},    {20, 4, UINT64_C(1) << 31},
      {20, 4, 70000},           {16, 4, 0},               {16, 4, 4},             {16, 4, 1},
      {40, 8, 0},               {40, 8, 1},               {40, 8, UINT64_C(1) << 40}, {12, 4, 0},
      {12, 4, UINT32_MAX},      {8, 4, 0},                {8, 4, 1},             {8, 4, 3},              {8, 4, UINT32_MAX},
      {48, 1, 0},               {111, 1, 65},             {48, 1, 27},            {0, 1, 0},
      {112, 4, 258},            {112, 4, UINT32_MAX - 1}, {116, 4, 258},          {116, 4, UINT64_C(1) << 31},
      {120, 4, 0},              {120, 4, 33},           {120, 4, 1},              {120, 4, 3},
  };
  for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
    CHECK(build_stream(at("absurd"), &few_build));
    int fd = open(path, O_RDWR);
    unsigned char header[256], table[16], trailer[64];
    int64_t size = file_size(path);
    CHECK(pread(fd, header, 256, 0) == 256 && pread(fd, table, 16, 256 + 42) == 16);
    build_put(header + wrong[k].at, wrong[k].value, wrong[k].bytes);
    CHECK(build_trailer(trailer, header, table, 16, few_text));
    CHECK(pwrite(fd, header, 256, 0) == 256 && pwrite(fd, trailer, 64, size - 64) == 64);
    close(fd);
    struct error e = {0};
    struct stream *s = stream_open(path, 258, &e);
    CHECK(s == NULL && good_error(&e));
    stream_close(s);
  }
}

TEST(absurd_sources) {
  static const uint64_t sizes[] = {UINT64_MAX, INT64_MAX, 0, 7, UINT64_C(1) << 40};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    CHECK(build_stream(at("sources"), &few_build));
    unsigned char bytes[8];
    build_put(bytes, sizes[k], 8);
    int fd = open(path, O_WRONLY);
    CHECK(pwrite(fd, bytes, 8, file_size(path) - 32) == 8);
    close(fd);
    struct error e = {0};
    CHECK(stream_open(path, 258, &e) == NULL && good_error(&e));
  }
}

/* A list of sources with a matching digest that is not one of this stream. */
TEST(wrong_lists_of_sources) {
  static const char *const wrong[] = {
      "", "built\t1\t3\n", "built\t1\t3\nother\t1\t4", "built\t1\t3\nother\t1\t4\nthird\t0\t0\n", "built\t1\t3\nsettings\tx=1\nother\t1\t4\n",
      "built\t1\t3\nother\t1\t4\nsettings\tx=1\nmore\n", "built\t1\t3\nother\t1\t4\nsettings\tx=1", "built\t1\t3\n\t1\t4\n",
      "built\t1\t3\nother\t1\n", "built\t1\t3\nother\n", "built\t1\t3\nother\t2\t4\n", "built\t1\t3\nother\t1\t5\n",
      "built\t1\t3\nother\t1\t-4\n", "built\t1\t3\nother\t1\t4x\n", "built\t1\t3\nother\t1\t 4\n", "built\t1\t3\nother\t\t4\n",
      "built\t1\t9223372036854775807\nother\t1\t9223372036854775807\n", "built\t1\t3\nother\t1\t99999999999999999999\n",
      "0123456789012345678901234567890123456789012345678901234567890123\t1\t3\nother\t1\t4\n"};
  for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
    struct error e = {0};
    CHECK(build_stream(at("list"), &few_build));
    unsigned char bytes[512], trailer[64];
    const size_t before = 256 + 42 + 16, length = strlen(wrong[k]);
    int fd = open(path, O_RDWR);
    CHECK(pread(fd, bytes, before, 0) == (ssize_t)before);
    CHECK(build_trailer(trailer, bytes, bytes + before - 16, 16, wrong[k]));
    CHECK(ftruncate(fd, (off_t)before) == 0 && pwrite(fd, wrong[k], length, (off_t)before) == (ssize_t)length &&
          pwrite(fd, trailer, 64, (off_t)(before + length)) == 64);
    close(fd);
    struct stream *s = stream_open(path, 258, &e);
    CHECK(s == NULL && good_error(&e) && strstr(e.message, "list of sources"));
    stream_close(s);
  }
}

TEST(documents) {
  /* Empty ones too; offsets and sources over two blocks. */
  enum { D = 140000 };
  static uint64_t firsts[D];
  static unsigned char sources[D];
  uint64_t tokens = 0;
  for (int d = 0; d < D; d++) {
    firsts[d] = tokens;
    tokens += d % 7 == 3 ? 0 : (uint64_t)(1 + d % 5);
    sources[d] = (unsigned char)(d % 3 == 0);
  }
  struct build b = {.vocab_size = 70000, .tokens = tokens, .documents = firsts, .n_documents = D, .source = sources};
  CHECK(build_stream(at("many"), &b));
  struct stream *s = open_or_fail(0);
  if (!s) return;
  struct error e = {0};
  struct stream_document d;
  CHECK(stream_verify(s, &e));
  for (int n = 0; n < D; n += 11) {
    CHECK(stream_document(s, n, &d, &e));
    CHECK(d.first == (int64_t)firsts[n] && d.end == (int64_t)(n + 1 < D ? firsts[n + 1] : tokens) && d.source == (n % 3 == 0) && d.number == n);
    if (d.first == d.end) continue;
    const int64_t inside[] = {d.first, d.end - 1};
    for (int k = 0; k < 2; k++) {
      struct stream_document found;
      CHECK(stream_document_at(s, inside[k], &found, &e));
      CHECK(found.number == n && found.first == d.first && found.end == d.end && found.source == d.source);
    }
  }
  CHECK(stream_document_at(s, (int64_t)tokens - 1, &d, &e) && d.end == (int64_t)tokens);
  CHECK(!stream_document(s, -1, &d, &e) && !stream_document(s, D, &d, &e));
  CHECK(!stream_document_at(s, -1, &d, &e) && !stream_document_at(s, (int64_t)tokens, &d, &e));
  stream_close(s);
}

TEST(documents_of_no_source) {
  static const unsigned char sources[] = {1, 2};
  struct build b = few_build;
  b.source = sources;
  CHECK(build_stream(at("nosource"), &b));
  struct stream *s = open_or_fail(258);
  if (!s) return;
  struct error e = {0};
  struct stream_document d;
  CHECK(stream_document(s, 0, &d, &e));
  CHECK(!stream_document(s, 1, &d, &e) && good_error(&e) && strstr(e.message, "source 2"));
  CHECK(!stream_verify(s, &e) && good_error(&e) && strstr(e.message, "source 2"));
  stream_close(s);
}

TEST(writer_refuses) {
  struct error e = {0};
  static const char *const names[] = {"a", ""};
  struct stream_start start = start_of(258, names, 2);
  CHECK(stream_writer_open(at("refused"), &start, &e) == NULL && e.code == ERROR_DATA);
  static const char *const tabs[] = {"a\tb"};
  start = start_of(258, tabs, 1);
  CHECK(stream_writer_open(at("refused"), &start, &e) == NULL && e.code == ERROR_DATA);
  start = start_of(258, few_names, 0);
  CHECK(stream_writer_open(at("refused"), &start, &e) == NULL);
  start = start_of(258, few_names, 2);
  struct stream_writer *w = stream_writer_open(at("refused"), &start, &e);
  const int32_t ids[] = {1, 258, -1};
  CHECK(w && !stream_writer_tokens(w, ids, 1, &e)); /* before a document */
  CHECK(w && !stream_writer_document(w, 2, &e) && !stream_writer_document(w, -1, &e) && stream_writer_document(w, 1, &e));
  CHECK(w && stream_writer_tokens(w, ids, 1, &e) && !stream_writer_tokens(w, ids + 1, 1, &e) && !stream_writer_tokens(w, ids + 2, 1, &e));
  stream_writer_close(w);
  CHECK(!file_exists(path));
}

TEST(wrong_files) {
  struct error e = {0};
  at("absent");
  CHECK(stream_open(path, 258, &e) == NULL && good_error(&e) && strstr(e.hint, "prepare"));
  CHECK(file_make_folder(at("folder"), ERROR_DATA, &e));
  CHECK(stream_open(path, 258, &e) == NULL && good_error(&e) && strstr(e.message, "a folder"));
  at("text");
  char text[1000];
  memset(text, 'x', sizeof text);
  CHECK(file_publish(path, text, sizeof text, ERROR_DATA, &e));
  CHECK(stream_open(path, 258, &e) == NULL && good_error(&e) && strstr(e.message, "not a token stream"));
  CHECK(mkfifo(at("fifo"), 0600) == 0);
  CHECK(stream_open(path, 258, &e) == NULL && good_error(&e));
  CHECK(build_stream(at("locked"), &few_build) && chmod(path, 0) == 0 && chmod(root, 0755) == 0);
  bool is_root = geteuid() == 0;
  if (is_root) CHECK(seteuid(65534) == 0);
  CHECK(stream_open(path, 258, &e) == NULL && good_error(&e) && strstr(e.message, "Permission denied"));
  if (is_root) CHECK(seteuid(0) == 0);
}

TEST(planted_id) {
  static const struct plant plants[] = {{3, 257}, {700001, 258}, {700005, 65535}};
  struct build b = {.vocab_size = 258, .tokens = 1000000, .plants = plants, .n_plants = 3};
  CHECK(build_stream(at("planted"), &b));
  struct stream *s = open_or_fail(258);
  if (!s) return;
  static int32_t ids[100];
  struct error e = {0};
  CHECK(stream_read(s, 0, 100, ids, &e));
  CHECK(!stream_read(s, 700000, 100, ids, &e) && good_error(&e));
  CHECK(strstr(e.message, "token 700001 ") && strstr(e.message, "byte 1400258") && strstr(e.message, "id 258"));
  memset(&e, 0, sizeof e);
  CHECK(!stream_verify(s, &e) && good_error(&e) && strstr(e.message, "token 700001 "));
  struct data_order o;
  int32_t targets[100];
  CHECK(data_order_make(&o, s, 100, 0, &e));
  CHECK(data_sample(&o, 6999, &(struct data_sample){ids, targets, NULL, NULL}, &e));
  CHECK(!data_sample(&o, 7000, &(struct data_sample){ids, targets, NULL, NULL}, &e) && good_error(&e));
  stream_close(s);
  /* Ids of 32 bits: those above 2^31 too. */
  static const struct plant huge[] = {{3, UINT32_MAX}};
  struct build wide = {.vocab_size = 128256, .tokens = 10, .plants = huge, .n_plants = 1};
  CHECK(build_stream(at("planted-wide"), &wide));
  s = open_or_fail(0);
  if (!s) return;
  CHECK(!stream_read(s, 0, 10, ids, &e) && good_error(&e) && strstr(e.message, "id 4294967295"));
  stream_close(s);
}

TEST(bad_documents) {
  static const uint64_t offsets[][3] = {{1, 2, 3}, {0, 5, 4}, {0, 5, 8}, {0, UINT64_MAX, 5}};
  for (size_t k = 0; k < sizeof offsets / sizeof *offsets; k++) {
    struct build b = {258, 7, few, 7, offsets[k], 3, NULL};
    CHECK(build_stream(at("documents"), &b));
    struct stream *s = open_or_fail(258);
    if (!s) return;
    struct error e = {0};
    CHECK(!stream_verify(s, &e) && good_error(&e) && strstr(e.message, "document"));
    stream_close(s);
  }
}

TEST(damage_in_one_block) {
  struct build b = {.vocab_size = 258, .tokens = 5 * (BUILD_BLOCK / 2) + 99};
  CHECK(build_stream(at("block"), &b));
  int64_t per_block = BUILD_BLOCK / 2, where = 3 * per_block + 4242;
  int fd = open(path, O_WRONLY);
  CHECK(pwrite(fd, "\1", 1, 256 + 2 * where) == 1);
  close(fd);
  struct stream *s = open_or_fail(258);
  if (!s) return;
  static int32_t ids[2000];
  struct error e = {0};
  CHECK(stream_read(s, 2 * per_block, 2000, ids, &e));
  CHECK(stream_read(s, 3 * per_block - 2000, 2000, ids, &e));
  /* Also when the damaged byte itself is not asked for, and again. */
  for (int k = 0; k < 2; k++) {
    memset(&e, 0, sizeof e);
    CHECK(!stream_read(s, 3 * per_block - 1, 2, ids, &e) && good_error(&e) && strstr(e.message, "block 3 of 6"));
  }
  CHECK(stream_read(s, 4 * per_block, 2000, ids, &e));
  CHECK(!stream_verify(s, &e) && strstr(e.message, "block 3 of 6"));
  stream_close(s);
}

TEST(cut_while_open) {
  struct build b = {.vocab_size = 258, .tokens = 2000000};
  CHECK(build_stream(at("shrinks"), &b));
  struct stream *s = open_or_fail(258);
  if (!s) return;
  static int32_t ids[1000];
  struct error e = {0};
  CHECK(stream_read(s, 0, 1000, ids, &e));
  CHECK(truncate(path, 1000) == 0);
  CHECK(stream_read(s, 0, 300, ids, &e));
  CHECK(!stream_read(s, 0, 1000, ids, &e) && good_error(&e));
  CHECK(!stream_read(s, 1999000, 1000, ids, &e) && good_error(&e) && strstr(e.message, "cut"));
  stream_close(s);
}

struct readers {
  struct stream *s;
  atomic_int wrong;
};

static void read_some(void *context, int64_t index, int worker) {
  (void)worker;
  struct readers *r = context;
  int32_t ids[777];
  struct error e;
  int64_t first = index * 104729 % 3000000;
  if (!stream_read(r->s, first, 777, ids, &e)) atomic_fetch_add(&r->wrong, 1);
  for (int64_t i = 0; i < 777; i++)
    if (ids[i] != ((first + i) % 1000 == 0 ? (first + i) / 1000 % 258 : 0)) atomic_fetch_add(&r->wrong, 1);
}

TEST(many_threads_touch_first) {
  static struct plant plants[3001];
  for (int i = 0; i <= 3000; i++) plants[i] = (struct plant){i * 1000, (uint32_t)(i % 258)};
  struct build b = {.vocab_size = 258, .tokens = 3001000, .plants = plants, .n_plants = 3001};
  CHECK(build_stream(at("threads"), &b));
  struct error e;
  struct threads *t = threads_create(4, &e);
  CHECK(t != NULL);
  for (int k = 0; t && k < 5; k++) {
    struct readers r = {.s = open_or_fail(258)};
    if (!r.s) break;
    threads_run(t, 200, read_some, &r);
    CHECK_EQ_I64(r.wrong, 0);
    stream_close(r.s);
  }
  threads_destroy(t);
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-stream-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  RUN(small_stream);
  RUN(two_writers_agree);
  RUN(wide_ids);
  RUN(more_than_four_gigabytes);
  RUN(every_flipped_byte_is_found);
  RUN(every_truncation_is_found);
  RUN(absurd_headers);
  RUN(absurd_sources);
  RUN(wrong_lists_of_sources);
  RUN(documents);
  RUN(documents_of_no_source);
  RUN(writer_refuses);
  RUN(wrong_files);
  RUN(planted_id);
  RUN(bad_documents);
  RUN(damage_in_one_block);
  RUN(cut_while_open);
  RUN(many_threads_touch_first);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
