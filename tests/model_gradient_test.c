/* Loss and gradients of the whole model against tests/golden/llama_gradients.bin,
 * which tests/oracle/llama_jax.py made in float64 JAX: its head comment says
 * what the file holds and how parameters and tokens are drawn. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "base/philox.h"
#include "kernels/formats.h"
#include "model/model.h"
#include "tests/test.h"

enum { PROJECTIONS = 16, FIRST_KEY = 1000, CASES = 7 };
enum golden_draw { OF_PARAMETER = 1, OF_TOKEN = 2, OF_POSITION = 3, OF_SIGN = 4 };

static void *get(int64_t bytes) {
  void *p = calloc((size_t)(bytes > 0 ? bytes : 1), 1);
  if (!p) abort();
  return p;
}

/* ---- what both sides draw ------------------------------------------------ */
static struct philox_block block_of(uint64_t key, int64_t block, int number, enum golden_draw draw) {
  return philox4x32_10(key, (struct philox_block){{(uint32_t)block, (uint32_t)number, (uint32_t)draw, 0}});
}
static uint32_t word_of(uint64_t key, int64_t i, int number, enum golden_draw draw) {
  return block_of(key, i / 4, number, draw).word[i % 4];
}

static float parameter_value(uint64_t key, int number, const struct param *p, int64_t i) {
  int u = (int)(word_of(key, i, number, OF_PARAMETER) >> 24) - 128;
  if (u < -127) u = -127;
  if (p->cols == 1) return 1.0f + (float)(u >> 2) / 128.0f;
  float value = (float)u / 128.0f;
  for (int64_t reach = 1; reach < p->cols; reach *= 4) value /= 2.0f;
  return value;
}

/* ---- the golden file ----------------------------------------------------- */
struct golden {
  char name[64];
  struct model_config config;
  int64_t batch, seq_len;
  double loss;
  bool ignored;
};

static bool read_golden(FILE *f, struct golden *g) {
  memset(g, 0, sizeof *g);
  struct model_config *c = &g->config;
  struct rope_scaling *s = &c->rope_scaling;
  long long n[9], tied, scaled, original, ignored;
  int got = fscanf(f, "case %63s %lld %lld %lld %lld %lld %lld %lld %lld %lld %lld %la %la %lld %la %la %la %lld %la %lld",
                   g->name, &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6], &n[7], &n[8], &tied, &c->norm_eps,
                   &c->rope_theta, &scaled, &s->factor, &s->low_freq_factor, &s->high_freq_factor, &original, &g->loss,
                   &ignored);
  if (got != 20 || fgetc(f) != '\n') return false;
  g->batch = n[0], g->seq_len = n[1];
  c->vocab_size = n[2], c->hidden_size = n[3], c->ffn_size = n[4], c->n_layers = n[5];
  c->n_heads = n[6], c->n_kv_heads = n[7], c->head_dim = n[8];
  c->tied = tied != 0, s->enabled = scaled != 0, s->original_max_position = original, g->ignored = ignored != 0;
  return true;
}

static bool read_floats(FILE *f, float *values, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint8_t b[4];
    if (fread(b, 1, 4, f) != 4) return false;
    uint32_t u = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
    memcpy(&values[i], &u, 4);
  }
  return true;
}

/* ---- the model ----------------------------------------------------------- */
struct run {
  struct device *d;
  struct model *m;
  void *memory;
  int32_t *inputs, *targets;
  float *nll;
  int64_t tokens, valid;
};

static void draw_tokens(struct run *r, const struct golden *g, uint64_t key) {
  for (int64_t t = 0; t < r->tokens; t++) {
    struct philox_block w = block_of(key, t, 0, OF_TOKEN);
    r->inputs[t] = (int32_t)(w.word[0] % (w.word[3] % 2 == 0 ? (uint32_t)g->config.vocab_size : 5u));
    r->targets[t] = g->ignored && w.word[2] % 4 == 0 ? -1 : (int32_t)(w.word[1] % (uint32_t)g->config.vocab_size);
    r->valid += r->targets[t] >= 0;
  }
}

static void draw_parameters(struct run *r, uint64_t key, enum dtype type) {
  for (int number = 0; number < model_param_number(r->m); number++) {
    const struct param *p = model_param(r->m, number);
    int64_t n = p->rows * p->cols;
    float *values = get(n * 4);
    uint16_t *codes = get(n * 2);
    for (int64_t i = 0; i < n; i++) {
      values[i] = parameter_value(key, number, p, i);
      codes[i] = bf16_encode(values[i]);
    }
    r->d->k->upload(r->d, (char *)model_params(r->m) + (size_t)p->offset * dtype_bytes(type),
                    type == DTYPE_BF16 ? (void *)codes : (void *)values, (size_t)n * dtype_bytes(type));
    free(values);
    free(codes);
  }
}

