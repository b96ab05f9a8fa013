/* What the parts of the external sort share. */
#ifndef FP4D_DATA_SORT_PARTS_H
#define FP4D_DATA_SORT_PARTS_H

#include "data/sort_external.h"
#include "data/sort_run.h"

/* A merge of n runs. */
struct sort_merge *sort_merge_of(struct sort_run *run, int64_t n, int key_bytes, int first, int last, int64_t memory,
                                 struct error *e);

#endif
