/* An exchange cut into rounds whose received values fit a buffer (transports' own header).
 *
 * A round has at most ROUND_SEGMENTS segments; a segment is elements [at, at + length) of
 * every rank's share of a tensor, as far as the share has them.  All ranks cut alike. */
#ifndef FP4D_COMM_ROUNDS_H
#define FP4D_COMM_ROUNDS_H

#include "comm/transport.h"

enum { ROUND_SEGMENTS = 16, ROUND_ALIGNMENT = 256 /* bytes; of a segment's place in the buffer */ };

struct segment {
  const struct comm_part *part;
  int64_t at, length;
  int64_t stride; /* elements from one rank's received values to the next one's: of length, so that all are aligned */
  char *received; /* reduce-scatter: the others' values of this rank's elements, one after another */
};

/* Where an exchange stands; zeros: at its beginning. */
struct round_place {
  int part;
  int64_t at;
};

/* The next round: its segments, 0 after the last.  `copies`: how many ranks' values of a
 * share are received; `bytes` of `buffer` hold them (at least ROUND_ALIGNMENT for each copy). */
int round_next(struct segment segments[ROUND_SEGMENTS], const struct exchange_order *o, struct round_place *p, int copies, int world,
               char *buffer, int64_t bytes);

/* How many elements of `rank`'s share the segment has, and where in the tensor they begin. */
int64_t segment_of(const struct segment *s, int rank, int world, char **data);

/* The first element of `rank`'s share; of rank `world`: the number of elements. */
int64_t share_begin(const struct comm_part *p, int rank, int world);

#endif
