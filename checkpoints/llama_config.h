/* config.json of Hugging Face's Llama, in and out. */
#ifndef FP4D_CHECKPOINTS_LLAMA_CONFIG_H
#define FP4D_CHECKPOINTS_LLAMA_CONFIG_H

#include <jansson.h>

#include "model/model.h"

struct llama_config {
  struct model_config model;
  int64_t max_position;   /* context that it was made for; 0: not said */
  json_t *bos, *eos;      /* token ids: an integer, a list of them (eos), or null */
};

void llama_config_free(struct llama_config *c);

/* Reads FOLDER/config.json, with the keys of transformers 4 (rope_theta, rope_scaling,
 * torch_dtype) or 5 (rope_parameters, dtype).  What a model here cannot be (other
 * architectures, biases, other rotary types, quantised weights, …) is refused, all of it
 * at once, each by its key.  On success llama_config_free is the caller's. */
bool llama_config_read(const char *folder, struct llama_config *c, struct error *e);

/* The texts of config.json and generation_config.json, malloc'ed (NULL: out of memory).
 * Keys are transformers 4's, which its 5 reads as well. `dtype`: "bfloat16" or "float32". */
char *llama_config_text(const struct llama_config *c, const char *dtype);
char *llama_generation_text(const struct llama_config *c);

enum { LLAMA_NUMBER = 40 };
/* The shortest decimal that reads back as x. */
void llama_number(double x, char text[LLAMA_NUMBER]);

#endif
