/* Token streams: which tokens an update reads.
 *
 * A stream is T token ids in final order, in D documents, each of a named source
 * (docs/formats.md).  A run's
 * sample i is tokens [i*S, i*S + S + 1) of it (S inputs, S targets shifted by
 * one), for i below the stream's sample count; epochs follow, each with its
 * own keyed order of samples.  Update t uses samples [t*G, (t+1)*G) and rank r
 * a contiguous slice of them, so order depends on seed and content only, not on
 * world size, local batch or accumulation.  Resume state is one integer and
 * the stream's digest.
 */
#ifndef FP4D_DATA_DATA_H
#define FP4D_DATA_DATA_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"
#include "data/source.h"
#include "data/tokenizer.h"

/* ---- reading ----------------------------------------------------------- */
struct stream; /* opaque */

enum { STREAM_SOURCES = 32, STREAM_NAME = 64, STREAM_TOKENIZER = 64 };

struct stream_source {
  char name[STREAM_NAME];    /* printable text, no tabs */
  int64_t documents, tokens; /* of this source in the stream */
};

struct stream_info {
  int64_t tokens, documents;
  int32_t vocab_size;               /* every id is below it */
  int32_t bos, eos;                 /* ids that stand round each document; -1: none */
  struct hash digest;               /* of the content */
  char tokenizer[STREAM_TOKENIZER]; /* "bytes", …; empty: not known */
  int64_t blocks;                   /* of its file, each with a digest */
  int64_t token_files;              /* that an index draws on; 0: the stream holds its tokens itself */
  int n_sources;                    /* at least 1 */
  struct stream_source source[STREAM_SOURCES];
  const char *sources; /* the same and where it came from, as text, one line a source; lives until stream_close */
  const char *settings; /* how `prepare` made it (data/prepare.h), up to the line's end; empty: not said */
};

/* Tokens [first, end) of the stream are one document. */
struct stream_document {
  int64_t first, end;
  int source;     /* number in stream_info.source */
  int64_t number; /* 0, 1, … in the order of the stream */
};

/* Opens a stream: what kind of file it is, its first bytes say.  Validates header,
 * size and footer.  `vocab_size` of the model: a stream whose vocabulary is larger is
 * refused (0: any vocabulary). */
struct stream *stream_open(const char *path, int32_t vocab_size, struct error *e);
const struct stream_info *stream_info(const struct stream *s);
const char *stream_path(const struct stream *s);
/* Reads and checks all of it: every block's digest, every id, the documents. */
bool stream_verify(struct stream *s, struct error *e);
void stream_close(struct stream *s);

/* Copies tokens first..first+count-1.  A block's digest is checked when it is
 * first touched; an id outside the stream's vocabulary is refused (file, token,
 * byte and id named).  Any thread may call it; it allocates nothing. */
bool stream_read(const struct stream *s, int64_t first, int64_t count, int32_t *ids, struct error *e);

/* Document `number`, and the document that holds token `token` (one binary search).
 * Any thread; checks digests as stream_read does; nothing is allocated. */
bool stream_document(const struct stream *s, int64_t number, struct stream_document *d, struct error *e);
bool stream_document_at(const struct stream *s, int64_t token, struct stream_document *d, struct error *e);

/* The order of a run over a stream. */
struct data_order {
  const struct stream *stream;
  int64_t seq_len;
  uint64_t seed;
  /* Set after data_order_make, which leaves them 0. */
  enum data_boundary boundary;  /* 0: DATA_BOUNDARY_PREDICT */
  bool shuffle_samples;         /* epoch 0 is permuted as later ones are */
  const struct data_skip *skip; /* [n_skips] ranges of the order that the run leaves out, ascending */
  int n_skips;
};

/* Samples in an epoch: (tokens - 1) / seq_len; 0 when the stream is shorter
 * than seq_len + 1 (ERROR_DATA from data_order_make, naming need and have). */
bool data_order_make(struct data_order *o, const struct stream *s, int64_t seq_len, uint64_t seed,
                     struct error *e);
int64_t data_order_epoch_samples(const struct data_order *o);
/* Tokens at the stream's end that no sample of an epoch reads. */
int64_t data_order_dropped_tokens(const struct data_order *o);
/* The order is 0, 1, …, over all epochs; the run's sample k is its k-th index that is not
 * left out.  Where a run stands is one index of the order, the one after its last sample: so a
 * range of samples left out that is added on a resume moves nothing that was read.
 * data_order_index: of sample k >= 0; -1 where the ranges leave out all up to 2^63. */
int64_t data_order_index(const struct data_order *o, int64_t sample);
/* Samples of the run whose index is below `index`. */
int64_t data_order_samples_before(const struct data_order *o, int64_t index);
/* Which sample of the stream, 0..epoch_samples-1, the run's sample `index` >= 0 is: stream order in
 * epoch 0 (unless shuffle_samples), then a permutation keyed by seed and epoch.  Costs the same for
 * every index. */
int64_t data_order_position(const struct data_order *o, int64_t index);

/* Where a sample goes: arrays of seq_len. */
struct data_sample {
  int32_t *inputs, *targets; /* -1: not counted, as DATA_BOUNDARY_MASK has a target that begins a document */
  int32_t *starts;           /* NULL, or: the position in the sample where the document of input j begins, 0 when before it */
  uint8_t *source;           /* NULL, or: of the document that target j lies in */
};

/* Copies sample `index` of the run.  Errors as in stream_read. */
bool data_sample(const struct data_order *o, int64_t index, const struct data_sample *out, struct error *e);

/* A hash of one sample's ids and index; batch hash = hash_sum over samples. */
struct hash data_sample_hash(int64_t index, const int32_t *inputs, const int32_t *targets, int64_t seq_len);

#endif
