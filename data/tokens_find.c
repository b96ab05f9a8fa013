/* Finding the token files of a source. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "data/tokens_parts.h"

/* Endings of names that a folder is searched for. A .npy of offsets is no token file, and a .bin
 * with a .idx is listed by the latter. */
static const struct {
  enum data_format format;
  const char *endings[8];
} searched[] = {
    {DATA_AUTO, {".idx", ".bin", ".npy"}},
    {DATA_MEGATRON, {".idx"}},
    {DATA_LLMC, {".bin"}},
    {DATA_RAW_U16, {".bin", ".npy", ".u16", ".uint16", ".raw", ".dat"}},
    {DATA_RAW_U32, {".bin", ".npy", ".u32", ".uint32", ".raw", ".dat"}},
    {DATA_NPY, {".npy"}},
};
enum { SEARCHED = sizeof searched / sizeof *searched };

static bool has_sibling(const char *path) {
  char *name = tokens_ends_with(path, ".bin") ? tokens_sibling(path, ".bin", ".idx") : NULL;
  const bool has = name && file_exists(name);
  free(name);
  return has;
}

/* Does a folder's file of this name belong to a source of the format? */
static bool is_wanted(const char *path, enum data_format format) {
  if (tokens_ends_with(path, "offsets.npy") || (format != DATA_LLMC && has_sibling(path))) return false;
  for (int k = 0; k < SEARCHED; k++)
    for (int i = 0; searched[k].format == format && searched[k].endings[i]; i++)
      if (tokens_ends_with(path, searched[k].endings[i])) return true;
  return false;
}

static bool no_memory(const char *path, struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory listing %s", path); }

/* Takes ownership of `path`, which may be NULL. */
static bool add(struct tokens_list *list, char *path, struct error *e) {
  if (!path) return no_memory("token files", e);
  if (list->count == list->room) {
    const int64_t room = list->room ? 2 * list->room : 64;
    char **paths = realloc(list->path, (size_t)room * sizeof *paths);
    if (!paths) {
      free(path);
      return no_memory("token files", e);
    }
    list->path = paths;
    list->room = room;
  }
  list->path[list->count++] = path;
  return true;
}

static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }
static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static bool walk(struct tokens_list *list, const char *folder, enum data_format format, struct error *e) {
  struct dirent **entries = NULL;
  const int n = scandir(folder, &entries, is_visible, by_name);
  if (n < 0) return error_errno(e, ERROR_DATA, "cannot read folder %s", folder);
  bool ok = true;
  const char *slash = folder[strlen(folder) - 1] == '/' ? "" : "/";
  for (int i = 0; ok && i < n; i++) {
    char *path;
    struct stat link, st;
    if (asprintf(&path, "%s%s%s", folder, slash, entries[i]->d_name) < 0) {
      ok = no_memory(folder, e);
      break;
    }
    if (lstat(path, &link) != 0 || stat(path, &st) != 0)
      ok = error_errno(e, ERROR_DATA, "cannot examine %s", path);
    else if (S_ISDIR(link.st_mode))
      ok = walk(list, path, format, e);
    else if (!S_ISDIR(st.st_mode) && is_wanted(path, format)) {
      ok = add(list, path, e);
      continue;
    }
    free(path);
  }
  for (int i = 0; i < n; i++) free(entries[i]);
  free(entries);
  return ok;
}

static int by_path(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* A folder that is not there matches nothing; one that cannot be read is an error. */
static int glob_failed(const char *path, int why) {
  (void)path;
  return why != ENOENT && why != ENOTDIR;
}

/* What matches a pattern, as if its files were a folder's. */
static bool match(struct tokens_list *list, const struct data_source *source, struct error *e) {
  glob_t found = {0};
  const int why = glob(source->path, GLOB_NOSORT, glob_failed, &found);
  bool ok = why == 0 || why == GLOB_NOMATCH || error_errno(e, ERROR_DATA, "cannot search for %s", source->path);
  if (found.gl_pathc > 0) qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, by_path);
  for (size_t i = 0; ok && i < found.gl_pathc; i++) {
    struct stat st;
    if (stat(found.gl_pathv[i], &st) == 0 && S_ISDIR(st.st_mode))
      ok = walk(list, found.gl_pathv[i], source->format, e);
    else if (!tokens_ends_with(found.gl_pathv[i], "offsets.npy") && (source->format == DATA_LLMC || !has_sibling(found.gl_pathv[i])))
      ok = add(list, strdup(found.gl_pathv[i]), e);
  }
  globfree(&found);
  return ok;
}

/* A Megatron pair may be named without an ending. */
static bool is_prefix(const struct data_source *source) {
  char *name = tokens_sibling(source->path, ".idx", ".idx");
  const bool is = (source->format == DATA_AUTO || source->format == DATA_MEGATRON) && name && file_exists(name);
  free(name);
  return is;
}

bool tokens_find(struct tokens_list *list, const struct data_source *source, struct error *e) {
  struct stat st;
  const int64_t before = list->count;
  const bool there = stat(source->path, &st) == 0;
  bool ok;
  if (there && S_ISDIR(st.st_mode))
    ok = walk(list, source->path, source->format, e);
  else if (there || is_prefix(source))
    ok = add(list, strdup(source->path), e);
  else if (strpbrk(source->path, "*?["))
    ok = match(list, source, e);
  else
    return error_errno(e, ERROR_DATA, "cannot use the source %s", source->path);
  if (!ok || list->count > before) return ok;
  error_set(e, ERROR_DATA, "no token files in the source %s", source->path);
  return error_hint(e, "they are found by name: .idx (Megatron), .bin (llm.c, bare ids), .npy; set format where it is not Megatron or llm.c");
}

void tokens_list_free(struct tokens_list *list) {
  for (int64_t i = 0; i < list->count; i++) free(list->path[i]);
  free(list->path);
  *list = (struct tokens_list){0};
}

static bool begins_as_tokens(const char *path) {
  struct error e;
  int64_t size = 0;
  unsigned char bytes[8];
  const int fd = tokens_open_file(path, &size, &e);
  if (fd < 0) return false;
  const bool is = pread(fd, bytes, 8, 0) == 8 && (tokens_is_llmc(bytes, 8) || tokens_is_npy(bytes, 8));
  close(fd);
  return is;
}

bool tokens_is_source(const struct data_source *source) {
  if (source->format != DATA_AUTO) return source->format >= DATA_MEGATRON;
  struct tokens_list list = {0};
  struct error e;
  bool is = tokens_find(&list, source, &e) && list.count > 0;
  if (is) { /* one file of the kind tells */
    const char *first = list.path[0];
    is = tokens_ends_with(first, ".idx") || tokens_ends_with(first, ".npy") || is_prefix(source) || has_sibling(first) || begins_as_tokens(first);
  }
  tokens_list_free(&list);
  return is;
}
