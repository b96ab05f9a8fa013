/* bench: what it refuses, and that its rows are numbers that fit together. */
#include <jansson.h>

#include "tests/command_rig.h"
#include "trainer/bench.h"

#define BENCH(...) COMMAND_APART(bench, __VA_ARGS__)

/* The rows of --json: an array. */
static json_t *rows(void) {
  json_t *all = json_array();
  for (char *line = text; *line;) {
    const size_t length = strcspn(line, "\n");
    json_t *o = json_loadb(line, length, 0, NULL);
    if (!o) FAIL("not JSON: %.*s", (int)length, line);
    json_array_append_new(all, o);
    line += length + (line[length] == '\n');
  }
  return all;
}

static double number(const json_t *rows_, size_t i, const char *key) {
  const json_t *value = json_object_get(json_array_get(rows_, i), key);
  if (!json_is_number(value)) FAIL("row %d has no %s", (int)i, key);
  return json_number_value(value);
}

TEST(refused) {
  CHECK_EQ_I64(BENCH("matmul"), ERROR_USAGE);
  CHECK(said("nothing is named 'matmul'; there are gemm, quantize, attention, step, loader, checkpoint, collectives and tokenizer"));
  CHECK_EQ_I64(BENCH(NULL), ERROR_USAGE);
  CHECK_EQ_I64(BENCH("step"), ERROR_USAGE);
  CHECK(said("bench step: CONFIG is missing"));
  CHECK_EQ_I64(BENCH("gemm", "--set", "run.threads=1"), ERROR_USAGE);
  CHECK_EQ_I64(BENCH("gemm", "--shape", "1,2"), ERROR_USAGE);
  CHECK(said("--shape '1,2': three numbers M,N,K"));
  CHECK_EQ_I64(BENCH("gemm", "--shape", "64,64,48", "--route", "mxfp4-row-sr"), ERROR_USAGE);
  CHECK(said("64 x 48 is not made of whole blocks of 32"));
  CHECK_EQ_I64(BENCH("gemm", "--shape", "64,64,64", "--route", "nothing"), ERROR_CONFIG);
  /* options of other benches: what is not heeded is not taken */
  const char *const option[][3] = {{"attention", "--route", "attention-fp8"}, {"attention", "--from", "c.h5"}, {"attention", "--folder", "."},
                                   {"attention", "--megabytes", "1"}, {"gemm", "--setup", "training"}, {"gemm", "--distribution", "normal"},
                                   {"gemm", "--scale", "0"}, {"gemm", "--seed", "0"}, {"collectives", "--queries", "1"},
                                   {"checkpoint", "--shape", "1,1,16"}, {"collectives", "--route", "bf16"}, {"gemm", "--from", "c.h5"},
                                   {"gemm", "--seq-len", "1"}, {"collectives", "--text", "x"}, {"gemm", "--tokenizer", "bytes"}};
  for (size_t i = 0; i < sizeof option / sizeof *option; i++) {
    char expected[64];
    snprintf(expected, sizeof expected, "bench %s takes no %s", option[i][0], option[i][1]);
    if (BENCH(option[i][0], option[i][1], option[i][2]) != ERROR_USAGE || !said(expected)) FAIL("bench %s takes %s", option[i][0], option[i][1]);
  }
  /* heads and batch whose product leaves 64 bits; numbers too many, too few, none or unfinished */
  const char *const shapes[] = {"16,4294967296,16,4294967296", "16,1,16,4097", "16,9223372036854775807,16,9223372036854775807",
                                "99999999999999999999999,1,16", "16,1", "16,1,16,", "16,1,16,1,1", "16,,16", "0,1,16", "-1,1,16", " 1,1,16",
                                "16,0,16", "16,1,16,0", "16,1,17", "", "a", "1048577,1,16", "16,1,1040"};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    if (BENCH("attention", "--shape", shapes[i]) != ERROR_USAGE) FAIL("--shape %s is taken", shapes[i]);
    CHECK(said("--shape '"));
  }
  CHECK_EQ_I64(BENCH("attention", "--shape", "1048576,4096,1024", "--setup", "training"), ERROR_SYSTEM);
  CHECK(said("1048576 tokens, batch 1, 4096 heads of 1024 need 6") && said(" GB of memory, this machine has "));
  CHECK_EQ_I64(BENCH("collectives"), ERROR_USAGE);
  CHECK(said("mpirun -np 2"));
  CHECK_EQ_I64(BENCH("step", "absent.yaml"), ERROR_CONFIG);
  CHECK_EQ_I64(BENCH("loader", "run.yaml"), ERROR_DATA); /* no stream is there yet */
}

