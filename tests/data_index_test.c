/* Indexes over token files of others: golden samples from every format, the same
 * bytes for any number of threads and from two builders at once, and files that are
 * not what was indexed. */
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "data/data.h"
#include "data/index.h"
#include "tests/data_tokens_build.h"
#include "tests/test.h"

static char root[64], train[128], validation[128];
static struct docs docs[2];

static const char *at(const char *name) {
  static char paths[8][256];
  static int next;
  char *path = paths[next++ % 8];
  snprintf(path, sizeof paths[0], "%s/%s", root, name);
  return path;
}

static struct data_source source_of(const char *name, const char *path, enum data_format format, int64_t bos, int64_t eos) {
  struct data_source s = {.max_repetition = 1, .format = format, .bos = bos, .eos = eos};
  snprintf(s.path, sizeof s.path, "%s/%s", root, path);
  snprintf(s.name, sizeof s.name, "%s", name);
  return s;
}

/* The two sources in one format each. */
static const struct form {
  const char *path[2];
  enum data_format format;
  int64_t bos, eos;
} forms[] = {
    {{"mega0", "mega1"}, DATA_MEGATRON, -1, -1},  {{"shards0", "shards1"}, DATA_AUTO, -1, -1},
    {{"split0.bin", "split1.idx"}, DATA_AUTO, -1, -1}, {{"gpt2-0.bin", "gpt2-1.bin"}, DATA_AUTO, 256, -1},
    {{"llama0.bin", "llama1.bin"}, DATA_LLMC, -1, 257}, {{"titan0", "titan1"}, DATA_RAW_U32, -1, -1},
    {{"nano0.bin", "nano1.bin"}, DATA_RAW_U16, 256, 257}, {{"olmo0-*.npy", "olmo1-*.npy"}, DATA_RAW_U32, -1, 257},
    {{"true0.npy", "true1.npy"}, DATA_RAW_U16, 256, -1}, {{"i64-0", "i64-1"}, DATA_MEGATRON, 3, 4},
};
enum { FORMS = sizeof forms / sizeof *forms };

static void write_all(void) {
  struct error e;
  for (int i = 0; i < 2; i++) {
    char name[64];
    const struct docs *d = &docs[i];
#define NAME(...) (snprintf(name, sizeof name, __VA_ARGS__), at(name))
    put_megatron(NAME("mega%d", i), d, 0, d->count, 4, 4, 0);
    put_megatron(NAME("split%d", i), d, 0, d->count, 8, 2, 1);
    put_megatron(NAME("i64-%d", i), d, 0, d->count, 5, 8, 1);
    CHECK(file_make_folder(NAME("shards%d/b", i), ERROR_DATA, &e));
    put_megatron(NAME("shards%d/a", i), d, 0, 10, 3, 2, 0);
    put_megatron(NAME("shards%d/b/x", i), d, 10, 17, 4, 4, 1);
    put_megatron(NAME("shards%d/c", i), d, 17, d->count, 8, 2, 0);
    put_llmc(NAME("gpt2-%d.bin", i), d, 20240520, 1, 2);
    put_llmc(NAME("llama%d.bin", i), d, 20240801, 7, 4);
    CHECK(file_make_folder(NAME("titan%d", i), ERROR_DATA, &e));
    put_raw(NAME("titan%d/tokens.bin", i), d, 4);
    put_offsets(NAME("titan%d/offsets.npy", i), d, i ? "<u4" : "<i8", i ? 4 : 8);
    put_raw(NAME("nano%d.bin", i), d, 2);
    struct docs part = *d;
    part.tokens = 0;
    for (int64_t k = 0; k < 100; k++) part.tokens += d->length[k];
    put_raw(NAME("olmo%d-0.npy", i), &part, 4);
    part.ids += part.tokens;
    part.tokens = d->tokens - part.tokens;
    put_raw(NAME("olmo%d-1.npy", i), &part, 4);
    put_npy(NAME("true%d.npy", i), d, i ? "<i8" : "<u2", i ? 8 : 2);
#undef NAME
  }
}

