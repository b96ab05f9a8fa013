/* plan: what the figures should be, by hand. */
#include <stdlib.h>

#include "tests/test.h"
#include "trainer/plan.h"

static struct error failure;
static struct config config;

/* Two blocks, hidden 64, ffn 160, 4 heads and 2 for keys and values of 16, vocabulary 258. */
static void tiny(const char *route) {
  memset(&config, 0, sizeof config);
  CHECK(model_preset("tiny", &config.model.shape));
  CHECK(route_named(route, 2, &config.route, &failure));
  snprintf(config.run.backend, sizeof config.run.backend, "cpu");
  snprintf(config.run.name, sizeof config.run.name, "tiny");
  config.train.global_batch = 12;
  config.train.local_batch = 2;
  config.train.seq_len = 32;
  config.train.updates = 5;
  config.train.param_dtype = DTYPE_BF16;
  config.train.gradient_dtype = DTYPE_F32;
  config.train.master = true;
}

/* Round numbers: BF16 1, FP8 2, FP4 4 GFLOP/s; 1 GB/s; 4 GPUs to a domain at 0.5 GB/s, 0.05 GB/s beyond. */
static const struct machine slow = {"slow", "Slow", 1e9, 2e9, 4e9, 1e9, 1e9, 4, 0.5e9, 0.05e9, NULL};

/* Linears: qkv 64 x 128, out 64 x 64, gate and up 64 x 320, down 160 x 64: 43,008 weights a block. */
enum { BLOCK_WEIGHTS = 64 * 128 + 64 * 64 + 64 * 320 + 160 * 64, HEAD_WEIGHTS = 258 * 64 };

TEST(llama3_8b) {
  struct model_config m;
  CHECK(model_preset("llama3-8b", &m));
  CHECK_EQ_I64(model_config_param_count(&m), 8030261248);
  CHECK_EQ_I64(model_config_matmul_params(&m), 8030261248 - 128256LL * 4096); /* all but the embedding */
  /* per token 6 P, and causal 6 L H d S of attention: 32 blocks, 32 heads of 128, 8,192 tokens */
  const double p = 6.0 * 7504924672.0, attention = 6.0 * 32 * 32 * 128 * 8192;
  CHECK_CLOSE(model_config_flops(&m, 8192, true), p + attention, 1);
  CHECK_CLOSE(model_config_flops(&m, 8192, false), p + 2 * attention, 1);
  CHECK_CLOSE(model_config_flops(&m, 8192, true) / 1e9, 51.47, 0.005);
  CHECK_CLOSE(model_config_flops(&m, 8192, false) / 1e9, 57.91, 0.005);
}

TEST(one_gpu) {
  struct plan_time t;
  tiny("bf16");
  CHECK(plan_time(&config, &slow, 1, &t));
  const double tokens = 12 * 32, parameters = 2 * (BLOCK_WEIGHTS + 2 * 64) + 2 * HEAD_WEIGHTS + 64;
  CHECK_EQ_I64(model_config_param_count(&config.model.shape), (int64_t)parameters);
  CHECK_CLOSE(t.linears, tokens * 6 * 2 * BLOCK_WEIGHTS / 1e9, 1e-12);
  CHECK_CLOSE(t.attention, tokens * 6 * 2 * 64 * 32 / 1e9, 1e-12); /* 6 L H d S */
  CHECK_CLOSE(t.head, tokens * 6 * HEAD_WEIGHTS / 1e9, 1e-12);
  CHECK(t.recompute == 0 && t.reduce == 0);
  CHECK_CLOSE(t.optimizer, parameters * (4 + 4 * 4 + 2 + 2 * 4) / 1e9, 1e-12); /* gradient; moments, parameter, master */
  CHECK_CLOSE(t.total, t.linears + t.attention + t.head + t.optimizer, 1e-12);
  CHECK_CLOSE(t.tokens_per_second, tokens / t.total, 1e-6);
  /* 6 P + 6 L H d S of all but the embedding (the gains of five norms count too), at BF16's peak */
  CHECK_CLOSE(t.mfu, tokens * (6 * (parameters - HEAD_WEIGHTS) + 6 * 2 * 64 * 32) / 1e9 / t.total, 1e-12);

  config.train.master = false;
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.optimizer, parameters * (4 + 4 * 4 + 2) / 1e9, 1e-12);
  config.train.gradient_dtype = DTYPE_BF16;
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.optimizer, parameters * (2 + 4 * 4 + 2) / 1e9, 1e-12);
}

