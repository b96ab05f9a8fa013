/* inspect: what it says of whole files, and which damage it names with which code. */
#include <signal.h>

#include "checkpoints/checkpoint.h"
#include "data/data.h"
#include "data/stream_file.h"
#include "tests/command_rig.h"
#include "trainer/inspect.h"

#define INSPECT(...) COMMAND(inspect, __VA_ARGS__)

/* Flips one bit of a file; again: as it was. */
static void flip(const char *path, int64_t at) {
  unsigned char byte;
  int fd = open(path, O_RDWR);
  CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1);
  byte ^= 4;
  CHECK(pwrite(fd, &byte, 1, at) == 1);
  close(fd);
}

/* Two documents: "BOS hello\x1b EOS", "BOS caf\xc3\xa9 EOS" and, over two blocks, many bytes. */
static void write_stream(const char *path) {
  static const char hello[] = "hello\x1b", coffee[] = "caf\xc3\xa9\n\xff.";
  int32_t ids[4096];
  static const char *const names[] = {"corpus", "more"}, *const notes[] = {"/a/corpus", NULL};
  const struct stream_start start = {TOKENIZER_BYTES_VOCAB, TOKENIZER_BYTES_BOS, TOKENIZER_BYTES_EOS, "bytes", names, 2, NULL};
  struct stream_writer *w = stream_writer_open(path, &start, &failure);
  if (!w) {
    FAIL("%s", failure.message);
    return;
  }
  const char *const documents[] = {hello, coffee};
  for (int i = 0; i < 2; i++) {
    const int64_t n = (int64_t)strlen(documents[i]);
    ids[0] = TOKENIZER_BYTES_BOS;
    for (int64_t k = 0; k < n; k++) ids[k + 1] = (unsigned char)documents[i][k];
    ids[n + 1] = TOKENIZER_BYTES_EOS;
    CHECK(stream_writer_document(w, 0, &failure) && stream_writer_tokens(w, ids, n + 2, &failure));
  }
  for (int i = 0; i < 4096; i++) ids[i] = 'x';
  CHECK(stream_writer_document(w, 0, &failure));
  for (int i = 0; i < 200; i++) CHECK(stream_writer_tokens(w, ids, 4096, &failure));
  CHECK(stream_writer_finish(w, notes, &failure) && stream_writer_publish(w, &failure));
  stream_writer_close(w);
}

TEST(streams) {
  write_stream("t.tokens"); /* 8 + 10 + 819200 tokens of 2 bytes: blocks 0 and 1 */
  CHECK_EQ_I64(INSPECT("t.tokens"), 0);
  CHECK(said("t.tokens: token stream") && said("819218 of 2 bytes") && said("documents      3,"));
  CHECK(said("bytes, vocabulary 258") && said("2 blocks"));
  CHECK(said("  sources        corpus: 3 documents, 819218 tokens (100.00 %), /a/corpus\n                 more: 0 documents, 0 tokens (0.00 %)\n"));
  CHECK(said("  | <|begin_of_text|>hello\\x1b<|end_of_text|><|begin_of_text|>caf\xc3\xa9\n  | \\xff.<|end_of_text|>xxx"));
  CHECK(!strstr(text, "verified"));
  CHECK(said("longest        819200 tokens, document 2\n"));
  CHECK(said("BOS            id 256, 2 times; 2 of 3 documents begin with it\n"));
  CHECK(said("EOS            id 257, 2 times; 2 of 3 documents end with it\n") && !strstr(text, "WARNING"));
  struct stream *s = stream_open("t.tokens", 0, &failure);
  char digest[HASH_TEXT];
  if (s) hash_text(stream_info(s)->digest, digest);
  stream_close(s);
  CHECK(said(digest));

  CHECK_EQ_I64(INSPECT("t.tokens", "--verify", "--token", "819215"), 0);
  CHECK(said("verified") && said("tokens 819215 to 819217\n  | xxx\n"));
  CHECK_EQ_I64(INSPECT("t.tokens", "--token", "819218"), ERROR_USAGE);
  CHECK(said("t.tokens has tokens 0 to 819217"));
  CHECK_EQ_I64(INSPECT("t.tokens", "--sample", "0"), ERROR_USAGE);
  CHECK(said("--seq-len"));
  CHECK_EQ_I64(INSPECT("t.tokens", "--sample", "-1"), ERROR_USAGE);

  flip("t.tokens", FRAME_HEADER + FRAME_BLOCK + 500);
  CHECK_EQ_I64(INSPECT("t.tokens", "--verify"), ERROR_DATA);
  CHECK(said("block 1 of 2") && said("does not match its digest"));
  flip("t.tokens", FRAME_HEADER + FRAME_BLOCK + 500);
  flip("t.tokens", 30);
  CHECK_EQ_I64(INSPECT("t.tokens"), ERROR_DATA);
  flip("t.tokens", 30);
  CHECK_EQ_I64(INSPECT("t.tokens", "--verify"), 0);
  CHECK(truncate("t.tokens", 5000) == 0);
  CHECK_EQ_I64(INSPECT("t.tokens"), ERROR_DATA);
  CHECK(said("truncated or damaged"));
}

