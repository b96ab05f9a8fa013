/* Writing a token stream: blocks are hashed as they fill, the header comes
 * last, and the file gets its name when all of it is on the disk. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "data/stream_file.h"

#define TEMPORARY ".tmp-" /* PATH.tmp-PROCESS-TIME */

struct stream_writer {
  int fd;
  char *path, *temporary;
  struct stream_header header;
  int token_bytes;
  unsigned char *block; /* being filled */
  int64_t in_block;
  unsigned char *table; /* digests of finished blocks, as in the file */
  int64_t blocks, table_room;
  int64_t *offsets;       /* first tokens of documents */
  unsigned char *sources; /* of documents */
  int64_t documents_room; /* of both */
  struct stream_source source[STREAM_SOURCES];
  int current; /* source of the document being written */
};

static bool no_memory(const struct stream_writer *w, struct error *e) {
  return error_set(e, ERROR_SYSTEM, "%s: out of memory while writing it", w->path);
}

static bool write_at(const struct stream_writer *w, const void *data, int64_t bytes, int64_t offset,
                     struct error *e) {
  const char *p = data;
  while (bytes > 0) {
    ssize_t wrote = pwrite(w->fd, p, (size_t)bytes, (off_t)offset);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      error_errno(e, ERROR_DATA, "cannot write %s", w->temporary);
      return error_hint(e, "free some space or choose another folder");
    }
    p += wrote;
    bytes -= wrote;
    offset += wrote;
  }
  return true;
}

/* Removes what killed preparations of this stream left.  Each writer holds a lock on its
 * temporary file, so whatever can be locked is nobody's. */
static void clear_temporaries(const struct stream_writer *w) {
  const char *slash = strrchr(w->path, '/'), *name = slash ? slash + 1 : w->path;
  const size_t before = (size_t)(name - w->path), length = strlen(name);
  char *folder = slash ? strndup(w->path, before) : strdup(".");
  DIR *entries = folder ? opendir(folder) : NULL;
  free(folder);
  if (!entries) return;
  for (struct dirent *entry; (entry = readdir(entries));) {
    char *path;
    if (strncmp(entry->d_name, name, length) != 0 || strncmp(entry->d_name + length, TEMPORARY, strlen(TEMPORARY)) != 0) continue;
    if (asprintf(&path, "%.*s%s", (int)before, w->path, entry->d_name) < 0) break;
    struct stat st;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && flock(fd, LOCK_EX | LOCK_NB) == 0 && unlink(path) == 0)
      log_info("%s was left by a preparation that was ended: removed", path);
    if (fd >= 0) close(fd);
    free(path);
  }
  closedir(entries);
}

/* Takes the lock that clear_temporaries asks for.  False: another process, which saw
 * the file before its lock, has removed it.  Where the file system has no locks nothing
 * can be locked, so nothing is removed. */
static bool keep_temporary(int fd) {
  struct stat st;
  while (flock(fd, LOCK_EX) != 0)
    if (errno != EINTR) return true;
  return fstat(fd, &st) != 0 || st.st_nlink > 0;
}

/* A name that no other process uses, whatever host it runs on. */
static bool create_temporary(struct stream_writer *w, struct error *e) {
  char *name;
  for (int attempt = 1;; attempt++) {
    unsigned nanoseconds = (unsigned)(int64_t)(clock_seconds() * 1e9);
    if (asprintf(&name, "%s" TEMPORARY "%ld-%08x", w->path, (long)getpid(), nanoseconds) < 0) return no_memory(w, e);
    w->fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w->fd >= 0 && keep_temporary(w->fd)) {
      w->temporary = name;
      return true;
    }
    if (w->fd >= 0) {
      close(w->fd);
      w->fd = -1;
      errno = EEXIST;
    }
    if ((errno != EEXIST && errno != EINTR) || attempt == 100) break;
    free(name);
  }
  error_errno(e, ERROR_DATA, "cannot create %s", name);
  free(name);
  return false;
}