/* The rank with the most micro-batches takes the time in which all ranks' tokens are done. */
TEST(unequal_shares) {
  struct plan_time three, four;
  tiny("bf16");
  config.train.global_batch = 9 * config.train.local_batch;
  CHECK(plan_time(&config, &slow, 3, &three) && three.passes == 3);
  CHECK(plan_time(&config, &slow, 4, &four) && four.passes == 3);
  CHECK_CLOSE(four.linears, three.linears, 1e-12);
  CHECK_CLOSE(four.tokens_per_second, 9 * (double)(config.train.local_batch * config.train.seq_len) / four.total, 1e-6);
  CHECK(plan_time(&config, &slow, 9, &four) && four.passes == 1);
  CHECK(!plan_time(&config, &slow, 10, &four));
}

/* train.accumulation is equal on all ranks: then one number of them can run. */
TEST(accumulation) {
  struct plan_time t;
  tiny("bf16"); /* six micro-batches */
  config.train.accumulation = 2;
  for (int64_t gpus = 1; gpus <= 7; gpus++)
    if (plan_time(&config, &slow, gpus, &t) != (gpus == 3)) FAIL("%d GPUs", (int)gpus);
  CHECK(plan_time(&config, &slow, 3, &t) && t.passes == 2);
}

TEST(formats) {
  struct plan_time bf16, t;
  tiny("bf16");
  CHECK(plan_time(&config, &slow, 1, &bf16));
  tiny("mxfp4-row-sr");
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.linears, bf16.linears / 4, 1e-12);
  CHECK(t.head == bf16.head && t.attention == bf16.attention);
  struct machine old = slow;
  old.fp4_flops = 0; /* MXFP4's products are exact in FP8 */
  CHECK(plan_time(&config, &old, 1, &t));
  CHECK_CLOSE(t.linears, bf16.linears / 2, 1e-12);
  tiny("nvfp4-global"); /* NVFP4's in BF16 alone */
  CHECK(plan_time(&config, &old, 1, &t));
  CHECK_CLOSE(t.linears, bf16.linears, 1e-12);
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.linears, bf16.linears / 4, 1e-12);

  tiny("mxfp4-row-sr"); /* the slower operand's rate: fprop at BF16, two thirds at FP4 */
  config.route.span[0].linear.operand[FPROP_X] = (struct encoding){.format = FORMAT_BF16};
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.linears, bf16.linears * (1.0 / 3 + 2.0 / 3 / 4), 1e-12);
  config.route.span[0].linear.operand[FPROP_X] = (struct encoding){.format = FORMAT_E4M3};
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.linears, bf16.linears * (1.0 / 3 / 2 + 2.0 / 3 / 4), 1e-12);
}

TEST(attention_and_projections) {
  struct plan_time bf16, t;
  tiny("bf16");
  CHECK(plan_time(&config, &slow, 1, &bf16));
  tiny("attention-fp8"); /* scores at FP4's rate, P V and the backward's four products at FP8's */
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.attention, bf16.attention * (1.0 / 6 / 4 + 5.0 / 6 / 2), 1e-12);
  CHECK(t.linears == bf16.linears && t.head == bf16.head);
  tiny("attention-mxfp4-proj-nvfp4"); /* P V at FP4's; a third of the projections' work, wgrad, at BF16's */
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.attention, bf16.attention * (2.0 / 6 / 4 + 4.0 / 6 / 2), 1e-12);
  const double projections = (64 * 128 + 64 * 64) / (double)BLOCK_WEIGHTS;
  CHECK_CLOSE(t.linears, bf16.linears * (1 - projections + projections * (1.0 / 3 + 2.0 / 3 / 4)), 1e-12);
}