/* Samples of the order: 7 tokens each, the eighth a target alone. */
TEST(samples) {
  write_stream("s.tokens");
  CHECK_EQ_I64(INSPECT("s.tokens", "--sample", "1", "--seq-len", "7"), 0);
  CHECK(said("sample 1 of 7 tokens, seed 1: epoch 0 (of 117031 samples), tokens 7 to 14"));
  CHECK(said("-- document 0 (corpus), begun before to its end: its tokens 7 to 7 of 8\n  # 257\n  | <|end_of_text|>\n"));
  CHECK(said("-- document 1 (corpus), from its beginning, cut: its tokens 0 to 6 of 10\n  # 256 99 97 102 195 169 10\n  | <|begin_of_text|>caf\xc3\xa9\n"));
  CHECK_EQ_I64(INSPECT("s.tokens", "--sample", "0", "--seq-len", "8"), 0);
  CHECK(said("document 0 (corpus), from its beginning to its end: its tokens 0 to 7 of 8") && said("# 256\n"));

  /* Epoch 1: where the order says. */
  struct stream *s = stream_open("s.tokens", 0, &failure);
  struct data_order o;
  char wanted[128];
  for (int seed = 1; s && seed < 4; seed++) {
    char number[16];
    CHECK(data_order_make(&o, s, 100, (uint64_t)seed, &failure));
    const int64_t first = data_order_position(&o, 8192 + 5) * 100;
    snprintf(number, sizeof number, "%d", seed);
    CHECK_EQ_I64(INSPECT("s.tokens", "--sample", "8197", "--seq-len", "100", "--seed", number), 0);
    snprintf(wanted, sizeof wanted, "epoch 1 (of 8192 samples), tokens %lld to %lld,", (long long)first, (long long)first + 100);
    if (!said(wanted)) FAIL("seed %d: %s", seed, wanted);
    o.shuffle_samples = true;
    CHECK_EQ_I64(INSPECT("s.tokens", "--sample", "5", "--seq-len", "100", "--seed", number, "--shuffle-samples"), 0);
    snprintf(wanted, sizeof wanted, "epoch 0 (of 8192 samples), tokens %lld to", (long long)data_order_position(&o, 5) * 100);
    if (!said(wanted)) FAIL("seed %d, shuffled: %s", seed, wanted);
  }
  stream_close(s);
  CHECK_EQ_I64(INSPECT("s.tokens", "--sample", "0", "--seq-len", "819218"), ERROR_DATA);
}

