/* What a listener is handed: every linear's X, W and dY, as the contractions read them. */
#include "tests/test.h"

#include "kernels/formats.h"
#include "tests/model_rig.h"

enum { MOST = 3 * LINEAR_SITES };

struct heard {
  float *values[MOST][TENSOR_COUNT];
  int64_t rows[MOST][TENSOR_COUNT], cols[MOST][TENSOR_COUNT];
  int calls[MOST][TENSOR_COUNT];
};

static void listen(void *context, int layer, enum linear_site site, enum tensor tensor, const struct matrix *m) {
  struct heard *h = context;
  int l = layer * LINEAR_SITES + (int)site;
  if (l >= MOST) {
    FAIL("layer %d", layer);
    return;
  }
  if (h->calls[l][tensor]++ > 0) return;
  h->rows[l][tensor] = m->rows;
  h->cols[l][tensor] = m->cols;
  float *out = h->values[l][tensor] = malloc((size_t)(m->rows * m->cols) * sizeof *out);
  for (int64_t i = 0; i < m->rows * m->cols; i++) {
    uint16_t half = 0;
    if (m->dtype == DTYPE_BF16) memcpy(&half, (const char *)m->data + 2 * i, sizeof half);
    if (m->dtype == DTYPE_BF16)
      out[i] = bf16_decode(half);
    else
      memcpy(&out[i], (const char *)m->data + 4 * i, sizeof out[i]);
  }
}

static void forget(struct heard *h) {
  for (int l = 0; l < MOST; l++)
    for (int t = 0; t < TENSOR_COUNT; t++) free(h->values[l][t]);
}

static int calls_of(const struct heard *h) {
  int n = 0;
  for (int l = 0; l < MOST; l++)
    for (int t = 0; t < TENSOR_COUNT; t++) n += h->calls[l][t];
  return n;
}

/* Names of Meta's parameters that make up a linear, in its order of rows. */
static const char *const parts[LINEAR_SITES][3] = {{"attention.wq", "attention.wk", "attention.wv"},
                                                   {"attention.wo", NULL, NULL},
                                                   {"feed_forward.w1", "feed_forward.w3", NULL},
                                                   {"feed_forward.w2", NULL, NULL}};

static const struct param *find(const struct rig *g, int layer, const char *part) {
  char name[96];
  snprintf(name, sizeof name, "layers.%d.%s.weight", layer, part);
  for (int i = 0; i < model_param_number(g->m); i++)
    if (strcmp(model_param(g->m, i)->name, name) == 0) return model_param(g->m, i);
  return NULL;
}

/* The gradient that the model has is dY^T X of what was handed over, and W is the parameter. */
static void check_linear(const struct rig *g, const struct heard *h, int layer, int site, enum dtype parameters) {
  int l = layer * LINEAR_SITES + site;
  int64_t row = 0, n = h->rows[l][TENSOR_W], k = h->cols[l][TENSOR_W];
  CHECK_EQ_I64(h->rows[l][TENSOR_X], g->tokens);
  CHECK_EQ_I64(h->cols[l][TENSOR_X], k);
  CHECK_EQ_I64(h->rows[l][TENSOR_DY], g->tokens);
  CHECK_EQ_I64(h->cols[l][TENSOR_DY], n);
  for (int i = 0; i < 3 && parts[site][i]; i++) {
    const struct param *p = find(g, layer, parts[site][i]);
    if (!p) {
      FAIL("no %s", parts[site][i]);
      return;
    }
    CHECK_EQ_I64(p->cols, k);
    const float *gradient = (const float *)model_gradients(g->m) + p->offset;
    for (int64_t r = 0; r < p->rows; r++, row++)
      for (int64_t c = 0; c < k; c += 7) {
        double sum = 0, scale = 0;
        for (int64_t t = 0; t < g->tokens; t++) {
          double product = (double)h->values[l][TENSOR_DY][t * n + row] * (double)h->values[l][TENSOR_X][t * k + c];
          sum += product;
          scale += product * product;
        }
        double difference = fabs(sum - (double)gradient[r * k + c]);
        if (difference > 1e-5 * sqrt(scale)) FAIL("block %d %s [%d, %d]: %g", layer, parts[site][i], (int)r, (int)c, difference);
        const char *at = (const char *)model_params(g->m) + (size_t)(p->offset + r * k + c) * dtype_bytes(parameters);
        uint16_t half = 0;
        float wide = 0;
        memcpy(parameters == DTYPE_BF16 ? (void *)&half : (void *)&wide, at, dtype_bytes(parameters));
        if (parameters == DTYPE_F32) half = bf16_encode(wide);
        if (h->values[l][TENSOR_W][row * k + c] != bf16_decode(half)) FAIL("block %d %s: another weight", layer, parts[site][i]);
      }
  }
  CHECK_EQ_I64(row, n);
}

TEST(all_of_a_plain_route) {
  const struct model_config c = rig_config();
  for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_ALL; recompute++) {
    struct model_shape s = rig_shape(2, DTYPE_BF16);
    s.recompute = (enum recompute)recompute;
    struct rig g;
    struct heard h = {0};
    CHECK(rig_open(&g, &c, "bf16", &s, 2));
    rig_clear(&g);
    model_on_tensor(g.m, listen, &h);
    model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
    for (int l = 0; l < MOST; l++) {
      const bool again = recompute_of_block(s.recompute, s.recompute_every, l / LINEAR_SITES) == RECOMPUTE_ALL;
      const int forwards = again && l % LINEAR_SITES != LINEAR_DOWN ? 2 : 1;
      CHECK_EQ_I64(h.calls[l][TENSOR_X], forwards);
      CHECK_EQ_I64(h.calls[l][TENSOR_W], forwards);
      CHECK_EQ_I64(h.calls[l][TENSOR_DY], 1);
      check_linear(&g, &h, l / LINEAR_SITES, l % LINEAR_SITES, DTYPE_BF16);
    }
    int before = calls_of(&h);
    model_on_tensor(g.m, NULL, NULL);
    model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
    CHECK_EQ_I64(calls_of(&h), before);
    forget(&h);
    rig_close(&g);
  }
}

/* FP32 parameters under bf16: W is their copy. */
TEST(copied_weights) {
  const struct model_config c = rig_config();
  const struct model_shape s = rig_shape(1, DTYPE_F32);
  struct rig g;
  struct heard h = {0};
  CHECK(rig_open(&g, &c, "bf16", &s, 1));
  rig_clear(&g);
  model_on_tensor(g.m, listen, &h);
  model_forward_backward(g.m, &g.b, 1, g.nll);
  for (int l = 0; l < MOST; l++) check_linear(&g, &h, l / LINEAR_SITES, l % LINEAR_SITES, DTYPE_F32);
  forget(&h);
  rig_close(&g);
}

/* Packed operands have no plain twin that could be stale. */
TEST(nothing_of_a_packed_route) {
  const struct model_config c = rig_config();
  const struct model_shape s = rig_shape(1, DTYPE_BF16);
  struct rig g;
  struct heard h = {0};
  CHECK(rig_open(&g, &c, "mxfp4-row-sr", &s, 1));
  model_on_tensor(g.m, listen, &h);
  model_forward_backward(g.m, &g.b, 1, g.nll);
  CHECK_EQ_I64(calls_of(&h), 0);
  rig_close(&g);
}

int main(void) {
  RUN(all_of_a_plain_route);
  RUN(copied_weights);
  RUN(nothing_of_a_packed_route);
  return test_report();
}
