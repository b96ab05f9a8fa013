/* A token stream: what its frame says, what its tokens are. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/data.h"
#include "data/index_file.h"
#include "data/stream_file.h"
#include "trainer/inspect.h"

enum { PIECE = 1 << 16 };

/* Without --verify only this many tokens are counted. */
static const int64_t counted_at_most = (int64_t)1 << 26;

/* How often ids that could stand round documents do. */
struct marks {
  int64_t tokens, bos, eos, zero_bos; /* zero_bos: id 0 before a BOS */
  int64_t documents, begin, end, end_zero, longest, longest_number;
};

static void add_document(struct marks *m, const struct stream_info *info, const struct stream_document *d, int32_t first, int32_t last) {
  const int64_t length = d->end - d->first;
  m->documents++;
  m->begin += first == info->bos;
  m->end += last == info->eos;
  m->end_zero += last == 0;
  if (length <= m->longest) return;
  m->longest = length;
  m->longest_number = d->number;
}

/* The first n tokens, and the documents that end in them. */
static bool count_marks(const struct stream *s, int64_t n, int32_t *ids, struct marks *m, struct error *e) {
  const struct stream_info *info = stream_info(s);
  struct stream_document d;
  int32_t first = 0, before = -1;
  bool more = info->documents > 0;
  if (more && !stream_document(s, 0, &d, e)) return false;
  for (int64_t at = 0; at < n; at += PIECE) {
    const int64_t count = n - at < PIECE ? n - at : PIECE;
    if (!stream_read(s, at, count, ids, e)) return false;
    for (int64_t i = 0; i < count; i++) {
      m->bos += ids[i] == info->bos;
      m->eos += ids[i] == info->eos;
      m->zero_bos += ids[i] == info->bos && before == 0;
      before = ids[i];
    }
    while (more) {
      if (d.first >= at && d.first < at + count) first = ids[d.first - at];
      if (d.end > at + count) break;
      add_document(m, info, &d, first, ids[d.end - 1 - at]);
      more = d.number + 1 < info->documents;
      if (more && !stream_document(s, d.number + 1, &d, e)) return false;
    }
  }
  return true;
}

static void print_mark(const char *name, int32_t id, int64_t times, int64_t documents, const struct marks *m, const char *what) {
  if (id < 0)
    inspect_line(name, "none stands round documents");
  else
    inspect_line(name, "id %d, %" PRId64 " times; %" PRId64 " of %" PRId64 " documents %s with it", id, times, documents, m->documents, what);
}

static bool print_marks(const struct stream *s, bool all, struct error *e) {
  const struct stream_info *info = stream_info(s);
  const int64_t n = all || info->tokens < counted_at_most ? info->tokens : counted_at_most;
  struct marks m = {.tokens = n};
  int32_t *ids = malloc(PIECE * sizeof *ids);
  const bool good = ids ? count_marks(s, n, ids, &m, e) : error_set(e, ERROR_SYSTEM, "out of memory");
  free(ids);
  if (!good) return false;
  if (n < info->tokens) inspect_line("counted", "the first %" PRId64 " tokens; --verify counts all", n);
  if (m.documents > 0) inspect_line("longest", "%" PRId64 " tokens, document %" PRId64, m.longest, m.longest_number);
  print_mark("BOS", info->bos, m.bos, m.begin, &m, "begin");
  print_mark("EOS", info->eos, m.eos, m.end, &m, "end");
  if (info->eos != 0 && (2 * m.end_zero > m.documents || 2 * m.zero_bos > m.bos))
    inspect_line("WARNING", "id 0 ends %" PRId64 " of %" PRId64 " documents and stands before %" PRId64 " of %" PRId64
                 " BOS: some tools (DCLM's tokshuf) end documents with 0 whatever id 0 means; where that is so, index the token files with eos: 0",
                 m.end_zero, m.documents, m.zero_bos, m.bos);
  return true;
}

static void print_sources(const struct stream_info *info) {
  const char *line = info->sources;
  for (int i = 0; i < info->n_sources; i++) {
    const struct stream_source *source = &info->source[i];
    const int length = (int)strcspn(line, "\n");
    const char *note = line;
    for (int tabs = 0; note < line + length && tabs < 3; note++) tabs += *note == '\t';
    inspect_line(i == 0 ? "sources" : "", "%s: %" PRId64 " documents, %" PRId64 " tokens (%.2f %%)%s%.*s", source->name,
                 source->documents, source->tokens,
                 info->tokens > 0 ? 100 * (double)source->tokens / (double)info->tokens : 0, note < line + length ? ", " : "",
                 (int)(line + length - note), note);
    line += length + (line[length] == '\n');
  }
  const int length = (int)strcspn(info->settings, "\n");
  if (length > 0) inspect_line("prepared", "%.*s", length, info->settings);
}

static void print_kind(const char *path, const struct stream_info *info) {
  if (info->token_files > 0) {
    printf("%s: index, version %d\n", path, INDEX_VERSION);
    inspect_line("tokens", "%" PRId64 " in %" PRId64 " token file%s", info->tokens, info->token_files, info->token_files == 1 ? "" : "s");
    return;
  }
  printf("%s: token stream, version %d\n", path, STREAM_VERSION);
  inspect_line("tokens", "%" PRId64 " of %d bytes", info->tokens, info->vocab_size <= 65536 ? 2 : 4);
}

bool inspect_stream(const struct inspection *i, struct error *e) {
  struct stream *s = stream_open(i->path, 0, e);
  if (!s) return false;
  const struct stream_info *info = stream_info(s);
  char digest[HASH_TEXT];
  hash_text(info->digest, digest);
  bool good = true;
  print_kind(i->path, info);
  inspect_line("documents", "%" PRId64 ", %.1f tokens on average", info->documents,
               info->documents > 0 ? (double)info->tokens / (double)info->documents : 0);
  inspect_line("tokenizer", "%s, vocabulary %d", info->tokenizer[0] ? info->tokenizer : "not known", info->vocab_size);
  inspect_line("digest", "%s", digest);
  inspect_line("file", "%" PRId64 " bytes, %" PRId64 " block%s of %d KiB", file_size(i->path), info->blocks, info->blocks == 1 ? "" : "s",
               FRAME_BLOCK >> 10);
  print_sources(info);
  if (i->verify) {
    good = stream_verify(s, e);
    if (good) inspect_line("verified", "header, documents, every token and the digests of all blocks hold");
  }
  good = good && print_marks(s, i->verify, e);
  if (good && info->tokens > 0) good = inspect_sample(s, i, e);
  stream_close(s);
  return good;
}
