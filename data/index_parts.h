/* Between the parts of building an index: files to documents (index_scan.c),
 * documents to order (index_order.c), order to a file (index_build.c). */
#ifndef FP4D_DATA_INDEX_PARTS_H
#define FP4D_DATA_INDEX_PARTS_H

#include "base/hash.h"
#include "base/threads.h"
#include "data/index.h"
#include "data/index_file.h"
#include "data/mixture.h"
#include "data/tokens.h"

struct index_document {
  struct hash content;
  int64_t first, length; /* in its file */
  int32_t file;
  bool hashed; /* content is known */
};

struct index_scan {
  struct tokens_file *file; /* closed, with what was found out */
  int *source;              /* of each file */
  int64_t *first_block;     /* of each file in `digest`; [files + 1] */
  int64_t files;
  unsigned char *digest;    /* of every block of every file, as in the index */
  struct index_document *document; /* of files one after the other */
  int64_t documents, empty;
  int64_t bytes;
  int64_t most_id;
};

/* Finds, checks and reads all of the sources' files. After a failure too index_scan_free frees. */
bool index_scan(struct index_scan *s, const struct data_index *x, struct threads *t, struct error *e);
void index_scan_free(struct index_scan *s);

/* A hash of what the order depends on besides content; the same for both sides. */
struct hash index_settings(const struct data_index *x);

/* Documents of one stream in the order of the rule, one at a time. */
struct index_order {
  const struct data_index *request;
  const struct index_scan *scan;
  bool validation;
  struct mixture mixture;
  struct index_entry {
    struct hash key;
    int64_t document;
  } *entry[DATA_SOURCES];        /* by group */
  int64_t sorted[DATA_SOURCES];  /* the pass that each is in the order of; -1: none */
};

bool index_order_start(struct index_order *o, const struct data_index *x, const struct index_scan *s, bool validation, struct error *e);
/* The number of the next document; -1: the stream ends. */
int64_t index_order_next(struct index_order *o);
void index_order_free(struct index_order *o);

#endif
