/* NumPy's .npy: a text header that names type and shape, then the array.  As token files, and as
 * the document offsets beside a bare file. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "data/frame.h"
#include "data/little_endian.h"
#include "data/tokens_parts.h"

enum { NPY_TEXT_MOST = 1 << 16 };

static const struct {
  char descr[4];
  int width;
  bool is_signed;
} types[] = {{"|u1", 1, false}, {"|i1", 1, true}, {"<u2", 2, false}, {"<i2", 2, true},
             {"<u4", 4, false}, {"<i4", 4, true}, {"<u8", 8, false}, {"<i8", 8, true}};
enum { TYPES = sizeof types / sizeof *types };

struct npy {
  int64_t data_at, count;
  int width;
  bool is_signed;
};

bool tokens_is_npy(const unsigned char *bytes, int64_t count) { return count >= 6 && memcmp(bytes, "\x93NUMPY", 6) == 0; }

/* What stands after 'KEY': in the header's dictionary; NULL: no such key. */
static const char *find_value(const char *text, const char *key) {
  char quoted[32];
  snprintf(quoted, sizeof quoted, "'%s'", key);
  const char *p = strstr(text, quoted);
  if (!p) return NULL;
  p += strlen(quoted);
  p += strspn(p, " ");
  if (*p++ != ':') return NULL;
  return p + strspn(p, " ");
}

static bool bad(const char *path, const char *what, const char *value, struct error *e) {
  return error_set(e, ERROR_DATA, "%s: the header (byte 10) of this .npy %s%.*s", path, what, (int)strcspn(value, "}\n"), value);
}

/* '<u2', False and (12,) of the header's text. */
static bool parse_header(const char *path, const char *text, struct npy *n, struct error *e) {
  const char *descr = find_value(text, "descr"), *order = find_value(text, "fortran_order"), *shape = find_value(text, "shape");
  if (!descr || !order || !shape) return bad(path, "lacks descr, fortran_order or shape", "", e);
  int k = 0;
  while (k < TYPES && !(descr[0] == '\'' && strncmp(descr + 1, types[k].descr, 3) == 0 && descr[4] == '\'')) k++;
  if (k == TYPES) return bad(path, "names a type that is not one of little-endian integers: ", descr, e);
  if (strncmp(order, "False", 5) != 0) return bad(path, "says fortran_order ", order, e);
  char *end;
  const long long count = *shape == '(' && shape[1] >= '0' && shape[1] <= '9' ? strtoll(shape + 1, &end, 10) : -1;
  if (count < 0 || end[0] != ',' || end[1 + strspn(end + 1, " ")] != ')') return bad(path, "names a shape that is not one axis: ", shape, e);
  n->width = types[k].width;
  n->is_signed = types[k].is_signed;
  n->count = count;
  return true;
}

static bool read_npy(int fd, const char *path, int64_t size, struct npy *n, struct error *e) {
  unsigned char head[12];
  if (size < 12 || !frame_read_at(fd, path, head, 12, 0, e) || !tokens_is_npy(head, 12))
    return error_set(e, ERROR_DATA, "%s: byte 0 does not begin a .npy of NumPy", path);
  const int version = head[6];
  if (version < 1 || version > 3) return error_set(e, ERROR_DATA, "%s: .npy of version %d (byte 6), 1 to 3 are known", path, version);
  const int64_t text_at = version == 1 ? 10 : 12, length = version == 1 ? load_u16(head + 8) : load_u32(head + 8);
  if (length > NPY_TEXT_MOST || length > size - text_at)
    return error_set(e, ERROR_DATA, "%s: truncated or damaged: a header of %" PRId64 " bytes (byte 8) in a file of %" PRId64, path, length, size);
  char *text = malloc((size_t)length + 1);
  if (!text) return error_set(e, ERROR_SYSTEM, "%s: out of memory", path);
  bool ok = frame_read_at(fd, path, text, length, text_at, e);
  text[ok ? length : 0] = 0;
  ok = ok && parse_header(path, text, n, e);
  free(text);
  if (!ok) return false;
  n->data_at = text_at + length;
  if (n->count <= (INT64_MAX - n->data_at) / n->width && n->data_at + n->count * n->width == size) return true;
  return error_set(e, ERROR_DATA, "%s: its header names %" PRId64 " numbers of %d bytes, %" PRId64 " bytes follow it", path, n->count, n->width,
                   size - n->data_at);
}

