/* Configurations: what is read, and what is said about what cannot be. */
#include "tests/config_rig.h"

static struct config other;

/* ---- what is read -------------------------------------------------------- */

TEST(defaults) {
  CHECK(parse(GOOD, NULL, 0));
  CHECK_STR(failure.message, "");
  CHECK_STR(config.run.name, "cfg");
  CHECK_STR(config.run.folder, "runs/cfg");
  CHECK_STR(config.run.backend, "cpu");
  CHECK_STR(config.route.name, "bf16");
  CHECK_STR(config.route_name, "bf16");
  CHECK_EQ_I64(config.route.n_spans, 1);
  CHECK_EQ_I64(config.route.span[0].last, 2);
  CHECK_EQ_I64(config.model.shape.hidden_size, 64);
  CHECK(config.train.master);
  CHECK_EQ_I64(config.train.param_dtype, DTYPE_BF16);
  CHECK_EQ_I64(config.train.gradient_dtype, DTYPE_F32);
  CHECK(config.optimizer.lr == 3e-4);
  CHECK_EQ_I64(config.divergence.nonfinite, DIVERGENCE_HALT);
}

TEST(numbers) {
  static const char *const spelled[] = {"1e-5", "1.0e-5", "1E-5", "0.00001", "10e-6", "+1e-05", ".00001"};
  for (size_t i = 0; i < sizeof spelled / sizeof *spelled; i++) {
    char text[200];
    snprintf(text, sizeof text, GOOD "optimizer:\n  lr: %s\n", spelled[i]);
    CHECK(parse(text, NULL, 0));
    CHECK(config.optimizer.lr == 1e-5);
  }
  static const struct {
    const char *text;
    int64_t value;
  } integers[] = {{"1e6", 1000000}, {"1.5e3", 1500}, {"10", 10}, {"10.0", 10}, {"2500e-2", 25}, {"+7", 7},
                  {"9223372036854775807", INT64_MAX}, {"0", 0}, {"0e99", 0}};
  for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
    char text[200];
    snprintf(text, sizeof text, GOOD "run: {seed: %s}\n", integers[i].text);
    CHECK(parse(text, NULL, 0));
    CHECK_EQ_I64(config.run.seed, integers[i].value);
  }
}

TEST(values_of_each_kind) {
  CHECK(parse("# comment\n"
              "run: {name: \"a.b-c\", folder: 'out put/x', threads: 3}\n"
              "model:\n  vocab_size: 300\n  hidden_size: 96\n  ffn_size: 256\n  n_layers: 3\n  n_heads: 4\n"
              "data:\n  sources:\n    - a, b.txt\n    - c.txt\n  train: t\n  validation: \"v\\\"w\"\n"
              "train: {param_dtype: fp32, recompute: every-nth, updates: 100}\n"
              "optimizer: {schedule: wsd, decay_updates: 10, warmup_updates: 90}\n"
              "log:\n", NULL, 0));
  CHECK_STR(failure.message, "");
  CHECK_STR(config.run.name, "a.b-c");
  CHECK_STR(config.run.folder, "out put/x");
  CHECK_EQ_I64(config.model.shape.n_kv_heads, 4);
  CHECK_EQ_I64(config.model.shape.head_dim, 24);
  CHECK(config.model.shape.norm_eps == 1e-5 && config.model.shape.rope_theta == 500000);
  CHECK_EQ_I64(config.data.n_sources, 2);
  CHECK_STR(config.data.source[0].path, "a, b.txt");
  CHECK_STR(config.data.validation, "v\"w");
  CHECK(!config.train.master);
  CHECK_EQ_I64(config.train.recompute, RECOMPUTE_EVERY_NTH);
  CHECK_EQ_I64(config.optimizer.schedule, SCHEDULE_WSD);
}

#define DATA(...) "model: {preset: tiny}\ndata:\n  train: t\n" __VA_ARGS__

TEST(sources) {
  CHECK(parse(DATA("  sources:\n    - a\n    - {path: x/a/, weight: 0}\n    - {path: ' +', format: raw-u16, eos: 7}\n"
                   "    - {path: /, name: a-3}\n  skip: [10-19, 25]\n"), NULL, 0));
  CHECK_STR(failure.message, "");
  CHECK_EQ_I64(config.data.n_sources, 4);
  static const char *const names[] = {"a", "a-2", "__", "a-3"};
  for (int i = 0; i < 4; i++) CHECK_STR(config.data.source[i].name, names[i]);
  CHECK(config.data.source[2].format == DATA_RAW_U16 && config.data.source[2].eos == 7 && config.data.source[2].bos == -1);
  CHECK(config.data.source[0].max_repetition == 1);
  CHECK_STR(config.data.source[0].text_key, "text");
  CHECK_EQ_I64(config.data.n_skips, 2);
  CHECK(config.data.skip[0].range[0] == 10 && config.data.skip[0].range[1] == 19 && config.data.skip[1].range[0] == 25 &&
        config.data.skip[1].range[1] == 25);
  CHECK(parse(DATA("  sources: [a, b]\n  stages: [{at: 0, weights: [1, 0]}, {at: 1e9, weights: [0.25, 0.75]}]\n"), NULL, 0));
  CHECK_EQ_I64(config.data.n_stages, 2);
  CHECK(config.data.stage[1].at == 1000000000 && config.data.stage[1].weight[1] == 0.75 && config.data.stage[1].n_weights == 2);
  const char *const sets[] = {"data.skip=3-4,9", "data.sources=q", "data.stages="};
  CHECK(parse(DATA("  sources: [a, b]\n  stages: [{at: 0, weights: [1, 0]}]\n"), sets, 3));
  CHECK(config.data.n_sources == 1 && config.data.n_stages == 0 && config.data.n_skips == 2 && config.data.skip[1].range[0] == 9);
}

