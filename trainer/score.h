/* Log-probabilities of given tokens after given contexts. */
#ifndef FP4D_TRAINER_SCORE_H
#define FP4D_TRAINER_SCORE_H

#include <stdio.h>

#include "checkpoints/checkpoint.h"
#include "trainer/run.h"

struct score_request {
  int32_t *ids; /* context, then continuation */
  int64_t n_context, n_ids;
  int64_t line; /* of the file, from 1 */
  double logprob;  /* sum over the continuation, nats */
  bool greedy;     /* every token of it the likeliest there (of equals the lowest id) */
  float *logprobs; /* [n_ids - n_context], each token's */
};

struct score_requests {
  struct score_request *item;
  int64_t n;
};

/* Reads JSON lines {"context": [ids], "continuation": [ids]}; blank lines are passed over.
 * Ids lie in 0 .. vocab_size-1, a context and a continuation have one at least, and both
 * together one more than `longest` at most.  Errors are ERROR_DATA with `name` and line. */
bool score_read(FILE *in, const char *name, int64_t vocab_size, int64_t longest, struct score_requests *r, struct error *e);
void score_free(struct score_requests *r);

/* Fills in the answers.  `run` was opened for RUN_GENERATE; requests are run in order of
 * length, local_batch x seq_len tokens at a time laid out for seq_len, a half, a quarter, …
 * of it (64 at least), whichever is the smallest that the requests fit. */
bool score_run(struct run *run, struct checkpoint *k, struct score_requests *r, struct error *e);

/* One line an answer; with `each` the tokens' own log-probabilities as well. */
bool score_write(FILE *out, const struct score_requests *r, bool each);

#endif
