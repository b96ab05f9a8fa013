/* Constants of a route in a checkpoint: which are there, and what is refused. */
#include "tests/test.h"

#include <stdlib.h>

#include "trainer/config.h"
#include "trainer/constants.h"

static struct error e;

static struct config config_of(const char *route) {
  static struct config c;
  char set[128];
  const char *sets[] = {set, "model.n_layers=8"};
  snprintf(set, sizeof set, "route=%s", route);
  CHECK(config_parse(&c, "model: {preset: tiny}\ndata: {train: t}\n", "c.yaml", sets, 2, &e));
  return c;
}

static bool has(const json_t *o, const char *key, const char *value) {
  char *text = json_dumps(json_object_get(o, key), JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(3));
  bool good = value ? text && strcmp(text, value) == 0 : text == NULL;
  if (!good) printf("# %s is %s\n", key, text ? text : "absent");
  free(text);
  return good;
}

TEST(what_is_there) {
  struct config c = config_of("bf16");
  json_t *o = constants_make(&c);
  CHECK_EQ_I64(json_object_size(o), 0); /* nothing that the configuration does not say */
  json_decref(o);

  c.train.master = false; /* BF16 parameters alone are rounded by draws */
  o = constants_make(&c);
  CHECK(has(o, "draw_seed", "42") && has(o, "draw_rounds", "10")); /* 42: the default seed */
  json_decref(o);

  c = config_of("mxfp4-row-sr-h32");
  c.run.seed = 77;
  o = constants_make(&c);
  CHECK(has(o, "mx_adaptive_threshold", "0.87") && has(o, "hadamard_signs", "\"0x2817\"") && has(o, "hadamard_width", "[32]"));
  CHECK(has(o, "draw_seed", "77") && has(o, "local_strip", NULL) && json_is_string(json_object_get(o, "draw_counter")));
  json_decref(o);

  c = config_of("te-native");
  o = constants_make(&c);
  CHECK(has(o, "nvfp4_target", "2688") && has(o, "nvfp4_4over6_target", NULL) && has(o, "mx_adaptive_threshold", NULL));
  json_decref(o);
  c = config_of("fp8");
  o = constants_make(&c);
  CHECK_EQ_I64(json_object_size(o), 0);
  json_decref(o);

  c = config_of("operand-hybrid-h16");
  o = constants_make(&c);
  CHECK(has(o, "local_strip", "[256]") && has(o, "hadamard_width", "[16]") && has(o, "hadamard_signs", NULL));
  CHECK(has(o, "local_chunk", "128") && has(o, "local_faithful_target", "448.0") && has(o, "local_pow2_target", NULL));
  json_decref(o);

  c = config_of("nvfp4-local-pow2");
  c.route.head = c.route.span[0].linear;
  c.route.head.operand[FPROP_X].strip = 128;
  o = constants_make(&c);
  CHECK(has(o, "local_strip", "[128,256]") && has(o, "local_pow2_target", "2.69e3") && has(o, "local_faithful_target", NULL));
  json_decref(o);
}

TEST(of_attention) {
  struct config c = config_of("attention-fp8");
  json_t *o = constants_make(&c);
  CHECK_EQ_I64(json_object_size(o), 6);
  CHECK(has(o, "attention_tile", "128") && has(o, "attention_lazy", "8.0") && has(o, "attention_lift", "4.0"));
  CHECK(has(o, "attention_p_lift_log2", "8.0") && has(o, "attention_do_target", "4.0") && has(o, "attention_do_lift", "0.0"));

  /* a lift of its own after a given one, and the other way round */
  struct config given = c;
  given.route.attention_d_out_lift = 0x1p16;
  CHECK(!constants_check(o, &given, &e));
  CHECK(strstr(e.message, "attention_do_lift is 65536.0, the checkpoint's is 0.0"));
  json_decref(o);
  o = constants_make(&given);
  CHECK(has(o, "attention_do_lift", "6.55e4") && has(o, "attention_do_target", NULL));
  CHECK(!constants_check(o, &c, &e));
  CHECK(strstr(e.message, "attention_do_lift is 0.0, the checkpoint's is 65536.0"));
  json_decref(o);

  c = config_of("attention-mxfp4-proj-nvfp4");
  o = constants_make(&c);
  CHECK_EQ_I64(json_object_size(o), 11);
  CHECK(has(o, "nvfp4_target", "2688") && has(o, "attention_mx_block", "32") && has(o, "attention_p_map", "\"exp2\""));
  CHECK_CLOSE(json_real_value(json_object_get(o, "attention_v_cutoff")), 1.203125, 0);
  CHECK_CLOSE(json_real_value(json_object_get(o, "attention_p_raise")), 0.6780719, 1e-6); /* 1 - log2 1.25 */

  /* each by its name */
  static const char *const keys[] = {"attention_tile", "attention_lazy", "attention_lift", "attention_p_lift_log2", "attention_do_target", "attention_do_lift",
                                     "attention_mx_block", "attention_v_cutoff", "attention_p_map", "attention_p_raise"};
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    json_t *one = json_deep_copy(o);
    json_object_set_new(one, keys[i], json_string("affine"));
    CHECK(!constants_check(one, &c, &e));
    CHECK(strstr(e.message, keys[i]) && strstr(e.message, "the checkpoint's is \"affine\"") && !strchr(e.message, ';'));
    json_decref(one);
  }
  CHECK(constants_check(o, &c, &e));
  c = config_of("attention-fp8"); /* uses fewer of them */
  CHECK(constants_check(o, &c, &e));
  json_decref(o);

  c.route.attention_pv = c.route.attention_d_out = FORMAT_BF16; /* NVFP4 scores alone: no lift */
  o = constants_make(&c);
  CHECK_EQ_I64(json_object_size(o), 1);
  json_decref(o);
}

TEST(what_is_refused) {
  struct config c = config_of("operand-hybrid-h32");
  json_t *saved = constants_make(&c);
  CHECK(constants_check(saved, &c, &e) && constants_check(NULL, &c, &e));

  struct config other = config_of("bf16"); /* another route is told elsewhere: it uses none of them */
  CHECK(constants_check(saved, &other, &e));
  other = c;
  other.run.seed++;
  CHECK(!constants_check(saved, &other, &e));
  CHECK_EQ_I64(e.code, ERROR_CHECKPOINT);
  CHECK(strstr(e.message, "draw_seed is ") && strstr(e.message, ", the checkpoint's is ") && e.hint[0]);

  /* each constant by its name, all of them at once */
  static const char *const keys[] = {"mx_adaptive_threshold", "local_strip", "local_chunk", "local_faithful_target",
                                     "hadamard_signs", "hadamard_width", "draw_seed", "draw_rounds", "draw_counter"};
  CHECK_EQ_I64(json_object_size(saved), sizeof keys / sizeof keys[0]);
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    json_t *one = json_deep_copy(saved);
    json_object_set_new(one, keys[i], json_integer(5));
    CHECK(!constants_check(one, &c, &e));
    CHECK(strstr(e.message, keys[i]) && strstr(e.message, "the checkpoint's is 5") && !strchr(e.message, ';'));
    json_decref(one);
  }
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) json_object_set_new(saved, keys[i], json_string("x"));
  CHECK(!constants_check(saved, &c, &e));
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) CHECK(strstr(e.message, keys[i]));
  json_decref(saved);
}

int main(void) {
  RUN(what_is_there);
  RUN(of_attention);
  RUN(what_is_refused);
  return test_report();
}
