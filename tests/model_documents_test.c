/* A model that attends within documents: other documents do not move a bit of one's
 * loss, whatever the micro-batch, and gradients are those of the masked loss. */
#include "tests/test.h"

#include "tests/model_rig.h"

enum { S = 32 };

/* Sample b: documents from 0, cut and 27 on. */
static int64_t cut_of(int64_t sample) { return 11 + 3 * (sample % 4); }

/* `first`: number of the micro-batch's first sample. */
static void set_documents(struct rig *g, int64_t first, int32_t *starts) {
  for (int64_t t = 0; t < g->tokens; t++) {
    int64_t i = t % S, cut = cut_of(first + t / S);
    starts[t] = (int32_t)(i < cut ? 0 : i < 27 ? cut : 27);
    if (i == cut - 1 || i == 26) g->targets[t] = -1;
  }
  g->b.starts = starts;
}

/* Another first and third document in every sample. */
static void swap_others(struct rig *g, int64_t first) {
  for (int64_t t = 0; t < g->tokens; t++) {
    int64_t i = t % S, cut = cut_of(first + t / S);
    if (i >= cut && i < 27) continue;
    g->inputs[t] = (g->inputs[t] * 5 + 3) % 67;
    if (g->targets[t] >= 0) g->targets[t] = (g->targets[t] * 7 + 1) % 67;
  }
}

/* NLL of the first two samples, with micro-batches of `batch`. */
static bool losses(const char *route, int64_t batch, bool swapped, bool documents, float nll[2 * S]) {
  struct model_config c = rig_config_of(route);
  struct model_shape s = rig_shape(batch, rig_dtype(route));
  int32_t starts[4 * S];
  struct rig g;
  if (!rig_open(&g, &c, route, &s, 2)) {
    FAIL("%s: no model", route);
    return false;
  }
  for (int64_t first = 0; first < 2; first += batch) {
    rig_batch(&g, 5 + (uint64_t)first, S, c.vocab_size);
    set_documents(&g, first, starts);
    if (swapped) swap_others(&g, first);
    if (!documents) g.b.starts = NULL;
    model_forward(g.m, &g.b, g.nll);
    memcpy(nll + first * S, g.nll, (size_t)(batch > 2 ? 2 : batch) * S * sizeof *nll);
  }
  rig_close(&g);
  return true;
}

static int differing(const float *a, const float *b) {
  int n = 0;
  for (int64_t t = 0; t < 2 * S; t++) {
    int64_t i = t % S;
    if (i < cut_of(t / S) || i >= 26) continue; /* the second document's targets */
    n += memcmp(&a[t], &b[t], sizeof *a) != 0;
  }
  return n;
}

TEST(other_documents_change_nothing) {
  static const char *const routes[] = {"fp32", "bf16", "mxfp4-row-sr", "attention-fp8"};
  for (int r = 0; r < 4; r++) {
    float first[2 * S], x[2 * S];
    if (!losses(routes[r], 1, false, true, first)) return;
    for (int64_t batch = 1; batch <= 4; batch *= 2) {
      if (!losses(routes[r], batch, true, true, x)) return;
      if (differing(first, x) != 0) FAIL("%s, %d samples: %d losses moved", routes[r], (int)batch, differing(first, x));
    }
    CHECK(losses(routes[r], 1, false, false, x));
    CHECK(differing(first, x) > 2 * S / 4); /* without starts they do see each other */
  }
}

/* The gradient along itself is what a small step along it gains. */
TEST(gradients) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_F32);
  int32_t starts[2 * S];
  double none = 0;
  for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_ALL; k++) {
    struct rig g;
    s.recompute = (enum recompute)k;
    if (!rig_open(&g, &c, "fp32", &s, 2)) return;
    set_documents(&g, 0, starts);
    rig_clear(&g);
    model_forward_backward(g.m, &g.b, 1, g.nll);
    const float *gradient = model_gradients(g.m);
    float *w = model_params(g.m);
    double square = dot(gradient, gradient, g.elements), h = 1e-3 / sqrt(square), sum[2];
    for (int side = 0; side < 2; side++) {
      for (int64_t i = 0; i < g.elements; i++) w[i] += (float)((side ? 2 : -1) * h) * gradient[i];
      model_refresh_weights(g.m);
      sum[side] = rig_loss(&g);
    }
    if (k == RECOMPUTE_NONE) none = square;
    CHECK(square == none);
    CHECK_CLOSE((sum[1] - sum[0]) / (2 * h) / square, 1, 0.01);
    rig_close(&g);
  }
}

int main(void) {
  RUN(other_documents_change_nothing);
  RUN(gradients);
  return test_report();
}
