/* A model's safetensors: one file, or shards with an index. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/safetensors_header.h"
#include "checkpoints/store.h"

enum { SHARDS_MOST = 10000, INDEX_LIMIT = 256 << 20 };

struct shard {
  char *path;
  int fd;
};

struct safetensors {
  struct shard *shard;
  int n_shards;
  struct safetensors_tensor *tensor;
  int n;
};

static int by_name(const void *a, const void *b) {
  return strcmp(((const struct safetensors_tensor *)a)->name, ((const struct safetensors_tensor *)b)->name);
}

static bool add_shard(struct safetensors *s, const char *folder, const char *name, struct error *e) {
  struct shard *shard = &s->shard[s->n_shards];
  char path[PATH_MAX];
  if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
    return error_set(e, ERROR_CHECKPOINT, "path too long: %s/%s", folder, name);
  shard->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a fifo is refused below, not waited for */
  if (shard->fd < 0) return error_errno(e, store_fault(errno), "cannot open %s", path);
  s->n_shards++;
  shard->path = strdup(path);
  if (!shard->path) return error_set(e, ERROR_SYSTEM, "out of memory");
  return safetensors_header_read(shard->fd, path, s->n_shards - 1, &s->tensor, &s->n, e);
}

/* Sorts, and refuses a name that two files hold. */
static bool order(struct safetensors *s, struct error *e) {
  if (s->n > 0) qsort(s->tensor, (size_t)s->n, sizeof *s->tensor, by_name);
  for (int i = 1; i < s->n; i++)
    if (strcmp(s->tensor[i].name, s->tensor[i - 1].name) == 0)
      return error_set(e, ERROR_CHECKPOINT, "tensor %s is in %s and in %s", s->tensor[i].name,
                       s->shard[s->tensor[i - 1].file].path, s->shard[s->tensor[i].file].path);
  return true;
}

static int shard_find(const struct safetensors *s, const char *name) {
  for (int i = 0; i < s->n_shards; i++)
    if (strcmp(strrchr(s->shard[i].path, '/') + 1, name) == 0) return i;
  return -1;
}

/* Opens every file that the map names. */
static bool open_shards(struct safetensors *s, const char *folder, const char *index, json_t *map, struct error *e) {
  const char *tensor;
  json_t *value;
  json_object_foreach(map, tensor, value) {
    const char *name = json_string_value(value);
    if (!name || !name[0] || strchr(name, '/'))
      return error_set(e, ERROR_CHECKPOINT, "%s: weight_map.%.200s is no name of a file beside it", index, tensor);
    if (shard_find(s, name) >= 0) continue;
    if (s->n_shards == SHARDS_MOST) return error_set(e, ERROR_CHECKPOINT, "%s names more than %d files", index, SHARDS_MOST);
    if (!add_shard(s, folder, name, e)) return false;
  }
  return true;
}

/* Index and shards say the same about every tensor. */
static bool agree(const struct safetensors *s, const char *index, json_t *map, struct error *e) {
  for (int i = 0; i < s->n; i++) {
    const struct safetensors_tensor *t = &s->tensor[i];
    const char *name = json_string_value(json_object_get(map, t->name));
    if (!name) return error_set(e, ERROR_CHECKPOINT, "%s: it does not name tensor %s of %s", index, t->name, s->shard[t->file].path);
    if (shard_find(s, name) != t->file)
      return error_set(e, ERROR_CHECKPOINT, "%s: it says that tensor %s is in %s, it is in %s", index, t->name, name, s->shard[t->file].path);
  }
  const char *tensor;
  json_t *value;
  json_object_foreach(map, tensor, value)
    if (!safetensors_find(s, tensor))
      return error_set(e, ERROR_CHECKPOINT, "%s: it says that tensor %.200s is in %s, which does not hold it", index, tensor, json_string_value(value));
  return true;
}

