/* What the parts of `prepare` share: documents as records of the external sort. */
#ifndef FP4D_DATA_PREPARE_PARTS_H
#define FP4D_DATA_PREPARE_PARTS_H

#include "data/corpus.h"
#include "data/mixture.h"
#include "data/prepare.h"
#include "data/sort_external.h"
#include "data/tokenizer.h"

/* Keys: group, order, content, source, ordinal.  The ordinal numbers the records of all
 * sources in the order of sources, files and lines. */
enum {
  PREPARE_KEY = 42,
  PREPARE_AT_ORDER = 1,
  PREPARE_AT_CONTENT = 17,
  PREPARE_AT_SOURCE = 33,
  PREPARE_AT_ORDINAL = 34,
  /* Groups: the documents of a side, by source unless all are one pool ... */
  PREPARE_DOCUMENTS = 0, /* + DATA_SOURCES * side + source */
  /* ... hashes of texts (order: the hash), and signatures (order: the ordinal); their payload begins
   * with what is to be subtracted when the document is dropped. */
  PREPARE_TEXTS = 2 * DATA_SOURCES,
  PREPARE_SIGNATURES,
  PREPARE_LOSS = 10 /* side, source, u64 tokens */
};

/* Where pass 1 stands: the state of the sort's runs. */
struct prepare_state {
  int64_t file, records; /* the next record */
  int64_t ordinal;
  int64_t finished; /* all sources are read */
  struct data_prepared_source source[DATA_SOURCES];
};

/* A file in the work folder: streams are getting their names. */
#define PREPARE_PUBLISHING "publishing"

struct preparation {
  const struct data_prepare *request;
  int64_t memory;
  int threads;
  struct corpus_files files;
  int64_t file_bytes; /* of all files, as they lie on the disk */
  struct tokenizer *tokenizer;
  int32_t bos, eos; /* put round documents; -1: none */
  int token_bytes;
  bool pool;
  char *work; /* folder */
  struct hash owner;
  struct sort_external *sort;
  struct prepare_state state;
  uint64_t *dropped; /* a bit for each ordinal */
  struct data_prepared *done;
};

/* ---- one record (data/prepare_document.c) ---------------------------------- */

/* A worker's own memory. */
struct prepare_worker {
  struct tokenizer_scratch *scratch;
  struct tokenizer_ids ids;
  char *text; /* decoded from JSON, repaired, normalised */
  int64_t room;
};

/* What records became: keys and payloads for the sort. */
struct prepare_made {
  unsigned char key[PREPARE_KEY];
  int64_t at, bytes; /* of `out` */
};
struct prepare_output {
  struct prepare_made *made;
  int64_t n, made_room;
  unsigned char *out;
  int64_t used, room;
};

/* A record with its place. */
struct prepare_input {
  const char *bytes;
  int64_t length, line, file, ordinal;
};

bool prepare_document(const struct preparation *p, struct prepare_worker *w, const struct prepare_input *in,
                      struct prepare_output *out, struct data_prepared_source *counts, struct error *e);

uint64_t prepare_ordinal(const unsigned char *key);
/* The order of a document in a pass over its source. */
void prepare_order(const struct preparation *p, int side, int64_t pass, unsigned char *key);

/* ---- the passes ------------------------------------------------------------ */
bool prepare_read(struct preparation *p, struct error *e);  /* sources to runs */
bool prepare_drop(struct preparation *p, struct error *e);  /* duplicates */
bool prepare_write(struct preparation *p, struct error *e); /* runs to streams */

static inline bool prepare_is_dropped(const struct preparation *p, uint64_t ordinal) {
  return p->dropped && p->dropped[ordinal / 64] >> ordinal % 64 & 1;
}

/* ---- progress (data/prepare_progress.c) ------------------------------------ */
struct prepare_progress {
  const char *what; /* the pass */
  double began, said;
  int64_t begin; /* done when it began */
  bool quiet;
};
void prepare_progress_begin(struct prepare_progress *g, const char *what, int64_t done, bool quiet);
/* A line every few seconds: done of all bytes; `worked` bytes of text or tokens since it began. */
void prepare_progress_say(struct prepare_progress *g, int64_t done, int64_t all, int64_t worked);

#endif
