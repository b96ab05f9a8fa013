/* The bytes of a file of text, decompressed. */
#include "data/corpus_bytes.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

enum { INPUT = 128 * 1024 };

struct corpus_bytes {
  int fd;
  const char *path;
  enum corpus_compression compression;
  int64_t position;
  /* Compressed input that is not used yet: input[at..have). */
  unsigned char *input;
  size_t at, have;
  bool inside; /* a member or frame has begun and has not ended */
  int64_t parts; /* members or frames that have ended */
  z_stream gzip;
  bool gzip_made;
  ZSTD_DStream *zstd;
};

static const struct {
  const char *ending;
  enum corpus_compression compression;
} endings[] = {{".gz", CORPUS_GZIP}, {".zst", CORPUS_ZSTD}};

enum corpus_compression corpus_compression_of(const char *name, size_t *length) {
  for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
    const size_t n = strlen(endings[i].ending);
    if (*length > n && strncasecmp(name + *length - n, endings[i].ending, n) == 0) {
      *length -= n;
      return endings[i].compression;
    }
  }
  return CORPUS_PLAIN;
}

static bool make_decoder(struct corpus_bytes *b) {
  if (b->compression == CORPUS_PLAIN) return true;
  b->input = malloc(INPUT);
  if (!b->input) return false;
  if (b->compression == CORPUS_ZSTD) return (b->zstd = ZSTD_createDStream()) != NULL;
  b->gzip_made = inflateInit2(&b->gzip, 15 + 16) == Z_OK;
  return b->gzip_made;
}

