/* Forward and backward of the whole model on the CPU: what must be equal to the
 * bit, what must be close, and that it learns. */
#include "tests/test.h"

#include "tests/model_rig.h"

static const char *const *all_routes; /* those that run, NULL-terminated */

struct result {
  float *gradients, *nll;
  struct model_signals signals;
  int64_t elements, tokens;
};

/* One forward and backward of a fresh model. */
static struct result run(const struct model_config *c, const char *route, const struct model_shape *s, int threads) {
  struct rig g;
  struct result r = {0};
  if (!rig_open(&g, c, route, s, threads)) {
    FAIL("%s: no model", route);
    exit(1);
  }
  model_reset_signals(g.m);
  model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
  r.elements = g.elements;
  r.tokens = g.tokens;
  r.gradients = malloc((size_t)g.elements * sizeof(float));
  r.nll = malloc((size_t)g.tokens * sizeof(float));
  memcpy(r.gradients, model_gradients(g.m), (size_t)g.elements * sizeof(float));
  memcpy(r.nll, g.nll, (size_t)g.tokens * sizeof(float));
  r.signals = *rig_signals(g.m);
  rig_close(&g);
  return r;
}

static void drop(struct result *r) {
  free(r->gradients);
  free(r->nll);
}

static bool equal(const struct result *a, const struct result *b) {
  return a->elements == b->elements && memcmp(a->gradients, b->gradients, (size_t)a->elements * sizeof(float)) == 0 &&
         a->tokens == b->tokens && memcmp(a->nll, b->nll, (size_t)a->tokens * sizeof(float)) == 0;
}

TEST(recomputation_changes_nothing) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct result none = run(&c, all_routes[i], &s, 2);
    CHECK(dot(none.gradients, none.gradients, none.elements) > 0);
    for (int k = RECOMPUTE_BOUNDARIES; k <= RECOMPUTE_ALL; k++) {
      s.recompute = (enum recompute)k;
      struct result other = run(&c, all_routes[i], &s, 2);
      if (!equal(&none, &other)) FAIL("%s: recompute setting %d differs", all_routes[i], k);
      CHECK(memcmp(&none.signals, &other.signals, sizeof none.signals) == 0);
      drop(&other);
    }
    drop(&none);
  }
}

TEST(threads_change_nothing) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct result one = run(&c, all_routes[i], &s, 1);
    for (int threads = 2; threads <= 3; threads++) {
      struct result other = run(&c, all_routes[i], &s, threads);
      if (!equal(&one, &other)) FAIL("%s: %d threads differ", all_routes[i], threads);
      drop(&other);
    }
    drop(&one);
  }
}

/* Three threads, a hundred times in the same memory (sanitizers, which are there for
 * other reasons, do less). */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { TIMES = 5 };
#else
enum { TIMES = 100 };
#endif

TEST(a_hundred_times_the_same) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct rig g;
    s.recompute = RECOMPUTE_EVERY_NTH;
    if (!rig_open(&g, &c, all_routes[i], &s, 3)) return;
    const size_t bytes = (size_t)g.elements * sizeof(float);
    float *first = malloc(bytes), *nll = malloc((size_t)g.tokens * sizeof *nll);
    int differ = 0;
    for (int k = 0; k < TIMES; k++) {
      rig_clear(&g);
      model_refresh_weights(g.m);
      model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
      if (k == 0) {
        memcpy(first, model_gradients(g.m), bytes);
        memcpy(nll, g.nll, (size_t)g.tokens * sizeof *nll);
      }
      differ += memcmp(first, model_gradients(g.m), bytes) != 0 || memcmp(nll, g.nll, (size_t)g.tokens * sizeof *nll) != 0;
    }
    if (differ) FAIL("%s: %d of %d differ from the first", all_routes[i], differ, TIMES);
    free(first);
    free(nll);
    rig_close(&g);
  }
}

/* A batch of two against the same samples one by one, accumulated.  With
 * stochastic rounding in the route this holds only if draws belong to samples;
 * where a tensor or a strip of rows shares a scale it does not hold. */
