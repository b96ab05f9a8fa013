/* What routes do to a model: what is quantised and counted, who draws, heads and
 * forward tails of other formats. */
#include "tests/test.h"

#include "model/parts.h"
#include "tests/model_rig.h"

static const char *const *all_routes; /* those that run, NULL-terminated */

static bool executes(const struct route *r, const struct model_config *c, const struct model_shape *s) {
  struct error e;
  struct device *d = device_open("cpu", 1, &e);
  struct arena a = arena_measure();
  struct model *m = model_create(d, &a, c, r, s, &e);
  bool good = m != NULL;
  if (!good) printf("# %s: %s\n", r->name, e.message);
  CHECK(good || e.code == ERROR_DEVICE);
  model_destroy(m);
  d->k->close(d);
  return good;
}

static float *gradients_of(struct rig *g, uint64_t seed) {
  rig_clear(g);
  g->b.seed = seed;
  model_forward_backward(g->m, &g->b, 1.0f / 64, g->nll);
  float *copy = malloc((size_t)g->elements * sizeof *copy);
  memcpy(copy, model_gradients(g->m), (size_t)g->elements * sizeof *copy);
  return copy;
}

/* ---- counts ----------------------------------------------------------------- */

/* Elements that each role quantises: of every block whose operand is packed. */
static void expected_elements(const struct route *r, const struct model_config *c, int64_t tokens,
                              int64_t elements[OPERAND_ROLE_COUNT]) {
  struct extent x = {.hidden_size = c->hidden_size, .ffn_size = c->ffn_size,
                     .attention = {1, tokens, c->n_heads, c->n_kv_heads, c->head_dim}};
  memset(elements, 0, OPERAND_ROLE_COUNT * sizeof *elements);
  for (int layer = 0; layer < (int)c->n_layers; layer++)
    for (int site = 0; site < LINEAR_SITES; site++) {
      struct linear_shape s = linear_shape(&x, (enum linear_site)site);
      const int64_t sizes[OPERAND_ROLE_COUNT] = {[FPROP_X] = tokens * s.k,  [FPROP_W] = s.n * s.k,
                                                 [DGRAD_DY] = tokens * s.n, [DGRAD_W] = s.n * s.k,
                                                 [WGRAD_DY] = tokens * s.n, [WGRAD_X] = tokens * s.k};
      for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
        if (!encoding_is_plain(&route_linear(r, layer, (enum linear_site)site)->operand[role])) elements[role] += sizes[role];
    }
}

TEST(signals) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct route r;
    struct error e;
    struct rig g;
    int64_t elements[OPERAND_ROLE_COUNT];
    if (!rig_open(&g, &c, all_routes[i], &s, 2)) return;
    route_named(all_routes[i], (int)c.n_layers, &r, &e);
    expected_elements(&r, &c, g.tokens, elements);
    model_reset_signals(g.m);
    model_refresh_weights(g.m);
    const struct model_signals *seen = rig_signals(g.m);
    for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
      bool weight = role == FPROP_W || role == DGRAD_W;
      if (seen->counts[role].elements != (weight ? elements[role] : 0))
        FAIL("%s: %s: %lld elements of weights", all_routes[i], operand_role_names[role], (long long)seen->counts[role].elements);
    }
    model_forward_backward(g.m, &g.b, 1.0f / 64, g.nll);
    seen = rig_signals(g.m);
    for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
      const struct quantise_counts *n = &seen->counts[role];
      const struct encoding *encoding = &r.span[0].linear.operand[role];
      if (n->elements != elements[role] || n->saturated > n->elements || n->underflowed > n->elements || n->zero_blocks > n->blocks)
        FAIL("%s: %s: %lld elements, expected %lld", all_routes[i], operand_role_names[role], (long long)n->elements,
             (long long)elements[role]);
      if (encoding_is_plain(encoding)) continue;
      if (!(n->amax > 0 && n->amax < 1e4f)) FAIL("%s: %s: amax %g", all_routes[i], operand_role_names[role], (double)n->amax);
      /* four of E2M1's bits lose small elements, eight of E4M3's hardly any; nothing clips but halved tiles and drawn codes */
      bool fp8 = encoding->format == FORMAT_E4M3 || encoding->format == FORMAT_E5M2;
      if (!fp8 && !(n->underflowed > elements[role] / 100 && n->underflowed < elements[role] / 2))
        FAIL("%s: %s: %lld of %lld underflow", all_routes[i], operand_role_names[role], (long long)n->underflowed, (long long)elements[role]);
      if (n->saturated > elements[role] / 20)
        FAIL("%s: %s: %lld of %lld saturate", all_routes[i], operand_role_names[role], (long long)n->saturated, (long long)elements[role]);
    }
    rig_close(&g);
  }
}

