/* Tokenizers: ids of tiktoken and of Hugging Face tokenizers (tests/golden/tokenizer_ids.txt),
 * round trips, many threads, long pieces, learning, and files that are damaged or of other kinds. */
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/threads.h"
#include "data/bpe_train.h"
#include "data/tokenizer.h"
#include "tests/random.h"
#include "tests/test.h"

#define RANKS "tests/golden/vocabulary.tiktoken"
#define JSON "tests/golden/tokenizer.json"

static struct error failure;
static char root[128], path[192];

static struct tokenizer *ranks, *json, *byte_tokens;

static struct tokenizer *open_or_fail(const char *what) {
  struct tokenizer *t = tokenizer_open(what, &failure);
  if (!t) FAIL("%s: %s", what, failure.message);
  return t;
}

static bool encode(const struct tokenizer *t, const char *text, int64_t bytes, enum tokenizer_specials specials, struct tokenizer_ids *ids) {
  struct tokenizer_scratch *s = tokenizer_scratch_open(t, &failure);
  ids->n = 0;
  const bool good = s && tokenizer_encode(t, s, text, bytes, specials, ids, &failure);
  tokenizer_scratch_close(s);
  return good;
}

static bool decodes_to(const struct tokenizer *t, const struct tokenizer_ids *ids, const char *text, int64_t bytes) {
  int64_t at = 0, n;
  for (int64_t i = 0; i < ids->n; i++) {
    const char *token = tokenizer_token(t, ids->id[i], &n);
    if (!token || at + n > bytes || memcmp(text + at, token, (size_t)n) != 0) return false;
    at += n;
  }
  return at == bytes;
}

/* ---- golden ids ------------------------------------------------------------------------- */

struct text {
  char *bytes;
  int64_t n;
};

static void add_hex(struct text *t, const char *hex, size_t digits, long times) {
  t->bytes = realloc(t->bytes, (size_t)t->n + digits / 2 * (size_t)times + 1);
  if (!t->bytes) abort();
  for (long k = 0; k < times; k++)
    for (size_t i = 0; i + 1 < digits; i += 2) {
      unsigned byte;
      sscanf(hex + i, "%2x", &byte);
      t->bytes[t->n++] = (char)(unsigned char)byte;
    }
}

/* HEX, or HEX*COUNT+HEX*COUNT… */
static struct text from_recipe(char *recipe) {
  struct text t = {0};
  add_hex(&t, "", 0, 1);
  if (!strchr(recipe, '*')) {
    if (recipe[0] != '-') add_hex(&t, recipe, strlen(recipe), 1);
    return t;
  }
  for (char *part = strtok(recipe, "+"); part; part = strtok(NULL, "+")) add_hex(&t, part, strcspn(part, "*"), atol(strchr(part, '*') + 1));
  return t;
}

static void check_ids(char kind, const struct tokenizer_ids *ids, const char *expected, int line) {
  if (expected[0] == '#') {
    uint64_t h = 0;
    char summary[64];
    for (int64_t i = 0; i < ids->n; i++) h = h * 1000003 + (uint64_t)ids->id[i] + 1;
    snprintf(summary, sizeof summary, "#%" PRId64 " %016" PRIx64, ids->n, h);
    if (strcmp(summary, expected) != 0) FAIL("line %d (%c): %s, expected %s", line, kind, summary, expected);
    return;
  }
  char *end;
  for (int64_t i = 0; i < ids->n; i++) {
    const long id = strtol(expected, &end, 10);
    if (end == expected || id != ids->id[i]) {
      FAIL("line %d (%c): id %" PRId64 " is %d, expected %.12s", line, kind, i, ids->id[i], expected);
      return;
    }
    expected = end;
  }
  if (expected[strspn(expected, " ")]) FAIL("line %d (%c): more ids are expected: %.40s", line, kind, expected);
}