TEST(micro_batches) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    if (!rig_layout_is_free(all_routes[i])) continue;
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct result whole = run(&c, all_routes[i], &s, 2);
    s.batch = 1;
    struct rig g;
    if (!rig_open(&g, &c, all_routes[i], &s, 2)) return;
    for (uint64_t sample = 0; sample < 2; sample++) {
      rig_batch(&g, 5 + sample, 32, c.vocab_size);
      model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
      CHECK(memcmp(g.nll, whole.nll + 32 * sample, 32 * sizeof(float)) == 0);
    }
    double d = distance(model_gradients(g.m), whole.gradients, whole.elements);
    if (!(d < 2e-6)) FAIL("%s: gradients differ by %g", all_routes[i], d);
    /* and the draws do matter */
    if (strstr(all_routes[i], "-sr")) {
      rig_clear(&g);
      for (uint64_t sample = 0; sample < 2; sample++) {
        rig_batch(&g, 5 + sample, 32, c.vocab_size);
        g.b.first_sample += 100;
        model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
        CHECK(memcmp(g.nll, whole.nll + 32 * sample, 32 * sizeof(float)) == 0);
      }
      d = distance(model_gradients(g.m), whole.gradients, whole.elements);
      if (!(d > 1e-3 && d < 0.5)) FAIL("other draws: gradients differ by %g", d);
    }
    rig_close(&g);
    drop(&whole);
  }
}

/* To the bit, where no scale is shared by tokens: V's in MXFP4 is by 32 of a sample, which all are here. */
TEST(causal) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct route r;
    struct error e;
    if (!rig_layout_is_free(all_routes[i]) || !route_named(all_routes[i], 32, &r, &e)) continue;
    const bool blocks = r.attention_pv == FORMAT_MXFP4;
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct rig g;
    if (!rig_open(&g, &c, all_routes[i], &s, 2)) return;
    float before[64];
    model_forward(g.m, &g.b, g.nll);
    memcpy(before, g.nll, sizeof before);
    const int64_t changed = 17;
    g.inputs[changed] = (g.inputs[changed] + 1) % 67;
    model_forward(g.m, &g.b, g.nll);
    for (int64_t t = 0; t < 64; t++) {
      bool same = memcmp(&before[t], &g.nll[t], sizeof(float)) == 0;
      if (t < changed || t >= 32) {
        if (!same && !(blocks && t < 32)) FAIL("%s: token %d saw token %d", all_routes[i], (int)t, (int)changed);
      } else if (t == changed && same) {
        FAIL("%s: token %d does not see itself", all_routes[i], (int)t);
      }
    }
    rig_close(&g);
  }
}

/* The loss along the gradient of each parameter: (L(w + h u) - L(w - h u)) / 2h = |g|. */
static void check_slopes(const struct model_config *c) {
  struct model_shape s = rig_shape(2, DTYPE_F32);
  struct rig g;
  if (!rig_open(&g, c, "fp32", &s, 2)) return;
  g.targets[3] = g.targets[40] = -1;
  model_forward_backward(g.m, &g.b, 1, g.nll);
  float *params = model_params(g.m);
  const float *gradients = model_gradients(g.m);
  float *kept = malloc((size_t)g.elements * sizeof *kept);
  memcpy(kept, params, (size_t)g.elements * sizeof *kept);
  for (int i = 0; i < model_param_number(g.m); i++) {
    const struct param *p = model_param(g.m, i);
    int64_t n = p->rows * p->cols;
    double norm = sqrt(dot(gradients + p->offset, gradients + p->offset, n));
    if (!(norm > 0)) {
      FAIL("%s: no gradient", p->name);
      continue;
    }
    double rms = sqrt(dot(kept + p->offset, kept + p->offset, n));
    double h = 0.004 * rms, loss[2];
    for (int side = 0; side < 2; side++) {
      for (int64_t k = 0; k < n; k++)
        params[p->offset + k] = (float)((double)kept[p->offset + k] +
                                        (side ? -h : h) * (double)gradients[p->offset + k] / norm);
      loss[side] = rig_loss(&g);
    }
    memcpy(params + p->offset, kept + p->offset, (size_t)n * sizeof *kept);
    double slope = (loss[0] - loss[1]) / (2 * h);
    if (!(fabs(slope / norm - 1) < 0.02)) FAIL("%s: slope %g, gradient %g", p->name, slope, norm);
  }
  free(kept);
  rig_close(&g);
}