static struct data_index request_of(const struct form *f, struct data_source sources[2], uint64_t seed) {
  for (int i = 0; i < 2; i++) sources[i] = source_of(i ? "b" : "a", f->path[i], f->format, f->bos, f->eos);
  sources[0].weight = 0.82;
  sources[1].weight = 0.18;
  return (struct data_index){.sources = sources, .n_sources = 2, .train_path = train, .validation_path = validation,
                             .validation_fraction = 0.1, .seed = seed, .shuffle_documents = true, .vocab_size = 258, .least = 33, .threads = 2};
}

static bool build(const struct data_index *x, struct error *e) {
  struct data_indexed done;
  memset(e, 0, sizeof *e);
  return data_index_build(x, &done, e);
}

/* Samples and digests of the golden file that have this seed. */
static void check_golden(uint64_t wanted_seed, uint64_t seed) {
  FILE *f = fopen("tests/golden/data_index.txt", "r");
  CHECK(f != NULL);
  if (!f) return;
  char kind[8], text[HASH_TEXT], have[HASH_TEXT];
  uint64_t line_seed;
  int is_validation, lines = 0;
  int64_t a, b;
  struct error e = {0};
  struct stream *s[2] = {stream_open(train, 258, &e), stream_open(validation, 258, &e)};
  CHECK(s[0] && s[1]);
  while (s[0] && s[1] && fscanf(f, "%7s %" SCNu64 " %d %" SCNd64 " %" SCNd64 " %32s", kind, &line_seed, &is_validation, &a, &b, text) == 6) {
    if (line_seed != wanted_seed) continue;
    lines++;
    const struct stream_info *info = stream_info(s[is_validation]);
    if (strcmp(kind, "stream") == 0) {
      hash_text(info->digest, have);
      CHECK_EQ_I64(info->tokens, a);
      CHECK_EQ_I64(info->documents, b);
    } else {
      struct data_order o;
      int32_t ids[33], targets[32];
      CHECK(data_order_make(&o, s[is_validation], 32, seed, &e));
      const struct data_sample sample = {.inputs = ids, .targets = targets};
      CHECK(data_order_position(&o, a) == b && data_sample(&o, a, &sample, &e));
      ids[32] = targets[31];
      hash_text(hash_bytes(ids, sizeof ids), have);
    }
    CHECK_STR(have, text);
  }
  CHECK(lines > 100);
  for (int side = 0; side < 2 && s[side]; side++) {
    CHECK(stream_verify(s[side], &e));
    stream_close(s[side]);
  }
  fclose(f);
}

TEST(golden_samples_from_every_format) {
  static const uint64_t seeds[] = {1, 7, (UINT64_C(1) << 63) + 5};
  for (int k = 0; k < FORMS; k++)
    for (int i = 0; i < 3; i++) {
      struct data_source sources[2];
      struct error e;
      if (k >= 2 && i != k % 3) continue; /* all seeds of two formats, one of each other */
      const struct data_index x = request_of(&forms[k], sources, seeds[i]);
      CHECK(build(&x, &e));
      if (e.code) FAIL("%s: %s", forms[k].path[0], e.message);
      check_golden(seeds[i], seeds[i]);
      CHECK(data_index_current(&x, train, &e) && data_index_current(&x, validation, &e));
    }
}

static bool read_both(char *text[2], size_t size[2]) {
  struct error e;
  return file_read(train, 1 << 26, ERROR_DATA, &text[0], &size[0], &e) && file_read(validation, 1 << 26, ERROR_DATA, &text[1], &size[1], &e);
}

