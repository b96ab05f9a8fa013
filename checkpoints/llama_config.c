#include "checkpoints/llama_config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "model/problems.h"

enum { CONFIG_LIMIT = 16 << 20 };

void llama_config_free(struct llama_config *c) {
  json_decref(c->bos);
  json_decref(c->eos);
  c->bos = c->eos = NULL;
}

/* ---- reading ---------------------------------------------------------------- */

/* Keys that change the model, and the one value that is the model here. */
static const struct {
  const char *key, *value; /* JSON */
} fixed[] = {
    {"hidden_act", "\"silu\""},   {"attention_bias", "false"},     {"mlp_bias", "false"},          {"pretraining_tp", "1"},
    {"partial_rotary_factor", "1"}, {"sliding_window", "null"},    {"use_sliding_window", "false"}, {"quantization_config", "null"},
    {"is_encoder_decoder", "false"}, {"add_cross_attention", "false"},
};

struct reading {
  const json_t *o;
  struct problems p;
};

/* A short JSON text of a value, for problems. */
static const char *shown(const json_t *value, char text[80]) {
  char *whole = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(10));
  snprintf(text, 80, "%s", whole ? whole : "?");
  free(whole);
  return text;
}

static bool absent(const json_t *value) { return !value || json_is_null(value); }

static bool same(const json_t *a, const json_t *b) {
  if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
  return json_equal(a, b);
}

static void check_fixed(struct reading *r) {
  char is[80];
  for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
    const json_t *value = json_object_get(r->o, fixed[i].key);
    json_t *wanted = json_loads(fixed[i].value, JSON_DECODE_ANY, NULL);
    if (!absent(value) && !same(value, wanted))
      problems_add(&r->p, "%s %s: only %s can be represented", fixed[i].key, shown(value, is), fixed[i].value);
    json_decref(wanted);
  }
}

static void check_architecture(struct reading *r) {
  char is[80];
  const json_t *names = json_object_get(r->o, "architectures"), *type = json_object_get(r->o, "model_type");
  const char *first = json_string_value(json_array_get(names, 0));
  if (!absent(names) && (json_array_size(names) != 1 || !first || strcmp(first, "LlamaForCausalLM") != 0))
    problems_add(&r->p, "architectures %s: only [\"LlamaForCausalLM\"] can be represented", shown(names, is));
  if (absent(type) || !json_is_string(type) || strcmp(json_string_value(type), "llama") != 0)
    problems_add(&r->p, "model_type %s: only \"llama\" can be represented", type ? shown(type, is) : "is missing");
}

/* An integer; a key that is absent or null is `fallback` where that is not negative. */
static int64_t count(struct reading *r, const json_t *o, const char *key, int64_t fallback) {
  char is[80];
  const json_t *value = json_object_get(o, key);
  if (json_is_integer(value)) return json_integer_value(value);
  if (absent(value) && fallback >= 0) return fallback;
  problems_add(&r->p, "%s %s: an integer is wanted", key, value ? shown(value, is) : "is missing");
  return 1;
}

static double number(struct reading *r, const json_t *o, const char *key, double fallback) {
  char is[80];
  const json_t *value = json_object_get(o, key);
  if (json_is_number(value)) return json_number_value(value);
  if (absent(value) && fallback > 0) return fallback;
  problems_add(&r->p, "%s %s: a number is wanted", key, value ? shown(value, is) : "is missing");
  return 1;
}

static bool truth(struct reading *r, const char *key) {
  char is[80];
  const json_t *value = json_object_get(r->o, key);
  if (!absent(value) && !json_is_boolean(value)) problems_add(&r->p, "%s %s: true or false is wanted", key, shown(value, is));
  return json_is_true(value);
}

/* {"rope_type" or, of old, "type", …} */
static void take_scaling(struct reading *r, const char *key, const json_t *o, struct rope_scaling *s) {
  char is[80];
  if (absent(o)) return;
  const json_t *type = json_object_get(o, "rope_type");
  if (!type) type = json_object_get(o, "type");
  const char *word = json_string_value(type);
  if (!json_is_object(o) || !word) {
    problems_add(&r->p, "%s %s: an object with rope_type is wanted", key, shown(o, is));
  } else if (strcmp(word, "llama3") == 0) {
    s->enabled = true;
    s->factor = number(r, o, "factor", 0);
    s->low_freq_factor = number(r, o, "low_freq_factor", 0);
    s->high_freq_factor = number(r, o, "high_freq_factor", 0);
    s->original_max_position = count(r, o, "original_max_position_embeddings", -1);
  } else if (strcmp(word, "default") != 0) {
    problems_add(&r->p, "%s of type %s: only llama3 and default can be represented", key, shown(type, is));
  }
  const json_t *partial = json_object_get(o, "partial_rotary_factor");
  if (!absent(partial) && json_number_value(partial) != 1) problems_add(&r->p, "%s.partial_rotary_factor %s: only 1 can be represented", key, shown(partial, is));
}

