/* One run of an external sort as a file.
 *
 * Header (64 bytes), records (key, u64 bytes of payload, payload), then the footer:
 * digests of SORT_BLOCK bytes of records each, where groups begin, the state; then the
 * trailer (64 bytes) with the digest of header and footer.
 */
#include "data/sort_run.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "data/stream_file.h"

#define MAGIC "\x89" "FP4DSR\n"
#define END_MAGIC "FP4DSRE\n"
enum { VERSION = 1, HEADER = 64, TRAILER = 64, GROUPS_BYTES = 8 * (SORT_GROUPS + 1) };

static void encode_header(unsigned char h[HEADER], struct hash owner, int key_bytes, int64_t first, int64_t last) {
  memset(h, 0, HEADER);
  memcpy(h, MAGIC, 8);
  store_u32(h + 8, VERSION);
  store_u32(h + 12, (uint32_t)key_bytes);
  store_hash(h + 16, owner);
  store_u64(h + 32, (uint64_t)first);
  store_u64(h + 40, (uint64_t)last);
}

/* ---- writing --------------------------------------------------------------- */

struct sort_run_writer {
  int fd, key_bytes;
  char *path, *temporary;
  unsigned char header[HEADER];
  int64_t first, last;
  unsigned char *block;
  int64_t in_block, blocks;
  unsigned char *digests;
  int64_t digests_room;
  int next_group; /* groups below it have begun */
  uint64_t group_at[SORT_GROUPS + 1];
};

static bool write_at(const struct sort_run_writer *w, const void *data, int64_t bytes, int64_t offset, struct error *e) {
  const char *p = data;
  while (bytes > 0) {
    const ssize_t wrote = pwrite(w->fd, p, (size_t)bytes, (off_t)offset);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      error_errno(e, ERROR_DATA, "cannot write %s", w->temporary);
      return error_hint(e, "free some space; the same command goes on from what is finished");
    }
    p += wrote;
    bytes -= wrote;
    offset += wrote;
  }
  return true;
}

