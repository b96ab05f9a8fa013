/* Loss and gradients of the whole model against tests/golden/llama_gradients.bin,
 * which tests/oracle/llama_jax.py made in float64 JAX: its head comment says what
 * the file holds, llama_model.py's how parameters and tokens are drawn. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "base/philox.h"
#include "kernels/formats.h"
#include "model/model.h"
#include "tests/test.h"

enum { FIRST_KEY = 1000, CASES = 7 };
enum golden_draw { OF_PARAMETER = 1, OF_TOKEN = 2 };

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
struct worst {
  double error;
  char tensor[96];
};

/* |gradient - expected| / |expected|, Frobenius norms over every element of the
 * tensor.  A tensor of zeros is compared absolutely.
 *
 * Under bf16 the file also foretells the error, from the rounding points in
 * otherwise exact arithmetic: ours must be that, give or take half (mostly it is to
 * three digits; where a sum's last place turns one rounding, others follow), so no
 * further loss hides below the tolerance.  One tensor's exceeds it: of layer 2's wk in gqa-4-1-dim64-tied-scaled
 * 0.023, of which 0.021 come from D = sum(dO O) of the stored output, because
 * dS = P (dP - D) nearly cancels where few, similar keys are attended to. */
static bool compare_param(FILE *f, const struct run *r, const struct golden *g, int number, double tolerance,
                          bool foretold, struct worst *worst) {
  char name[96];
  long long rows, cols;
  double rounded;
  const struct param *p = model_param(r->m, number);
  if (fscanf(f, "param %95s %lld %lld %lf", name, &rows, &cols, &rounded) != 4 || fgetc(f) != '\n') return false;
  CHECK_STR(p->name, name);
  CHECK_EQ_I64(p->rows, rows);
  CHECK_EQ_I64(p->cols, cols);
  if (strcmp(p->name, name) != 0 || p->rows != rows || p->cols != cols) return false;

  int64_t n = rows * cols;
  float *expected = get(n * 4);
  bool whole = read_floats(f, expected, n);
  const float *gradient = (const float *)model_gradients(r->m) + p->offset;
  double square = 0, difference = 0;
  for (int64_t i = 0; i < n; i++) {
    double d = (double)gradient[i] - (double)expected[i];
    square += (double)expected[i] * (double)expected[i];
    difference += d * d;
  }
  double norm = sqrt(square), error = sqrt(difference) / (norm > 1e-9 ? norm : 1.0);
  free(expected);
  if (foretold) {
    if (!(error > rounded / 1.5 - 1e-5 && error < rounded * 1.5 + 1e-5))
      FAIL("%s: %s: relative error %.3g; its rounding points make %.3g", g->name, name, error, rounded);
    if (rounded > tolerance) {
      printf("# %s %s: relative error %.3g, %.3g by its rounding points\n", g->name, name, error, rounded);
      tolerance = rounded * 1.02;
    }
  }
  if (!(error < tolerance)) FAIL("%s: %s: relative error %.3g; allowed %g", g->name, name, error, tolerance);
  if (error > worst->error) {
    worst->error = error;
    snprintf(worst->tensor, sizeof worst->tensor, "%s", name);
  }
  return whole;
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
  double loss = 0;
  struct worst worst = {0};
  bool whole = read_floats(f, nll, r.tokens);
  for (int64_t t = 0; t < r.tokens; t++) {
    CHECK_CLOSE(r.nll[t], nll[t], 3 * tolerance * (1.0 + fabs((double)nll[t])));
    loss += (double)r.nll[t] / (double)r.valid;
  }
  CHECK_CLOSE(loss, g.loss, tolerance * g.loss);
  for (int i = 0; whole && i < model_param_number(r.m); i++)
    whole = compare_param(f, &r, &g, i, tolerance, strcmp(route, "bf16") == 0, &worst);
  printf("# %s %s: loss %.7f (%.7f), largest gradient error %.3g in %s\n", route, g.name, loss, g.loss, worst.error,
         worst.tensor);
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
