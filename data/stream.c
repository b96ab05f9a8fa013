/* A stream, whatever file gives it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/index_file.h"
#include "data/stream_file.h"
#include "data/stream_parts.h"

static const struct {
  char magic[9];
  const struct stream_kind *kind;
  bool (*open)(struct stream *s, int64_t size, struct error *e);
} kinds[] = {
    {STREAM_MAGIC, &stream_kind_tokens, stream_tokens_open},
    {INDEX_MAGIC, &stream_kind_index, stream_index_open},
};

static bool open_kind(struct stream *s, int64_t size, struct error *e) {
  char magic[8];
  if (size < (int64_t)sizeof magic) {
    error_set(e, ERROR_DATA, "%s: %" PRId64 " bytes are too few for a token stream", s->path, size);
    return error_hint(e, "make one with `fp4d prepare`");
  }
  if (!frame_read_at(s->fd, s->path, magic, sizeof magic, 0, e)) return false;
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
    if (memcmp(magic, kinds[k].magic, sizeof magic) == 0) {
      s->kind = kinds[k].kind;
      return kinds[k].open(s, size, e);
    }
  error_set(e, ERROR_DATA, "%s is not a token stream of fp4d (its first bytes differ)", s->path);
  return error_hint(e, "make one with `fp4d prepare`");
}

static bool open_file(struct stream *s, int32_t vocab_size, struct error *e) {
  s->fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (s->fd < 0) {
    error_errno(e, ERROR_DATA, "cannot open token stream %s", s->path);
    return errno == ENOENT ? error_hint(e, "make it with `fp4d prepare`") : false;
  }
  struct stat st;
  if (fstat(s->fd, &st) != 0) return error_errno(e, ERROR_DATA, "cannot examine %s", s->path);
  if (!S_ISREG(st.st_mode))
    return error_set(e, ERROR_DATA, "%s is %s, not a token stream", s->path,
                     S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
  if (!open_kind(s, st.st_size, e)) return false;
  if (vocab_size == 0 || s->info.vocab_size <= vocab_size) return true;
  error_set(e, ERROR_DATA, "%s holds token ids up to %d%s%s, the model's vocabulary ends at %d", s->path,
            s->info.vocab_size - 1, s->info.tokenizer[0] ? " of tokenizer " : "", s->info.tokenizer, vocab_size - 1);
  return error_hint(e, "set model.vocab_size to %d or more", s->info.vocab_size);
}

struct stream *stream_open(const char *path, int32_t vocab_size, struct error *e) {
  struct stream *s = calloc(1, sizeof *s);
  if (s) s->fd = -1;
  if (!s || !(s->path = strdup(path)))
    error_set(e, ERROR_SYSTEM, "%s: out of memory", path);
  else if (open_file(s, vocab_size, e))
    return s;
  stream_close(s);
  return NULL;
}

void stream_close(struct stream *s) {
  if (!s) return;
  if (s->kind) s->kind->close(s);
  if (s->fd >= 0) close(s->fd);
  free(s->path);
  free(s);
}

const struct stream_info *stream_info(const struct stream *s) { return &s->info; }
const char *stream_path(const struct stream *s) { return s->path; }
bool stream_verify(struct stream *s, struct error *e) { return s->kind->verify(s, e); }

bool stream_read(const struct stream *s, int64_t first, int64_t count, int32_t *ids, struct error *e) {
  if (first < 0 || count < 0 || count > s->info.tokens || first > s->info.tokens - count)
    return error_set(e, ERROR_INTERNAL, "%s: tokens %" PRId64 " + %" PRId64 " asked for, it has %" PRId64, s->path,
                     first, count, s->info.tokens);
  return count == 0 || s->kind->read(s, first, count, ids, e);
}

bool stream_document(const struct stream *s, int64_t number, struct stream_document *d, struct error *e) {
  if (number < 0 || number >= s->info.documents)
    return error_set(e, ERROR_INTERNAL, "%s: document %" PRId64 " asked for, it has %" PRId64, s->path, number,
                     s->info.documents);
  return s->kind->document(s, number, d, e);
}

bool stream_document_at(const struct stream *s, int64_t token, struct stream_document *d, struct error *e) {
  if (token < 0 || token >= s->info.tokens)
    return error_set(e, ERROR_INTERNAL, "%s: the document of token %" PRId64 " asked for, it has %" PRId64 " tokens",
                     s->path, token, s->info.tokens);
  /* The last document that begins at or before the token: below `low` all do, from `high` on none does. */
  int64_t low = 1, high = s->info.documents;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (!s->kind->document(s, middle, d, e)) return false;
    if (d->first <= token)
      low = middle + 1;
    else
      high = middle;
  }
  if (!s->kind->document(s, low - 1, d, e)) return false;
  if (d->first <= token && token < d->end) return true;
  return error_set(e, ERROR_DATA, "%s: damaged: no document holds token %" PRId64, s->path, token);
}