static void take_rope(struct reading *r, struct model_config *m) {
  const double fallback = 10000; /* transformers' */
  const json_t *now = json_object_get(r->o, "rope_parameters"), *of_old = json_object_get(r->o, "rope_scaling");
  const json_t *theta = json_object_get(r->o, "rope_theta");
  m->rope_theta = number(r, r->o, "rope_theta", fallback);
  if (absent(now)) {
    take_scaling(r, "rope_scaling", of_old, &m->rope_scaling);
    return;
  }
  take_scaling(r, "rope_parameters", now, &m->rope_scaling);
  const double inner = number(r, now, "rope_theta", m->rope_theta);
  if (!absent(theta) && inner != m->rope_theta)
    problems_add(&r->p, "rope_theta %.10g and rope_parameters.rope_theta %.10g differ", m->rope_theta, inner);
  m->rope_theta = inner;
  struct rope_scaling before = {0};
  take_scaling(r, "rope_scaling", of_old, &before);
  if (!absent(of_old) &&
      (before.enabled != m->rope_scaling.enabled ||
       (before.enabled && (before.factor != m->rope_scaling.factor || before.low_freq_factor != m->rope_scaling.low_freq_factor ||
                           before.high_freq_factor != m->rope_scaling.high_freq_factor ||
                           before.original_max_position != m->rope_scaling.original_max_position))))
    problems_add(&r->p, "rope_scaling and rope_parameters differ");
}

static json_t *take_ids(struct reading *r, const char *key) {
  char is[80];
  json_t *value = json_object_get(r->o, key);
  bool good = absent(value) || json_is_integer(value) || json_is_array(value);
  for (size_t i = 0; i < json_array_size(value); i++) good = good && json_is_integer(json_array_get(value, i));
  if (!good) problems_add(&r->p, "%s %s: a token id, a list of them or null is wanted", key, shown(value, is));
  return value ? json_incref(value) : json_null();
}

bool llama_config_read(const char *folder, struct llama_config *c, struct error *e) {
  char path[4096], *text;
  size_t bytes;
  json_error_t where;
  memset(c, 0, sizeof *c);
  if ((size_t)snprintf(path, sizeof path, "%s/config.json", folder) >= sizeof path)
    return error_set(e, ERROR_CHECKPOINT, "path too long: %s", folder);
  if (!file_read(path, CONFIG_LIMIT, ERROR_CHECKPOINT, &text, &bytes, e)) return false;
  json_t *o = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
  free(text);
  if (!json_is_object(o)) {
    error_set(e, ERROR_CHECKPOINT, "%s: offset %d: %s", path, o ? 0 : where.position, o ? "no object" : where.text);
    json_decref(o);
    return false;
  }
  struct reading r = {.o = o, .p = {.error = e, .code = ERROR_CHECKPOINT}};
  struct model_config *m = &c->model;
  check_architecture(&r);
  check_fixed(&r);
  m->vocab_size = count(&r, o, "vocab_size", -1);
  m->hidden_size = count(&r, o, "hidden_size", -1);
  m->ffn_size = count(&r, o, "intermediate_size", -1);
  m->n_layers = count(&r, o, "num_hidden_layers", -1);
  m->n_heads = count(&r, o, "num_attention_heads", -1);
  m->n_kv_heads = count(&r, o, "num_key_value_heads", m->n_heads);
  if (absent(json_object_get(o, "head_dim")) && m->n_heads > 0 && m->hidden_size % m->n_heads != 0)
    problems_add(&r.p, "head_dim is missing, and hidden_size %" PRId64 " is no multiple of num_attention_heads %" PRId64, m->hidden_size, m->n_heads);
  m->head_dim = count(&r, o, "head_dim", m->n_heads > 0 ? m->hidden_size / m->n_heads : 1);
  m->norm_eps = number(&r, o, "rms_norm_eps", 1e-6); /* transformers' */
  m->tied = truth(&r, "tie_word_embeddings");
  take_rope(&r, m);
  c->max_position = count(&r, o, "max_position_embeddings", 0);
  c->bos = take_ids(&r, "bos_token_id");
  c->eos = take_ids(&r, "eos_token_id");
  bool good = problems_none(&r.p) && model_config_check(m, e);
  json_decref(o);
  if (good) return true;
  if (e) e->code = ERROR_CHECKPOINT;
  llama_config_free(c);
  return error_context(e, "%s", path);
}

