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

enum { PIECE = 1 << 16, SAMPLE_TOKENS = 240 };

/* Without --verify only this many tokens are counted. */
static const int64_t counted_at_most = (int64_t)1 << 26;

static bool is_bytes(const struct stream_info *info) { return strcmp(info->tokenizer, "bytes") == 0; }

static bool count_marks(const struct stream *s, bool all, struct error *e) {
  const struct stream_info *info = stream_info(s);
  const int64_t n = all || info->tokens < counted_at_most ? info->tokens : counted_at_most;
  int32_t *ids = malloc(PIECE * sizeof *ids);
  if (!ids) return error_set(e, ERROR_SYSTEM, "out of memory");
  int64_t begins = 0, ends = 0;
  bool good = true;
  for (int64_t at = 0; good && at < n; at += PIECE) {
    const int64_t count = n - at < PIECE ? n - at : PIECE;
    good = stream_read(s, at, count, ids, e);
    for (int64_t i = 0; good && i < count; i++) {
      begins += ids[i] == TOKENIZER_BYTES_BOS;
      ends += ids[i] == TOKENIZER_BYTES_EOS;
    }
  }
  free(ids);
  if (!good) return false;
  char where[64] = "";
  if (n < info->tokens) snprintf(where, sizeof where, " in the first %" PRId64 " tokens", n);
  inspect_line("BOS, EOS", "%" PRId64 ", %" PRId64 "%s (ids %d, %d)", begins, ends, where, TOKENIZER_BYTES_BOS,
               TOKENIZER_BYTES_EOS);
  return true;
}

/* Bytes that a terminal would act upon are shown as \xNN, as is what is not UTF-8. */
static void print_text(const unsigned char *text, int n) {
  printf("  | ");
  for (int i = 0; i < n;) {
    const int tail = text[i] >= 0xF0 ? 3 : text[i] >= 0xE0 ? 2 : text[i] >= 0xC2 ? 1 : 0;
    bool whole = text[i] >= 0xC2 && text[i] < 0xF5 && i + tail < n;
    for (int j = 1; whole && j <= tail; j++) whole = (text[i + j] & 0xC0) == 0x80;
    if (text[i] == '\n') {
      printf("\n  | ");
    } else if (whole) {
      printf("%.*s", tail + 1, (const char *)text + i);
      i += tail;
    } else if ((text[i] >= ' ' && text[i] < 0x7F) || text[i] == '\t') {
      putchar(text[i]);
    } else {
      printf("\\x%02x", text[i]);
    }
    i++;
  }
  putchar('\n');
}

/* The tokenizer that the text is shown by; *t NULL: ids are shown. */
static bool open_tokenizer(const struct inspection *i, const struct stream *s, struct tokenizer **t, struct error *e) {
  const struct stream_info *info = stream_info(s);
  *t = NULL;
  if (!i->tokenizer && strcmp(info->tokenizer, "bytes") != 0) return true;
  *t = tokenizer_open(i->tokenizer ? i->tokenizer : "bytes", e);
  if (!*t) return false;
  const char *name = tokenizer_info(*t)->name;
  if (!info->tokenizer[0] || strcmp(name, info->tokenizer) == 0) return true;
  tokenizer_close(*t);
  *t = NULL;
  return error_set(e, ERROR_DATA, "%s was made with tokenizer %s, --tokenizer is %s", stream_path(s), info->tokenizer, name);
}

static bool print_ids(const int32_t *ids, int64_t n) {
  for (int64_t i = 0; i < n; i++) printf("%s%d", i % 16 ? " " : i ? "\n  | " : "  | ", ids[i]);
  putchar('\n');
  return true;
}

static bool print_tokens(const struct tokenizer *t, const int32_t *ids, int64_t n, struct error *e) {
  int64_t used = 0, bytes;
  for (int64_t i = 0; i < n; i++) used += (tokenizer_token(t, ids[i], &bytes), bytes);
  char *text = malloc((size_t)used + 1);
  if (!text) return error_set(e, ERROR_SYSTEM, "out of memory");
  used = 0;
  for (int64_t i = 0; i < n; i++) {
    const char *token = tokenizer_token(t, ids[i], &bytes);
    if (token) memcpy(text + used, token, (size_t)bytes);
    used += bytes;
  }
  print_text((const unsigned char *)text, (int)used);
  free(text);
  return true;
}

static bool print_sample(const struct stream *s, const struct inspection *i, struct error *e) {
  const struct stream_info *info = stream_info(s);
  if (i->sample >= info->tokens)
    return error_set(e, ERROR_USAGE, "--sample %" PRId64 ": %s has tokens 0 to %" PRId64, i->sample, stream_path(s),
                     info->tokens - 1);
  const int64_t left = info->tokens - i->sample, n = left < SAMPLE_TOKENS ? left : SAMPLE_TOKENS;
  int32_t ids[SAMPLE_TOKENS];
  struct tokenizer *t;
  if (!stream_read(s, i->sample, n, ids, e) || !open_tokenizer(i, s, &t, e)) return false;
  printf("  tokens %" PRId64 " to %" PRId64 "\n", i->sample, i->sample + n - 1);
  const bool good = t ? print_tokens(t, ids, n, e) : print_ids(ids, n);
  tokenizer_close(t);
  return good;
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
  if (good && is_bytes(info)) good = count_marks(s, i->verify, e);
  if (good && info->tokens > 0) good = print_sample(s, i, e);
  stream_close(s);
  return good;
}