TEST(golden_ids) {
  static char line[1 << 16], recipe[1 << 15];
  FILE *in = fopen("tests/golden/tokenizer_ids.txt", "r");
  struct tokenizer_ids ids = {0};
  int lines = 0;
  CHECK(in != NULL);
  while (in && fgets(line, sizeof line, in)) {
    char kind;
    int used;
    lines++;
    line[strcspn(line, "\n")] = 0;
    if (sscanf(line, "%c %32767s %n", &kind, recipe, &used) < 2) {
      FAIL("line %d", lines);
      break;
    }
    struct text t = from_recipe(recipe);
    const struct tokenizer *tokenizer = kind == 'h' || kind == 'g' ? json : ranks;
    if (!encode(tokenizer, t.bytes, t.n, kind == 's' || kind == 'g' ? TOKENIZER_SPECIALS : TOKENIZER_PLAIN, &ids))
      FAIL("line %d: %s", lines, failure.message);
    check_ids(kind, &ids, line + used, lines);
    if (!decodes_to(tokenizer, &ids, t.bytes, t.n)) FAIL("line %d is not decoded to the same", lines);
    free(t.bytes);
  }
  if (in) fclose(in);
  tokenizer_ids_free(&ids);
  CHECK(lines > 500);
}

/* ---- what a tokenizer says ------------------------------------------------------------------ */

TEST(bytes) {
  const struct tokenizer_info *info = tokenizer_info(byte_tokens);
  CHECK_STR(info->name, "bytes");
  CHECK_EQ_I64(info->vocab_size, 258);
  CHECK_EQ_I64(info->bos, TOKENIZER_BYTES_BOS);
  CHECK_EQ_I64(info->eos, TOKENIZER_BYTES_EOS);
  CHECK(info->any_bytes);
  char text[256];
  struct tokenizer_ids ids = {0};
  for (int i = 0; i < 256; i++) text[i] = (char)(unsigned char)i;
  CHECK(encode(byte_tokens, text, 256, TOKENIZER_PLAIN, &ids));
  CHECK_EQ_I64(ids.n, 256);
  for (int i = 0; i < 256 && i < ids.n; i++) CHECK_EQ_I64(ids.id[i], i);
  CHECK(decodes_to(byte_tokens, &ids, text, 256));
  CHECK(encode(byte_tokens, "a<|end_of_text|>\xff", 17, TOKENIZER_SPECIALS, &ids));
  CHECK(ids.n == 3 && ids.id[0] == 'a' && ids.id[1] == TOKENIZER_BYTES_EOS && ids.id[2] == 255);
  CHECK(tokenizer_is_special(byte_tokens, 256) && tokenizer_is_special(byte_tokens, 257) && !tokenizer_is_special(byte_tokens, 255));
  int64_t n;
  CHECK(!tokenizer_token(byte_tokens, -1, &n) && !tokenizer_token(byte_tokens, 258, &n) && !tokenizer_token(byte_tokens, INT32_MAX, &n) && n == 0);
  tokenizer_ids_free(&ids);
}

TEST(names) {
  const struct tokenizer_info *r = tokenizer_info(ranks), *j = tokenizer_info(json);
  CHECK(strncmp(r->name, "vocabulary-", 11) == 0 && strlen(r->name) == 23);
  CHECK(strncmp(j->name, "tokenizer-", 10) == 0 && strlen(j->name) == 22);
  CHECK_EQ_I64(r->vocab_size, 768);
  CHECK_EQ_I64(j->vocab_size, 769);
  CHECK(r->bos == 766 && r->eos == 767 && j->bos == 766 && j->eos == 767);
  CHECK(!r->any_bytes && !j->any_bytes);
  CHECK(!hash_equal(r->digest, j->digest));
  /* The name of the file, however odd, fits a stream's header; the digest is of the content. */
  char *text;
  size_t bytes;
  CHECK(file_read(RANKS, 1 << 20, ERROR_DATA, &text, &bytes, &failure));
  snprintf(path, sizeof path, "%s/a name with spaces, and longer than the header.model", root);
  CHECK(file_publish(path, text, bytes, ERROR_DATA, &failure));
  struct tokenizer *t = open_or_fail(path);
  if (t) {
    const struct tokenizer_info *info = tokenizer_info(t);
    CHECK(strncmp(info->name, "a_name_with_spaces-", 18) == 0 && strlen(info->name) == TOKENIZER_NAME - 1);
    CHECK(hash_equal(info->digest, r->digest));
  }
  tokenizer_close(t);
  free(text);
}