/* ---- writing ---------------------------------------------------------------- */

void llama_number(double x, char text[LLAMA_NUMBER]) {
  for (int digits = 1; digits <= 17; digits++) {
    snprintf(text, LLAMA_NUMBER, "%.*g", digits, x);
    if (strtod(text, NULL) == x) return;
  }
}

/* With a point or an exponent: no integer. */
static void put_number(FILE *out, const char *before, double x) {
  char text[LLAMA_NUMBER];
  llama_number(x, text);
  if (fabs(x) < 1e15 && x == (double)(int64_t)x) snprintf(text, sizeof text, "%" PRId64 ".0", (int64_t)x);
  fprintf(out, "%s%s", before, text);
}

static void put_ids(FILE *out, const char *before, const json_t *ids) {
  char *text = ids ? json_dumps(ids, JSON_ENCODE_ANY) : NULL;
  fprintf(out, "%s%s", before, text ? text : "null");
  free(text);
}

static char *finish(FILE *out, char **text) {
  if (fclose(out) == 0) return *text;
  free(*text);
  return NULL;
}

char *llama_config_text(const struct llama_config *c, const char *dtype) {
  const struct model_config *m = &c->model;
  const struct rope_scaling *s = &m->rope_scaling;
  char *text = NULL;
  size_t bytes;
  FILE *out = open_memstream(&text, &bytes);
  if (!out) return NULL;
  fputs("{\n  \"architectures\": [\n    \"LlamaForCausalLM\"\n  ],\n  \"attention_bias\": false,\n  \"attention_dropout\": 0.0", out);
  put_ids(out, ",\n  \"bos_token_id\": ", c->bos);
  put_ids(out, ",\n  \"eos_token_id\": ", c->eos);
  fprintf(out, ",\n  \"head_dim\": %" PRId64 ",\n  \"hidden_act\": \"silu\",\n  \"hidden_size\": %" PRId64, m->head_dim, m->hidden_size);
  fprintf(out, ",\n  \"initializer_range\": 0.02,\n  \"intermediate_size\": %" PRId64, m->ffn_size);
  if (c->max_position > 0) fprintf(out, ",\n  \"max_position_embeddings\": %" PRId64, c->max_position);
  fprintf(out, ",\n  \"mlp_bias\": false,\n  \"model_type\": \"llama\",\n  \"num_attention_heads\": %" PRId64, m->n_heads);
  fprintf(out, ",\n  \"num_hidden_layers\": %" PRId64 ",\n  \"num_key_value_heads\": %" PRId64, m->n_layers, m->n_kv_heads);
  put_number(out, ",\n  \"pretraining_tp\": 1,\n  \"rms_norm_eps\": ", m->norm_eps);
  if (s->enabled) {
    put_number(out, ",\n  \"rope_scaling\": {\n    \"factor\": ", s->factor);
    put_number(out, ",\n    \"high_freq_factor\": ", s->high_freq_factor);
    put_number(out, ",\n    \"low_freq_factor\": ", s->low_freq_factor);
    fprintf(out, ",\n    \"original_max_position_embeddings\": %" PRId64 ",\n    \"rope_type\": \"llama3\"\n  }", s->original_max_position);
  } else {
    fputs(",\n  \"rope_scaling\": null", out);
  }
  put_number(out, ",\n  \"rope_theta\": ", m->rope_theta);
  fprintf(out, ",\n  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"%s\"", m->tied ? "true" : "false", dtype);
  fprintf(out, ",\n  \"use_cache\": true,\n  \"vocab_size\": %" PRId64 "\n}\n", m->vocab_size);
  return finish(out, &text);
}

char *llama_generation_text(const struct llama_config *c) {
  char *text = NULL;
  size_t bytes;
  FILE *out = open_memstream(&text, &bytes);
  if (!out) return NULL;
  fputs("{\n  \"_from_model_config\": true", out);
  if (!absent(c->bos)) put_ids(out, ",\n  \"bos_token_id\": ", c->bos);
  if (!absent(c->eos)) put_ids(out, ",\n  \"eos_token_id\": ", c->eos);
  fputs("\n}\n", out);
  return finish(out, &text);
}