static const struct {
  const char *text, *problem;
} broken_sources[] = {
    {DATA("  sources: [{name: x}]\n"), "cfg.yaml:4:13: data.sources[1].path: is missing"},
    {DATA("  sources: [a, {path: b, wieght: 1}]\n"), "cfg.yaml:4:26: data.sources[2].wieght: unknown key"},
    {DATA("  sources: [{path: b, weight: -1}]\n"), "cfg.yaml:4:31: data.sources[1].weight: '-1' is out of range"},
    {DATA("  sources: [{path: b, max_repetition: 0}]\n"), "cfg.yaml:4:39: data.sources[1].max_repetition: '0' is out of range"},
    {DATA("  sources: [{path: b, format: arrow}]\n"), "cfg.yaml:4:31: data.sources[1].format: 'arrow' is not one of: auto, text"},
    {DATA("  sources: [{path: b, name: x}, {path: c, name: x}]\n"), "cfg.yaml:4:12: data.sources: two sources are called x"},
    {DATA("  sources: [{path: b, weight: 1}, c]\n"), "cfg.yaml:4:12: data.sources: c has no weight, others have"},
    {DATA("  sources: [{path: b, max_repetition: 4}]\n"), "cfg.yaml:4:12: data.sources: b has max_repetition 4 and no weight"},
    {DATA("  sources: [{path: b, weight: 1}]\n  stages: [{at: 0, weights: [1]}]\n"), "cfg.yaml:5:11: data.stages: stand in place of"},
    {DATA("  sources: [b]\n  stages: [{at: 0, weights: [1, 2]}]\n"), "cfg.yaml:5:11: data.stages: stage 1 has 2 weights for 1 sources"},
    {DATA("  sources: [b]\n  stages: [{at: 0, weights: [0]}]\n"), "cfg.yaml:5:11: data.stages: stage 1 gives no source a weight"},
    {DATA("  sources: [b]\n  stages: [{at: 5, weights: [1]}]\n"), "cfg.yaml:5:11: data.stages: stage 1 begins at 5 tokens"},
    {DATA("  sources: [b]\n  stages: [{weights: [1]}]\n"), "cfg.yaml:5:12: data.stages[1].at: is missing"},
    {DATA("  sources: [b]\n  stages: [{at: 0, weights: 1}]\n"), "cfg.yaml:5:29: data.stages[1].weights: a list is wanted, not a single value"},
    {DATA("  sources: [b]\n  stages: [{at: 0, weights: [x]}]\n"), "cfg.yaml:5:30: data.stages[1].weights: 'x' is not a number"},
    {DATA("  sources: [b]\n  stages: [1]\n"), "cfg.yaml:5:12: data.stages[1]: a mapping is wanted, not a single value"},
    {DATA("  skip: [5-3]\n"), "cfg.yaml:4:10: data.skip[1]: '5-3': the first is above the last"},
    {DATA("  skip: [3-]\n"), "cfg.yaml:4:10: data.skip[1]: '3-' is neither FIRST-LAST nor a number"},
    {DATA("  skip: [99999999999999999999-]\n"), "cfg.yaml:4:10: data.skip[1]: '99999999999999999999-' is neither"},
    {DATA("  skip: [99999999999999999999]\n"), "cfg.yaml:4:10: data.skip[1]: '99999999999999999999' does not fit 64 bits"},
    {DATA("  skip: [3-9, 9-12]\n"), "cfg.yaml:4:9: data.skip: 9-12 does not come after 3-9"},
    {DATA("  tokenizer: ''\n"), "cfg.yaml:4:14: data.tokenizer: is empty"},
};

TEST(broken_sources) {
  for (size_t i = 0; i < sizeof broken_sources / sizeof *broken_sources; i++) {
    CHECK(!parse(broken_sources[i].text, NULL, 0));
    if (lines(failure.message) != 1 || strncmp(failure.message, broken_sources[i].problem, strlen(broken_sources[i].problem)) != 0)
      FAIL("%s: got\n%s\nexpected\n%s", broken_sources[i].text, failure.message, broken_sources[i].problem);
  }
}

TEST(presets) {
  CHECK(parse("model: {preset: llama3.1-8b}\ndata: {train: t}\n", NULL, 0));
  CHECK_EQ_I64(config.model.shape.head_dim, 128);
  CHECK(config.model.shape.rope_scaling.enabled);
  CHECK(config.model.shape.rope_scaling.factor == 8);
  CHECK(parse("model: {preset: llama3.1-8b, rope_scaling: none, hidden_size: 2048}\ndata: {train: t}\n", NULL, 0));
  CHECK(!config.model.shape.rope_scaling.enabled);
  CHECK(config.model.shape.rope_scaling.factor == 0);
  CHECK_EQ_I64(config.model.shape.head_dim, 64);
  CHECK(parse("model: {preset: llama3.1-8b, rope_scaling: {factor: 32}}\ndata: {train: t}\n", NULL, 0));
  CHECK(config.model.shape.rope_scaling.factor == 32);
  CHECK_EQ_I64(config.model.shape.rope_scaling.original_max_position, 8192);
  const char *const sets[] = {"model.rope_scaling=none", "model.rope_scaling.factor=4", "model.rope_scaling.low_freq_factor=1",
                              "model.rope_scaling.high_freq_factor=4", "model.rope_scaling.original_max_position=256"};
  CHECK(parse(GOOD, sets, 5));
  CHECK(config.model.shape.rope_scaling.enabled && config.model.shape.rope_scaling.factor == 4);
  CHECK(parse(GOOD, sets + 1, 4));
  const char *const off[] = {"model.rope_scaling.factor=4", "model.rope_scaling=none"};
  CHECK(parse(GOOD, off, 2));
  CHECK(!config.model.shape.rope_scaling.enabled);
}

