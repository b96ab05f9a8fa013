/* What is executed, layer by layer: read off the operands as they were laid
 * out, not off the route as it was asked for. */
#include <stdio.h>
#include <string.h>

#include "model/parts.h"

enum { LINE = 768 };

static void append(char *line, const char *text) {
  size_t used = strlen(line);
  (void)snprintf(line + used, LINE - used, "%s", text);
}

static void append_operand(char *line, const char *what, const struct views *v, enum view view) {
  char text[ENCODING_TEXT];
  struct operand o = views_operand(v, view);
  append(line, what);
  append(line, encoding_text(&o.encoding, text, (int)sizeof text));
  bool own_strips = o.encoding.scale == SCALE_ROW || o.strip == o.encoding.strip;
  if (o.segment > 0 || !own_strips) append(line, " by arm"); /* W1 and W3: outer factors of their own */
}

/* "fprop x … w … | dgrad dy … w … | wgrad dy … x …" */
static void linear_text(const struct model *m, const struct linear *l, char *line) {
  line[0] = '\0';
  append_operand(line, "fprop x ", &l->x, VIEW_ROW);
  append_operand(line, " w ", &l->w, VIEW_ROW);
  if (!m->shape.training) return;
  append_operand(line, " | dgrad dy ", &l->dy, VIEW_ROW);
  append_operand(line, " w ", &l->w, VIEW_COLUMN);
  append_operand(line, " | wgrad dy ", &l->dy, VIEW_COLUMN);
  append_operand(line, " x ", &l->x, VIEW_COLUMN);
}

static bool blocks_alike(const struct model *m, int a, int b) {
  char text_a[LINE], text_b[LINE];
  for (int site = 0; site < LINEAR_SITES; site++) {
    linear_text(m, &m->block[a].linear[site], text_a);
    linear_text(m, &m->block[b].linear[site], text_b);
    if (strcmp(text_a, text_b) != 0) return false;
  }
  return m->block[a].recompute == m->block[b].recompute;
}

/* The linears of blocks first..last (0-based), those with the same text on one line. */
static void describe_blocks(const struct model *m, int first, int last, void (*line)(void *, const char *),
                            void *context) {
  static const char *const recomputed[] = {
      [RECOMPUTE_NONE] = "", [RECOMPUTE_BOUNDARIES] = "  wgrad x recomputed", [RECOMPUTE_ALL] = "  recomputed"};
  bool done[LINEAR_SITES] = {false};
  for (int site = 0; site < LINEAR_SITES; site++) {
    char mine[LINE], other[LINE], text[LINE];
    if (done[site]) continue;
    linear_text(m, &m->block[first].linear[site], mine);
    (void)snprintf(text, sizeof text, "blocks %d-%d  ", first + 1, last + 1);
    for (int s = site; s < LINEAR_SITES; s++) {
      linear_text(m, &m->block[first].linear[s], other);
      if (strcmp(mine, other) != 0) continue;
      if (s != site) append(text, ", ");
      append(text, linear_name((enum linear_site)s));
      done[s] = true;
    }
    append(text, ": ");
    append(text, mine);
    append(text, recomputed[m->block[first].recompute]);
    append(text, "  [");
    append(text, m->d->k->backend);
    append(text, "]");
    line(context, text);
  }
}

/* Attention's operands as the payload has them: forward, and what its backward contracts. */
static void attention_text(const struct model *m, char *line) {
  const struct attention_formats *f = &m->block[0].payload.formats;
  const char *qk = format_name(f->qk), *pv = format_name(f->pv);
  const bool codes = !attention_format_plain(f->d_out);
  char number[80];
  (void)snprintf(line, LINE, "q k %s, p %s, v %s, softmax fp32", qk, attention_format_plain(f->pv) ? "fp32" : pv, pv);
  if (f->p_slope > 0) {
    (void)snprintf(number, sizeof number, " (codes of p by %g x + %g)", (double)f->p_slope, (double)f->p_offset);
    append(line, number);
  }
  if (!m->shape.training) return;
  append(line, " | backward: scores q k ");
  append(line, qk);
  append(line, codes ? ", p e4m3, do " : ", p fp32, do ");
  append(line, format_name(f->d_out));
  if (f->d_out_lift > 0) {
    (void)snprintf(number, sizeof number, " (lift 4 x %g)", (double)f->d_out_lift);
    append(line, number);
  }
  append(line, codes ? ", ds e4m3, q k v e4m3" : ", ds fp32, q k ");
  if (codes) return;
  append(line, qk);
  append(line, ", v ");
  append(line, pv);
}

void model_describe(const struct model *m, void (*line)(void *context, const char *text), void *context) {
  int n_layers = (int)m->config.n_layers;
  const char *backend = m->d->k->backend, *type = dtype_name(m->type);
  for (int first = 0, last; first < n_layers; first = last + 1) {
    last = first;
    while (last + 1 < n_layers && blocks_alike(m, first, last + 1)) last++;
    describe_blocks(m, first, last, line, context);
  }
  char text[LINE + 128], attention[LINE];
  attention_text(m, attention);
  (void)snprintf(text, sizeof text, "blocks 1-%d  attention: %s  [%s]", n_layers, attention, backend);
  line(context, text);
  (void)snprintf(text, sizeof text, "residual stream, norms, rotary, silu: %s, computed in fp32  [%s]", type, backend);
  line(context, text);
  char contractions[LINE];
  struct linear output = m->head.output;
  output.x.plain = m->head.normed;
  output.dy.plain = m->head.d_logits;
  linear_text(m, &output, contractions);
  (void)snprintf(text, sizeof text, "head%s: %s, logits fp32 for %lld tokens at once%s%s  [%s]",
                 m->config.tied ? " (tied)" : "", contractions, (long long)m->extent.head_chunk,
                 m->shape.training ? ", d_logits " : "", m->shape.training ? dtype_name(m->head.d_logits.dtype) : "",
                 backend);
  line(context, text);
  if (m->route.forward_tail > 0) {
    (void)snprintf(text, sizeof text, "the last %g of the updates: fprop x %s w %s in every linear and the head, the rest as above  [%s]",
                   m->route.forward_tail, type, type, backend);
    line(context, text);
  }
  char trained[64] = "";
  if (m->shape.training)
    (void)snprintf(trained, sizeof trained, "%s, gradients %s, moments fp32", m->shape.master ? ", master fp32" : "",
                   dtype_name(m->shape.gradient_dtype));
  (void)snprintf(text, sizeof text, "parameters %s%s  [%s]", dtype_name(m->shape.param_dtype), trained, backend);
  line(context, text);
}
