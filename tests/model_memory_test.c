/* Memory: what is measured is what is laid out, inside the block, without overlap
 * where things live together; a device of plain memory that computes nothing. */
#include "tests/test.h"

#include <stdlib.h>

#include "base/checked.h"
#include "model/parts.h"

static const char *refuse(const struct device *d, const struct encoding *encoding, enum view view) {
  (void)view;
  (void)d;
  (void)encoding;
  return NULL; /* whatever a route asks for is laid out */
}
static const char *refuse_attention(const struct device *d, const struct attention_formats *f, enum attention_part part,
                                    const struct attention_shape *s) {
  (void)d, (void)f, (void)part, (void)s;
  return NULL;
}
static enum dtype attention_backward; /* that scratch was wanted for */
static int64_t scratch_bytes(const struct device *d, const struct extent *x) {
  (void)d;
  attention_backward = x->attention_backward;
  return 1000 + x->tokens;
}
static void *scratch;
static void set_scratch(struct device *d, void *p, int64_t bytes) {
  (void)d;
  scratch = p;
  memset(p, 0, (size_t)bytes);
}
static void *allocate_host(struct device *d, size_t bytes, struct error *e) {
  (void)d, (void)e;
  return malloc(bytes);
}
static void release_host(struct device *d, void *p) {
  (void)d;
  free(p);
}
static void clear(struct device *d, void *p, size_t bytes) {
  (void)d;
  memset(p, 0, bytes);
}
static void upload(struct device *d, void *to, const void *from, size_t bytes) {
  (void)d;
  memcpy(to, from, bytes);
}
static bool synchronize(struct device *d, struct error *e) {
  (void)d;
  (void)e;
  return true;
}

static const char *refuse_extent(const struct device *d, const struct extent *x, enum dtype activations) {
  (void)d, (void)x, (void)activations;
  return NULL;
}

static const struct kernels table = {.backend = "memory",
                                     .refuse_extent = refuse_extent,
                                     .refuse_encoding = refuse,
                                     .refuse_attention = refuse_attention,
                                     .scratch_bytes = scratch_bytes,
                                     .set_scratch = set_scratch,
                                     .allocate_host = allocate_host,
                                     .release_host = release_host,
                                     .clear = clear,
                                     .upload = upload,
                                     .download = upload,
                                     .synchronize = synchronize};
static struct device device = {.k = &table};

static struct model_shape shape_of(enum recompute recompute, bool training) {
  return (struct model_shape){.batch = 2,
                              .seq_len = 64,
                              .recompute = recompute,
                              .recompute_every = 2,
                              .head_chunk = 64,
                              .param_dtype = DTYPE_BF16,
                              .master = training,
                              .training = training};
}

/* Fills n bytes and says whether any was filled before. */
static bool claim(char *base, unsigned char *seen, const void *p, size_t n) {
  if (!p || n == 0) return true;
  size_t first = (size_t)((const char *)p - base);
  bool fresh = true;
  for (size_t i = 0; i < n; i++) {
    fresh = fresh && !seen[first + i];
    seen[first + i] = 1;
  }
  return fresh;
}

static bool claim_matrix(char *base, unsigned char *seen, const struct matrix *m) {
  return claim(base, seen, m->data, (size_t)(m->rows * m->cols) * dtype_bytes(m->dtype ? m->dtype : DTYPE_F32));
}

static bool claim_operand(char *base, unsigned char *seen, const struct operand *o) {
  if (!o->encoding.format) return true;
  return claim(base, seen, o->codes, (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols)) &&
         claim(base, seen, o->scales, (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols)) &&
         claim(base, seen, o->outer, (size_t)operand_outer_count(o) * sizeof(float));
}

/* Everything that lives together with block `layer`'s backward. */
static bool claim_linear(char *base, unsigned char *seen, const struct linear *l) {
  return claim_operand(base, seen, &l->x.row) && claim_operand(base, seen, &l->x.column) &&
         claim_operand(base, seen, &l->w.row) && claim_operand(base, seen, &l->w.column) &&
         claim_operand(base, seen, &l->dy.row) && claim_operand(base, seen, &l->dy.column) &&
         (l->w.plain.data == l->source.data || claim_matrix(base, seen, &l->w.plain));
}

