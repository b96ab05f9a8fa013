/* A model: made, run, looked at. */
#include "model/model.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "comm/share.h"
#include "model/parts.h"
#include "model/problems.h"

/* ---- making --------------------------------------------------------------- */

static bool shape_check(const struct model_config *c, const struct route *r, const struct model_shape *s,
                        struct error *e) {
  struct problems p = {.error = e, .code = ERROR_CONFIG};
  int64_t tokens = 0, widest = 0, blocks = 0;
  int64_t qkv = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
  int64_t width = 2 * c->ffn_size > qkv ? 2 * c->ffn_size : qkv;
  if (s->batch < 1) problems_add(&p, "batch %lld: must be at least 1", (long long)s->batch);
  if (s->seq_len < 1) problems_add(&p, "seq_len %lld: must be at least 1", (long long)s->seq_len);
  if (s->head_chunk < 0) problems_add(&p, "head_chunk %lld: must not be negative", (long long)s->head_chunk);
  if (s->batch >= 1 && s->seq_len >= 1 &&
      (!checked_mul(s->batch, s->seq_len, &tokens) || tokens > INT32_MAX || !checked_mul(tokens, width, &widest)))
    problems_add(&p, "batch %lld x seq_len %lld: at most 2^31 tokens", (long long)s->batch, (long long)s->seq_len);
  else if (s->seq_len >= 1 && checked_mul(s->seq_len, width, &blocks) && blocks / 16 > UINT32_MAX)
    problems_add(&p, "seq_len %lld: a sample has more than 2^32 blocks to draw for", (long long)s->seq_len);
  if (s->recompute == RECOMPUTE_EVERY_NTH && s->recompute_every < 1)
    problems_add(&p, "recompute_every %d: must be at least 1", s->recompute_every);
  if (s->master && s->param_dtype != DTYPE_BF16)
    problems_add(&p, "master weights: parameters are fp32 already");
  if (r->activations == DTYPE_F32 && s->param_dtype != DTYPE_F32)
    problems_add(&p, "route %s computes in fp32 and needs fp32 parameters", r->name);
  if (s->training && r->activations == DTYPE_F32 && s->gradient_dtype == DTYPE_BF16)
    problems_add(&p, "gradient_dtype bf16: route %s computes in fp32 and needs fp32 gradients", r->name);
  return problems_none(&p);
}

/* As many tokens as keep the FP32 logits near 64 MiB, but enough rows for an efficient
 * contraction, and for few passes over the output matrix and its gradient. */
static int64_t chosen_head_chunk(int64_t vocab_size) {
  int64_t chunk = (1 << 24) / vocab_size / 32 * 32;
  return chunk < 2048 ? 2048 : chunk;
}

static bool head_draws(const struct route *r) {
  return r->head.operand[DGRAD_DY].rounding == ROUND_STOCHASTIC || r->head.operand[WGRAD_DY].rounding == ROUND_STOCHASTIC;
}

static struct extent extent_of(const struct model_config *c, const struct route *r, const struct model_shape *s) {
  int64_t tokens = s->batch * s->seq_len;
  int64_t chunk = s->head_chunk;
  if (chunk == 0) {
    chunk = chosen_head_chunk(c->vocab_size);
    if (head_draws(r)) chunk = round_up(chunk, s->seq_len); /* draws count from a sample's first token */
  }
  return (struct extent){.tokens = tokens,
                         .head_chunk = chunk < tokens ? chunk : tokens,
                         .attention = {.batch = s->batch,
                                       .seq_len = s->seq_len,
                                       .n_heads = c->n_heads,
                                       .n_kv_heads = c->n_kv_heads,
                                       .head_dim = c->head_dim},
                         .hidden_size = c->hidden_size,
                         .ffn_size = c->ffn_size,
                         .vocab_size = c->vocab_size,
                         .attention_backward = s->training ? r->activations : 0};
}

/* The rows of every parameter that this rank owns. */
static void set_shares(struct model *m) {
  const int rank = m->shape.rank, world = m->shape.world;
  for (int i = 0; i < m->n_params; i++) {
    const struct param *p = &m->param[i];
    struct param_share *s = &m->share[i];
    s->first_row = share_row(p->rows, p->cols, rank, world);
    s->rows = share_row(p->rows, p->cols, rank + 1, world) - s->first_row;
    s->offset = m->share_elements;
    m->share_elements += s->rows * p->cols;
  }
}