static bool run_open(struct run *r, const struct golden *g, const char *route_name, uint64_t key) {
  struct error e;
  struct route route;
  memset(r, 0, sizeof *r);
  if (!route_named(route_name, (int)g->config.n_layers, &route, &e)) return false;
  struct model_shape shape = {.batch = g->batch, .seq_len = g->seq_len, .recompute_every = 2, .head_chunk = 20,
                              .param_dtype = route.activations, .training = true};
  if (!(r->d = device_open("cpu", 2, &e))) return false;
  struct arena measured = arena_measure();
  struct model *m = model_create(r->d, &measured, &g->config, &route, &shape, &e);
  if (!m) {
    printf("# %s\n", e.message);
    return false;
  }
  model_destroy(m);
  if (!(r->memory = r->d->k->allocate(r->d, measured.used, &e))) return false;
  memset(r->memory, 0x7F, measured.used);
  struct arena arena = arena_over(r->memory, measured.used);
  if (!(r->m = model_create(r->d, &arena, &g->config, &route, &shape, &e))) return false;
  r->tokens = g->batch * g->seq_len;
  r->inputs = get(r->tokens * 4);
  r->targets = get(r->tokens * 4);
  r->nll = get(r->tokens * 4);
  draw_tokens(r, g, key);
  draw_parameters(r, key, shape.param_dtype);
  model_refresh_weights(r->m);
  struct micro_batch b = {.inputs = r->inputs, .targets = r->targets, .update = 1, .seed = 1};
  model_forward_backward(r->m, &b, 1.0f / (float)r->valid, r->nll);
  return true;
}

static void run_close(struct run *r) {
  model_destroy(r->m);
  if (r->d) {
    r->d->k->release(r->d, r->memory);
    r->d->k->close(r->d);
  }
  free(r->inputs);
  free(r->targets);
  free(r->nll);
}

/* ---- comparison ---------------------------------------------------------- */
/* The relative error of a tensor from its samples alone, and from projections
 * on random signs, which see every element: their mean square is the square of
 * the norm, give or take a fifth at 16 of them.  Both must be small. A tensor of
 * zeros is compared absolutely. */
static bool compare_param(FILE *f, const struct run *r, const struct golden *g, uint64_t key, int number,
                          double tolerance, double *worst) {
  char name[96];
  long long rows, cols, samples;
  double norm;
  const struct param *p = model_param(r->m, number);
  if (fscanf(f, "param %95s %lld %lld %la %lld", name, &rows, &cols, &norm, &samples) != 5 || fgetc(f) != '\n') return false;
  CHECK_STR(p->name, name);
  CHECK_EQ_I64(p->rows, rows);
  CHECK_EQ_I64(p->cols, cols);
  if (strcmp(p->name, name) != 0 || p->rows != rows || p->cols != cols) return false;

  int64_t n = rows * cols;
  float *expected = get(samples * 4), projected[PROJECTIONS];
  if (!read_floats(f, expected, samples) || !read_floats(f, projected, PROJECTIONS)) {
    free(expected);
    return false;
  }
  const float *gradient = model_gradients(r->m) + p->offset;
  double unit = norm > 1e-9 ? norm : 1.0, square = 0, sum[PROJECTIONS] = {0};
  for (int64_t i = 0; i < samples; i++) {
    int64_t at = n <= samples ? i : (int64_t)(word_of(key, i, number, OF_POSITION) % (uint64_t)n);
    double d = (double)gradient[at] - (double)expected[i];
    square += d * d;
  }
  double by_samples = sqrt(square * (double)n / (double)samples) / unit;
  for (int64_t i = 0; i < n; i++) {
    uint32_t word = word_of(key, i, number, OF_SIGN);
    for (int k = 0; k < PROJECTIONS; k++) sum[k] += word >> k & 1 ? -(double)gradient[i] : (double)gradient[i];
  }
  square = 0;
  for (int k = 0; k < PROJECTIONS; k++) square += (sum[k] - (double)projected[k]) * (sum[k] - (double)projected[k]);
  double by_projections = sqrt(square / PROJECTIONS) / unit;
  free(expected);
  if (!(by_samples < tolerance && by_projections < 1.5 * tolerance))
    FAIL("%s: %s: relative error %.3g by samples, %.3g by projections; allowed %g", g->name, name, by_samples,
         by_projections, tolerance);
  if (by_projections > *worst) *worst = by_projections;
  if (by_samples > *worst) *worst = by_samples;
  return true;
}

static bool compare_case(FILE *f, int number, const char *route, double tolerance) {
  uint64_t key = (uint64_t)(FIRST_KEY + number);
  struct golden g;
  struct run r;
  if (!read_golden(f, &g)) return false;
  if (!run_open(&r, &g, route, key)) {
    FAIL("%s: the model cannot be made", g.name);
    run_close(&r);
    return false;
  }
  float *nll = get(r.tokens * 4);
  double loss = 0, worst = 0;
  bool whole = read_floats(f, nll, r.tokens);
  for (int64_t t = 0; t < r.tokens; t++) {
    CHECK_CLOSE(r.nll[t], nll[t], 3 * tolerance * (1.0 + fabs((double)nll[t])));
    loss += (double)r.nll[t] / (double)r.valid;
  }
  CHECK_CLOSE(loss, g.loss, tolerance * g.loss);
  for (int i = 0; whole && i < model_param_number(r.m); i++)
    whole = compare_param(f, &r, &g, key, i, tolerance, &worst);
  printf("# %s %s: loss %.7f (%.7f), largest gradient error %.3g\n", route, g.name, loss, g.loss, worst);
  free(nll);
  run_close(&r);
  return whole;
}

static void compare_all(const char *route, double tolerance) {
  FILE *f = fopen("tests/golden/llama_gradients.bin", "rb");
  if (!f) {
    FAIL("tests/golden/llama_gradients.bin: %s (run from the top folder)", strerror(errno));
    return;
  }
  int cases = 0;
  while (cases < CASES && compare_case(f, cases, route, tolerance)) cases++;
  CHECK_EQ_I64(cases, CASES);
  CHECK(fgetc(f) == EOF);
  fclose(f);
}

TEST(fp32) { compare_all("fp32", 1e-5); }
TEST(bf16) { compare_all("bf16", 2e-2); }

int main(void) {
  RUN(fp32);
  RUN(bf16);
  return test_report();
}
