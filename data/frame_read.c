/* Reading a file in blocks. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "data/frame.h"
#include "data/little_endian.h"

int64_t frame_bytes(int64_t payload) {
  const int64_t blocks = payload / FRAME_BLOCK + (payload % FRAME_BLOCK != 0);
  int64_t bytes;
  return checked_add(payload, blocks * 16 + FRAME_HEADER + FRAME_TRAILER, &bytes) ? bytes : -1;
}

bool frame_read_at(int fd, const char *path, void *to, int64_t bytes, int64_t offset, struct error *e) {
  char *p = to;
  while (bytes > 0) {
    size_t ask = bytes < 1 << 30 ? (size_t)bytes : (size_t)1 << 30;
    ssize_t got = pread(fd, p, ask, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return error_errno(e, ERROR_DATA, "%s: cannot read at byte %" PRId64, path, offset);
    if (got == 0)
      return error_set(e, ERROR_DATA, "%s ends at byte %" PRId64 ": it was cut after it was opened", path, offset);
    p += got;
    bytes -= got;
    offset += got;
  }
  return true;
}

/* Block table and text, and that their digests are the trailer's. */
static bool read_digests(struct frame *f, const unsigned char *header, const unsigned char *trailer, int64_t text_bytes,
                         struct error *e) {
  /* The counts fit the file's true size, so these allocations do too. */
  const int64_t table_bytes = f->blocks * 16, table_at = FRAME_HEADER + f->payload;
  f->table = malloc((size_t)table_bytes + 1);
  f->text = malloc((size_t)text_bytes + 1);
  struct hash_state *digest = f->table && f->text ? hash_open() : NULL;
  if (!digest) return error_set(e, ERROR_SYSTEM, "%s: out of memory for its block table", f->path);
  const bool ok = frame_read_at(f->fd, f->path, f->table, table_bytes, table_at, e) &&
                  frame_read_at(f->fd, f->path, f->text, text_bytes, table_at + table_bytes, e);
  if (ok) {
    hash_feed(digest, header, FRAME_HEADER);
    hash_feed(digest, f->table, (size_t)table_bytes);
  }
  f->digest = hash_close(digest);
  if (!ok) return false;
  f->text[text_bytes] = 0;
  const char *part = NULL;
  if (!hash_equal(f->digest, load_hash(trailer)))
    part = "header and block table";
  else if (!hash_equal(hash_bytes(f->text, (size_t)text_bytes), load_hash(trailer + 16)))
    part = "list of sources";
  if (!part) return true;
  error_set(e, ERROR_DATA, "%s: damaged: the digest of its %s does not match", f->path, part);
  return error_hint(e, "%s", f->again);
}

bool frame_open(struct frame *f, const unsigned char header[FRAME_HEADER], int64_t payload, int64_t size, struct error *e) {
  const int64_t least = frame_bytes(payload);
  unsigned char trailer[FRAME_TRAILER];
  if (least < 0) return error_set(e, ERROR_INTERNAL, "%s: %" PRId64 " bytes of payload", f->path, payload);
  f->payload = payload;
  f->blocks = ceil_div(payload, FRAME_BLOCK);
  if (size < least) {
    error_set(e, ERROR_DATA, "%s: truncated or damaged: its header calls for %" PRId64 " bytes, the file has %" PRId64,
              f->path, least, size);
    return error_hint(e, "%s", f->again);
  }
  if (!frame_read_at(f->fd, f->path, trailer, FRAME_TRAILER, size - FRAME_TRAILER, e)) return false;
  const uint64_t text_bytes = (uint64_t)(size - least);
  if (memcmp(trailer + 56, FRAME_END_MAGIC, 8) != 0 || load_u64(trailer + 40) || load_u64(trailer + 48) ||
      load_u64(trailer + 32) != text_bytes || text_bytes > FRAME_TEXT_MOST) {
    error_set(e, ERROR_DATA, "%s: truncated or damaged: no valid trailer in its last %d bytes", f->path, FRAME_TRAILER);
    return error_hint(e, "%s", f->again);
  }
  if (!read_digests(f, header, trailer, (int64_t)text_bytes, e)) return false;
  f->buffer = malloc(FRAME_BLOCK);
  f->done = malloc((size_t)f->blocks * sizeof *f->done + 1);
  const int why = f->buffer && f->done ? pthread_mutex_init(&f->mutex, NULL) : ENOMEM;
  if (why) {
    free(f->done);
    f->done = NULL; /* no mutex either */
    return error_set(e, ERROR_SYSTEM, "%s: %s", f->path, strerror(why));
  }
  for (int64_t b = 0; b < f->blocks; b++) atomic_init(&f->done[b], 0);
  return true;
}

void frame_close(struct frame *f) {
  if (f->done) pthread_mutex_destroy(&f->mutex);
  free(f->done);
  free(f->buffer);
  free(f->table);
  free(f->text);
}

static int64_t block_bytes(const struct frame *f, int64_t b) {
  const int64_t left = f->payload - b * FRAME_BLOCK;
  return left < FRAME_BLOCK ? left : FRAME_BLOCK;
}

/* Reads block b into the buffer and checks it. The mutex is held. */
static bool load_block(struct frame *f, int64_t b, struct error *e) {
  const int64_t bytes = block_bytes(f, b), offset = FRAME_HEADER + b * FRAME_BLOCK;
  if (!frame_read_at(f->fd, f->path, f->buffer, bytes, offset, e)) return false;
  if (!hash_equal(hash_bytes(f->buffer, (size_t)bytes), load_hash(f->table + 16 * b))) {
    error_set(e, ERROR_DATA,
              "%s: damaged: block %" PRId64 " of %" PRId64 " (bytes %" PRId64 " to %" PRId64 ") does not match its digest",
              f->path, b, f->blocks, offset, offset + bytes - 1);
    return error_hint(e, "%s", f->again);
  }
  atomic_store_explicit(&f->done[b], 1, memory_order_release);
  return true;
}

bool frame_check(struct frame *f, int64_t at, int64_t bytes, struct error *e) {
  if (bytes == 0) return true;
  for (int64_t b = at / FRAME_BLOCK; b <= (at + bytes - 1) / FRAME_BLOCK; b++) {
    if (atomic_load_explicit(&f->done[b], memory_order_acquire)) continue;
    pthread_mutex_lock(&f->mutex);
    const bool ok = atomic_load_explicit(&f->done[b], memory_order_relaxed) || load_block(f, b, e);
    pthread_mutex_unlock(&f->mutex);
    if (!ok) return false;
  }
  return true;
}

bool frame_read(struct frame *f, void *to, int64_t at, int64_t bytes, struct error *e) {
  return frame_check(f, at, bytes, e) && frame_read_at(f->fd, f->path, to, bytes, FRAME_HEADER + at, e);
}

bool frame_verify(struct frame *f, bool (*look)(void *context, const unsigned char *bytes, int64_t at, int64_t count, struct error *e),
                  void *context, struct error *e) {
  bool ok = true;
  pthread_mutex_lock(&f->mutex);
  for (int64_t b = 0; ok && b < f->blocks; b++)
    ok = load_block(f, b, e) && look(context, f->buffer, b * FRAME_BLOCK, block_bytes(f, b), e);
  pthread_mutex_unlock(&f->mutex);
  return ok;
}
