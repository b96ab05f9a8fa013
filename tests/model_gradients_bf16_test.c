/* Gradients accumulated in BF16: FP32 sums, rounded once where something is added to the buffer. */
#include "tests/test.h"

#include "kernels/formats.h"
#include "tests/model_rig.h"

struct result {
  int64_t n;
  float *f32;     /* of a model with FP32 gradients */
  uint16_t *bf16; /* of one with BF16 gradients */
};

/* Gradients of the micro-batches that begin at these samples, accumulated by a fresh model. */
static struct result run(const struct model_config *c, const char *route, struct model_shape s, enum dtype dtype,
                         int threads, const uint64_t *sample, int batches) {
  struct rig g;
  s.gradient_dtype = dtype;
  if (!rig_open(&g, c, route, &s, threads)) {
    FAIL("%s: no model", route);
    exit(1);
  }
  CHECK(model_gradient_dtype(g.m) == dtype);
  rig_clear(&g);
  for (int i = 0; i < batches; i++) {
    rig_batch(&g, sample[i], s.seq_len, c->vocab_size);
    model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
  }
  struct result r = {.n = g.elements};
  const size_t bytes = (size_t)g.elements * dtype_bytes(dtype);
  void *copy = malloc(bytes);
  memcpy(copy, model_gradients(g.m), bytes);
  if (dtype == DTYPE_BF16)
    r.bf16 = copy;
  else
    r.f32 = copy;
  rig_close(&g);
  return r;
}

static void drop(struct result *r) { free(r->f32), free(r->bf16); }

/* Elements of [first, end) that are not to + from, added in FP32 and rounded once; to NULL: zeros. */
static int64_t unlike(const struct result *got, const struct result *to, const struct result *from, int64_t first, int64_t end) {
  int64_t n = 0;
  for (int64_t i = first; i < end; i++) n += got->bf16[i] != bf16_encode(from->f32[i] + (to ? bf16_decode(to->bf16[i]) : 0));
  return n;
}

static double distance_to(const struct result *got, const struct result *want) {
  float *values = malloc((size_t)got->n * sizeof *values);
  for (int64_t i = 0; i < got->n; i++) values[i] = bf16_decode(got->bf16[i]);
  const double d = distance(values, want->f32, got->n);
  free(values);
  return d;
}

static const char *const routes[] = {"bf16", "mxfp4-row-sr-h32", "nvfp4-global", "fp8"};
enum { ROUTES = sizeof routes / sizeof routes[0] };
static const uint64_t samples[] = {5, 7, 9, 11};

/* The output's gradient in one chunk: then every tensor takes one addition a micro-batch. */
TEST(one_rounding_a_micro_batch) {
  for (int i = 0; i < ROUTES; i++) {
    struct model_config c = rig_config_of(routes[i]);
    struct model_shape s = rig_shape(2, DTYPE_BF16);
    s.head_chunk = 0;
    struct result first = run(&c, routes[i], s, DTYPE_F32, 2, samples, 1), second = run(&c, routes[i], s, DTYPE_F32, 2, samples + 1, 1);
    struct result one = run(&c, routes[i], s, DTYPE_BF16, 1, samples, 1), two = run(&c, routes[i], s, DTYPE_BF16, 3, samples, 2);
    struct result both = run(&c, routes[i], s, DTYPE_F32, 2, samples, 2);
    CHECK_EQ_I64(unlike(&one, NULL, &first, 0, one.n), 0);
    /* The table adds its tokens one by one to what stands there: another order than their sum's. */
    const int64_t table = c.vocab_size * c.hidden_size;
    CHECK_EQ_I64(unlike(&two, &one, &second, table, two.n), 0);
    const double d = distance_to(&two, &both);
    if (!(d > 1e-4 && d < 4e-3)) FAIL("%s: %g from FP32", routes[i], d);
    drop(&first), drop(&second), drop(&one), drop(&two), drop(&both);
  }
}

/* Threads, recomputation: not a bit. Chunks of the output, a tied table, more micro-batches: a rounding each. */
TEST(what_changes_and_what_does_not) {
  for (int tied = 0; tied < 2; tied++) {
    struct model_config c = rig_config();
    c.tied = tied;
    struct model_shape s = rig_shape(2, DTYPE_BF16);
    struct result want = run(&c, "bf16", s, DTYPE_F32, 2, samples, 4), got = run(&c, "bf16", s, DTYPE_BF16, 1, samples, 4);
    const double d = distance_to(&got, &want);
    if (!(d > 1e-4 && d < 8e-3)) FAIL("tied %d: %g from FP32", tied, d);
    for (int k = RECOMPUTE_BOUNDARIES; k <= RECOMPUTE_ALL; k++) {
      s.recompute = (enum recompute)k;
      struct result again = run(&c, "bf16", s, DTYPE_BF16, 4, samples, 4);
      CHECK(memcmp(again.bf16, got.bf16, (size_t)got.n * 2) == 0);
      drop(&again);
    }
    drop(&want), drop(&got);
  }
}

TEST(learns_by_heart) {
  for (int master = 0; master < 2; master++) {
    struct model_config c = rig_config();
    struct model_shape s = rig_shape(2, DTYPE_BF16);
    s.gradient_dtype = DTYPE_BF16;
    s.master = master;
    struct rig g;
    int updates;
    if (!rig_open(&g, &c, "mxfp4-row-sr", &s, 2)) return;
    const double last = rig_learn(&g, DTYPE_BF16, 60, 0.1, &updates);
    if (!(last < 0.1)) FAIL("master %d: loss %g after %d updates", master, last, updates);
    rig_close(&g);
  }
}

int main(void) {
  RUN(one_rounding_a_micro_batch);
  RUN(what_changes_and_what_does_not);
  RUN(learns_by_heart);
  return test_report();
}
