/* From text to token streams, once (`fp4d prepare`).
 *
 * Pass 1 reads every source once: policy for bytes that are no UTF-8, tokens,
 * content hash, side (training or validation) and order key of each document, all
 * of which go through an external sort in a work folder.  Pass 2 finds duplicates.
 * Pass 3 merges the documents in their final order (data/mixture.h) into the
 * streams.  Memory is bounded; the streams do not depend on the number of
 * threads, on memory, or on how often the process was killed and started again.
 */
#ifndef FP4D_DATA_PREPARE_H
#define FP4D_DATA_PREPARE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "data/overlap.h"
#include "data/source.h"

struct data_prepare {
  const struct data_source *sources;
  int n_sources;
  const char *train_path, *validation_path; /* streams to write; validation NULL: all is for training */
  double validation_fraction;               /* of documents, in (0, 1) with a validation_path */
  uint64_t seed;                            /* keys the order of documents */
  const struct data_stage *stages;
  int n_stages;
  int64_t tokens;        /* of the training stream; 0: as many as there are */
  const char *tokenizer; /* NULL: bytes */
  bool bos, eos;         /* round each document; where one token is both, and both are asked for, it ends the document */
  bool in_file_order;    /* documents are not shuffled */
  enum data_invalid_utf8 invalid_utf8;
  enum data_dedup dedup;
  double minhash_threshold;
  bool overlap_report;
  int64_t memory; /* bytes; 0: 1 GiB.  A record may have 1/32 of it. */
  int threads;    /* 0: as many as there are processors */
  bool quiet;     /* no progress on standard error */
  bool go_on;     /* refuse to begin anew: there must be work of this very request */
};

enum { PREPARE_TRAIN, PREPARE_VALIDATION };

/* What became of a source's documents. */
struct data_prepared_source {
  int64_t files, bytes;       /* bytes of text */
  int64_t documents;          /* read */
  int64_t empty;              /* without a byte of text */
  int64_t invalid;            /* with bytes that are no UTF-8: repaired (or taken as they are by a tokenizer of bytes) */
  int64_t replacements;       /* U+FFFD put for such bytes */
  int64_t invalid_dropped;    /* dropped for them */
  int64_t duplicates, near;   /* dropped: the text, or nearly the text, of an earlier document */
  struct {
    int64_t documents, tokens;                 /* distinct */
    int64_t written_documents, written_tokens; /* in the stream, repetitions counted */
    int64_t unused_tokens;                     /* no pass has used them */
  } side[2];
  struct overlap_total overlap; /* of the training documents written, with overlap_report */
};

struct data_prepared {
  int64_t documents[2], tokens[2]; /* of the streams: train, validation */
  int64_t files, empty, duplicates; /* sums over the sources */
  struct data_prepared_source source[DATA_SOURCES];
  int exhausted[2]; /* the source that could give no more and so ended the stream; -1: none did */
  bool pool;        /* no weights: each document once, in one order */
  struct overlap_side overlap;
  char overlap_path[DATA_PATH + 16]; /* the report; empty without */
  bool resumed; /* an earlier process had finished part of it */
};

/* Writes the streams, each whole or not at all, folders made as needed.  At least one
 * document must fall on each side.  Errors are ERROR_DATA (or ERROR_SYSTEM for memory)
 * and name the file, and the line where there are lines.  What was finished before an
 * error or a kill lies in TRAIN_PATH.work; the same call goes on from there. */
bool data_prepare(const struct data_prepare *p, struct data_prepared *done, struct error *e);

/* What decides over the streams beside the sources' content and the tokenizer, as words NAME=VALUE on
 * one line; streams carry it (stream_info.settings). malloc'ed; NULL: out of memory. */
char *data_prepare_settings(const struct data_prepare *p);

/* What an earlier process left: nothing, work, or work that was being published when it was
 * ended, so that the streams that have their names may be new or old ones. */
enum data_prepare_left { PREPARE_NOTHING_LEFT, PREPARE_WORK_LEFT, PREPARE_PUBLISHING_LEFT };
enum data_prepare_left data_prepare_left(const char *train_path);

#endif
