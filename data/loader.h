/* The loader: a thread that reads a rank's samples ahead of the updates that want them.
 *
 * Update u (0, 1, … from the loader's start) gets samples [first + u * stride,
 * … + share) of the order.  While one update's samples are in use, those of
 * LOADER_AHEAD more are read.  All memory is taken at the start.  What the
 * thread cannot read is an error of the update that wants it, not of an earlier one.
 */
#ifndef FP4D_DATA_LOADER_H
#define FP4D_DATA_LOADER_H

#include "data/data.h"

enum { LOADER_AHEAD = 2 }; /* updates */

/* Where the samples' memory comes from: a GPU backend's is pinned, for copies beside computation. */
struct loader_memory {
  void *(*allocate)(void *context, size_t bytes, struct error *e); /* 64-byte aligned; NULL with *e filled */
  void (*release)(void *context, void *p);
  void *context;
};
extern const struct loader_memory loader_memory_plain; /* malloc's */

struct loader_plan {
  const struct data_order *order;
  int64_t first;   /* this rank's first sample at update 0 */
  int64_t share;   /* samples that this rank takes of an update */
  int64_t stride;  /* samples from an update to the next; 0: every update is the first */
  int64_t updates; /* how many will be wanted; nothing is read beyond */
  bool documents;  /* starts are wanted */
};

/* An update's samples on this rank, each [share * seq_len], and their sums. */
struct loader_batch {
  int32_t *inputs, *targets, *starts; /* starts: NULL unless wanted */
  uint8_t *source;
  int64_t first;                           /* index of the first sample */
  int64_t targets_of[STREAM_SOURCES];      /* counted ones, by source */
  int64_t tokens_of[STREAM_SOURCES];       /* all positions, by the source of their targets */
  struct hash hash;                        /* sum of data_sample_hash */
};

/* Bytes that loader_open takes from its memory. */
int64_t loader_bytes(int64_t share, int64_t seq_len, bool documents);

struct loader; /* opaque */

/* Starts reading.  The order and what it points to must outlive the loader. */
struct loader *loader_open(const struct loader_plan *p, const struct loader_memory *memory, struct error *e);

/* The next update's samples, valid until the following call: copies of them that go on
 * beside the caller must have ended by then.  *waited: seconds that the
 * caller stood still for them.  NULL with the error of the read that failed, again and
 * again. */
const struct loader_batch *loader_next(struct loader *l, double *waited, struct error *e);

/* Stops the thread, after at most the sample that it is reading.  NULL is fine. */
void loader_close(struct loader *l);

#endif