TEST(gradients_are_slopes) {
  struct model_config c = rig_config();
  check_slopes(&c);
  c.tied = true;
  c.n_kv_heads = 4;
  c.n_layers = 1;
  check_slopes(&c);
}

TEST(accumulation_and_scale) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct rig g;
    if (!rig_open(&g, &c, all_routes[i], &s, 2)) return;
    float *gradients = model_gradients(g.m);
    float *once = malloc((size_t)g.elements * sizeof *once);
    model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
    memcpy(once, gradients, (size_t)g.elements * sizeof *once);
    model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
    for (int64_t k = 0; k < g.elements; k++) once[k] *= 2;
    CHECK(distance(gradients, once, g.elements) < 1e-6);

    /* a power of two of the loss is the same power of two of every gradient */
    rig_clear(&g);
    model_forward_backward(g.m, &g.b, 1.0f / 32, g.nll);
    if (memcmp(gradients, once, (size_t)g.elements * sizeof *once) != 0 && distance(gradients, once, g.elements) > 1e-6)
      FAIL("%s: not homogeneous: %g", all_routes[i], distance(gradients, once, g.elements));

    /* nothing counted: no loss, no gradient */
    rig_clear(&g);
    for (int64_t t = 0; t < g.tokens; t++) g.targets[t] = -1;
    model_forward_backward(g.m, &g.b, 1, g.nll);
    double seen = dot(gradients, gradients, g.elements) + dot(g.nll, g.nll, g.tokens);
    CHECK_CLOSE(seen, 0, 0);
    free(once);
    rig_close(&g);
  }
}

TEST(evaluation_and_logits) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    enum dtype type = rig_dtype(all_routes[i]);
    struct model_shape s = rig_shape(2, type);
    struct result trained = run(&c, all_routes[i], &s, 2);
    s.training = false;
    s.head_chunk = 0;
    struct rig g;
    if (!rig_open(&g, &c, all_routes[i], &s, 2)) return;
    CHECK(model_gradients(g.m) == NULL);
    model_forward(g.m, &g.b, g.nll);
    CHECK(memcmp(g.nll, trained.nll, sizeof(float) * 64) == 0);
    const int64_t rows[] = {0, 31, 32, 63};
    for (int k = 0; k < 4; k++) {
      float logits[67];
      model_logits(g.m, &g.b, rows[k], logits);
      double sum = 0;
      for (int v = 0; v < 67; v++) sum += exp((double)logits[v]);
      CHECK_CLOSE(log(sum) - (double)logits[g.targets[rows[k]]], g.nll[rows[k]], 1e-5);
    }
    rig_close(&g);
    drop(&trained);
  }
}

TEST(head_chunks) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    s.head_chunk = 64;
    struct result whole = run(&c, all_routes[i], &s, 2);
    const int64_t chunks[] = {1, 33, 0, 1000};
    for (int k = 0; k < 4; k++) {
      s.head_chunk = chunks[k];
      struct result r = run(&c, all_routes[i], &s, 2);
      CHECK(memcmp(r.nll, whole.nll, sizeof(float) * 64) == 0);
      CHECK(distance(r.gradients, whole.gradients, whole.elements) < 1e-6 || strcmp(all_routes[i], "fp32") != 0);
      drop(&r);
    }
    drop(&whole);
  }
}

/* Low precision moves gradients, not their direction. */
static void least_and_most(const char *route, double *least, double *most) {
  bool bf16 = strcmp(route, "bf16") == 0, fp8 = strcmp(route, "fp8") == 0;
  bool part = strncmp(route, "attention-", 10) == 0; /* attention moves little at these logits */
  *least = bf16 ? 1e-5 : fp8 || part ? 5e-3 : 0.02;
  *most = bf16 ? 0.03 : fp8 || part ? 0.2 : 0.5;
}

