/* Token files of others: what their readers take, and that every way in which one
 * can be wrong is refused by file and place. */
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "data/frame.h"
#include "data/index.h"
#include "data/tokens.h"
#include "tests/data_tokens_build.h"
#include "tests/test.h"

static char root[64];
static struct docs docs;

static const char *at(const char *name) {
  static char paths[8][256];
  static int next;
  char *path = paths[next++ % 8];
  snprintf(path, sizeof paths[0], "%s/%s", root, name);
  return path;
}

static struct data_source source_of(enum data_format format, int64_t bos, int64_t eos) {
  return (struct data_source){.name = "s", .max_repetition = 1, .format = format, .bos = bos, .eos = eos};
}

/* ---- changing files ------------------------------------------------------------ */

static void poke(const char *name, int64_t where, uint64_t value, int bytes) {
  FILE *f = fopen(at(name), "r+b");
  CHECK(f && fseek(f, where, where < 0 ? SEEK_END : SEEK_SET) == 0);
  if (!f) return;
  put_number(f, value, bytes);
  fclose(f);
}

static void cut(const char *name, int64_t bytes) { CHECK(truncate(at(name), bytes) == 0); }
static int64_t size_of(const char *name) { return file_size(at(name)); }

static void put_text_npy(const char *name, const char *text, const char *version, int64_t claimed, int64_t data_bytes) {
  FILE *f = fopen(at(name), "wb");
  fwrite("\x93NUMPY", 1, 6, f);
  fwrite(version, 1, 2, f);
  put_number(f, (uint64_t)(claimed < 0 ? (int64_t)strlen(text) : claimed), 2);
  fwrite(text, 1, strlen(text), f);
  for (int64_t i = 0; i < data_bytes; i++) fputc(0, f);
  fclose(f);
}

/* ---- refusals ------------------------------------------------------------------ */

/* Refused, on one line, with all of these in it. */
static void refused(int line, const char *name, const struct data_source *source, const char *a, const char *b) {
  struct tokens_file f;
  struct error e = {0};
  const bool open = tokens_open(&f, at(name), source, &e);
  if (open) tokens_close(&f);
  if (!open && e.code == ERROR_DATA && strstr(e.message, root) && !strchr(e.message, '\n') && strlen(e.message) < 700 && strstr(e.message, a) &&
      strstr(e.message, b))
    return;
  FAIL("line %d: %s: %s, wanted \"%s\" and \"%s\"", line, name, open ? "opened" : e.message, a, b);
}
#define REFUSED(name, format, a, b) \
  do { \
    const struct data_source source_ = source_of(format, -1, -1); \
    refused(__LINE__, name, &source_, a, b); \
  } while (0)

/* 6 documents of one sequence each, i32; in the .idx lengths from 34, offsets from 58, documents from 106 on, 162 bytes. */
static void fresh(void) { put_megatron(at("m"), &docs, 0, 6, 4, 4, 0); }