static bool upload_rope(struct model *m, struct error *e) {
  int64_t n = m->shape.seq_len * m->config.head_dim;
  float *table = malloc((size_t)n * sizeof *table);
  if (!table) return error_set(e, ERROR_SYSTEM, "no memory for %lld rotary angles", (long long)n);
  void (*const make)(float *, int64_t, int64_t, double, const struct rope_scaling *) =
      m->parity.rope_angles == ROPE_ANGLES_FP32 ? rope_table_fp32 : rope_table;
  make(table, m->shape.seq_len, m->config.head_dim, m->config.rope_theta, &m->config.rope_scaling);
  m->d->k->upload(m->d, m->cos_sin, table, (size_t)n * sizeof *table);
  bool good = m->d->k->synchronize(m->d, e);
  free(table);
  return good;
}

struct model *model_create(struct device *d, struct arena *arena, const struct model_config *c,
                           const struct route *r, const struct model_shape *s, struct error *e) {
  if (!model_config_check(c, e) || !shape_check(c, r, s, e)) return NULL;
  struct extent extent = extent_of(c, r, s);
  if (!route_check(r, (int)c->n_layers, &extent, d, e)) {
    error_context(e, "route %s", r->name);
    return NULL;
  }

  struct model *m = calloc(1, sizeof *m);
  if (m) {
    m->param = calloc((size_t)params_number(c), sizeof *m->param);
    m->share = calloc((size_t)params_number(c), sizeof *m->share);
    m->block = calloc((size_t)c->n_layers, sizeof *m->block);
    m->old = calloc((size_t)c->n_layers + 2, sizeof *m->old);
    m->signals = calloc(1, sizeof *m->signals);
  }
  if (!m || !m->param || !m->share || !m->block || !m->old || !m->signals) {
    model_destroy(m);
    error_set(e, ERROR_SYSTEM, "no memory for a model's own records");
    return NULL;
  }
  m->d = d;
  m->config = *c;
  m->shape = *s;
  if (m->shape.gradient_dtype == 0) m->shape.gradient_dtype = DTYPE_F32;
  if (m->shape.world == 0) m->shape.world = 1;
  m->route = *r;
  m->extent = extent;
  m->type = r->activations;
  m->n_params = params_number(c);
  m->elements = model_config_param_count(c);
  params_list(c, m->param);
  set_shares(m);
  if (m->shape.training && m->share_elements == 0) {
    error_set(e, ERROR_CONFIG, "rank %d of %d would own no row of any parameter", m->shape.rank, m->shape.world);
    error_hint(e, "start fewer ranks");
    model_destroy(m);
    return NULL;
  }
  m->head.output.draw = DRAW_DY_HEAD;
  m->head.output.layer = -1;
  for (int layer = 0; layer < (int)c->n_layers; layer++) {
    m->block[layer].layer = layer;
    if (s->training) m->block[layer].recompute = recompute_of_block(s->recompute, s->recompute_every, layer);
    for (int site = 0; site < LINEAR_SITES; site++) {
      struct linear *l = &m->block[layer].linear[site];
      l->layer = layer;
      l->site = (enum linear_site)site;
      l->draw = linear_draw((enum linear_site)site);
    }
  }

  layout_model(m, arena);
  int64_t scratch_bytes = d->k->scratch_bytes(d, &extent);
  void *scratch = arena_take(arena, ARENA_SCRATCH, scratch_bytes, 1);
  if (arena->exhausted) {
    error_set(e, ERROR_SYSTEM, "the model does not fit: its arena has %zu bytes", arena->capacity);
    error_hint(e, "`fp4d plan` prints what a configuration needs");
    model_destroy(m);
    return NULL;
  }
  if (!arena->base) return m;

  d->k->set_scratch(d, scratch, scratch_bytes);
  if (m->gradients) model_clear_gradients(m);
  m->seen_host = d->k->allocate_host(d, sizeof *m->seen_host, e);
  if (!m->seen_host || !upload_rope(m, e)) {
    model_destroy(m);
    return NULL;
  }
  memset(m->seen_host, 0, sizeof *m->seen_host);
  m->seen_host->none.max_logit = -INFINITY;
  model_reset_signals(m);
  model_expire_weights(m);
  return m;
}