struct sort_run_writer *sort_run_writer_open(const char *folder, struct hash owner, int key_bytes, int64_t first, int64_t last,
                                             struct error *e) {
  struct sort_run_writer *w = calloc(1, sizeof *w);
  if (w) *w = (struct sort_run_writer){.fd = -1, .key_bytes = key_bytes, .first = first, .last = last};
  if (!w || !(w->block = malloc(SORT_BLOCK)) || asprintf(&w->path, "%s/run-%08" PRId64 "-%08" PRId64, folder, first, last) < 0 ||
      asprintf(&w->temporary, "%s.tmp", w->path) < 0) {
    error_set(e, ERROR_SYSTEM, "out of memory writing in %s", folder);
    sort_run_writer_close(w);
    return NULL;
  }
  encode_header(w->header, owner, key_bytes, first, last);
  w->fd = open(w->temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (w->fd < 0) {
    error_errno(e, ERROR_DATA, "cannot create %s", w->temporary);
    sort_run_writer_close(w);
    return NULL;
  }
  return w;
}

static bool flush_block(struct sort_run_writer *w, struct error *e) {
  if (w->in_block == 0) return true;
  if (w->blocks == w->digests_room) {
    const int64_t room = w->digests_room ? 2 * w->digests_room : 256;
    unsigned char *digests = realloc(w->digests, (size_t)room * 16);
    if (!digests) return error_set(e, ERROR_SYSTEM, "out of memory writing %s", w->temporary);
    w->digests = digests;
    w->digests_room = room;
  }
  store_hash(w->digests + 16 * w->blocks, hash_bytes(w->block, (size_t)w->in_block));
  if (!write_at(w, w->block, w->in_block, HEADER + w->blocks * SORT_BLOCK, e)) return false;
  w->blocks++;
  w->in_block = 0;
  return true;
}

static bool put(struct sort_run_writer *w, const void *data, int64_t bytes, struct error *e) {
  const unsigned char *p = data;
  while (bytes > 0) {
    if (w->in_block == SORT_BLOCK && !flush_block(w, e)) return false;
    const int64_t room = SORT_BLOCK - w->in_block, part = bytes < room ? bytes : room;
    memcpy(w->block + w->in_block, p, (size_t)part);
    w->in_block += part;
    p += part;
    bytes -= part;
  }
  return true;
}

static void begin_groups(struct sort_run_writer *w, int upto) {
  const uint64_t at = (uint64_t)(w->blocks * SORT_BLOCK + w->in_block);
  while (w->next_group <= upto) w->group_at[w->next_group++] = at;
}

bool sort_run_writer_add(struct sort_run_writer *w, const unsigned char *key, const void *payload, int64_t bytes,
                         struct error *e) {
  unsigned char size[8];
  begin_groups(w, key[0]);
  store_u64(size, (uint64_t)bytes);
  return put(w, key, w->key_bytes, e) && put(w, size, 8, e) && put(w, payload, bytes, e);
}

bool sort_run_writer_publish(struct sort_run_writer *w, const void *state, int64_t state_bytes, struct sort_run *run,
                             struct error *e) {
  const int64_t payload = w->blocks * SORT_BLOCK + w->in_block;
  begin_groups(w, SORT_GROUPS);
  if (!flush_block(w, e)) return false;
  unsigned char groups[GROUPS_BYTES], trailer[TRAILER] = {0};
  for (int i = 0; i <= SORT_GROUPS; i++) store_u64(groups + 8 * i, w->group_at[i]);
  struct hash_state *digest = hash_open();
  if (!digest) return error_set(e, ERROR_SYSTEM, "out of memory writing %s", w->temporary);
  hash_feed(digest, w->header, HEADER);
  hash_feed(digest, w->digests, (size_t)w->blocks * 16);
  hash_feed(digest, groups, GROUPS_BYTES);
  hash_feed(digest, state, (size_t)state_bytes);
  store_hash(trailer, hash_close(digest));
  store_u64(trailer + 16, (uint64_t)payload);
  store_u64(trailer + 24, (uint64_t)state_bytes);
  memcpy(trailer + 56, END_MAGIC, 8);
  const int64_t at = HEADER + payload, groups_at = at + w->blocks * 16, state_at = groups_at + GROUPS_BYTES;
  if (!write_at(w, w->header, HEADER, 0, e) || !write_at(w, w->digests, w->blocks * 16, at, e) ||
      !write_at(w, groups, GROUPS_BYTES, groups_at, e) || !write_at(w, state, state_bytes, state_at, e) ||
      !write_at(w, trailer, TRAILER, state_at + state_bytes, e))
    return false;
  if (fsync(w->fd) != 0) return error_errno(e, ERROR_DATA, "cannot sync %s", w->temporary);
  if (rename(w->temporary, w->path) != 0) return error_errno(e, ERROR_DATA, "cannot rename %s", w->temporary);
  free(w->temporary);
  w->temporary = NULL;
  *run = (struct sort_run){.path = w->path, .fd = w->fd, .first = w->first, .last = w->last, .payload = payload};
  memcpy(run->group_at, w->group_at, sizeof run->group_at);
  w->path = NULL;
  w->fd = -1;
  return file_sync_parent(run->path, ERROR_DATA, e);
}

void sort_run_writer_close(struct sort_run_writer *w) {
  if (!w) return;
  if (w->fd >= 0) close(w->fd);
  if (w->temporary && w->fd >= 0) unlink(w->temporary);
  free(w->digests);
  free(w->block);
  free(w->temporary);
  free(w->path);
  free(w);
}

/* ---- reading --------------------------------------------------------------- */

static bool read_at(const struct sort_run *run, void *data, int64_t bytes, int64_t offset, struct error *e) {
  char *p = data;
  while (bytes > 0) {
    const ssize_t got = pread(run->fd, p, (size_t)bytes, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return error_errno(e, ERROR_DATA, "cannot read %s", run->path);
    if (got == 0) return error_set(e, ERROR_DATA, "%s is damaged: it ends at byte %" PRId64, run->path, offset);
    p += got;
    bytes -= got;
    offset += got;
  }
  return true;
}

static bool damaged(const struct sort_run *run, const char *what, struct error *e) {
  error_set(e, ERROR_DATA, "%s is damaged: %s", run->path, what);
  return error_hint(e, "the same command makes it anew");
}

static bool check_blocks(struct sort_run *run, struct error *e) {
  struct sort_cursor c;
  bool ok = sort_cursor_open(&c, run, 0, run->payload, 8 * SORT_BLOCK, e);
  unsigned char sink[4096];
  while (ok && c.at < c.end) ok = sort_cursor_take(&c, sink, c.end - c.at < 4096 ? c.end - c.at : 4096, e);
  sort_cursor_close(&c);
  return ok;
}

/* Header, footer and trailer of an open file. */
static bool read_ends(struct sort_run *run, struct hash owner, int key_bytes, int64_t state_bytes, void *state, struct error *e) {
  unsigned char header[HEADER], expected[HEADER], trailer[TRAILER], groups[GROUPS_BYTES];
  const int64_t size = (int64_t)lseek(run->fd, 0, SEEK_END);
  if (size < HEADER + TRAILER + GROUPS_BYTES) return damaged(run, "it is too short", e);
  if (!read_at(run, header, HEADER, 0, e) || !read_at(run, trailer, TRAILER, size - TRAILER, e)) return false;
  run->first = (int64_t)load_u64(header + 32);
  run->last = (int64_t)load_u64(header + 40);
  encode_header(expected, owner, key_bytes, run->first, run->last);
  if (memcmp(header, expected, HEADER) != 0 || run->first < 0 || run->last < run->first)
    return damaged(run, "its header is another's", e);
  run->payload = (int64_t)load_u64(trailer + 16);
  const int64_t blocks = run->payload / SORT_BLOCK + (run->payload % SORT_BLOCK != 0);
  const int64_t rest = HEADER + GROUPS_BYTES + state_bytes + TRAILER;
  if (memcmp(trailer + 56, END_MAGIC, 8) != 0 || run->payload < 0 || run->payload > size ||
      (int64_t)load_u64(trailer + 24) != state_bytes || run->payload + blocks * 16 + rest != size)
    return damaged(run, "its parts do not fill the file", e);
  unsigned char *footer = malloc((size_t)(blocks * 16 + state_bytes + 1));
  struct hash_state *digest = footer ? hash_open() : NULL;
  bool ok = digest || error_set(e, ERROR_SYSTEM, "out of memory reading %s", run->path);
  const int64_t at = HEADER + run->payload;
  ok = ok && read_at(run, footer, blocks * 16, at, e) && read_at(run, groups, GROUPS_BYTES, at + blocks * 16, e) &&
       read_at(run, footer + blocks * 16, state_bytes, at + blocks * 16 + GROUPS_BYTES, e);
  if (digest) {
    hash_feed(digest, header, HEADER);
    if (ok) hash_feed(digest, footer, (size_t)blocks * 16);
    if (ok) hash_feed(digest, groups, GROUPS_BYTES);
    if (ok) hash_feed(digest, footer + blocks * 16, (size_t)state_bytes);
    const bool same = hash_equal(hash_close(digest), load_hash(trailer));
    if (ok && !same) ok = damaged(run, "the digest of its ends differs", e);
  }
  for (int i = 0; ok && i <= SORT_GROUPS; i++) run->group_at[i] = load_u64(groups + 8 * i);
  if (ok && state) memcpy(state, footer + blocks * 16, (size_t)state_bytes);
  free(footer);
  return ok;
}

bool sort_run_open(struct sort_run *run, const char *path, struct hash owner, int key_bytes, int64_t state_bytes, void *state,
                   bool whole, struct error *e) {
  *run = (struct sort_run){.path = strdup(path), .fd = open(path, O_RDONLY | O_CLOEXEC)};
  bool ok = run->path || error_set(e, ERROR_SYSTEM, "out of memory reading %s", path);
  if (ok && run->fd < 0) ok = error_errno(e, ERROR_DATA, "cannot open %s", path);
  ok = ok && read_ends(run, owner, key_bytes, state_bytes, state, e) && (!whole || check_blocks(run, e));
  if (!ok) sort_run_forget(run);
  return ok;
}

void sort_run_forget(struct sort_run *run) {
  if (run->fd >= 0) close(run->fd);
  free(run->path);
  *run = (struct sort_run){.fd = -1};
}

bool sort_cursor_open(struct sort_cursor *c, struct sort_run *run, int64_t at, int64_t end, int64_t memory, struct error *e) {
  int64_t blocks = memory / SORT_BLOCK;
  const int64_t needed = (end + SORT_BLOCK - 1) / SORT_BLOCK - at / SORT_BLOCK;
  if (blocks > 32) blocks = 32;
  if (blocks > needed) blocks = needed;
  if (blocks < 1) blocks = 1;
  *c = (struct sort_cursor){.run = run, .room = blocks * SORT_BLOCK, .at = at, .end = end};
  if (at == end) return true;
  if (run->fd < 0 && (run->fd = open(run->path, O_RDONLY | O_CLOEXEC)) < 0)
    return error_errno(e, ERROR_DATA, "cannot open %s", run->path);
  c->buffer = malloc((size_t)c->room);
  c->digests = malloc((size_t)blocks * 16);
  return (c->buffer && c->digests) || error_set(e, ERROR_SYSTEM, "out of memory reading %s", run->path);
}

/* The blocks from the one that holds `at` on. */
static bool fill(struct sort_cursor *c, struct error *e) {
  const struct sort_run *run = c->run;
  const int64_t first = c->at / SORT_BLOCK, left = run->payload - first * SORT_BLOCK;
  const int64_t bytes = left < c->room ? left : c->room, blocks = (bytes + SORT_BLOCK - 1) / SORT_BLOCK;
  if (!read_at(run, c->buffer, bytes, HEADER + first * SORT_BLOCK, e) ||
      !read_at(run, c->digests, blocks * 16, HEADER + run->payload + first * 16, e))
    return false;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t begin = b * SORT_BLOCK, size = bytes - begin < SORT_BLOCK ? bytes - begin : SORT_BLOCK;
    if (!hash_equal(hash_bytes(c->buffer + begin, (size_t)size), load_hash(c->digests + 16 * b))) {
      error_set(e, ERROR_DATA, "%s is damaged: the block at byte %" PRId64 " has another digest", run->path,
                HEADER + first * SORT_BLOCK + begin);
      return error_hint(e, "the same command makes it anew");
    }
  }
  c->begin = first * SORT_BLOCK;
  c->filled = bytes;
  return true;
}

bool sort_cursor_take(struct sort_cursor *c, void *out, int64_t bytes, struct error *e) {
  unsigned char *to = out;
  if (bytes > c->end - c->at) return damaged(c->run, "a record passes its end", e);
  while (bytes > 0) {
    if ((c->at < c->begin || c->at >= c->begin + c->filled) && !fill(c, e)) return false;
    const int64_t have = c->begin + c->filled - c->at, part = bytes < have ? bytes : have;
    memcpy(to, c->buffer + (c->at - c->begin), (size_t)part);
    to += part;
    c->at += part;
    bytes -= part;
  }
  return true;
}

void sort_cursor_close(struct sort_cursor *c) {
  free(c->buffer);
  free(c->digests);
  c->buffer = c->digests = NULL;
}