TEST(megatron_refusals) {
  static const int cuts[] = {0, 1, 9, 17, 33};
  for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++) {
    fresh();
    cut("m.idx", cuts[k]);
    REFUSED("m.idx", DATA_MEGATRON, "m.idx", "truncated");
  }
  static const int later[] = {34, 60, 106, 161};
  for (size_t k = 0; k < sizeof later / sizeof *later; k++) {
    fresh();
    cut("m.idx", later[k]);
    REFUSED("m.bin", DATA_MEGATRON, "m.idx", "do not fit");
  }
  static const struct {
    int64_t where;
    uint64_t value;
    int bytes;
    const char *a, *b;
  } pokes[] = {
      {0, 'X', 1, "m.idx", "byte 0"},
      {9, 2, 8, "version 2", "byte 9"},
      {17, 0, 1, "type of ids 0", "byte 17"},
      {17, 9, 1, "type of ids 9", "byte 17"},
      {17, 6, 1, "float64", "byte 17"},
      {17, 7, 1, "float32", "byte 17"},
      {18, 7, 8, "7 sequences", "do not fit"},
      {18, UINT64_MAX, 8, "sequences", "do not fit"},
      {18, UINT64_MAX / 12 + 2, 8, "sequences", "do not fit"},
      {26, 8, 8, "8 document entries", "do not fit"},
      {26, UINT64_C(1) << 61, 8, "document entries", "do not fit"},
      {26, 6, 8, "8 bytes too many", "byte 154"},
      {26, 0, 8, "bytes too many", "byte 106"},
      {38, (uint64_t)-5, 4, "sequence 1 has length -5", "byte 38"},
      {38, 1 << 30, 4, "sequence 1 of 1073741824 ids (byte 38)", "m.bin"},
      {66, UINT64_C(1) << 40, 8, "sequence 1 begins at byte 1099511627776 (byte 66)", "m.bin"},
      {66, (uint64_t)-8, 8, "sequence 1 begins at byte -8", "byte 66"},
      {66, 0, 8, "sequence 1 begins at byte 0", "overlap"},
      {66, 4000, 8, "sequence 1 begins at byte ", "m."},
      {54, 2, 4, "sum to", "m.bin has"},
      {106, 1, 8, "begins with 1", "byte 106"},
      {122, 0, 8, "entry 2 is 0", "not ascending"},
      {122, 100, 8, "entry 2 is 100 (byte 122)", "6 sequences"},
      {154, 5, 8, "entry 6 is 5 (byte 154)", "6 sequences"},
      {154, 7, 8, "entry 6 is 7 (byte 154)", "6 sequences"},
      {154, (uint64_t)-1, 8, "entry 6 is -1 (byte 154)", "not ascending"},
  };
  for (size_t k = 0; k < sizeof pokes / sizeof *pokes; k++) {
    fresh();
    CHECK_EQ_I64(size_of("m.idx"), 162);
    poke("m.idx", pokes[k].where, pokes[k].value, pokes[k].bytes);
    REFUSED("m", DATA_MEGATRON, pokes[k].a, pokes[k].b);
  }
  /* A gap: the second sequence two ids later. */
  fresh();
  poke("m.idx", 66, (uint64_t)docs.length[0] * 4 + 8, 8);
  REFUSED("m.idx", DATA_AUTO, "sequence 1 begins at byte", "leave a gap");
  fresh();
  poke("m.idx", 162, 0, 6); /* a mode for each sequence */
  REFUSED("m.idx", DATA_AUTO, "multimodal", "byte 162");
  fresh();
  poke("m.idx", 162, 0, 5);
  REFUSED("m.idx", DATA_AUTO, "5 bytes too many", "byte 162");
  fresh();
  cut("m.bin", size_of("m.bin") - 1);
  REFUSED("m.idx", DATA_AUTO, "ends beyond", "m.bin");
  fresh();
  poke("m.bin", size_of("m.bin"), 0, 4);
  REFUSED("m.idx", DATA_AUTO, "sum to", "m.bin has");
  fresh();
  CHECK(unlink(at("m.bin")) == 0);
  REFUSED("m.idx", DATA_AUTO, "m.bin", "No such file");
  fresh();
  CHECK(unlink(at("m.idx")) == 0);
  REFUSED("m.bin", DATA_MEGATRON, "m.idx", "No such file");
  put_megatron(at("m"), &docs, 0, 0, 4, 4, 0);
  REFUSED("m.idx", DATA_AUTO, "m.bin", "no tokens");
}