TEST(refused_text) {
  struct tokenizer_ids ids = {0};
  CHECK(!encode(ranks, "ab\xff", 3, TOKENIZER_PLAIN, &ids) && failure.code == ERROR_DATA);
  CHECK_STR(failure.message, "byte 2 of a text (0xff) is not UTF-8");
  CHECK(!encode(json, "\xed\xa0\x80", 3, TOKENIZER_PLAIN, &ids)); /* a surrogate */
  CHECK(encode(ranks, "", 0, TOKENIZER_PLAIN, &ids) && ids.n == 0);
  tokenizer_ids_free(&ids);
}

/* ---- random text, threads, long pieces --------------------------------------------------------- */

static int64_t random_text(char *out, int64_t most) {
  static const char *const bits[] = {"the", " of", "ing", "  ", "\n", "\r\n", "'s", "1", "234", "\xc3\xa9", "\xe4\xbd\xa0", "\xf0\x9f\x98\x80", "-", "\t", " Q", "<|end_of_text|>", "x", "\xcc\x81", "\xc2\xa0"};
  int64_t n = 0;
  while (n + 16 < most) {
    const char *bit = bits[next() % (sizeof bits / sizeof *bits)];
    memcpy(out + n, bit, strlen(bit));
    n += (int64_t)strlen(bit);
    if (next() % 40 == 0) break;
  }
  return n;
}

TEST(round_trips) {
  char text[600];
  struct tokenizer_ids ids = {0};
  for (int i = 0; i < 3000; i++) {
    const int64_t n = random_text(text, sizeof text);
    const struct tokenizer *t = i % 2 ? ranks : json;
    if (!encode(t, text, n, i % 3 ? TOKENIZER_PLAIN : TOKENIZER_SPECIALS, &ids)) FAIL("%s", failure.message);
    if (!decodes_to(t, &ids, text, n)) FAIL("text %d", i);
  }
  tokenizer_ids_free(&ids);
}

struct crowd {
  char text[64][600];
  int64_t n[64];
  struct tokenizer_ids expected[64];
  struct tokenizer_scratch *scratch[4];
  int wrong[4];
};

static void encode_one(void *context, int64_t index, int worker) {
  struct crowd *c = context;
  const int64_t i = index % 64;
  struct tokenizer_ids ids = {0};
  struct error e;
  if (!tokenizer_encode(ranks, c->scratch[worker], c->text[i], c->n[i], TOKENIZER_PLAIN, &ids, &e) || ids.n != c->expected[i].n ||
      (ids.n > 0 && memcmp(ids.id, c->expected[i].id, (size_t)ids.n * sizeof *ids.id) != 0))
    c->wrong[worker]++;
  tokenizer_ids_free(&ids);
}

TEST(many_threads) {
  static struct crowd c;
  struct threads *t = threads_create(4, &failure);
  for (int i = 0; i < 64; i++) {
    c.n[i] = random_text(c.text[i], sizeof c.text[i]);
    CHECK(encode(ranks, c.text[i], c.n[i], TOKENIZER_PLAIN, &c.expected[i]));
  }
  for (int w = 0; w < 4; w++) c.scratch[w] = tokenizer_scratch_open(ranks, &failure);
  if (t) threads_run(t, 2000, encode_one, &c);
  for (int w = 0; w < 4; w++) {
    CHECK_EQ_I64(c.wrong[w], 0);
    tokenizer_scratch_close(c.scratch[w]);
  }
  for (int i = 0; i < 64; i++) tokenizer_ids_free(&c.expected[i]);
  CHECK(t != NULL);
  threads_destroy(t);
}

