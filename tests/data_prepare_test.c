/* From text files to streams: what is read, dropped, held out and in which
 * order; and every way it can fail. */
#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include "base/file.h"
#include "data/data.h"
#include "data/prepare.h"
#include "data/stream_file.h"
#include "tests/test.h"

static char root[64];
static char train[128], validation[128];

static const char *at(const char *name) {
  static char paths[8][256];
  static int next;
  char *p = paths[next++ % 8];
  snprintf(p, sizeof paths[0], "%s/%s", root, name);
  return p;
}

static void put(const char *name, const char *text, size_t bytes) {
  struct error e;
  char folder[256];
  snprintf(folder, sizeof folder, "%s", at(name));
  *strrchr(folder, '/') = 0;
  if (!file_make_folder(folder, ERROR_DATA, &e) || !file_publish(at(name), text, bytes, ERROR_DATA, &e))
    FAIL("%s", e.message);
}

static void put_gz(const char *name, const char *text, unsigned bytes) {
  gzFile f = gzopen(at(name), "wb");
  CHECK(f != NULL && gzwrite(f, text, bytes) == (int)bytes && gzclose(f) == Z_OK);
}

static void reset(void) {
  struct error e;
  CHECK(file_remove_tree(root, ERROR_DATA, &e) && file_make_folder(root, ERROR_DATA, &e));
}

/* Forty documents "document 7 7 7 …" of different lengths. */
static void put_forty(const char *folder) {
  for (int i = 0; i < 40; i++) {
    char text[4000], name[64];
    size_t n = (size_t)snprintf(text, sizeof text, "document");
    for (int k = 0; k < i * 7 % 41 + 1; k++) n += (size_t)snprintf(text + n, sizeof text - n, " %d", i);
    snprintf(name, sizeof name, "%s/%02d.txt", folder, i);
    put(name, text, n);
  }
}

static struct data_source source_at(const char *path) {
  struct data_source s = {.max_repetition = 1, .bos = -1, .eos = -1};
  snprintf(s.path, sizeof s.path, "%s", at(path));
  snprintf(s.name, sizeof s.name, "%.60s", path);
  for (char *c = s.name; *c; c++)
    if (*c == '/') *c = 0;
  return s;
}

/* The request that most tests change in one point. */
static struct data_prepare request(const struct data_source *s, int n, double fraction, uint64_t seed) {
  return (struct data_prepare){.sources = s, .n_sources = n, .train_path = train, .validation_path = fraction != 0 ? validation : NULL,
                               .validation_fraction = fraction, .seed = seed, .bos = true, .eos = true, .dedup = DATA_DEDUP_EXACT,
                               .memory = 256 << 20, .threads = 2, .quiet = true};
}

static bool prepare(const char *source, uint64_t seed, double fraction, struct data_prepared *done,
                    struct error *e) {
  struct data_source s = source_at(source);
  struct data_prepare p = request(&s, 1, fraction, seed);
  p.validation_path = validation;
  memset(e, 0, sizeof *e);
  return data_prepare(&p, done, e);
}

/* All ids of a stream; malloc'ed; *info is filled but for its sources. */
static int32_t *read_ids(const char *path, struct stream_info *info) {
  struct error e;
  struct stream *s = stream_open(path, TOKENIZER_BYTES_VOCAB, &e);
  if (!s) {
    FAIL("%s", e.message);
    return NULL;
  }
  *info = *stream_info(s);
  info->sources = NULL;
  int32_t *ids = malloc((size_t)info->tokens * sizeof *ids);
  CHECK(ids && stream_read(s, 0, info->tokens, ids, &e));
  CHECK(stream_verify(s, &e));
  stream_close(s);
  return ids;
}

/* The stream as text: '<' and '>' stand for BOS and EOS; malloc'ed. */
static char *as_text(const char *path, struct stream_info *info) {
  int32_t *ids = read_ids(path, info);
  char *text = ids ? malloc((size_t)info->tokens + 1) : NULL;
  if (text) {
    for (int64_t i = 0; i < info->tokens; i++)
      text[i] = ids[i] == TOKENIZER_BYTES_BOS ? '<' : ids[i] == TOKENIZER_BYTES_EOS ? '>' : (char)ids[i];
    text[info->tokens] = 0;
  }
  free(ids);
  return text;
}

