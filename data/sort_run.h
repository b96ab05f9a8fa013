/* One run of an external sort as a file (data/sort_external.h). */
#ifndef FP4D_DATA_SORT_RUN_H
#define FP4D_DATA_SORT_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"
#include "data/sort_external.h"

enum { SORT_BLOCK = 128 * 1024 }; /* bytes under one digest */

/* What a run's header and footer say. */
struct sort_run {
  char *path;
  int fd; /* -1 until it is asked for */
  int64_t first, last; /* which flushes are in it */
  int64_t payload;     /* bytes of records */
  uint64_t group_at[SORT_GROUPS + 1]; /* where groups begin in the payload */
};

/* Opens and checks header and footer; with `whole` every block too.  *state gets state_bytes
 * bytes where it is not NULL. */
bool sort_run_open(struct sort_run *run, const char *path, struct hash owner, int key_bytes, int64_t state_bytes, void *state,
                   bool whole, struct error *e);
void sort_run_forget(struct sort_run *run); /* frees; the file stays */

/* ---- writing --------------------------------------------------------------- */
struct sort_run_writer; /* opaque */

/* Writes FOLDER/run-FIRST-LAST under a temporary name. */
struct sort_run_writer *sort_run_writer_open(const char *folder, struct hash owner, int key_bytes, int64_t first, int64_t last,
                                             struct error *e);
/* Ascending keys. */
bool sort_run_writer_add(struct sort_run_writer *w, const unsigned char *key, const void *payload, int64_t bytes,
                         struct error *e);
/* Durable and named; *run is open then. */
bool sort_run_writer_publish(struct sort_run_writer *w, const void *state, int64_t state_bytes, struct sort_run *run,
                             struct error *e);
void sort_run_writer_close(struct sort_run_writer *w); /* NULL is fine */

/* ---- reading --------------------------------------------------------------- */
/* Reads bytes [at, end) of a run's payload in order, checking blocks. */
struct sort_cursor {
  const struct sort_run *run;
  unsigned char *buffer; /* whole blocks */
  unsigned char *digests;
  int64_t room;          /* bytes of it */
  int64_t begin, filled; /* buffer holds payload [begin, begin + filled) */
  int64_t at, end;
};
bool sort_cursor_open(struct sort_cursor *c, struct sort_run *run, int64_t at, int64_t end, int64_t memory, struct error *e);
bool sort_cursor_take(struct sort_cursor *c, void *out, int64_t bytes, struct error *e);
void sort_cursor_close(struct sort_cursor *c);

#endif