static bool claim_attention(const struct model *m, char *base, unsigned char *seen, const struct block *b) {
  const struct attention_shape *s = &m->extent.attention;
  const size_t statistics = (size_t)(m->extent.tokens * s->n_heads) * 4;
  const struct attention_gradient *g = &m->attention_gradient;
  bool good = claim(base, seen, b->lse, statistics);
  for (int v = 0; v < ATTENTION_VIEWS; v++) {
    const int64_t bytes = attention_view_bytes(&b->payload.formats, s, m->shape.training, (enum attention_view)v);
    good = good && (bytes > 0) == (b->payload.view[v] != NULL) && claim(base, seen, b->payload.view[v], (size_t)bytes);
  }
  return good && claim(base, seen, g->codes, (size_t)(m->extent.tokens * s->n_heads * s->head_dim)) &&
         claim(base, seen, g->lift, (size_t)(s->batch * s->n_kv_heads) * 4) && claim(base, seen, g->d_stat, statistics) &&
         claim(base, seen, g->l_stat, statistics);
}

static bool apart(const struct model *m, char *base, unsigned char *seen, int layer) {
  const struct block *b = &m->block[layer];
  bool good = claim(base, seen, m->params, (size_t)m->elements * 2) && claim(base, seen, m->master, (size_t)m->elements * 4) &&
              claim(base, seen, m->adam_m, (size_t)m->elements * 4) && claim(base, seen, m->adam_v, (size_t)m->elements * 4) &&
              claim(base, seen, m->gradients, (size_t)m->elements * 4);
  good = good && claim_matrix(base, seen, &m->delta) && claim_matrix(base, seen, &m->d_residual) &&
         claim_matrix(base, seen, &m->d_normed) && claim_matrix(base, seen, &m->d_qkv) &&
         claim_matrix(base, seen, &m->d_attended) && claim_matrix(base, seen, &m->d_act) &&
         claim_matrix(base, seen, &m->head.x_out) && claim_matrix(base, seen, &m->head.normed) &&
         claim_matrix(base, seen, &m->head.logits) && claim_matrix(base, seen, &m->head.d_logits) &&
         claim(base, seen, m->cos_sin, (size_t)(m->shape.seq_len * m->config.head_dim) * 4);
  good = good && claim_matrix(base, seen, &b->x_mid) && claim_matrix(base, seen, &b->qkv) &&
         claim_matrix(base, seen, &b->attended) && claim_matrix(base, seen, &b->gate_up) &&
         claim(base, seen, b->attention_rstd, (size_t)m->extent.tokens * 4) &&
         claim(base, seen, b->ffn_rstd, (size_t)m->extent.tokens * 4) && claim_attention(m, base, seen, b);
  good = good && claim_linear(base, seen, &m->head.output);
  for (int l = 0; l < (int)m->config.n_layers; l++) good = good && claim_matrix(base, seen, &m->block[l].x_in);
  for (int site = 0; site < LINEAR_SITES; site++) {
    const struct linear *l = &b->linear[site];
    if (site != LINEAR_OUT) good = good && claim_matrix(base, seen, &l->x.plain);
    if (site == LINEAR_GATE_UP) good = good && claim_matrix(base, seen, &l->dy.plain);
    good = good && claim_linear(base, seen, l);
  }
  /* what the block above emits into this one's `down` lives with the block above */
  if (layer > 0) {
    const struct views *dy = &m->block[layer - 1].linear[LINEAR_DOWN].dy;
    struct operand own = b->linear[LINEAR_DOWN].dy.row;
    if (own.encoding.format && dy->row.encoding.format) good = good && own.codes == dy->row.codes;
  }
  return good;
}