bool tokens_open_npy(struct tokens_file *f, struct error *e) {
  struct npy n;
  if (!read_npy(f->fd, f->path, f->size, &n, e)) return false;
  f->width = n.width;
  f->is_signed = n.is_signed;
  f->data_at = n.data_at;
  f->tokens = n.count;
  return true;
}

/* n + 1 offsets of n documents, from 0 to all tokens. */
static bool read_offsets(struct tokens_file *f, int fd, const char *path, const struct npy *n, struct error *e) {
  if (n->width < 4) return error_set(e, ERROR_DATA, "%s: document offsets of %d bytes each, 4 or 8 are wanted", path, n->width);
  if (n->count < 1) return error_set(e, ERROR_DATA, "%s: no document offsets", path);
  f->documents = n->count - 1;
  f->ends = malloc((size_t)f->documents * sizeof *f->ends + 1);
  if (!f->ends) return error_set(e, ERROR_SYSTEM, "%s: out of memory for %" PRId64 " documents", path, f->documents);
  unsigned char buffer[1 << 13];
  const int64_t most = (int64_t)sizeof buffer / n->width;
  int64_t previous = 0;
  for (int64_t i = 0, filled = 0, begin = 0; i < n->count; i++) {
    const int64_t at = n->data_at + i * n->width;
    if (i == begin + filled) {
      begin = i;
      filled = n->count - i < most ? n->count - i : most;
      if (!frame_read_at(fd, path, buffer, filled * n->width, at, e)) return false;
    }
    const unsigned char *p = buffer + (i - begin) * n->width;
    const int64_t offset = n->width == 8 ? (int64_t)load_u64(p) : n->is_signed ? (int32_t)load_u32(p) : (int64_t)load_u32(p);
    if (i == 0 && offset != 0)
      return error_set(e, ERROR_DATA, "%s: the first offset (byte %" PRId64 ") is %" PRId64 ", not 0", path, at, offset);
    if (offset < previous)
      return error_set(e, ERROR_DATA, "%s: offset %" PRId64 " (byte %" PRId64 ") is %" PRId64 ", after %" PRId64 ": they are not ascending", path, i, at,
                       offset, previous);
    if (offset > f->tokens || (i == n->count - 1 && offset != f->tokens))
      return error_set(e, ERROR_DATA, "%s: offset %" PRId64 " (byte %" PRId64 ") is %" PRId64 ", %s has %" PRId64 " tokens", path, i, at, offset, f->path,
                       f->tokens);
    if (i > 0) f->ends[i - 1] = offset;
    previous = offset;
  }
  return true;
}

/* NAME.offsets.npy, or offsets.npy in its folder; *name NULL: neither. False: out of memory. */
static bool find_offsets(const char *path, char **name) {
  const char *slash = strrchr(path, '/'), *dot = strrchr(slash ? slash : path, '.');
  const char *const endings[] = {".offsets.npy", ".offsets.npy", "offsets.npy"};
  const size_t stems[] = {strlen(path), dot ? (size_t)(dot - path) : strlen(path), slash ? (size_t)(slash + 1 - path) : 0};
  for (int k = 0; k < 3; k++) {
    if (!(*name = malloc(stems[k] + strlen(endings[k]) + 1))) return false;
    memcpy(*name, path, stems[k]);
    strcpy(*name + stems[k], endings[k]);
    if (file_exists(*name)) return true;
    free(*name);
  }
  *name = NULL;
  return true;
}

bool tokens_take_offsets(struct tokens_file *f, struct error *e) {
  char *name;
  if (!find_offsets(f->path, &name)) return error_set(e, ERROR_SYSTEM, "%s: out of memory", f->path);
  if (!name) return true;
  int64_t size = 0;
  struct npy n;
  const int fd = tokens_open_file(name, &size, e);
  const bool ok = fd >= 0 && read_npy(fd, name, size, &n, e) && read_offsets(f, fd, name, &n, e);
  if (fd >= 0) close(fd);
  f->beside = size;
  free(name);
  return ok;
}