void model_destroy(struct model *m) {
  if (!m) return;
  free(m->param);
  free(m->share);
  free(m->block);
  free(m->old);
  free(m->signals);
  if (m->seen_host) m->d->k->release_host(m->d, m->seen_host);
  free(m);
}

/* ---- parameters ------------------------------------------------------------ */

int model_param_number(const struct model *m) { return m->n_params; }
const struct param *model_param(const struct model *m, int i) { return &m->param[i]; }
int64_t model_param_elements(const struct model *m) { return m->elements; }
const struct param_share *model_param_share(const struct model *m, int i) { return &m->share[i]; }
int64_t model_share_elements(const struct model *m) { return m->share_elements; }
int model_unit_number(const struct model *m) { return (int)m->config.n_layers + 2; }
void *model_params(const struct model *m) { return m->params; }
float *model_master(const struct model *m) { return m->master; }
float *model_adam_m(const struct model *m) { return m->adam_m; }
float *model_adam_v(const struct model *m) { return m->adam_v; }
void *model_gradients(const struct model *m) { return m->gradients; }
enum dtype model_gradient_dtype(const struct model *m) { return m->shape.gradient_dtype; }

static void clear_matrix(struct model *m, const struct matrix *x) {
  m->d->k->clear(m->d, x->data, (size_t)(x->rows * x->cols) * dtype_bytes(x->dtype));
}

void model_clear_gradients(struct model *m) {
  if (m->d_embedding.data != m->head.output.gradient.data) clear_matrix(m, &m->d_embedding);
  clear_matrix(m, &m->head.d_gain);
  for (int layer = 0; layer < (int)m->config.n_layers; layer++) {
    clear_matrix(m, &m->block[layer].d_attention_gain);
    clear_matrix(m, &m->block[layer].d_ffn_gain);
  }
  m->fresh = true;
}

void model_set_forward(struct model *m, enum forward_kind kind) {
  assert(kind == FORWARD_ROUTE || m->route.forward_tail > 0);
  m->forward = kind;
}

enum forward_kind model_forward_kind(const struct model *m) { return m->forward; }

bool model_set_parity(struct model *m, const struct model_parity *p, struct error *e) {
  const struct kernels *k = m->d->k;
  assert(!m->shape.training || (p->norm_cast == NORM_CAST_AFTER && p->rope_angles == ROPE_ANGLES_EXACT && p->vocabulary == 0));
  assert(p->vocabulary >= 0 && p->vocabulary <= m->config.vocab_size);
  if (p->norm_cast == NORM_CAST_BEFORE && !k->add_rmsnorm_forward_cast) {
    error_set(e, ERROR_DEVICE, "backend %s does not have RMSNorm with the cast before the gain", k->backend);
    return error_hint(e, "--norm-cast after, or run.backend: cpu");
  }
  if (p->vocabulary > 0 && !k->cross_entropy_within) {
    error_set(e, ERROR_DEVICE, "backend %s does not have a loss over a part of the rows", k->backend);
    return error_hint(e, "--vocab-size %lld (all rows), or run.backend: cpu", (long long)m->config.vocab_size);
  }
  const bool other_angles = p->rope_angles != m->parity.rope_angles;
  m->parity = *p;
  return !other_angles || !m->cos_sin || upload_rope(m, e); /* without cos_sin: measured alone */
}

/* What is counted of weights is of the operands that follow. */
void model_expire_weights(struct model *m) {
  for (int unit = 0; unit < model_unit_number(m); unit++) m->old[unit] = true;
  m->d->k->clear(m->d, m->seen->w, sizeof m->seen->w);
}

void model_refresh_unit(struct model *m, int unit) {
  const int layers = (int)m->config.n_layers;
  if (!m->old[unit]) return;
  m->old[unit] = false;
  for (int site = 0; unit >= 1 && unit <= layers && site < LINEAR_SITES; site++) linear_refresh(m, &m->block[unit - 1].linear[site]);
  if (unit == layers + 1) linear_refresh(m, &m->head.output);
}

void model_refresh_weights(struct model *m) {
  model_expire_weights(m);
  for (int unit = 0; unit < model_unit_number(m); unit++) model_refresh_unit(m, unit);
}

/* ---- computing -------------------------------------------------------------- */

