/* A linear's three contractions, on whatever its operands are. */
#include <string.h>

#include "model/parts.h"

struct operand views_operand(const struct views *v, enum view view) {
  const struct operand *packed = view == VIEW_ROW ? &v->row : &v->column;
  return packed->encoding.format ? *packed : operand_of_matrix(&v->plain, view);
}

struct emission emission_of(struct model *m, struct views *v, enum tensor t, bool row, bool column) {
  bool row_packed = v->row.encoding.format != 0, column_packed = v->column.encoding.format != 0;
  struct emission out;
  memset(&out, 0, sizeof out);
  if (row && row_packed) out.row = &v->row;
  if (column && column_packed) out.column = &v->column;
  if ((row && !row_packed) || (column && !column_packed)) out.plain = &v->plain;
  out.counts = m->counts[t];
  return out;
}

struct emission emission_of_x(struct model *m, struct linear *l, bool row, const struct pass *p) {
  bool plain = m->forward == FORWARD_PLAIN;
  struct emission out = emission_of(m, &l->x, TENSOR_X, row && !plain, p->training);
  if (row && plain) out.plain = &l->x.plain;
  if (p->again) out.counts = NULL;
  return out;
}

struct operand views_forward(const struct model *m, const struct views *v) {
  return m->forward == FORWARD_PLAIN ? operand_of_matrix(&v->plain, VIEW_ROW) : views_operand(v, VIEW_ROW);
}

struct emission emission_of_dy(struct model *m, struct linear *l, int layer, const struct pass *p) {
  struct emission out = emission_of(m, &l->dy, TENSOR_DY, true, true);
  out.draw.seed = p->b->seed;
  out.draw.update = p->b->update;
  out.draw.first_sample = p->b->first_sample;
  out.draw.seq_len = m->shape.seq_len;
  out.draw.layer = (uint32_t)layer;
  out.draw.operand = l->draw;
  return out;
}

/* Tells the listener of a block's tensor that a view reads as it is. */
static void tell(const struct model *m, const struct linear *l, enum tensor t, const struct views *v) {
  bool read = v->plain.rows > 0 && (v->row.encoding.format == 0 || v->column.encoding.format == 0);
  if (m->on_tensor && read && l->layer >= 0) m->on_tensor(m->on_tensor_context, l->layer, l->site, t, &v->plain);
}

void linear_forward(struct model *m, struct linear *l, struct matrix *y) {
  tell(m, l, TENSOR_X, &l->x);
  tell(m, l, TENSOR_W, &l->w);
  struct operand x = views_forward(m, &l->x), w = views_forward(m, &l->w);
  m->d->k->contract(m->d, y, &x, &w, NULL);
}

void linear_backward(struct model *m, struct linear *l, struct matrix *dx, bool first) {
  tell(m, l, TENSOR_DY, &l->dy);
  struct operand dy = views_operand(&l->dy, VIEW_ROW), w = views_operand(&l->w, VIEW_COLUMN);
  m->d->k->contract(m->d, dx, &dy, &w, NULL);
  struct operand dy_t = views_operand(&l->dy, VIEW_COLUMN), x_t = views_operand(&l->x, VIEW_COLUMN);
  m->d->k->contract(m->d, &l->gradient, &dy_t, &x_t, first ? NULL : &l->gradient);
}

void linear_refresh(struct model *m, struct linear *l) {
  struct emission out = emission_of(m, &l->w, TENSOR_W, true, m->shape.training);
  if (m->route.forward_tail > 0) out.plain = &l->w.plain;
  if (out.plain && out.plain->data == l->source.data) out.plain = NULL; /* the parameters themselves */
  if (out.plain || out.row || out.column) m->d->k->quantise(m->d, &out, &l->source);
}