TEST(route_mappings) {
  CHECK(parse(GOOD "route: mxfp4-row-sr\n", NULL, 0));
  other = config;
  CHECK(parse(GOOD "route:\n  name: mxfp4-row-sr\n  linears:\n" SPAN("all"), NULL, 0));
  CHECK_STR(failure.message, "");
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
    CHECK(encoding_equal(&config.route.span[0].linear.operand[role], &other.route.span[0].linear.operand[role]));

  CHECK(parse(GOOD "route:\n  name: mine\n  linears:\n" SPAN("2") SPAN("1-1") "  attention: {qk: bf16, do: e5m2}\n", NULL, 0));
  CHECK_EQ_I64(config.route.n_spans, 2);
  CHECK_EQ_I64(config.route.span[0].first, 2);
  CHECK_EQ_I64(config.route.attention_d_out, FORMAT_E5M2);
  CHECK_EQ_I64(config.route.attention_pv, FORMAT_BF16);

  /* linears of a block apart */
#define SITES(words, x) "    - {layers: all, sites: " words ", fprop: {x: " x ", w: " x "}, dgrad: {dy: bf16, w: bf16}, wgrad: {x: bf16, dy: bf16}}\n"
  CHECK(parse(GOOD "route:\n  name: mine\n  linears:\n" SITES("ffn", "bf16") SITES("qkv", "nvfp4") SITES("out", "e4m3"), NULL, 0));
  CHECK_STR(failure.message, "");
  CHECK_EQ_I64(route_linear(&config.route, 1, LINEAR_QKV)->operand[FPROP_X].format, FORMAT_NVFP4);
  CHECK_EQ_I64(route_linear(&config.route, 1, LINEAR_OUT)->operand[FPROP_W].format, FORMAT_E4M3);
  CHECK_EQ_I64(route_linear(&config.route, 0, LINEAR_DOWN)->operand[FPROP_X].format, FORMAT_BF16);
  CHECK(!parse(GOOD "route:\n  name: mine\n  linears:\n" SITES("ffn", "bf16") SITES("out", "e4m3"), NULL, 0));
  CHECK(strstr(failure.message, "no entry covers blocks 1-2 of 2 (qkv linears)"));
  CHECK(!parse(GOOD "route:\n  name: mine\n  linears:\n" SITES("all", "bf16") SITES("out", "e4m3"), NULL, 0));
  CHECK(strstr(failure.message, "layers \"all\" overlap the span of blocks 1-2 (out linears)"));
  CHECK(!parse(GOOD "route:\n  name: mine\n  linears:\n" SITES("wq", "bf16"), NULL, 0));
  CHECK(strstr(failure.message, "sites \"wq\": not of all, attention, ffn, qkv, out, gate_up, down"));

  /* attention's numbers; a table's row has none */
#define NUMBERS(words) GOOD "route:\n  name: mine\n  linears:\n" SPAN("all") "  attention: {qk: nvfp4, " words "}\n"
  CHECK(parse(NUMBERS("pv: mxfp4, do: e5m2, p_slope: 1.6, p_offset: 0.95, do_lift: 1048576"), NULL, 0));
  CHECK_STR(failure.message, "");
  struct attention_formats numbers = route_attention(&config.route);
  CHECK(numbers.p_slope == 1.6f && numbers.p_offset == 0.95f && numbers.d_out_lift == 0x1p20f);
  char *dumped = config_dump(&config);
  CHECK(strstr(dumped, "do: e5m2, p_slope: 1.6") && strstr(dumped, "do_lift: 1048576}"));
  free(dumped);
  CHECK(!parse(NUMBERS("pv: e4m3, do: e5m2, p_slope: 1.5"), NULL, 0));
  CHECK(strstr(failure.message, "route.attention.p_slope: has no meaning with route.attention.pv e4m3"));
  CHECK(!parse(NUMBERS("pv: mxfp4, p_offset: 1.5, do_lift: 2"), NULL, 0));
  CHECK(strstr(failure.message, "p_offset: has no meaning without") && strstr(failure.message, "do_lift: has no meaning with route.attention.do bf16"));
  CHECK(!parse(NUMBERS("do: e4m3, do_lift: 3"), NULL, 0));
  CHECK(strstr(failure.message, "3 is no power of two"));
  CHECK(!parse(NUMBERS("pv: mxfp4, p_slope: 1e-50, p_offset: 1"), NULL, 0));
  CHECK(strstr(failure.message, "p_slope: 1e-50 is 0 in FP32"));
  CHECK(!parse(NUMBERS("pv: mxfp4, p_slope: 1.5, p_offset: -4"), NULL, 0)); /* 1.5 log2 6 = 3.877 */
  CHECK(strstr(failure.message, "the largest P has the code 0"));
  CHECK(!parse(NUMBERS("pv: mxfp4, p_slope: 1.5, p_offset: -3.63"), NULL, 0));
  CHECK(parse(NUMBERS("pv: mxfp4, p_slope: 1.5, p_offset: -3.62"), NULL, 0));
  CHECK(!parse(GOOD "route:\n  name: bf16\n  linears:\n    - {layers: all, fprop: {x: bf16, w: bf16}, dgrad: {dy: bf16}, wgrad: {x: bf16, dy: bf16}}\n"
                    "  attention: {do: e5m2, do_lift: 1}\n", NULL, 0));
  CHECK(strstr(failure.message, "is the name of a built-in route"));

  const char *part = "route.head=fp32";
  CHECK(parse(GOOD "route:\n  name: mine\n  linears:\n" SPAN("all"), &part, 1));
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) CHECK_EQ_I64(config.route.head.operand[role].format, FORMAT_F32);
  CHECK(!parse(GOOD, &part, 1));
  CHECK_STR(failure.message, "--set route.head: the route is given by name; parts can be set of a route that is a mapping");

  /* a head of its own, as one word and as a mapping; the later one holds */
  const struct linear_route *head = &config.route.head;
  CHECK(parse(GOOD "route:\n  name: custom:mine\n  head: mxfp4\n  linears:\n" SPAN("all"), NULL, 0));
  CHECK_STR(config.route_name, "custom:mine");
  CHECK(head->operand[FPROP_X].block == BLOCK_1X32 && head->operand[FPROP_W].block == BLOCK_2D32);
  CHECK(encoding_equal(&head->operand[FPROP_W], &head->operand[DGRAD_W]) && config.route.forward_tail == 0);
  static const char mapping[] = GOOD "route:\n  name: custom:mine\n  forward_bf16_tail: 0.25\n"
                                "  head: {fprop: {x: fp8, w: fp8}, dgrad: {dy: e5m2, w: e4m3/row}, wgrad: {x: fp8, dy: e5m2, hadamard: signed-16}}\n"
                                "  linears:\n" SPAN("all");
  CHECK(parse(mapping, NULL, 0));
  CHECK_STR(failure.message, "");
  CHECK(head->operand[DGRAD_DY].format == FORMAT_E5M2 && head->operand[DGRAD_W].scale == SCALE_ROW &&
        head->operand[WGRAD_X].hadamard == HADAMARD_SIGNED_16 && config.route.forward_tail == 0.25);
  char *dump = config_dump(&config);
  CHECK(config_parse(&other, dump, "saved", NULL, 0, &failure) && same_linear(head, &other.route.head) &&
        other.route.forward_tail == 0.25);
  free(dump);
  part = "route.head=fp32";
  CHECK(parse(mapping, &part, 1));
  CHECK_EQ_I64(head->operand[WGRAD_DY].format, FORMAT_F32);
  part = "route.head.dgrad.w=fp32";
  CHECK(parse(mapping, &part, 1));
  CHECK(head->operand[DGRAD_W].format == FORMAT_F32 && head->operand[DGRAD_DY].format == FORMAT_E5M2);

  CHECK(!parse(GOOD "route:\n  name: r\n  head: {fprop: {w: fp8}}\n  linears:\n" SPAN("all"), NULL, 0));
  CHECK_STR(failure.message, "cfg.yaml:5:9: route.head.fprop.x: is missing\n"
                             "cfg.yaml:5:9: route.head.dgrad.dy: is missing\n"
                             "cfg.yaml:5:9: route.head.wgrad.x: is missing\n"
                             "cfg.yaml:5:9: route.head.wgrad.dy: is missing");
  part = "route=nvfp4-te/forward-bf16-tail";
  CHECK(parse(GOOD, &part, 1));
  CHECK(config.route.forward_tail == 0.1);
}