TEST(routes_agree) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_F32);
  for (int i = 0; all_routes[i]; i++)
    for (int wide = 0; wide < 2 && strcmp(all_routes[i], "fp32") != 0; wide++) {
      double least, most;
      struct model_config own = rig_config_of(all_routes[i]);
      s.param_dtype = DTYPE_F32;
      struct result exact = run(&own, "fp32", &s, 2);
      s.param_dtype = wide ? DTYPE_F32 : DTYPE_BF16;
      struct result r = run(&own, all_routes[i], &s, 2);
      double d = distance(r.gradients, exact.gradients, exact.elements);
      least_and_most(all_routes[i], &least, &most);
      if (!(d > least && d < most)) FAIL("%s: %g from fp32", all_routes[i], d);
      drop(&r);
      drop(&exact);
    }
  s.param_dtype = DTYPE_F32;
  struct result fp32 = run(&c, "fp32", &s, 2);

  /* operands of one linear in different formats, other formats in other blocks */
  struct route mixed = {.name = "mixed", .activations = DTYPE_BF16, .attention_qk = FORMAT_BF16,
                        .attention_pv = FORMAT_BF16, .attention_d_out = FORMAT_BF16, .head = linear_route_plain(FORMAT_BF16)};
  const struct route_words words[] = {{"1", "mxfp4", "mxfp4", "bf16", "bf16", "bf16", "bf16", "none", NULL},
                                      {"2", "bf16", "bf16", "mxfp4/sr", "mxfp4", "bf16", "mxfp4", "none", NULL},
                                      {"3", "bf16", "mxfp4", "bf16", "same", "mxfp4", "mxfp4", "none", NULL}};
  struct error e;
  for (int i = 0; i < 3; i++) CHECK(route_add_span(&mixed, &words[i], 3, &e));
  s.param_dtype = DTYPE_BF16;
  float *first = malloc((size_t)fp32.elements * sizeof *first);
  for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_ALL; k++) {
    struct rig g;
    s.recompute = (enum recompute)k;
    if (!rig_open_route(&g, &c, &mixed, &s, 2)) {
      FAIL("no mixed model");
      return;
    }
    model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
    double d = distance(model_gradients(g.m), fp32.gradients, fp32.elements);
    if (!(d > 0.02 && d < 0.5)) FAIL("mixed: %g from fp32", d);
    if (k == 0) memcpy(first, model_gradients(g.m), (size_t)g.elements * sizeof *first);
    CHECK(memcmp(first, model_gradients(g.m), (size_t)g.elements * sizeof *first) == 0);
    rig_close(&g);
  }
  free(first);
  drop(&fp32);
}

TEST(signals) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_BF16);
  struct rig g;
  if (!rig_open(&g, &c, "mxfp4-row-sr", &s, 2)) return;
  const int64_t blocks = 3, tokens = 64, k = 64 + 64 + 64 + 96, n = 128 + 64 + 192 + 64;
  const int64_t weights = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96;
  model_reset_signals(g.m);
  model_refresh_weights(g.m);
  const struct model_signals *seen = rig_signals(g.m);
  CHECK_EQ_I64(seen->counts[FPROP_W].elements, blocks * weights);
  CHECK_EQ_I64(seen->counts[DGRAD_W].elements, blocks * weights);
  CHECK_EQ_I64(seen->counts[FPROP_X].elements, 0);
  CHECK(isinf(seen->max_logit) && seen->max_logit < 0);
  model_forward_backward(g.m, &g.b, 1, g.nll);
  seen = rig_signals(g.m);
  CHECK_EQ_I64(seen->counts[FPROP_X].elements, blocks * tokens * k);
  CHECK_EQ_I64(seen->counts[WGRAD_X].elements, blocks * tokens * k);
  CHECK_EQ_I64(seen->counts[DGRAD_DY].elements, blocks * tokens * n);
  CHECK_EQ_I64(seen->counts[WGRAD_DY].elements, blocks * tokens * n);
  CHECK_EQ_I64(seen->counts[FPROP_W].elements, blocks * weights);
  CHECK(seen->counts[FPROP_X].underflowed > 0);
  CHECK(isfinite(seen->max_logit));
  model_reset_signals(g.m);
  CHECK_EQ_I64(rig_signals(g.m)->counts[WGRAD_DY].elements, 0);
  rig_close(&g);
}