/* ---- draws ------------------------------------------------------------------ */

/* The last block's `down` gets the head's dY, which nothing before it drew for:
 * its weight gradient tells whether the column view draws. */
TEST(who_draws) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct route r;
    struct error e;
    struct rig g;
    if (!rig_open(&g, &c, all_routes[i], &s, 2)) return;
    route_named(all_routes[i], (int)c.n_layers, &r, &e);
    const struct linear_route *last = route_linear(&r, (int)c.n_layers - 1, LINEAR_DOWN), *first = route_linear(&r, 0, LINEAR_DOWN);
    bool column = last->operand[WGRAD_DY].rounding == ROUND_STOCHASTIC;
    bool any = first->operand[DGRAD_DY].rounding == ROUND_STOCHASTIC || last->operand[DGRAD_DY].rounding == ROUND_STOCHASTIC || column;
    float *a = gradients_of(&g, 1), *b = gradients_of(&g, 2), *again = gradients_of(&g, 1);
    const size_t bytes = (size_t)g.elements * sizeof *a;
    if ((memcmp(a, b, bytes) != 0) != any) FAIL("%s: another seed: %s", all_routes[i], any ? "the same" : "another result");
    CHECK(memcmp(a, again, bytes) == 0);
    for (int p = 0; p < model_param_number(g.m); p++) {
      const struct param *q = model_param(g.m, p);
      if (q->layer != (int)c.n_layers - 1 || !strstr(q->name, ".w2.")) continue;
      bool same = memcmp(a + q->offset, b + q->offset, (size_t)(q->rows * q->cols) * sizeof *a) == 0;
      if (same == column) FAIL("%s: dY's column view %s", all_routes[i], same ? "does not draw" : "draws");
    }
    /* draws move the gradient as much as rounding does, no more */
    double d = distance(a, b, g.elements);
    if (any && !(d > 0.01 && d < 0.5)) FAIL("%s: seeds differ by %g", all_routes[i], d);
    free(a);
    free(b);
    free(again);
    rig_close(&g);
  }
}

/* ---- outer factors ------------------------------------------------------------ */

/* The two arms of gate_up have factors of their own: what one holds is not seen
 * in the other's codes, scales and factors. */
TEST(arms) {
  static const struct {
    enum operand_role role;
    enum view view;
    int64_t strip, segment, outers; /* ffn 256, hidden 64, 64 tokens */
  } expected[] = {{FPROP_X, VIEW_ROW, 256, 0, 1},   {WGRAD_X, VIEW_COLUMN, 256, 0, 1},
                  {FPROP_W, VIEW_ROW, 256, 0, 2},   {DGRAD_W, VIEW_COLUMN, 0, 256, 2},
                  {DGRAD_DY, VIEW_ROW, 256, 256, 2}, {WGRAD_DY, VIEW_COLUMN, 256, 0, 2}};
  for (int i = 0; all_routes[i]; i++) {
    if (strncmp(all_routes[i], "nvfp4-local", 11) != 0) continue;
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, DTYPE_BF16);
    struct rig g;
    if (!rig_open(&g, &c, all_routes[i], &s, 2)) return;
    struct linear *l = &g.m->block[1].linear[LINEAR_GATE_UP];
    const struct views *views[OPERAND_ROLE_COUNT] = {[FPROP_X] = &l->x, [FPROP_W] = &l->w,   [DGRAD_DY] = &l->dy,
                                                     [DGRAD_W] = &l->w, [WGRAD_DY] = &l->dy, [WGRAD_X] = &l->x};
    for (int k = 0; k < OPERAND_ROLE_COUNT; k++) {
      struct operand o = views_operand(views[expected[k].role], expected[k].view);
      CHECK_EQ_I64(o.strip, expected[k].strip);
      CHECK_EQ_I64(o.segment, expected[k].segment);
      CHECK_EQ_I64(operand_outer_count(&o), expected[k].outers);
    }
    CHECK_EQ_I64(g.m->block[1].linear[LINEAR_QKV].dy.row.segment, 0);
    CHECK_EQ_I64(g.m->block[1].linear[LINEAR_QKV].w.row.strip, 0);

    /* W1 made large changes its own outer factor alone */
    float before[2] = {l->w.row.outer[0], l->w.row.outer[1]};
    uint16_t *w = l->source.data;
    w[5] = 0x4300; /* 128 */
    model_refresh_weights(g.m);
    CHECK(l->w.row.outer[0] > 10 * before[0] && l->w.row.outer[1] == before[1]);
    CHECK(l->w.column.outer[0] == l->w.row.outer[0] && l->w.column.outer[1] == l->w.row.outer[1]);
    rig_close(&g);
  }
}

