/* Shapes: counts, FLOPs, what is refused, and the parameters' registry. */
#include "tests/test.h"

#include "model/model.h"
#include "model/parts.h"

TEST(counts) {
  struct model_config c;
  CHECK(model_preset("llama3-8b", &c));
  CHECK_EQ_I64(model_config_param_count(&c), 8030261248);
  CHECK_EQ_I64(model_config_param_count(&c) - model_config_matmul_params(&c), 525336576);
  CHECK_EQ_I64(model_config_flops(&c, 8192, false), 57914449920);
  CHECK_EQ_I64(model_config_flops(&c, 8192, true), 51471998976); /* 51.47 G */
  CHECK(!c.rope_scaling.enabled);

  /* The sums that Hugging Face prints for these models. */
  CHECK(model_preset("llama3.2-1b", &c));
  CHECK_EQ_I64(model_config_param_count(&c), 1235814400);
  CHECK_EQ_I64(model_config_matmul_params(&c), 1235814400);
  CHECK(model_preset("llama3.2-3b", &c));
  CHECK_EQ_I64(model_config_param_count(&c), 3212749824);
  CHECK(model_preset("llama3.1-8b", &c));
  CHECK_EQ_I64(model_config_param_count(&c), 8030261248);
  CHECK(c.rope_scaling.enabled && c.rope_scaling.factor == 8 && c.rope_scaling.original_max_position == 8192);
}

TEST(presets_are_possible) {
  struct model_config c;
  struct error e;
  int n = 0;
  for (const char *const *name = model_preset_names(); *name; name++, n++) {
    CHECK(model_preset(*name, &c));
    if (!model_config_check(&c, &e)) FAIL("%s: %s", *name, e.message);
  }
  CHECK(n >= 5);
  CHECK(!model_preset("llama4", &c));
  CHECK(!model_preset("", &c));
}

TEST(registry) {
  const char *const names[] = {"llama3-8b", "llama3.2-1b", "tiny"};
  for (int i = 0; i < 3; i++) {
    struct model_config c;
    model_preset(names[i], &c);
    static struct param p[450 * 9 + 3];
    int n = params_number(&c);
    CHECK_EQ_I64(n, c.n_layers * 9 + (c.tied ? 2 : 3));
    params_list(&c, p);
    int64_t offset = 0;
    for (int k = 0; k < n; k++) {
      CHECK_EQ_I64(p[k].offset, offset); /* no gaps */
      offset += p[k].rows * p[k].cols;
      bool gain = p[k].cols == 1;
      CHECK(p[k].decay == !gain);
      CHECK((p[k].init_std > 0) == !gain);
      for (int other = 0; other < k && n < 64; other++) CHECK(strcmp(p[k].name, p[other].name) != 0);
    }
    CHECK_EQ_I64(offset, model_config_param_count(&c));
  }
  struct model_config c;
  static struct param p[32 * 9 + 3];
  model_preset("llama3-8b", &c);
  params_list(&c, p);
  CHECK_EQ_I64(params_number(&c), 291);
  CHECK_STR(p[0].name, "tok_embeddings.weight");
  CHECK_STR(p[2].name, "layers.0.attention.wq.weight");
  CHECK_STR(p[3].name, "layers.0.attention.wk.weight");
  CHECK_STR(p[4].name, "layers.0.attention.wv.weight");
  CHECK_EQ_I64(p[3].rows, 1024);
  CHECK_EQ_I64(p[3].cols, 4096);
  CHECK_STR(p[7].name, "layers.0.feed_forward.w1.weight");
  CHECK_STR(p[8].name, "layers.0.feed_forward.w3.weight");
  CHECK_STR(p[9].name, "layers.0.feed_forward.w2.weight");
  CHECK_STR(p[289].name, "norm.weight");
  CHECK_STR(p[290].name, "output.weight");
  CHECK_CLOSE(p[0].init_std, 1, 0);
  CHECK_CLOSE(p[2].init_std, 0.02, 1e-9);
  CHECK_CLOSE(p[5].init_std, 0.02 / 1.4142135623730951, 1e-9);  /* wo of the first block */
  CHECK_CLOSE(p[9 * 31 + 9].init_std, 0.02 / 8, 1e-9);          /* w2 of the last: sqrt(2 * 32) */
  CHECK_CLOSE(p[290].init_std, 1.0 / 64, 1e-9);
}

static int lines(const char *text) {
  int n = 1;
  for (; *text; text++) n += *text == '\n';
  return n;
}

TEST(impossible) {
  struct model_config good, c;
  struct error e;
  model_preset("tiny", &good);

  c = good;
  c.vocab_size = 0;
  c.n_heads = 5;
  c.head_dim = 7;
  c.norm_eps = -1;
  c.rope_theta = 0;
  CHECK(!model_config_check(&c, &e));
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  CHECK_EQ_I64(lines(e.message), 5);
  CHECK(strstr(e.message, "vocab_size 0"));
  CHECK(strstr(e.message, "n_heads 5"));
  CHECK(strstr(e.message, "head_dim 7"));
  CHECK(strstr(e.message, "norm_eps -1"));
  CHECK(strstr(e.message, "rope_theta 0"));

  const int64_t bad[] = {0, -1, INT64_MIN, INT64_MAX, (int64_t)1 << 40};
  for (int i = 0; i < 5; i++) {
    int64_t *const field[] = {&c.vocab_size, &c.hidden_size, &c.ffn_size, &c.n_layers,
                              &c.n_heads,    &c.n_kv_heads,  &c.head_dim};
    for (int f = 0; f < 7; f++) {
      c = good;
      *field[f] = bad[i];
      CHECK(!model_config_check(&c, &e));
    }
  }
  c = good;
  c.rope_scaling = (struct rope_scaling){.enabled = true, .factor = 8, .low_freq_factor = 4, .high_freq_factor = 1,
                                         .original_max_position = 8192};
  CHECK(!model_config_check(&c, &e));
  c.rope_scaling.low_freq_factor = 1;
  c.rope_scaling.high_freq_factor = 4;
  CHECK(model_config_check(&c, &e));
  c.rope_theta = 0.0 / 0.0 * 1.0;
  CHECK(!model_config_check(&c, NULL));
}

int main(void) {
  RUN(counts);
  RUN(presets_are_possible);
  RUN(registry);
  RUN(impossible);
  return test_report();
}
