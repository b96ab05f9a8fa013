#include "comm/rounds.h"

#include "base/checked.h"

enum { ELEMENTS = 8 }; /* a share begins at their multiples, and so do a segment's parts of it */

int64_t share_begin(const struct comm_part *p, int rank, int world) { return share_row(p->rows, p->cols, rank, world) * p->cols; }

static int64_t largest_share(const struct comm_part *p, int world) {
  int64_t most = 0;
  for (int r = 0; r < world; r++) {
    const int64_t n = share_begin(p, r + 1, world) - share_begin(p, r, world);
    if (n > most) most = n;
  }
  return most;
}

int64_t segment_of(const struct segment *s, int rank, int world, char **data) {
  const int64_t first = share_begin(s->part, rank, world), left = share_begin(s->part, rank + 1, world) - first - s->at;
  *data = (char *)s->part->data + (size_t)(first + s->at) * dtype_bytes(s->part->dtype);
  return left < 0 ? 0 : left < s->length ? left : s->length;
}

int round_next(struct segment segments[ROUND_SEGMENTS], const struct exchange_order *o, struct round_place *p, int copies, int world,
               char *buffer, int64_t bytes) {
  int64_t used = 0;
  int n = 0;
  while (p->part < o->n && n < ROUND_SEGMENTS) {
    const struct comm_part *part = &o->parts[p->part];
    const int64_t size = (int64_t)dtype_bytes(part->dtype) * copies, room = (bytes - used) / (size * ELEMENTS) * ELEMENTS;
    const int64_t left = largest_share(part, world) - p->at, length = left < room ? left : room;
    if (length <= 0 && left > 0) break;
    const int64_t stride = round_up(length, ELEMENTS);
    segments[n++] = (struct segment){part, p->at, length, stride, buffer + used};
    used += round_up(stride * size, ROUND_ALIGNMENT);
    p->at += length;
    if (length < left) break;
    p->part++;
    p->at = 0;
  }
  return n;
}
