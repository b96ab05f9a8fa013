/* A checkpoint as a Hugging Face model folder. */
#ifndef FP4D_TRAINER_EXPORT_H
#define FP4D_TRAINER_EXPORT_H

#include "checkpoints/checkpoint.h"
#include "checkpoints/llama_config.h"
#include "trainer/arguments.h"

struct export_options {
  const char *folder;   /* to make; absent or empty */
  enum dtype dtype;     /* of every tensor */
  int64_t shard_bytes;  /* most data of a file; a tensor is never cut. 0: one file */
  struct argument_list tokenizer; /* files, or folders of them, that are copied */
};

/* Writes FOLDER: config.json and generation_config.json of `c`, model.safetensors (or
 * shards and their index), tokenizer files.  It is there whole or not at all: until all
 * is on the disk its name is FOLDER.tmp.  Weights are the FP32 masters where the
 * checkpoint has them, else the parameters, rounded to nearest even where BF16 is asked
 * for; c->model.vocab_size may be smaller than the checkpoint's `vocab_size`: rows above
 * it are left out.  Memory: a piece of a tensor. */
bool export_llama(struct checkpoint *k, const struct llama_config *c, int64_t vocab_size, const struct export_options *o,
                  struct error *e);

#endif
