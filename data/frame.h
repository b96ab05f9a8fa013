/* A file in blocks: what token streams and indexes have in common.
 *
 *   header of 256 bytes | payload | digest of each MiB of the payload | text | trailer of 64 bytes
 *
 * The trailer (docs/formats.md) has a digest over header and block digests, and one over the text.
 * A reader believes nothing before those are checked, and no block before its own digest is: that
 * happens when it is first touched.  A writer gives the file its name when all of it is on the disk.
 */
#ifndef FP4D_DATA_FRAME_H
#define FP4D_DATA_FRAME_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"

#define FRAME_END_MAGIC "FP4DEND\n"
enum {
  FRAME_HEADER = 256,
  FRAME_TRAILER = 64,
  FRAME_BLOCK = 1 << 20,    /* bytes under one digest */
  FRAME_TEXT_MOST = 1 << 20 /* bytes of the text */
};

/* Bytes of a file with this much payload and no text; -1: more than 2^63 - 1. */
int64_t frame_bytes(int64_t payload);

/* ---- reading ----------------------------------------------------------- */
struct frame {
  const char *path;  /* the caller's */
  const char *again; /* a hint: how such a file is made again */
  int fd;            /* the caller's */
  int64_t payload, blocks;
  struct hash digest; /* of header and block digests */
  char *text;         /* zero-terminated */
  unsigned char *table;
  pthread_mutex_t mutex; /* guards `buffer`; there when `done` is */
  unsigned char *buffer; /* one block */
  atomic_uchar *done;    /* by block: it was checked */
};

/* Checks the frame of a file of `size` bytes whose header calls for `payload` bytes. f->path, again
 * and fd are set. After a failure too frame_close frees. */
bool frame_open(struct frame *f, const unsigned char header[FRAME_HEADER], int64_t payload, int64_t size, struct error *e);
void frame_close(struct frame *f);

/* Bytes [at, at + bytes) of the payload, their blocks checked. Any thread; allocates nothing. */
bool frame_read(struct frame *f, void *to, int64_t at, int64_t bytes, struct error *e);
/* Checks the blocks of those bytes. */
bool frame_check(struct frame *f, int64_t at, int64_t bytes, struct error *e);
/* Reads every block anew, checks it and shows it to `look`: *bytes of payload that begin at byte `at`. */
bool frame_verify(struct frame *f, bool (*look)(void *context, const unsigned char *bytes, int64_t at, int64_t count, struct error *e),
                  void *context, struct error *e);

/* Reads bytes [offset, offset + bytes) of a file; one that ends sooner was cut after it was
 * opened. Reads, not a mapping: that gives an error, not a SIGBUS. */
bool frame_read_at(int fd, const char *path, void *to, int64_t bytes, int64_t offset, struct error *e);

/* ---- writing ----------------------------------------------------------- */
struct frame_writer; /* opaque */

/* Starts PATH under a temporary name beside it; removes, and logs, what killed writers of PATH
 * left. `what`: "stream", "index", for messages; lives for ever. */
struct frame_writer *frame_writer_open(const char *path, const char *what, struct error *e);
/* The next bytes of the payload. */
bool frame_writer_put(struct frame_writer *w, const void *data, int64_t bytes, struct error *e);
/* Where the next bytes of the payload go: *room of them (at least 1) at the pointer returned;
 * frame_writer_filled says how many were put there. NULL with *e filled. */
unsigned char *frame_writer_slot(struct frame_writer *w, int64_t *room, struct error *e);
void frame_writer_filled(struct frame_writer *w, int64_t bytes);
int64_t frame_writer_payload(const struct frame_writer *w); /* bytes so far */
/* Writes what is left and makes it durable, still under the temporary name. */
bool frame_writer_finish(struct frame_writer *w, const unsigned char header[FRAME_HEADER], const char *text, struct error *e);
/* Renames the finished file to PATH, durably. */
bool frame_writer_publish(struct frame_writer *w, struct error *e);
/* Frees; removes the temporary file unless it was published. NULL is fine. */
void frame_writer_close(struct frame_writer *w);

#endif