/* ---- one read, two encodings ----------------------------------------------------- */

static const struct kernels *real;
static int weights_read, gradients_emitted;
static bool hybrid_weights, hybrid_gradients;

static bool is_hybrid(const struct emission *out, enum format row, enum format column) {
  return out->row && out->column && out->row->encoding.format == row && out->column->encoding.format == column;
}

static void watch_quantise(struct device *d, const struct emission *out, const struct matrix *source) {
  weights_read++;
  hybrid_weights = hybrid_weights && is_hybrid(out, FORMAT_MXFP4, FORMAT_NVFP4_LOCAL);
  real->quantise(d, out, source);
}
static void watch_swiglu(struct device *d, const struct emission *out, const struct matrix *d_act,
                         const struct matrix *gate_up) {
  gradients_emitted++;
  hybrid_gradients = hybrid_gradients && is_hybrid(out, FORMAT_NVFP4_LOCAL, FORMAT_MXFP4) && out->plain == NULL;
  real->swiglu_backward(d, out, d_act, gate_up);
}

/* A weight is read once for its MXFP4 row view and its NVFP4 column view, as a
 * gradient is for the reverse; each view is what a route of its own format has. */
TEST(hybrid) {
  static const char *const routes[3] = {"operand-hybrid-h32", "mxfp4-row-sr-h32", "nvfp4-local"};
  struct rig g[3];
  struct model_config c = rig_config_of("nvfp4-local");
  struct model_shape s = rig_shape(2, DTYPE_BF16);
  for (int i = 0; i < 3; i++) {
    struct route r;
    struct error e;
    CHECK(route_named(routes[i], 3, &r, &e));
    if (!executes(&r, &c, &s)) return;
    if (!rig_open_route(&g[i], &c, &r, &s, 2)) return;
  }
  real = g[0].d->k;
  struct kernels watched = *real;
  watched.quantise = watch_quantise;
  watched.swiglu_backward = watch_swiglu;
  g[0].d->k = &watched;
  hybrid_weights = hybrid_gradients = true;
  model_refresh_weights(g[0].m);
  CHECK(weights_read == 3 * LINEAR_SITES && hybrid_weights);
  float *gradients = gradients_of(&g[0], 11);
  CHECK(gradients_emitted == 3 && hybrid_gradients);
  free(gradients);
  g[0].d->k = real;
  for (int site = 0; site < LINEAR_SITES; site++) {
    const struct views *hybrid = &g[0].m->block[2].linear[site].w;
    const struct operand *row = &g[1].m->block[2].linear[site].w.row, *column = &g[2].m->block[2].linear[site].w.column;
    CHECK(encoding_equal(&hybrid->row.encoding, &row->encoding) && encoding_equal(&hybrid->column.encoding, &column->encoding));
    CHECK(memcmp(hybrid->row.codes, row->codes, (size_t)operand_code_bytes(&row->encoding, row->rows, row->cols)) == 0);
    CHECK(memcmp(hybrid->column.codes, column->codes, (size_t)operand_code_bytes(&column->encoding, column->rows, column->cols)) == 0);
    CHECK(memcmp(hybrid->column.outer, column->outer, (size_t)operand_outer_count(column) * sizeof(float)) == 0);
  }
  /* the forward is MXFP4's */
  gradients = gradients_of(&g[1], 11);
  CHECK(memcmp(g[0].nll, g[1].nll, (size_t)g[0].tokens * sizeof(float)) == 0);
  free(gradients);
  for (int i = 0; i < 3; i++) rig_close(&g[i]);
}

