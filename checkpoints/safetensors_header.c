/* A safetensors header, strictly: every rule of the format is looked at, and what
 * breaks one is named with its file and offset or tensor. */
#include "checkpoints/safetensors_header.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "checkpoints/store.h"

/* Bits of an element; the format's own words. */
static const struct {
  const char *name;
  int bits;
} dtypes[] = {{"BOOL", 8},    {"U8", 8},       {"I8", 8},       {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
              {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6},  {"F6_E3M2", 6},  {"F4", 4},      {"I16", 16},    {"U16", 16},    {"F16", 16},
              {"BF16", 16},   {"I32", 32},     {"U32", 32},     {"F32", 32},    {"I64", 64},    {"U64", 64},    {"F64", 64},
              {"C64", 64}};

enum { DTYPES = sizeof dtypes / sizeof dtypes[0], NAME_MOST = 512 };

/* A file whose header is being read. */
struct source {
  const char *path;
  int64_t bytes, data; /* of the file; where its data begins */
  struct error *e;
};

static bool broken(const struct source *s, const char *name, const char *what) {
  return error_set(s->e, ERROR_CHECKPOINT, "%s: tensor %.200s: %s", s->path, name, what);
}

static int dtype_find(const char *name) {
  for (int i = 0; name && i < DTYPES; i++)
    if (strcmp(dtypes[i].name, name) == 0) return i;
  return -1;
}

/* "dtype" and "shape", and the bytes that they make. */
static bool take_shape(const struct source *s, const json_t *entry, struct safetensors_tensor *t, int64_t *bytes) {
  const json_t *shape = json_object_get(entry, "shape");
  const char *word = json_string_value(json_object_get(entry, "dtype"));
  const int dtype = dtype_find(word);
  if (!word) return broken(s, t->name, "\"dtype\" is missing, or no text");
  if (dtype < 0)
    return error_set(s->e, ERROR_CHECKPOINT, "%s: tensor %.200s: dtype %.40s is none of the format's", s->path, t->name, word);
  t->dtype = dtypes[dtype].name;
  if (!json_is_array(shape)) return broken(s, t->name, "\"shape\" is missing, or no list");
  if (json_array_size(shape) > SAFETENSORS_DIMS) return broken(s, t->name, "it has more than 8 dimensions");
  t->n_dims = (int)json_array_size(shape);
  int64_t elements = 1, bits;
  for (int i = 0; i < t->n_dims; i++) {
    const json_t *extent = json_array_get(shape, (size_t)i);
    if (!json_is_integer(extent) || json_integer_value(extent) < 0) return broken(s, t->name, "\"shape\" holds what is no count");
    t->shape[i] = json_integer_value(extent);
    if (!checked_mul(elements, t->shape[i], &elements)) return broken(s, t->name, "its shape has more elements than 64 bits count");
  }
  if (!checked_mul(elements, dtypes[dtype].bits, &bits)) return broken(s, t->name, "its shape has more elements than 64 bits count");
  if (bits % 8 != 0) return broken(s, t->name, "its elements fill no whole number of bytes");
  *bytes = bits / 8;
  return true;
}

static bool take_offsets(const struct source *s, const json_t *entry, struct safetensors_tensor *t, int64_t bytes) {
  const json_t *offsets = json_object_get(entry, "data_offsets");
  const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
  if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
    return broken(s, t->name, "\"data_offsets\" is missing, or not two integers");
  const int64_t from = json_integer_value(begin), to = json_integer_value(end);
  if (from < 0 || to < from)
    return error_set(s->e, ERROR_CHECKPOINT, "%s: tensor %.200s: data_offsets [%" PRId64 ", %" PRId64 ") are no range", s->path, t->name,
                     from, to);
  if (to > s->bytes - s->data)
    return error_set(s->e, ERROR_CHECKPOINT, "%s: tensor %.200s: its data ends at offset %" PRId64 ", the file's data at %" PRId64, s->path,
                     t->name, to, s->bytes - s->data);
  if (to - from != bytes)
    return error_set(s->e, ERROR_CHECKPOINT, "%s: tensor %.200s: %" PRId64 " bytes of data, its dtype and shape make %" PRId64, s->path,
                     t->name, to - from, bytes);
  t->at = s->data + from;
  t->bytes = bytes;
  return true;
}

static bool check_metadata(const struct source *s, json_t *metadata) {
  const char *key;
  json_t *value;
  if (!json_is_object(metadata)) return error_set(s->e, ERROR_CHECKPOINT, "%s: __metadata__ is no object", s->path);
  json_object_foreach(metadata, key, value)
    if (!json_is_string(value)) return error_set(s->e, ERROR_CHECKPOINT, "%s: __metadata__.%.200s is no text", s->path, key);
  return true;
}

static bool take_tensor(const struct source *s, const char *name, const json_t *entry, struct safetensors_tensor *t) {
  int64_t bytes = 0;
  if (strlen(name) > NAME_MOST || !name[0])
    return error_set(s->e, ERROR_CHECKPOINT, "%s: a tensor's name has %zu bytes, 1 to %d are read", s->path, strlen(name), NAME_MOST);
  t->name = strdup(name);
  if (!t->name) return error_set(s->e, ERROR_SYSTEM, "out of memory");
  if (!json_is_object(entry)) return broken(s, name, "its entry is no object");
  return take_shape(s, entry, t, &bytes) && take_offsets(s, entry, t, bytes);
}

static int by_place(const void *a, const void *b) {
  const struct safetensors_tensor *x = a, *y = b;
  if (x->at != y->at) return x->at < y->at ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Tensors follow each other without a gap from the first byte of the data to the last. */
static bool check_places(const struct source *s, struct safetensors_tensor *t, int n) {
  int64_t at = s->data;
  if (n > 0) qsort(t, (size_t)n, sizeof *t, by_place);
  for (int i = 0; i < n; at = t[i].at + t[i].bytes, i++) {
    if (t[i].at == at) continue;
    return error_set(s->e, ERROR_CHECKPOINT, "%s: offset %" PRId64 " of the data %s (tensor %.200s begins at %" PRId64 ")", s->path, at - s->data,
                     t[i].at > at ? "belongs to no tensor" : "is where one tensor ends and another has begun already", t[i].name, t[i].at - s->data);
  }
  if (at == s->bytes) return true;
  return error_set(s->e, ERROR_CHECKPOINT, "%s: %" PRId64 " bytes after the last tensor, which ends at byte %" PRId64, s->path, s->bytes - at, at);
}

static bool take_all(const struct source *s, json_t *header, int file, struct safetensors_tensor **tensors, int *n) {
  const size_t most = json_object_size(header);
  struct safetensors_tensor *grown = realloc(*tensors, ((size_t)*n + most + 1) * sizeof *grown);
  if (!grown) return error_set(s->e, ERROR_SYSTEM, "out of memory");
  *tensors = grown;
  const int first = *n;
  const char *name;
  json_t *entry;
  json_object_foreach(header, name, entry) {
    if (strcmp(name, "__metadata__") == 0) {
      if (!check_metadata(s, entry)) return false;
      continue;
    }
    struct safetensors_tensor *t = &grown[(*n)++];
    *t = (struct safetensors_tensor){.file = file};
    if (!take_tensor(s, name, entry, t)) return false;
  }
  return check_places(s, grown + first, *n - first);
}

static bool read_at(const struct source *s, int fd, int64_t at, char *to, int64_t bytes, const char *what) {
  while (bytes > 0) {
    ssize_t got = pread(fd, to, (size_t)bytes, (off_t)at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return error_errno(s->e, store_fault(errno), "cannot read %s", s->path);
    if (got == 0) return error_set(s->e, ERROR_CHECKPOINT, "%s ends at byte %" PRId64 ", inside its %s", s->path, at, what);
    to += got;
    at += got;
    bytes -= got;
  }
  return true;
}

bool safetensors_header_read(int fd, const char *path, int file, struct safetensors_tensor **tensors, int *n, struct error *e) {
  struct source s = {.path = path, .e = e};
  struct stat st;
  unsigned char length[8];
  uint64_t size = 0;
  if (fstat(fd, &st) != 0) return error_errno(e, store_fault(errno), "cannot examine %s", path);
  if (!S_ISREG(st.st_mode)) return error_set(e, ERROR_CHECKPOINT, "%s is not a regular file", path);
  s.bytes = st.st_size;
  if (!read_at(&s, fd, 0, (char *)length, sizeof length, "header's length (8 bytes)")) return false;
  for (int i = 7; i >= 0; i--) size = size << 8 | length[i];
  if (size > SAFETENSORS_HEADER)
    return error_set(e, ERROR_CHECKPOINT, "%s: offset 0: a header of %" PRIu64 " bytes, at most %d are allowed", path, size, SAFETENSORS_HEADER);
  s.data = 8 + (int64_t)size;
  if (s.data > s.bytes)
    return error_set(e, ERROR_CHECKPOINT, "%s: offset 0: a header of %" PRIu64 " bytes in a file of %" PRId64, path, size, s.bytes);
  char *text = malloc((size_t)size + 1);
  if (!text) return error_set(e, ERROR_SYSTEM, "out of memory for the header of %s", path);
  bool good = read_at(&s, fd, 8, text, (int64_t)size, "header");
  if (good && (size == 0 || text[0] != '{')) good = error_set(e, ERROR_CHECKPOINT, "%s: offset 8: the header does not begin with {", path);
  if (good) {
    json_error_t where;
    json_t *header = json_loadb(text, (size_t)size, JSON_REJECT_DUPLICATES, &where);
    good = header ? take_all(&s, header, file, tensors, n)
                  : error_set(e, ERROR_CHECKPOINT, "%s: offset %d: the header: %s", path, 8 + where.position, where.text);
    json_decref(header);
  }
  free(text);
  return good;
}
