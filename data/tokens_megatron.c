/* Megatron-LM's indexed dataset: NAME.bin holds ids and nothing else, NAME.idx says where sequences
 * and documents lie:
 *
 *   "MMIDIDX\0\0" | u64 version 1 | u8 type of ids | u64 sequences S | u64 document entries D
 *   | i32[S] lengths, in ids | i64[S] byte offsets in the .bin | i64[D] documents, as sequence numbers
 *
 * The document entries begin with 0 and end with S.  Nothing after the header is aligned. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "data/frame.h"
#include "data/little_endian.h"
#include "data/tokens_parts.h"

enum { IDX_HEADER = 34, IDX_LENGTHS_AT = 34 };

static const struct {
  const char *name;
  int width; /* 0: no ids */
  bool is_signed;
} types[] = {[1] = {"uint8", 1, false}, {"int8", 1, true}, {"int16", 2, true}, {"int32", 4, true}, {"int64", 8, true},
             {"float64", 0, false}, {"float32", 0, false}, {"uint16", 2, false}};
enum { TYPES = sizeof types / sizeof *types };

struct idx {
  const char *path;
  int fd;
  int64_t size, sequences, entries;
};

/* Reads an array of the .idx from its beginning to its end, piece by piece. */
struct array {
  int64_t at; /* byte of entry 0 */
  int width;
  int64_t count, begin, filled; /* the buffer holds entries [begin, begin + filled) */
  unsigned char buffer[1 << 15];
};

static bool array_get(const struct idx *x, struct array *a, int64_t i, int64_t *value, struct error *e) {
  if (i >= a->begin + a->filled) {
    const int64_t most = (int64_t)sizeof a->buffer / a->width;
    a->begin = i;
    a->filled = a->count - i < most ? a->count - i : most;
    if (!frame_read_at(x->fd, x->path, a->buffer, a->filled * a->width, a->at + i * a->width, e)) return false;
  }
  const unsigned char *p = a->buffer + (i - a->begin) * a->width;
  *value = a->width == 4 ? (int32_t)load_u32(p) : (int64_t)load_u64(p);
  return true;
}

static bool read_header(struct idx *x, struct tokens_file *f, struct error *e) {
  unsigned char h[IDX_HEADER];
  if (x->size < IDX_HEADER)
    return error_set(e, ERROR_DATA, "%s: truncated: %" PRId64 " bytes, its header alone has %d", x->path, x->size, IDX_HEADER);
  if (!frame_read_at(x->fd, x->path, h, IDX_HEADER, 0, e)) return false;
  if (memcmp(h, "MMIDIDX\0\0", 9) != 0) return error_set(e, ERROR_DATA, "%s: byte 0 does not begin an index of Megatron-LM", x->path);
  if (load_u64(h + 9) != 1)
    return error_set(e, ERROR_DATA, "%s: version %" PRIu64 " (byte 9), only 1 is known", x->path, load_u64(h + 9));
  const int type = h[17];
  if (type < 1 || type >= TYPES) return error_set(e, ERROR_DATA, "%s: unknown type of ids %d (byte 17)", x->path, type);
  if (types[type].width == 0) return error_set(e, ERROR_DATA, "%s: its ids are %s (byte 17), not integers", x->path, types[type].name);
  f->width = types[type].width;
  f->is_signed = types[type].is_signed;
  const uint64_t sequences = load_u64(h + 18), entries = load_u64(h + 26), room = (uint64_t)x->size;
  const uint64_t need = sequences > room || entries > room ? UINT64_MAX : IDX_HEADER + 12 * sequences + 8 * entries;
  if (need > room)
    return error_set(e, ERROR_DATA, "%s: truncated: %" PRIu64 " sequences (byte 18) and %" PRIu64 " document entries (byte 26) do not fit its %" PRId64 " bytes",
                     x->path, sequences, entries, x->size);
  if (sequences > 0 && room == need + sequences)
    return error_set(e, ERROR_DATA, "%s: a multimodal index (a mode for each sequence from byte %" PRIu64 " on): only text is read", x->path, need);
  if (need < room)
    return error_set(e, ERROR_DATA, "%s: %" PRIu64 " bytes too many, from byte %" PRIu64 " on", x->path, room - need, need);
  x->sequences = (int64_t)sequences;
  x->entries = (int64_t)entries;
  return true;
}