/* What the header and the sources' text can hold. */
static bool check_start(const char *path, const struct stream_start *start, struct error *e) {
  const size_t tokenizer = strlen(start->tokenizer);
  if (start->n_sources < 1 || start->n_sources > STREAM_SOURCES || tokenizer < 1 || tokenizer >= STREAM_TOKENIZER)
    return error_set(e, ERROR_INTERNAL, "%s: %d sources, tokenizer %s", path, start->n_sources, start->tokenizer);
  for (int i = 0; i < start->n_sources; i++) {
    const char *name = start->names[i];
    if (*name && strlen(name) < STREAM_NAME && !strpbrk(name, "\t\n")) continue;
    error_set(e, ERROR_DATA, "%s: \"%s\" cannot be the name of a source", path, name);
    return error_hint(e, "give 1 to %d bytes without tabs and line ends", STREAM_NAME - 1);
  }
  return true;
}

struct stream_writer *stream_writer_open(const char *path, const struct stream_start *start, struct error *e) {
  if (!check_start(path, start, e)) return NULL;
  struct stream_writer *w = calloc(1, sizeof *w);
  if (w) w->fd = -1;
  if (!w || !(w->path = strdup(path)) || !(w->block = malloc(STREAM_BLOCK))) {
    error_set(e, ERROR_SYSTEM, "%s: out of memory", path);
    stream_writer_close(w);
    return NULL;
  }
  w->header = (struct stream_header){
      .vocab_size = start->vocab_size, .bos = start->bos, .eos = start->eos, .n_sources = start->n_sources};
  snprintf(w->header.tokenizer, sizeof w->header.tokenizer, "%s", start->tokenizer);
  for (int i = 0; i < start->n_sources; i++) snprintf(w->source[i].name, STREAM_NAME, "%s", start->names[i]);
  w->token_bytes = start->vocab_size <= 65536 ? 2 : 4;
  struct stat st;
  bool ok = true;
  if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
    ok = error_set(e, ERROR_DATA, "cannot write the stream %s: it is %s", path,
                   S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
  ok = ok && file_make_parent(path, ERROR_DATA, e);
  if (ok) clear_temporaries(w);
  if (!ok || !create_temporary(w, e)) {
    stream_writer_close(w);
    return NULL;
  }
  return w;
}

static bool flush_block(struct stream_writer *w, struct error *e) {
  if (w->in_block == 0) return true;
  if (w->blocks == w->table_room) {
    int64_t room = w->table_room ? 2 * w->table_room : 64;
    unsigned char *table = realloc(w->table, (size_t)room * 16);
    if (!table) return no_memory(w, e);
    w->table = table;
    w->table_room = room;
  }
  store_hash(w->table + 16 * w->blocks, hash_bytes(w->block, (size_t)w->in_block));
  if (!write_at(w, w->block, w->in_block, STREAM_HEADER + w->blocks * STREAM_BLOCK, e)) return false;
  w->blocks++;
  w->in_block = 0;
  return true;
}

/* Where the next `width` bytes of payload go (width divides a block). */
static unsigned char *payload_slot(struct stream_writer *w, int width, struct error *e) {
  if (w->in_block == STREAM_BLOCK && !flush_block(w, e)) return NULL;
  unsigned char *slot = w->block + w->in_block;
  w->in_block += width;
  return slot;
}

bool stream_writer_document(struct stream_writer *w, int source, struct error *e) {
  if (source < 0 || source >= w->header.n_sources)
    return error_set(e, ERROR_INTERNAL, "%s: a document of source %d of %d", w->path, source, w->header.n_sources);
  if (w->header.documents == w->documents_room) {
    int64_t room = w->documents_room ? 2 * w->documents_room : 1024;
    int64_t *offsets = realloc(w->offsets, (size_t)room * sizeof *offsets);
    if (offsets) w->offsets = offsets;
    unsigned char *sources = realloc(w->sources, (size_t)room);
    if (sources) w->sources = sources;
    if (!offsets || !sources) return no_memory(w, e);
    w->documents_room = room;
  }
  w->offsets[w->header.documents] = w->header.tokens;
  w->sources[w->header.documents++] = (unsigned char)source;
  w->source[source].documents++;
  w->current = source;
  return true;
}

bool stream_writer_tokens(struct stream_writer *w, const int32_t *ids, int64_t count, struct error *e) {
  int width = w->token_bytes;
  if (w->header.documents == 0 && count > 0)
    return error_set(e, ERROR_INTERNAL, "%s: tokens before the first document", w->path);
  w->source[w->current].tokens += count;
  for (int64_t i = 0; i < count;) {
    if (w->in_block == STREAM_BLOCK && !flush_block(w, e)) return false;
    int64_t room = (STREAM_BLOCK - w->in_block) / width;
    int64_t end = count - i < room ? count : i + room;
    unsigned char *slot = w->block + w->in_block;
    for (; i < end; i++, slot += width) {
      if (ids[i] < 0 || ids[i] >= w->header.vocab_size)
        return error_set(e, ERROR_INTERNAL, "%s: id %d outside a vocabulary of %d", w->path, ids[i],
                         w->header.vocab_size);
      if (width == 2)
        store_u16(slot, (uint32_t)ids[i]);
      else
        store_u32(slot, (uint32_t)ids[i]);
    }
    w->header.tokens += (slot - (w->block + w->in_block)) / width;
    w->in_block = slot - w->block;
  }
  return true;
}

int64_t stream_writer_count(const struct stream_writer *w) { return w->header.tokens; }

static bool write_footer(struct stream_writer *w, const char *sources, const unsigned char *header,
                         const struct stream_layout *l, struct error *e) {
  size_t sources_bytes = strlen(sources);
  if (sources_bytes > STREAM_SOURCES_MOST)
    return error_set(e, ERROR_DATA, "%s: its list of sources has %zu bytes, more than %d", w->path, sources_bytes,
                     STREAM_SOURCES_MOST);
  struct hash_state *digest = hash_open();
  if (!digest) return no_memory(w, e);
  hash_feed(digest, header, STREAM_HEADER);
  hash_feed(digest, w->table, (size_t)w->blocks * 16);
  unsigned char trailer[STREAM_TRAILER] = {0};
  store_hash(trailer, hash_close(digest));
  store_hash(trailer + 16, hash_bytes(sources, sources_bytes));
  store_u64(trailer + 32, sources_bytes);
  memcpy(trailer + 56, STREAM_END_MAGIC, 8);
  int64_t at = STREAM_HEADER + l->payload;
  if (!write_at(w, w->table, w->blocks * 16, at, e)) return false;
  at += w->blocks * 16;
  if (!write_at(w, sources, (int64_t)sources_bytes, at, e)) return false;
  return write_at(w, trailer, STREAM_TRAILER, at + (int64_t)sources_bytes, e);
}

bool stream_writer_finish(struct stream_writer *w, const char *const *notes, struct error *e) {
  struct stream_layout l;
  if (!stream_layout_of(&w->header, &l))
    return error_set(e, ERROR_INTERNAL, "%s: %" PRId64 " tokens in %" PRId64 " documents", w->path, w->header.tokens,
                     w->header.documents);
  for (int64_t at = w->header.tokens * w->token_bytes; at < l.offsets_at; at++) {
    unsigned char *slot = payload_slot(w, 1, e);
    if (!slot) return false;
    *slot = 0;
  }
  for (int64_t d = 0; d <= w->header.documents; d++) {
    unsigned char *slot = payload_slot(w, 8, e);
    if (!slot) return false;
    store_u64(slot, (uint64_t)(d < w->header.documents ? w->offsets[d] : w->header.tokens));
  }
  for (int64_t d = 0; d < w->header.documents; d++) {
    unsigned char *slot = payload_slot(w, 1, e);
    if (!slot) return false;
    *slot = w->sources[d];
  }
  unsigned char header[STREAM_HEADER];
  stream_header_encode(&w->header, header);
  char *sources = stream_sources_encode(w->source, w->header.n_sources, notes);
  if (!sources) return no_memory(w, e);
  const bool ok = flush_block(w, e) && write_footer(w, sources, header, &l, e) && write_at(w, header, STREAM_HEADER, 0, e);
  free(sources);
  if (!ok) return false;
  /* It stays open, for the lock, until it is published. */
  return fsync(w->fd) == 0 || error_errno(e, ERROR_DATA, "cannot sync %s", w->temporary);
}

bool stream_writer_publish(struct stream_writer *w, struct error *e) {
  if (rename(w->temporary, w->path) != 0)
    return error_errno(e, ERROR_DATA, "cannot rename %s to %s", w->temporary, w->path);
  free(w->temporary);
  w->temporary = NULL;
  return file_sync_parent(w->path, ERROR_DATA, e);
}

void stream_writer_close(struct stream_writer *w) {
  if (!w) return;
  if (w->fd >= 0) close(w->fd);
  if (w->temporary) unlink(w->temporary);
  free(w->offsets);
  free(w->sources);
  free(w->table);
  free(w->block);
  free(w->temporary);
  free(w->path);
  free(w);
}