/* Documents that end with id 0, though the EOS is another. */
TEST(zero_ends_documents) {
  static const char *const names[] = {"dclm"};
  for (int eos = 0; eos < 2; eos++) {
    const struct stream_start start = {300, 256, eos ? 257 : 0, "bytes", names, 1, NULL};
    struct stream_writer *w = stream_writer_open("z.tokens", &start, &failure);
    for (int d = 0; w && d < 5; d++) {
      const int32_t ids[4] = {256, 'a', 'b', d < 3 ? 0 : 257};
      CHECK(stream_writer_document(w, 0, &failure) && stream_writer_tokens(w, ids, 4, &failure));
    }
    CHECK(w && stream_writer_finish(w, NULL, &failure) && stream_writer_publish(w, &failure));
    stream_writer_close(w);
    CHECK_EQ_I64(INSPECT("z.tokens"), 0);
    if (eos)
      CHECK(said("WARNING        id 0 ends 3 of 5 documents and stands before 3 of 5 BOS") && said("eos: 0"));
    else
      CHECK(!strstr(text, "WARNING") && said("EOS            id 0, 3 times; 3 of 5 documents end with it"));
  }
}

/* Two updates of a run whose folder is "run". */
static void save_steps(struct comm *c) {
  static float a[6] = {1, 2, 3, 4, 5, 6};
  static uint16_t b[4] = {1, 2, 3, 4};
  const struct tensor_slice slices[] = {
      {.name = "adam_m/x", .dtype = DTYPE_F32, .global_rows = 3, .cols = 2, .rows = 3, .data = a},
      {.name = "adam_m/y", .dtype = DTYPE_F32, .global_rows = 2, .cols = 1, .rows = 2, .data = a},
      {.name = "param/x", .dtype = DTYPE_BF16, .global_rows = 1, .cols = 4, .rows = 1, .data = b},
  };
  static const char meta[] =
      "{\"format\":1,\"update\":3,\"samples\":12,\"tokens\":768,\"seed\":42,\"world\":1,\"route\":\"bf16\","
      "\"config\":\"run:\\n  name: x\\n\",\"train_digest\":\"0123\"}";
  CHECK(checkpoint_save(c, "run/checkpoints", 3, slices, 3, meta, 0, &failure));
  CHECK(checkpoint_save(c, "run/checkpoints", 6, slices, 3, meta, 0, &failure));
}

#define STEP3 "run/checkpoints/step-00000003"
#define STEP6 "run/checkpoints/step-00000006"