/* Of this process: what other programs do does not count. */
static double processor_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A piece of a million bytes costs about ten times one of a hundred thousand, not a hundred times. */
TEST(long_pieces) {
  enum { LONG = 1 << 20, TENTH = LONG / 10 };
  char *text = malloc(LONG);
  struct tokenizer_ids ids = {0};
  double seconds[2];
  if (!text) abort();
  for (int kind = 0; kind < 2; kind++) {
    for (int64_t i = 0; i < LONG; i++) text[i] = kind ? (char)('a' + next() % 26) : 'a';
    for (int size = 0; size < 2; size++) {
      const int64_t n = size ? LONG : TENTH;
      const double begun = processor_seconds();
      CHECK(encode(json, text, n, TOKENIZER_PLAIN, &ids)); /* without Meta's limits */
      seconds[size] = processor_seconds() - begun;
      CHECK(decodes_to(json, &ids, text, n));
    }
    if (seconds[1] > 0.5 && seconds[1] > 60 * seconds[0]) FAIL("%.3f s for %d bytes, %.3f s for %d", seconds[1], LONG, seconds[0], TENTH);
  }
  free(text);
  tokenizer_ids_free(&ids);
}

/* ---- learning ------------------------------------------------------------------------------------- */

static char *learn(const char *const *texts, int n, int32_t vocab_size, int64_t *bytes) {
  struct bpe_trainer *t = bpe_trainer_open(&failure);
  char *text = NULL;
  bool good = t != NULL;
  for (int i = 0; good && i < n; i++) good = bpe_trainer_feed(t, texts[i], (int64_t)strlen(texts[i]), &failure);
  if (good) bpe_trainer_ranks(t, vocab_size, &text, bytes, &failure);
  bpe_trainer_close(t);
  return text;
}

TEST(learning) {
  /* Worked by hand: " low" 2, "er" 2, … of "low low low lower lower newest". Pairs: "lo" and "ow" 5 each: l o is
   * lower in ids (l < o); then "lo" "w" 5; " l" of four: " " "low" 4. */
  static const char *const text[] = {"low low low lower lower newest"};
  int64_t bytes;
  char *file = learn(text, 1, 258 + 4, &bytes);
  CHECK(file != NULL);
  if (file) {
    const char *tail = file;
    for (int i = 0; i < 256; i++) tail = strchr(tail, '\n') + 1;
    CHECK_STR(tail, "bG8= 256\nbG93 257\nIGxvdw== 258\nZXI= 259\n"); /* lo, low, " low", er ("we" is 1) */
  }
  free(file);
  /* The order of texts does not matter; too little text is said so. */
  static const char *const there[] = {"the cat sat on the mat", "a hat, a bat", "that cat!"}, *const back[] = {"that cat!", "a hat, a bat", "the cat sat on the mat"};
  int64_t other_bytes;
  file = learn(there, 3, 262, &bytes);
  char *other = learn(back, 3, 262, &other_bytes);
  CHECK(file && other && bytes == other_bytes && memcmp(file, other, (size_t)bytes) == 0);
  free(file);
  free(other);
  CHECK(!learn(text, 1, 1000, &bytes) && failure.code == ERROR_DATA && strstr(failure.message, "it is enough for 2"));
  CHECK(!learn(text, 1, 128002, &bytes) && failure.code == ERROR_USAGE);
}

/* A learnt file is read back, and no id of the text that it was learnt from is needlessly small. */
TEST(learnt_file) {
  char *text, *file = NULL;
  size_t size;
  int64_t bytes = 0;
  CHECK(file_read("docs/numerics.md", 1 << 20, ERROR_DATA, &text, &size, &failure));
  const char *const texts[] = {text};
  file = learn(texts, 1, 600, &bytes);
  snprintf(path, sizeof path, "%s/learnt.tiktoken", root);
  CHECK(file && file_publish(path, file, (size_t)bytes, ERROR_DATA, &failure));
  struct tokenizer *t = open_or_fail(path);
  struct tokenizer_ids ids = {0};
  if (t) {
    CHECK_EQ_I64(tokenizer_info(t)->vocab_size, 600);
    CHECK(encode(t, text, (int64_t)size, TOKENIZER_PLAIN, &ids) && decodes_to(t, &ids, text, (int64_t)size));
    CHECK(ids.n * 18 < (int64_t)size * 10);
  }
  tokenizer_close(t);
  tokenizer_ids_free(&ids);
  free(file);
  free(text);
}

