/* Arguments, and the commands check and prepare: exit codes and what they say. */
#include "tests/command_rig.h"

/* ---- arguments ------------------------------------------------------------ */

struct sample {
  const char *first, *second, *text;
  struct argument_list sets;
  int64_t count;
  double rate;
  bool force;
};

#define AT(member) .offset = offsetof(struct sample, member)
static const struct argument sample_rows[] = {
    {.name = "FIRST", .type = ARGUMENT_WORD, AT(first), .help = "a thing"},
    ARGUMENT_SETS(struct sample, sets),
    {.name = "SECOND", .type = ARGUMENT_OPTIONAL_WORD, AT(second), .help = "another"},
    {.name = "--text", .value = "TEXT", .type = ARGUMENT_TEXT, AT(text), .help = "words"},
    {.name = "--count", .value = "N", .type = ARGUMENT_INTEGER, AT(count), .low = 1, .high = 10, .help = "how many"},
    {.name = "--rate", .value = "R", .type = ARGUMENT_NUMBER, AT(rate), .help = "how fast"},
    {.name = "--force", .type = ARGUMENT_FLAG, AT(force), .help = "at once"},
    {0},
};
static const struct argument words_rows[] = {
    {.name = "RUN", .type = ARGUMENT_WORDS, AT(sets), .help = "runs"},
    {0},
};
static const struct argument needed_rows[] = {
    {.name = "--out", .value = "FILE", .type = ARGUMENT_TEXT, AT(text), .needed = true, .help = "where to"},
    {0},
};

static bool parse(const struct argument *rows, struct sample *s, const char *const *words) {
  char *argv[32] = {"cmd"};
  int argc = 1;
  for (; words[argc - 1]; argc++) argv[argc] = (char *)words[argc - 1];
  *s = (struct sample){.count = 7};
  failure = (struct error){0};
  return arguments_parse(rows, argc, argv, s, &failure);
}
#define PARSE(rows, s, ...) parse(rows, s, (const char *const[]){__VA_ARGS__, NULL})

TEST(arguments) {
  struct sample s;
  CHECK(PARSE(sample_rows, &s, "a"));
  CHECK_STR(s.first, "a");
  CHECK(!s.second && !s.text && !s.force && s.sets.n == 0 && s.count == 7);
  CHECK(PARSE(sample_rows, &s, "--set", "x=1", "a", "--force", "b", "--set=y=2", "--count", "10", "--rate=-1.5e-3", "--text", "-z"));
  CHECK_STR(s.second, "b");
  CHECK_STR(s.text, "-z");
  CHECK_EQ_I64(s.sets.n, 2);
  CHECK_STR(s.sets.item[0], "x=1");
  CHECK_STR(s.sets.item[1], "y=2");
  CHECK(s.force && s.count == 10 && s.rate == -1.5e-3);
  CHECK(PARSE(sample_rows, &s, "--", "--force", "-"));
  CHECK_STR(s.first, "--force");
  CHECK_STR(s.second, "-");
  CHECK(PARSE(words_rows, &s, "a", "b", "c"));
  CHECK_EQ_I64(s.sets.n, 3);
}

TEST(arguments_refused) {
  static const struct {
    const char *words[5], *message;
  } cases[] = {
      {{NULL}, "cmd: FIRST is missing (a thing)"},
      {{"a", "b", "c"}, "cmd: one argument too many: 'c'"},
      {{"a", "--forse"}, "cmd: unknown flag '--forse'; did you mean --force?"},
      {{"a", "--zzzzzzzz"}, "cmd: unknown flag '--zzzzzzzz'"},
      {{"a", "-f"}, "cmd: unknown flag '-f'"},
      {{"a", "--count"}, "cmd: --count wants a value (N)"},
      {{"a", "--count", "0"}, "cmd: --count '0': an integer 1 .. 10 is wanted"},
      {{"a", "--count=3x"}, "cmd: --count '3x': an integer 1 .. 10 is wanted"},
      {{"a", "--count= 3"}, "cmd: --count ' 3': an integer 1 .. 10 is wanted"},
      {{"a", "--count", "99999999999999999999"}, "cmd: --count '99999999999999999999': an integer"},
      {{"a", "--rate", "nan"}, "cmd: --rate 'nan': a number is wanted"},
      {{"a", "--rate", "1e999"}, "cmd: --rate '1e999': a number is wanted"},
      {{"a", "--force=1"}, "cmd: --force takes no value"},
      {{"a", "--text="}, "cmd: --text is empty"},
      {{""}, "cmd: FIRST is empty"},
  };
  struct sample s;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    CHECK(!parse(sample_rows, &s, cases[i].words));
    CHECK_EQ_I64(failure.code, ERROR_USAGE);
    CHECK_STR(failure.hint, "`fp4d help cmd` shows what it takes");
    if (strncmp(failure.message, cases[i].message, strlen(cases[i].message)) != 0)
      FAIL("\"%s\", expected \"%s\"", failure.message, cases[i].message);
  }
  CHECK(!PARSE(words_rows, &s, "--"));
  CHECK_STR(failure.message, "cmd: RUN is missing (runs)");
  CHECK(!PARSE(needed_rows, &s, NULL));
  CHECK_STR(failure.message, "cmd: --out is missing (where to)");
  CHECK(PARSE(needed_rows, &s, "--out=x"));
  char *argv[600];
  for (int i = 0; i < 600; i++) argv[i] = "--set=x";
  CHECK(!arguments_parse(sample_rows, 600, argv, &s, &failure));
  CHECK(strstr(failure.message, "more than 256 times --set"));
}

