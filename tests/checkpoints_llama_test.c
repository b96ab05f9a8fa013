/* Names, row orders and config.json of Hugging Face's Llama. */
#include <stdlib.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoints/llama_config.h"
#include "checkpoints/llama_names.h"
#include "tests/test.h"

static char folder[] = "/tmp/fp4d-llama-XXXXXX";

/* ---- names and rows --------------------------------------------------------------- */

TEST(names) {
  static const char *const pairs[][2] = {
      {"tok_embeddings.weight", "model.embed_tokens.weight"},
      {"layers.0.attention_norm.weight", "model.layers.0.input_layernorm.weight"},
      {"layers.7.attention.wq.weight", "model.layers.7.self_attn.q_proj.weight"},
      {"layers.7.attention.wk.weight", "model.layers.7.self_attn.k_proj.weight"},
      {"layers.7.attention.wv.weight", "model.layers.7.self_attn.v_proj.weight"},
      {"layers.449.attention.wo.weight", "model.layers.449.self_attn.o_proj.weight"},
      {"layers.31.ffn_norm.weight", "model.layers.31.post_attention_layernorm.weight"},
      {"layers.31.feed_forward.w1.weight", "model.layers.31.mlp.gate_proj.weight"},
      {"layers.31.feed_forward.w3.weight", "model.layers.31.mlp.up_proj.weight"},
      {"layers.31.feed_forward.w2.weight", "model.layers.31.mlp.down_proj.weight"},
      {"norm.weight", "model.norm.weight"},
      {"output.weight", "lm_head.weight"},
  };
  char name[LLAMA_NAME];
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    CHECK(llama_name(pairs[i][0], name));
    CHECK_STR(name, pairs[i][1]);
  }
  CHECK(!llama_name("layers.0.attention.wq", name) && !llama_name("layers.x.ffn_norm.weight", name) && !llama_name("norm", name));
  CHECK(llama_name_is_derived("model.layers.12.self_attn.rotary_emb.inv_freq") && llama_name_is_derived("model.rotary_emb.inv_freq"));
  CHECK(!llama_name_is_derived("model.layers.12.self_attn.rotary_emb.inv_freq2") && !llama_name_is_derived("model.norm.weight"));
}

/* Every parameter of every preset has a name of its own. */
TEST(all_parameters) {
  for (const char *const *preset = model_preset_names(); *preset; preset++) {
    struct model_config c;
    CHECK(model_preset(*preset, &c));
    const int n = params_number(&c);
    struct param *p = calloc((size_t)n, sizeof *p);
    char (*name)[LLAMA_NAME] = calloc((size_t)n, sizeof *name);
    params_list(&c, p);
    for (int i = 0; i < n; i++) {
      CHECK(llama_name(p[i].name, name[i]));
      for (int j = 0; j < i; j++) CHECK(strcmp(name[i], name[j]) != 0);
      const int64_t group = llama_row_group(&c, p[i].name);
      const bool rotary = strstr(p[i].name, ".wq.") || strstr(p[i].name, ".wk.");
      CHECK_EQ_I64(group, rotary ? c.head_dim : 1);
      CHECK(p[i].rows % group == 0);
    }
    free(p);
    free(name);
  }
}

/* By the definition: a pair (2j, 2j + 1) of a head becomes (j, head_dim/2 + j). */
TEST(rows) {
  enum { HEADS = 3, DIM = 10, BYTES = 6 };
  char ours[HEADS * DIM][BYTES], theirs[HEADS * DIM][BYTES], back[HEADS * DIM][BYTES];
  for (int r = 0; r < HEADS * DIM; r++)
    for (int b = 0; b < BYTES; b++) ours[r][b] = (char)(r * BYTES + b);
  llama_rows_to_half_split(theirs, ours, HEADS * DIM, DIM, BYTES);
  for (int h = 0; h < HEADS; h++)
    for (int j = 0; j < DIM / 2; j++) {
      CHECK(memcmp(theirs[h * DIM + j], ours[h * DIM + 2 * j], BYTES) == 0);
      CHECK(memcmp(theirs[h * DIM + DIM / 2 + j], ours[h * DIM + 2 * j + 1], BYTES) == 0);
    }
  llama_rows_to_interleaved(back, theirs, HEADS * DIM, DIM, BYTES);
  CHECK(memcmp(back, ours, sizeof ours) == 0);
  llama_rows_to_half_split(theirs, ours, HEADS * DIM, 1, BYTES);
  CHECK(memcmp(theirs, ours, sizeof ours) == 0);
}