/* ---- files that are none ----------------------------------------------------------------------------- */

static void refused(const char *text, size_t bytes, const char *what) {
  snprintf(path, sizeof path, "%s/refused", root);
  if (!file_publish(path, text, bytes, ERROR_DATA, &failure)) FAIL("%s", failure.message);
  struct tokenizer *t = tokenizer_open(path, &failure);
  if (t) FAIL("taken: %.60s", text);
  tokenizer_close(t);
  if (!t && (failure.code != ERROR_DATA || !strstr(failure.message, what) || !strstr(failure.message, path)))
    FAIL("%.60s: \"%s\" is expected in \"%s\"", text, what, failure.message);
}

static void refuses(const char *text, const char *what) { refused(text, strlen(text), what); }

TEST(rank_files) {
  CHECK(!tokenizer_open("no/such/file", &failure) && failure.code == ERROR_DATA && strstr(failure.message, "there is no tokenizer no/such/file"));
  CHECK(!tokenizer_open(root, &failure));
  refuses("", "no token is the single byte 0x00");
  refuses("AA== 0\nAQ== 1\n", "no token is the single byte 0x02");
  refuses("AA== 0\nAQ==\n", "refused:2: no line of a rank file");
  refuses("AA== 0\n\nAQ== 1\n", "refused:2: no line of a rank file");
  refuses("AA== 0\nAQ== x\n", "refused:2: the rank is not a decimal number");
  refuses("AA== 0\nAQ== 1 \n", "refused:2: the rank is not a decimal number");
  refuses("AA== 0\nAQ== -1\n", "refused:2: the rank is not a decimal number");
  refuses("AA== 0\nAQ== 01\n", "refused:2: the rank is not a decimal number");
  refuses("AA== 0\nAQ== 99999999999\n", "refused:2: the rank is not a decimal number");
  refuses("AA== 0\nAQ== 5000000\n", "refused:2: rank 5000000 in a file that is too short");
  refuses("AA== 0\nAQ== 2\n", "2 lines, but ranks up to 2");
  refuses("AA== 0\nAQ== 0\n", "refused:2: id 0 is given twice");
  refuses("AA== 0\nAR== 1\n", "refused:2: the token is not base64");
  refuses("AA== 0\nA*== 1\n", "refused:2: the token is not base64");
  refuses("AA== 0\nAAA 1\n", "refused:2: the token is not base64");
  refuses("AA== 0\n=AA= 1\n", "refused:2: the token is not base64");
  refuses("AA== 0\n 1\n", "refused:2: the token is not base64");
  refuses("AA== 0\r\nAQ== 1\r\n", "refused:1: the rank is not a decimal number");
  refused("\n\x0a\x05<unk>\x00\x00", 9, "refused:1: no line of a rank file");
  char *text, *twice;
  size_t bytes;
  CHECK(file_read(RANKS, 1 << 20, ERROR_DATA, &text, &bytes, &failure));
  CHECK(asprintf(&twice, "%sbG9s 766\nbG9s 767\n", text) > 0);
  refuses(twice, "ids 766 and 767 are the same token");
  free(twice);
  char *long_line = malloc(9000);
  if (!long_line) abort();
  memset(long_line, 'A', 9000);
  memcpy(long_line + 8990, " 0\n", 4);
  refuses(long_line, "refused:1: the token is longer than 4096 bytes");
  free(long_line);
  free(text);
}

/* The golden tokenizer.json with `from` replaced by `to`. */
static void refused_json(const char *from, const char *to, const char *what) {
  char *text, *changed;
  size_t bytes;
  CHECK(file_read(JSON, 1 << 20, ERROR_DATA, &text, &bytes, &failure));
  char *at = strstr(text, from);
  if (!at) {
    FAIL("no %s", from);
  } else {
    *at = 0;
    CHECK(asprintf(&changed, "%s%s%s", text, to, at + strlen(from)) > 0);
    refuses(changed, what);
    free(changed);
  }
  free(text);
}