/* ---- heads -------------------------------------------------------------------- */

static bool head_route(struct route *r, const struct route_words *w) {
  struct error e;
  return route_named("bf16", 3, r, &e) && linear_route_parse(w, &r->head, &e);
}

TEST(heads) {
  static const struct {
    const char *name;
    struct route_words words;
    double most; /* from the BF16 head's gradient */
    bool free;   /* its scales do not depend on the chunk */
  } cases[] = {
      {"bf16", {NULL, "bf16", "bf16", "bf16", "same", "bf16", "bf16", "none", NULL}, 0, true},
      {"fp8", {NULL, "e4m3", "e4m3", "e5m2", "same", "e4m3", "e5m2", "none", NULL}, 0.2, false},
      {"fp8-row", {NULL, "e4m3/row", "e4m3/row", "e5m2/row", "e4m3/row", "bf16", "bf16", NULL, NULL}, 0.2, true},
      {"mxfp4", {NULL, "mxfp4", "mxfp4", "mxfp4/sr", "same", "mxfp4", "mxfp4", "none", NULL}, 0.6, true},
      {"mxfp4-h32", {NULL, "mxfp4", "mxfp4", "mxfp4/sr", "same", "mxfp4", "mxfp4", "signed-32", NULL}, 0.6, true},
      {"nvfp4", {NULL, "nvfp4", "nvfp4", "nvfp4/sr", "same", "nvfp4", "nvfp4/sr", "signed-16", NULL}, 0.6, false},
      {"nvfp4-local", {NULL, "nvfp4-local", "nvfp4-local", "nvfp4-local/sr", "same", "nvfp4-local", "nvfp4-local", "none", NULL}, 0.6, false},
      {"wgrad-alone", {NULL, "bf16", "bf16", "bf16", "same", "mxfp4", "mxfp4", "none", NULL}, 0.6, true},
  };
  struct model_config c = rig_config();
  c.vocab_size = 96;
  float *reference = NULL;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (int tied = 0; tied < 2; tied++) {
      struct model_shape s = rig_shape(2, tied ? DTYPE_F32 : DTYPE_BF16);
      struct route r;
      struct rig g;
      c.tied = tied;
      s.head_chunk = 64;
      CHECK(head_route(&r, &cases[i].words));
      if (!executes(&r, &c, &s)) continue;
      if (!rig_open_route(&g, &c, &r, &s, 2)) return;
      float *whole = gradients_of(&g, 11), nll[64];
      memcpy(nll, g.nll, sizeof nll);
      if (!tied && i == 0) reference = gradients_of(&g, 11);
      if (!tied) {
        double d = distance(whole, reference, g.elements);
        if (!(d <= cases[i].most && (d > 0 || i == 0))) FAIL("head %s: %g from bf16", cases[i].name, d);
      }
      const struct model_signals *seen = rig_signals(g.m);
      int64_t x = encoding_is_plain(&r.head.operand[FPROP_X]) ? 0 : 64 * 64, dy = encoding_is_plain(&r.head.operand[WGRAD_DY]) ? 0 : 64 * 96;
      CHECK(seen->counts[FPROP_X].elements % 4096 == 0 && (seen->counts[FPROP_X].elements > 0) == (x > 0));
      CHECK((seen->counts[WGRAD_DY].elements > 0) == (dy > 0));

      /* the logits of a row are those that the loss is made of */
      for (int64_t row = 0; row < 64; row += 21) {
        float logits[96];
        double sum = 0;
        model_logits(g.m, &g.b, row, logits);
        for (int v = 0; v < 96; v++) sum += exp((double)logits[v]);
        CHECK_CLOSE(log(sum) - (double)logits[g.targets[row]], nll[row], 1e-5);
      }
      rig_close(&g);

      /* other threads, other chunks; without training */
      if (!rig_open_route(&g, &c, &r, &s, 3)) return;
      float *other = gradients_of(&g, 11);
      if (memcmp(whole, other, (size_t)g.elements * sizeof *other) != 0) FAIL("head %s: threads differ", cases[i].name);
      free(other);
      rig_close(&g);
      s.head_chunk = 32;
      if (!rig_open_route(&g, &c, &r, &s, 2)) return;
      other = gradients_of(&g, 11);
      double d = distance(other, whole, g.elements);
      if (cases[i].free && !(d < 1e-6 && memcmp(nll, g.nll, sizeof nll) == 0)) FAIL("head %s: chunks differ by %g", cases[i].name, d);
      if (!cases[i].free && !(d < 0.6)) FAIL("head %s: chunks differ by %g", cases[i].name, d);
      free(other);
      rig_close(&g);
      s.head_chunk = 0;
      s.training = false;
      if (!rig_open_route(&g, &c, &r, &s, 2)) return;
      model_forward(g.m, &g.b, g.nll);
      CHECK(memcmp(nll, g.nll, sizeof nll) == 0);
      rig_close(&g);
      free(whole);
    }
  }
  free(reference);
}

