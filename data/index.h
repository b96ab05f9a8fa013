/* An index: the stream that the one rule of order (data/mixture.h) makes of token
 * files that others made, without a copy of them.  stream_open reads it as any
 * stream.  Building reads every token once; it holds about 100 bytes a document. */
#ifndef FP4D_DATA_INDEX_H
#define FP4D_DATA_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "data/source.h"

struct data_index {
  const struct data_source *sources;
  int n_sources;
  const struct data_stage *stages;
  int n_stages;
  int64_t tokens;                           /* data.tokens */
  const char *train_path, *validation_path; /* indexes to write; validation NULL: all is for training */
  double validation_fraction;
  uint64_t seed;
  bool shuffle_documents;
  int64_t vocab_size; /* ids of this or more are refused */
  int64_t least;      /* tokens that each stream must have: seq_len + 1 */
  int threads;
};

struct data_indexed {
  int64_t files, bytes;                 /* token files */
  int64_t empty;                        /* documents without a token, left out */
  int64_t documents[2], tokens[2];      /* train, validation */
  int exhausted;                        /* source that ended the training stream; -1: none did */
  int64_t unused[DATA_SOURCES];         /* tokens of each source that the training stream does not have */
  double seconds;
};

/* Builds both indexes, each whole or not at all; the same bytes for any number of threads, and for
 * two that build at once.  Errors are ERROR_DATA (or ERROR_SYSTEM) and name the file. */
bool data_index_build(const struct data_index *x, struct data_indexed *done, struct error *e);

/* Refuses the existing index `path` where it was made under other settings or of other files. */
bool data_index_current(const struct data_index *x, const char *path, struct error *e);

#endif
