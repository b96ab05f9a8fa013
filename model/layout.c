/* Where everything lies.  The same code measures and places: while measuring
 * every pointer comes out NULL.
 *
 * What blocks share (recomputed activations, operands that live inside one
 * block's pass) is laid out for each sharing block from the beginning of one
 * region as large as the largest needs, so routes may differ by block. */
#include "model/parts.h"

static void *offset(void *base, int64_t elements, enum dtype type) {
  return base ? (char *)base + (size_t)elements * dtype_bytes(type) : NULL;
}

static struct matrix matrix_at(void *data, enum dtype type, int64_t rows, int64_t cols) {
  return (struct matrix){.data = data, .dtype = type, .rows = rows, .cols = cols};
}

static struct matrix matrix_take(struct arena *a, enum arena_category c, enum dtype type, int64_t rows,
                                 int64_t cols) {
  return matrix_at(arena_take(a, c, rows * cols, dtype_bytes(type)), type, rows, cols);
}

static float *floats_take(struct arena *a, enum arena_category c, int64_t n) { return arena_take(a, c, n, sizeof(float)); }

/* A contraction's source as its operands see it. arm > 0: n is two outputs of
 * that width in one matrix (W1|W3), each with outer factors of its own. */
struct source {
  enum tensor tensor;
  int64_t rows, cols, arm;
};

/* Arms are rows of W and columns of dY; along rows of an operand a route's strips
 * divide them (route_check), along its contraction each is a segment. */
void linear_set_outers(struct operand *o, enum tensor t, int64_t arm) {
  bool arms = arm > 0 && t != TENSOR_X;
  bool along_rows = t == TENSOR_W ? o->view == VIEW_ROW : o->view == VIEW_COLUMN;
  switch (o->encoding.scale) {
    case SCALE_ROW: o->strip = 1; break;
    case SCALE_LOCAL_FAITHFUL:
    case SCALE_LOCAL_POW2:
      o->strip = o->encoding.strip;
      if (arms && along_rows && o->strip == 0) o->strip = arm;
      if (arms && !along_rows) o->segment = arm;
      break;
    case SCALE_NONE:
    case SCALE_MX_ENCODE:
    case SCALE_MX_DECODE:
    case SCALE_MX_FLOOR:
    case SCALE_MX_ADAPTIVE:
    case SCALE_TENSOR:
    case SCALE_TENSOR_4OVER6: break;
  }
}

/* A packed operand for `view` of a source; nothing for a plain encoding. */
static struct operand operand_take(struct arena *a, enum arena_category c, const struct encoding *encoding,
                                   enum view view, struct source s) {
  struct operand o = {.view = view};
  if (encoding_is_plain(encoding)) return o;
  o.encoding = *encoding;
  o.rows = view == VIEW_ROW ? s.rows : s.cols;
  o.cols = view == VIEW_ROW ? s.cols : s.rows;
  linear_set_outers(&o, s.tensor, s.arm);
  o.codes = arena_take(a, c, operand_code_bytes(encoding, o.rows, o.cols), 1);
  o.scales = arena_take(a, c, operand_scale_bytes(encoding, o.rows, o.cols), 1);
  o.outer = floats_take(a, c, operand_outer_count(&o));
  return o;
}

/* What the operands of a linear with `tokens` rows are made from. */
static struct source x_of(const struct linear *l, int64_t tokens) {
  return (struct source){TENSOR_X, tokens, l->source.cols, l->arm};
}
static struct source w_of(const struct linear *l) {
  return (struct source){TENSOR_W, l->source.rows, l->source.cols, l->arm};
}
static struct source dy_of(const struct linear *l, int64_t tokens) {
  return (struct source){TENSOR_DY, tokens, l->source.rows, l->arm};
}

/* ---- parameters ----------------------------------------------------------- */

static struct matrix parameter(const struct model *m, int64_t first, int64_t rows, int64_t cols) {
  return matrix_at(offset(m->params, first, m->shape.param_dtype), m->shape.param_dtype, rows, cols);
}

static struct matrix gradient(const struct model *m, int64_t first, int64_t rows, int64_t cols) {
  return matrix_at(offset(m->gradients, first, m->shape.gradient_dtype), m->shape.gradient_dtype, rows, cols);
}