TEST(llmc_refusals) {
  const int64_t good = docs.tokens * 2 + 1024;
  static const struct {
    int where;
    uint64_t value;
    const char *a, *b;
  } pokes[] = {
      {0, 12345, "magic 12345 (byte 0)", "20240801"},   {0, 20240522, "evaluation", "20240522"},     {0, 20240326, "model checkpoint", ""},
      {0, 20240527, "training state", ""},               {4, 7, "version 7 (byte 4)", "only 1"},      {8, 0, "counts 0 tokens", "byte 8"},
      {8, 1000000, "counts 1000000 tokens", "ids of 2 bytes"}, {8, UINT32_MAX, "counts -1 tokens", ""}, {8, UINT64_C(0x80000000), "tokens", ""},
      {0, 20240801, "version 1 (byte 4)", "only 7"},
  };
  for (size_t k = 0; k < sizeof pokes / sizeof *pokes; k++) {
    put_llmc(at("l.bin"), &docs, 20240520, 1, 2);
    CHECK_EQ_I64(size_of("l.bin"), good);
    poke("l.bin", pokes[k].where, pokes[k].value, 4);
    REFUSED("l.bin", DATA_LLMC, pokes[k].a, pokes[k].b);
  }
  static const int cuts[] = {1, 12, 1023, 1024, 1025};
  for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++) {
    put_llmc(at("l.bin"), &docs, 20240520, 1, 2);
    cut("l.bin", cuts[k]);
    REFUSED("l.bin", DATA_LLMC, "l.bin", cuts[k] < 1024 ? "too few" : "counts");
  }
  put_llmc(at("l.bin"), &docs, 20240520, 1, 2);
  cut("l.bin", good - 1);
  REFUSED("l.bin", DATA_AUTO, "counts", "l.bin");
}

TEST(bare_refusals) {
  put_raw(at("r.bin"), &docs, 4);
  cut("r.bin", size_of("r.bin") - 1);
  REFUSED("r.bin", DATA_RAW_U32, "no whole number", "part of one");
  REFUSED("r.bin", DATA_RAW_U16, "no whole number", "2 bytes");
  REFUSED("r.bin", DATA_AUTO, "do not tell", "r.bin");
  cut("r.bin", 0);
  REFUSED("r.bin", DATA_RAW_U16, "empty", "r.bin");
  REFUSED("r.bin", DATA_NPY, "empty", "r.bin");
  REFUSED("absent.bin", DATA_RAW_U16, "No such file", "absent.bin");
  REFUSED("", DATA_RAW_U16, "a folder", "");
  const struct data_source both = source_of(DATA_RAW_U16, 256, 256);
  struct tokens_file f;
  struct error e = {0};
  put_raw(at("r.bin"), &docs, 2);
  CHECK(!tokens_open(&f, at("r.bin"), &both, &e) && strstr(e.message, "both 256") && e.hint[0]);
}

TEST(npy_refusals) {
  static const struct {
    const char *text, *a;
  } headers[] = {
      {"{'descr': '>u2', 'fortran_order': False, 'shape': (8,), }\n", "little-endian"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (8,), }\n", "integers: '<f4'"},
      {"{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (8,), }\n", "integers"},
      {"{'descr': '<u2', 'fortran_order': True, 'shape': (8,), }\n", "fortran_order True"},
      {"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 4), }\n", "one axis"},
      {"{'descr': '<u2', 'fortran_order': False, 'shape': (), }\n", "one axis"},
      {"{'descr': '<u2', 'fortran_order': False, 'shape': (-8,), }\n", "one axis"},
      {"{'descr': '<u2', 'fortran_order': False, 'shape': (9,), }\n", "names 9 numbers"},
      {"{'descr': '<u2', 'fortran_order': False, 'shape': (7,), }\n", "names 7 numbers"},
      {"{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999,), }\n", "numbers"},
      {"{'descr': '<u2', 'fortran_order': False, }\n", "lacks"},
      {"{'descr': '<u2", "lacks"},
      {"{'descr': '<u2', 'fortran_order': False, 'shape': (8", "one axis"},
      {"", "lacks"},
  };
  for (size_t k = 0; k < sizeof headers / sizeof *headers; k++) {
    put_text_npy("n.npy", headers[k].text, "\1\0", -1, 16);
    REFUSED("n.npy", DATA_AUTO, headers[k].a, "n.npy");
  }
  put_text_npy("n.npy", headers[7].text, "\1\0", 5000, 16);
  REFUSED("n.npy", DATA_NPY, "truncated or damaged", "n.npy");
  put_text_npy("n.npy", headers[7].text, "\4\0", -1, 16);
  REFUSED("n.npy", DATA_NPY, "version 4", "byte 6");
  cut("n.npy", 8);
  REFUSED("n.npy", DATA_RAW_U16, "n.npy", "byte 0");
  put_raw(at("n.npy"), &docs, 2);
  REFUSED("n.npy", DATA_NPY, "does not begin a .npy", "n.npy"); /* OLMo's, without a header */
}