TEST(set) {
  const char *const sets[] = {"optimizer.lr=1E-3", "train.updates=1e3", "data.sources=a,b c", "route=fp32",
                              "run.name=x", "data.validation=v=w", "checkpoint.at_end=false", "train.updates=5"};
  CHECK(parse(GOOD, sets, 8));
  CHECK_STR(failure.message, "");
  CHECK(config.optimizer.lr == 1e-3);
  CHECK_EQ_I64(config.train.updates, 5);
  CHECK_EQ_I64(config.data.n_sources, 2);
  CHECK_STR(config.data.source[1].path, "b c");
  CHECK_STR(config.route.name, "fp32");
  CHECK_STR(config.run.folder, "runs/x");
  CHECK_STR(config.data.validation, "v=w");
  CHECK(!config.checkpoint.at_end);
}

static const struct {
  const char *set, *message;
} broken_sets[] = {
    {"optimizer.lr=abc", "--set optimizer.lr: 'abc' is not a number; a number is wanted"},
    {"optimizer.lrr=1", "--set optimizer.lrr: unknown key; did you mean optimizer.lr?"},
    {"lr=1", "--set lr: unknown key; did you mean optimizer.lr?"},
    {"optimiser.lr=1", "--set optimiser.lr: unknown key; did you mean optimizer.lr?"},
    {"train=1", "--set train: is a section; set one of its keys: train.updates=..."},
    {"train.updates", "--set: 'train.updates' is not of the form section.key=value"},
    {"=1", "--set: '=1' is not of the form section.key=value"},
    {"", "--set: '' is not of the form section.key=value"},
    {"train.updates=", "--set train.updates: has no value; an integer is wanted"},
    {"include=a", "--set include: is for files only"},
    {"route.linears=all", "--set route.linears: the route is given by name; parts can be set of a route that is a mapping"},
    {"route=mxfp4-row-rs", "--set route: no route is named \"mxfp4-row-rs\""},
    {"data.train=\xff", "--set data.train: is not text in UTF-8"},
    {"data.train=a\nb", "--set data.train: 'a\\x0Ab' holds a control character"},
    {"data.sources=a,,b", "--set data.sources: an item is empty"},
    {"checkpoint.at_end=yes", "--set checkpoint.at_end: 'yes' is not accepted; write true"},
};

