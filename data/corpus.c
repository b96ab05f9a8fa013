/* Text files: which of them a source has. */
#include "data/corpus.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "data/corpus_bytes.h"

#define NAMES "names end in .txt, .md, .rst, .jsonl or .ndjson, or in one of these and .gz or .zst"
#define NAMES_JSONL "with format: jsonl names end in .jsonl, .ndjson or .json, or in one of these and .gz or .zst"

static const struct {
  const char *ending;
  enum corpus_kind kind;
  bool only_jsonl; /* read only where the format says so */
} endings[] = {
    {".txt", CORPUS_DOCUMENT, false}, {".md", CORPUS_DOCUMENT, false}, {".rst", CORPUS_DOCUMENT, false},
    {".jsonl", CORPUS_LINES, false},  {".ndjson", CORPUS_LINES, false}, {".json", CORPUS_LINES, true},
};

/* Is a file of that name read, and as what? */
static bool kind_of_name(const char *name, enum data_format format, enum corpus_kind *kind) {
  size_t length = strlen(name);
  corpus_compression_of(name, &length);
  for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
    const size_t n = strlen(endings[i].ending);
    if (length <= n || strncasecmp(name + length - n, endings[i].ending, n) != 0) continue;
    *kind = endings[i].kind;
    return format == DATA_JSONL ? *kind == CORPUS_LINES : !endings[i].only_jsonl;
  }
  return false;
}

/* Where the walk is: what every file that it finds belongs to. */
struct search {
  struct corpus_files *files;
  enum data_format format;
  int source;
};

/* Takes ownership of `path`. */
static bool add_file(const struct search *s, char *path, enum corpus_kind kind, const struct stat *st, struct error *e) {
  struct corpus_files *f = s->files;
  if (f->count == f->room) {
    const int64_t room = f->room ? 2 * f->room : 256;
    struct corpus_file *file = realloc(f->file, (size_t)room * sizeof *file);
    if (!file) {
      error_set(e, ERROR_SYSTEM, "out of memory listing %s", path);
      free(path);
      return false;
    }
    f->file = file;
    f->room = room;
  }
  f->file[f->count++] = (struct corpus_file){.path = path,
                                             .source = s->source,
                                             .kind = kind,
                                             .bytes = st->st_size,
                                             .changed_s = st->st_mtim.tv_sec,
                                             .changed_ns = st->st_mtim.tv_nsec};
  return true;
}

static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }
static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static bool walk(const struct search *s, const char *folder, struct error *e);

/* One name in a folder that is walked; takes ownership of `path`. */
static bool walk_entry(const struct search *s, char *path, const char *name, struct error *e) {
  struct stat st;
  enum corpus_kind kind;
  bool ok = true;
  if (lstat(path, &st) != 0) {
    ok = error_errno(e, ERROR_DATA, "cannot examine %s", path);
  } else if (S_ISDIR(st.st_mode)) {
    ok = walk(s, path, e);
  } else if (kind_of_name(name, s->format, &kind)) {
    if (stat(path, &st) != 0) {
      ok = error_errno(e, ERROR_DATA, "cannot examine %s", path);
    } else if (!S_ISDIR(st.st_mode)) {
      return add_file(s, path, kind, &st, e);
    }
  }
  free(path);
  return ok;
}

static bool walk(const struct search *s, const char *folder, struct error *e) {
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
      ok = walk_entry(s, path, entries[i]->d_name, e);
  }
  for (int i = 0; i < n; i++) free(entries[i]);
  free(entries);
  return ok;
}

bool corpus_find(struct corpus_files *f, const char *path, enum data_format format, int source, struct error *e) {
  const struct search s = {f, format, source};
  const char *names = format == DATA_JSONL ? NAMES_JSONL : NAMES;
  struct stat st;
  if (stat(path, &st) != 0) {
    error_errno(e, ERROR_DATA, "cannot use the source %s", path);
    return strpbrk(path, "*?[") ? error_hint(e, "patterns are for token files; of text name a file or a folder") : false;
  }
  if (!S_ISDIR(st.st_mode)) {
    enum corpus_kind kind = format == DATA_JSONL ? CORPUS_LINES : CORPUS_DOCUMENT;
    if (!kind_of_name(path, format, &kind) && format == DATA_AUTO) {
      error_set(e, ERROR_DATA, "%s is not a text file by its name", path);
      return error_hint(e, NAMES);
    }
    char *copy = strdup(path);
    if (!copy) return error_set(e, ERROR_SYSTEM, "out of memory listing %s", path);
    return add_file(&s, copy, format == DATA_JSONL ? CORPUS_LINES : kind, &st, e);
  }
  const int64_t before = f->count;
  if (!walk(&s, path, e)) return false;
  if (f->count > before) return true;
  error_set(e, ERROR_DATA, "no text files in the folder %s", path);
  return error_hint(e, "%s", names);
}

void corpus_files_free(struct corpus_files *f) {
  for (int64_t i = 0; i < f->count; i++) free(f->file[i].path);
  free(f->file);
  *f = (struct corpus_files){0};
}
