/* A model's parameters in Hugging Face's Llama: their names, and their rows.
 *
 * Our rotary pairs are rows 2j and 2j + 1 of a head (interleaved, as in Meta's
 * reference); transformers' are rows j and head_dim/2 + j (half-split).  The same
 * model needs the rows of wq and wk in the other order, head by head: wq has n_heads
 * heads, wk n_kv_heads.
 */
#ifndef FP4D_CHECKPOINTS_LLAMA_NAMES_H
#define FP4D_CHECKPOINTS_LLAMA_NAMES_H

#include "model/model.h"

enum { LLAMA_NAME = 128 };

/* "layers.3.attention.wq.weight" -> "model.layers.3.self_attn.q_proj.weight". False: no such parameter. */
bool llama_name(const char *ours, char theirs[LLAMA_NAME]);

/* Rows of a parameter that change places among themselves: head_dim of wq and wk, 1 of all others. */
int64_t llama_row_group(const struct model_config *c, const char *ours);

/* Is this one of the tensors that old files carry and no model reads: rotary frequencies? */
bool llama_name_is_derived(const char *theirs);

/* `rows` rows, whole groups, of row_bytes each; to and from do not overlap. */
void llama_rows_to_half_split(void *to, const void *from, int64_t rows, int64_t group, size_t row_bytes);
void llama_rows_to_interleaved(void *to, const void *from, int64_t rows, int64_t group, size_t row_bytes);

#endif