TEST(set_refused) {
  for (size_t i = 0; i < sizeof broken_sets / sizeof *broken_sets; i++) {
    CHECK(!parse_set(broken_sets[i].set));
    CHECK_EQ_I64(failure.code, ERROR_CONFIG);
    CHECK_EQ_I64(lines(failure.message), 1);
    if (strncmp(failure.message, broken_sets[i].message, strlen(broken_sets[i].message)) != 0)
      FAIL("--set %s: \"%s\", expected \"%s\"", broken_sets[i].set, failure.message, broken_sets[i].message);
  }
}

/* ---- what is refused -------------------------------------------------------- */

/* Appended to GOOD: their first line is line 3. Each gives exactly one problem. */
static const struct {
  const char *text, *problem;
} broken[] = {
    {"optimizer:\n  lr: abc\n", "4:7: optimizer.lr: 'abc' is not a number; a number is wanted"},
    {"optimizer:\n  lr:\n", "4:6: optimizer.lr: has no value; a number is wanted"},
    {"optimizer: {lr: \"1e-5\"}\n", "3:17: optimizer.lr: '1e-5' is text because of its quotes; write the number without them"},
    {"optimizer: {lr: .inf}\n", "3:17: optimizer.lr: '.inf' is not accepted; a finite number is wanted"},
    {"optimizer: {lr: -.Inf}\n", "3:17: optimizer.lr: '-.Inf' is not accepted"},
    {"optimizer: {lr: NaN}\n", "3:17: optimizer.lr: 'NaN' is not accepted"},
    {"optimizer: {lr: 1e999}\n", "3:17: optimizer.lr: '1e999' is too large for a double"},
    {"optimizer: {lr: 1e-999}\n", "3:17: optimizer.lr: '1e-999' is too small for a double"},
    {"optimizer: {lr: -1}\n", "3:17: optimizer.lr: '-1' is out of range: 0 .. 100"},
    {"optimizer: {beta2: 1}\n", "3:20: optimizer.beta2: '1' is out of range: >= 0, < 1"},
    {"optimizer: {lr: 1,5}\n", "3:19: optimizer.5: unknown key"},
    {"optimizer: {lr: 0x1p3}\n", "3:17: optimizer.lr: '0x1p3' is not decimal"},
    {"optimizer: {clip: -0.5}\n", "3:19: optimizer.clip: '-0.5' is out of range: 0 .. 1e+30"},
    {"train: {updates: 010}\n", "3:18: train.updates: '010' begins with 0, which some read as octal"},
    {"train: {updates: 0x10}\n", "3:18: train.updates: '0x10' is not decimal"},
    {"train: {updates: 0o10}\n", "3:18: train.updates: '0o10' is not decimal"},
    {"train: {updates: 1_000}\n", "3:18: train.updates: '1_000' is not a number; write it without separators"},
    {"train: {updates: 1.5}\n", "3:18: train.updates: '1.5' is not an integer"},
    {"train: {updates: 1e-1}\n", "3:18: train.updates: '1e-1' is not an integer"},
    {"train: {updates: 9223372036854775808}\n", "3:18: train.updates: '9223372036854775808' does not fit 64 bits"},
    {"train: {updates: 1e99999}\n", "3:18: train.updates: '1e99999' does not fit 64 bits"},
    {"train: {updates: 0}\n", "3:18: train.updates: '0' is out of range: 1 .. 2147483647"},
    {"train: {updates: 190:20:30}\n", "3:18: train.updates: '190:20:30' is not a number"},
    {"train: {updates: true}\n", "3:18: train.updates: 'true' is not a number; an integer is wanted"},
    {"train: {updates: [1]}\n", "3:18: train.updates: a single value is wanted, not a list"},
    {"train: {updates: {a: 1}}\n", "3:18: train.updates: a single value is wanted, not a mapping"},
    {"train: {master: yes}\n", "3:17: train.master: 'yes' is not accepted; write true"},
    {"train: {master: Off}\n", "3:17: train.master: 'Off' is not accepted; write false"},
    {"train: {gradient_dtype: fp16}\n", "3:25: train.gradient_dtype: 'fp16' is not one of: bf16, fp32"},
    {"train: {master: 2}\n", "3:17: train.master: '2' is neither true nor false"},
    {"train: {recompute: every_nth}\n", "3:20: train.recompute: 'every_nth' is not one of: none, boundaries, every-nth, all; did you mean every-nth?"},
    {"log: {level: loud}\n", "3:14: log.level: 'loud' is not one of: error, warning, info, debug"},
    {"run: {name: a/b}\n", "3:13: run.name: 'a/b': only letters, digits"},
    {"run: {name: \"\"}\n", "3:13: run.name: is empty"},
    {"run: {folder: ~}\n", "3:15: run.folder: has no value; write \"\" for an empty text"},
    {"run: {folder: \"a\\0b\"}\n", "3:15: folder: text with a zero byte"},
    {"run: {folder: \"a\\x1b[2J\"}\n", "3:15: run.folder: 'a\\x1B[2J' holds a control character"},
    {"run: 5\n", "3:6: run: a section is a mapping of keys, not a single value"},
    {"run: [a]\n", "3:6: run: a section is a mapping of keys, not a list"},
    {"trian: {updates: 1}\n", "3:1: trian: unknown key; did you mean train?"},
    {"lr: 1\n", "3:1: lr: unknown key; did you mean optimizer.lr?"},
    {"run: {every: 1}\n", "3:7: run.every: unknown key; did you mean checkpoint.every or validation.every or log.every?"},
    {"zzzzzz: 1\n", "3:1: zzzzzz: unknown key; `fp4d help config` lists them all"},
    {"optimizer.lr: 1\n", "3:1: optimizer.lr: unknown key; dots are for --set, a file nests mappings"},
    {"model: {preset: tiny}\n", "3:1: model: given twice; first in line 1"},
    {"log: {every: 1, level: info, every: 2}\n", "3:30: every: given twice; first in line 3"},
    {"log: {every: &a 1}\n", "3:14: anchor 'a': anchors are not accepted"},
    {"log: {every: *a}\n", "3:14: alias 'a': aliases are not accepted"},
    {"log: {every: !!int 1}\n", "3:14: tag 'tag:yaml.org,2002:int': tags are not accepted"},
    {"log: {[a]: 1}\n", "3:7: a key must be a word, not a list or mapping"},
    {"---\nlog: {every: 1}\n", "3:1: a second document begins here; a file holds one configuration"},
    {"log: {every: 1\n", "4:1: not YAML: did not find expected ',' or '}'"},
    {"log:\n\tevery: 1\n", "4:1: not YAML: found character that cannot start any token, while scanning for the next token (a tab: indent with spaces)"},
    {"run: {name: \x01}\n", "3:13: not text in UTF-8: control characters are not allowed"},
    {"run: {name: \xff}\n", "3:13: not text in UTF-8: invalid leading UTF-8 octet"},
    {"run: {name: \xed\xa0\x80}\n", "3:13: not text in UTF-8: invalid Unicode character"},
    {"include: no-such-file.yaml\n", "3:10: include: cannot open no-such-file.yaml: No such file or directory"},
    {"include: {a: b}\n", "3:10: include: a file's name is wanted"},
    {"fault: nan@x\n", "3:8: fault: 'nan@x' is not KIND@UPDATE"},
    {"fault: boom@3\n", "3:8: fault: 'boom@3' is not KIND@UPDATE"},
    /* several keys together */
    {"train: {global_batch: 10, local_batch: 4}\n", "3:23: train.global_batch: 10 is not a multiple of train.local_batch 4"},
    {"train: {global_batch: 12, local_batch: 2, accumulation: 4}\n", "3:57: train.accumulation: global_batch 12 is not a multiple of local_batch 2 x accumulation 4"},
    {"run: {ranks: 9}\ntrain: {global_batch: 16, local_batch: 2}\n", "4:23: train.global_batch: 16 is less than train.local_batch 2 x run.ranks 9"},
    {"train: {param_dtype: fp32, master: true}\n", "3:36: train.master: FP32 master weights need train.param_dtype bf16"},
    {"train: {updates: 10}\noptimizer: {warmup_updates: 11}\n", "4:29: optimizer.warmup_updates: 11 is more than train.updates 10"},
    {"optimizer: {schedule: wsd, warmup_updates: 600, decay_updates: 401}\n", "3:64: optimizer.decay_updates: warmup_updates 600 and decay_updates 401 are more than train.updates 1000"},
    {"optimizer: {schedule: wsd}\n", "optimizer.decay_updates: optimizer.schedule wsd needs the length of its decay"},
    {"optimizer: {decay_updates: 4}\n", "3:28: optimizer.decay_updates: has no meaning with optimizer.schedule constant"},
    {"optimizer: {schedule: cosine, min_lr: 1e-2}\n", "3:39: optimizer.min_lr: 0.01 is above optimizer.lr 0.0003"},
    {"validation: {every: 5}\n", "3:21: validation.every: needs data.validation"},
    {"train: {updates: 2147483647, global_batch: 16777216}\n", "3:18: train.updates: 2147483647 updates of train.global_batch 16777216 samples are more than 2^40 samples"},
    /* routes */
    {"route: mxfp5\n", "3:8: route: no route is named \"mxfp5\" (fp32, bf16,"},
    {"route: [a]\n", "3:8: route: a single value is wanted, not a list"},
    {"route: {name: r}\n", "route.linears: is missing"},
    {"route: {name: r, linears: all}\n", "3:27: route.linears: a list is wanted, not a single value"},
    {"route: {name: r, linears: [all]}\n", "3:28: route.linears[1]: a mapping is wanted, not a single value"},
    {"route:\n  linears:\n" SPAN("all"), "route.name: is missing"},
    {"route:\n  name: bf16\n  linears:\n" SPAN("all"), "4:9: route.name: 'bf16' is the name of a built-in route, and this mapping is not that route"},
    {"route:\n  name: r\n  linears:\n" SPAN("1"), "6:5: route.linears: no entry covers blocks 2-2 of 2 (all linears)"},
    {"route:\n  name: r\n  linears:\n" SPAN("all") SPAN("2"), "7:7: route.linears[2]: layers \"2\" overlap the span of blocks 1-2 (all linears)"},
    {"route:\n  name: r\n  linears:\n" SPAN("1-3"), "6:7: route.linears[1]: layers \"1-3\": outside the model's blocks 1-2"},
    {"route:\n  name: r\n  head: fp7\n  linears:\n" SPAN("all"), "5:9: route.head: fprop x: \"fp7\" is no format"},
    {"route:\n  name: r\n  head: {fprop: {x: fp8, w: fp8}, dgrad: {dy: e5m2}, wgrad: {x: e4m3}}\n  linears:\n" SPAN("all"), "5:9: route.head.wgrad.dy: is missing"},
    {"route:\n  name: r\n  head: {fprop: {x: fp8, W: fp8, w: fp8}, dgrad: {dy: e5m2}, wgrad: {x: e4m3, dy: e5m2}}\n  linears:\n" SPAN("all"), "5:26: route.head.fprop.W: unknown key"},
    {"route:\n  name: r\n  head: mxfp4/sr\n  linears:\n" SPAN("all"), "5:9: route.head: fprop x: \"mxfp4/sr\": only dy is rounded stochastically"},
    {"route:\n  name: r\n  forward_bf16_tail: 1\n  linears:\n" SPAN("all"), "5:22: route.forward_bf16_tail: '1' is out of range"},
    {"route:\n  name: te-native\n  forward_bf16_tail: 0.1\n  linears:\n" SPAN("all"), "4:9: route.name: 'te-native' is the name of a built-in route"},
    {"route: {name: a b, linears: [{fprop: {x: bf16, w: bf16}, dgrad: {dy: bf16}, wgrad: {x: bf16, dy: bf16}}]}\n", "3:15: route.name: 'a b': only letters, digits"},
    {"route: {name: r, linears: [{fprop: {x: mxfp4, w: mxfp4}, dgrad: {dy: mxfp4}, wgrad: {x: mxfp4/signed-32, dy: mxfp4}}]}\n", "3:28: route.linears[1]: layers \"all\": wgrad dy is transformed by none and wgrad x by signed-32: both must be by the same"},
    {"route: {name: r, linears: [{fprop: {x: mxfp4, w: mxfp4}, dgrad: {dy: mxfp4}, wgrad: {x: mxfp4/signed-32, dy: mxfp4/signed-32, hadamard: plain-16}}]}\n", "3:28: route.linears[1]: layers \"all\": hadamard plain-16, but wgrad dy says signed-32"},
    {"route:\n  name: r\n  attention: bf16\n  linears:\n" SPAN("all"), "5:14: route.attention: a mapping of its keys is wanted, not a single value"},
    {"route: {name: r, linears: [{fprop: {x: bf16, w: bf16}, dgrad: {dy: bf16}, wgrad: {x: bf16}}]}\n", "3:28: route.linears[1].wgrad.dy: is missing"},
    {"route: {name: r, linears: [{fprop: {x: bf16, W: bf16, w: bf16}, dgrad: {dy: bf16}, wgrad: {x: bf16, dy: bf16}}]}\n", "3:46: route.linears[1].fprop.W: unknown key"},
};

