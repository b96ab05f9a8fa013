/* Token files: opening by format, decoding ids. */
#include "data/tokens.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "data/frame.h"
#include "data/little_endian.h"
#include "data/tokens_parts.h"

bool tokens_ends_with(const char *path, const char *ending) {
  const size_t length = strlen(path), n = strlen(ending);
  return length > n && strcmp(path + length - n, ending) == 0;
}

char *tokens_sibling(const char *path, const char *from, const char *to) {
  const size_t stem = strlen(path) - (tokens_ends_with(path, from) ? strlen(from) : 0);
  char *name = malloc(stem + strlen(to) + 1);
  if (!name) return NULL;
  memcpy(name, path, stem);
  memcpy(name + stem, to, strlen(to) + 1);
  return name;
}

int tokens_open_file(const char *path, int64_t *size, struct error *e) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat st;
  if (fd < 0) {
    error_errno(e, ERROR_DATA, "cannot open token file %s", path);
    return -1;
  }
  if (fstat(fd, &st) != 0)
    error_errno(e, ERROR_DATA, "cannot examine %s", path);
  else if (!S_ISREG(st.st_mode))
    error_set(e, ERROR_DATA, "%s is %s, not a token file", path, S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
  else {
    *size = st.st_size;
    return fd;
  }
  close(fd);
  return -1;
}

static bool open_raw(struct tokens_file *f, int width, struct error *e) {
  f->width = width;
  f->tokens = f->size / width;
  if (f->size % width == 0) return tokens_take_offsets(f, e);
  return error_set(e, ERROR_DATA, "%s: %" PRId64 " bytes are no whole number of ids of %d bytes: byte %" PRId64 " begins a part of one",
                   f->path, f->size, width, f->tokens * width);
}

static bool unknown_format(const struct tokens_file *f, struct error *e) {
  error_set(e, ERROR_DATA, "%s: its name and first bytes do not tell its format", f->path);
  return error_hint(e, "set format of the source: raw-u16 or raw-u32 for bare ids (nanoGPT, OLMo, torchtitan), or megatron, llmc, npy");
}

static bool open_format(struct tokens_file *f, enum data_format format, struct error *e) {
  unsigned char bytes[8];
  const int64_t count = f->size < 8 ? f->size : 8;
  if (f->size == 0) return error_set(e, ERROR_DATA, "%s: an empty file: it has no tokens", f->path);
  if (!frame_read_at(f->fd, f->path, bytes, count, 0, e)) return false;
  /* A .npy with a header is read by that header, whatever ids one expects in a bare file. */
  if (tokens_is_npy(bytes, count)) return tokens_open_npy(f, e);
  switch (format) {
    case DATA_LLMC: return tokens_open_llmc(f, e);
    case DATA_NPY: return tokens_open_npy(f, e);
    case DATA_RAW_U16: return open_raw(f, 2, e);
    case DATA_RAW_U32: return open_raw(f, 4, e);
    default: return tokens_is_llmc(bytes, count) ? tokens_open_llmc(f, e) : unknown_format(f, e);
  }
}

/* Is there a .idx for this path? */
static bool has_index(const char *path) {
  if (tokens_ends_with(path, ".idx")) return true;
  char *name = tokens_sibling(path, ".bin", ".idx");
  const bool has = name && file_exists(name);
  free(name);
  return has;
}

static bool open_whole(struct tokens_file *f, const char *path, const struct data_source *source, struct error *e) {
  if (source->format == DATA_MEGATRON || (source->format == DATA_AUTO && has_index(path))) {
    if (!tokens_open_megatron(f, path, e)) return false;
  } else {
    f->path = strdup(path);
    if (!f->path) return error_set(e, ERROR_SYSTEM, "%s: out of memory", path);
    f->fd = tokens_open_file(path, &f->size, e);
    if (f->fd < 0 || !open_format(f, source->format, e)) return false;
  }
  if (f->tokens > 0) return true;
  return error_set(e, ERROR_DATA, "%s: it has no tokens", f->path);
}

bool tokens_open(struct tokens_file *f, const char *path, const struct data_source *source, struct error *e) {
  *f = (struct tokens_file){.fd = -1, .bos = source->bos, .eos = source->eos};
  if (source->bos >= 0 && source->bos == source->eos) {
    error_set(e, ERROR_DATA, "source %s: bos and eos are both %" PRId64, source->name, source->bos);
    return error_hint(e, "give only bos where the id begins documents, only eos where it ends them");
  }
  if (open_whole(f, path, source, e)) return true;
  tokens_close(f);
  return false;
}

void tokens_close(struct tokens_file *f) {
  if (f->fd >= 0) close(f->fd);
  free(f->path);
  free(f->ends);
  *f = (struct tokens_file){.fd = -1};
}

static bool bad_id(const struct tokens_file *f, int64_t token, int64_t limit, const char *id, struct error *e) {
  error_set(e, ERROR_DATA, "%s: token %" PRId64 " (byte %" PRId64 ") is id %s, the vocabulary has %" PRId64, f->path, token,
            f->data_at + token * f->width, id, limit);
  return error_hint(e, "set model.vocab_size to what the file's tokenizer has, or format to what the file is");
}

/* An id of any width as a signed number; beyond 2^63 it is negative, and refused like that. */
static int64_t decode_one(const struct tokens_file *f, const unsigned char *p) {
  switch (f->width) {
    case 1: return f->is_signed ? (int8_t)p[0] : p[0];
    case 2: return f->is_signed ? (int16_t)load_u16(p) : (int64_t)load_u16(p);
    case 4: return f->is_signed ? (int32_t)load_u32(p) : (int64_t)load_u32(p);
    default: return (int64_t)load_u64(p);
  }
}

bool tokens_decode(const struct tokens_file *f, const unsigned char *raw, int64_t first, int64_t count, int64_t limit,
                   int32_t *ids, struct error *e) {
  uint32_t most = 0; /* of the widths that have their own loop */
  if (f->width == 2 && !f->is_signed) {
    for (int64_t i = 0; i < count; i++) {
      const uint32_t id = load_u16(raw + 2 * i);
      most = id > most ? id : most;
      ids[i] = (int32_t)id;
    }
    if ((int64_t)most < limit) return true;
  } else if (f->width == 4) {
    for (int64_t i = 0; i < count; i++) {
      const uint32_t id = load_u32(raw + 4 * i);
      most = id > most ? id : most;
      ids[i] = (int32_t)id;
    }
    if ((int64_t)most < limit) return true;
  }
  for (int64_t i = 0; i < count; i++) {
    const unsigned char *p = raw + i * f->width;
    const int64_t id = decode_one(f, p);
    if (id < 0 || id >= limit) {
      char text[32];
      if (f->is_signed || f->width < 8)
        snprintf(text, sizeof text, "%" PRId64, id);
      else
        snprintf(text, sizeof text, "%" PRIu64, load_u64(p));
      return bad_id(f, first + i, limit, text, e);
    }
    ids[i] = (int32_t)id;
  }
  return true;
}