static void check(const struct model_config *c, const struct route *r, const struct model_shape *s) {
  struct error e;
  struct arena measured = arena_measure();
  struct model *m = model_create(&device, &measured, c, r, s, &e);
  if (!m) {
    FAIL("%s: %s", r->name, e.message);
    return;
  }
  CHECK(model_params(m) == NULL);
  CHECK_EQ_I64(attention_backward, s->training ? r->activations : 0);
  model_destroy(m);

  char *base = aligned_alloc(ARENA_ALIGNMENT, (size_t)round_up((int64_t)measured.used, ARENA_ALIGNMENT));
  unsigned char *seen = calloc(measured.used, 1);
  struct arena real = arena_over(base, measured.used);
  m = model_create(&device, &real, c, r, s, &e);
  if (!m) {
    FAIL("%s: %s", r->name, e.message);
  } else {
    CHECK_EQ_I64(real.used, measured.used);
    for (int i = 0; i < ARENA_CATEGORY_COUNT; i++) CHECK_EQ_I64(real.by_category[i], measured.by_category[i]);
    CHECK((char *)scratch >= base && (char *)scratch + 1000 <= base + measured.used);
    CHECK((model_gradients(m) != NULL) == s->training);
    CHECK((model_adam_v(m) != NULL) == s->training);
    CHECK((model_master(m) != NULL) == s->master);
    CHECK(model_initialise(m, 1, 1, &e));
    for (int layer = 0; layer < (int)c->n_layers; layer++) {
      memset(seen, 0, measured.used);
      if (s->training && !apart(m, base, seen, layer)) FAIL("%s: block %d overlaps", r->name, layer + 1);
    }
    model_destroy(m);
  }
  /* one byte less does not do */
  real = arena_over(base, measured.used - 1);
  m = model_create(&device, &real, c, r, s, &e);
  CHECK(m == NULL && e.code == ERROR_SYSTEM);
  model_destroy(m);
  free(base);
  free(seen);
}

TEST(measured_is_real) {
  struct model_config c;
  struct error e;
  model_preset("demo", &c);
  c.n_layers = 3;
  c.n_layers = 6;
  c.hidden_size = 64;
  c.ffn_size = 256; /* whole strips an arm */
  c.vocab_size = 96;
  for (const char *const *name = route_names(); *name; name++) {
    struct route r;
    if (strcmp(*name, "fp32") == 0) continue;
    CHECK(route_named(*name, 6, &r, &e));
    /* every other one with the head in its own format */
    if ((name - route_names()) / 3 % 2) r.head = r.span[0].linear;
    const int number = (int)(name - route_names());
    for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_ALL; k++) { /* each setting with every fourth route is enough */
      struct model_shape s = shape_of((enum recompute)k, true);
      if (number < 2 || number % 4 == k) check(&c, &r, &s);
    }
    struct model_shape s = shape_of(RECOMPUTE_NONE, false);
    check(&c, &r, &s);
  }
  c.n_layers = 3;
  /* routes that differ by block and by linear, packed fprop with plain wgrad and the reverse */
  struct route r = {.name = "mixed", .activations = DTYPE_BF16, .attention_qk = FORMAT_BF16,
                    .attention_pv = FORMAT_BF16, .attention_d_out = FORMAT_BF16, .head = linear_route_plain(FORMAT_BF16)};
  const struct route_words words[] = {{"1", "mxfp4", "mxfp4", "mxfp4/sr", "same", "bf16", "bf16", "none", NULL},
                                      {"2", "bf16", "bf16", "mxfp4/sr", "mxfp4", "mxfp4", "mxfp4", "none", NULL},
                                      {"3", "bf16", "mxfp4", "bf16", "same", "bf16", "bf16", "none", "qkv"},
                                      {"3", "mxfp4", "bf16", "mxfp4/sr", "bf16", "mxfp4", "bf16", NULL, "out"},
                                      {"3", "bf16", "bf16", "bf16", "mxfp4", "mxfp4", "mxfp4", "none", "gate_up"},
                                      {"3", "bf16", "bf16", "bf16", "same", "bf16", "bf16", "none", "down"}};
  for (int i = 0; i < 6; i++) CHECK(route_add_span(&r, &words[i], 3, &e));
  for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_ALL; k++) {
    struct model_shape s = shape_of((enum recompute)k, true);
    check(&c, &r, &s);
    s.param_dtype = DTYPE_F32;
    s.master = false;
    check(&c, &r, &s);
  }
}