TEST(recompute) {
  struct plan_time t;
  tiny("bf16");
  config.train.recompute = RECOMPUTE_ALL;
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.recompute, t.linears / 3, 1e-12);
  config.train.recompute = RECOMPUTE_EVERY_NTH;
  config.train.recompute_every = 2; /* one block of two */
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.recompute, t.linears / 6, 1e-12);
  CHECK_CLOSE(t.total, t.linears + t.attention + t.head + t.recompute + t.optimizer, 1e-12);
  /* boundaries: the residual stream twice, gate and up, read, and as much written as linears take in, but attention's output */
  config.train.recompute = RECOMPUTE_BOUNDARIES;
  CHECK(plan_time(&config, &slow, 1, &t));
  CHECK_CLOSE(t.recompute, 12 * 32 * 2 * 2.0 * (2 * 64 + 2 * 160 + 2 * 64 + 160) / 1e9, 1e-12);
  tiny("mxfp4-row-sr"); /* attention's output is quantised too; half a byte an element, scales of a tile of 128 rows and 4 columns */
  config.train.recompute = RECOMPUTE_BOUNDARIES;
  CHECK(plan_time(&config, &slow, 1, &t));
  const double scales = (3 * 128 + 256) * 4 / 64.0; /* of a micro-batch's 64 tokens */
  CHECK_CLOSE(t.recompute, 12 * 32 * 2 * (2.0 * (3 * 64 + 2 * 160) + 0.5 * (3 * 64 + 160) + scales) / 1e9, 1e-12);
  CHECK_CLOSE(t.total, t.linears + t.attention + t.head + t.recompute + t.optimizer, 1e-12);
}

TEST(several_gpus) {
  struct plan_time one, t;
  tiny("bf16");
  CHECK(plan_time(&config, &slow, 1, &one));
  const double bytes = 4.0 * (double)model_config_param_count(&config.model.shape);
  CHECK(plan_time(&config, &slow, 3, &t)); /* 2 passes each */
  CHECK_CLOSE(t.linears, one.linears / 3, 1e-12);
  CHECK_CLOSE(t.optimizer, one.optimizer / 3, 1e-12);
  const double sums = 2.0 / 3 * bytes / 0.5e9, copies = sums / 2; /* FP32 gradients, BF16 parameters */
  CHECK_CLOSE(t.reduce, sums + copies, 1e-12);
  const double compute = t.linears + t.attention + t.head, backward = compute * 2 / 3 / 2, forward = compute / 3 / 2;
  const double exposed = (sums > backward ? sums - backward : 0) + (copies > forward ? copies - forward : 0);
  CHECK_CLOSE(t.total, compute + exposed + t.optimizer, 1e-12);
  config.train.gradient_dtype = DTYPE_BF16;
  CHECK(plan_time(&config, &slow, 3, &t));
  CHECK_CLOSE(t.reduce, 2 * copies, 1e-12);
  config.train.gradient_dtype = DTYPE_F32;
  CHECK(plan_time(&config, &slow, 6, &t)); /* beyond the domain: four adapters of 0.05 GB/s each */
  CHECK_CLOSE(t.reduce, 1.5 * 5.0 / 6 * bytes / 0.2e9, 1e-12);
  struct machine wide = slow;
  wide.network_bandwidth = 1e9;
  CHECK(plan_time(&config, &wide, 6, &t)); /* then the links inside are the narrow place */
  CHECK_CLOSE(t.reduce, 1.5 * 5.0 / 6 * bytes / 0.5e9, 1e-12);
  struct machine narrow = slow; /* where neither hides */
  narrow.link_bandwidth = narrow.network_bandwidth = 1e6;
  CHECK(plan_time(&config, &narrow, 3, &t));
  CHECK_CLOSE(t.total, t.linears + t.attention + t.head + t.optimizer + t.reduce - backward - forward, 1e-9);
  CHECK(!plan_time(&config, &slow, 7, &t));
  CHECK(!plan_time(&config, &slow, 100, &t));
}