/* What a head cannot be, by name. */
TEST(heads_refused) {
  struct error e;
  struct device *d = device_open("cpu", 1, &e);
  struct route r;
  struct route_words w = route_words_of("mxfp4");
  struct extent x = {.tokens = 128, .head_chunk = 48, .attention = {2, 64, 4, 2, 16}, .hidden_size = 64, .ffn_size = 96,
                     .vocab_size = 258};
  CHECK(head_route(&r, &w));
  CHECK(!route_check(&r, 3, &x, d, &e));
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  CHECK(strstr(e.message, "head dgrad dy mxfp4/1x32/encode: output: vocab_size 258 is not a multiple of 32"));
  CHECK(strstr(e.message, "head fprop w mxfp4/2d32/adaptive: output: vocab_size 258 is not a multiple of 32"));
  CHECK(strstr(e.message, "head wgrad x: head_chunk 48 is not a multiple of 32"));
  x.vocab_size = 256;
  x.head_chunk = 32;
  CHECK(route_check(&r, 3, &x, d, &e));
  w.dgrad_dy = "mxfp4/sr"; /* draws count from a sample's first token */
  CHECK(head_route(&r, &w));
  CHECK(!route_check(&r, 3, &x, d, &e));
  CHECK_STR(e.message, "head dgrad dy: head_chunk 32 is not a multiple of 64");
  x.head_chunk = 64;
  CHECK(route_check(&r, 3, &x, d, &e));

  /* a chunk that is chosen fits */
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(20, DTYPE_BF16);
  s.head_chunk = 0;
  s.seq_len = 96;
  c.vocab_size = 96;
  CHECK(executes(&r, &c, &s));
  d->k->close(d);
}

/* ---- the forward tail ------------------------------------------------------------ */

