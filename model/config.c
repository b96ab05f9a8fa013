/* Shapes of models: the named ones, what is impossible, and what they cost. */
#include <math.h>
#include <string.h>

#include "model/model.h"
#include "model/problems.h"

struct preset {
  const char *name;
  struct model_config config;
};

/* "Llama 3": rotary base 5e5, no scaling.  3.1 and 3.2 scale frequencies.
 * The byte models (vocabulary 258) are for demonstrations and tests. */
static const struct preset presets[] = {
    {"llama3-8b", {128256, 4096, 14336, 32, 32, 8, 128, false, 1e-5, 5e5, {false, 0, 0, 0, 0}}},
    {"llama3.1-8b", {128256, 4096, 14336, 32, 32, 8, 128, false, 1e-5, 5e5, {true, 8, 1, 4, 8192}}},
    {"llama3.2-1b", {128256, 2048, 8192, 16, 32, 8, 64, true, 1e-5, 5e5, {true, 32, 1, 4, 8192}}},
    {"llama3.2-3b", {128256, 3072, 8192, 28, 24, 8, 128, true, 1e-5, 5e5, {true, 32, 1, 4, 8192}}},
    {"demo", {258, 128, 352, 4, 4, 2, 32, false, 1e-5, 1e4, {false, 0, 0, 0, 0}}},
    {"tiny", {258, 64, 160, 2, 4, 2, 16, false, 1e-5, 1e4, {false, 0, 0, 0, 0}}},
};

enum { PRESETS = sizeof presets / sizeof presets[0] };

bool model_preset(const char *name, struct model_config *out) {
  for (int i = 0; i < PRESETS; i++) {
    if (strcmp(presets[i].name, name) != 0) continue;
    *out = presets[i].config;
    return true;
  }
  return false;
}

const char *const *model_preset_names(void) {
  static const char *const names[] = {"llama3-8b", "llama3.1-8b", "llama3.2-1b", "llama3.2-3b", "demo", "tiny", NULL};
  _Static_assert(sizeof names / sizeof names[0] == PRESETS + 1, "one name a preset");
  return names;
}

/* Above these a product of extents could leave int64_t, or a parameter or
 * layer its field in a Philox counter (base/philox.h: 12 bits each). */
enum { LARGEST_WIDTH = 1 << 20, LARGEST_VOCAB = 1 << 24, LARGEST_LAYERS = 450 };

static bool check_extent(struct problems *p, const char *key, int64_t value, int64_t largest) {
  if (value >= 1 && value <= largest) return true;
  problems_add(p, "%s %lld: must be 1 to %lld", key, (long long)value, (long long)largest);
  return false;
}

static void check_positive(struct problems *p, const char *key, double value, double least) {
  if (!(value >= least) || !isfinite(value)) problems_add(p, "%s %g: must be a finite number, at least %g", key, value, least);
}

bool model_config_check(const struct model_config *c, struct error *e) {
  struct problems p = {.error = e, .code = ERROR_CONFIG};
  check_extent(&p, "vocab_size", c->vocab_size, LARGEST_VOCAB);
  check_extent(&p, "hidden_size", c->hidden_size, LARGEST_WIDTH);
  check_extent(&p, "ffn_size", c->ffn_size, LARGEST_WIDTH);
  check_extent(&p, "n_layers", c->n_layers, LARGEST_LAYERS);
  bool heads = check_extent(&p, "n_heads", c->n_heads, LARGEST_WIDTH);
  bool kv = check_extent(&p, "n_kv_heads", c->n_kv_heads, LARGEST_WIDTH);
  bool dim = check_extent(&p, "head_dim", c->head_dim, LARGEST_WIDTH);
  if (heads && kv && c->n_heads % c->n_kv_heads != 0)
    problems_add(&p, "n_heads %lld: must be a multiple of n_kv_heads %lld", (long long)c->n_heads,
                 (long long)c->n_kv_heads);
  if (dim && c->head_dim % 2 != 0)
    problems_add(&p, "head_dim %lld: must be even (rotary pairs)", (long long)c->head_dim);
  if (heads && kv && dim && (c->n_heads + 2 * c->n_kv_heads) * c->head_dim > LARGEST_WIDTH)
    problems_add(&p, "(n_heads + 2 n_kv_heads) * head_dim %lld: must be at most %d",
                 (long long)((c->n_heads + 2 * c->n_kv_heads) * c->head_dim), LARGEST_WIDTH);
  if (!(c->norm_eps > 0 && c->norm_eps < 1)) problems_add(&p, "norm_eps %g: must lie between 0 and 1", c->norm_eps);
  check_positive(&p, "rope_theta", c->rope_theta, 1);

  const struct rope_scaling *s = &c->rope_scaling;
  if (s->enabled) {
    check_positive(&p, "rope_scaling.factor", s->factor, 1);
    if (!(s->low_freq_factor > 0 && s->high_freq_factor > s->low_freq_factor && isfinite(s->high_freq_factor)))
      problems_add(&p, "rope_scaling.low_freq_factor %g, high_freq_factor %g: must be 0 < low < high",
                   s->low_freq_factor, s->high_freq_factor);
    check_extent(&p, "rope_scaling.original_max_position", s->original_max_position, INT32_MAX);
  }
  return problems_none(&p);
}

int64_t model_config_param_count(const struct model_config *c) {
  int64_t query = c->n_heads * c->head_dim, key_value = c->n_kv_heads * c->head_dim, d = c->hidden_size;
  int64_t attention = (query + 2 * key_value) * d + d * query;
  int64_t ffn = 3 * c->ffn_size * d;
  int64_t embedding = c->vocab_size * d;
  return embedding + c->n_layers * (attention + ffn + 2 * d) + d + (c->tied ? 0 : embedding);
}

/* The reports count every parameter but the embedding table, gains included. */
int64_t model_config_matmul_params(const struct model_config *c) {
  return model_config_param_count(c) - (c->tied ? 0 : c->vocab_size * c->hidden_size);
}

double model_config_flops(const struct model_config *c, int64_t seq_len, bool causal_half) {
  double square = 12.0 * (double)c->n_layers * (double)(c->n_heads * c->head_dim) * (double)seq_len;
  return 6.0 * (double)model_config_matmul_params(c) + (causal_half ? square / 2 : square);
}