TEST(which_files_are_read) {
  reset();
  struct data_prepared done;
  struct error e;
  put("in/b.txt", "plain", 5);
  put("in/a/deep/er/x.md", "nested", 6);
  put("in/c.RST", "upper", 5);
  put_gz("in/d.txt.gz", "", 0);
  put_gz("in/e.md.gz", "zipped", 6);
  put_gz("in/f.txt.gz", "", 0);
  put("in/g.txt", "", 0);
  put("in/copy.txt", "plain", 5);
  put_gz("in/copy2.txt.gz", "plain", 5);
  put("in/picture.png", "no", 2);
  put("in/.hidden.txt", "no", 2);
  put("in/.git/x.txt", "no", 2);
  put("in/txt", "no", 2);
  put("in/.txt", "no", 2);
  CHECK(symlink(at("in/a"), at("in/linked-folder")) == 0);
  CHECK(symlink(at("in/b.txt"), at("in/link.txt")) == 0);
  CHECK(prepare("in", 1, 0.3, &done, &e));
  if (e.code) FAIL("%s", e.message);
  CHECK_EQ_I64(done.files, 10);
  CHECK_EQ_I64(done.empty, 3);
  CHECK_EQ_I64(done.duplicates, 3);
  CHECK_EQ_I64(done.documents[0] + done.documents[1], 4);
  CHECK_EQ_I64(done.tokens[0] + done.tokens[1], 5 + 6 + 5 + 6 + 2 * 4);
  struct stream_info a, b;
  char *x = as_text(train, &a), *y = as_text(validation, &b);
  char both[200] = "";
  if (x && y) snprintf(both, sizeof both, "%s%s", x, y);
  CHECK_EQ_I64(a.tokens, done.tokens[0]);
  CHECK_EQ_I64(b.documents, done.documents[1]);
  CHECK(strstr(both, "<plain>") && strstr(both, "<nested>") && strstr(both, "<upper>") && strstr(both, "<zipped>"));
  CHECK_EQ_I64(strlen(both), 30);
  free(x);
  free(y);
}

TEST(documents_stay_whole_and_apart) {
  /* BOS and EOS exactly once each a document, any byte inside. */
  reset();
  char bytes[256];
  for (int i = 0; i < 256; i++) bytes[i] = (char)(unsigned char)i;
  put("in/all.txt", bytes, 256);
  put("in/bad-utf8.txt", "\xff\xfe\xc0\x80", 4);
  char *big = malloc(3000001);
  CHECK(big != NULL);
  if (!big) return;
  for (int i = 0; i < 3000001; i++) big[i] = (char)(i * 31 % 127);
  put("in/big.txt", big, 3000001);
  put_gz("in/big2.md.gz", big, 2999999);
  struct data_prepared done;
  struct error e;
  CHECK(prepare("in", 3, 0.4, &done, &e));
  if (e.code) FAIL("%s", e.message);
  int64_t bos = 0, eos = 0, plain = 0;
  for (int side = 0; side < 2; side++) {
    struct stream_info info;
    int32_t *ids = read_ids(side ? validation : train, &info);
    if (!ids) break;
    CHECK(ids[0] == TOKENIZER_BYTES_BOS && ids[info.tokens - 1] == TOKENIZER_BYTES_EOS);
    for (int64_t i = 0; i < info.tokens; i++) {
      bos += ids[i] == TOKENIZER_BYTES_BOS;
      eos += ids[i] == TOKENIZER_BYTES_EOS;
      plain += ids[i] < 256;
      if (i > 0) CHECK((ids[i] == TOKENIZER_BYTES_BOS) == (ids[i - 1] == TOKENIZER_BYTES_EOS));
    }
    free(ids);
  }
  CHECK_EQ_I64(bos, 4);
  CHECK_EQ_I64(eos, 4);
  CHECK_EQ_I64(plain, 256 + 4 + 3000001 + 2999999);
  free(big);
}