TEST(json_files) {
  refuses("{", "refused:1:");
  refuses("{\n \"model\": {\n}", "refused:3:");
  refuses("{}", "model is missing");
  refuses("[1]", "refused:1: no line of a rank file");
  refused_json("\"type\":\"BPE\"", "\"type\":\"WordPiece\"", "model.type is WordPiece; only BPE is supported");
  refused_json("\"type\":\"BPE\"", "\"type\":\"Unigram\"", "model.type is Unigram");
  refused_json("\"dropout\":null", "\"dropout\":0.1", "model.dropout is not supported");
  refused_json("\"byte_fallback\":false", "\"byte_fallback\":true", "model.byte_fallback is not supported");
  refused_json("\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"", "model.continuing_subword_prefix");
  refused_json("\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}", "normalizer NFC is not supported");
  refused_json("\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\"}]}", "normalizer Prepend is not supported");
  refused_json("\"type\":\"Digits\"", "\"type\":\"Metaspace\"", "pre_tokenizer Metaspace is not supported");
  refused_json("\"type\":\"ByteLevel\",\"add_prefix_space\":false", "\"type\":\"ByteLevel\",\"add_prefix_space\":true", "add_prefix_space is not supported");
  refused_json("\"type\":\"ByteLevel\",\"add_prefix_space\":false", "\"type\":\"Digits\"", "pre_tokenizer has no ByteLevel");
  refused_json("\"behavior\":\"Isolated\"", "\"behavior\":\"Removed\"", "behavior Removed is not supported");
  refused_json("\"lstrip\":false", "\"lstrip\":true", "lstrip is not supported");
  refused_json("\"id\":767", "\"id\":766", "added_tokens[1]: id 766 is given twice");
  refused_json("\"id\":767", "\"id\":-1", "id -1 is not in 0 to");
  refused_json("\"id\":767", "\"id\":1e3", "added_tokens[1] has no id and content");
  refused_json("\"merges\":[[", "\"merges\":[[\"qqq\",\"x\"],[", "model.merges[0], 'qqq' and 'x': not in the vocabulary");
  refused_json("\"merges\":[[", "\"merges\":[\"q\",[", "model.merges[0], 'q', is not two texts with a space between");
  refused_json("\"merges\":[[", "\"merges\":[[\"q\"],[", "model.merges[0] is not two texts");
  refused_json("\"merges\":[[", "\"merges\":[7,[", "model.merges[0] is neither a text nor a list of two");
  refused_json("\"!\":", "\"\xe2\x82\xac\":", "not 1 to 4096 characters of the byte-level alphabet");
  refused_json("\"vocab\":{", "\"vocab\":{\"\":9999,", "not 1 to 4096");
  refused_json("\"!\":", "\"#\":", "duplicate object key");
  refused_json("\"!\":", "\"!!!!!\":", "no token is the single byte 0x21");
  /* Patterns that engines read differently. */
  static const char *const patterns[][2] = {{"^a", "^"}, {"a$", "$"}, {"\\\\w+", "\\w"}, {"\\\\bx", "\\b"}, {"\\\\h", "\\h"}, {"[a[b]]", "a class in a class"}, {"[a&&b]", "an operation on classes"},
                                            {"a{2}+", "}+"}, {"(?P<x>a)", "a group of another kind"}, {"[\\\\S]", "\\S"}, {"[]a]", "a class that begins with ]"}, {"\\\\p{L", "an unfinished escape"}, {"(a", "is not accepted"}, {"\\\\", "an escape"}};
  for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
    char *to;
    CHECK(asprintf(&to, "\"Regex\":\"%s\",\"old\":\"", patterns[i][0]) > 0);
    refused_json("\"Regex\":\"", to, patterns[i][1]);
    free(to);
  }
}

