/* How many ids a checkpoint's text has: rows of the table and the head beyond them are padding.
 *
 * Training gives padding its share of the softmax like any row, as Megatron-LM does: a row that is
 * never a target loses its probability by itself.  An export leaves it out, and so does what
 * stands for the export (`score`) or speaks to people (`generate`).
 */
#ifndef FP4D_TRAINER_VOCABULARY_H
#define FP4D_TRAINER_VOCABULARY_H

#include "checkpoints/checkpoint.h"
#include "data/data.h"
#include "trainer/config.h"
#include "trainer/run.h"

/* The checkpoint's training stream: data.train of `c` if its digest is the one that was trained
 * on.  NULL: not found, or another.  The caller closes it. */
struct stream *vocabulary_stream(const struct checkpoint *k, const struct config *c);

/* Rows that this stream leaves of `rows`: the ids of the tokenizer that made it; `rows` where
 * that is not known.  (An index of token files knows only the largest id that it met: a row
 * above may be an id that was not.) */
int64_t vocabulary_rows(const struct stream_info *info, int64_t rows);

/* Sets the ids that share the probability in a run without training to `asked`; 0: to those that
 * an export of `k` keeps, which is said on standard error where it is fewer than all.  ERROR_USAGE
 * where the model has fewer rows. */
bool vocabulary_set(struct run *run, const struct checkpoint *k, int64_t asked, struct error *e);

/* A line on standard error where an export of `k` keeps fewer rows than the run counts. */
void vocabulary_warn(const struct run *run, const struct checkpoint *k);

#endif