/* Where a sequence lies: right after the one before it. */
static bool check_sequence(const struct idx *x, const struct tokens_file *f, int64_t i, int64_t length, int64_t offset, struct error *e) {
  const int64_t before = f->tokens * f->width, have = f->size - before;
  const int64_t length_at = IDX_LENGTHS_AT + 4 * i, offset_at = IDX_LENGTHS_AT + 4 * x->sequences + 8 * i;
  if (length < 0)
    return error_set(e, ERROR_DATA, "%s: sequence %" PRId64 " has length %" PRId64 " (byte %" PRId64 ")", x->path, i, length, length_at);
  if (offset < 0 || offset > f->size)
    return error_set(e, ERROR_DATA, "%s: sequence %" PRId64 " begins at byte %" PRId64 " (byte %" PRId64 "), %s has %" PRId64, x->path, i, offset,
                     offset_at, f->path, f->size);
  if (offset != before)
    return error_set(e, ERROR_DATA, "%s: sequence %" PRId64 " begins at byte %" PRId64 " (byte %" PRId64 "), the one before it ends at %" PRId64 ": they %s",
                     x->path, i, offset, offset_at, before, offset < before ? "overlap" : "leave a gap");
  if (length > have / f->width)
    return error_set(e, ERROR_DATA, "%s: sequence %" PRId64 " of %" PRId64 " ids (byte %" PRId64 ") ends beyond the %" PRId64 " bytes of %s", x->path, i,
                     length, length_at, f->size, f->path);
  return true;
}

/* Document entry i says that a document ends before sequence `until`; it may be at `previous` or later. */
static bool check_entry(const struct idx *x, int64_t i, int64_t until, int64_t previous, struct error *e) {
  const int64_t at = IDX_LENGTHS_AT + 12 * x->sequences + 8 * i;
  if (i == 0 && until != 0)
    return error_set(e, ERROR_DATA, "%s: the document index begins with %" PRId64 " (byte %" PRId64 "), not 0", x->path, until, at);
  if (until < previous)
    return error_set(e, ERROR_DATA, "%s: document index entry %" PRId64 " is %" PRId64 " (byte %" PRId64 "), after %" PRId64 ": it is not ascending",
                     x->path, i, until, at, previous);
  if (until > x->sequences || (i == x->entries - 1 && until != x->sequences))
    return error_set(e, ERROR_DATA, "%s: document index entry %" PRId64 " is %" PRId64 " (byte %" PRId64 "), there are %" PRId64 " sequences", x->path, i,
                     until, at, x->sequences);
  return true;
}

static bool read_documents(const struct idx *x, struct tokens_file *f, struct array a[3], struct error *e) {
  if (x->entries < 1) return error_set(e, ERROR_DATA, "%s: the document index (byte 26) has no entry", x->path);
  f->documents = x->entries - 1;
  f->ends = malloc((size_t)f->documents * sizeof *f->ends + 1);
  if (!f->ends) return error_set(e, ERROR_SYSTEM, "%s: out of memory for %" PRId64 " documents", x->path, f->documents);
  a[0] = (struct array){.at = IDX_LENGTHS_AT, .width = 4, .count = x->sequences};
  a[1] = (struct array){.at = IDX_LENGTHS_AT + 4 * x->sequences, .width = 8, .count = x->sequences};
  a[2] = (struct array){.at = IDX_LENGTHS_AT + 12 * x->sequences, .width = 8, .count = x->entries};
  int64_t sequence = 0;
  for (int64_t i = 0, previous = 0; i < x->entries; i++) {
    int64_t until;
    if (!array_get(x, &a[2], i, &until, e) || !check_entry(x, i, until, previous, e)) return false;
    for (; sequence < until; sequence++) {
      int64_t length, offset;
      if (!array_get(x, &a[0], sequence, &length, e) || !array_get(x, &a[1], sequence, &offset, e) ||
          !check_sequence(x, f, sequence, length, offset, e))
        return false;
      f->tokens += length;
    }
    if (i > 0) f->ends[i - 1] = f->tokens;
    previous = until;
  }
  if (f->tokens * f->width == f->size) return true;
  return error_set(e, ERROR_DATA, "%s: its lengths sum to %" PRId64 " ids of %d bytes, %s has %" PRId64 " bytes", x->path, f->tokens, f->width,
                   f->path, f->size);
}

bool tokens_open_megatron(struct tokens_file *f, const char *path, struct error *e) {
  const char *ending = tokens_ends_with(path, ".idx") ? ".idx" : ".bin";
  char *index = tokens_sibling(path, ending, ".idx");
  struct array *arrays = malloc(3 * sizeof *arrays);
  f->path = tokens_sibling(path, ending, ".bin");
  struct idx x = {.path = index, .fd = -1};
  bool ok = (index && f->path && arrays) || error_set(e, ERROR_SYSTEM, "%s: out of memory", path);
  ok = ok && (x.fd = tokens_open_file(index, &x.size, e)) >= 0 && (f->fd = tokens_open_file(f->path, &f->size, e)) >= 0;
  ok = ok && read_header(&x, f, e) && read_documents(&x, f, arrays, e);
  f->beside = x.size;
  if (x.fd >= 0) close(x.fd);
  free(arrays);
  free(index);
  return ok;
}
