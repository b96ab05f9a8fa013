/* Reading a token stream.
 *
 * Nothing in the file is believed before the digest over header and block
 * table has been checked, and no block before its own digest has: that
 * happens when it is first touched.  Reads are pread(2), not a mapping: a file
 * that somebody cuts under a running job gives an error, not a SIGBUS.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "data/data.h"
#include "data/stream_file.h"

/* What changes behind a `const struct stream *`. */
struct block_checks {
  pthread_mutex_t mutex;    /* guards `buffer` */
  unsigned char *buffer;    /* one block */
  atomic_uchar *done;       /* by block */
};

struct stream {
  int fd;
  char *path, *sources;
  struct stream_info info;
  struct stream_layout layout;
  unsigned char *table; /* digests of blocks, as in the file */
  struct block_checks *checks;
};

static bool read_at(const struct stream *s, void *to, int64_t bytes, int64_t offset, struct error *e) {
  char *p = to;
  while (bytes > 0) {
    size_t ask = bytes < 1 << 30 ? (size_t)bytes : (size_t)1 << 30;
    ssize_t got = pread(s->fd, p, ask, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return error_errno(e, ERROR_DATA, "%s: cannot read at byte %" PRId64, s->path, offset);
    if (got == 0)
      return error_set(e, ERROR_DATA, "%s ends at byte %" PRId64 ": it was cut after it was opened", s->path,
                       offset);
    p += got;
    bytes -= got;
    offset += got;
  }
  return true;
}

static bool truncated(const struct stream *s, int64_t need, int64_t have, struct error *e) {
  error_set(e, ERROR_DATA, "%s: truncated or damaged: its header calls for %" PRId64 " bytes, the file has %" PRId64,
            s->path, need, have);
  return error_hint(e, "prepare the stream again or copy it anew");
}

/* Header, trailer, block table and sources; the payload is not read. */
static bool read_frame(struct stream *s, int64_t size, struct error *e) {
  unsigned char header[STREAM_HEADER], trailer[STREAM_TRAILER];
  if (size < STREAM_HEADER) {
    error_set(e, ERROR_DATA, "%s: %" PRId64 " bytes are too few for a token stream", s->path, size);
    return error_hint(e, "make one with `fp4d prepare`");
  }
  struct stream_header h;
  if (!read_at(s, header, STREAM_HEADER, 0, e) || !stream_header_decode(s->path, header, &h, e)) return false;
  if (!stream_layout_of(&h, &s->layout)) return error_set(e, ERROR_INTERNAL, "%s: layout", s->path);
  const struct stream_layout *l = &s->layout;
  if (size < l->file_bytes) return truncated(s, l->file_bytes, size, e);
  if (!read_at(s, trailer, STREAM_TRAILER, size - STREAM_TRAILER, e)) return false;
  uint64_t sources_bytes = load_u64(trailer + 32);
  uint64_t extra = (uint64_t)(size - l->file_bytes);
  if (memcmp(trailer + 56, STREAM_END_MAGIC, 8) != 0 || load_u64(trailer + 40) || load_u64(trailer + 48) ||
      sources_bytes != extra || extra > STREAM_SOURCES_MOST) {
    error_set(e, ERROR_DATA, "%s: truncated or damaged: no valid trailer in its last %d bytes", s->path,
              STREAM_TRAILER);
    return error_hint(e, "prepare the stream again or copy it anew");
  }

  /* The counts fit the file's true size, so these allocations do too. */
  int64_t table_bytes = l->blocks * 16;
  s->table = malloc((size_t)table_bytes);
  s->sources = malloc((size_t)extra + 1);
  s->checks = calloc(1, sizeof *s->checks);
  struct hash_state *digest = s->table && s->sources && s->checks ? hash_open() : NULL;
  if (!digest) return error_set(e, ERROR_SYSTEM, "%s: out of memory for its block table", s->path);
  bool ok = read_at(s, s->table, table_bytes, STREAM_HEADER + l->payload, e) &&
            read_at(s, s->sources, (int64_t)extra, STREAM_HEADER + l->payload + table_bytes, e);
  if (ok) {
    hash_feed(digest, header, STREAM_HEADER);
    hash_feed(digest, s->table, (size_t)table_bytes);
  }
  s->info = (struct stream_info){.tokens = h.tokens,
                                 .documents = h.documents,
                                 .vocab_size = h.vocab_size,
                                 .digest = hash_close(digest),
                                 .sources = s->sources};
  if (!ok) return false;
  s->sources[extra] = 0;
  memcpy(s->info.tokenizer, h.tokenizer, sizeof s->info.tokenizer);
  const char *part = NULL;
  if (!hash_equal(s->info.digest, load_hash(trailer)))
    part = "header and block table";
  else if (!hash_equal(hash_bytes(s->sources, (size_t)extra), load_hash(trailer + 16)))
    part = "list of sources";
  if (part) {
    error_set(e, ERROR_DATA, "%s: damaged: the digest of its %s does not match", s->path, part);
    return error_hint(e, "prepare the stream again or copy it anew");
  }
  return true;
}

struct stream *stream_open(const char *path, int32_t vocab_size, struct error *e) {
  struct stream *s = calloc(1, sizeof *s);
  if (!s || !(s->path = strdup(path))) {
    free(s);
    error_set(e, ERROR_SYSTEM, "%s: out of memory", path);
    return NULL;
  }
  s->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (s->fd < 0) {
    error_errno(e, ERROR_DATA, "cannot open token stream %s", path);
    if (errno == ENOENT) error_hint(e, "make it with `fp4d prepare`");
    goto failed;
  }
  struct stat st;
  if (fstat(s->fd, &st) != 0) {
    error_errno(e, ERROR_DATA, "cannot examine %s", path);
    goto failed;
  }
  if (!S_ISREG(st.st_mode)) {
    error_set(e, ERROR_DATA, "%s is %s, not a token stream", path,
              S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
    goto failed;
  }
  if (!read_frame(s, st.st_size, e)) goto failed;
  if (vocab_size > 0 && s->info.vocab_size > vocab_size) {
    error_set(e, ERROR_DATA, "%s holds token ids up to %d (tokenizer %s), the model's vocabulary ends at %d", path,
              s->info.vocab_size - 1, s->info.tokenizer, vocab_size - 1);
    error_hint(e, "set model.vocab_size to %d or more", s->info.vocab_size);
    goto failed;
  }
  struct block_checks *c = s->checks;
  c->buffer = malloc(STREAM_BLOCK);
  c->done = malloc((size_t)s->layout.blocks * sizeof *c->done);
  int why = c->buffer && c->done ? pthread_mutex_init(&c->mutex, NULL) : ENOMEM;
  if (why) {
    free(c->done);
    c->done = NULL; /* no mutex either */
    error_set(e, ERROR_SYSTEM, "%s: %s", path, strerror(why));
    goto failed;
  }
  for (int64_t b = 0; b < s->layout.blocks; b++) atomic_init(&c->done[b], 0);
  return s;
failed:
  stream_close(s);
  return NULL;
}

void stream_close(struct stream *s) {
  if (!s) return;
  if (s->checks) {
    if (s->checks->done) pthread_mutex_destroy(&s->checks->mutex);
    free(s->checks->done);
    free(s->checks->buffer);
  }
  free(s->checks);
  free(s->table);
  free(s->sources);
  free(s->path);
  if (s->fd >= 0) close(s->fd);
  free(s);
}

const struct stream_info *stream_info(const struct stream *s) { return &s->info; }
const char *stream_path(const struct stream *s) { return s->path; }

static int32_t id_at(const struct stream *s, const unsigned char *raw, int64_t i) {
  return s->layout.token_bytes == 2 ? (int32_t)load_u16(raw + 2 * i) : (int32_t)load_u32(raw + 4 * i);
}

/* Refuses an id that would index past the embedding. */
static bool check_id(const struct stream *s, int32_t id, int64_t token, struct error *e) {
  if (id >= 0 && id < s->info.vocab_size) return true;
  error_set(e, ERROR_DATA, "%s: token %" PRId64 " (byte %" PRId64 ") is id %" PRIu32 ", the vocabulary has %d", s->path,
            token, STREAM_HEADER + token * s->layout.token_bytes, (uint32_t)id, s->info.vocab_size);
  return error_hint(e, "prepare the stream again");
}

static int64_t block_bytes(const struct stream *s, int64_t b) {
  int64_t left = s->layout.payload - b * STREAM_BLOCK;
  return left < STREAM_BLOCK ? left : STREAM_BLOCK;
}

/* Reads block b into the checks' buffer and checks it. The mutex is held. */
static bool load_block(const struct stream *s, int64_t b, struct error *e) {
  unsigned char *buffer = s->checks->buffer;
  int64_t bytes = block_bytes(s, b), offset = STREAM_HEADER + b * STREAM_BLOCK;
  if (!read_at(s, buffer, bytes, offset, e)) return false;
  if (!hash_equal(hash_bytes(buffer, (size_t)bytes), load_hash(s->table + 16 * b))) {
    error_set(e, ERROR_DATA,
              "%s: damaged: block %" PRId64 " of %" PRId64 " (bytes %" PRId64 " to %" PRId64 ") does not match its digest",
              s->path, b, s->layout.blocks, offset, offset + bytes - 1);
    return error_hint(e, "prepare the stream again or copy it anew");
  }
  atomic_store_explicit(&s->checks->done[b], 1, memory_order_release);
  return true;
}

static bool check_blocks(const struct stream *s, int64_t at, int64_t bytes, struct error *e) {
  for (int64_t b = at / STREAM_BLOCK; b <= (at + bytes - 1) / STREAM_BLOCK; b++) {
    if (atomic_load_explicit(&s->checks->done[b], memory_order_acquire)) continue;
    pthread_mutex_lock(&s->checks->mutex);
    bool ok = atomic_load_explicit(&s->checks->done[b], memory_order_relaxed) || load_block(s, b, e);
    pthread_mutex_unlock(&s->checks->mutex);
    if (!ok) return false;
  }
  return true;
}

bool stream_read(const struct stream *s, int64_t first, int64_t count, int32_t *ids, struct error *e) {
  if (first < 0 || count < 0 || count > s->info.tokens || first > s->info.tokens - count)
    return error_set(e, ERROR_INTERNAL, "%s: tokens %" PRId64 " + %" PRId64 " asked for, it has %" PRId64, s->path,
                     first, count, s->info.tokens);
  if (count == 0) return true;
  int width = s->layout.token_bytes;
  if (!check_blocks(s, first * width, count * width, e)) return false;
  unsigned char raw[16384];
  int64_t most = (int64_t)sizeof raw / width;
  for (int64_t done = 0; done < count;) {
    int64_t n = count - done < most ? count - done : most;
    if (!read_at(s, raw, n * width, STREAM_HEADER + (first + done) * width, e)) return false;
    for (int64_t i = 0; i < n; i++) {
      int32_t id = id_at(s, raw, i);
      if (!check_id(s, id, first + done + i, e)) return false;
      ids[done + i] = id;
    }
    done += n;
  }
  return true;
}

/* The ids and document offsets in the block that the buffer holds; *previous
 * is the last offset seen (-1: none). */
static bool verify_content(const struct stream *s, int64_t b, int64_t *previous, struct error *e) {
  const unsigned char *buffer = s->checks->buffer;
  const struct stream_layout *l = &s->layout;
  int64_t begin = b * STREAM_BLOCK, end = begin + block_bytes(s, b);
  int64_t token = begin / l->token_bytes;
  int64_t tokens_end = end / l->token_bytes < s->info.tokens ? end / l->token_bytes : s->info.tokens;
  for (int64_t i = 0; token + i < tokens_end; i++)
    if (!check_id(s, id_at(s, buffer, i), token + i, e)) return false;
  for (int64_t at = begin > l->offsets_at ? begin : l->offsets_at; at < end; at += 8) {
    uint64_t offset = load_u64(buffer + (at - begin));
    int64_t document = (at - l->offsets_at) / 8;
    bool last = document == s->info.documents;
    if (offset > (uint64_t)s->info.tokens || (int64_t)offset < *previous || (document == 0 && offset != 0) ||
        (last && (int64_t)offset != s->info.tokens))
      return error_set(e, ERROR_DATA, "%s: document %" PRId64 " cannot begin at token %" PRIu64, s->path, document,
                       offset);
    *previous = (int64_t)offset;
  }
  return true;
}

bool stream_verify(struct stream *s, struct error *e) {
  bool ok = true;
  int64_t previous = -1;
  pthread_mutex_lock(&s->checks->mutex);
  for (int64_t b = 0; ok && b < s->layout.blocks; b++)
    ok = load_block(s, b, e) && verify_content(s, b, &previous, e);
  pthread_mutex_unlock(&s->checks->mutex);
  return ok;
}