TEST(checkpoints) {
  struct comm *c = comm_open(0, &failure);
  if (!c) {
    FAIL("%s", failure.message);
    return;
  }
  save_steps(c);
  comm_close(c);
  CHECK_EQ_I64(INSPECT(STEP6), 0);
  CHECK(said("checkpoint of update 6") && said("samples        12\n") && said("seed           42\n"));
  CHECK(said("route          bf16\n") && said("train_digest   0123\n") && !strstr(text, "name: x"));
  CHECK(said("rank-00000.h5") && said("size is right"));
  CHECK(said("  adam_m: 2 tensors, 8 elements, fp32, 32 bytes\n") && said("  param: 1 tensors, 4 elements, bf16, 8 bytes\n"));
  CHECK(said("[3, 2]             24\n") && said("[1, 4]              8\n"));
  CHECK_EQ_I64(INSPECT(STEP6 "/", "--verify"), 0);
  CHECK(said("checksum holds"));
  CHECK_EQ_I64(INSPECT("run/checkpoints"), 0);
  CHECK(said("2 checkpoints") && said("step-00000003  whole\n") && said("latest         -> step-00000006\n"));
  CHECK_EQ_I64(INSPECT("run", "--verify"), 0);
  CHECK(said("checkpoint of update 6"));
  CHECK_EQ_I64(INSPECT(STEP6 "/rank-00000.h5", "--verify"), 0);
  CHECK(said("slices         3, 40 bytes"));
  CHECK(said("size and checksum are the manifest's"));

  /* a flipped bit: sizes do not tell, the checksum does */
  flip(STEP6 "/rank-00000.h5", file_size(STEP6 "/rank-00000.h5") / 2);
  CHECK_EQ_I64(INSPECT(STEP6, "--verify"), ERROR_CHECKPOINT);
  CHECK(said("DAMAGED") && said(STEP6 "/rank-00000.h5 is damaged"));
  CHECK_EQ_I64(INSPECT("run/checkpoints", "--verify"), ERROR_CHECKPOINT);
  CHECK(said("step-00000003  whole\n") && said("checkpoint of update 3"));
  CHECK_EQ_I64(INSPECT("run", "--verify"), ERROR_CHECKPOINT);
  CHECK_EQ_I64(INSPECT(STEP3, "--verify"), 0);
  CHECK_EQ_I64(INSPECT(STEP6 "/rank-00000.h5", "--verify"), ERROR_CHECKPOINT);
  flip(STEP6 "/rank-00000.h5", file_size(STEP6 "/rank-00000.h5") / 2);
  for (int64_t at = 8; at < file_size(STEP6 "/rank-00000.h5"); at += 97) { /* found before HDF5 stumbles over it */
    flip(STEP6 "/rank-00000.h5", at);
    CHECK_EQ_I64(INSPECT(STEP6 "/rank-00000.h5", "--verify"), ERROR_CHECKPOINT);
    if (!said("rank-00000.h5 is damaged: its checksum differs")) FAIL("byte %d", (int)at);
    flip(STEP6 "/rank-00000.h5", at);
  }

  CHECK(truncate(STEP3 "/rank-00000.h5", 100) == 0);
  CHECK_EQ_I64(INSPECT(STEP3), ERROR_CHECKPOINT);
  CHECK(said("has 100 bytes, the manifest says"));
  CHECK_EQ_I64(INSPECT(STEP3 "/rank-00000.h5"), ERROR_CHECKPOINT);
  CHECK(unlink(STEP3 "/rank-00000.h5") == 0);
  CHECK_EQ_I64(INSPECT(STEP3), ERROR_CHECKPOINT);
  CHECK(said("is missing"));
  CHECK_EQ_I64(INSPECT(STEP6 "/manifest.json"), ERROR_DATA);
  CHECK(said("inspect the folder that it lies in"));
  put(STEP6 "/manifest.json", "{");
  CHECK_EQ_I64(INSPECT(STEP6), ERROR_CHECKPOINT);
  CHECK(said("manifest.json:1:"));
  CHECK(unlink(STEP6 "/manifest.json") == 0);
  CHECK_EQ_I64(INSPECT(STEP6), ERROR_CHECKPOINT);
  CHECK(said("has no manifest.json"));
  CHECK_EQ_I64(INSPECT(STEP6 "/rank-00000.h5", "--verify"), 0);
  CHECK(said("no manifest.json lies beside it"));
  CHECK_EQ_I64(INSPECT("run/checkpoints"), ERROR_CHECKPOINT);
}

#define UPDATE(n, loss, verdict)                                                                            \
  "{\"kind\":\"update\",\"sources\":{\"web\":{\"tokens\":" #n "0},\"books\":{\"tokens\":" #n "}},\"update\":" #n ",\"loss\":" loss ",\"tokens\":" #n "00,\"verdict\":\"" verdict "\"," \
  "\"seconds\":{\"total\":0.5}}\n"
#define START "{\"kind\":\"start\",\"update\":0,\"name\":\"demo\",\"route\":\"bf16\",\"build\":\"b\",\"topology\":\"single\",\"init_hash\":\"ab\"}\n"

