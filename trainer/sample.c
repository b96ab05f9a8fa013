#include "trainer/sample.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"

struct candidate {
  double weight;
  int32_t id;
};

static int likelier(const void *a, const void *b) {
  const struct candidate *x = a, *y = b;
  if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
  return (x->id > y->id) - (x->id < y->id);
}

/* A uniform in [0, 1) for draw number `position`. */
static double uniform(uint64_t seed, int64_t position) {
  struct philox_block b = philox4x32_10(seed, philox_counter(0, (uint64_t)position, 0, 0, 0));
  return (double)b.word[0] / 4294967296.0;
}

/* Only ids that are tokens of `t`: the model may have more rows (padding), and a vocabulary holes. */
static int32_t choose(const float *logits, int64_t rows, const struct tokenizer *t, const struct sampling *s, int64_t position,
                      struct candidate *c) {
  double largest = -INFINITY, total = 0;
  int64_t vocab = 0, bytes;
  for (int64_t i = 0; i < rows; i++)
    if (tokenizer_token(t, (int32_t)i, &bytes)) c[vocab++].id = (int32_t)i;
  for (int64_t i = 0; i < vocab; i++)
    if ((double)logits[c[i].id] > largest) largest = (double)logits[c[i].id];
  for (int64_t i = 0; i < vocab; i++) {
    double distance = (double)logits[c[i].id] - largest;
    c[i].weight = s->temperature > 0 ? exp(distance / s->temperature) : distance == 0;
    total += c[i].weight;
  }
  qsort(c, (size_t)vocab, sizeof *c, likelier);
  if (s->temperature <= 0) return c[0].id;

  double kept = 0;
  int64_t n = 0;
  while (n < vocab && (n == 0 || kept < s->top_p * total)) kept += c[n++].weight;
  double left = uniform(s->seed, position) * kept;
  for (int64_t i = 0; i < n; i++) {
    left -= c[i].weight;
    if (left < 0) return c[i].id;
  }
  return c[n - 1].id;
}

/* A special has no text, and a prompt's id that is no token. */
static void write_token(const struct tokenizer *t, FILE *out, int32_t id) {
  int64_t bytes;
  const char *text = tokenizer_token(t, id, &bytes);
  if (text && !tokenizer_is_special(t, id)) fwrite(text, 1, (size_t)bytes, out);
  fflush(out);
}

/* Logits after ids[0..n): the last seq_len of them are the context. */
static bool next_logits(struct run *run, const int32_t *ids, int64_t n, float *logits, struct error *e) {
  const struct kernels *k = run->device->k;
  const int64_t seq = run->config.train.seq_len, vocab = run->config.model.shape.vocab_size;
  const int64_t used = n < seq ? n : seq;
  memset(run->host_inputs, 0, (size_t)run->tokens * sizeof(int32_t));
  memcpy(run->host_inputs, ids + (n - used), (size_t)used * sizeof(int32_t));
  for (int64_t i = 0; i < run->tokens; i++) run->host_targets[i] = -1;
  const struct micro_batch b = run_upload(run, run->host_inputs, run->host_targets, NULL);
  model_logits(run->model, &b, used - 1, run->logits);
  k->download(run->device, logits, run->logits, (size_t)vocab * sizeof(float));
  if (!k->synchronize(run->device, e)) return false;
  for (int64_t i = 0; i < vocab; i++)
    if (!isfinite(logits[i]))
      return error_set(e, ERROR_CHECKPOINT, "the logit of token %" PRId64 " is %g after %" PRId64 " tokens", i, (double)logits[i], n);
  return true;
}

/* What the text begins with, as ids; room for `more` after them. */
static bool begin(const struct run *run, const struct tokenizer *t, const char *prompt, int64_t more, struct tokenizer_ids *ids, struct error *e) {
  const struct tokenizer_info *info = tokenizer_info(t);
  const int64_t vocab = run->config.model.shape.vocab_size;
  struct tokenizer_scratch *s = tokenizer_scratch_open(t, e);
  bool good = s && tokenizer_encode(t, s, prompt, (int64_t)strlen(prompt), TOKENIZER_PLAIN, ids, e);
  tokenizer_scratch_close(s);
  if (!good) return error_context(e, "--prompt");
  const int32_t first = run->config.data.bos && info->bos >= 0 ? info->bos : ids->n == 0 ? info->eos : -1;
  if (ids->n == 0 && first < 0) return error_set(e, ERROR_USAGE, "--prompt: tokenizer %s has neither BOS nor EOS, so a text must be given", info->name);
  int32_t *id = realloc(ids->id, (size_t)(ids->n + more + 1) * sizeof *id);
  if (!id) return error_set(e, ERROR_SYSTEM, "out of memory");
  ids->id = id;
  if (first >= 0) {
    memmove(id + 1, id, (size_t)ids->n * sizeof *id);
    id[0] = first;
    ids->n++;
  }
  for (int64_t i = 0; i < ids->n; i++)
    if (id[i] >= vocab)
      return error_set(e, ERROR_USAGE, "--prompt has the token %d of tokenizer %s, the model's vocabulary ends at %" PRId64, id[i], info->name, vocab - 1);
  return true;
}

bool sample_text(struct run *run, const struct tokenizer *t, const char *prompt, const struct sampling *s, FILE *out, struct error *e) {
  const int64_t vocab = run->config.model.shape.vocab_size;
  struct tokenizer_ids text = {0};
  float *logits = malloc((size_t)vocab * sizeof *logits);
  struct candidate *candidates = malloc((size_t)vocab * sizeof *candidates);
  bool good = (logits && candidates) || error_set(e, ERROR_SYSTEM, "out of memory");
  good = good && begin(run, t, prompt, s->tokens, &text, e);
  for (int64_t i = 0; good && i < text.n; i++) write_token(t, out, text.id[i]);
  for (int64_t i = 0; good && i < s->tokens; i++) {
    good = next_logits(run, text.id, text.n, logits, e);
    if (!good) break;
    int32_t id = choose(logits, vocab, t, s, i, candidates);
    if (id == tokenizer_info(t)->eos) break;
    write_token(t, out, id);
    text.id[text.n++] = id;
  }
  tokenizer_ids_free(&text);
  free(logits);
  free(candidates);
  return good;
}