static void place_parameters(struct model *m, struct arena *a) {
  const struct model_shape *s = &m->shape;
  m->params = arena_take(a, ARENA_PARAMETERS, m->elements, dtype_bytes(s->param_dtype));
  if (s->training) {
    if (s->master) m->master = floats_take(a, ARENA_MASTER, m->share_elements);
    m->adam_m = floats_take(a, ARENA_ADAM_M, m->share_elements);
    m->adam_v = floats_take(a, ARENA_ADAM_V, m->share_elements);
    m->gradients = arena_take(a, ARENA_GRADIENTS, m->elements, dtype_bytes(s->gradient_dtype));
  }
  int64_t hidden = m->config.hidden_size, vocab = m->config.vocab_size;
  m->embedding = parameter(m, 0, vocab, hidden);
  m->d_embedding = gradient(m, 0, vocab, hidden);

  struct head *h = &m->head;
  int64_t norm = param_offset_norm(m), output = param_offset_head(m);
  h->gain = parameter(m, norm, 1, hidden);
  h->d_gain = gradient(m, norm, 1, hidden);
  h->output.source = parameter(m, output, vocab, hidden);
  h->output.gradient = gradient(m, output, vocab, hidden);

  static const enum block_param first_of[LINEAR_SITES] = {P_WQ, P_WO, P_W1, P_W2};
  for (int layer = 0; layer < (int)m->config.n_layers; layer++) {
    struct block *b = &m->block[layer];
    int64_t attention_norm = param_offset(m, layer, P_ATTENTION_NORM), ffn_norm = param_offset(m, layer, P_FFN_NORM);
    b->attention_gain = parameter(m, attention_norm, 1, hidden);
    b->d_attention_gain = gradient(m, attention_norm, 1, hidden);
    b->ffn_gain = parameter(m, ffn_norm, 1, hidden);
    b->d_ffn_gain = gradient(m, ffn_norm, 1, hidden);
    for (int site = 0; site < LINEAR_SITES; site++) {
      struct linear *l = &b->linear[site];
      struct linear_shape shape = linear_shape(&m->extent, (enum linear_site)site);
      int64_t first = param_offset(m, layer, first_of[site]);
      l->source = parameter(m, first, shape.n, shape.k);
      l->arm = linear_arm(&m->extent, (enum linear_site)site);
      l->gradient = gradient(m, first, shape.n, shape.k);
    }
  }
}

/* The parameters serve as a plain operand themselves where their type is the
 * activations'; else a copy does. */
static struct matrix plain_weight(struct model *m, struct arena *a, const struct matrix *source) {
  if (source->dtype == m->type) return *source;
  return matrix_take(a, ARENA_WEIGHT_OPERANDS, m->type, source->rows, source->cols);
}

static void place_weight(struct model *m, struct arena *a, struct linear *l, const struct linear_route *route) {
  const struct encoding *row = &route->operand[FPROP_W], *column = &route->operand[DGRAD_W];
  bool training = m->shape.training;
  l->w.row = operand_take(a, ARENA_WEIGHT_OPERANDS, row, VIEW_ROW, w_of(l));
  if (training) l->w.column = operand_take(a, ARENA_WEIGHT_OPERANDS, column, VIEW_COLUMN, w_of(l));
  if (encoding_is_plain(row) || (training && encoding_is_plain(column)) || m->route.forward_tail > 0)
    l->w.plain = plain_weight(m, a, &l->source);
}

static void place_weight_operands(struct model *m, struct arena *a) {
  for (int layer = 0; layer < (int)m->config.n_layers; layer++)
    for (int site = 0; site < LINEAR_SITES; site++)
      place_weight(m, a, &m->block[layer].linear[site], route_linear(&m->route, layer, (enum linear_site)site));
  place_weight(m, a, &m->head.output, &m->route.head);
}

/* ---- activations ---------------------------------------------------------- */

static struct attention_payload payload_take(const struct model *m, struct arena *a, enum arena_category c) {
  struct attention_payload p = {.formats = route_attention(&m->route)};
  for (int v = 0; v < ATTENTION_VIEWS; v++) {
    int64_t bytes = attention_view_bytes(&p.formats, &m->extent.attention, m->shape.training, (enum attention_view)v);
    if (bytes > 0) p.view[v] = arena_take(a, c, bytes, 1);
  }
  return p;
}

static struct attention_gradient attention_gradient_take(const struct model *m, struct arena *a, enum arena_category c) {
  struct attention_gradient g = {0};
  const struct attention_shape *s = &m->extent.attention;
  if (attention_format_plain(m->route.attention_d_out)) return g;
  g.codes = arena_take(a, c, m->extent.tokens * s->n_heads * s->head_dim, 1);
  g.lift = floats_take(a, c, s->batch * s->n_kv_heads);
  g.d_stat = floats_take(a, c, m->extent.tokens * s->n_heads);
  g.l_stat = floats_take(a, c, m->extent.tokens * s->n_heads);
  return g;
}