/* tokenizer_config.json says what begins and ends a text; both ways to write merges are the same. */
TEST(json_beside) {
  char *text, beside[192];
  size_t bytes;
  CHECK(file_read(JSON, 1 << 20, ERROR_DATA, &text, &bytes, &failure));
  snprintf(path, sizeof path, "%s/tokenizer.json", root);
  snprintf(beside, sizeof beside, "%s/tokenizer_config.json", root);
  CHECK(file_publish(path, text, bytes, ERROR_DATA, &failure));
  static const struct {
    const char *config;
    int32_t bos, eos;
  } rows[] = {{"{\"bos_token\":null,\"eos_token\":\"<|end_of_text|>\"}", -1, 767},
              {"{\"bos_token\":{\"content\":\"<|end_of_text|>\"},\"eos_token\":\"<|end_of_text|>\"}", 767, 767},
              {"{}", -1, -1},
              {"{\"model_max_length\":1000000000000000019884624838656,\"eos_token\":\"<|end_of_text|>\"}", -1, 767}, /* as transformers writes it */
              {"{\"eos_token\":\"!\"}", -1, 732}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    CHECK(file_publish(beside, rows[i].config, strlen(rows[i].config), ERROR_DATA, &failure));
    struct tokenizer *t = open_or_fail(path);
    if (t) {
      CHECK_EQ_I64(tokenizer_info(t)->bos, rows[i].bos);
      CHECK_EQ_I64(tokenizer_info(t)->eos, rows[i].eos);
    }
    tokenizer_close(t);
  }
  static const char *const wrong[][2] = {{"{\"bos_token\":\"nothing\"}", "bos_token 'nothing' is no token of"}, {"{\"bos_token\":7}", "bos_token is not a text"}, {"{", "tokenizer_config.json:1:"}};
  for (size_t i = 0; i < 3; i++) {
    CHECK(file_publish(beside, wrong[i][0], strlen(wrong[i][0]), ERROR_DATA, &failure));
    CHECK(!tokenizer_open(path, &failure) && strstr(failure.message, wrong[i][1]));
  }
  CHECK(unlink(beside) == 0);
  /* ["a","b"] as "a b": the same tokenizer. */
  char *from = strstr(text, "\"merges\":[") + 10, *to = from;
  for (bool inside = false, inner = false; *from; from++) {
    if (*from == '\\') {
      *to++ = *from++;
    } else if (*from == '"') {
      inside = !inside;
      if (inner && ((inside && from[-1] == ',') || (!inside && from[1] == ','))) continue;
    } else if (!inside && (*from == '[' || *from == ']')) {
      if (!inner && *from == ']') break;
      inner = *from == '[';
      continue;
    } else if (!inside && inner && *from == ',') {
      *to++ = ' ';
      continue;
    }
    *to++ = *from;
  }
  memmove(to, from, strlen(from) + 1);
  CHECK(strstr(text, "\"merges\":[\"") != NULL);
  CHECK(file_publish(path, text, strlen(text), ERROR_DATA, &failure));
  struct tokenizer *t = open_or_fail(path);
  CHECK(t && hash_equal(tokenizer_info(t)->digest, tokenizer_info(json)->digest));
  tokenizer_close(t);
  free(text);
}

