#include "trainer/export_files.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/log.h"

enum { COPY_LIMIT = 1 << 30 };

static bool holds_something(const char *folder) {
  DIR *d = opendir(folder);
  if (!d) return errno != ENOENT;
  int entries = 0;
  while (entries <= 2 && readdir(d)) entries++; /* . and .. */
  closedir(d);
  return entries > 2;
}

bool export_begin(const char *folder, char temporary[PATH_MAX], struct error *e) {
  size_t length = strlen(folder);
  while (length > 1 && folder[length - 1] == '/') length--;
  if ((size_t)snprintf(temporary, PATH_MAX, "%.*s.tmp", (int)length, folder) >= PATH_MAX - 80)
    return error_set(e, ERROR_CHECKPOINT, "path too long: %s", folder);
  if (holds_something(folder)) {
    error_set(e, ERROR_CHECKPOINT, "%s is there already, and not an empty folder", folder);
    return error_hint(e, "give a new folder: an export replaces nothing");
  }
  return file_make_parent(temporary, ERROR_CHECKPOINT, e) && file_remove_tree(temporary, ERROR_CHECKPOINT, e) &&
         file_make_folder(temporary, ERROR_CHECKPOINT, e);
}

static bool write_text(const char *temporary, const char *name, char *text, struct error *e) {
  char path[PATH_MAX + 80];
  snprintf(path, sizeof path, "%s/%s", temporary, name);
  const bool good = text ? file_publish(path, text, strlen(text), ERROR_CHECKPOINT, e) : error_set(e, ERROR_SYSTEM, "out of memory");
  free(text);
  return good;
}

bool export_configs(const char *temporary, const struct llama_config *c, enum dtype dtype, struct error *e) {
  return write_text(temporary, "config.json", llama_config_text(c, dtype == DTYPE_F32 ? "float32" : "bfloat16"), e) &&
         write_text(temporary, "generation_config.json", llama_generation_text(c), e);
}

/* ---- copies ------------------------------------------------------------------ */

/* What a tokenizer's folder may hold of it. */
static const char *const tokenizer_names[] = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
                                              "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "*.tiktoken"};
/* What an export itself writes. */
static const char *const own_names[] = {"config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"};

static bool matches(const char *name, const char *const *patterns, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (fnmatch(patterns[i], name, 0) == 0) return true;
  return false;
}

static bool copy_file(const char *temporary, const char *path, const char *name, struct error *e) {
  char to[PATH_MAX + 300], *data;
  size_t bytes;
  if (matches(name, own_names, sizeof own_names / sizeof own_names[0]))
    return error_set(e, ERROR_USAGE, "--tokenizer %s: an export writes a file of that name itself", path);
  snprintf(to, sizeof to, "%s/%s", temporary, name);
  if (file_exists(to)) return error_set(e, ERROR_USAGE, "--tokenizer %s: there is another file of that name", path);
  if (!file_read(path, COPY_LIMIT, ERROR_DATA, &data, &bytes, e)) return false;
  const bool good = file_publish(to, data, bytes, ERROR_CHECKPOINT, e);
  free(data);
  return good;
}

static bool copy_folder(const char *temporary, const char *folder, struct error *e) {
  struct dirent **names;
  const int n = scandir(folder, &names, NULL, alphasort);
  if (n < 0) return error_errno(e, ERROR_DATA, "cannot read %s", folder);
  bool good = true;
  int copied = 0;
  for (int i = 0; i < n; i++) {
    char path[PATH_MAX + 300];
    if (good && matches(names[i]->d_name, tokenizer_names, sizeof tokenizer_names / sizeof tokenizer_names[0])) {
      snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
      good = copy_file(temporary, path, names[i]->d_name, e);
      copied++;
    }
    free(names[i]);
  }
  free(names);
  return good && (copied > 0 || error_set(e, ERROR_DATA, "--tokenizer %s: the folder holds no tokenizer's file", folder));
}

bool export_copies(const char *temporary, const struct argument_list *from, struct error *e) {
  for (int i = 0; i < from->n; i++) {
    struct stat st;
    const char *path = from->item[i], *slash = strrchr(path, '/');
    if (stat(path, &st) != 0) return error_errno(e, ERROR_DATA, "--tokenizer %s", path);
    if (S_ISDIR(st.st_mode) ? !copy_folder(temporary, path, e) : !copy_file(temporary, path, slash ? slash + 1 : path, e)) return false;
  }
  return true;
}

/* ---- the folder -------------------------------------------------------------- */

bool export_publish(const char *temporary, const char *folder, struct error *e) {
  if (!file_sync_folder(temporary, ERROR_CHECKPOINT, e)) return false;
  if (rename(temporary, folder) != 0) return error_errno(e, ERROR_CHECKPOINT, "cannot rename %s to %s", temporary, folder);
  return file_sync_parent(folder, ERROR_CHECKPOINT, e);
}

void export_abandon(const char *temporary) {
  struct error e;
  if (file_exists(temporary) && !file_remove_tree(temporary, ERROR_CHECKPOINT, &e)) log_warning("%s", e.message);
}