/* Of a block: what its contractions and attention write, and what normalises. x_in is placed apart. */
static void place_outputs(struct model *m, struct block *b, struct arena *a, enum arena_category c) {
  int64_t tokens = m->extent.tokens, hidden = m->config.hidden_size;
  b->attention_rstd = floats_take(a, c, tokens);
  b->ffn_rstd = floats_take(a, c, tokens);
  b->lse = floats_take(a, c, tokens * m->config.n_heads);
  b->x_mid = matrix_take(a, c, m->type, tokens, hidden);
  b->qkv = matrix_take(a, c, m->type, tokens, b->linear[LINEAR_QKV].source.rows);
  b->payload = payload_take(m, a, c);
  b->attended = matrix_take(a, c, m->type, tokens, b->linear[LINEAR_OUT].source.cols);
  b->gate_up = matrix_take(a, c, m->type, tokens, b->linear[LINEAR_GATE_UP].source.rows);
  b->linear[LINEAR_OUT].x.plain = b->attended;
}

/* Of a block: X as wgrad reads it. */
static void place_wgrad_x(struct model *m, struct block *b, struct arena *a, enum arena_category c) {
  int64_t tokens = m->extent.tokens;
  for (int site = 0; site < LINEAR_SITES; site++) {
    struct linear *l = &b->linear[site];
    const struct encoding *x = &route_linear(&m->route, b->layer, l->site)->operand[WGRAD_X];
    l->x.column = operand_take(a, c, x, VIEW_COLUMN, x_of(l, tokens));
    if (encoding_is_plain(x) && site != LINEAR_OUT)
      l->x.plain = matrix_take(a, c, m->type, tokens, l->source.cols);
  }
}

/* Of a block: what it keeps from its forward to its backward. */
static void place_kept(struct model *m, struct block *b, struct arena *a, enum arena_category c) {
  if (b->recompute != RECOMPUTE_ALL) place_outputs(m, b, a, c);
  if (b->recompute == RECOMPUTE_NONE) place_wgrad_x(m, b, a, c);
}

/* Of a block: the others of these, which its backward makes again or nobody asks for again. */
static void place_remade(struct model *m, struct block *b, struct arena *a, enum arena_category c) {
  bool training = m->shape.training;
  if (!training || b->recompute == RECOMPUTE_ALL) place_outputs(m, b, a, c);
  if (training && b->recompute != RECOMPUTE_NONE) place_wgrad_x(m, b, a, c);
}

/* Of a block: operands that live only inside its forward or its backward. */
static void place_passing(struct model *m, struct block *b, struct arena *a, enum arena_category c) {
  int64_t tokens = m->extent.tokens;
  for (int site = 0; site < LINEAR_SITES; site++) {
    struct linear *l = &b->linear[site];
    const struct linear_route *route = route_linear(&m->route, b->layer, l->site);
    l->x.row = operand_take(a, c, &route->operand[FPROP_X], VIEW_ROW, x_of(l, tokens));
    bool kept = m->shape.training && encoding_is_plain(&route->operand[WGRAD_X]);
    bool read = encoding_is_plain(&route->operand[FPROP_X]) || m->route.forward_tail > 0;
    if (read && !kept && site != LINEAR_OUT)
      l->x.plain = matrix_take(a, c, m->type, tokens, l->source.cols);
  }
  if (!m->shape.training) return;
  for (int site = 0; site < LINEAR_SITES; site++) {
    struct linear *l = &b->linear[site];
    const struct linear_route *route = route_linear(&m->route, b->layer, l->site);
    bool plain = encoding_is_plain(&route->operand[DGRAD_DY]) || encoding_is_plain(&route->operand[WGRAD_DY]);
    if (site != LINEAR_DOWN) {
      l->dy.row = operand_take(a, c, &route->operand[DGRAD_DY], VIEW_ROW, dy_of(l, tokens));
      l->dy.column = operand_take(a, c, &route->operand[WGRAD_DY], VIEW_COLUMN, dy_of(l, tokens));
    }
    if (site == LINEAR_GATE_UP && plain) l->dy.plain = matrix_take(a, c, m->type, tokens, l->source.rows);
  }
  b->linear[LINEAR_QKV].dy.plain = m->d_qkv;
  b->linear[LINEAR_OUT].dy.plain = b->linear[LINEAR_DOWN].dy.plain = m->d_residual;
}

/* Of a block: the dY of `down`, which the block above emits while its own operands live. */
static void place_crossing(struct model *m, struct block *b, struct arena *a, enum arena_category c) {
  struct linear *l = &b->linear[LINEAR_DOWN];
  const struct linear_route *route = route_linear(&m->route, b->layer, l->site);
  l->dy.row = operand_take(a, c, &route->operand[DGRAD_DY], VIEW_ROW, dy_of(l, m->extent.tokens));
  l->dy.column = operand_take(a, c, &route->operand[WGRAD_DY], VIEW_COLUMN, dy_of(l, m->extent.tokens));
}