TEST(offsets_refusals) {
  struct error e;
  CHECK(file_make_folder(at("o"), ERROR_DATA, &e));
  put_raw(at("o/t.bin"), &docs, 4);
  put_offsets(at("o/offsets.npy"), &docs, "<i2", 2);
  REFUSED("o/t.bin", DATA_RAW_U32, "offsets.npy", "4 or 8");
  put_offsets(at("o/offsets.npy"), &docs, "<f8", 8);
  REFUSED("o/t.bin", DATA_RAW_U32, "offsets.npy", "<f8");
  put_text_npy("o/offsets.npy", "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 1), }\n", "\1\0", -1, 16);
  REFUSED("o/t.bin", DATA_RAW_U32, "offsets.npy", "one axis");
  put_text_npy("o/offsets.npy", "{'descr': '<i8', 'fortran_order': True, 'shape': (2,), }\n", "\1\0", -1, 16);
  REFUSED("o/t.bin", DATA_RAW_U32, "offsets.npy", "fortran_order");
  put_text_npy("o/offsets.npy", "{'descr': '<i8', 'fortran_order': False, 'shape': (0,), }\n", "\1\0", -1, 0);
  REFUSED("o/t.bin", DATA_RAW_U32, "offsets.npy", "no document offsets");
  static const struct {
    int64_t entry;
    uint64_t value;
    const char *a, *b;
  } pokes[] = {{0, 1, "first offset (byte 128) is 1", "not 0"},
               {3, 2, "offset 3 (byte 152) is 2", "not ascending"},
               {3, UINT64_MAX, "offset 3 (byte 152) is -1", "not ascending"},
               {5, UINT64_C(1) << 50, "offset 5 (byte 168)", "t.bin has"}};
  for (size_t k = 0; k < sizeof pokes / sizeof *pokes; k++) {
    put_offsets(at("o/offsets.npy"), &docs, "<i8", 8);
    poke("o/offsets.npy", 128 + 8 * pokes[k].entry, pokes[k].value, 8);
    REFUSED("o/t.bin", DATA_RAW_U32, pokes[k].a, pokes[k].b);
  }
  put_offsets(at("o/offsets.npy"), &docs, "<i8", 8);
  poke("o/offsets.npy", -8, (uint64_t)docs.tokens - 1, 8);
  REFUSED("o/t.bin", DATA_RAW_U32, "offsets.npy", "t.bin has");
  put_offsets(at("o/offsets.npy"), &docs, "<i8", 8);
  cut("o/offsets.npy", 500);
  REFUSED("o/t.bin", DATA_RAW_U32, "offsets.npy", "numbers of 8 bytes");
}

/* ---- ids and streams ------------------------------------------------------------- */

static bool index_one(const char *name, enum data_format format, int64_t vocab_size, int64_t least, struct error *e) {
  struct data_source source = source_of(format, 256, -1);
  snprintf(source.path, sizeof source.path, "%s", at(name));
  char train[128];
  snprintf(train, sizeof train, "%s/t.index", root);
  const struct data_index x = {.sources = &source, .n_sources = 1, .train_path = train, .seed = 1, .shuffle_documents = true,
                               .vocab_size = vocab_size, .least = least, .threads = 2};
  struct data_indexed done;
  memset(e, 0, sizeof *e);
  return data_index_build(&x, &done, e);
}

