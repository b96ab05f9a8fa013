/* Writing a file in blocks: they are hashed as they fill, the header comes
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

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "data/frame.h"
#include "data/little_endian.h"

#define TEMPORARY ".tmp-" /* PATH.tmp-PROCESS-TIME */

struct frame_writer {
  int fd;
  char *path, *temporary;
  const char *what;
  unsigned char *block; /* being filled */
  int64_t in_block;
  unsigned char *table; /* digests of finished blocks, as in the file */
  int64_t blocks, table_room;
};

static bool no_memory(const struct frame_writer *w, struct error *e) {
  return error_set(e, ERROR_SYSTEM, "%s: out of memory while writing it", w->path);
}

static bool write_at(const struct frame_writer *w, const void *data, int64_t bytes, int64_t offset,
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

/* Removes what killed writers of this file left.  Each writer holds a lock on its
 * temporary file, so whatever can be locked is nobody's. */
static void clear_temporaries(const struct frame_writer *w) {
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
      log_info("%s was left by a writer that was ended: removed", path);
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
static bool create_temporary(struct frame_writer *w, struct error *e) {
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

struct frame_writer *frame_writer_open(const char *path, const char *what, struct error *e) {
  struct frame_writer *w = calloc(1, sizeof *w);
  if (w) w->fd = -1;
  if (!w || !(w->path = strdup(path)) || !(w->block = malloc(FRAME_BLOCK))) {
    error_set(e, ERROR_SYSTEM, "%s: out of memory", path);
    frame_writer_close(w);
    return NULL;
  }
  w->what = what;
  struct stat st;
  bool ok = true;
  if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
    ok = error_set(e, ERROR_DATA, "cannot write the %s %s: it is %s", what, path,
                   S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
  ok = ok && file_make_parent(path, ERROR_DATA, e);
  if (ok) clear_temporaries(w);
  if (!ok || !create_temporary(w, e)) {
    frame_writer_close(w);
    return NULL;
  }
  return w;
}

static bool flush_block(struct frame_writer *w, struct error *e) {
  if (w->in_block == 0) return true;
  if (w->blocks == w->table_room) {
    int64_t room = w->table_room ? 2 * w->table_room : 64;
    unsigned char *table = realloc(w->table, (size_t)room * 16);
    if (!table) return no_memory(w, e);
    w->table = table;
    w->table_room = room;
  }
  store_hash(w->table + 16 * w->blocks, hash_bytes(w->block, (size_t)w->in_block));
  if (!write_at(w, w->block, w->in_block, FRAME_HEADER + w->blocks * FRAME_BLOCK, e)) return false;
  w->blocks++;
  w->in_block = 0;
  return true;
}

unsigned char *frame_writer_slot(struct frame_writer *w, int64_t *room, struct error *e) {
  if (w->in_block == FRAME_BLOCK && !flush_block(w, e)) return NULL;
  *room = FRAME_BLOCK - w->in_block;
  return w->block + w->in_block;
}

void frame_writer_filled(struct frame_writer *w, int64_t bytes) { w->in_block += bytes; }

int64_t frame_writer_payload(const struct frame_writer *w) { return w->blocks * FRAME_BLOCK + w->in_block; }

bool frame_writer_put(struct frame_writer *w, const void *data, int64_t bytes, struct error *e) {
  const unsigned char *p = data;
  while (bytes > 0) {
    int64_t room;
    unsigned char *slot = frame_writer_slot(w, &room, e);
    if (!slot) return false;
    const int64_t n = bytes < room ? bytes : room;
    memcpy(slot, p, (size_t)n);
    w->in_block += n;
    p += n;
    bytes -= n;
  }
  return true;
}

static bool write_footer(struct frame_writer *w, const char *text, const unsigned char *header, int64_t payload, struct error *e) {
  const size_t text_bytes = strlen(text);
  if (text_bytes > FRAME_TEXT_MOST)
    return error_set(e, ERROR_DATA, "%s: its list of sources has %zu bytes, more than %d", w->path, text_bytes, FRAME_TEXT_MOST);
  struct hash_state *digest = hash_open();
  if (!digest) return no_memory(w, e);
  hash_feed(digest, header, FRAME_HEADER);
  hash_feed(digest, w->table, (size_t)w->blocks * 16);
  unsigned char trailer[FRAME_TRAILER] = {0};
  store_hash(trailer, hash_close(digest));
  store_hash(trailer + 16, hash_bytes(text, text_bytes));
  store_u64(trailer + 32, text_bytes);
  memcpy(trailer + 56, FRAME_END_MAGIC, 8);
  int64_t at = FRAME_HEADER + payload;
  if (!write_at(w, w->table, w->blocks * 16, at, e)) return false;
  at += w->blocks * 16;
  if (!write_at(w, text, (int64_t)text_bytes, at, e)) return false;
  return write_at(w, trailer, FRAME_TRAILER, at + (int64_t)text_bytes, e);
}

bool frame_writer_finish(struct frame_writer *w, const unsigned char header[FRAME_HEADER], const char *text, struct error *e) {
  const int64_t payload = frame_writer_payload(w);
  if (!flush_block(w, e) || !write_footer(w, text, header, payload, e) || !write_at(w, header, FRAME_HEADER, 0, e)) return false;
  /* It stays open, for the lock, until it is published. */
  return fsync(w->fd) == 0 || error_errno(e, ERROR_DATA, "cannot sync %s", w->temporary);
}

bool frame_writer_publish(struct frame_writer *w, struct error *e) {
  if (rename(w->temporary, w->path) != 0)
    return error_errno(e, ERROR_DATA, "cannot rename %s to %s", w->temporary, w->path);
  free(w->temporary);
  w->temporary = NULL;
  return file_sync_parent(w->path, ERROR_DATA, e);
}

void frame_writer_close(struct frame_writer *w) {
  if (!w) return;
  if (w->fd >= 0) close(w->fd);
  if (w->temporary) unlink(w->temporary);
  free(w->table);
  free(w->block);
  free(w->temporary);
  free(w->path);
  free(w);
}