typedef void place_block(struct model *m, struct block *b, struct arena *a, enum arena_category c);

/* One region for all blocks. */
static void place_shared(struct model *m, struct arena *a, place_block *place) {
  size_t largest = 0;
  for (int layer = 0; layer < (int)m->config.n_layers; layer++) {
    struct arena trial = arena_measure();
    place(m, &m->block[layer], &trial, ARENA_TRANSIENT);
    if (trial.used > largest) largest = trial.used;
  }
  void *region = arena_take(a, ARENA_TRANSIENT, (int64_t)largest, 1);
  for (int layer = 0; layer < (int)m->config.n_layers; layer++) {
    struct arena part = region ? arena_over(region, largest) : arena_measure();
    place(m, &m->block[layer], &part, ARENA_TRANSIENT);
  }
}

static void place_activations(struct model *m, struct arena *a) {
  int64_t tokens = m->extent.tokens, hidden = m->config.hidden_size;
  bool training = m->shape.training;
  enum arena_category transient = ARENA_TRANSIENT;
  m->cos_sin = floats_take(a, transient, m->shape.seq_len * m->config.head_dim);
  m->delta = matrix_take(a, transient, m->type, tokens, hidden);
  if (training) {
    m->d_residual = matrix_take(a, transient, m->type, tokens, hidden);
    m->d_normed = matrix_take(a, transient, m->type, tokens, hidden);
    m->d_qkv = matrix_take(a, transient, m->type, tokens, m->block[0].linear[LINEAR_QKV].source.rows);
    m->d_attended = matrix_take(a, transient, m->type, tokens, m->block[0].linear[LINEAR_OUT].source.cols);
    m->attention_gradient = attention_gradient_take(m, a, transient);
    m->d_act = matrix_take(a, transient, m->type, tokens, m->config.ffn_size);
  }

  struct matrix x_in = {0}; /* without training: one for all */
  if (!training) x_in = matrix_take(a, transient, m->type, tokens, hidden);
  for (int layer = 0; layer < (int)m->config.n_layers; layer++) {
    struct block *b = &m->block[layer];
    b->x_in = training ? matrix_take(a, ARENA_ACTIVATIONS, m->type, tokens, hidden) : x_in;
    if (training) place_kept(m, b, a, ARENA_ACTIVATIONS);
  }
  place_shared(m, a, place_remade);
  place_shared(m, a, place_passing);
  if (training) place_shared(m, a, place_crossing);
}

static void place_head(struct model *m, struct arena *a) {
  struct head *h = &m->head;
  int64_t tokens = m->extent.tokens, hidden = m->config.hidden_size, vocab = m->config.vocab_size;
  int64_t chunk = m->extent.head_chunk;
  h->x_out = matrix_take(a, ARENA_HEAD, m->type, tokens, hidden);
  h->normed = matrix_take(a, ARENA_HEAD, m->type, tokens, hidden);
  h->rstd = floats_take(a, ARENA_HEAD, tokens);
  h->logits = matrix_take(a, ARENA_HEAD, DTYPE_F32, chunk, vocab);
  struct linear *l = &h->output;
  const struct encoding *route = m->route.head.operand;
  l->x.row = operand_take(a, ARENA_HEAD, &route[FPROP_X], VIEW_ROW, x_of(l, chunk));
  if (!m->shape.training) return;
  l->x.column = operand_take(a, ARENA_HEAD, &route[WGRAD_X], VIEW_COLUMN, x_of(l, chunk));
  l->dy.row = operand_take(a, ARENA_HEAD, &route[DGRAD_DY], VIEW_ROW, dy_of(l, chunk));
  l->dy.column = operand_take(a, ARENA_HEAD, &route[WGRAD_DY], VIEW_COLUMN, dy_of(l, chunk));
  h->d_logits = m->type == DTYPE_F32 ? h->logits : matrix_take(a, ARENA_HEAD, m->type, chunk, vocab);
}

void layout_model(struct model *m, struct arena *a) {
  place_parameters(m, a);
  place_weight_operands(m, a);
  place_activations(m, a);
  place_head(m, a);
  m->seen = arena_take(a, ARENA_TRANSIENT, 1, sizeof *m->seen);
  if (!m->seen) return;
  m->counts[TENSOR_X] = m->seen->passes.x;
  m->counts[TENSOR_W] = m->seen->w;
  m->counts[TENSOR_DY] = m->seen->passes.dy;
  m->attention_counts = m->seen->passes.attention;
  m->max_logit = &m->seen->passes.max_logit;
}
