/* Text from a model, one token after the other. */
#ifndef FP4D_TRAINER_SAMPLE_H
#define FP4D_TRAINER_SAMPLE_H

#include <stdio.h>

#include "trainer/run.h"

struct sampling {
  int64_t tokens;     /* at most so many; ends early at the tokenizer's EOS */
  double temperature; /* 0: always the likeliest */
  double top_p;       /* the smallest set of likeliest tokens with this mass; 1: all */
  uint64_t seed;
};

/* Writes prompt and continuation to `out`, flushed token by token. The same
 * seed gives the same text. run was opened for RUN_GENERATE.  The text begins as
 * documents do in training: with BOS where data.bos says so, else where a prompt is
 * empty after an EOS.  Only tokens of `t` are chosen, whatever rows the model has. */
bool sample_text(struct run *run, const struct tokenizer *t, const char *prompt, const struct sampling *s, FILE *out, struct error *e);

#endif