TEST(deterministic_and_independent_of_names) {
  reset();
  put_forty("in");
  struct data_prepared done;
  struct error e;
  struct stream_info info[2], again[2];
  char *first[2], *second[2];
  CHECK(prepare("in", 11, 0.2, &done, &e));
  char *raw, *raw_again;
  size_t n = 0, n_again = 0;
  CHECK(file_read(train, 1 << 20, ERROR_DATA, &raw, &n, &e));
  for (int side = 0; side < 2; side++) first[side] = as_text(side ? validation : train, &info[side]);
  CHECK(prepare("in", 11, 0.2, &done, &e));
  CHECK(file_read(train, 1 << 20, ERROR_DATA, &raw_again, &n_again, &e));
  CHECK(n == n_again && memcmp(raw, raw_again, n) == 0);
  free(raw);
  free(raw_again);
  /* Other names, folders and a compressed copy: the same streams. */
  CHECK(rename(at("in/07.txt"), at("in/zz.md")) == 0);
  CHECK(rename(at("in"), at("elsewhere")) == 0);
  CHECK(prepare("elsewhere", 11, 0.2, &done, &e));
  for (int side = 0; side < 2; side++) {
    second[side] = as_text(side ? validation : train, &again[side]);
    CHECK(first[side] && second[side] && strcmp(first[side], second[side]) == 0);
    CHECK(hash_equal(info[side].digest, again[side].digest));
    free(second[side]);
  }
  /* Another seed: the same validation stream, training in another order. */
  CHECK(prepare("elsewhere", 12, 0.2, &done, &e));
  for (int side = 0; side < 2; side++) {
    second[side] = as_text(side ? validation : train, &again[side]);
    CHECK_EQ_I64(again[side].tokens, info[side].tokens);
    CHECK(first[side] && second[side] && (strcmp(first[side], second[side]) == 0) == (side == 1));
    for (char *d = second[side] ? strtok(second[side], "<>") : NULL; d; d = strtok(NULL, "<>")) {
      char framed[4100];
      snprintf(framed, sizeof framed, "<%s>", d);
      CHECK(strstr(first[side], framed) != NULL);
    }
    CHECK(hash_equal(info[side].digest, again[side].digest) == (side == 1));
    free(first[side]);
    free(second[side]);
  }
}

TEST(fraction_and_order) {
  reset();
  put_forty("in");
  struct data_prepared done;
  struct error e;
  int64_t before = 0;
  static const double fractions[] = {0.1, 0.3, 0.5, 0.9};
  for (int k = 0; k < 4; k++) {
    CHECK(prepare("in", 1, fractions[k], &done, &e));
    if (e.code) FAIL("%s", e.message);
    CHECK_EQ_I64(done.documents[0] + done.documents[1], 40);
    /* Held out at a smaller fraction, held out at a larger one. */
    CHECK(done.documents[1] >= before);
    CHECK_CLOSE((double)done.documents[1] / 40, fractions[k], 0.3);
    before = done.documents[1];
  }
  /* Shuffled: not in the order of names. */
  CHECK(prepare("in", 1, 0.1, &done, &e));
  struct stream_info info;
  char *text = as_text(train, &info);
  int ascending = 0, n = 0, last = -1;
  for (char *d = text ? strtok(text, "<>") : NULL; d; d = strtok(NULL, "<>"), n++) {
    int number = atoi(d + 9);
    ascending += number > last;
    last = number;
  }
  CHECK(n >= 30 && ascending > n / 5 && ascending < n * 4 / 5);
  free(text);
}

TEST(several_sources) {
  reset();
  put("one/a.txt", "first", 5);
  put("two.md", "second", 6);
  put("three/x/y.rst", "third", 5);
  struct data_source s[] = {source_at("one/"), source_at("two.md"), source_at("three")};
  struct data_prepare p = request(s, 3, 0.5, 4);
  struct data_prepared done;
  struct error e = {0};
  CHECK(data_prepare(&p, &done, &e));
  if (e.code) FAIL("%s", e.message);
  struct stream *t = stream_open(train, 0, &e);
  CHECK(t && strstr(stream_info(t)->sources, "two.md\t") && stream_info(t)->n_sources == 3);
  if (t) CHECK_STR(stream_info(t)->source[0].name, "one");
  stream_close(t);
}

TEST(without_validation) {
  reset();
  put_forty("in");
  struct data_source s = source_at("in");
  struct data_prepare p = request(&s, 1, 0, 4);
  struct data_prepared done;
  struct error e = {0};
  CHECK(data_prepare(&p, &done, &e));
  if (e.code) FAIL("%s", e.message);
  CHECK(done.documents[0] == 40 && done.documents[1] == 0 && done.tokens[1] == 0);
  CHECK(file_exists(train) && !file_exists(validation));
}

static bool mentions(const struct error *e, const char *text) {
  return e->code == ERROR_DATA && strstr(e->message, text) && !strchr(e->message, '\n');
}

/* Files in the test's folder that a failed preparation left behind. */
static int leftovers(void) {
  int n = 0;
  DIR *d = opendir(root);
  for (struct dirent *entry; d && (entry = readdir(d));) n += strstr(entry->d_name, ".tmp") != NULL;
  if (d) closedir(d);
  return n;
}