/* ---- config.json -------------------------------------------------------------------- */

static bool read_text(const char *text, struct llama_config *c, struct error *e) {
  char path[256];
  struct error writing;
  snprintf(path, sizeof path, "%s/config.json", folder);
  if (!file_publish(path, text, strlen(text), ERROR_SYSTEM, &writing)) FAIL("%s", writing.message);
  return llama_config_read(folder, c, e);
}

#define SHAPE "\"model_type\":\"llama\",\"vocab_size\":100,\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":2,\"num_attention_heads\":4"

/* A key of the sound configuration replaced or added: refused, and the message names it. */
static void refused(const char *key, const char *value, const char *said) {
  char *text;
  struct llama_config c;
  struct error e = {0};
  json_t *o = json_loads("{" SHAPE "}", 0, NULL);
  if (value)
    json_object_set_new(o, key, json_loads(value, JSON_DECODE_ANY, NULL));
  else
    json_object_del(o, key);
  text = json_dumps(o, 0);
  if (read_text(text, &c, &e)) {
    FAIL("%s %s: it is read", key, value);
    llama_config_free(&c);
  } else if (e.code != ERROR_CHECKPOINT || !strstr(e.message, "config.json: ") || !strstr(e.message, said)) {
    FAIL("%s %s: %s", key, value, e.message);
  }
  free(text);
  json_decref(o);
}

TEST(refusals) {
  refused("architectures", "[\"MistralForCausalLM\"]", "architectures [\"MistralForCausalLM\"]");
  refused("architectures", "[]", "architectures []");
  refused("model_type", "\"qwen2\"", "model_type \"qwen2\"");
  refused("model_type", NULL, "model_type is missing");
  refused("hidden_act", "\"gelu\"", "hidden_act \"gelu\"");
  refused("attention_bias", "true", "attention_bias true");
  refused("mlp_bias", "true", "mlp_bias true");
  refused("pretraining_tp", "2", "pretraining_tp 2");
  refused("quantization_config", "{\"quant_method\":\"gptq\"}", "quantization_config {");
  refused("sliding_window", "4096", "sliding_window 4096");
  refused("partial_rotary_factor", "0.5", "partial_rotary_factor 0.5");
  refused("rope_scaling", "{\"type\":\"linear\",\"factor\":2.0}", "rope_scaling of type \"linear\"");
  refused("rope_scaling", "{\"rope_type\":\"dynamic\",\"factor\":2.0}", "rope_scaling of type \"dynamic\"");
  refused("rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":2.0}", "rope_scaling of type \"yarn\"");
  refused("rope_scaling", "{\"rope_type\":\"longrope\"}", "rope_scaling of type \"longrope\"");
  refused("rope_scaling", "{\"factor\":2.0}", "rope_scaling {\"factor\":2.0}: an object with rope_type");
  refused("rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8.0}", "low_freq_factor is missing");
  refused("rope_parameters", "{\"full_attention\":{\"rope_type\":\"default\"}}", "rope_parameters {");
  refused("rope_parameters", "{\"rope_type\":\"yarn\",\"rope_theta\":1e4}", "rope_parameters of type \"yarn\"");
  refused("rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":1e4,\"partial_rotary_factor\":0.25}", "rope_parameters.partial_rotary_factor 0.25");
  refused("hidden_size", NULL, "hidden_size is missing");
  refused("hidden_size", "64.0", "hidden_size 64.0: an integer");
  refused("hidden_size", "65", "head_dim is missing, and hidden_size 65");
  refused("hidden_size", "1e9", "hidden_size");
  refused("num_key_value_heads", "3", "n_heads 4: must be a multiple of n_kv_heads 3");
  refused("head_dim", "15", "head_dim 15: must be even");
  refused("vocab_size", "0", "vocab_size 0");
  refused("rms_norm_eps", "\"small\"", "rms_norm_eps \"small\"");
  refused("tie_word_embeddings", "1", "tie_word_embeddings 1");
  refused("eos_token_id", "[1,\"2\"]", "eos_token_id [1,\"2\"]");

  struct llama_config c;
  struct error e = {0};
  CHECK(!read_text("{" SHAPE ",\"attention_bias\":true,\"mlp_bias\":true}", &c, &e) && strstr(e.message, "attention_bias") && strstr(e.message, "mlp_bias"));
  CHECK(!read_text("{" SHAPE ",\"rope_theta\":1e4,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":2e4}}", &c, &e) && strstr(e.message, "differ"));
  CHECK(!read_text("[1]", &c, &e) && !read_text("{", &c, &e) && strstr(e.message, "offset 1"));
}