TEST(ids_beyond_the_vocabulary) {
  struct error e;
  fresh();
  CHECK(index_one("m.idx", DATA_AUTO, 258, 2, &e));
  CHECK(!index_one("m.idx", DATA_AUTO, 257, 2, &e) && e.code == ERROR_DATA && strstr(e.message, "m.bin: token ") && strstr(e.message, "id 257, the vocabulary has 257"));
  poke("m.bin", 40, 258, 4);
  poke("m.bin", 80, 300, 4);
  CHECK(!index_one("m.idx", DATA_AUTO, 258, 2, &e) && strstr(e.message, "m.bin: token 10 (byte 40) is id 258"));
  poke("m.bin", 40, (uint64_t)-1, 4);
  CHECK(!index_one("m.idx", DATA_AUTO, 258, 2, &e) && strstr(e.message, "token 10 (byte 40) is id -1"));
  put_llmc(at("v.bin"), &docs, 20240801, 7, 4);
  poke("v.bin", 1024 + 4 * 33, UINT32_MAX, 4);
  CHECK(!index_one("v.bin", DATA_AUTO, 258, 2, &e) && strstr(e.message, "token 33 (byte 1156) is id 4294967295"));
  put_npy(at("v.npy"), &docs, "<u8", 8);
  poke("v.npy", 128 + 8 * 5, UINT64_MAX, 8);
  CHECK(!index_one("v.npy", DATA_AUTO, 258, 2, &e) && strstr(e.message, "token 5 (byte 168) is id 18446744073709551615"));
  put_npy(at("v.npy"), &docs, "<i2", 2);
  poke("v.npy", 128 + 2 * 7, 0x8000, 2);
  CHECK(!index_one("v.npy", DATA_AUTO, 258, 2, &e) && strstr(e.message, "token 7 (byte 142) is id -32768"));
}

TEST(ten_tokens) {
  struct docs ten = docs;
  struct error e;
  ten.tokens = 10;
  put_raw(at("ten.bin"), &ten, 2);
  CHECK(!index_one("ten.bin", DATA_RAW_U16, 258, 65, &e) && e.code == ERROR_DATA && strstr(e.message, "ten.bin: a sample needs 65 tokens (seq_len + 1), the file has 10"));
  CHECK(index_one("ten.bin", DATA_RAW_U16, 258, 10, &e));
}

/* ---- finding ----------------------------------------------------------------------- */

TEST(finding) {
  struct error e;
  CHECK(file_make_folder(at("f/sub"), ERROR_DATA, &e) && file_make_folder(at("f/.hidden"), ERROR_DATA, &e));
  put_megatron(at("f/b"), &docs, 0, 3, 4, 4, 0);
  put_megatron(at("f/sub/a"), &docs, 0, 3, 4, 4, 0);
  put_megatron(at("f/.hidden/a"), &docs, 0, 3, 4, 4, 0);
  put_llmc(at("f/a.bin"), &docs, 20240520, 1, 2);
  put_raw(at("f/z.npy"), &docs, 2);
  put_offsets(at("f/offsets.npy"), &docs, "<i8", 8);
  put_raw(at("f/notes.txt"), &docs, 2);
  static const struct {
    enum data_format format;
    const char *path, *found[6];
  } cases[] = {{DATA_AUTO, "f", {"f/a.bin", "f/b.idx", "f/sub/a.idx", "f/z.npy"}},
               {DATA_MEGATRON, "f", {"f/b.idx", "f/sub/a.idx"}},
               {DATA_LLMC, "f", {"f/a.bin", "f/b.bin", "f/sub/a.bin"}},
               {DATA_RAW_U16, "f", {"f/a.bin", "f/z.npy"}},
               {DATA_NPY, "f", {"f/z.npy"}},
               {DATA_AUTO, "f/b", {"f/b"}},
               {DATA_AUTO, "f/*", {"f/a.bin", "f/b.idx", "f/notes.txt", "f/sub/a.idx", "f/z.npy"}},
               {DATA_AUTO, "f/[ab].*", {"f/a.bin", "f/b.idx"}}};
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    struct data_source source = source_of(cases[k].format, -1, -1);
    struct tokens_list list = {0};
    snprintf(source.path, sizeof source.path, "%s", at(cases[k].path));
    CHECK(tokens_find(&list, &source, &e));
    int n = 0;
    while (n < 6 && cases[k].found[n]) n++;
    CHECK_EQ_I64(list.count, n);
    for (int i = 0; i < n && i < list.count; i++) CHECK_STR(list.path[i], at(cases[k].found[i]));
    tokens_list_free(&list);
  }
  static const char *const nothing[] = {"f/*.zip", "f/.hidden/none", "f/sub/nothing"};
  for (int k = 0; k < 3; k++) {
    struct data_source source = source_of(DATA_AUTO, -1, -1);
    struct tokens_list list = {0};
    snprintf(source.path, sizeof source.path, "%s", at(nothing[k]));
    CHECK(!tokens_find(&list, &source, &e) && e.code == ERROR_DATA && strstr(e.message, nothing[k]));
    tokens_list_free(&list);
  }
}