/* Ids that cross segments of a megabyte, documents that do, at an odd place. */
static void write_large(const char *path, int64_t tokens, uint64_t seed) {
  FILE *f = fopen(path, "wb");
  put_npy_header(f, "<u2", tokens);
  for (int64_t i = 0; i < tokens; i++) put_number(f, docs_step(&seed) % 3000 < 2999 - (i > tokens / 2) * 2990 ? docs_step(&seed) % 250 : 257, 2);
  fclose(f);
}

TEST(threads_and_processes_agree) {
  write_large(at("large0.npy"), 1100001, 3);
  write_large(at("large1.npy"), 300007, 4);
  static const struct form form = {{"large0.npy", "large1.npy"}, DATA_AUTO, -1, 257};
  struct data_source sources[2];
  struct data_index x = request_of(&form, sources, 5);
  char *first[2] = {0}, *again[2] = {0};
  size_t size[2], size_again[2];
  struct error e;
  for (int threads = 1; threads <= 4; threads++) {
    x.threads = threads;
    CHECK(build(&x, &e));
    CHECK(read_both(threads == 1 ? first : again, threads == 1 ? size : size_again));
    if (threads == 1) continue;
    for (int side = 0; side < 2; side++) {
      CHECK(size[side] == size_again[side] && memcmp(first[side], again[side], size[side]) == 0);
      free(again[side]);
    }
  }
  /* Four at once. */
  CHECK(unlink(train) == 0 && unlink(validation) == 0);
  pid_t child[4];
  for (int k = 0; k < 4; k++) {
    child[k] = fork();
    if (child[k] == 0) _exit(build(&x, &e) ? 0 : 1);
  }
  for (int k = 0; k < 4; k++) {
    int status = 1;
    CHECK(waitpid(child[k], &status, 0) == child[k] && status == 0);
  }
  CHECK(read_both(again, size_again));
  for (int side = 0; side < 2; side++) {
    CHECK(size[side] == size_again[side] && memcmp(first[side], again[side], size[side]) == 0);
    free(first[side]);
    free(again[side]);
  }
}

/* The tokens of a plain walk over the file. */
TEST(documents_that_cross_segments) {
  const int64_t tokens = 1100001;
  int32_t *ids = malloc((size_t)tokens * 4), *read = malloc((size_t)tokens * 4);
  write_large(at("walk.npy"), tokens, 3);
  FILE *f = fopen(at("walk.npy"), "rb");
  CHECK(f && fseek(f, 128, SEEK_SET) == 0);
  int64_t documents = 0;
  for (int64_t i = 0; f && i < tokens; i++) {
    const int low = fgetc(f), high = fgetc(f);
    ids[i] = low | high << 8;
    documents += ids[i] == 257;
  }
  if (f) fclose(f);
  documents += ids[tokens - 1] != 257;
  struct data_source source = source_of("a", "walk.npy", DATA_NPY, -1, 257);
  struct data_index x = {.sources = &source, .n_sources = 1, .train_path = train, .seed = 1, .vocab_size = 258, .least = 2, .threads = 3};
  struct error e;
  CHECK(build(&x, &e)); /* in the order of the file */
  struct stream *s = stream_open(train, 258, &e);
  CHECK(s && stream_info(s)->tokens == tokens && stream_info(s)->documents == documents);
  for (int64_t i = 0; s && i < tokens; i += 99991) CHECK(stream_read(s, i, tokens - i < 99991 ? tokens - i : 99991, read + i, &e));
  CHECK(memcmp(ids, read, (size_t)tokens * 4) == 0);
  for (int64_t n = 0, end = 0; s && n < documents; n += 1) {
    struct stream_document d;
    CHECK(stream_document(s, n, &d, &e) && d.first == end && (d.end == tokens || ids[d.end - 1] == 257));
    end = d.end;
  }
  stream_close(s);
  free(ids);
  free(read);
}

