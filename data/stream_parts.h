/* What every kind of stream is made of (stream.c), and the kinds: our token
 * file (stream_read.c) and an index over token files of others (index_read.c). */
#ifndef FP4D_DATA_STREAM_PARTS_H
#define FP4D_DATA_STREAM_PARTS_H

#include "data/data.h"

struct stream_kind {
  /* Arguments are in range. Any thread. */
  bool (*read)(const struct stream *s, int64_t first, int64_t count, int32_t *ids, struct error *e);
  bool (*document)(const struct stream *s, int64_t number, struct stream_document *d, struct error *e);
  bool (*verify)(struct stream *s, struct error *e);
  /* Frees what the kind holds, also after an opening that failed midway. */
  void (*close)(struct stream *s);
};

struct stream {
  const struct stream_kind *kind;
  char *path;
  struct stream_info info;
  int fd;     /* of the file `path` */
  void *part; /* the kind's own */
};

extern const struct stream_kind stream_kind_tokens, stream_kind_index;

/* Fills s->info and s->part from s->fd, a regular file of `size` bytes. */
bool stream_tokens_open(struct stream *s, int64_t size, struct error *e);
bool stream_index_open(struct stream *s, int64_t size, struct error *e);

#endif