TEST(forward_tail) {
  struct model_config c = rig_config();
  struct route r;
  struct error e;
  for (const char *const *name = route_names(); *name; name++) { /* no tail: no update is in it, also of a longer run */
    CHECK(route_named(*name, 32, &r, &e));
    for (int64_t update = 0; r.forward_tail == 0 && update < 300; update++)
      if (route_in_forward_tail(&r, update, 100)) FAIL("%s, update %d of 100", *name, (int)update);
  }
  CHECK(route_named("mxfp4-row-sr", 3, &r, &e));
  r.forward_tail = 0.25;
  CHECK(!route_in_forward_tail(&r, 0, 100) && !route_in_forward_tail(&r, 75, 100) && route_in_forward_tail(&r, 76, 100) &&
        route_in_forward_tail(&r, 100, 100));
  for (int wide = 0; wide < 2; wide++) {
    struct model_shape s = rig_shape(2, wide ? DTYPE_F32 : DTYPE_BF16);
    struct rig low, high, g;
    float *kept[2] = {NULL, NULL};
    if (!rig_open(&low, &c, "mxfp4-row-sr", &s, 2) || !rig_open(&high, &c, "bf16", &s, 2)) return;
    float *route = gradients_of(&low, 11), *bf16 = gradients_of(&high, 11);
    for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_ALL; k++) {
      s.recompute = (enum recompute)k;
      if (!rig_open_route(&g, &c, &r, &s, 2)) return;
      const size_t bytes = (size_t)g.elements * sizeof(float), tokens = (size_t)g.tokens * sizeof(float);
      float *first = gradients_of(&g, 11);
      CHECK(memcmp(first, route, bytes) == 0 && memcmp(g.nll, low.nll, tokens) == 0);

      model_set_forward(g.m, FORWARD_PLAIN);
      CHECK(model_forward_kind(g.m) == FORWARD_PLAIN);
      model_reset_signals(g.m);
      float *tail = gradients_of(&g, 11);
      CHECK(memcmp(g.nll, high.nll, tokens) == 0); /* the forward is bf16's */
      double from_bf16 = distance(tail, bf16, g.elements);
      if (!(from_bf16 > 0.02 && from_bf16 < 0.5)) FAIL("backward: %g from bf16's", from_bf16); /* the backward is not */
      const struct model_signals *seen = rig_signals(g.m);
      CHECK_EQ_I64(seen->counts[FPROP_X].elements, 0);
      CHECK(seen->counts[WGRAD_X].elements > 0 && seen->counts[DGRAD_DY].elements > 0);
      if (!kept[0]) {
        kept[0] = tail;
      } else {
        CHECK(memcmp(kept[0], tail, bytes) == 0); /* recomputation changes nothing here either */
        free(tail);
      }

      model_set_forward(g.m, FORWARD_ROUTE);
      tail = gradients_of(&g, 11);
      CHECK(memcmp(tail, route, bytes) == 0);
      free(tail);
      free(first);
      rig_close(&g);
    }
    s.training = false;
    if (!rig_open_route(&g, &c, &r, &s, 2)) return;
    model_set_forward(g.m, FORWARD_PLAIN);
    model_forward(g.m, &g.b, g.nll);
    CHECK(memcmp(g.nll, high.nll, (size_t)g.tokens * sizeof(float)) == 0);
    rig_close(&g);
    free(kept[0]);
    free(route);
    free(bf16);
    rig_close(&low);
    rig_close(&high);
  }
  r.forward_tail = 1.5;
  struct model_shape s = rig_shape(2, DTYPE_BF16);
  struct arena a = arena_measure();
  struct device *d = device_open("cpu", 1, &e);
  CHECK(!model_create(d, &a, &c, &r, &s, &e) && strstr(e.message, "forward_bf16_tail 1.5"));
  CHECK(route_named("fp32", 3, &r, &e));
  r.forward_tail = 0.5;
  s.param_dtype = DTYPE_F32;
  CHECK(!model_create(d, &a, &c, &r, &s, &e) && strstr(e.message, "forward_bf16_tail 0.5: activations are fp32"));
  d->k->close(d);
}

/* Attention keeps its formats in the tail: its backward reads what its forward published. */
TEST(forward_tail_of_attention) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_BF16);
  struct route r;
  struct error e;
  struct rig plain, g;
  CHECK(route_named("attention-mxfp4-proj-nvfp4", 3, &r, &e));
  r.forward_tail = 0.25;
  if (!rig_open(&plain, &c, "attention-mxfp4", &s, 2) || !rig_open_route(&g, &c, &r, &s, 2)) return;
  model_reset_signals(plain.m);
  float *expected = gradients_of(&plain, 11), *route = gradients_of(&g, 11);
  CHECK(memcmp(plain.nll, g.nll, (size_t)g.tokens * sizeof(float)) != 0);
  model_reset_signals(g.m);
  model_set_forward(g.m, FORWARD_PLAIN);
  float *tail = gradients_of(&g, 11);
  CHECK(memcmp(plain.nll, g.nll, (size_t)g.tokens * sizeof(float)) == 0); /* BF16 linears around the same attention */
  for (int t = 0; t < ATTENTION_TENSORS; t++) {
    const struct quantise_counts *own = &rig_signals(g.m)->attention[t], *other = &rig_signals(plain.m)->attention[t];
    CHECK(own->elements > 0 && own->elements == other->elements);
    if (t != ATTENTION_DO && t != ATTENTION_DS) CHECK(memcmp(own, other, sizeof *own) == 0);
  }
  double from_plain = distance(tail, expected, g.elements); /* dgrad of the projections is the route's */
  if (!(from_plain > 1e-3 && from_plain < 0.2)) FAIL("backward: %g", from_plain);
  free(expected);
  free(route);
  free(tail);
  rig_close(&g);
  rig_close(&plain);
}

