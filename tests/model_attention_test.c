/* A model whose attention is in few bits, forward and backward: recomputation,
 * threads and the magnitude of the loss change no bit, gradients stay near FP32's,
 * what was seen is counted, and it learns. */
#include "tests/test.h"

#include "tests/model_rig.h"

static const struct {
  const char *name;
  enum format qk, pv, d_out;
} row[] = {{"fp8 P and V", FORMAT_BF16, FORMAT_E4M3, FORMAT_BF16},
           {"training", FORMAT_NVFP4, FORMAT_E4M3, FORMAT_E5M2},
           {"control", FORMAT_NVFP4, FORMAT_MXFP4, FORMAT_E5M2},
           {"e4m3 dO", FORMAT_E4M3, FORMAT_E4M3, FORMAT_E4M3}};
enum { ROWS = sizeof row / sizeof *row };

static struct route route_of(int i, const char *linears) {
  struct route r;
  struct error e;
  if (!route_named(linears, 3, &r, &e)) exit(1);
  r.attention_qk = row[i].qk;
  r.attention_pv = row[i].pv;
  r.attention_d_out = row[i].d_out;
  return r;
}

struct result {
  float *gradients;
  int64_t elements;
  double loss;
  struct model_signals signals;
};

static struct result run(const struct route *r, const struct model_shape *s, int threads, float grad_scale) {
  struct model_config c = rig_config();
  struct rig g;
  if (!rig_open_route(&g, &c, r, s, threads)) {
    FAIL("no model");
    exit(1);
  }
  model_reset_signals(g.m);
  model_forward_backward(g.m, &g.b, grad_scale, g.nll);
  struct result x = {.elements = g.elements, .signals = *rig_signals(g.m)};
  x.gradients = malloc((size_t)g.elements * sizeof(float));
  if (!x.gradients) exit(1);
  memcpy(x.gradients, model_gradients(g.m), (size_t)g.elements * sizeof(float));
  for (int64_t t = 0; t < g.tokens; t++) x.loss += (double)g.nll[t];
  rig_close(&g);
  return x;
}

static bool same(const struct result *a, const struct result *b) {
  return memcmp(a->gradients, b->gradients, (size_t)a->elements * sizeof(float)) == 0 && a->loss == b->loss;
}

TEST(bits) {
  for (int i = 0; i < ROWS; i++)
    for (int linears = 0; linears < 2; linears++) {
      struct route r = route_of(i, linears ? "mxfp4-row-sr" : "bf16");
      struct model_shape s = rig_shape(2, DTYPE_BF16);
      struct result first = run(&r, &s, 1, 1.0f / 64);
      struct result threads = run(&r, &s, 3, 1.0f / 64);
      if (!same(&first, &threads)) FAIL("%s: threads", row[i].name);
      for (int k = RECOMPUTE_BOUNDARIES; k <= RECOMPUTE_ALL; k++) {
        s.recompute = (enum recompute)k;
        struct result again = run(&r, &s, 2, 1.0f / 64);
        if (!same(&first, &again) || memcmp(&first.signals, &again.signals, sizeof first.signals) != 0)
          FAIL("%s: recompute setting %d", row[i].name, k);
        free(again.gradients);
      }
      free(first.gradients);
      free(threads.gradients);
    }
}

/* The lift of dO follows the loss's scale: 2^-20 of it is 2^-20 of every gradient. */
TEST(scale_of_the_loss) {
  for (int i = 0; i < ROWS; i++) {
    struct route r = route_of(i, "bf16");
    struct model_shape s = rig_shape(2, DTYPE_BF16);
    struct result one = run(&r, &s, 2, 1.0f / 64), small = run(&r, &s, 2, 0x1p-26f);
    int64_t different = 0;
    for (int64_t k = 0; k < one.elements; k++) different += small.gradients[k] != one.gradients[k] * 0x1p-20f;
    if (different) FAIL("%s: %d of %d", row[i].name, (int)different, (int)one.elements);
    free(one.gradients);
    free(small.gradients);
  }
}

TEST(near_fp32) {
  struct route exact;
  struct error e;
  if (!route_named("fp32", 3, &exact, &e)) return;
  struct model_shape s = rig_shape(2, DTYPE_F32);
  struct result reference = run(&exact, &s, 2, 1.0f / 64);
  for (int i = 0; i < ROWS; i++) {
    struct route r = route_of(i, "bf16");
    struct result x = run(&r, &s, 2, 1.0f / 64);
    double d = distance(x.gradients, reference.gradients, x.elements);
    printf("# %-12s gradient %.4f from fp32\n", row[i].name, d);
    if (!(d > 0.003 && d < 0.025)) FAIL("%s: %g from fp32", row[i].name, d);
    free(x.gradients);
  }
  free(reference.gradients);
}

/* Three blocks, two samples of 32 tokens, 4 and 2 heads of 16. */
TEST(counts) {
  const int64_t tokens = 3 * 64, pairs = 3 * 2 * 4 * 32 * 33 / 2;
  for (int i = 0; i < ROWS; i++) {
    struct route r = route_of(i, "bf16");
    struct model_shape s = rig_shape(2, DTYPE_BF16);
    struct result x = run(&r, &s, 2, 1.0f / 64);
    const struct quantise_counts *n = x.signals.attention;
    const bool gradients = row[i].d_out != FORMAT_BF16;
    const int64_t q_views = (row[i].qk == FORMAT_NVFP4) + (row[i].qk == FORMAT_E4M3 || gradients);
    const int64_t v_views = (row[i].pv == FORMAT_MXFP4) + (row[i].pv == FORMAT_E4M3 || gradients);
    CHECK_EQ_I64(n[ATTENTION_Q].elements, q_views * tokens * 64);
    CHECK_EQ_I64(n[ATTENTION_K].elements, q_views * tokens * 32);
    CHECK_EQ_I64(n[ATTENTION_V].elements, v_views * tokens * 32);
    CHECK_EQ_I64(n[ATTENTION_P].elements, pairs);
    CHECK_EQ_I64(n[ATTENTION_DO].elements, gradients ? tokens * 64 : 0);
    CHECK_EQ_I64(n[ATTENTION_DS].elements, gradients ? pairs : 0);
    CHECK(!gradients || (n[ATTENTION_DO].amax > 0 && n[ATTENTION_DS].amax > 0));
    CHECK(n[ATTENTION_DS].underflowed * 10 <= n[ATTENTION_DS].elements);
    free(x.gradients);
  }
}

TEST(learns_by_heart) {
  for (int i = 0; i < ROWS; i++) {
    struct model_config c = rig_config();
    struct model_shape s = rig_shape(2, DTYPE_BF16);
    struct route r = route_of(i, "bf16");
    struct rig g;
    s.master = true;
    if (!rig_open_route(&g, &c, &r, &s, 2)) return;
    int step = 0;
    const double last = rig_learn(&g, s.param_dtype, 60, 0.1, &step);
    if (!(last < 0.1)) FAIL("%s: loss %g after %d updates", row[i].name, last, step);
    rig_close(&g);
  }
}

int main(void) {
  RUN(bits);
  RUN(scale_of_the_loss);
  RUN(near_fp32);
  RUN(counts);
  RUN(learns_by_heart);
  return test_report();
}