TEST(far_samples) {
  struct data_source source = source_of("a", "nano0.bin", DATA_RAW_U16, 256, -1);
  struct data_index x = {.sources = &source, .n_sources = 1, .train_path = train, .seed = 1, .vocab_size = 258, .least = 2, .threads = 1};
  struct error e;
  CHECK(build(&x, &e));
  struct stream *s = stream_open(train, 258, &e);
  struct data_order o;
  int32_t inputs[8], targets[8];
  const struct data_sample sample = {.inputs = inputs, .targets = targets};
  const clock_t began = clock(); /* of this process: others may load the machine */
  CHECK(s && data_order_make(&o, s, 8, 3, &e) && data_sample(&o, 1000000000, &sample, &e) && data_sample(&o, INT64_C(1) << 60, &sample, &e));
  CHECK((double)(clock() - began) / CLOCKS_PER_SEC < 5);
  stream_close(s);
}

/* ---- files that are not what was indexed ---------------------------------------- */

static void write_byte(const char *path, int64_t where, int value) {
  FILE *f = fopen(path, "r+b");
  CHECK(f && fseek(f, where, SEEK_SET) == 0 && fputc(value, f) != EOF);
  if (f) fclose(f);
}

TEST(changed_files) {
  put_raw(at("changed.bin"), &docs[0], 4);
  struct data_source source = source_of("a", "changed.bin", DATA_RAW_U32, 256, -1);
  struct data_index x = {.sources = &source, .n_sources = 1, .train_path = train, .seed = 1, .vocab_size = 258, .least = 2, .threads = 1};
  struct error e = {0};
  int32_t ids[20];
  CHECK(build(&x, &e));
  struct stream *open = stream_open(train, 258, &e);
  CHECK(open != NULL);
  /* Content: found where it is touched, with both digests. */
  write_byte(at("changed.bin"), 4, 99);
  CHECK(!stream_read(open, 0, 20, ids, &e) || !stream_verify(open, &e));
  CHECK(e.code == ERROR_DATA && strstr(e.message, "changed.bin") && strstr(e.message, "digest") && strstr(e.message, "says") && strstr(e.hint, "index"));
  stream_close(open);
  write_byte(at("changed.bin"), 4, docs[0].ids[1]);
  open = stream_open(train, 258, &e);
  CHECK(open && stream_verify(open, &e));
  stream_close(open);
  /* Size. */
  CHECK(truncate(at("changed.bin"), docs[0].tokens * 4 - 4) == 0);
  CHECK(!stream_open(train, 258, &e) && strstr(e.message, "changed.bin") && strstr(e.message, "when it was indexed"));
  CHECK(truncate(at("changed.bin"), docs[0].tokens * 4 + 4) == 0);
  CHECK(!stream_open(train, 258, &e) && strstr(e.message, "changed.bin"));
  CHECK(unlink(at("changed.bin")) == 0);
  CHECK(!stream_open(train, 258, &e) && strstr(e.message, "changed.bin") && strstr(e.message, "No such file"));
}

/* A file that takes the place of a checked one while more files are open than fit. */
TEST(files_replaced_while_read) {
  enum { MANY = 65, TOKENS = 100 };
  struct error e;
  int32_t ids[TOKENS];
  char name[32];
  CHECK(file_make_folder(at("many"), ERROR_DATA, &e));
  for (int i = 0; i < MANY; i++) {
    snprintf(name, sizeof name, "many/%02d.bin", i);
    FILE *f = fopen(at(name), "wb");
    for (int k = 0; f && k < 2 * TOKENS; k++) fputc(k % 2 ? 0 : i, f);
    if (f) fclose(f);
  }
  struct data_source source = source_of("a", "many", DATA_RAW_U16, -1, -1);
  struct data_index x = {.sources = &source, .n_sources = 1, .train_path = train, .vocab_size = 258, .least = 2, .threads = 1};
  CHECK(build(&x, &e)); /* in the order of names */
  struct stream *s = stream_open(train, 258, &e);
  CHECK(s && stream_read(s, 0, TOKENS, ids, &e) && ids[7] == 0);
  CHECK(file_publish(at("many/00.bin"), memset(ids, 5, sizeof ids), 2 * TOKENS, ERROR_DATA, &e));
  CHECK(s && stream_read(s, 64 * TOKENS, TOKENS, ids, &e) && ids[7] == 64); /* it takes the place of file 0 */
  CHECK(s && !stream_read(s, 0, TOKENS, ids, &e) && strstr(e.message, "many/00.bin") && strstr(e.message, "digest"));
  if (s) stream_close(s);
}