/* Who draws: every stochastic operand once, under its own layer and name. */
static const struct kernels *real;
static int drawn[3][8];
static bool well_drawn;

static void watch(const struct emission *out, int64_t cols) {
  static const int64_t width[8] = {[DRAW_DY_QKV] = 128, [DRAW_DY_OUT] = 64, [DRAW_DY_GATE_UP] = 192, [DRAW_DY_DOWN] = 64};
  if (!out->row || out->row->encoding.rounding != ROUND_STOCHASTIC) return;
  const struct draw *d = &out->draw;
  well_drawn = well_drawn && d->layer < 3 && d->operand < 8 && d->seed == 11 && d->update == 3 &&
               d->first_sample == 5 && d->seq_len == 32 && cols == width[d->operand] && out->row->cols == cols;
  if (d->layer < 3 && d->operand < 8) drawn[d->layer][d->operand]++;
}

static void watch_norm(struct device *d, const struct emission *out, struct matrix *d_gain, const struct matrix *dy,
                       const struct matrix *d_above, const struct matrix *residual, const float *rstd,
                       const struct matrix *gain) {
  watch(out, residual->cols);
  real->add_rmsnorm_backward(d, out, d_gain, dy, d_above, residual, rstd, gain);
}
static void watch_rope(struct device *d, const struct emission *out, const struct matrix *d_qkv, const float *cos_sin,
                       const struct attention_shape *s) {
  watch(out, d_qkv->cols);
  real->rope_backward(d, out, d_qkv, cos_sin, s);
}
static void watch_swiglu(struct device *d, const struct emission *out, const struct matrix *d_act,
                         const struct matrix *gate_up) {
  watch(out, gate_up->cols);
  real->swiglu_backward(d, out, d_act, gate_up);
}

TEST(draws) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_BF16);
  struct rig g;
  s.recompute = RECOMPUTE_ALL;
  if (!rig_open(&g, &c, "mxfp4-row-sr", &s, 1)) return;
  real = g.d->k;
  struct kernels watched = *real;
  watched.add_rmsnorm_backward = watch_norm;
  watched.rope_backward = watch_rope;
  watched.swiglu_backward = watch_swiglu;
  g.d->k = &watched;
  well_drawn = true;
  memset(drawn, 0, sizeof drawn);
  model_forward_backward(g.m, &g.b, 1, g.nll);
  CHECK(well_drawn);
  for (int layer = 0; layer < 3; layer++)
    for (int operand = DRAW_DY_QKV; operand <= DRAW_DY_DOWN; operand++) CHECK_EQ_I64(drawn[layer][operand], 1);
  g.d->k = real;
  rig_close(&g);
}

/* What a backward after recompute: boundaries does again: its producers. */
static int contractions, attentions;

static void watch_contract(struct device *d, struct matrix *out, const struct operand *a, const struct operand *b,
                           const struct matrix *add) {
  contractions++;
  real->contract(d, out, a, b, add);
}
static void watch_attention(struct device *d, struct matrix *out, float *lse, float *max_logit, struct quantise_counts *counts,
                            const struct matrix *qkv, const struct attention_payload *payload, const int32_t *starts,
                            const struct attention_shape *s) {
  attentions++;
  real->attention_forward(d, out, lse, max_logit, counts, qkv, payload, starts, s);
}

TEST(contracted_again) {
  const struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_BF16);
  int none = 0;
  for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_ALL; k++) {
    struct rig g;
    s.recompute = (enum recompute)k;
    if (!rig_open(&g, &c, "mxfp4-row-sr", &s, 1)) return;
    real = g.d->k;
    struct kernels watched = *real;
    watched.contract = watch_contract;
    watched.attention_forward = watch_attention;
    g.d->k = &watched;
    contractions = attentions = 0;
    model_forward_backward(g.m, &g.b, 1, g.nll);
    if (k == RECOMPUTE_NONE) none = contractions;
    int blocks = 0; /* those whose whole forward is run again: but for `down` */
    for (int layer = 0; layer < 3; layer++) blocks += recompute_of_block(s.recompute, s.recompute_every, layer) == RECOMPUTE_ALL;
    CHECK_EQ_I64(blocks, k == RECOMPUTE_ALL ? 3 : k == RECOMPUTE_EVERY_NTH);
    CHECK_EQ_I64(contractions, none + 3 * blocks);
    CHECK_EQ_I64(attentions, 3 + blocks);
    g.d->k = real;
    rig_close(&g);
  }
}