TEST(defaults_and_both_spellings) {
  struct llama_config c;
  struct error e = {0};
  CHECK(read_text("{" SHAPE "}", &c, &e));
  CHECK(c.model.n_kv_heads == 4 && c.model.head_dim == 16 && !c.model.tied && !c.model.rope_scaling.enabled && c.max_position == 0);
  CHECK(c.model.norm_eps == 1e-6 && c.model.rope_theta == 1e4 && json_is_null(c.bos));
  llama_config_free(&c);

  static const char *const spellings[] = {
      "\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
      "\"original_max_position_embeddings\":8192},\"torch_dtype\":\"bfloat16\"",
      "\"rope_parameters\":{\"rope_theta\":500000.0,\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
      "\"original_max_position_embeddings\":8192},\"dtype\":\"bfloat16\"",
      "\"rope_theta\":500000,\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
      "\"original_max_position_embeddings\":8192},\"sliding_window\":null,\"hidden_act\":\"silu\",\"pretraining_tp\":1,\"attention_bias\":false"};
  for (int i = 0; i < 3; i++) {
    char text[1024];
    snprintf(text, sizeof text, "{" SHAPE ",\"num_key_value_heads\":2,\"head_dim\":24,\"tie_word_embeddings\":true,\"rms_norm_eps\":1e-05,"
             "\"max_position_embeddings\":131072,\"bos_token_id\":1,\"eos_token_id\":[2,3],%s}", spellings[i]);
    if (!read_text(text, &c, &e)) {
      FAIL("%s", e.message);
      continue;
    }
    const struct rope_scaling *s = &c.model.rope_scaling;
    CHECK(c.model.n_kv_heads == 2 && c.model.head_dim == 24 && c.model.tied && c.model.norm_eps == 1e-5 && c.max_position == 131072);
    CHECK(c.model.rope_theta == 5e5 && s->enabled && s->factor == 8 && s->low_freq_factor == 1 && s->high_freq_factor == 4 && s->original_max_position == 8192);
    CHECK(json_integer_value(c.bos) == 1 && json_integer_value(json_array_get(c.eos, 1)) == 3);

    char *written = llama_config_text(&c, "bfloat16"), *generation = llama_generation_text(&c);
    struct llama_config again;
    json_t *o = json_loads(written ? written : "", 0, NULL), *g = json_loads(generation ? generation : "", 0, NULL);
    CHECK(o && strcmp(json_string_value(json_object_get(o, "torch_dtype")), "bfloat16") == 0 && json_object_get(o, "rope_theta") && json_object_get(o, "rope_scaling") &&
          !json_object_get(o, "rope_parameters") && json_array_size(json_object_get(o, "architectures")) == 1);
    CHECK(json_integer_value(json_object_get(g, "bos_token_id")) == 1 && json_array_size(json_object_get(g, "eos_token_id")) == 2);
    CHECK(written && read_text(written, &again, &e));
    CHECK(memcmp(&again.model, &c.model, offsetof(struct model_config, tied)) == 0 && again.model.tied && again.model.norm_eps == c.model.norm_eps &&
          again.model.rope_theta == c.model.rope_theta && again.model.rope_scaling.factor == 8 && again.max_position == c.max_position && json_equal(again.eos, c.eos));
    llama_config_free(&again);
    llama_config_free(&c);
    json_decref(o);
    json_decref(g);
    free(written);
    free(generation);
  }
}

int main(void) {
  if (!mkdtemp(folder)) return 1;
  RUN(names);
  RUN(all_parameters);
  RUN(rows);
  RUN(refusals);
  RUN(defaults_and_both_spellings);
  struct error e;
  file_remove_tree(folder, ERROR_SYSTEM, &e);
  return test_report();
}