TEST(table) {
  for (const struct command *c = commands; c->name; c++) {
    CHECK(command_find(c->name) == c);
    CHECK(c->summary && c->run && c->arguments);
    for (const struct argument *a = c->arguments; a->name; a++) {
      CHECK(a->help && a->help[0]);
      bool flag = strncmp(a->name, "--", 2) == 0;
      bool positional = a->type == ARGUMENT_WORD || a->type == ARGUMENT_OPTIONAL_WORD || a->type == ARGUMENT_WORDS ||
                        a->type == ARGUMENT_OPTIONAL_WORDS;
      CHECK(flag != positional);
      CHECK((a->value != NULL) == (flag && a->type != ARGUMENT_FLAG));
      CHECK(!a->needed || a->type == ARGUMENT_TEXT);
    }
  }
  CHECK(!command_find("nope"));
  command_unknown("chekc", NULL, &failure);
  CHECK_STR(failure.message, "unknown command 'chekc'; did you mean check?");
  CHECK_EQ_I64(failure.code, ERROR_USAGE);
}

/* ---- commands ---------------------------------------------------------------- */

TEST(prepare_and_check) {
  put_corpus("corpus");
  put("run.yaml", "model: {preset: tiny}\nroute: mxfp4-row-sr\n"
                  "data: {sources: [corpus], train: made/t.tokens, validation: made/v.tokens, validation_fraction: 0.4}\n"
                  "train: {updates: 10, seq_len: 64}\nvalidation: {samples: 4}\n");

  CHECK_EQ_I64(COMMAND(check, "run.yaml"), ERROR_DATA);
  CHECK(said("PROBLEM  train data  made/t.tokens does not exist (`fp4d prepare` makes it from data.sources)"));
  CHECK(said("\n2 problems\n"));
  CHECK(!file_exists("runs"));

  CHECK_EQ_I64(COMMAND(prepare, "run.yaml"), 0);
  CHECK(said("made/t.tokens: ") && said("made/v.tokens: "));
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml"), 0);
  CHECK(said("nothing to do; --force makes them anew"));
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--set", "data.sources=corpus,more"), ERROR_DATA);
  CHECK(said("made/t.tokens was made of other sources: number 2 of its 1 is absent, of the 2 in data.sources more (--force makes it anew"));
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--set", "data.sources=other"), ERROR_DATA);
  CHECK(said("number 1 of its 1 is corpus, of the 1 in data.sources other"));
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--force"), 0);
  CHECK(!strstr(text, "nothing to do"));
  CHECK_EQ_I64(COMMAND(check, "run.yaml"), 0);
  CHECK(said("ok       route       mxfp4-row-sr: backend cpu executes all of it") && said("all is well"));
  const char *line = strstr(text, "made/t.tokens: "); /* what is left over: tokens without a sample of 64 */
  long long tokens = 0, samples = 0, left = 0;
  CHECK(line && sscanf(line, "made/t.tokens: %lld tokens, %lld samples of 64 and %lld tokens over", &tokens, &samples, &left) == 3);
  CHECK(samples == (tokens - 1) / 64 && left == (tokens - 1) % 64);

  CHECK(unlink("made/v.tokens") == 0);
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml"), ERROR_DATA);
  CHECK(said("made/t.tokens exists and made/v.tokens does not (--force makes both anew)"));
  put("made/v.tokens", "not a stream");
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml"), ERROR_DATA);
  CHECK(said("made/v.tokens") && said("(--force makes it anew)"));
  CHECK_EQ_I64(COMMAND(check, "run.yaml"), ERROR_DATA);
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--force"), 0);

  /* Streams that other settings made are not taken for these. */
  static const char *const changes[][2] = {
      {"data.seed=2", "made with other settings: seed=1, now seed=2"}, {"data.tokens=5", "tokens=0, now tokens=5"},
      {"data.bos=false", "bos=true, now bos=false"}, {"data.dedup=minhash", "dedup=exact, now dedup=minhash"},
      {"data.validation_fraction=0.125", "now validation_fraction=0.125"}, {"data.shuffle_documents=false", "shuffle_documents=true, now"}};
  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--set", changes[i][0]), ERROR_DATA);
    if (!said(changes[i][1]) || !said("--force makes it anew")) FAIL("%s", changes[i][0]);
  }
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml"), 0);
  CHECK(said("nothing to do"));

  CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--set", "data.train=made/t.index"), ERROR_DATA); /* the validation stream exists */
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--set", "data.train=made/t.index", "--force"), ERROR_CONFIG);
  CHECK(said("made/t.index, which is the name of an index"));
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--set", "data.sources=", "--force"), ERROR_CONFIG);
  CHECK(said("data.sources is empty"));
  CHECK_EQ_I64(COMMAND(prepare, "run.yaml", "--set", "data.sources=no-such-folder", "--force"), ERROR_DATA);
}