/* ---- random damage ------------------------------------------------------------------ */

/* Opens and decodes all; what fails must say the file. */
static void use(const char *name, enum data_format format, int64_t *opened) {
  const struct data_source source = source_of(format, 256, 257);
  struct tokens_file f;
  struct error e = {0};
  if (tokens_open(&f, at(name), &source, &e)) {
    unsigned char *raw = malloc((size_t)f.size);
    int32_t *ids = malloc((size_t)f.tokens * 4);
    CHECK(frame_read_at(f.fd, f.path, raw, f.tokens * f.width, f.data_at, &e));
    const bool good = tokens_decode(&f, raw, 0, f.tokens, 258, ids, &e);
    for (int64_t d = 0; d < f.documents; d++) CHECK(f.ends[d] >= (d ? f.ends[d - 1] : 0) && f.ends[d] <= f.tokens);
    *opened += good;
    free(raw);
    free(ids);
    tokens_close(&f);
    if (good) return;
  }
  CHECK(e.code == ERROR_DATA && strstr(e.message, root));
}

TEST(random_damage) {
  uint64_t state = 99;
  struct error e;
  CHECK(file_make_folder(at("d"), ERROR_DATA, &e));
  static const struct {
    const char *open, *hurt;
    enum data_format format;
  } cases[] = {{"m.idx", "m.idx", DATA_MEGATRON}, {"m.idx", "m.bin", DATA_MEGATRON}, {"l.bin", "l.bin", DATA_LLMC}, {"l.bin", "l.bin", DATA_AUTO},
               {"n.npy", "n.npy", DATA_NPY},      {"d/t.bin", "d/offsets.npy", DATA_RAW_U32}, {"d/t.bin", "d/t.bin", DATA_RAW_U32}};
  fresh();
  put_llmc(at("l.bin"), &docs, 20240520, 1, 2);
  put_npy(at("n.npy"), &docs, "<u2", 2);
  put_raw(at("d/t.bin"), &docs, 4);
  put_offsets(at("d/offsets.npy"), &docs, "<i8", 8);
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    char *bytes;
    size_t size;
    int64_t opened = 0;
    CHECK(file_read(at(cases[k].hurt), 1 << 20, ERROR_DATA, &bytes, &size, &e));
    for (int i = 0; i < 500; i++) {
      char *hurt = malloc(size);
      memcpy(hurt, bytes, size);
      const int flips = 1 + (int)(docs_step(&state) % 3);
      for (int j = 0; j < flips; j++) hurt[docs_step(&state) % (i % 2 ? size : size < 160 ? size : 160)] ^= (char)(1 << docs_step(&state) % 8);
      const size_t n = i % 5 == 4 ? docs_step(&state) % size : size;
      FILE *f = fopen(at(cases[k].hurt), "wb");
      CHECK(f && fwrite(hurt, 1, n, f) == n);
      fclose(f);
      free(hurt);
      use(cases[k].open, cases[k].format, &opened);
    }
    CHECK(opened < 490); /* some damage is a legal file; most is not */
    FILE *f = fopen(at(cases[k].hurt), "wb");
    CHECK(f && fwrite(bytes, 1, size, f) == size);
    fclose(f);
    free(bytes);
    opened = 0;
    use(cases[k].open, cases[k].format, &opened);
    CHECK_EQ_I64(opened, 1);
  }
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-tokens-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  docs = docs_make(0, 40);
  RUN(megatron_refusals);
  RUN(llmc_refusals);
  RUN(bare_refusals);
  RUN(npy_refusals);
  RUN(offsets_refusals);
  RUN(ids_beyond_the_vocabulary);
  RUN(ten_tokens);
  RUN(finding);
  RUN(random_damage);
  docs_free(&docs);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