/* Dense figures of data sheets, TFLOP/s (not the ones with sparsity, twice as high). */
TEST(machines) {
  static const struct {
    const char *product, *name;
    double bf16, fp8, fp4;
  } cases[] = {
      {"NVIDIA A100-SXM4-80GB", "a100", 312, 312, 0},
      {"NVIDIA H100 80GB HBM3", "h100", 989, 1979, 0},
      {"NVIDIA H200", "h200", 989, 1979, 0},
      {"NVIDIA B200", "b200", 2250, 4500, 9000},
      {"NVIDIA GB200", "gb200", 2500, 5000, 10000},
      {"NVIDIA GB300", "gb300", 2500, 5000, 15000},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct machine *m = machine_of_product(cases[i].product);
    if (!m) {
      FAIL("%s is not known", cases[i].product);
      continue;
    }
    CHECK_STR(m->name, cases[i].name);
    CHECK(m == machine_named(cases[i].name));
    CHECK(m->bf16_flops == cases[i].bf16 * 1e12 && m->fp8_flops == cases[i].fp8 * 1e12 && m->fp4_flops == cases[i].fp4 * 1e12);
  }
  static const char *const others[] = {"", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA GH200 480GB",
                                       "NVIDIA H20", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100-SXM2-16GB"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    if (machine_of_product(others[i])) FAIL("%s is taken for %s", others[i], machine_of_product(others[i])->name);
  int n;
  const struct machine *all = machine_list(&n);
  for (int i = 0; i < n; i++) {
    CHECK(all[i].memory_bytes > 1e9 && all[i].memory_bandwidth > 1e12 && all[i].domain >= 8);
    CHECK(all[i].link_bandwidth > all[i].network_bandwidth && machine_named(all[i].name) == &all[i]);
  }
  CHECK(!machine_named("nothing"));
}

TEST(memory) {
  struct arena a;
  int64_t own;
  tiny("bf16");
  const int64_t n = model_config_param_count(&config.model.shape);
  CHECK(plan_memory(&config, 1, 1, &a, &own, &failure));
  CHECK_CLOSE((double)a.by_category[ARENA_PARAMETERS], 2.0 * (double)n, ARENA_ALIGNMENT);
  CHECK_CLOSE((double)a.by_category[ARENA_MASTER], 4.0 * (double)n, ARENA_ALIGNMENT);
  CHECK_CLOSE((double)a.by_category[ARENA_ADAM_M], 4.0 * (double)n, ARENA_ALIGNMENT);
  CHECK_CLOSE((double)a.by_category[ARENA_ADAM_V], 4.0 * (double)n, ARENA_ALIGNMENT);
  CHECK_CLOSE((double)a.by_category[ARENA_GRADIENTS], 4.0 * (double)n, ARENA_ALIGNMENT);
  CHECK_EQ_I64(plan_checkpoint_bytes(&config), 12 * n);
  /* The last of three ranks: rows from 64 of 96 and so on, gains from 40 of 64. */
  struct arena third;
  CHECK(plan_memory(&config, 1, 3, &third, &own, &failure));
  CHECK(third.by_category[ARENA_GRADIENTS] == a.by_category[ARENA_GRADIENTS] && third.by_category[ARENA_PARAMETERS] == a.by_category[ARENA_PARAMETERS]);
  CHECK(third.by_category[ARENA_ADAM_M] == third.by_category[ARENA_MASTER] && third.by_category[ARENA_ADAM_M] == third.by_category[ARENA_ADAM_V]);
  CHECK((double)third.by_category[ARENA_ADAM_M] >= 4.0 * (double)n / 3 && (double)third.by_category[ARENA_ADAM_M] < 4.0 * (double)n / 3 * 1.05);
  config.train.master = false;
  CHECK(plan_memory(&config, 1, 1, &a, &own, &failure));
  CHECK_EQ_I64(a.by_category[ARENA_MASTER], 0);
  CHECK_EQ_I64(plan_checkpoint_bytes(&config), 10 * n);
  tiny("mxfp4-row-sr");
  config.route.span[0].linear.operand[WGRAD_DY].rounding = ROUND_STOCHASTIC; /* a column view of MXFP4 */
  CHECK(!plan_memory(&config, 1, 1, &a, &own, &failure));
  CHECK_EQ_I64(failure.code, ERROR_DEVICE);
}

/* boundaries: 64 tokens' X of QKV, of gate and up, and of down, once instead of in each of two blocks. */
TEST(memory_of_recompute) {
  struct arena none, a;
  int64_t own;
  tiny("bf16");
  CHECK(plan_memory(&config, 1, 1, &none, &own, &failure));
  config.train.recompute = RECOMPUTE_BOUNDARIES;
  CHECK(plan_memory(&config, 1, 1, &a, &own, &failure));
  const int64_t x = 64 * (64 + 64 + 160) * 2;
  CHECK_EQ_I64(none.by_category[ARENA_ACTIVATIONS] - a.by_category[ARENA_ACTIVATIONS], 2 * x);
  CHECK_EQ_I64(a.by_category[ARENA_TRANSIENT] - none.by_category[ARENA_TRANSIENT], x);
  CHECK_EQ_I64(none.used - a.used, x);
}

/* What attention's boundaries publish, of 64 tokens, 64 columns of Q and 32 of K and of V. */
TEST(memory_of_attention) {
  struct arena bf16, a;
  int64_t own;
  tiny("bf16");
  CHECK(plan_memory(&config, 1, 1, &bf16, &own, &failure));
  enum {
    Q4 = 64 * 32, K4 = 64 * 16, SCALES = 128 * 4, /* scale columns, 4 and 2, in tiles of 128 x 4 */
    BYTES8 = 64 * (64 + 32 + 32), /* Q8, K8, V8 */
    V4 = 2 * 32 * 16, V4_SCALES = 2 * SCALES /* by sample: 32 features of 32 tokens, a block each */
  };
  enum { GRADIENT = 64 * 64 + ARENA_ALIGNMENT + 2 * 64 * 4 * 4 }; /* dO; the lifts of 2 x 2 kv heads; two statistics */
  static const struct {
    const char *route;
    int64_t block;
  } cases[] = {{"attention-fp8", Q4 + K4 + 2 * SCALES + BYTES8}, {"attention-mxfp4", Q4 + K4 + 2 * SCALES + BYTES8 + V4 + V4_SCALES}};
  for (int i = 0; i < 2; i++) {
    tiny(cases[i].route);
    CHECK(plan_memory(&config, 1, 1, &a, &own, &failure));
    CHECK_EQ_I64(a.by_category[ARENA_ACTIVATIONS] - bf16.by_category[ARENA_ACTIVATIONS], 2 * cases[i].block);
    CHECK_EQ_I64(a.by_category[ARENA_TRANSIENT] - bf16.by_category[ARENA_TRANSIENT], GRADIENT);
    CHECK_EQ_I64(a.by_category[ARENA_WEIGHT_OPERANDS], bf16.by_category[ARENA_WEIGHT_OPERANDS]);
  }
}

static char text[20000];

static bool print(const struct machine *m, int64_t gpus) {
  FILE *out = fmemopen(text, sizeof text, "w");
  const bool good = out && plan_print(out, &config, m, gpus, &failure);
  if (out) fclose(out);
  return good;
}

static int count(const char *what) {
  int n = 0;
  for (const char *at = text; (at = strstr(at, what)); at++) n++;
  return n;
}

TEST(printed) {
  tiny("mxfp4-row-sr");
  config.train.global_batch = 144;
  CHECK(print(NULL, 0));
  CHECK(strstr(text, "tiny, route mxfp4-row-sr\n") && strstr(text, "NVIDIA GB200") && strstr(text, "NVIDIA H200"));
  CHECK(strstr(text, "\n     64      2 ") && strstr(text, "\n     72      1 ")); /* of 72 micro-batches 64 ranks have one or two */
  CHECK(!strstr(text, "recompute  ") && !strstr(text, "nan") && !strstr(text, "inf"));
  CHECK(strstr(text, "MXFP4 runs at the FP8 rate"));
  config.train.recompute = RECOMPUTE_ALL;
  CHECK(print(machine_named("b200"), 3));
  CHECK(!strstr(text, "GB200") && strstr(text, "recompute") && strstr(text, "\n      3     24 "));
  config.train.recompute = RECOMPUTE_BOUNDARIES;
  CHECK(print(machine_named("b200"), 3));
  CHECK(strstr(text, "tokens, recompute boundaries\n") && strstr(text, " recompute optimizer"));
  CHECK(print(machine_named("b200"), 1000));
  CHECK(strstr(text, "train.global_batch 144 is less than 1000 x local batch 2\n"));
  CHECK(print(machine_named("b200"), 64)); /* 72 micro-batches: two of them on the rank with the most */
  CHECK(strstr(text, "2 updates of 4 samples, and the one in use\n"));
  config.train.accumulation = 9;
  CHECK(print(machine_named("b200"), 0));
  CHECK_EQ_I64(count(" x train.accumulation 9: only 8 can run\n"), 7); /* of eight numbers of GPUs */
  CHECK(strstr(text, "\n     16   train.global_batch 144 is not 16 x local batch 2 x train.accumulation 9: only 8 can run\n"));
  CHECK(strstr(text, "\n      8      9 ") && !strstr(text, "\n     16      5 "));

  tiny("bf16"); /* larger than any memory */
  CHECK(model_preset("llama3-8b", &config.model.shape) && route_named("bf16", 32, &config.route, &failure));
  config.train.seq_len = 8192;
  config.train.local_batch = 16;
  config.train.global_batch = 16;
  CHECK(print(machine_named("h200"), 1));
  CHECK(strstr(text, "DO NOT FIT") && strstr(text, "8030261248"));
}

TEST(this_machine) {
  struct machine m;
  CHECK(machine_here(1, &m, &failure));
  CHECK_STR(m.name, "cpu");
  CHECK(m.bf16_flops > 1e7 && m.bf16_flops < 1e15 && m.fp8_flops == m.bf16_flops && m.fp4_flops == 0);
  CHECK(m.memory_bandwidth > 1e7 && m.memory_bandwidth < 1e13 && m.memory_bytes > 1e8);
  tiny("mxfp4-row-sr");
  CHECK(print(&m, 0));
  CHECK(strstr(text, "This machine's processors (1 thread") && strstr(text, "every format at the BF16 rate"));
  CHECK_EQ_I64(count("\n      1      6 "), 1);
  CHECK(!strstr(text, "\n      2 "));
}

int main(void) {
  RUN(llama3_8b);
  RUN(one_gpu);
  RUN(unequal_shares);
  RUN(accumulation);
  RUN(formats);
  RUN(attention_and_projections);
  RUN(recompute);
  RUN(several_gpus);
  RUN(machines);
  RUN(memory);
  RUN(memory_of_recompute);
  RUN(memory_of_attention);
  RUN(printed);
  RUN(this_machine);
  return test_report();
}
