#include "trainer/captured.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/formats.h"

/* ---- tensors ---------------------------------------------------------------------- */

static bool load_tensor(struct captured *t, struct device *d, const struct capture_file *c, int i, struct error *e) {
  const struct kernels *k = d->k;
  const int slice = t->entry[i]->slice;
  const struct tensor_slice *s = hdf5_slice(c->file, slice);
  const size_t n = (size_t)(s->rows * s->cols);
  uint16_t *bits = malloc(n * sizeof *bits);
  t->values[i] = malloc(n * sizeof *t->values[i]);
  t->half[i] = (struct matrix){k->allocate(d, n * 2, e), DTYPE_BF16, s->rows, s->cols};
  t->wide[i] = (struct matrix){k->allocate(d, n * 4, e), DTYPE_F32, s->rows, s->cols};
  bool good = bits && t->values[i] && t->half[i].data && t->wide[i].data;
  if (!good) error_set(e, ERROR_SYSTEM, "no memory for %s", s->name);
  good = good && hdf5_read(c->file, slice, 0, s->rows, bits, e);
  if (good) {
    for (size_t x = 0; x < n; x++) t->values[i][x] = bf16_decode(bits[x]);
    k->upload(d, t->half[i].data, bits, n * 2);
    k->upload(d, t->wide[i].data, t->values[i], n * 4);
    good = k->synchronize(d, e);
  }
  free(bits);
  return good;
}

bool captured_load(struct captured *t, struct device *d, const struct capture_file *c, const struct capture_entry *x,
                   struct error *e) {
  memset(t, 0, sizeof *t);
  t->entry[TENSOR_X] = x;
  t->entry[TENSOR_W] = capture_find(c, x->block, x->site, TENSOR_W, 0);
  t->entry[TENSOR_DY] = capture_find(c, x->block, x->site, TENSOR_DY, x->update);
  if (!t->entry[TENSOR_W] || !t->entry[TENSOR_DY])
    return error_set(e, ERROR_DATA, "%s has no W or no dY beside it", hdf5_slice(c->file, x->slice)->name);
  for (int i = 0; i < TENSOR_COUNT; i++)
    if (!load_tensor(t, d, c, i, e)) return false;
  return true;
}

void captured_release(struct captured *t, struct device *d) {
  for (int i = 0; i < TENSOR_COUNT; i++) {
    if (t->half[i].data) d->k->release(d, t->half[i].data);
    if (t->wide[i].data) d->k->release(d, t->wide[i].data);
    free(t->values[i]);
  }
}

struct operand captured_plain(const struct captured *t, enum operand_role role, enum format f) {
  const enum tensor which = operand_role_tensor(role);
  return operand_of_matrix(f == FORMAT_BF16 ? &t->half[which] : &t->wide[which], operand_role_view(role));
}

/* ---- operands ----------------------------------------------------------------------- */

bool captured_packed(const struct operand *o) { return o->encoding.format && !encoding_is_plain(&o->encoding); }

void captured_drop(struct captured_operands *o, struct device *d) {
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    if (!captured_packed(&o->of[role])) continue;
    if (o->of[role].codes) d->k->release(d, o->of[role].codes);
    if (o->of[role].scales) d->k->release(d, o->of[role].scales);
    if (o->of[role].outer) d->k->release(d, o->of[role].outer);
  }
}

bool captured_take(struct captured_operands *o, struct device *d, const struct capture_header *h,
                   const struct linear_route *route, const struct captured *t, struct error *e) {
  memset(o, 0, sizeof *o);
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    const struct encoding *encoding = &route->operand[role];
    struct operand *p = &o->of[role];
    *p = captured_plain(t, (enum operand_role)role, encoding->format);
    if (encoding_is_plain(encoding)) continue;
    p->encoding = *encoding;
    p->codes = p->scales = NULL;
    linear_set_outers(p, operand_role_tensor((enum operand_role)role), linear_arm(&h->extent, t->entry[TENSOR_X]->site));
    const size_t codes = (size_t)operand_code_bytes(encoding, p->rows, p->cols);
    const size_t scales = (size_t)operand_scale_bytes(encoding, p->rows, p->cols);
    const size_t outer = (size_t)operand_outer_count(p) * sizeof(float);
    p->codes = d->k->allocate(d, codes, e);
    if (scales) p->scales = d->k->allocate(d, scales, e);
    if (outer) p->outer = d->k->allocate(d, outer, e);
    if (!p->codes || (scales && !p->scales) || (outer && !p->outer)) return false;
  }
  return true;
}

void captured_quantise(struct captured_operands *o, struct device *d, const struct capture_header *h,
                       const struct captured *t, enum tensor which) {
  const enum operand_role row_role = operand_role_of(which, VIEW_ROW), column_role = operand_role_of(which, VIEW_COLUMN);
  struct operand *row = &o->of[row_role], *column = &o->of[column_role];
  struct quantise_counts counts[2] = {{0}};
  const struct capture_entry *entry = t->entry[which];
  const struct emission out = {
      .row = captured_packed(row) ? row : NULL,
      .column = captured_packed(column) ? column : NULL,
      .draw = {.seed = (uint64_t)h->seed, .update = (uint32_t)entry->update, .first_sample = (uint64_t)entry->first_sample,
               .seq_len = h->extent.attention.seq_len, .layer = (uint32_t)(entry->block - 1),
               .operand = linear_draw(entry->site)},
      .counts = counts};
  if (out.row || out.column) d->k->quantise(d, &out, &t->half[which]);
  o->counts[row_role] = counts[VIEW_ROW];
  o->counts[column_role] = counts[VIEW_COLUMN];
}

bool captured_fetch(const struct operand *o, struct device *d, struct operand *here, struct error *e) {
  const size_t codes = (size_t)operand_code_bytes(&o->encoding, o->rows, o->cols);
  const size_t scales = (size_t)operand_scale_bytes(&o->encoding, o->rows, o->cols);
  const size_t outer = (size_t)operand_outer_count(o) * sizeof(float);
  *here = *o;
  here->codes = malloc(codes);
  here->scales = malloc(scales + 1);
  here->outer = outer ? malloc(outer) : NULL;
  bool good = here->codes && here->scales && (here->outer || outer == 0);
  if (!good) return error_set(e, ERROR_SYSTEM, "out of memory");
  d->k->download(d, here->codes, o->codes, codes);
  if (scales) d->k->download(d, here->scales, o->scales, scales);
  if (outer) d->k->download(d, here->outer, o->outer, outer);
  return d->k->synchronize(d, e);
}
