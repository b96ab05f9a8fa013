/* The one rule of order: which document comes next in a stream (docs/formats.md,
 * "Order of documents").  `fp4d prepare` and `fp4d index` both follow it, so the
 * same documents give the same samples whatever files they came in.
 *
 * A document is known by its content hash c: XXH3-128 over its token ids as
 * little-endian u32, exactly as they stand in the stream.
 */
#ifndef FP4D_DATA_MIXTURE_H
#define FP4D_DATA_MIXTURE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"
#include "data/source.h"

/* ---- documents ----------------------------------------------------------- */

/* Is a document held out for validation?  Neither seed nor source plays a part. */
bool mixture_held_out(struct hash content, double fraction);

/* Where a document stands in pass `pass` (0, 1, …: repetitions) over its source:
 * ascending keys, equal ones by content.  The validation stream has seed 0. */
struct hash mixture_key(uint64_t seed, uint64_t pass, struct hash content);

/* < 0, 0, > 0: the order of keys and of content hashes. */
int mixture_compare(struct hash a, struct hash b);

/* ---- sources ------------------------------------------------------------- */

/* Neither weights nor stages: each document once, all sources one pool by key.  The
 * chooser then sees one group, the pool, in place of a group for each source. */
bool mixture_is_pool(const struct data_source *sources, int n_sources, int n_stages);

/* Chooses by token deficit; plain values, no memory of its own. */
struct mixture {
  int n;        /* groups: sources, or 1 for a pool */
  int n_stages; /* at least 1 */
  struct data_stage stage[DATA_STAGES];    /* weights normalised to sum 1 */
  double max_repetition[DATA_SOURCES];
  int64_t documents[DATA_SOURCES];         /* of one pass */
  int64_t tokens[DATA_SOURCES];
  int64_t target;                          /* tokens; 0: as many as there are */

  int at_stage;
  int64_t written;                         /* tokens so far */
  int64_t stage_written;                   /* since the stage began */
  int64_t stage_taken[DATA_SOURCES];
  int64_t taken[DATA_SOURCES];             /* tokens so far, by group */
  int64_t taken_documents[DATA_SOURCES];
};

/* documents[] and tokens[] by source: what one pass holds for this stream (training:
 * what is not held out).  `target`: data.tokens.  A validation stream has the first
 * stage's weights, each document at most once, and no target. */
void mixture_start(struct mixture *m, const struct data_source *sources, int n_sources, const struct data_stage *stages,
                   int n_stages, const int64_t *documents, const int64_t *tokens, int64_t target, bool validation);

/* Refuses a source (NULL: the pool) with a weight and not one document: the stream would end when its
 * turn came. */
bool mixture_check_sources(const struct mixture *m, const struct data_source *sources, bool validation, struct error *e);

/* The group whose next document comes next; -1: the stream ends here.  The document is
 * number mixture_place(m, group) of pass mixture_pass(m, group). */
int mixture_choose(const struct mixture *m);
int64_t mixture_pass(const struct mixture *m, int group);
int64_t mixture_place(const struct mixture *m, int group);
/* That document, of `tokens` tokens (at least 1), was written. */
void mixture_take(struct mixture *m, int group, int64_t tokens);

/* After mixture_choose has said -1: the group that could give no more, or -1 where the
 * target was reached. */
int mixture_exhausted(const struct mixture *m);
/* Tokens of a group that no pass has used. */
int64_t mixture_unused(const struct mixture *m, int group);
/* Refuses an end before the target, naming source (NULL: the pool), have and need. */
bool mixture_check_end(const struct mixture *m, const struct data_source *sources, struct error *e);

#endif