void model_on_phase(struct model *m, void (*begin)(void *context, enum model_phase phase), void *context) {
  m->on_phase = begin;
  m->on_phase_context = context;
}

static void enter(struct model *m, enum model_phase phase) {
  if (m->on_phase) m->on_phase(m->on_phase_context, phase);
}

void model_on_weights(struct model *m, model_unit_listener *listener, void *context) {
  m->on_weights = listener;
  m->on_weights_context = context;
}

void model_on_gradient(struct model *m, model_unit_listener *listener, void *context) {
  m->on_gradient = listener;
  m->on_gradient_context = context;
}

static void need_weights(struct model *m, int unit) {
  if (m->on_weights) m->on_weights(m->on_weights_context, unit);
  assert(!m->old[unit]);
}

static void gradient_complete(struct model *m, int unit) {
  if (m->on_gradient) m->on_gradient(m->on_gradient_context, unit);
}

void model_on_tensor(struct model *m, model_listener *listener, void *context) {
  m->on_tensor = listener;
  m->on_tensor_context = context;
}

void model_on_logits(struct model *m, model_logits_listener *listener, void *context) {
  m->on_logits = listener;
  m->on_logits_context = context;
}

/* Embedding, blocks and the final norm. */
static void run_forward(struct model *m, const struct pass *p) {
  enter(m, MODEL_FORWARD);
  const int layers = (int)m->config.n_layers;
  const struct matrix *residual = &m->block[0].x_in, *delta = NULL;
  need_weights(m, 0);
  m->d->k->embedding_forward(m->d, &m->block[0].x_in, &m->embedding, p->b->inputs);
  for (int layer = 0; layer < layers; layer++) {
    need_weights(m, 1 + layer);
    block_forward(m, &m->block[layer], residual, delta, p);
    residual = &m->block[layer].x_mid;
    delta = &m->delta;
  }
  need_weights(m, 1 + layers);
  head_normalise(m);
}

void model_forward(struct model *m, const struct micro_batch *b, float *nll) {
  struct pass p = {.b = b};
  run_forward(m, &p);
  enter(m, MODEL_HEAD);
  head_loss(m, b->targets, nll);
}

void model_logits(struct model *m, const struct micro_batch *b, int64_t row, float *logits) {
  struct pass p = {.b = b};
  run_forward(m, &p);
  enter(m, MODEL_HEAD);
  head_logits(m, row, logits);
}

void model_forward_backward(struct model *m, const struct micro_batch *b, float grad_scale, float *nll) {
  struct pass p = {.b = b, .training = true};
  run_forward(m, &p);
  enter(m, MODEL_HEAD);
  head_loss_backward(m, &p, grad_scale, nll);
  enter(m, MODEL_BACKWARD);
  gradient_complete(m, (int)m->config.n_layers + 1);
  for (int layer = (int)m->config.n_layers - 1; layer >= 0; layer--) {
    block_backward(m, &m->block[layer], layer > 0 ? &m->block[layer - 1] : NULL, &p);
    gradient_complete(m, 1 + layer);
  }
  m->d->k->embedding_backward(m->d, &m->d_embedding, &m->d_residual, b->inputs);
  m->fresh = false;
  gradient_complete(m, 0);
}

/* ---- what was seen ------------------------------------------------------------ */

void model_fetch_signals(struct model *m) { m->d->k->download(m->d, &m->seen_host->fetched, m->seen, sizeof *m->seen); }

const struct model_signals *model_signals(const struct model *m) {
  const struct seen *seen = &m->seen_host->fetched;
  const struct quantise_counts *const counts[TENSOR_COUNT] = {
      [TENSOR_X] = seen->passes.x, [TENSOR_W] = seen->w, [TENSOR_DY] = seen->passes.dy};
  m->signals->max_logit = seen->passes.max_logit;
  memcpy(m->signals->attention, seen->passes.attention, sizeof seen->passes.attention);
  for (int t = 0; t < TENSOR_COUNT; t++)
    for (int view = 0; view < 2; view++) m->signals->counts[operand_role_of((enum tensor)t, (enum view)view)] = counts[t][view];
  return m->signals;
}

void model_reset_signals(struct model *m) { m->d->k->upload(m->d, &m->seen->passes, &m->seen_host->none, sizeof m->seen->passes); }