/* Rotary angles in FP32: what stands alone stays, the rest hardly moves, and comes back.  A part
 * of the vocabulary: its share of the probability is 1. */
TEST(angles_and_vocabulary) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_F32);
  struct error e = {0};
  struct rig g;
  s.training = false;
  if (!rig_open(&g, &c, "fp32", &s, 1)) return;
  const size_t bytes = (size_t)g.tokens * sizeof(float);
  float *first = malloc(bytes);
  model_forward(g.m, &g.b, g.nll);
  memcpy(first, g.nll, bytes);
  CHECK(model_set_parity(g.m, &(struct model_parity){.rope_angles = ROPE_ANGLES_FP32}, &e));
  model_forward(g.m, &g.b, g.nll);
  CHECK(memcmp(first, g.nll, bytes) != 0);
  for (int64_t t = 0; t < g.tokens; t++) CHECK(fabsf(first[t] - g.nll[t]) < 1e-5f && (t % s.seq_len || first[t] == g.nll[t]));
  CHECK(model_set_parity(g.m, &(struct model_parity){0}, &e));
  model_forward(g.m, &g.b, g.nll);
  CHECK(memcmp(first, g.nll, bytes) == 0);

  int32_t *targets = malloc((size_t)g.tokens * sizeof *targets);
  struct micro_batch b = g.b;
  double share = 0;
  b.targets = targets;
  CHECK(model_set_parity(g.m, &(struct model_parity){.vocabulary = 5}, &e));
  for (int32_t id = 0; id < 5; id++) {
    for (int64_t t = 0; t < g.tokens; t++) targets[t] = t == 3 ? id : -1;
    model_forward(g.m, &b, g.nll);
    share += exp(-(double)g.nll[3]);
  }
  CHECK_CLOSE(share, 1.0, 1e-5);
  free(targets), free(first);
  rig_close(&g);
}

/* The cast before the gain of a model without backward: in FP32 the same bits, in BF16
 * others; after it again what was there; refused by name where the backend has no such thing. */
TEST(norm_cast) {
  static const char *const routes[] = {"fp32", "bf16", "mxfp4-row-sr"};
  for (int i = 0; i < 3; i++) {
    struct model_config c = rig_config();
    struct model_shape s = rig_shape(2, rig_dtype(routes[i]));
    struct error e = {0};
    struct rig g;
    float *first, *again;
    s.training = false;
    if (!rig_open(&g, &c, routes[i], &s, 1)) return;
    const size_t bytes = (size_t)g.tokens * sizeof(float);
    first = malloc(bytes), again = malloc(bytes);
    for (int k = 0; k < model_param_number(g.m); k++) { /* gains begin as ones, with which the orders agree */
      const struct param *p = model_param(g.m, k);
      for (int64_t j = 0; p->cols == 1 && j < p->rows; j++) {
        if (s.param_dtype == DTYPE_F32) ((float *)model_params(g.m))[p->offset + j] = 1 + (float)(j % 7) / 16;
        else ((uint16_t *)model_params(g.m))[p->offset + j] = (uint16_t)(0x3f80 + 8 * (j % 7)); /* the same in BF16 */
      }
    }
    model_forward(g.m, &g.b, g.nll);
    memcpy(first, g.nll, bytes);
    CHECK(model_set_parity(g.m, &(struct model_parity){.norm_cast = NORM_CAST_BEFORE}, &e));
    model_forward(g.m, &g.b, g.nll);
    memcpy(again, g.nll, bytes);
    CHECK((memcmp(first, again, bytes) == 0) == (i == 0));
    for (int64_t t = 0; t < g.tokens; t++) CHECK(fabsf(first[t] - again[t]) < 0.3f);
    CHECK(model_set_parity(g.m, &(struct model_parity){0}, &e));
    model_forward(g.m, &g.b, g.nll);
    CHECK(memcmp(first, g.nll, bytes) == 0);

    real = g.d->k;
    struct kernels without = *real;
    without.backend = "lacking";
    without.add_rmsnorm_forward_cast = NULL;
    g.d->k = &without;
    CHECK(model_set_parity(g.m, &(struct model_parity){0}, &e));
    CHECK(!model_set_parity(g.m, &(struct model_parity){.norm_cast = NORM_CAST_BEFORE}, &e) && e.code == ERROR_DEVICE && strstr(e.message, "backend lacking"));
    without.cross_entropy_within = NULL;
    CHECK(!model_set_parity(g.m, &(struct model_parity){.vocabulary = 2}, &e) && e.code == ERROR_DEVICE && strstr(e.message, "backend lacking"));
    g.d->k = real;
    free(first), free(again);
    rig_close(&g);
  }
}