TEST(tokenizer) {
  CHECK_EQ_I64(BENCH("tokenizer"), ERROR_USAGE);
  CHECK(said("bench tokenizer: --text is missing"));
  put("text.txt", "some text, said twice: some text\xff\n");
  CHECK_EQ_I64(BENCH("tokenizer", "--text", "text.txt", "--repeat", "1"), 0);
  CHECK(said("text.txt with bytes, one thread: 36 bytes, 36 ids") && said("encode") && said("decode"));
  CHECK_EQ_I64(BENCH("tokenizer", "--text", "text.txt", "--tokenizer", "absent.model"), ERROR_DATA);
  CHECK(said("there is no tokenizer absent.model"));
}

TEST(medians) {
  double odd[] = {5, 1, 9}, even[] = {4, 1, 3, 100};
  struct bench_seconds s = bench_median(odd, 3);
  CHECK(s.median == 5 && s.least == 1 && s.most == 9);
  s = bench_median(even, 4);
  CHECK(s.median == 3.5 && s.least == 1 && s.most == 100);
}

TEST(gemm) {
  CHECK_EQ_I64(BENCH("gemm", "--json", "--repeat", "2", "--threads", "1", "--shape", "64,96,128", "--shape", "33,65,32", "--route", "bf16"), 0);
  json_t *r = rows();
  CHECK_EQ_I64(json_array_size(r), 2);
  CHECK(number(r, 0, "m") == 64 && number(r, 0, "n") == 96 && number(r, 0, "k") == 128);
  const double rate = 2.0 * 64 * 96 * 128 / number(r, 0, "seconds");
  CHECK_CLOSE(number(r, 0, "flops_per_second") / rate, 1, 1e-9);
  CHECK(number(r, 0, "seconds") >= number(r, 0, "seconds_least") && number(r, 0, "seconds") <= number(r, 0, "seconds_most"));
  CHECK(number(r, 0, "roof_flops_per_second") > 1e8);
  json_decref(r);
  CHECK_EQ_I64(BENCH("gemm", "run.yaml", "--repeat", "1"), 0);
  int lines = 0;
  for (const char *at = text; (at = strstr(at, "GF/s  ")); at++) lines++;
  CHECK_EQ_I64(lines, 2 * 4 * 3); /* routes, linears, contractions */
  CHECK(said("roof: FP32 FMA loop in registers") && said("gate_up  wgrad     320     64     64") && said("mxfp4/1x32/encode/sr x mxfp4/2d32/adaptive"));
}

TEST(attention) {
  CHECK_EQ_I64(BENCH("attention", "run.yaml", "--json", "--repeat", "1"), 0);
  json_t *r = rows();
  CHECK_EQ_I64(json_array_size(r), 2);
  CHECK(number(r, 0, "batch") == 2 && number(r, 0, "seq_len") == 32 && number(r, 0, "n_kv_heads") == 2);
  /* causal: 32 * 33 / 2 pairs of queries and keys, two products of 2 * 16 FLOPs, 4 heads, 2 samples */
  CHECK_CLOSE(number(r, 0, "flops_per_second") * number(r, 0, "seconds") / (528.0 * 64 * 4 * 2), 1, 1e-9);
  CHECK_CLOSE(number(r, 1, "flops_per_second") * number(r, 1, "seconds") / (528.0 * 160 * 4 * 2), 1, 1e-9);
  CHECK_CLOSE(number(r, 1, "flops_per_second_full_square") / number(r, 1, "flops_per_second"), 1024 / 528.0, 1e-9);
  json_decref(r);
  CHECK_EQ_I64(BENCH("attention", "run.yaml", "--json", "--repeat", "1", "--seq-len", "7", "--seq-len", "48"), 0);
  r = rows();
  CHECK_EQ_I64(json_array_size(r), 4);
  CHECK(number(r, 1, "seq_len") == 7 && number(r, 2, "seq_len") == 48);
  CHECK_CLOSE(number(r, 2, "tokens_per_second") * number(r, 2, "seconds"), 2 * 48, 1e-6);
  json_decref(r);
  CHECK_EQ_I64(BENCH("attention", "run.yaml", "--seq-len", "8k"), ERROR_USAGE);
  CHECK(said("--seq-len '8k': a number of tokens"));
  CHECK_EQ_I64(BENCH("attention", "run.yaml", "--seq-len", "8", "--seed", "1"), ERROR_USAGE);
}

