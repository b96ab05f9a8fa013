/* Loss and every gradient against JAX in float64 (tests/oracle/model.py), for
 * odd shapes: grouped and single key heads, tied and untied, odd vocabularies,
 * uncounted targets, one token, scaled rotary frequencies. */
#include "tests/test.h"

#include "base/file.h"
#include "kernels/formats.h"
#include "tests/model_rig.h"

static const char golden[] = "tests/golden/model.bin";

struct reader {
  const char *at, *end;
};

static void take(struct reader *r, void *out, size_t bytes) {
  if ((size_t)(r->end - r->at) < bytes) {
    printf("not ok: %s is cut short\n", golden);
    exit(1);
  }
  memcpy(out, r->at, bytes);
  r->at += bytes;
}

static uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ x >> 16;
}

struct oracle {
  struct model_config c;
  int64_t batch, seq_len, tokens, counted, elements;
  int32_t *inputs, *targets;
  double *nll;
  float *gradients;
};

static struct oracle read_case(struct reader *r) {
  int64_t n[11];
  double x[5];
  struct oracle o = {0};
  take(r, n, sizeof n);
  take(r, x, sizeof x);
  o.c = (struct model_config){.vocab_size = n[0], .hidden_size = n[1], .ffn_size = n[2], .n_layers = n[3],
                              .n_heads = n[4], .n_kv_heads = n[5], .head_dim = n[6], .tied = n[7] != 0,
                              .norm_eps = x[0], .rope_theta = x[1],
                              .rope_scaling = {n[10] > 0, x[2], x[3], x[4], n[10]}};
  o.batch = n[8];
  o.seq_len = n[9];
  o.tokens = o.batch * o.seq_len;
  o.elements = model_config_param_count(&o.c);
  size_t tokens = (size_t)o.tokens, elements = (size_t)o.elements;
  o.inputs = malloc(tokens * sizeof *o.inputs);
  o.targets = malloc(tokens * sizeof *o.targets);
  o.nll = malloc(tokens * sizeof *o.nll);
  o.gradients = malloc(elements * sizeof *o.gradients);
  take(r, o.inputs, tokens * sizeof *o.inputs);
  take(r, o.targets, tokens * sizeof *o.targets);
  take(r, o.nll, tokens * sizeof *o.nll);
  take(r, o.gradients, elements * sizeof *o.gradients);
  for (int64_t t = 0; t < o.tokens; t++) o.counted += o.targets[t] >= 0;
  return o;
}

static void set_parameters(struct model *m, enum dtype type) {
  for (int i = 0; i < model_param_number(m); i++) {
    const struct param *p = model_param(m, i);
    for (int64_t k = p->offset; k < p->offset + p->rows * p->cols; k++) {
      int step = (int)(mix((uint32_t)k) >> 24);
      float w = p->cols == 1 ? 1 + (float)(step / 4 - 32) / 128 : (float)(step - 128) / 512;
      if (type == DTYPE_F32)
        ((float *)model_params(m))[k] = w;
      else
        ((uint16_t *)model_params(m))[k] = bf16_encode(w);
    }
  }
  model_refresh_weights(m);
}

static void check(const struct oracle *o, int number, const char *route, double tolerance) {
  enum dtype type = rig_dtype(route);
  struct model_shape s = {.batch = o->batch, .seq_len = o->seq_len, .head_chunk = 4, .param_dtype = type,
                          .recompute = number % 2 ? RECOMPUTE_ALL : RECOMPUTE_NONE, .training = true};
  struct rig g;
  if (!rig_open(&g, &o->c, route, &s, 2)) {
    FAIL("case %d %s: no model", number, route);
    return;
  }
  set_parameters(g.m, type);
  memcpy(g.inputs, o->inputs, (size_t)o->tokens * sizeof *o->inputs);
  memcpy(g.targets, o->targets, (size_t)o->tokens * sizeof *o->targets);
  model_forward_backward(g.m, &g.b, 1.0f / (float)o->counted, g.nll);

  double loss = 0, expected = 0, worst = 0;
  for (int64_t t = 0; t < o->tokens; t++) {
    loss += (double)g.nll[t];
    expected += o->nll[t];
    if (fabs((double)g.nll[t] - o->nll[t]) > worst) worst = fabs((double)g.nll[t] - o->nll[t]);
  }
  if (!(fabs(loss / expected - 1) < tolerance)) FAIL("case %d %s: loss %.9g, JAX %.9g", number, route, loss, expected);
  if (!(worst < 10 * tolerance)) FAIL("case %d %s: a token's nll is %g off", number, route, worst);

  const float *gradients = model_gradients(g.m);
  double whole = distance(gradients, o->gradients, o->elements);
  if (!(whole < tolerance)) FAIL("case %d %s: gradients %g from JAX", number, route, whole);
  double worst_param = 0;
  const char *worst_name = "";
  for (int i = 0; i < model_param_number(g.m); i++) {
    const struct param *p = model_param(g.m, i);
    int64_t n = p->rows * p->cols;
    double size = sqrt(dot(o->gradients + p->offset, o->gradients + p->offset, n));
    if (size == 0) { /* one token attends to itself alone: no gradient of wq, wk */
      CHECK(dot(gradients + p->offset, gradients + p->offset, n) < 1e-12);
      continue;
    }
    double d = distance(gradients + p->offset, o->gradients + p->offset, n);
    if (d > worst_param) {
      worst_param = d;
      worst_name = p->name;
    }
    if (type == DTYPE_F32 && !(d < tolerance)) FAIL("case %d %s: %s %g from JAX", number, route, p->name, d);
  }
  printf("# case %d %s: loss %.1e, gradients %.1e, worst %s %.1e\n", number, route, fabs(loss / expected - 1), whole,
         worst_name, worst_param);
  rig_close(&g);
}

TEST(jax) {
  char *text;
  size_t bytes;
  struct error e;
  if (!file_read(golden, 1 << 20, ERROR_DATA, &text, &bytes, &e)) {
    FAIL("%s", e.message);
    return;
  }
  struct reader r = {text, text + bytes};
  int64_t cases;
  take(&r, &cases, sizeof cases);
  CHECK(cases >= 5);
  for (int number = 0; number < (int)cases; number++) {
    struct oracle o = read_case(&r);
    check(&o, number, "fp32", 1e-5);
    check(&o, number, "bf16", 2e-2);
    free(o.inputs);
    free(o.targets);
    free(o.nll);
    free(o.gradients);
  }
  CHECK(r.at == r.end);
  free(text);
}

int main(void) {
  RUN(jax);
  return test_report();
}