TEST(other_settings_and_files) {
  struct data_source sources[2];
  struct data_index x = request_of(&forms[1], sources, 1);
  struct error e;
  CHECK(build(&x, &e) && data_index_current(&x, train, &e));
  x.seed = 2;
  CHECK(!data_index_current(&x, train, &e) && strstr(e.message, "settings") && strstr(e.hint, "--force"));
  x.seed = 1;
  sources[1].weight = 0.19;
  CHECK(!data_index_current(&x, train, &e) && strstr(e.message, "settings"));
  sources[1].weight = 0.18;
  put_megatron(at("shards1/d"), &docs[1], 0, 5, 4, 4, 0);
  CHECK(!data_index_current(&x, train, &e) && strstr(e.message, "shards1/d.idx is new"));
  CHECK(unlink(at("shards1/d.idx")) == 0 && unlink(at("shards1/d.bin")) == 0);
  CHECK(data_index_current(&x, train, &e));
}

/* Without waiting for the disk. */
static void put_bytes(const char *path, const char *bytes, size_t n) {
  FILE *f = fopen(path, "wb");
  CHECK(f && fwrite(bytes, 1, n, f) == n);
  if (f) fclose(f);
}

TEST(damaged_indexes) {
  struct data_source source = source_of("a", "nano0.bin", DATA_RAW_U16, 256, -1);
  struct data_index x = {.sources = &source, .n_sources = 1, .train_path = train, .seed = 1, .vocab_size = 258, .least = 2, .threads = 1};
  struct error e;
  CHECK(build(&x, &e));
  char *bytes;
  size_t size;
  CHECK(file_read(train, 1 << 20, ERROR_DATA, &bytes, &size, &e));
  uint64_t state = 5;
  for (int k = 0; k < 300; k++) {
    const size_t where = k < 130 ? (size_t)k : k % 4 == 0 ? size - 1 - docs_step(&state) % 200 : docs_step(&state) % size;
    bytes[where] = (char)(bytes[where] ^ 1 << k % 8);
    put_bytes(train, bytes, size);
    bytes[where] = (char)(bytes[where] ^ 1 << k % 8);
    memset(&e, 0, sizeof e);
    struct stream *s = stream_open(train, 258, &e);
    CHECK(!s || !stream_verify(s, &e));
    CHECK(e.code == ERROR_DATA && strstr(e.message, train));
    stream_close(s);
  }
  for (size_t n = 0; n < size; n += n < 300 || n > size - 100 ? 1 : 97) {
    put_bytes(train, bytes, n);
    memset(&e, 0, sizeof e);
    CHECK(!stream_open(train, 258, &e) && e.code == ERROR_DATA && strstr(e.message, train));
  }
  free(bytes);
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-index-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  snprintf(train, sizeof train, "%s/train.index", root);
  snprintf(validation, sizeof validation, "%s/validation.index", root);
  docs[0] = docs_make(0, 300);
  docs[1] = docs_make(1, 120);
  write_all();
  RUN(golden_samples_from_every_format);
  RUN(threads_and_processes_agree);
  RUN(documents_that_cross_segments);
  RUN(far_samples);
  RUN(changed_files);
  RUN(files_replaced_while_read);
  RUN(other_settings_and_files);
  RUN(damaged_indexes);
  docs_free(&docs[0]);
  docs_free(&docs[1]);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