TEST(recomputation_needs_less) {
  struct model_config c;
  struct error e;
  struct route r;
  size_t used[RECOMPUTE_ALL + 1];
  model_preset("llama3-8b", &c);
  route_named("bf16", (int)c.n_layers, &r, &e);
  for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_ALL; k++) {
    struct model_shape s = shape_of((enum recompute)k, true);
    s.seq_len = 8192;
    s.batch = 1;
    struct arena a = arena_measure();
    struct model *m = model_create(&device, &a, &c, &r, &s, &e);
    CHECK(m != NULL);
    model_destroy(m);
    used[k] = a.used;
    CHECK_EQ_I64(a.by_category[ARENA_PARAMETERS], 8030261248 * 2);
    CHECK_EQ_I64(a.by_category[ARENA_MASTER], 8030261248 * 4);
    CHECK_EQ_I64(a.by_category[ARENA_GRADIENTS], 8030261248 * 4);
  }
  CHECK(used[RECOMPUTE_ALL] < used[RECOMPUTE_EVERY_NTH] && used[RECOMPUTE_EVERY_NTH] < used[RECOMPUTE_NONE]);
  /* boundaries: the two normed X and the product, BF16, once instead of 32 times */
  CHECK_EQ_I64(used[RECOMPUTE_NONE] - used[RECOMPUTE_BOUNDARIES], 31LL * 8192 * (4096 + 4096 + 14336) * 2);
  /* all: 32 blocks keep [8192, 4096] BF16 each, 2 GiB, instead of their activations */
  CHECK(used[RECOMPUTE_NONE] - used[RECOMPUTE_ALL] > ((size_t)25 << 30));
}

TEST(bf16_gradients_need_half) {
  struct model_config c;
  struct error e;
  struct route r;
  model_preset("llama3-8b", &c);
  route_named("bf16", (int)c.n_layers, &r, &e);
  struct model_shape s = shape_of(RECOMPUTE_ALL, true);
  struct arena wide = arena_measure(), narrow = arena_measure();
  struct model *m = model_create(&device, &wide, &c, &r, &s, &e);
  CHECK(m && model_gradient_dtype(m) == DTYPE_F32);
  model_destroy(m);
  s.gradient_dtype = DTYPE_BF16;
  m = model_create(&device, &narrow, &c, &r, &s, &e);
  CHECK(m && model_gradient_dtype(m) == DTYPE_BF16);
  model_destroy(m);
  CHECK_EQ_I64(narrow.by_category[ARENA_GRADIENTS], 8030261248 * 2);
  CHECK_EQ_I64(wide.used - narrow.used, 8030261248 * 2);
}

TEST(refused_shapes) {
  struct model_config c;
  struct error e;
  struct route bf16, fp32;
  model_preset("tiny", &c);
  route_named("bf16", (int)c.n_layers, &bf16, &e);
  route_named("fp32", (int)c.n_layers, &fp32, &e);
  struct model_shape s = {.batch = 0, .seq_len = -1, .head_chunk = -1, .recompute = RECOMPUTE_EVERY_NTH,
                          .param_dtype = DTYPE_F32, .master = true, .training = true};
  struct arena a = arena_measure();
  CHECK(!model_create(&device, &a, &c, &bf16, &s, &e));
  CHECK(strstr(e.message, "batch 0") && strstr(e.message, "seq_len -1") && strstr(e.message, "head_chunk -1") &&
        strstr(e.message, "recompute_every 0") && strstr(e.message, "master"));
  s = shape_of(RECOMPUTE_NONE, true);
  s.seq_len = INT64_MAX / 2;
  CHECK(!model_create(&device, &a, &c, &bf16, &s, &e));
  s = shape_of(RECOMPUTE_NONE, true);
  CHECK(!model_create(&device, &a, &c, &fp32, &s, &e));
  CHECK(strstr(e.message, "fp32 parameters") && !strstr(e.message, "gradient_dtype"));
  s = (struct model_shape){.batch = 1, .seq_len = 32, .param_dtype = DTYPE_F32, .gradient_dtype = DTYPE_BF16, .training = true};
  CHECK(!model_create(&device, &a, &c, &fp32, &s, &e));
  CHECK(strstr(e.message, "gradient_dtype bf16: route fp32 computes in fp32 and needs fp32 gradients"));
  c.hidden_size = 0;
  CHECK(!model_create(&device, &a, &c, &bf16, &s, &e));
  CHECK_EQ_I64(a.used, 0);
}

int main(void) {
  RUN(measured_is_real);
  RUN(recomputation_needs_less);
  RUN(bf16_gradients_need_half);
  RUN(refused_shapes);
  return test_report();
}