/* Bytes of both kinds of file changed, cut and doubled: an error or a tokenizer, never a fault. */
TEST(damage) {
  static const char *const files[] = {RANKS, JSON};
  struct tokenizer_ids ids = {0};
  int opened[2] = {0};
  for (int f = 0; f < 2; f++) {
    char *text;
    size_t bytes;
    CHECK(file_read(files[f], 1 << 20, ERROR_DATA, &text, &bytes, &failure));
    char *changed = malloc(2 * bytes + 1);
    if (!changed) abort();
    for (int i = 0; i < 250; i++) {
      size_t n = bytes;
      memcpy(changed, text, n);
      const int kind = (int)(next() % 4);
      for (uint32_t k = 0; k < 1 + next() % 3; k++) changed[next() % n] = kind < 2 ? (char)next() : "0123456789\"[]{},:\\ =\n"[next() % 21];
      if (kind == 3) n = next() % n;
      snprintf(path, sizeof path, "%s/damaged", root);
      FILE *out = fopen(path, "wb"); /* quicker than a durable write */
      if (!out || fwrite(changed, 1, n, out) != n || fclose(out) != 0) abort();
      struct tokenizer *t = tokenizer_open(path, &failure);
      if (t) {
        opened[f]++;
        if (!encode(t, text, 2000, TOKENIZER_SPECIALS, &ids) && failure.code != ERROR_DATA) FAIL("%s", failure.message);
      } else if (failure.code != ERROR_DATA || !strstr(failure.message, path)) {
        FAIL("%s", failure.message);
      }
      tokenizer_close(t);
    }
    free(changed);
    free(text);
  }
  CHECK(opened[0] > 0 && opened[0] < 250 && opened[1] < 250);
  printf("# %d and %d of 250 damaged files are still tokenizers\n", opened[0], opened[1]);
  tokenizer_ids_free(&ids);
}

/* Patterns of random characters: refused, or a tokenizer whose ids are the whole text. */
TEST(odd_patterns) {
  static const char *const bits[] = {"(", ")", "(?:", "(?i:", "(?!", "[", "[^", "]", "|", "*", "+", "?", "\\\\p{L}", "\\\\s", "\\\\S", "\\\\n", "a", "e", " ", ".", "{2}", "\xc3\xa9", "-"};
  static const char text[] = "Hello there, caf\xc3\xa9 aeaeae  \n eel; \xe4\xbd\xa0!";
  char *file, *changed;
  size_t bytes;
  int taken = 0;
  CHECK(file_read(JSON, 1 << 20, ERROR_DATA, &file, &bytes, &failure));
  char *at = strstr(file, "\"Regex\":\""), *end = strstr(at, "\"},\"behavior\"");
  struct tokenizer_ids ids = {0};
  *at = 0;
  for (int i = 0; i < 400; i++) {
    char pattern[80] = "";
    for (uint32_t k = 0; k < 1 + next() % 7; k++) strcat(pattern, bits[next() % (sizeof bits / sizeof *bits)]);
    CHECK(asprintf(&changed, "%s\"Regex\":\"%s%s", file, pattern, end) > 0);
    snprintf(path, sizeof path, "%s/patterns", root);
    FILE *out = fopen(path, "wb");
    if (!out || fputs(changed, out) < 0 || fclose(out) != 0) abort();
    struct tokenizer *t = tokenizer_open(path, &failure);
    if (!t && !strstr(failure.message, "the pattern '")) FAIL("%s: %s", pattern, failure.message);
    if (t) {
      taken++;
      if (!encode(t, text, (int64_t)strlen(text), TOKENIZER_PLAIN, &ids)) FAIL("%s: %s", pattern, failure.message);
      if (!decodes_to(t, &ids, text, (int64_t)strlen(text))) FAIL("%s", pattern);
    }
    tokenizer_close(t);
    free(changed);
  }
  CHECK(taken > 20);
  free(file);
  tokenizer_ids_free(&ids);
}

int main(void) {
  const char *folder = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-tokenizer-XXXXXX", folder && strlen(folder) < 40 ? folder : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  byte_tokens = tokenizer_open("bytes", &failure);
  ranks = tokenizer_open(RANKS, &failure);
  if (byte_tokens && ranks) json = tokenizer_open(JSON, &failure);
  if (!json) {
    printf("not ok open: %s\n", failure.message);
    return 1;
  }
  RUN(golden_ids);
  RUN(bytes);
  RUN(names);
  RUN(refused_text);
  RUN(round_trips);
  RUN(many_threads);
  RUN(long_pieces);
  RUN(learning);
  RUN(learnt_file);
  RUN(rank_files);
  RUN(json_files);
  RUN(json_beside);
  RUN(damage);
  RUN(odd_patterns);
  tokenizer_close(byte_tokens);
  tokenizer_close(ranks);
  tokenizer_close(json);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
