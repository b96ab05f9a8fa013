/* Text files: finding them and reading their bytes, compressed or not. */
#include "data/corpus.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

static bool ends_with(const char *name, size_t length, const char *suffix) {
  size_t n = strlen(suffix);
  return length > n && strncasecmp(name + length - n, suffix, n) == 0;
}

static bool is_compressed(const char *name) { return ends_with(name, strlen(name), ".gz"); }

static bool is_text_name(const char *name) {
  size_t length = strlen(name);
  if (is_compressed(name)) length -= 3;
  return ends_with(name, length, ".txt") || ends_with(name, length, ".md") || ends_with(name, length, ".rst");
}

/* Takes ownership of `path`. */
static bool add_file(struct corpus_files *f, char *path, int source, struct error *e) {
  if (f->count == f->room) {
    int64_t room = f->room ? 2 * f->room : 256;
    char **paths = realloc(f->path, (size_t)room * sizeof *paths);
    if (paths) f->path = paths;
    int *sources = paths ? realloc(f->source, (size_t)room * sizeof *sources) : NULL;
    if (!sources) {
      error_set(e, ERROR_SYSTEM, "out of memory listing %s", path);
      free(path);
      return false;
    }
    f->source = sources;
    f->room = room;
  }
  f->path[f->count] = path;
  f->source[f->count++] = source;
  return true;
}

static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }
static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static bool walk(struct corpus_files *f, const char *folder, int source, struct error *e);

/* One name in a folder that is walked; takes ownership of `path`. */
static bool walk_entry(struct corpus_files *f, char *path, const char *name, int source, struct error *e) {
  struct stat st;
  bool ok = true;
  if (lstat(path, &st) != 0) {
    ok = error_errno(e, ERROR_DATA, "cannot examine %s", path);
  } else if (S_ISDIR(st.st_mode)) {
    ok = walk(f, path, source, e);
  } else if (is_text_name(name)) {
    if (stat(path, &st) != 0) {
      ok = error_errno(e, ERROR_DATA, "cannot examine %s", path);
    } else if (!S_ISDIR(st.st_mode)) {
      return add_file(f, path, source, e);
    }
  }
  free(path);
  return ok;
}

static bool walk(struct corpus_files *f, const char *folder, int source, struct error *e) {
  struct dirent **entries = NULL;
  int n = scandir(folder, &entries, is_visible, by_name);
  if (n < 0) return error_errno(e, ERROR_DATA, "cannot read folder %s", folder);
  bool ok = true;
  const char *slash = folder[strlen(folder) - 1] == '/' ? "" : "/";
  for (int i = 0; ok && i < n; i++) {
    char *path;
    if (asprintf(&path, "%s%s%s", folder, slash, entries[i]->d_name) < 0)
      ok = error_set(e, ERROR_SYSTEM, "out of memory listing %s", folder);
    else
      ok = walk_entry(f, path, entries[i]->d_name, source, e);
  }
  for (int i = 0; i < n; i++) free(entries[i]);
  free(entries);
  return ok;
}

bool corpus_find(struct corpus_files *f, const char *path, int source, struct error *e) {
  struct stat st;
  if (stat(path, &st) != 0) return error_errno(e, ERROR_DATA, "cannot use the source %s", path);
  if (!S_ISDIR(st.st_mode)) {
    if (!is_text_name(path)) {
      error_set(e, ERROR_DATA, "%s is not a text file by its name", path);
      return error_hint(e, "names end in .txt, .md or .rst, or in one of these and .gz");
    }
    char *copy = strdup(path);
    if (!copy) return error_set(e, ERROR_SYSTEM, "out of memory listing %s", path);
    return add_file(f, copy, source, e);
  }
  int64_t before = f->count;
  if (!walk(f, path, source, e)) return false;
  if (f->count > before) return true;
  error_set(e, ERROR_DATA, "no text files in the folder %s", path);
  return error_hint(e, "names end in .txt, .md or .rst, or in one of these and .gz");
}

void corpus_files_free(struct corpus_files *f) {
  for (int64_t i = 0; i < f->count; i++) free(f->path[i]);
  free(f->path);
  free(f->source);
  *f = (struct corpus_files){0};
}

struct corpus_text {
  int fd;
  gzFile gz; /* owns fd; NULL for plain text */
  bool begun;
  const char *path;
};

struct corpus_text *corpus_open(const char *path, struct error *e) {
  struct corpus_text *t = calloc(1, sizeof *t);
  if (!t) {
    error_set(e, ERROR_SYSTEM, "out of memory reading %s", path);
    return NULL;
  }
  t->path = path;
  t->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat st;
  if (t->fd < 0 || fstat(t->fd, &st) != 0) {
    error_errno(e, ERROR_DATA, "cannot open %s", path);
  } else if (!S_ISREG(st.st_mode)) {
    error_set(e, ERROR_DATA, "%s is not a regular file", path);
  } else if (st.st_size > 0 && is_compressed(path) && !(t->gz = gzdopen(t->fd, "rb"))) {
    error_set(e, ERROR_SYSTEM, "out of memory decompressing %s", path);
  } else {
    return t;
  }
  corpus_close(t);
  return NULL;
}

static int64_t read_gz(struct corpus_text *t, void *buffer, unsigned room, struct error *e) {
  if (!t->begun && gzdirect(t->gz)) {
    error_set(e, ERROR_DATA, "%s is not gzip data, as its name says", t->path);
    return -1;
  }
  t->begun = true;
  int got = gzread(t->gz, buffer, room);
  if (got == (int)room) return got;
  /* Short: the end, or an error, a file cut in the middle included. */
  int why;
  const char *text = gzerror(t->gz, &why);
  if (got >= 0 && (why == Z_OK || why == Z_STREAM_END)) return got;
  if (why == Z_ERRNO)
    error_errno(e, ERROR_DATA, "cannot read %s", t->path);
  else
    error_set(e, ERROR_DATA, "%s: damaged gzip data: %s", t->path, why == Z_BUF_ERROR ? "it ends too early" : text);
  return -1;
}

int64_t corpus_read(struct corpus_text *t, void *buffer, int64_t room, struct error *e) {
  if (t->gz) return read_gz(t, buffer, (unsigned)(room < 1 << 30 ? room : 1 << 30), e);
  int64_t done = 0;
  while (done < room) {
    ssize_t got = read(t->fd, (char *)buffer + done, (size_t)(room - done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      error_errno(e, ERROR_DATA, "cannot read %s", t->path);
      return -1;
    }
    if (got == 0) break;
    done += got;
  }
  return done;
}

void corpus_close(struct corpus_text *t) {
  if (t->gz)
    gzclose(t->gz);
  else if (t->fd >= 0)
    close(t->fd);
  free(t);
}