TEST(refused) {
  size_t n = sizeof broken / sizeof *broken;
  CHECK(n >= 40);
  for (size_t i = 0; i < n; i++) {
    char text[2000], expected[400];
    snprintf(text, sizeof text, "%s%s", GOOD, broken[i].text);
    bool placed = broken[i].problem[0] >= '0' && broken[i].problem[0] <= '9';
    snprintf(expected, sizeof expected, "cfg.yaml:%s%s", placed ? "" : " ", broken[i].problem);
    CHECK(!parse(text, NULL, 0));
    CHECK_EQ_I64(failure.code, ERROR_CONFIG);
    if (lines(failure.message) != 1 || strncmp(failure.message, expected, strlen(expected)) != 0)
      FAIL("%s: got\n%s\nexpected\n%s", broken[i].text, failure.message, expected);
  }
}

/* Whole files. */
static const struct {
  const char *text, *problem;
} broken_files[] = {
    {"", "cfg.yaml: is empty"},
    {"# only a comment\n", "cfg.yaml: is empty"},
    {"---\n...\n", "cfg.yaml: is empty"},
    {"log: {every: [[[[[[[[[[[[1]]]]]]]]]]]]}\n", "cfg.yaml:1:22: nested too deeply"},
    {"just words\n", "cfg.yaml:1:1: a mapping of sections is wanted, not a single value"},
    {"- a\n- b\n", "cfg.yaml:1:1: a mapping of sections is wanted, not a list"},
    {"\x7f" "ELF\x02\x01\x01", "cfg.yaml:1:1: not text in UTF-8"},
    {"model: {preset: tiny}\n", "cfg.yaml: data.train: is missing: the token stream to train on"},
    {"model: {preset: llama3-8B}\ndata: {train: t}\n", "cfg.yaml:1:17: model.preset: 'llama3-8B' is not one of: llama3-8b, llama3.1-8b"},
    {"model: {preset: tiny, vocab_size: 257}\ndata: {train: t}\n", "cfg.yaml:1:35: model.vocab_size: 257 is less than the 258 ids of data.tokenizer bytes"},
    {"model: {preset: tiny, hidden_size: 66}\ndata: {train: t}\n", "cfg.yaml: model.head_dim: hidden_size 66 is not a multiple of n_heads 4; give head_dim"},
    {"model: {preset: tiny, n_kv_heads: 3}\ndata: {train: t}\n", "cfg.yaml: model.n_heads: n_heads 4: must be a multiple of n_kv_heads 3"},
    {"model: {preset: tiny, rope_scaling: {factor: 8}}\ndata: {train: t}\n", "cfg.yaml: model.rope_scaling.low_freq_factor: is missing: rope_scaling needs all four keys"},
    {"model: {preset: tiny, rope_scaling: linear}\ndata: {train: t}\n", "cfg.yaml:1:37: model.rope_scaling: 'linear': a mapping of its keys is wanted, or none"},
    {"model: {preset: tiny}\ndata: {train: t, validation: t}\n", "cfg.yaml:2:30: data.validation: is the same file as data.train"},
    {"model: {preset: tiny}\ndata: {train: t, sources: a.txt}\n", "cfg.yaml:2:27: data.sources: a list is wanted, not a single value"},
    {"model: {preset: tiny}\ndata: {train: t, sources: [a, [b]]}\n", "cfg.yaml:2:31: data.sources[2]: a mapping or a path is wanted, not a list"},
    {"model: {preset: tiny}\ndata: {train: t, sources: [a, ]}\ndata: {}\n", "cfg.yaml:3:1: data: given twice; first in line 2"},
    {"data: {train: t}\n", "cfg.yaml: model.vocab_size: is missing: give it, or model.preset"},
};

