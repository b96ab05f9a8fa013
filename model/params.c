/* The parameters of a model, in the order of its flat buffers: Meta's names,
 * which are TorchTitan's too.
 *
 * wq, wk, wv stand together and read as one matrix [(H + 2 Hkv) hd, hidden];
 * w1 (gate), w3 (up) as one [2 ffn, hidden]. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/parts.h"

enum { PER_BLOCK = 9 };

int params_number(const struct model_config *c) { return (int)c->n_layers * PER_BLOCK + (c->tied ? 2 : 3); }

struct list {
  struct param *param;
  int n;
  int64_t offset;
};

static void add(struct list *l, int layer, const char *name, int64_t rows, int64_t cols, double std) {
  struct param *p = &l->param[l->n++];
  memset(p, 0, sizeof *p);
  if (layer < 0)
    (void)snprintf(p->name, sizeof p->name, "%s.weight", name);
  else
    (void)snprintf(p->name, sizeof p->name, "layers.%d.%s.weight", layer, name);
  p->rows = rows;
  p->cols = cols;
  p->offset = l->offset;
  p->layer = layer;
  p->decay = std > 0;
  p->init_std = (float)std;
  l->offset += rows * cols;
}

/* TorchTitan's initial deviations; a tied table takes the head's. */
void params_list(const struct model_config *c, struct param *out) {
  struct list l = {.param = out};
  int64_t d = c->hidden_size, query = c->n_heads * c->head_dim, key_value = c->n_kv_heads * c->head_dim;
  double head_std = 1.0 / sqrt((double)d);
  add(&l, -1, "tok_embeddings", c->vocab_size, d, c->tied ? head_std : 1.0);
  for (int layer = 0; layer < (int)c->n_layers; layer++) {
    double std = 0.02, deep = 0.02 / sqrt(2.0 * (layer + 1));
    add(&l, layer, "attention_norm", d, 1, 0);
    add(&l, layer, "attention.wq", query, d, std);
    add(&l, layer, "attention.wk", key_value, d, std);
    add(&l, layer, "attention.wv", key_value, d, std);
    add(&l, layer, "attention.wo", d, query, deep);
    add(&l, layer, "ffn_norm", d, 1, 0);
    add(&l, layer, "feed_forward.w1", c->ffn_size, d, std);
    add(&l, layer, "feed_forward.w3", c->ffn_size, d, deep);
    add(&l, layer, "feed_forward.w2", d, c->ffn_size, deep);
  }
  add(&l, -1, "norm", d, 1, 0);
  if (!c->tied) add(&l, -1, "output", c->vocab_size, d, head_std);
}

struct model_unit model_unit(const struct model *m, int u) {
  const int layers = (int)m->config.n_layers, norm = 1 + layers * PER_BLOCK;
  if (u == 0) return (struct model_unit){0, 1};
  if (u <= layers) return (struct model_unit){1 + (u - 1) * PER_BLOCK, PER_BLOCK};
  return (struct model_unit){norm, m->n_params - norm};
}

int64_t param_offset(const struct model *m, int layer, enum block_param which) {
  return m->param[1 + layer * PER_BLOCK + (int)which].offset;
}

int64_t param_offset_norm(const struct model *m) { return m->param[1 + (int)m->config.n_layers * PER_BLOCK].offset; }

int64_t param_offset_head(const struct model *m) {
  return m->config.tied ? 0 : m->param[2 + (int)m->config.n_layers * PER_BLOCK].offset;
}
