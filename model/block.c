/* A block, as its boundaries: each producer ends by writing the operands of the
 * linear that follows, forward and backward. */
#include "model/parts.h"

void block_normalise(struct model *m, const struct emission *out, struct matrix *residual_out, float *rstd,
                     const struct matrix *residual, const struct matrix *delta, const struct matrix *gain) {
  const struct kernels *k = m->d->k;
  const float eps = (float)m->config.norm_eps;
  if (m->parity.norm_cast == NORM_CAST_BEFORE)
    k->add_rmsnorm_forward_cast(m->d, out, residual_out, rstd, residual, delta, gain, eps);
  else
    k->add_rmsnorm_forward(m->d, out, residual_out, rstd, residual, delta, gain, eps);
}

static void quantise_attended(struct model *m, const struct block *b, struct emission *e) {
  e->plain = NULL; /* `attended` is the plain view */
  if (e->row || e->column) m->d->k->quantise(m->d, e, &b->attended);
}

void block_forward(struct model *m, struct block *b, const struct matrix *residual, const struct matrix *delta,
                   const struct pass *p) {
  const struct kernels *k = m->d->k;
  struct device *d = m->d;
  const struct attention_shape *shape = &m->extent.attention;
  struct linear *qkv = &b->linear[LINEAR_QKV], *out = &b->linear[LINEAR_OUT];
  struct linear *gate_up = &b->linear[LINEAR_GATE_UP], *down = &b->linear[LINEAR_DOWN];

  /* (1) residual + RMSNorm -> QKV */
  struct emission e = emission_of_x(m, qkv, true, p);
  block_normalise(m, &e, delta ? &b->x_in : NULL, b->attention_rstd, residual, delta, &b->attention_gain);
  linear_forward(m, qkv, &b->qkv);

  /* (2) QKV + RoPE -> attention -> output projection */
  struct quantise_counts *seen = p->again ? NULL : m->attention_counts;
  k->rope_forward(d, &b->qkv, &b->payload, seen, m->cos_sin, shape);
  k->attention_forward(d, &b->attended, b->lse, p->again ? NULL : m->max_logit, seen, &b->qkv, &b->payload,
                       p->b->starts, shape);
  e = emission_of_x(m, out, true, p);
  quantise_attended(m, b, &e);
  linear_forward(m, out, &m->delta);

  /* (4) residual -> next RMSNorm -> gate and up */
  e = emission_of_x(m, gate_up, true, p);
  block_normalise(m, &e, &b->x_mid, b->ffn_rstd, &b->x_in, &m->delta, &b->ffn_gain);
  linear_forward(m, gate_up, &b->gate_up);

  /* (3) gated FFN; the stream after the block is not needed again */
  e = emission_of_x(m, down, !p->again, p);
  k->swiglu_forward(d, &e, &b->gate_up);
  if (!p->again) linear_forward(m, down, &m->delta);
}

/* X of a linear as wgrad reads it, from what the block keeps. */
static void remake_x(struct model *m, struct block *b, enum linear_site site, const struct pass *again) {
  struct emission e = emission_of_x(m, &b->linear[site], false, again);
  switch (site) {
    case LINEAR_QKV: block_normalise(m, &e, NULL, b->attention_rstd, &b->x_in, NULL, &b->attention_gain); break;
    case LINEAR_OUT: quantise_attended(m, b, &e); break;
    case LINEAR_GATE_UP: block_normalise(m, &e, NULL, b->ffn_rstd, &b->x_mid, NULL, &b->ffn_gain); break;
    case LINEAR_DOWN: m->d->k->swiglu_forward(m->d, &e, &b->gate_up); break;
    case LINEAR_SITES: break;
  }
}

static void site_backward(struct model *m, struct block *b, enum linear_site site, struct matrix *dx,
                          const struct pass *again) {
  if (b->recompute == RECOMPUTE_BOUNDARIES) remake_x(m, b, site, again);
  linear_backward(m, &b->linear[site], dx, m->fresh);
}

void block_backward(struct model *m, struct block *b, struct block *below, const struct pass *p) {
  const struct kernels *k = m->d->k;
  struct device *d = m->d;
  const struct attention_shape *shape = &m->extent.attention;
  struct linear *qkv = &b->linear[LINEAR_QKV], *out = &b->linear[LINEAR_OUT];
  struct linear *gate_up = &b->linear[LINEAR_GATE_UP];

  const struct pass again = {.b = p->b, .training = true, .again = true};
  if (b->recompute == RECOMPUTE_ALL) block_forward(m, b, &b->x_in, NULL, &again);

  /* (3) gated FFN */
  site_backward(m, b, LINEAR_DOWN, &m->d_act, &again);
  struct emission e = emission_of_dy(m, gate_up, b->layer, p);
  k->swiglu_backward(d, &e, &m->d_act, &b->gate_up);
  site_backward(m, b, LINEAR_GATE_UP, &m->d_normed, &again);

  /* (4) RMSNorm; the stream's gradient is the dY of the output projection */
  e = emission_of_dy(m, out, b->layer, p);
  e.plain = &m->d_residual;
  k->add_rmsnorm_backward(d, &e, &b->d_ffn_gain, &m->d_normed, &m->d_residual, &b->x_mid, b->ffn_rstd, &b->ffn_gain);

  /* (2) output projection <- attention <- RoPE */
  site_backward(m, b, LINEAR_OUT, &m->d_attended, &again);
  const struct attention_formats *formats = &b->payload.formats;
  const struct attention_gradient *g = attention_format_plain(formats->d_out) ? NULL : &m->attention_gradient;
  if (g) k->attention_gradient(d, g, m->attention_counts, &m->d_attended, &b->attended, b->lse, formats, shape);
  e = emission_of_dy(m, qkv, b->layer, p);
  const bool in_place = e.plain && e.plain->data == m->d_qkv.data && !e.row && !e.column;
  if (k->attention_rope_backward && in_place && attention_plain(formats)) {
    k->attention_rope_backward(d, &m->d_qkv, &m->d_attended, &b->attended, b->lse, &b->qkv, m->cos_sin, p->b->starts, shape);
  } else {
    k->attention_backward(d, &m->d_qkv, m->attention_counts, &m->d_attended, g, &b->attended, b->lse, &b->qkv, &b->payload,
                          p->b->starts, shape);
    k->rope_backward(d, &e, &m->d_qkv, m->cos_sin, shape);
  }
  site_backward(m, b, LINEAR_QKV, &m->d_normed, &again);

  /* (1) RMSNorm; the stream's gradient is the dY of `down` in the block below */
  if (below)
    e = emission_of_dy(m, &below->linear[LINEAR_DOWN], below->layer, p);
  else
    e = (struct emission){0};
  e.plain = &m->d_residual;
  k->add_rmsnorm_backward(d, &e, &b->d_attention_gain, &m->d_normed, &m->d_residual, &b->x_in, b->attention_rstd,
                          &b->attention_gain);
}
