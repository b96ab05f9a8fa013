/* The linears of a block: shapes, names, tensors. */
#ifndef FP4D_MODEL_LINEARS_H
#define FP4D_MODEL_LINEARS_H

#include "kernels/kernels.h"
#include "model/route.h"

/* Who draws for the dY of a site. */
static inline uint32_t linear_draw(enum linear_site site) {
  static const uint32_t draws[LINEAR_SITES] = {DRAW_DY_QKV, DRAW_DY_OUT, DRAW_DY_GATE_UP, DRAW_DY_DOWN};
  return draws[site];
}

enum tensor { TENSOR_X, TENSOR_W, TENSOR_DY, TENSOR_COUNT };

/* Width of the two outputs in one matrix (W1|W3); 0 where there is one. */
static inline int64_t linear_arm(const struct extent *x, enum linear_site site) {
  return site == LINEAR_GATE_UP ? x->ffn_size : 0;
}

/* Which rows (o->strip) and columns (o->segment) of a packed operand share an
 * outer factor; its encoding and view are set. */
void linear_set_outers(struct operand *o, enum tensor t, int64_t arm);

/* Y [tokens, n] = X [tokens, k] W [n, k]^T */
struct linear_shape {
  int64_t n, k;
};

static inline struct linear_shape linear_shape(const struct extent *x, enum linear_site site) {
  int64_t query = x->attention.n_heads * x->attention.head_dim;
  int64_t key_value = x->attention.n_kv_heads * x->attention.head_dim;
  switch (site) {
    case LINEAR_QKV: return (struct linear_shape){query + 2 * key_value, x->hidden_size};
    case LINEAR_OUT: return (struct linear_shape){x->hidden_size, query};
    case LINEAR_GATE_UP: return (struct linear_shape){2 * x->ffn_size, x->hidden_size};
    case LINEAR_DOWN: return (struct linear_shape){x->hidden_size, x->ffn_size};
    case LINEAR_SITES: break;
  }
  return (struct linear_shape){0, 0};
}

static inline const char *linear_name(enum linear_site site) {
  static const char *const names[LINEAR_SITES] = {"qkv", "out", "gate_up", "down"};
  return names[site];
}

static inline const char *tensor_name(enum tensor t) {
  static const char *const names[TENSOR_COUNT] = {"x", "w", "dy"};
  return names[t];
}

/* Which tensor an operand is of, and in which view; and back. */
static inline enum tensor operand_role_tensor(enum operand_role role) {
  static const enum tensor tensors[OPERAND_ROLE_COUNT] = {[FPROP_X] = TENSOR_X,   [WGRAD_X] = TENSOR_X,
                                                          [FPROP_W] = TENSOR_W,   [DGRAD_W] = TENSOR_W,
                                                          [DGRAD_DY] = TENSOR_DY, [WGRAD_DY] = TENSOR_DY};
  return tensors[role];
}

static inline enum view operand_role_view(enum operand_role role) {
  return role == FPROP_X || role == FPROP_W || role == DGRAD_DY ? VIEW_ROW : VIEW_COLUMN;
}

static inline enum operand_role operand_role_of(enum tensor t, enum view view) {
  static const enum operand_role roles[TENSOR_COUNT][2] = {
      [TENSOR_X] = {FPROP_X, WGRAD_X}, [TENSOR_W] = {FPROP_W, DGRAD_W}, [TENSOR_DY] = {DGRAD_DY, WGRAD_DY}};
  return roles[t][view];
}

/* "fprop x", … */
extern const char *const operand_role_names[OPERAND_ROLE_COUNT];

/* Blocks: elements that share a scale along the contraction, and whether the
 * group is a square tile. */
int block_size(enum block_geometry b);
bool block_is_2d(enum block_geometry b);

#endif