TEST(unusable_sources) {
  reset();
  struct data_prepared done;
  struct error e;
  CHECK(!prepare("absent", 1, 0.5, &done, &e) && mentions(&e, "absent"));
  CHECK(!prepare("*.txt", 1, 0.5, &done, &e) && mentions(&e, "*.txt") && strstr(e.hint, "folder"));
  put("odd.pdf", "x", 1);
  CHECK(!prepare("odd.pdf", 1, 0.5, &done, &e) && mentions(&e, "odd.pdf") && strstr(e.hint, ".txt"));
  put("none/x.c", "x", 1);
  CHECK(!prepare("none", 1, 0.5, &done, &e) && mentions(&e, "no text files"));
  put("empty/x.txt", "", 0);
  CHECK(!prepare("empty", 1, 0.5, &done, &e) && mentions(&e, "empty"));
  put("single/x.txt", "one", 3);
  CHECK(!prepare("single", 1, 0.5, &done, &e) && mentions(&e, "none is left") && strstr(e.hint, "two documents"));
  put("twins/x.txt", "one", 3);
  put("twins/y.txt", "one", 3);
  CHECK(!prepare("twins", 1, 0.5, &done, &e) && mentions(&e, "none is left"));
  put_forty("forty");
  CHECK(!prepare("forty", 1, 1e-9, &done, &e) && mentions(&e, "for validation") && strstr(e.hint, "raise"));
  CHECK(!prepare("forty", 1, 1 - 1e-9, &done, &e) && mentions(&e, "for training") && strstr(e.hint, "lower"));
  static const double fractions[] = {0, 1, -1, 2, (double)NAN};
  for (int k = 0; k < 5; k++) CHECK(!prepare("forty", 1, fractions[k], &done, &e) && mentions(&e, "between 0 and 1"));
  struct data_prepare nothing = request(NULL, 0, 0.5, 1);
  CHECK(!data_prepare(&nothing, &done, &e) && mentions(&e, "no sources"));
  CHECK(!file_exists(train) && !file_exists(validation) && leftovers() == 0);
}

TEST(damaged_gzip) {
  reset();
  struct data_prepared done;
  struct error e;
  put("in/a.txt", "fine", 4);
  put("in/fake.txt.gz", "this is not gzip", 16);
  CHECK(!prepare("in", 1, 0.5, &done, &e) && mentions(&e, "fake.txt.gz"));
  CHECK(unlink(at("in/fake.txt.gz")) == 0);
  char text[20000];
  uint32_t state = 1;
  for (size_t i = 0; i < sizeof text; i++) {
    state = state * 1664525 + 1013904223;
    text[i] = (char)(state >> 24);
  }
  put_gz("whole.txt.gz", text, sizeof text);
  char *whole;
  size_t n;
  CHECK(file_read(at("whole.txt.gz"), 1 << 20, ERROR_DATA, &whole, &n, &e));
  for (size_t keep = 1; keep < n; keep += keep < 20 ? 1 : 1237) {
    put("in/cut.txt.gz", whole, keep);
    CHECK(!prepare("in", 1, 0.5, &done, &e) && mentions(&e, "cut.txt.gz"));
  }
  for (size_t flip = 12; flip < n; flip += 997) {
    whole[flip] = (char)(whole[flip] ^ 0x55);
    put("in/cut.txt.gz", whole, n);
    whole[flip] = (char)(whole[flip] ^ 0x55);
    CHECK(!prepare("in", 1, 0.5, &done, &e) && mentions(&e, "cut.txt.gz"));
  }
  free(whole);
  CHECK(leftovers() == 0);
}

TEST(unusable_targets) {
  reset();
  put_forty("in");
  struct data_prepared done;
  struct error e;
  struct data_source s = source_at("in");
  struct data_prepare p = request(&s, 1, 0.3, 1);
  p.validation_path = train;
  CHECK(!data_prepare(&p, &done, &e) && mentions(&e, "same path"));
  p.validation_path = at("./train.tok"); /* in other words */
  CHECK(!data_prepare(&p, &done, &e) && mentions(&e, "same path"));
  p.validation_path = at("in/03.txt");
  CHECK(!data_prepare(&p, &done, &e) && mentions(&e, "overwrite"));
  CHECK(file_exists(at("in/03.txt")));
  p.validation_path = at("in");
  CHECK(!data_prepare(&p, &done, &e) && mentions(&e, "a folder"));
  CHECK(!file_exists(train) && leftovers() == 0);
  p.validation_path = at("in/03.txt/x");
  CHECK(!data_prepare(&p, &done, &e) && mentions(&e, "03.txt"));
  p.validation_path = at("new/folder/v.tok"); /* made as needed */
  CHECK(data_prepare(&p, &done, &e) && file_exists(at("new/folder/v.tok")));
}