TEST(records) {
  put("metrics.jsonl", START UPDATE(1, "5.5", "applied") UPDATE(2, "\"nan\"", "skipped") UPDATE(3, "4.25", "applied")
                           "{\"kind\":\"validation\",\"update\":3,\"loss\":4.5}\n{\"kind\":\"checkpoint\",\"update\":3}\n" UPDATE(
                               4, "4.75", "halted") "{\"kind\":\"end\",\"update\":3,\"reason\":\"diverged\"}\n");
  CHECK_EQ_I64(INSPECT("metrics.jsonl"), 0);
  CHECK(said("demo, route bf16") && said("updates        4: 1 to 4, 400 tokens read, 2.0 s"));
  CHECK(said("2 applied, 1 skipped, 1 halted") && said("tokens read    web 40, books 4\n"));
  CHECK(said("first 5.500000 (update 1), last 4.750000 (4), lowest 4.250000 (3)"));
  CHECK(said("validations    1: first 4.500000 (update 3)") && said("1 saved") && said("end            diverged"));

  put("metrics.jsonl", START UPDATE(1, "5.5", "applied") "{\"kind\":\"upd");
  CHECK_EQ_I64(INSPECT("metrics.jsonl"), 0);
  CHECK(said("not whole (line 3)") && said("none recorded"));
  put("metrics.jsonl", START UPDATE(1, "5.5", "applied") "{]}\n" UPDATE(2, "5.4", "applied"));
  CHECK_EQ_I64(INSPECT("metrics.jsonl"), ERROR_DATA);
  CHECK(said("metrics.jsonl:3: not JSON"));
  put("metrics.jsonl", START UPDATE(1, "5.5", "applied") UPDATE(3, "5.4", "applied"));
  CHECK_EQ_I64(INSPECT("metrics.jsonl"), ERROR_DATA);
  CHECK(said("the record after update 1 is not that of update 2"));
  put("metrics.jsonl", "{\"a\":1}\n");
  CHECK_EQ_I64(INSPECT("metrics.jsonl"), ERROR_DATA);
  CHECK(said("metrics.jsonl:1: not a record"));
}

TEST(anything_else) {
  CHECK_EQ_I64(INSPECT("absent"), ERROR_DATA);
  CHECK(said("cannot open absent"));
  CHECK_EQ_I64(INSPECT(NULL), ERROR_USAGE);
  put("empty", "");
  CHECK_EQ_I64(INSPECT("empty"), ERROR_DATA);
  CHECK(said("it is empty"));
  put("notes.txt", "Dear diary");
  CHECK_EQ_I64(INSPECT("notes.txt"), ERROR_DATA);
  CHECK(said("notes.txt is nothing that fp4d makes"));
  CHECK_EQ_I64(INSPECT("/dev/null"), ERROR_DATA);
  CHECK(file_make_folder("folder", ERROR_SYSTEM, &failure));
  CHECK_EQ_I64(INSPECT("folder"), ERROR_DATA);
  int lines = 0;
  for (const char *p = text; *p; p++) lines += *p == '\n';
  CHECK_EQ_I64(lines, 1);
  put("short.h5", "\x89HDF\r\n\x1a\nabc");
  CHECK_EQ_I64(INSPECT("short.h5"), ERROR_CHECKPOINT);
}

static bool crash(const struct inspection *i, struct error *e) {
  (void)i, (void)e;
  signal(SIGSEGV, SIG_DFL); /* a sanitizer has its own */
  raise(SIGSEGV);
  return true;
}

static bool refuse(const struct inspection *i, struct error *e) {
  error_set(e, ERROR_DATA, "%s is not wanted", i->path);
  return error_hint(e, "nor is another");
}

static bool accept(const struct inspection *i, struct error *e) {
  (void)i, (void)e;
  return true;
}

/* What a library does to a process that looks is said in words, and ends no other. */
TEST(apart) {
  struct inspection i = {.path = "x.h5"};
  struct error e = {0};
  CHECK(!inspect_apart(crash, &i, &e));
  CHECK_EQ_I64(e.code, ERROR_CHECKPOINT);
  CHECK(strstr(e.message, "x.h5 is damaged: the HDF5 library crashed on it: Segmentation fault") && strstr(e.hint, "--verify"));
  i.verify = true;
  CHECK(!inspect_apart(crash, &i, &e) && e.hint[0] == 0);
  CHECK(!inspect_apart(refuse, &i, &e));
  CHECK_EQ_I64(e.code, ERROR_DATA);
  CHECK_STR(e.message, "x.h5 is not wanted");
  CHECK_STR(e.hint, "nor is another");
  CHECK(inspect_apart(accept, &i, &e));
}

int main(void) {
  if (!rig_enter()) return 1;
  RUN(streams);
  RUN(samples);
  RUN(zero_ends_documents);
  RUN(checkpoints);
  RUN(records);
  RUN(anything_else);
  RUN(apart);
  if (!rig_leave()) return 1;
  return test_report();
}
