#include "checkpoints/manifest.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoints/store.h"

enum { MANIFEST_LIMIT = 256 << 20 };

bool manifest_measure(const char *path, struct manifest_file *f, struct error *e) {
  enum { PIECE = 1 << 20 };
  int fd;
  do {
    fd = open(path, O_RDONLY | O_CLOEXEC);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return error_errno(e, store_fault(errno), "cannot open %s", path);
  char *piece = malloc(PIECE);
  struct hash_state *state = piece ? hash_open() : NULL;
  bool good = state != NULL || error_set(e, ERROR_SYSTEM, "out of memory");
  f->bytes = 0;
  while (good) {
    ssize_t n = read(fd, piece, PIECE);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) good = error_errno(e, store_fault(errno), "cannot read %s", path);
    if (n <= 0) break;
    hash_feed(state, piece, (size_t)n);
    f->bytes += n;
  }
  if (state) f->hash = hash_close(state);
  free(piece);
  close(fd);
  return good;
}

/* The manifest's own digest: of its canonical text without that key. */
static bool own_digest(const json_t *o, char text[HASH_TEXT]) {
  char *canonical = json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS);
  if (!canonical) return false;
  hash_text(hash_bytes(canonical, strlen(canonical)), text);
  free(canonical);
  return true;
}

static bool intact(json_t *o) {
  char text[HASH_TEXT];
  json_t *said = json_incref(json_object_get(o, "xxh3_128"));
  json_object_del(o, "xxh3_128");
  const bool good = own_digest(o, text) && strcmp(text, json_string_value(said)) == 0;
  json_decref(said);
  return good;
}

bool manifest_write(const char *folder, const struct manifest *m, struct error *e) {
  json_t *o = json_object(), *files = json_array();
  json_object_set_new(o, "format", json_string("fp4d-checkpoint"));
  json_object_set_new(o, "version", json_integer(MANIFEST_VERSION));
  json_object_set_new(o, "update", json_integer(m->update));
  for (int i = 0; i < m->n_files; i++) {
    char text[HASH_TEXT];
    hash_text(m->files[i].hash, text);
    json_array_append_new(files, json_pack("{s:s, s:I, s:s}", "name", m->files[i].name, "bytes",
                                           (json_int_t)m->files[i].bytes, "xxh3_128", text));
  }
  json_object_set_new(o, "files", files);
  json_object_set_new(o, "meta", json_string(m->meta));
  char digest[HASH_TEXT], *text = NULL;
  if (own_digest(o, digest)) {
    json_object_set_new(o, "xxh3_128", json_string(digest));
    text = json_dumps(o, JSON_INDENT(1));
  }
  json_decref(o);
  if (!text) return error_set(e, ERROR_SYSTEM, "out of memory for the manifest");
  char path[1200];
  snprintf(path, sizeof path, "%s/manifest.json", folder);
  bool good = file_publish(path, text, strlen(text), ERROR_CHECKPOINT, e);
  free(text);
  return good;
}

void manifest_file_name(int rank, struct manifest_file *f) { snprintf(f->name, sizeof f->name, "rank-%05d.h5", rank); }

/* No name but its rank's: none outside the folder, none twice. */
static bool parse_file(const json_t *entry, int rank, struct manifest_file *f) {
  const char *name = json_string_value(json_object_get(entry, "name"));
  const char *hash = json_string_value(json_object_get(entry, "xxh3_128"));
  const json_t *bytes = json_object_get(entry, "bytes");
  manifest_file_name(rank, f);
  f->bytes = json_integer_value(bytes);
  return name && strcmp(name, f->name) == 0 && json_is_integer(bytes) && f->bytes >= 0 && hash && hash_parse(hash, &f->hash);
}

static bool parse(const json_t *o, struct manifest *m) {
  const json_t *update = json_object_get(o, "update");
  const char *format = json_string_value(json_object_get(o, "format"));
  const char *meta = json_string_value(json_object_get(o, "meta"));
  const json_t *files = json_object_get(o, "files");
  const int64_t version = json_integer_value(json_object_get(o, "version"));
  if (!format || strcmp(format, "fp4d-checkpoint") != 0 || !meta || !json_is_array(files) ||
      version < 1 || version > MANIFEST_VERSION || json_integer_value(update) < 0 ||
      !json_is_integer(update) || !json_is_string(json_object_get(o, "xxh3_128")) || json_array_size(files) == 0 ||
      json_array_size(files) > 1 << 20)
    return false;
  m->update = json_integer_value(update);
  m->meta = strdup(meta);
  m->files = calloc(json_array_size(files), sizeof *m->files);
  if (!m->meta || !m->files) return false;
  bool good = true;
  for (; good && m->n_files < (int)json_array_size(files); m->n_files++)
    good = parse_file(json_array_get(files, (size_t)m->n_files), m->n_files, &m->files[m->n_files]);
  return good;
}

bool manifest_check(const char *folder, const struct manifest_file *f, bool verify, struct error *e) {
  char path[1200];
  snprintf(path, sizeof path, "%s/%s", folder, f->name);
  int64_t bytes = file_size(path);
  if (bytes < 0 && store_fault(errno) != ERROR_CHECKPOINT) return error_errno(e, store_fault(errno), "cannot examine %s", path);
  if (bytes < 0) return error_set(e, ERROR_CHECKPOINT, "%s is missing", path);
  if (bytes != f->bytes)
    return error_set(e, ERROR_CHECKPOINT, "%s has %" PRId64 " bytes, the manifest says %" PRId64, path, bytes, f->bytes);
  if (!verify) return true;
  struct manifest_file now;
  if (!manifest_measure(path, &now, e)) return false;
  return hash_equal(now.hash, f->hash) || error_set(e, ERROR_CHECKPOINT, "%s is damaged: its checksum differs from the manifest's", path);
}

bool manifest_load(const char *folder, struct manifest *m, struct error *e) {
  char path[1200], *text;
  size_t bytes;
  memset(m, 0, sizeof *m);
  snprintf(path, sizeof path, "%s/manifest.json", folder);
  errno = 0;
  if (!file_read(path, MANIFEST_LIMIT, ERROR_CHECKPOINT, &text, &bytes, e)) {
    if (errno != 0) e->code = store_fault(errno);
    return false;
  }
  json_error_t where;
  json_t *o = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
  free(text);
  bool good = o != NULL && parse(o, m);
  if (!o)
    error_set(e, ERROR_CHECKPOINT, "%s:%d: %s", path, where.line, where.text);
  else if (!good)
    error_set(e, ERROR_CHECKPOINT, "%s is not a manifest of version 1 to %d", path, MANIFEST_VERSION);
  else if (!intact(o))
    good = error_set(e, ERROR_CHECKPOINT, "%s is damaged: its digest is not that of its content", path);
  json_decref(o);
  if (!good) manifest_free(m);
  return good;
}

bool manifest_read(const char *folder, bool verify, struct manifest *m, struct error *e) {
  if (!manifest_load(folder, m, e)) return false;
  bool good = true;
  for (int i = 0; good && i < m->n_files; i++) good = manifest_check(folder, &m->files[i], verify, e);
  if (!good) manifest_free(m);
  return good;
}

void manifest_free(struct manifest *m) {
  free(m->files);
  free(m->meta);
  memset(m, 0, sizeof *m);
}
