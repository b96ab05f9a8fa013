/* Final norm, output matrix and loss.  Logits exist for head_chunk tokens at
 * once, in FP32; their gradient is rounded to the activations' type before
 * the head's own dgrad and wgrad. */
#include "model/parts.h"

/* Rows [first, first + rows) of a token matrix. */
static struct matrix rows_of(const struct matrix *m, int64_t first, int64_t rows) {
  struct matrix part = *m;
  part.data = (char *)m->data + (size_t)(first * m->cols) * dtype_bytes(m->dtype);
  part.rows = rows;
  return part;
}

void head_normalise(struct model *m) {
  struct head *h = &m->head;
  const struct block *last = &m->block[m->config.n_layers - 1];
  struct emission out = {.plain = &h->normed};
  m->d->k->add_rmsnorm_forward(m->d, &out, &h->x_out, h->rstd, &last->x_mid, &m->delta, &h->gain,
                               (float)m->config.norm_eps);
}

/* logits[rows, vocab] = x W^T */
static void logits_of(struct model *m, struct matrix *logits, const struct matrix *x) {
  struct operand a = operand_of_matrix(x, VIEW_ROW), w = operand_of_matrix(&m->head.w, VIEW_ROW);
  m->d->k->contract(m->d, logits, &a, &w, NULL);
}

void head_loss(struct model *m, const int32_t *targets, float *nll) {
  struct head *h = &m->head;
  int64_t tokens = m->extent.tokens, chunk = m->extent.head_chunk;
  for (int64_t first = 0; first < tokens; first += chunk) {
    int64_t n = tokens - first < chunk ? tokens - first : chunk;
    struct matrix x = rows_of(&h->normed, first, n), logits = rows_of(&h->logits, 0, n);
    logits_of(m, &logits, &x);
    m->d->k->cross_entropy(m->d, nll + first, NULL, &logits, targets + first, 0);
  }
}

void head_loss_backward(struct model *m, const struct pass *p, float grad_scale, float *nll) {
  const struct kernels *k = m->d->k;
  struct head *h = &m->head;
  int64_t tokens = m->extent.tokens, chunk = m->extent.head_chunk;
  struct operand w_t = operand_of_matrix(&h->w, VIEW_COLUMN);
  for (int64_t first = 0; first < tokens; first += chunk) {
    int64_t n = tokens - first < chunk ? tokens - first : chunk;
    struct matrix x = rows_of(&h->normed, first, n), dx = rows_of(&m->d_normed, first, n);
    struct matrix logits = rows_of(&h->logits, 0, n), d_logits = rows_of(&h->d_logits, 0, n);
    logits_of(m, &logits, &x);
    k->cross_entropy(m->d, nll + first, &d_logits, &logits, p->b->targets + first, grad_scale);
    struct operand dy = operand_of_matrix(&d_logits, VIEW_ROW);
    k->contract(m->d, &dx, &dy, &w_t, NULL);
    struct operand dy_t = operand_of_matrix(&d_logits, VIEW_COLUMN), x_t = operand_of_matrix(&x, VIEW_COLUMN);
    k->contract(m->d, &h->gradient, &dy_t, &x_t, &h->gradient);
  }
  struct block *last = &m->block[m->config.n_layers - 1];
  struct emission out = emission_of_dy(m, &last->linear[LINEAR_DOWN], last->layer, p);
  out.plain = &m->d_residual;
  k->add_rmsnorm_backward(m->d, &out, h->d_gain, &m->d_normed, NULL, &h->x_out, h->rstd, &h->gain);
}

void head_logits(struct model *m, int64_t row, float *logits) {
  struct matrix x = rows_of(&m->head.normed, row, 1);
  struct matrix out = {.data = logits, .dtype = DTYPE_F32, .rows = 1, .cols = m->config.vocab_size};
  logits_of(m, &out, &x);
}

void head_refresh(struct model *m) {
  struct head *h = &m->head;
  struct emission out = {.plain = &h->w};
  if (h->w.data != h->source.data) m->d->k->quantise(m->d, &out, &h->source);
}
