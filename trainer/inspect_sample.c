/* A stream's tokens as text: from a token on, or a sample of the order, document by document. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/data.h"
#include "trainer/inspect.h"

enum { SHOWN_TOKENS = 240 };

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
  if (!info->tokenizer[0] || strcmp(tokenizer_info(*t)->name, info->tokenizer) == 0) return true;
  error_set(e, ERROR_DATA, "%s was made with tokenizer %s, --tokenizer is %s", stream_path(s), info->tokenizer, tokenizer_info(*t)->name);
  tokenizer_close(*t);
  *t = NULL;
  return false;
}

static void print_ids(const int32_t *ids, int64_t n) {
  for (int64_t i = 0; i < n; i++) printf("%s%d", i % 16 ? " " : i ? "\n  # " : "  # ", ids[i]);
  putchar('\n');
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

/* Token `first` and those after it. */
static bool show_tokens(const struct stream *s, int64_t first, const struct tokenizer *t, struct error *e) {
  const int64_t left = stream_info(s)->tokens - first, n = left < SHOWN_TOKENS ? left : SHOWN_TOKENS;
  int32_t ids[SHOWN_TOKENS];
  if (left <= 0)
    return error_set(e, ERROR_USAGE, "--token %" PRId64 ": %s has tokens 0 to %" PRId64, first, stream_path(s), stream_info(s)->tokens - 1);
  if (!stream_read(s, first, n, ids, e)) return false;
  printf("  tokens %" PRId64 " to %" PRId64 "\n", first, first + n - 1);
  if (t) return print_tokens(t, ids, n, e);
  print_ids(ids, n);
  return true;
}

/* Tokens [first, end) of the stream, a part for each document in them. */
static bool show_documents(const struct stream *s, int64_t first, int64_t end, const int32_t *ids, const struct tokenizer *t,
                           struct error *e) {
  struct stream_document d;
  bool good = stream_document_at(s, first, &d, e);
  while (good) {
    const int64_t from = d.first > first ? d.first : first, to = d.end < end ? d.end : end;
    printf("  -- document %" PRId64 " (%s), %s%s: its tokens %" PRId64 " to %" PRId64 " of %" PRId64 "\n", d.number,
           stream_info(s)->source[d.source].name, from == d.first ? "from its beginning" : "begun before",
           to == d.end ? " to its end" : ", cut", from - d.first, to - 1 - d.first, d.end - d.first);
    print_ids(ids + (from - first), to - from);
    if (t && !print_tokens(t, ids + (from - first), to - from, e)) return false;
    if (d.end >= end) return true;
    good = stream_document(s, d.number + 1, &d, e);
  }
  return false;
}

/* Sample `sample` of the order: its inputs and last target. */
static bool show_sample(const struct stream *s, const struct inspection *i, const struct tokenizer *t, struct error *e) {
  struct data_order o;
  if (!data_order_make(&o, s, i->seq_len, (uint64_t)i->seed, e)) return false;
  o.shuffle_samples = i->shuffle_samples;
  const int64_t n = i->seq_len + 1, first = data_order_position(&o, i->sample) * i->seq_len, epoch = data_order_epoch_samples(&o);
  int32_t *ids = malloc((size_t)n * sizeof *ids);
  bool good = (ids && stream_read(s, first, n, ids, e)) || (!ids && error_set(e, ERROR_SYSTEM, "out of memory"));
  if (good) {
    printf("  sample %" PRId64 " of %" PRId64 " tokens, seed %" PRId64 ": epoch %" PRId64 " (of %" PRId64 " samples), tokens %" PRId64 " to %" PRId64
           ", the last one a target alone\n", i->sample, i->seq_len, i->seed, i->sample / epoch, epoch, first, first + n - 1);
    good = show_documents(s, first, first + n, ids, t, e);
  }
  free(ids);
  return good;
}

bool inspect_sample(const struct stream *s, const struct inspection *i, struct error *e) {
  struct tokenizer *t;
  if (i->sample >= 0 && i->seq_len == 0) {
    error_set(e, ERROR_USAGE, "--sample %" PRId64 ": of which length? --seq-len says it", i->sample);
    return error_hint(e, "--token N shows the text from token N on");
  }
  if (!open_tokenizer(i, s, &t, e)) return false;
  const bool good = i->sample >= 0 ? show_sample(s, i, t, e) : show_tokens(s, i->token, t, e);
  tokenizer_close(t);
  return good;
}