TEST(step) {
  CHECK_EQ_I64(BENCH("step", "run.yaml", "--json", "--repeat", "3"), 0);
  json_t *r = rows();
  CHECK_EQ_I64(json_array_size(r), 2);
  CHECK_CLOSE(number(r, 0, "ratio_to_bf16"), 1, 1e-12);
  CHECK_CLOSE(number(r, 1, "ratio_to_bf16") * number(r, 0, "seconds") / number(r, 1, "seconds"), 1, 1e-9);
  CHECK(number(r, 0, "tokens") == 64);
  const json_t *phases = json_object_get(json_array_get(r, 0), "phases");
  CHECK_EQ_I64(json_object_size(phases), 4);
  const char *key;
  json_t *value;
  json_object_foreach((json_t *)phases, key, value) CHECK(json_number_value(value) > 0);
  json_decref(r);
  /* an update of several micro-batches */
  CHECK_EQ_I64(BENCH("step", "run.yaml", "--json", "--repeat", "1", "--route", "bf16", "--set", "train.global_batch=6"), 0);
  r = rows();
  CHECK(number(r, 0, "micro_batches") == 3 && number(r, 0, "tokens") == 192);
  CHECK_CLOSE(number(r, 0, "tokens_per_second") * number(r, 0, "seconds"), 192, 1e-6);
  double sum = 0;
  phases = json_object_get(json_array_get(r, 0), "phases");
  json_object_foreach((json_t *)phases, key, value) sum += json_number_value(value);
  CHECK_CLOSE(sum / number(r, 0, "seconds"), 1, 0.1); /* of one repetition: all but what precedes the first phase */
  json_decref(r);
  CHECK_EQ_I64(BENCH("step", "run.yaml", "--set", "train.global_batch=6", "--set", "run.ranks=3", "--json", "--repeat", "1", "--route", "bf16"), 0);
  r = rows();
  CHECK(number(r, 0, "micro_batches") == 1);
  json_decref(r);
  CHECK_EQ_I64(BENCH("step", "run.yaml", "--route", "mxfp4-row-sr", "--repeat", "1"), 0);
  CHECK(said("mxfp4-row-sr") && !strstr(text, "bf16  "));
  CHECK_EQ_I64(BENCH("step", "run.yaml", "--route", "depth-27-5"), ERROR_CONFIG); /* a model of two blocks */
}

TEST(loader_and_checkpoint) {
  put_corpus("corpus");
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml"), 0);
  CHECK_EQ_I64(BENCH("loader", "run.yaml", "--json", "--repeat", "2"), 0);
  json_t *r = rows();
  CHECK_EQ_I64(json_array_size(r), 4);
  CHECK_CLOSE(number(r, 1, "tokens_per_second") / number(r, 1, "samples_per_second"), 32, 1e-6);
  json_decref(r);

  CHECK_EQ_I64(BENCH("checkpoint", "--folder", "here", "--megabytes", "2", "--json", "--repeat", "2"), 0);
  r = rows();
  CHECK_EQ_I64(json_array_size(r), 8); /* stall, save, load, verify; under zstd, then stored */
  CHECK(number(r, 0, "bytes") >= 2 << 20 && number(r, 0, "bytes") < 8 << 20); /* whole tensors of 7 MiB */
  CHECK(number(r, 1, "file_bytes") < 0.9 * number(r, 1, "bytes") && number(r, 5, "file_bytes") >= number(r, 5, "bytes"));
  CHECK_CLOSE(number(r, 0, "bytes_per_second") * number(r, 0, "seconds") / number(r, 0, "bytes"), 1, 1e-9);
  json_decref(r);
  CHECK(rmdir("here") == 0); /* nothing is left in it */
  CHECK(file_publish("file", "", 0, ERROR_SYSTEM, &failure));
  CHECK_EQ_I64(BENCH("checkpoint", "--folder", "file", "--megabytes", "1"), ERROR_CHECKPOINT);
}

int main(void) {
  static const char yaml[] = "model: {preset: tiny}\nroute: bf16\nrun: {threads: 1}\n"
                             "data: {sources: [corpus], train: t.tokens, validation: v.tokens, validation_fraction: 0.4}\n"
                             "train: {updates: 10, seq_len: 32, local_batch: 2, global_batch: 2}\n";
  if (!rig_enter()) return 1;
  put("run.yaml", yaml);
  RUN(refused);
  RUN(tokenizer);
  RUN(medians);
  RUN(gemm);
  RUN(attention);
  RUN(step);
  RUN(loader_and_checkpoint);
  if (!rig_leave()) return 1;
  return test_report();
}