TEST(permissions) {
  reset();
  put_forty("in");
  struct error e;
  struct data_prepared done;
  CHECK(chmod(root, 0555) == 0);
  bool is_root = geteuid() == 0;
  if (is_root) CHECK(seteuid(65534) == 0);
  CHECK(!prepare("in", 1, 0.3, &done, &e) && mentions(&e, "Permission denied") && strstr(e.message, "train.tok"));
  if (is_root) CHECK(seteuid(0) == 0);
  CHECK(chmod(root, 0777) == 0 && chmod(at("in/12.txt"), 0) == 0);
  if (is_root) CHECK(seteuid(65534) == 0);
  CHECK(!prepare("in", 1, 0.3, &done, &e) && mentions(&e, "12.txt: Permission denied"));
  if (is_root) CHECK(seteuid(0) == 0);
}

TEST(disk_full) {
  /* A file-size limit stands for the full disk; old streams survive it. */
  reset();
  put_forty("in");
  struct error e;
  struct data_prepared done;
  CHECK(prepare("in", 1, 0.3, &done, &e));
  char *text = calloc(1, 300000);
  CHECK(text != NULL);
  if (!text) return;
  put("in/long.txt", text, 300000);
  free(text);
  struct rlimit before, small;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  small = before;
  small.rlim_cur = 100000;
  signal(SIGXFSZ, SIG_IGN);
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  bool ok = prepare("in", 1, 0.3, &done, &e);
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(!ok && mentions(&e, "File too large") && strstr(e.message, ".tok"));
  CHECK(leftovers() == 0);
  struct stream_info info;
  int32_t *ids = read_ids(train, &info);
  CHECK(ids != NULL && info.tokens < 100000);
  free(ids);
}

/* A preparation that is killed leaves its temporary file: the next one of that stream
 * removes it, and not one that is being written. */
TEST(killed) {
  static const char *const names[] = {"in"};
  const struct stream_start start = {TOKENIZER_BYTES_VOCAB, -1, -1, "bytes", names, 1, NULL};
  reset();
  put_forty("in");
  struct error e;
  struct data_prepared done;
  put("train.tok.tmp", "mine", 4);
  put("train.token.tmp-1-00000001", "mine", 4);
  for (int k = 0; k < 3; k++) {
    pid_t child = fork();
    if (child == 0) {
      int32_t id = 7;
      struct stream_writer *w = stream_writer_open(k == 2 ? validation : train, &start, &e);
      if (w && stream_writer_document(w, 0, &e) && stream_writer_tokens(w, &id, 1, &e)) raise(SIGKILL);
      _exit(1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status));
  }
  CHECK_EQ_I64(leftovers(), 4); /* the second child removed the first one's; two are no stream's of ours */
  struct stream_writer *living = stream_writer_open(validation, &start, &e);
  CHECK(living != NULL);
  CHECK_EQ_I64(leftovers(), 4);
  CHECK(prepare("in", 1, 0.3, &done, &e));
  CHECK_EQ_I64(leftovers(), 3);
  CHECK(living && stream_writer_finish(living, NULL, &e)); /* and waits to be published */
  CHECK(prepare("in", 1, 0.3, &done, &e));
  CHECK_EQ_I64(leftovers(), 3);
  stream_writer_close(living);
  CHECK_EQ_I64(leftovers(), 2);
  CHECK(file_exists(at("train.tok.tmp")) && file_exists(at("train.token.tmp-1-00000001")));
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-prepare-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  snprintf(train, sizeof train, "%s/train.tok", root);
  snprintf(validation, sizeof validation, "%s/validation.tok", root);
  RUN(which_files_are_read);
  RUN(documents_stay_whole_and_apart);
  RUN(deterministic_and_independent_of_names);
  RUN(fraction_and_order);
  RUN(several_sources);
  RUN(without_validation);
  RUN(unusable_sources);
  RUN(damaged_gzip);
  RUN(unusable_targets);
  RUN(permissions);
  RUN(disk_full);
  RUN(killed);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
