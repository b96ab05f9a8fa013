#include "checkpoints/llama_names.h"

#include <stdio.h>
#include <string.h>

static const struct {
  const char *ours, *theirs; /* of a block: what follows "layers.N." */
  bool rotary;
} block_names[] = {
    {"attention_norm.weight", "input_layernorm.weight", false},
    {"attention.wq.weight", "self_attn.q_proj.weight", true},
    {"attention.wk.weight", "self_attn.k_proj.weight", true},
    {"attention.wv.weight", "self_attn.v_proj.weight", false},
    {"attention.wo.weight", "self_attn.o_proj.weight", false},
    {"ffn_norm.weight", "post_attention_layernorm.weight", false},
    {"feed_forward.w1.weight", "mlp.gate_proj.weight", false},
    {"feed_forward.w3.weight", "mlp.up_proj.weight", false},
    {"feed_forward.w2.weight", "mlp.down_proj.weight", false},
};

static const char *const other_names[][2] = {
    {"tok_embeddings.weight", "model.embed_tokens.weight"}, {"norm.weight", "model.norm.weight"}, {"output.weight", "lm_head.weight"}};

enum { BLOCK_NAMES = sizeof block_names / sizeof block_names[0], OTHER_NAMES = sizeof other_names / sizeof other_names[0] };

/* The row of block_names, and the layer; -1: not in a block. */
static int block_row(const char *ours, int *layer) {
  int length = 0;
  if (sscanf(ours, "layers.%d.%n", layer, &length) != 1 || length == 0) return -1;
  for (int i = 0; i < BLOCK_NAMES; i++)
    if (strcmp(block_names[i].ours, ours + length) == 0) return i;
  return -1;
}

bool llama_name(const char *ours, char theirs[LLAMA_NAME]) {
  int layer;
  const int row = block_row(ours, &layer);
  if (row >= 0) {
    snprintf(theirs, LLAMA_NAME, "model.layers.%d.%s", layer, block_names[row].theirs);
    return true;
  }
  for (int i = 0; i < OTHER_NAMES; i++) {
    if (strcmp(other_names[i][0], ours) != 0) continue;
    snprintf(theirs, LLAMA_NAME, "%s", other_names[i][1]);
    return true;
  }
  return false;
}

int64_t llama_row_group(const struct model_config *c, const char *ours) {
  int layer;
  const int row = block_row(ours, &layer);
  return row >= 0 && block_names[row].rotary ? c->head_dim : 1;
}

bool llama_name_is_derived(const char *theirs) {
  int layer, length = 0;
  if (strcmp(theirs, "model.rotary_emb.inv_freq") == 0) return true;
  return sscanf(theirs, "model.layers.%d.self_attn.rotary_emb.inv_freq%n", &layer, &length) == 1 && length > 0 && theirs[length] == 0;
}

/* Where row r of an interleaved group stands in a half-split one. */
static int64_t half_split(int64_t r, int64_t group) { return group == 1 ? 0 : r / 2 + r % 2 * (group / 2); }

void llama_rows_to_half_split(void *to, const void *from, int64_t rows, int64_t group, size_t row_bytes) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t there = r - r % group + half_split(r % group, group);
    memcpy((char *)to + (size_t)there * row_bytes, (const char *)from + (size_t)r * row_bytes, row_bytes);
  }
}

void llama_rows_to_interleaved(void *to, const void *from, int64_t rows, int64_t group, size_t row_bytes) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t there = r - r % group + half_split(r % group, group);
    memcpy((char *)to + (size_t)r * row_bytes, (const char *)from + (size_t)there * row_bytes, row_bytes);
  }
}
