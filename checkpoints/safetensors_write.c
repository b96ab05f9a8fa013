/* Writing a safetensors file: header first, then the data as it comes. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoints/safetensors.h"
#include "checkpoints/store.h"

struct safetensors_writer {
  char *path;
  int fd;
  int64_t left; /* bytes of data that are still to come */
  bool broken;
};

static bool write_all(struct safetensors_writer *w, const void *data, size_t bytes, struct error *e) {
  const char *at = data;
  while (bytes > 0) {
    ssize_t n = write(w->fd, at, bytes < (size_t)1 << 30 ? bytes : (size_t)1 << 30);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      w->broken = true;
      return error_errno(e, ERROR_CHECKPOINT, "cannot write %s", w->path);
    }
    at += n;
    bytes -= (size_t)n;
  }
  return true;
}

/* As the reference writer spells it: no blanks, spaces up to a multiple of 8 bytes. */
static char *header_text(const struct safetensors_entry *entries, int n, size_t *bytes) {
  char *text = NULL;
  FILE *out = open_memstream(&text, bytes);
  if (!out) return NULL;
  int64_t at = 0;
  fputs("{\"__metadata__\":{\"format\":\"pt\"}", out);
  for (int i = 0; i < n; i++) {
    const struct safetensors_entry *t = &entries[i];
    fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
    for (int d = 0; d < t->n_dims; d++) fprintf(out, "%s%" PRId64, d ? "," : "", t->shape[d]);
    fprintf(out, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", at, at + t->bytes);
    at += t->bytes;
  }
  fputc('}', out);
  for (long end = ftell(out); end % 8 != 0; end++) fputc(' ', out);
  if (fclose(out) == 0) return text;
  free(text);
  return NULL;
}

struct safetensors_writer *safetensors_create(const char *path, const struct safetensors_entry *entries, int n, struct error *e) {
  size_t bytes = 0;
  struct safetensors_writer *w = calloc(1, sizeof *w);
  char *text = w ? header_text(entries, n, &bytes) : NULL;
  if (w) w->path = strdup(path);
  if (!w || !text || !w->path) {
    error_set(e, ERROR_SYSTEM, "out of memory for the header of %s", path);
    if (w) free(w->path);
    free(w);
    free(text);
    return NULL;
  }
  for (int i = 0; i < n; i++) w->left += entries[i].bytes;
  w->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  bool good = w->fd >= 0 || error_errno(e, store_fault(errno), "cannot create %s", path);
  if (good && bytes > SAFETENSORS_HEADER)
    good = error_set(e, ERROR_CHECKPOINT, "%s: its header would have %zu bytes, at most %d are allowed", path, bytes, SAFETENSORS_HEADER);
  unsigned char length[8];
  for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)bytes >> (8 * i));
  good = good && write_all(w, length, sizeof length, e) && write_all(w, text, bytes, e);
  free(text);
  if (good) return w;
  w->broken = true;
  safetensors_finish(w, e);
  return NULL;
}

bool safetensors_put(struct safetensors_writer *w, const void *data, size_t bytes, struct error *e) {
  if (w->broken) return false;
  if ((int64_t)bytes > w->left) {
    w->broken = true;
    return error_set(e, ERROR_INTERNAL, "%s: more data than its header says", w->path);
  }
  w->left -= (int64_t)bytes;
  return write_all(w, data, bytes, e);
}

bool safetensors_finish(struct safetensors_writer *w, struct error *e) {
  bool good = !w->broken;
  if (good && w->left > 0) good = error_set(e, ERROR_INTERNAL, "%s: %" PRId64 " bytes of its data are missing", w->path, w->left);
  if (good && fsync(w->fd) != 0) good = error_errno(e, ERROR_CHECKPOINT, "cannot sync %s", w->path);
  if (w->fd >= 0 && close(w->fd) != 0 && good) good = error_errno(e, ERROR_CHECKPOINT, "cannot close %s", w->path);
  free(w->path);
  free(w);
  return good;
}