TEST(refused_files) {
  for (size_t i = 0; i < sizeof broken_files / sizeof *broken_files; i++) {
    CHECK(!parse(broken_files[i].text, NULL, 0));
    CHECK_EQ_I64(failure.code, ERROR_CONFIG);
    if (strncmp(failure.message, broken_files[i].problem, strlen(broken_files[i].problem)) != 0)
      FAIL("%s: got\n%s\nexpected\n%s", broken_files[i].text, failure.message, broken_files[i].problem);
  }
}

TEST(all_at_once) {
  const char *const sets[] = {"train.updates=x", "nope=1"};
  CHECK(!parse("model: {preset: tiny, n_layers: zero}\n"
               "data: {train: t, dedup: fuzzy}\n"
               "route: nvfp5\n"
               "optimizer: {lr: abc, beta1: 2, schedule: wdc}\n"
               "train: {global_batch: 9, local_batch: 2}\n"
               "colour: red\n", sets, 2));
  CHECK_STR(failure.message,
            "cfg.yaml:1:33: model.n_layers: 'zero' is not a number; an integer is wanted\n"
            "cfg.yaml:2:25: data.dedup: 'fuzzy' is not one of: none, exact, minhash\n"
            "cfg.yaml:4:17: optimizer.lr: 'abc' is not a number; a number is wanted\n"
            "cfg.yaml:4:29: optimizer.beta1: '2' is out of range: >= 0, < 1\n"
            "cfg.yaml:4:42: optimizer.schedule: 'wdc' is not one of: constant, cosine, wsd\n"
            "cfg.yaml:6:1: colour: unknown key; `fp4d help config` lists them all\n"
            "--set train.updates: 'x' is not a number; an integer is wanted\n"
            "--set nope: unknown key; `fp4d help config` lists them all\n"
            "cfg.yaml:3:8: route: no route is named \"nvfp5\" (fp32, bf16, te-native, te-last4-bf16, nvfp4-global, mxfp4-row-sr, "
            "nvfp4-local, nvfp4-local-h16, depth-27-5, mxfp4-row-sr-h32, operand-hybrid-h16, operand-hybrid-h32, fp8, "
            "nvfp4-te/forward-bf16-tail, nvfp4-local-pow2, nvfp4-local-pow2-h16, attention-fp8, attention-fp8-proj-e4m3, "
             "attention-fp8-proj-nvfp4, attention-mxfp4, attention-mxfp4-proj-e4m3, attention-mxfp4-proj-nvfp4)\n"
            "cfg.yaml:5:23: train.global_batch: 9 is not a multiple of train.local_batch 2");

  /* More than a message holds: the first ones, and how many are left. */
  static char many[60 * 200];
  size_t at = 0;
  for (int i = 0; i < 150; i++) at += (size_t)snprintf(many + at, sizeof many - at, "unheard-of-key-number-%d: 1\n", i);
  CHECK(!parse(many, NULL, 0));
  int shown = lines(failure.message) - 1, left = -1;
  const char *last = strrchr(failure.message, '\n');
  CHECK(last && sscanf(last, "\nand %d more problems", &left) == 1);
  CHECK_EQ_I64(shown + left, 150 + 6); /* and what is missing: five of the model, data.train */
  CHECK(shown >= 30);

  /* A text as long as it may be, and longer. */
  char set[2000] = "data.train=";
  memset(set + 11, 'a', 511);
  CHECK(parse_set(set));
  CHECK_EQ_I64(strlen(config.data.train), 511);
  set[11 + 511] = 'a';
  CHECK(!parse_set(set));
  CHECK(strstr(failure.message, "is 512 bytes long; at most 511 fit"));
  CHECK(strlen(failure.message) < 300);
}

/* What runs without a configuration has the limits that a configuration has by default. */
TEST(defaults_without_a_file) {
  static struct config without;
  CHECK(parse(GOOD, NULL, 0));
  option_take_defaults(option_section("limits"), &without);
  const struct comm_limits *a = &config.limits, *b = &without.limits;
  CHECK(b->start_s > 0 && b->update_s > 0 && b->save_s > 0 && b->heartbeat_s > 0);
  CHECK(a->start_s == b->start_s && a->update_s == b->update_s && a->save_s == b->save_s && a->heartbeat_s == b->heartbeat_s);
}

int main(void) {
  RUN(defaults);
  RUN(numbers);
  RUN(values_of_each_kind);
  RUN(sources);
  RUN(broken_sources);
  RUN(presets);
  RUN(route_mappings);
  RUN(set);
  RUN(set_refused);
  RUN(refused);
  RUN(refused_files);
  RUN(all_at_once);
  RUN(defaults_without_a_file);
  return test_report();
}