/* One batch by heart. */
TEST(learns_by_heart) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    if (c.n_layers == 3) c.n_layers = 2;
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    s.master = s.param_dtype == DTYPE_BF16;
    struct rig g;
    if (!rig_open(&g, &c, all_routes[i], &s, 2)) return;
    const double first = rig_loss(&g) / (double)g.tokens;
    int step = 0;
    const double last = rig_learn(&g, s.param_dtype, 60, 0.1, &step);
    CHECK(first > 3.5 && first < 6);
    if (!(last < 0.1)) FAIL("%s: loss %g after %d updates", all_routes[i], last, step);
    rig_close(&g);
  }
}

static char described[4096];
static void collect(void *context, const char *text) {
  (void)context;
  snprintf(described + strlen(described), sizeof described - strlen(described), "%s\n", text);
}

static const char *description(const struct route *r, const struct model_config *c, const struct model_shape *s) {
  struct rig g;
  described[0] = '\0';
  if (!rig_open_route(&g, c, r, s, 1)) return "refused";
  model_describe(g.m, collect, NULL);
  rig_close(&g);
  return described;
}

TEST(description) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_BF16);
  struct route r;
  struct error e;
  s.recompute = RECOMPUTE_EVERY_NTH;
  CHECK(route_named("mxfp4-row-sr", 3, &r, &e));
  const char *text = description(&r, &c, &s);
  CHECK(strstr(text,
               "blocks 2-2  qkv, out, gate_up, down: fprop x mxfp4/1x32/encode w mxfp4/2d32/adaptive | "
               "dgrad dy mxfp4/1x32/encode/sr w mxfp4/2d32/adaptive | wgrad dy mxfp4/1x32/encode x "
               "mxfp4/1x32/encode  recomputed  [cpu]\n"));
  CHECK(strstr(text, "blocks 1-1  qkv") && strstr(text, "blocks 3-3  qkv"));
  CHECK(strstr(text, "blocks 1-3  attention: q k bf16, p fp32, v bf16, softmax fp32 | backward: scores q k bf16, p fp32, do bf16, "
                     "ds fp32, q k bf16, v bf16  [cpu]\n"));
  CHECK(strstr(text, "head: fprop x bf16 w bf16 | dgrad dy bf16 w bf16 | wgrad dy bf16 x bf16, logits fp32 for 20 "
                     "tokens at once, d_logits bf16  [cpu]\n"));
  CHECK(!strstr(text, "of the updates"));
  s.recompute = RECOMPUTE_BOUNDARIES;
  text = description(&r, &c, &s);
  CHECK(strstr(text, "blocks 1-3  qkv") && strstr(text, "x mxfp4/1x32/encode  wgrad x recomputed  [cpu]\n"));

  /* a head and a forward tail of other formats */
  const struct route_words words = {NULL, "fp8", "fp8", "e5m2", "same", "bf16", "bf16", "none", NULL};
  CHECK(linear_route_parse(&words, &r.head, &e));
  r.forward_tail = 0.1;
  s.recompute = RECOMPUTE_NONE;
  c.vocab_size = 96; /* the head contracts it too */
  text = description(&r, &c, &s);
  CHECK(strstr(text, "head: fprop x e4m3/tensor w e4m3/tensor | dgrad dy e5m2/tensor w e4m3/tensor | wgrad dy bf16 x bf16, logits"));
  CHECK(strstr(text, "\nthe last 0.1 of the updates: fprop x bf16 w bf16 in every linear and the head, the rest as above  [cpu]\n"));

  /* attention in few bits, linears of two kinds */
  c = rig_config();
  CHECK(route_named("attention-mxfp4-proj-nvfp4", 3, &r, &e));
  text = description(&r, &c, &s);
  CHECK(strstr(text, "blocks 1-3  attention: q k nvfp4, p mxfp4, v mxfp4, softmax fp32 | backward: scores q k nvfp4, p e4m3, "
                     "do e5m2, ds e4m3, q k v e4m3  [cpu]\n"));
  CHECK(strstr(text, "blocks 1-3  qkv, out: fprop x nvfp4/1x16/tensor w nvfp4/2d16/tensor | dgrad dy nvfp4/1x16/tensor w "
                     "nvfp4/2d16/tensor | wgrad dy bf16 x bf16  [cpu]\n"));
  CHECK(strstr(text, "blocks 1-3  gate_up, down: fprop x bf16 w bf16 | dgrad dy bf16 w bf16 | wgrad dy bf16 x bf16  [cpu]\n"));
  r.attention_p_slope = 1.5;
  r.attention_p_offset = 1.25;
  r.attention_d_out_lift = 0x1p10;
  text = description(&r, &c, &s);
  CHECK(strstr(text, "v mxfp4, softmax fp32 (codes of p by 1.5 x + 1.25) | backward: scores q k nvfp4, p e4m3, do e5m2 (lift 4 x 1024), ds e4m3"));
  r.attention_p_slope = r.attention_p_offset = r.attention_d_out_lift = 0;
  r.attention_d_out = FORMAT_BF16;
  text = description(&r, &c, &s);
  CHECK(strstr(text, " | backward: scores q k nvfp4, p fp32, do bf16, ds fp32, q k nvfp4, v mxfp4  [cpu]\n"));

  /* outer factors by arm */
  c = rig_config_of("nvfp4-local");
  CHECK(route_named("nvfp4-local", 3, &r, &e));
  text = description(&r, &c, &s);
  CHECK(strstr(text, "blocks 1-3  qkv, out, down: fprop x nvfp4-local/1x16/faithful/strip256 w nvfp4-local/2d16/faithful | "
                     "dgrad dy nvfp4-local/1x16/faithful/strip256/sr w nvfp4-local/2d16/faithful | wgrad dy "
                     "nvfp4-local/1x16/faithful/strip256 x nvfp4-local/1x16/faithful/strip256  [cpu]\n"));
  CHECK(strstr(text, "blocks 1-3  gate_up: fprop x nvfp4-local/1x16/faithful/strip256 w nvfp4-local/2d16/faithful by arm | "
                     "dgrad dy nvfp4-local/1x16/faithful/strip256/sr by arm w nvfp4-local/2d16/faithful by arm | wgrad dy "
                     "nvfp4-local/1x16/faithful/strip256 x nvfp4-local/1x16/faithful/strip256  [cpu]\n"));
}

int main(void) {
  all_routes = rig_routes();
  for (int i = 0; all_routes[i]; i++) printf("# %s runs\n", all_routes[i]);
  RUN(recomputation_changes_nothing);
  RUN(threads_change_nothing);
  RUN(a_hundred_times_the_same);
  RUN(micro_batches);
  RUN(causal);
  RUN(gradients_are_slopes);
  RUN(accumulation_and_scale);
  RUN(evaluation_and_logits);
  RUN(head_chunks);
  RUN(routes_agree);
  RUN(signals);
  RUN(draws);
  RUN(contracted_again);
  RUN(norm_cast);
  RUN(angles_and_vocabulary);
  RUN(learns_by_heart);
  RUN(description);
  return test_report();
}