static bool open_indexed(struct safetensors *s, const char *folder, const char *index, struct error *e) {
  char *text;
  size_t bytes;
  json_error_t where;
  if (!file_read(index, INDEX_LIMIT, ERROR_CHECKPOINT, &text, &bytes, e)) return false;
  json_t *o = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
  free(text);
  if (!o) return error_set(e, ERROR_CHECKPOINT, "%s: offset %d: %s", index, where.position, where.text);
  json_t *map = json_object_get(o, "weight_map");
  bool good = json_is_object(map) || error_set(e, ERROR_CHECKPOINT, "%s: weight_map is missing, or no object", index);
  if (good) {
    s->shard = calloc(SHARDS_MOST, sizeof *s->shard);
    good = s->shard || error_set(e, ERROR_SYSTEM, "out of memory");
  }
  good = good && open_shards(s, folder, index, map, e) && order(s, e) && agree(s, index, map, e);
  const json_t *total = json_object_get(json_object_get(o, "metadata"), "total_size");
  int64_t held = 0;
  for (int i = 0; i < s->n; i++) held += s->tensor[i].bytes;
  if (good && json_is_number(total) && json_number_value(total) != (double)held)
    log_warning("%s: metadata.total_size is %.0f, the tensors have %" PRId64 " bytes; that sum counts nowhere", index, json_number_value(total), held);
  json_decref(o);
  return good;
}

struct safetensors *safetensors_open(const char *folder, struct error *e) {
  char single[PATH_MAX], index[PATH_MAX];
  struct safetensors *s = calloc(1, sizeof *s);
  if (!s) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  bool good;
  snprintf(single, sizeof single, "%s/model.safetensors", folder);
  if ((size_t)snprintf(index, sizeof index, "%s/model.safetensors.index.json", folder) >= sizeof index) {
    good = error_set(e, ERROR_CHECKPOINT, "path too long: %s", folder);
  } else if (file_exists(single) && file_exists(index)) {
    good = error_set(e, ERROR_CHECKPOINT, "%s holds model.safetensors and an index of shards", folder);
    error_hint(e, "which of them is the model? move the other one away");
  } else if (file_exists(index)) {
    good = open_indexed(s, folder, index, e);
  } else if (file_exists(single)) {
    s->shard = calloc(1, sizeof *s->shard);
    good = s->shard ? add_shard(s, folder, "model.safetensors", e) && order(s, e) : error_set(e, ERROR_SYSTEM, "out of memory");
  } else {
    good = error_set(e, ERROR_CHECKPOINT, "%s holds neither model.safetensors nor model.safetensors.index.json", folder);
  }
  if (good) return s;
  safetensors_close(s);
  return NULL;
}

void safetensors_close(struct safetensors *s) {
  if (!s) return;
  for (int i = 0; i < s->n_shards; i++) {
    close(s->shard[i].fd);
    free(s->shard[i].path);
  }
  for (int i = 0; i < s->n; i++) free(s->tensor[i].name);
  free(s->shard);
  free(s->tensor);
  free(s);
}

int safetensors_count(const struct safetensors *s) { return s->n; }
const struct safetensors_tensor *safetensors_tensor(const struct safetensors *s, int i) { return &s->tensor[i]; }
const char *safetensors_path(const struct safetensors *s, const struct safetensors_tensor *t) { return s->shard[t->file].path; }

const struct safetensors_tensor *safetensors_find(const struct safetensors *s, const char *name) {
  char copy[1024];
  if (s->n == 0 || (size_t)snprintf(copy, sizeof copy, "%s", name) >= sizeof copy) return NULL;
  const struct safetensors_tensor wanted = {.name = copy};
  return bsearch(&wanted, s->tensor, (size_t)s->n, sizeof wanted, by_name);
}

bool safetensors_read(const struct safetensors *s, const struct safetensors_tensor *t, int64_t first, void *to, size_t bytes,
                      struct error *e) {
  char *at = to;
  if (first < 0 || (int64_t)bytes > t->bytes - first) return error_set(e, ERROR_INTERNAL, "bytes outside tensor %s are asked for", t->name);
  while (bytes > 0) {
    ssize_t got = pread(s->shard[t->file].fd, at, bytes, (off_t)(t->at + first));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return error_errno(e, store_fault(errno), "cannot read tensor %s of %s", t->name, safetensors_path(s, t));
    if (got == 0)
      return error_set(e, ERROR_CHECKPOINT, "%s ends at byte %" PRId64 ", inside tensor %s: it became shorter", safetensors_path(s, t),
                       t->at + first, t->name);
    at += got;
    first += got;
    bytes -= (size_t)got;
  }
  return true;
}
