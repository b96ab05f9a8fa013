#include "trainer/vocabulary.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>

#include "base/log.h"

struct stream *vocabulary_stream(const struct checkpoint *k, const struct config *c) {
  struct error none;
  char digest[HASH_TEXT];
  json_t *meta = json_loads(checkpoint_meta(k), 0, NULL);
  const char *trained = json_string_value(json_object_get(meta, "train_digest"));
  struct stream *s = trained ? stream_open(c->data.train, 0, &none) : NULL; /* an import has none */
  if (s) {
    hash_text(stream_info(s)->digest, digest);
    if (strcmp(digest, trained) != 0) {
      stream_close(s);
      s = NULL;
    }
  }
  json_decref(meta);
  return s;
}

int64_t vocabulary_rows(const struct stream_info *info, int64_t rows) {
  return info->tokenizer[0] && info->vocab_size < rows ? info->vocab_size : rows;
}

/* Those that an export keeps, with the tokenizer's name where it is fewer than all. */
static int64_t exported(const struct run *run, const struct checkpoint *k, char name[STREAM_TOKENIZER]) {
  const int64_t rows = run->config.model.shape.vocab_size;
  struct stream *s = vocabulary_stream(k, &run->config);
  if (!s) return rows;
  const int64_t kept = vocabulary_rows(stream_info(s), rows);
  memcpy(name, stream_info(s)->tokenizer, STREAM_TOKENIZER);
  stream_close(s);
  return kept;
}

bool vocabulary_set(struct run *run, const struct checkpoint *k, int64_t asked, struct error *e) {
  const int64_t rows = run->config.model.shape.vocab_size;
  char name[STREAM_TOKENIZER];
  if (asked > rows) return error_set(e, ERROR_USAGE, "--vocab-size %" PRId64 ": the model has %" PRId64 " rows", asked, rows);
  const int64_t kept = asked > 0 ? asked : exported(run, k, name);
  if (asked == 0 && kept < rows)
    log_info("tokenizer %s has %" PRId64 " ids, the model %" PRId64 " rows: those above are padding and have no part, as in an export; "
             "--vocab-size %" PRId64 " gives them theirs", name, kept, rows, rows);
  run->parity.vocabulary = kept < rows ? kept : 0;
  return model_set_parity(run->model, &run->parity, e);
}

void vocabulary_warn(const struct run *run, const struct checkpoint *k) {
  const int64_t rows = run->config.model.shape.vocab_size;
  char name[STREAM_TOKENIZER];
  const int64_t kept = exported(run, k, name);
  if (kept < rows)
    log_info("tokenizer %s has %" PRId64 " ids, the model %" PRId64 " rows: those above are padding and have their share of the probability, "
             "as in training; --vocab-size %" PRId64 " leaves them out, as an export does", name, kept, rows, kept);
}
