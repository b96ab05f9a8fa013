/* Records of one file: the whole of it, or its lines. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/corpus.h"
#include "data/corpus_bytes.h"

enum { STEP = 256 * 1024 }; /* bytes asked for at once */

struct corpus_reader {
  const struct corpus_file *file;
  struct corpus_bytes *bytes;
  int64_t most;
  /* Text that no record has used: text[at..have); searched has no line end in it. */
  char *text;
  int64_t at, have, room, searched;
  int64_t line; /* number of the line at `at`, from 1 */
  bool ended;   /* the file has no more text than this */
  bool done;
};

static bool fill(struct corpus_reader *r, struct error *e) {
  if (r->at > 0) {
    memmove(r->text, r->text + r->at, (size_t)(r->have - r->at));
    r->have -= r->at;
    r->searched -= r->at;
    r->at = 0;
  }
  if (r->room - r->have < STEP) {
    const int64_t room = r->room ? 2 * r->room : 2 * STEP;
    char *text = realloc(r->text, (size_t)room);
    if (!text) return error_set(e, ERROR_SYSTEM, "out of memory reading %s", r->file->path);
    r->text = text;
    r->room = room;
  }
  const int64_t got = corpus_bytes_read(r->bytes, r->text + r->have, STEP, e);
  if (got < 0) return false;
  r->have += got;
  r->ended = got < STEP;
  return true;
}

struct corpus_reader *corpus_reader_open(const struct corpus_file *file, int64_t most, struct error *e) {
  struct corpus_bytes *bytes = corpus_bytes_open(file->path, e);
  if (!bytes) return NULL;
  struct corpus_reader *r = calloc(1, sizeof *r);
  if (!r) {
    error_set(e, ERROR_SYSTEM, "out of memory reading %s", file->path);
    corpus_bytes_close(bytes);
    return NULL;
  }
  *r = (struct corpus_reader){.file = file, .bytes = bytes, .most = most, .line = 1};
  if (!fill(r, e)) {
    corpus_reader_close(r);
    return NULL;
  }
  if (r->have >= 3 && memcmp(r->text, "\xef\xbb\xbf", 3) == 0) r->at = r->searched = 3;
  return r;
}

static int too_long(const struct corpus_reader *r, struct error *e) {
  if (r->file->kind == CORPUS_LINES)
    error_set(e, ERROR_DATA, "%s:%" PRId64 ": the line has more than %" PRId64 " bytes", r->file->path, r->line, r->most);
  else
    error_set(e, ERROR_DATA, "%s: the document has more than %" PRId64 " bytes", r->file->path, r->most);
  /* A text that is not compressed says how much it needs. */
  const int64_t bytes = r->file->bytes;
  size_t stem = strlen(r->file->path);
  if (r->file->kind == CORPUS_DOCUMENT && corpus_compression_of(r->file->path, &stem) == CORPUS_PLAIN && bytes < INT64_MAX / 32)
    error_hint(e, "a record may have 1/32 of data.prepare_memory: give %" PRId64 ", or cut the text into several files", 32 * bytes);
  else
    error_hint(e, "a record may have 1/32 of data.prepare_memory: raise it, or take the record out");
  return -1;
}

static int next_document(struct corpus_reader *r, struct corpus_record *record, struct error *e) {
  if (r->done) return 0;
  while (!r->ended && r->have - r->at <= r->most)
    if (!fill(r, e)) return -1;
  if (r->have - r->at > r->most) return too_long(r, e);
  r->done = true;
  *record = (struct corpus_record){r->text + r->at, r->have - r->at, 0};
  r->at = r->have;
  return 1;
}

static bool is_blank(const char *text, int64_t length) {
  for (int64_t i = 0; i < length; i++)
    if (text[i] != ' ' && text[i] != '\t' && text[i] != '\r') return false;
  return true;
}

static int next_line(struct corpus_reader *r, struct corpus_record *record, struct error *e) {
  for (;;) {
    const char *newline = memchr(r->text + r->searched, '\n', (size_t)(r->have - r->searched));
    if (!newline) {
      r->searched = r->have;
      if (r->have - r->at > r->most) return too_long(r, e);
      if (!r->ended) {
        if (!fill(r, e)) return -1;
        continue;
      }
    }
    const int64_t begin = r->at, end = newline ? newline - r->text : r->have;
    if (end - begin > r->most) return too_long(r, e);
    *record = (struct corpus_record){r->text + begin, end - begin, r->line};
    if (record->length > 0 && record->bytes[record->length - 1] == '\r') record->length--;
    r->at = r->searched = newline ? end + 1 : end;
    r->line++;
    if (!is_blank(record->bytes, record->length)) return 1;
    if (!newline) return 0;
  }
}

int corpus_reader_next(struct corpus_reader *r, struct corpus_record *record, struct error *e) {
  return r->file->kind == CORPUS_LINES ? next_line(r, record, e) : next_document(r, record, e);
}

int64_t corpus_reader_position(const struct corpus_reader *r) { return corpus_bytes_position(r->bytes); }

void corpus_reader_close(struct corpus_reader *r) {
  if (!r) return;
  corpus_bytes_close(r->bytes);
  free(r->text);
  free(r);
}