/* Around every route's linears: the same with another schedule of the work, and the linears' counts as ever. */
TEST(attention_with_every_route) {
  for (int i = 0; all_routes[i]; i++) {
    struct model_config c = rig_config_of(all_routes[i]);
    struct model_shape s = rig_shape(2, rig_dtype(all_routes[i]));
    struct route r;
    struct error e;
    struct rig a, b;
    int64_t elements[OPERAND_ROLE_COUNT];
    CHECK(route_named(all_routes[i], (int)c.n_layers, &r, &e));
    if (r.activations != DTYPE_BF16) continue;
    r.attention_qk = FORMAT_NVFP4;
    r.attention_pv = i % 2 ? FORMAT_E4M3 : FORMAT_MXFP4;
    r.attention_d_out = FORMAT_E5M2;
    expected_elements(&r, &c, 64, elements);
    if (!rig_open_route(&a, &c, &r, &s, 1)) return;
    model_reset_signals(a.m);
    float *first = gradients_of(&a, 11);
    const struct model_signals *seen = rig_signals(a.m);
    CHECK(seen->counts[FPROP_X].elements == elements[FPROP_X] && seen->counts[WGRAD_DY].elements == elements[WGRAD_DY]);
    for (int t = 0; t < ATTENTION_TENSORS; t++) CHECK(seen->attention[t].elements > 0);
    s.recompute = RECOMPUTE_ALL;
    if (!rig_open_route(&b, &c, &r, &s, 3)) return;
    float *second = gradients_of(&b, 11);
    if (memcmp(first, second, (size_t)a.elements * sizeof(float)) != 0 || memcmp(a.nll, b.nll, 64 * sizeof(float)) != 0)
      FAIL("%s: recomputed by three threads it differs", all_routes[i]);
    free(first);
    free(second);
    rig_close(&a);
    rig_close(&b);
  }
}

/* Sizes that attention's codes do not have, by name and before any memory. */
TEST(attention_refused) {
  struct model_config c = rig_config();
  struct model_shape s = rig_shape(2, DTYPE_BF16);
  struct route r;
  struct error e;
  struct device *d = device_open("cpu", 1, &e);
  c.head_dim = 8;
  for (const char *const *name = all_routes; *name; name++) {
    struct arena a = arena_measure();
    if (strncmp(*name, "attention-", 10) != 0) continue;
    CHECK(route_named(*name, 3, &r, &e));
    CHECK(!model_create(d, &a, &c, &r, &s, &e) && a.used == 0);
    if (!strstr(e.message, "attention qk nvfp4: head_dim 8 is not a multiple of 16")) FAIL("%s: %s", *name, e.message);
    CHECK(!strstr(e.message, "attention pv") == (r.attention_pv != FORMAT_MXFP4) && !strstr(e.message, "attention do"));
  }
  r.attention_qk = r.attention_pv = FORMAT_E4M3; /* as it is for linears: no blocks, any size */
  s.seq_len = 31;
  r.n_spans = 0;
  struct route_words w = route_words_of("bf16");
  w.layers = "all";
  CHECK(route_add_span(&r, &w, 3, &e));
  CHECK(executes(&r, &c, &s));
  r.attention_pv = FORMAT_NVFP4;
  r.attention_d_out = FORMAT_MXFP4;
  struct arena a = arena_measure();
  CHECK(!model_create(d, &a, &c, &r, &s, &e));
  CHECK(strstr(e.message, "attention pv nvfp4: P and V are bf16, e4m3 or mxfp4") && strstr(e.message, "attention do mxfp4: dO is bf16, e5m2 or e4m3"));
  d->k->close(d);
}

int main(void) {
  all_routes = rig_routes();
  RUN(signals);
  RUN(who_draws);
  RUN(arms);
  RUN(hybrid);
  RUN(heads);
  RUN(heads_refused);
  RUN(forward_tail);
  RUN(forward_tail_of_attention);
  RUN(attention_with_every_route);
  RUN(attention_refused);
  return test_report();
}