TEST(check_problems) {
  CHECK_EQ_I64(COMMAND(check, "absent.yaml"), ERROR_CONFIG);
  CHECK_EQ_I64(COMMAND(check, NULL), ERROR_USAGE);
  CHECK_EQ_I64(COMMAND(check, "run.yaml", "--set", "optimizer.lr=x", "--set", "nope=1"), ERROR_CONFIG);
  CHECK(said("PROBLEM  config      --set optimizer.lr: 'x'") && said("2 problems"));
  CHECK_EQ_I64(COMMAND(check, "run.yaml", "--set", "run.backend=sm999"), ERROR_DEVICE);
  CHECK(said("PROBLEM  device"));
  put("refused.yaml", "model: {preset: tiny}\n"
                      "data: {train: made/t.tokens, validation: made/v.tokens}\n"
                      "train: {updates: 10, seq_len: 64}\nvalidation: {samples: 4}\n"
                      "route:\n  name: custom:refused\n  linears:\n"
                      "    - {layers: all, fprop: {x: mxfp4/1x32/adaptive, w: mxfp4}, dgrad: {dy: mxfp4, w: same},"
                      " wgrad: {x: mxfp4, dy: mxfp4}}\n");
  CHECK_EQ_I64(COMMAND(check, "refused.yaml"), ERROR_DEVICE);
  CHECK(said("PROBLEM  route"));
  CHECK_EQ_I64(COMMAND(check, "run.yaml", "--set", "train.seq_len=65"), ERROR_CONFIG); /* 32 tokens a block */
  CHECK(said("PROBLEM  route"));
  CHECK_EQ_I64(COMMAND(check, "run.yaml", "--set", "validation.samples=100000"), ERROR_DATA);
  CHECK(said("validation.samples is 100000"));
  CHECK_EQ_I64(COMMAND(check, "run.yaml", "--set", "train.seq_len=1048576"), ERROR_DATA);
  CHECK_EQ_I64(COMMAND(check, "run.yaml", "--set", "model.preset=llama3-8b", "--set", "run.ranks=64",
                       "--set", "train.global_batch=64"), ERROR_SYSTEM);
  CHECK(said("PROBLEM  memory      64 ranks of "));
  put("file", "");
  CHECK_EQ_I64(COMMAND(check, "run.yaml", "--set", "run.folder=file/x"), ERROR_SYSTEM);
  CHECK(said("PROBLEM  folder"));
  CHECK(file_make_folder("runs/run/checkpoints/step-00000003", ERROR_SYSTEM, &failure));
  put("runs/run/checkpoints/step-00000003/manifest.json", "{");
  CHECK_EQ_I64(COMMAND(check, "run.yaml"), ERROR_CHECKPOINT);
  CHECK(said("PROBLEM  checkpoint"));
}

static char root[1024]; /* of the source tree */

TEST(help) {
  CHECK_EQ_I64(COMMAND(help, NULL), 0);
  CHECK(said("fp4d check") && said("   75  preempted"));
  CHECK_EQ_I64(COMMAND(help, "config"), 0);
  CHECK(said("warmup_updates"));
  CHECK_EQ_I64(COMMAND(help, "prepare"), 0);
  CHECK(said("fp4d prepare CONFIG [--set key=value]... [--force]"));
  CHECK_EQ_I64(COMMAND(help, "prepar"), ERROR_USAGE);
  CHECK(said("did you mean prepare?"));
  CHECK_EQ_I64(COMMAND(help, "comands"), ERROR_USAGE);
  CHECK(said("did you mean commands?"));
  CHECK_EQ_I64(COMMAND(help, "commands"), 0);
  for (const struct command *c = commands; c->name; c++) CHECK(said(c->summary) && said(c->details));
  char path[1100], *page;
  size_t bytes;
  snprintf(path, sizeof path, "%s/docs/commands.md", root);
  CHECK_EQ_I64(COMMAND(help, "commands", "--markdown"), 0);
  if (!file_read(path, 1 << 20, ERROR_SYSTEM, &page, &bytes, &failure)) {
    FAIL("%s", failure.message);
    return;
  }
  if (strcmp(page, text) != 0) FAIL("docs/commands.md is old: fp4d help commands --markdown > docs/commands.md");
  free(page);
}

int main(void) {
  if (!getcwd(root, sizeof root) || !rig_enter()) return 1;
  RUN(arguments);
  RUN(arguments_refused);
  RUN(table);
  RUN(prepare_and_check);
  RUN(check_problems);
  RUN(help);
  if (!rig_leave()) return 1;
  return test_report();
}