struct corpus_bytes *corpus_bytes_open(const char *path, struct error *e) {
  struct corpus_bytes *b = calloc(1, sizeof *b);
  if (!b) {
    error_set(e, ERROR_SYSTEM, "out of memory reading %s", path);
    return NULL;
  }
  size_t length = strlen(path);
  b->path = path;
  b->compression = corpus_compression_of(path, &length);
  b->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat st;
  if (b->fd < 0 || fstat(b->fd, &st) != 0) {
    error_errno(e, ERROR_DATA, "cannot open %s", path);
  } else if (!S_ISREG(st.st_mode)) {
    error_set(e, ERROR_DATA, "%s is not a regular file", path);
  } else if (!make_decoder(b)) {
    error_set(e, ERROR_SYSTEM, "out of memory decompressing %s", path);
  } else {
    (void)posix_fadvise(b->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    return b;
  }
  corpus_bytes_close(b);
  return NULL;
}

/* Fewer than `room` only at the end of the file; -1 with *e filled. */
static int64_t read_file(struct corpus_bytes *b, void *buffer, int64_t room, struct error *e) {
  int64_t done = 0;
  while (done < room) {
    ssize_t got = read(b->fd, (char *)buffer + done, (size_t)(room - done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      error_errno(e, ERROR_DATA, "cannot read %s", b->path);
      return -1;
    }
    if (got == 0) break;
    done += got;
  }
  b->position += done;
  return done;
}

static bool damaged(const struct corpus_bytes *b, const char *what, struct error *e) {
  static const char *const names[] = {[CORPUS_GZIP] = "gzip", [CORPUS_ZSTD] = "Zstandard"};
  return error_set(e, ERROR_DATA, "%s: damaged %s data: %s", b->path, names[b->compression], what);
}

/* At least `need` bytes of input, or all that is left. */
static bool refill(struct corpus_bytes *b, size_t need, struct error *e) {
  if (b->have - b->at >= need) return true;
  memmove(b->input, b->input + b->at, b->have - b->at);
  b->have -= b->at;
  b->at = 0;
  int64_t got = read_file(b, b->input + b->have, (int64_t)(INPUT - b->have), e);
  if (got < 0) return false;
  b->have += (size_t)got;
  return true;
}

/* What follows must be a member, or zeros to the end (as tapes and gzip itself allow). */
static bool begin_member(struct corpus_bytes *b, struct error *e) {
  if (!refill(b, 2, e)) return false;
  const unsigned char *in = b->input + b->at;
  if (b->have - b->at >= 2 && in[0] == 0x1f && in[1] == 0x8b) {
    b->inside = true;
    return inflateReset(&b->gzip) == Z_OK || damaged(b, "the decoder refuses to go on", e);
  }
  if (b->parts == 0) return error_set(e, ERROR_DATA, "%s is not gzip data, as its name says", b->path);
  while (b->have > b->at) {
    if (b->input[b->at] != 0) return damaged(b, "other bytes after its last member", e);
    b->at++;
    if (!refill(b, 1, e)) return false;
  }
  return true;
}

/* One step of decoding into buffer[*done..room). */
static bool decode_gzip(struct corpus_bytes *b, unsigned char *buffer, int64_t room, int64_t *done, struct error *e) {
  if (!b->inside) {
    if (!begin_member(b, e)) return false;
    if (!b->inside) return true;
  }
  const int64_t left = room - *done < 1 << 30 ? room - *done : 1 << 30;
  b->gzip.next_in = b->input + b->at;
  b->gzip.avail_in = (unsigned)(b->have - b->at);
  b->gzip.next_out = buffer + *done;
  b->gzip.avail_out = (unsigned)left;
  const int result = inflate(&b->gzip, Z_NO_FLUSH);
  b->at = b->have - b->gzip.avail_in;
  *done += left - b->gzip.avail_out;
  if (result == Z_STREAM_END) {
    b->inside = false;
    b->parts++;
  } else if (result == Z_MEM_ERROR) {
    return error_set(e, ERROR_SYSTEM, "out of memory decompressing %s", b->path);
  } else if (result != Z_OK && result != Z_BUF_ERROR) {
    return damaged(b, b->gzip.msg ? b->gzip.msg : "no deflate data", e);
  }
  return true;
}

static bool decode_zstd(struct corpus_bytes *b, unsigned char *buffer, int64_t room, int64_t *done, struct error *e) {
  static const unsigned char magic[] = {0x28, 0xb5, 0x2f, 0xfd}, skippable[] = {0x2a, 0x4d, 0x18};
  if (!b->inside) {
    if (!refill(b, 4, e)) return false;
    const unsigned char *in = b->input + b->at;
    const bool frame = b->have - b->at >= 4 && (memcmp(in, magic, 4) == 0 || ((in[0] & 0xf0) == 0x50 && memcmp(in + 1, skippable, 3) == 0));
    if (!frame && b->parts == 0) return error_set(e, ERROR_DATA, "%s is not Zstandard data, as its name says", b->path);
    if (!frame) return damaged(b, "other bytes after its last frame", e);
    ZSTD_initDStream(b->zstd);
    b->inside = true;
  }
  ZSTD_inBuffer in = {b->input, b->have, b->at};
  ZSTD_outBuffer out = {buffer, (size_t)room, (size_t)*done};
  const size_t result = ZSTD_decompressStream(b->zstd, &out, &in);
  b->at = in.pos;
  *done = (int64_t)out.pos;
  if (ZSTD_isError(result) && ZSTD_getErrorCode(result) == ZSTD_error_frameParameter_windowTooLarge) {
    error_set(e, ERROR_DATA, "%s: its Zstandard window is larger than 128 MiB", b->path);
    return error_hint(e, "compress it again without --long");
  }
  if (ZSTD_isError(result)) return damaged(b, ZSTD_getErrorName(result), e);
  if (result == 0) {
    b->inside = false;
    b->parts++;
  }
  return true;
}

int64_t corpus_bytes_read(struct corpus_bytes *b, void *buffer, int64_t room, struct error *e) {
  if (b->compression == CORPUS_PLAIN) return read_file(b, buffer, room, e);
  int64_t done = 0;
  while (done < room) {
    if (!refill(b, 1, e)) return -1;
    const bool ended = b->have == b->at;
    if (ended && b->position == 0) {
      error_set(e, ERROR_DATA, "%s has no bytes, not even those of a compressed empty text", b->path);
      error_hint(e, "copy it again or take it away");
      return -1;
    }
    if (ended && !b->inside) break;
    /* At the end of the input a decoder may still hold text. */
    const int64_t before = done;
    const bool ok = b->compression == CORPUS_GZIP ? decode_gzip(b, buffer, room, &done, e) : decode_zstd(b, buffer, room, &done, e);
    if (!ok) return -1;
    if (ended && b->inside && done == before) {
      damaged(b, "it ends too early", e);
      return -1;
    }
  }
  return done;
}

int64_t corpus_bytes_position(const struct corpus_bytes *b) { return b->position; }

void corpus_bytes_close(struct corpus_bytes *b) {
  if (!b) return;
  if (b->gzip_made) inflateEnd(&b->gzip);
  ZSTD_freeDStream(b->zstd);
  if (b->fd >= 0) close(b->fd);
  free(b->input);
  free(b);
}
