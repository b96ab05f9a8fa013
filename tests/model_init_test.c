/* Initial values: their distribution, and that they depend on seed, parameter
 * and element alone. */
#include "tests/test.h"

#include "base/hash.h"
#include "kernels/formats.h"
#include "tests/model_rig.h"

TEST(distribution) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(1, DTYPE_F32);
  c.vocab_size = 1001;
  struct rig g;
  if (!rig_open(&g, &c, "fp32", &s, 1)) {
    FAIL("no model");
    return;
  }
  const float *values = model_params(g.m);
  int64_t gains = 0;
  for (int i = 0; i < model_param_number(g.m); i++) {
    const struct param *p = model_param(g.m, i);
    int64_t n = p->rows * p->cols;
    const float *v = values + p->offset;
    if (p->cols == 1) {
      for (int64_t k = 0; k < n; k++) gains += v[k] == 1.0f;
      continue;
    }
    double sum = 0, squares = 0, beyond_one = 0, amax = 0;
    for (int64_t k = 0; k < n; k++) {
      double z = (double)v[k] / (double)p->init_std;
      sum += z;
      squares += z * z;
      beyond_one += fabs(z) > 1;
      if (fabs(z) > amax) amax = fabs(z);
    }
    double many = (double)n;
    /* a normal deviate cut at 3: variance 0.973337, 31.5434 % beyond one deviation */
    CHECK_CLOSE(sum / many, 0, 5 * 0.9866 / sqrt(many));
    CHECK_CLOSE(squares / many, 0.973337, 5 * 1.33 / sqrt(many));
    CHECK_CLOSE(beyond_one / many, 0.315434, 5 * 0.4647 / sqrt(many));
    CHECK(amax <= 3.000001 && amax > 2.5);
    for (int other = 0; other < i; other++) { /* no two parameters share draws */
      const struct param *q = model_param(g.m, other);
      if (q->cols > 1) CHECK(memcmp(&values[q->offset], v, 8 * sizeof *v) != 0);
    }
  }
  CHECK_EQ_I64(gains, 7 * 64);
  for (int64_t i = 0; i < g.elements; i++)
    if (model_adam_m(g.m)[i] != 0 || model_adam_v(g.m)[i] != 0) {
      FAIL("moments are not zero");
      break;
    }
  rig_close(&g);
}

TEST(types_and_seeds) {
  struct model_config c = rig_config();
  struct model_shape wide = rig_shape(1, DTYPE_F32), narrow = rig_shape(2, DTYPE_BF16);
  narrow.master = true;
  struct rig a, b;
  if (!rig_open(&a, &c, "fp32", &wide, 1) || !rig_open(&b, &c, "bf16", &narrow, 2)) {
    FAIL("no model");
    return;
  }
  const float *values = model_params(a.m);
  const uint16_t *codes = model_params(b.m);
  CHECK(memcmp(values, model_master(b.m), (size_t)a.elements * sizeof *values) == 0);
  int64_t wrong = 0;
  for (int64_t i = 0; i < a.elements; i++) wrong += codes[i] != bf16_encode(values[i]);
  CHECK_EQ_I64(wrong, 0);
  struct error e;
  CHECK(model_initialise(b.m, 43, 1, &e));
  int64_t same = 0;
  for (int64_t i = 0; i < a.elements; i++) same += model_master(b.m)[i] == values[i];
  CHECK(same < 7 * 64 + 20); /* the gains */
  rig_close(&a);
  rig_close(&b);
}

/* The embedding is more than one round of tasks, and neither a whole number of them nor of blocks of draws. */
TEST(threads) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(1, DTYPE_BF16);
  s.master = true;
  c.vocab_size = 21001;
  c.hidden_size = 54;
  c.n_layers = 1;
  struct rig g;
  if (!rig_open(&g, &c, "bf16", &s, 1)) {
    FAIL("no model");
    return;
  }
  struct error e;
  size_t narrow = (size_t)g.elements * sizeof(uint16_t), wide = (size_t)g.elements * sizeof(float);
  struct hash codes = hash_bytes(model_params(g.m), narrow), values = hash_bytes(model_master(g.m), wide);
  static const int counts[] = {2, 3, 7};
  for (int i = 0; i < 3; i++) {
    memset(model_params(g.m), 0x55, narrow);
    memset(model_master(g.m), 0x55, wide);
    memset(model_adam_m(g.m), 0x55, wide);
    CHECK(model_initialise(g.m, 42, counts[i], &e));
    CHECK(hash_equal(hash_bytes(model_params(g.m), narrow), codes));
    CHECK(hash_equal(hash_bytes(model_master(g.m), wide), values));
    CHECK(model_adam_m(g.m)[0] == 0 && model_adam_m(g.m)[g.elements - 1] == 0);
  }
  rig_close(&g);
}

/* What a seed gives is for ever: runs of different builds are compared by this hash. */
TEST(for_ever) {
  struct model_config c;
  struct model_shape s = rig_shape(1, DTYPE_F32);
  struct rig g;
  char text[HASH_TEXT];
  CHECK(model_preset("tiny", &c));
  if (!rig_open(&g, &c, "fp32", &s, 2)) {
    FAIL("no model");
    return;
  }
  hash_text(hash_bytes(model_params(g.m), (size_t)g.elements * sizeof(float)), text);
  CHECK_STR(text, "39db782aaa5bb0846b0965b3e649008d");
  rig_close(&g);
}

int main(void) {
  RUN(distribution);
  RUN(types_and_seeds);
  RUN(threads);
  RUN(for_ever);
  return test_report();
}
