/* Sorting more records than memory holds, in parts that a killed process leaves finished.
 *
 * Records have a key of fixed length, compared as bytes, and a payload of any length.
 * They collect in memory up to a budget; sort_external_flush sorts them and publishes
 * them as a *run*, a file in `folder`, together with the caller's state: what has been
 * taken in so far.  A later process that opens the folder gets the state of the last
 * run back and goes on from there.  The first byte of a key is its *group*: groups are
 * merged one by one.  What a merge gives depends on the records alone, not on how they
 * were cut into runs, as long as keys differ.
 *
 * Every block of a run has a digest that is checked whenever it is read.  One thread
 * at a time.
 */
#ifndef FP4D_DATA_SORT_EXTERNAL_H
#define FP4D_DATA_SORT_EXTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"

enum { SORT_KEY_MOST = 64, SORT_GROUPS = 256 };

struct sort_request {
  const char *folder; /* made if absent */
  struct hash owner;  /* runs of another owner are removed, as are damaged ones and what comes after them */
  int key_bytes;      /* 1..SORT_KEY_MOST */
  int64_t memory;     /* for records that are held, and again for merging; at least 1 MiB is used */
  int64_t state_bytes;
};

struct sort_external; /* opaque */

/* NULL with *e filled.  Every run that is there is read once and checked. */
struct sort_external *sort_external_open(const struct sort_request *r, struct error *e);
void sort_external_close(struct sort_external *s); /* runs stay; NULL is fine */

/* The state of the last run; NULL where there is none. */
const void *sort_external_state(const struct sort_external *s);
int64_t sort_external_runs(const struct sort_external *s);
int64_t sort_external_held(const struct sort_external *s); /* records in memory, in no run yet */

/* Would `records` more, of `bytes` payload bytes together, pass the budget? */
bool sort_external_fits(const struct sort_external *s, int64_t records, int64_t bytes);
/* Takes a record, also past the budget. */
bool sort_external_add(struct sort_external *s, const unsigned char *key, const void *payload, int64_t bytes, struct error *e);
/* Publishes what is held as a run, durably, with the state. */
bool sort_external_flush(struct sort_external *s, const void *state, struct error *e);

/* Merges runs until `segments` merges of all of them fit the memory (a segment is a run
 * in one merge).  Finished merges survive a kill.  `step` (may be NULL) is told the
 * bytes merged so far and in all. */
bool sort_external_reduce(struct sort_external *s, int merges, void (*step)(void *context, int64_t done, int64_t all),
                          void *context, struct error *e);

struct sort_merge; /* opaque: records of groups, ascending */

struct sort_record {
  const unsigned char *key; /* these live until the next record */
  const unsigned char *payload;
  int64_t bytes;
};

/* The records of groups first..last that are in runs.  `memory` is shared among the
 * runs, at least a block each. */
struct sort_merge *sort_merge_open(struct sort_external *s, int first, int last, int64_t memory, struct error *e);
/* 1: a record; 0: the end; -1: *e is filled. */
int sort_merge_next(struct sort_merge *m, struct sort_record *record, struct error *e);
void sort_merge_close(struct sort_merge *m);

#endif
