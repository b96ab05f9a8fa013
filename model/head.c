/* Final norm, output matrix and loss.  Logits exist for head_chunk tokens at
 * once, in FP32; their gradient is rounded to the activations' type before
 * the head's own dgrad and wgrad.  Packed operands are made chunk by chunk. */
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
  block_normalise(m, &out, &h->x_out, h->rstd, &last->x_mid, &m->delta, &h->gain);
}

static void set_tokens(struct views *v, const struct matrix *plain) {
  v->plain = *plain;
  v->row.rows = v->column.cols = plain->rows;
}

/* The output's contractions over tokens [first, first + n). */
static struct linear output_of(const struct model *m, int64_t first, int64_t n) {
  const struct head *h = &m->head;
  struct linear l = h->output;
  struct matrix x = rows_of(&h->normed, first, n);
  set_tokens(&l.x, &x);
  if (!m->shape.training) return l;
  struct matrix dy = rows_of(&h->d_logits, 0, n);
  set_tokens(&l.dy, &dy);
  return l;
}

/* Packs what stands in *plain; the plain views are there already. */
static void pack(struct model *m, struct emission *out, const struct matrix *plain) {
  out->plain = NULL;
  if (out->row || out->column) m->d->k->quantise(m->d, out, plain);
}

/* logits[n, vocab] = x W^T */
static void logits_of(struct model *m, struct matrix *logits, struct linear *l, const struct pass *p) {
  struct emission x = emission_of_x(m, l, true, p);
  pack(m, &x, &l->x.plain);
  linear_forward(m, l, logits);
}

void head_loss(struct model *m, const int32_t *targets, float *nll) {
  const struct pass p = {0};
  int64_t tokens = m->extent.tokens, chunk = m->extent.head_chunk;
  for (int64_t first = 0; first < tokens; first += chunk) {
    int64_t n = tokens - first < chunk ? tokens - first : chunk;
    struct linear l = output_of(m, first, n);
    struct matrix logits = rows_of(&m->head.logits, 0, n);
    logits_of(m, &logits, &l, &p);
    if (m->on_logits) m->on_logits(m->on_logits_context, first, &logits);
    if (m->parity.vocabulary > 0)
      m->d->k->cross_entropy_within(m->d, nll + first, &logits, m->parity.vocabulary, targets + first);
    else
      m->d->k->cross_entropy(m->d, nll + first, NULL, &logits, targets + first, 0);
  }
}

void head_loss_backward(struct model *m, const struct pass *p, float grad_scale, float *nll) {
  const struct kernels *k = m->d->k;
  struct head *h = &m->head;
  int64_t tokens = m->extent.tokens, chunk = m->extent.head_chunk;
  for (int64_t first = 0; first < tokens; first += chunk) {
    int64_t n = tokens - first < chunk ? tokens - first : chunk;
    struct linear l = output_of(m, first, n);
    struct matrix logits = rows_of(&h->logits, 0, n), dx = rows_of(&m->d_normed, first, n);
    logits_of(m, &logits, &l, p);
    k->cross_entropy(m->d, nll + first, &l.dy.plain, &logits, p->b->targets + first, grad_scale);
    struct emission dy = emission_of_dy(m, &l, 0, p);
    dy.draw.first_sample += (uint64_t)(first / m->shape.seq_len); /* a chunk that draws begins with a sample */
    pack(m, &dy, &l.dy.plain);
    linear_backward(m, &l, &dx, m->fresh && first == 0);
  }
  struct block *last = &m->block[m->config.n_layers - 1];
  struct emission out = emission_of_dy(m, &last->linear[LINEAR_DOWN], last->layer, p);
  out.plain = &m->d_residual;
  k->add_rmsnorm_backward(m->d, &out, &h->d_gain, &m->d_normed, NULL, &h->x_out, h->rstd, &h->gain);
}

/* A packed operand's scales may depend on all tokens of its chunk: then the
 * whole chunk is computed, as for the loss. */
void head_logits(struct model *m, int64_t row, float *logits) {
  const struct pass p = {0};
  struct head *h = &m->head;
  struct matrix out = {.data = logits, .dtype = DTYPE_F32, .rows = 1, .cols = m->config.vocab_size};
  if (h->output.x.row.encoding.format == 0) {
    struct linear one = output_of(m, row, 1);
    linear_forward(m, &one, &out);
    return;
  }
  int64_t first = row - row % m->extent.head_chunk, left = m->extent.tokens - first;
  struct linear l = output_of(m, first, left < m->extent.head_chunk ? left : m->extent.head_chunk);
  struct matrix all = rows_of(&h->logits, 0, l.x.plain.rows), wanted = rows_of(&h->logits, row - first, 1);
  logits_of(m, &all, &l, &p);
  struct emission copy = {.plain = &out};
  m->d->k->quantise(m->d, &copy, &wanted);
}
