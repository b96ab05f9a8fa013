/* Files of text and their records: compression, line ends, limits, damage. */
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include "base/file.h"
#include "data/corpus.h"
#include "tests/random.h"
#include "tests/test.h"

static char root[64];

static const char *at(const char *name) {
  static char paths[8][256];
  static int turn;
  char *p = paths[turn++ % 8];
  snprintf(p, sizeof paths[0], "%s/%s", root, name);
  return p;
}

static void put(const char *name, const void *bytes, size_t n) {
  struct error e;
  char folder[256];
  snprintf(folder, sizeof folder, "%s", at(name));
  *strrchr(folder, '/') = 0;
  if (!file_make_folder(folder, ERROR_DATA, &e) || !file_publish(at(name), bytes, n, ERROR_DATA, &e)) FAIL("%s", e.message);
}

/* Appends a member or a frame; returns the new length. */
static size_t pack_gzip(unsigned char *to, size_t at_byte, const void *text, size_t n) {
  z_stream z = {0};
  CHECK(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  z.next_in = (unsigned char *)(uintptr_t)text;
  z.avail_in = (unsigned)n;
  z.next_out = to + at_byte;
  z.avail_out = (unsigned)(n + 4096);
  CHECK(deflate(&z, Z_FINISH) == Z_STREAM_END);
  deflateEnd(&z);
  return at_byte + z.total_out;
}

static size_t pack_zstd(unsigned char *to, size_t at_byte, const void *text, size_t n) {
  const size_t wrote = ZSTD_compress(to + at_byte, ZSTD_compressBound(n), text, n, 3);
  CHECK(!ZSTD_isError(wrote));
  return at_byte + wrote;
}

struct reading {
  int64_t records, bytes, last_line;
  uint64_t sum; /* of bytes, weighted by place and record */
  int result;
};

static struct reading read_all(const char *name, enum corpus_kind kind, int64_t most, struct error *e) {
  struct corpus_file f = {.path = (char *)(uintptr_t)at(name), .kind = kind, .bytes = file_size(at(name))};
  struct reading r = {.result = -1};
  memset(e, 0, sizeof *e);
  struct corpus_reader *reader = corpus_reader_open(&f, most, e);
  if (!reader) return r;
  struct corpus_record record;
  while ((r.result = corpus_reader_next(reader, &record, e)) > 0) {
    r.records++;
    r.bytes += record.length;
    r.last_line = record.line;
    for (int64_t i = 0; i < record.length; i++)
      r.sum = r.sum * 1000003 + (unsigned char)record.bytes[i] + 1;
    r.sum = r.sum * 1000003 + 7777;
  }
  if (r.result == 0) CHECK_EQ_I64(corpus_reader_position(reader), file_size(f.path));
  corpus_reader_close(reader);
  return r;
}

static bool same(struct reading a, struct reading b) {
  return a.result == b.result && a.records == b.records && a.bytes == b.bytes && a.sum == b.sum && a.last_line == b.last_line;
}

/* Lines of random lengths around the sizes of the reader's steps, cut into members and frames at random
 * places: the same records whatever the compression. */
TEST(any_cut_gives_the_same_lines) {
  struct error e;
  const size_t room = 3 << 20;
  char *text = malloc(room);
  unsigned char *packed = malloc(2 * room);
  CHECK(text && packed);
  size_t n = 0;
  int64_t lines = 0;
  while (n < room - 600000) {
    size_t length = (size_t)(next() % (next() % 16 == 0 ? 300000 : 500));
    for (size_t i = 0; i < length; i++) text[n++] = (char)(' ' + next() % 90);
    if (length > 0) text[n - 1] = 'x'; /* not blank */
    lines += length > 0;
    if (next() % 3 == 0) text[n++] = '\r';
    text[n++] = '\n';
  }
  put("plain.jsonl", text, n);
  const struct reading want = read_all("plain.jsonl", CORPUS_LINES, 1 << 20, &e);
  CHECK_EQ_I64(want.result, 0);
  CHECK_EQ_I64(want.records, lines);
  for (int zstd = 0; zstd < 2; zstd++) {
    size_t packed_bytes = 0;
    for (size_t done = 0; done < n;) {
      size_t part = 1 + (size_t)(next() % 700000);
      if (part > n - done) part = n - done;
      packed_bytes = zstd ? pack_zstd(packed, packed_bytes, text + done, part) : pack_gzip(packed, packed_bytes, text + done, part);
      done += part;
      if (zstd && next() % 2) { /* a frame to be skipped */
        memcpy(packed + packed_bytes, "\x53\x2a\x4d\x18\x03\0\0\0abc", 11);
        packed_bytes += 11;
      }
    }
    if (!zstd) { /* zeros at the end, as on tapes */
      memset(packed + packed_bytes, 0, 1000);
      packed_bytes += 1000;
    }
    const char *name = zstd ? "many.jsonl.zst" : "many.jsonl.GZ";
    put(name, packed, packed_bytes);
    CHECK(same(read_all(name, CORPUS_LINES, 1 << 20, &e), want));
    CHECK_EQ_I64(read_all(name, CORPUS_DOCUMENT, 4 << 20, &e).bytes, (int64_t)n);
    /* Cut anywhere but between parts, or damaged: refused by name; a cut between parts cannot be seen. */
    int64_t refused = 0, tried = 0;
    for (size_t keep = 1; keep < packed_bytes - 1000; keep += 1 + packed_bytes / 23, tried++) {
      put(zstd ? "cut.zst" : "cut.gz", packed, keep);
      const struct reading r = read_all(zstd ? "cut.zst" : "cut.gz", CORPUS_LINES, 1 << 20, &e);
      refused += r.result < 0 && strstr(e.message, "cut.") && (strstr(e.message, "too early") || strstr(e.message, "as its name says"));
    }
    CHECK_EQ_I64(refused, tried);
    memcpy(packed + packed_bytes, "junk after it", 13);
    put(zstd ? "junk.zst" : "junk.gz", packed, packed_bytes + 13);
    CHECK_EQ_I64(read_all(zstd ? "junk.zst" : "junk.gz", CORPUS_LINES, 1 << 20, &e).result, -1);
    CHECK(strstr(e.message, "other bytes after"));
  }
  free(text);
  free(packed);
}

TEST(line_ends_marks_and_blanks) {
  struct error e;
  static const char text[] = "\xef\xbb\xbf" "one\r\n\n \t\r\ntwo \r\n\xef\xbb\xbfthree";
  put("a.jsonl", text, sizeof text - 1);
  struct corpus_file f = {.path = (char *)(uintptr_t)at("a.jsonl"), .kind = CORPUS_LINES};
  struct corpus_reader *r = corpus_reader_open(&f, 100, &e);
  struct corpus_record record;
  static const struct {
    const char *text;
    int64_t line;
  } want[] = {{"one", 1}, {"two ", 4}, {"\xef\xbb\xbfthree", 5}};
  for (int i = 0; i < 3; i++) {
    CHECK(r && corpus_reader_next(r, &record, &e) == 1);
    CHECK_EQ_I64(record.length, strlen(want[i].text));
    CHECK(memcmp(record.bytes, want[i].text, strlen(want[i].text)) == 0);
    CHECK_EQ_I64(record.line, want[i].line);
  }
  CHECK(r && corpus_reader_next(r, &record, &e) == 0);
  corpus_reader_close(r);
  f.kind = CORPUS_DOCUMENT;
  r = corpus_reader_open(&f, 100, &e);
  CHECK(r && corpus_reader_next(r, &record, &e) == 1 && record.line == 0);
  CHECK_EQ_I64(record.length, sizeof text - 1 - 3);
  CHECK(r && corpus_reader_next(r, &record, &e) == 0);
  corpus_reader_close(r);
  put("empty.jsonl", "", 0);
  CHECK_EQ_I64(read_all("empty.jsonl", CORPUS_LINES, 10, &e).records, 0);
  CHECK_EQ_I64(read_all("empty.jsonl", CORPUS_DOCUMENT, 10, &e).records, 1); /* an empty document */
  static const char *const nothing[] = {"empty.zst", "empty.gz"}; /* no compressor writes them: a copy that was broken off */
  for (int i = 0; i < 2; i++) {
    put(nothing[i], "", 0);
    CHECK(read_all(nothing[i], CORPUS_LINES, 10, &e).result == -1 && strstr(e.message, nothing[i]) && strstr(e.message, "no bytes"));
  }
}

/* A line of 1 GB costs no more memory than the limit: a hole in the file. */
TEST(long_records) {
  struct error e;
  static const char head[] = "{}\n";
  put("long.jsonl", head, 3);
  CHECK(truncate(at("long.jsonl"), (off_t)1 << 30) == 0);
  struct reading r = read_all("long.jsonl", CORPUS_LINES, 1 << 20, &e);
  CHECK(r.result == -1 && r.records == 1 && strstr(e.message, "long.jsonl:2: the line has more than 1048576 bytes"));
  r = read_all("long.jsonl", CORPUS_DOCUMENT, 1 << 20, &e);
  CHECK(r.result == -1 && strstr(e.message, "long.jsonl: the document has more than") && strstr(e.hint, "prepare_memory: give 34359738368"));
  char line[302];
  memset(line, 'y', sizeof line);
  line[100] = '\n';
  put("exact.jsonl", line, 301); /* lines of 100 and 200 bytes, the last without an end */
  CHECK_EQ_I64(read_all("exact.jsonl", CORPUS_LINES, 200, &e).records, 2);
  CHECK_EQ_I64(read_all("exact.jsonl", CORPUS_LINES, 199, &e).result, -1);
  CHECK(strstr(e.message, "exact.jsonl:2:"));
  CHECK_EQ_I64(read_all("exact.jsonl", CORPUS_DOCUMENT, 301, &e).records, 1);
  CHECK_EQ_I64(read_all("exact.jsonl", CORPUS_DOCUMENT, 300, &e).result, -1);
  unlink(at("long.jsonl"));
  struct rusage use;
  getrusage(RUSAGE_SELF, &use);
#ifndef __SANITIZE_ADDRESS__
  CHECK(use.ru_maxrss < 100 * 1024);
#endif
}

TEST(which_files) {
  struct error e;
  static const char *const names[] = {"in/a.jsonl",     "in/b.txt.zst", "in/c.ndjson.gz", "in/d.json", "in/e.pdf",
                                      "in/f.jsonl.bz2", "in/.g.txt",    "in/sub/h.MD",    "in/zst",    "in/i.JSONL.ZST"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) put(names[i], "", 0);
  static const struct {
    enum data_format format;
    const char *want;
  } cases[] = {{DATA_AUTO, "a.jsonl+ b.txt.zst c.ndjson.gz+ i.JSONL.ZST+ h.MD "},
               {DATA_TEXT, "a.jsonl+ b.txt.zst c.ndjson.gz+ i.JSONL.ZST+ h.MD "},
               {DATA_JSONL, "a.jsonl+ c.ndjson.gz+ d.json+ i.JSONL.ZST+ "}};
  for (int k = 0; k < 3; k++) {
    struct corpus_files files = {0};
    char got[300] = "";
    CHECK(corpus_find(&files, at("in"), cases[k].format, 3, &e));
    for (int64_t i = 0; i < files.count; i++) {
      const char *name = strrchr(files.file[i].path, '/') + 1;
      snprintf(got + strlen(got), sizeof got - strlen(got), "%s%s ", name, files.file[i].kind == CORPUS_LINES ? "+" : "");
      CHECK_EQ_I64(files.file[i].source, 3);
    }
    CHECK_STR(got, cases[k].want);
    corpus_files_free(&files);
  }
  struct corpus_files files = {0};
  CHECK(!corpus_find(&files, at("in/e.pdf"), DATA_AUTO, 0, &e) && strstr(e.hint, ".jsonl"));
  CHECK(corpus_find(&files, at("in/e.pdf"), DATA_TEXT, 0, &e) && files.file[0].kind == CORPUS_DOCUMENT);
  CHECK(corpus_find(&files, at("in/b.txt.zst"), DATA_JSONL, 0, &e) && files.file[1].kind == CORPUS_LINES);
  corpus_files_free(&files);
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-corpus-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  RUN(any_cut_gives_the_same_lines);
  RUN(line_ends_marks_and_blanks);
  RUN(long_records);
  RUN(which_files);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
