#include "trainer/score.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/record.h"
#include "trainer/state.h"

/* ---- requests ----------------------------------------------------------------- */

static bool take_ids(const json_t *list, const char *key, int64_t vocab_size, int32_t *to, struct error *e) {
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *id = json_array_get(list, i);
    if (!json_is_integer(id)) return error_set(e, ERROR_DATA, "%s[%zu] is no integer", key, i);
    const int64_t value = json_integer_value(id);
    if (value < 0 || value >= vocab_size)
      return error_set(e, ERROR_DATA, "%s[%zu] is %" PRId64 ", the model has ids 0 to %" PRId64, key, i, value, vocab_size - 1);
    to[i] = (int32_t)value;
  }
  return true;
}

static bool take_request(const json_t *o, int64_t vocab_size, int64_t longest, struct score_request *q, struct error *e) {
  const json_t *context = json_object_get(o, "context"), *continuation = json_object_get(o, "continuation");
  if (!json_is_array(context) || !json_is_array(continuation))
    return error_set(e, ERROR_DATA, "an object with the lists context and continuation is wanted");
  q->n_context = (int64_t)json_array_size(context);
  q->n_ids = q->n_context + (int64_t)json_array_size(continuation);
  if (q->n_context == 0) {
    error_set(e, ERROR_DATA, "context is empty: nothing stands before the first token");
    return error_hint(e, "begin it with the tokenizer's BOS: none is added");
  }
  if (q->n_ids == q->n_context) return error_set(e, ERROR_DATA, "continuation is empty");
  if (q->n_ids - 1 > longest) {
    error_set(e, ERROR_DATA, "%" PRId64 " ids, at most train.seq_len + 1 = %" PRId64 " fit", q->n_ids, longest + 1);
    return error_hint(e, "cut the context at its beginning, or raise train.seq_len");
  }
  q->ids = malloc((size_t)q->n_ids * sizeof *q->ids);
  q->logprobs = calloc((size_t)(q->n_ids - q->n_context), sizeof *q->logprobs);
  if (!q->ids || !q->logprobs) return error_set(e, ERROR_SYSTEM, "out of memory");
  return take_ids(context, "context", vocab_size, q->ids, e) && take_ids(continuation, "continuation", vocab_size, q->ids + q->n_context, e);
}

static bool add(struct score_requests *r, const char *text, size_t bytes, int64_t line, int64_t vocab_size, int64_t longest, struct error *e) {
  json_error_t where;
  if ((r->n & (r->n - 1)) == 0) { /* full at powers of two */
    struct score_request *grown = realloc(r->item, (size_t)(r->n ? 2 * r->n : 1) * sizeof *grown);
    if (!grown) return error_set(e, ERROR_SYSTEM, "out of memory");
    r->item = grown;
  }
  json_t *o = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
  if (!o) return error_set(e, ERROR_DATA, "%s", where.text);
  struct score_request *q = &r->item[r->n++];
  *q = (struct score_request){.line = line};
  const bool good = take_request(o, vocab_size, longest, q, e);
  json_decref(o);
  return good;
}

bool score_read(FILE *in, const char *name, int64_t vocab_size, int64_t longest, struct score_requests *r, struct error *e) {
  char *text = NULL;
  size_t room = 0;
  bool good = true;
  ssize_t n;
  *r = (struct score_requests){0};
  for (int64_t line = 1; good && (errno = 0, n = getline(&text, &room, in)) >= 0; line++) {
    if (strspn(text, " \t\r\n") == (size_t)n) continue;
    good = add(r, text, (size_t)n, line, vocab_size, longest, e) || error_context(e, "%s:%" PRId64, name, line);
  }
  if (good && ferror(in)) good = error_errno(e, ERROR_DATA, "cannot read %s", name);
  free(text);
  if (!good) score_free(r);
  return good;
}

void score_free(struct score_requests *r) {
  for (int64_t i = 0; i < r->n; i++) {
    free(r->item[i].ids);
    free(r->item[i].logprobs);
  }
  free(r->item);
  *r = (struct score_requests){0};
}

/* ---- running -------------------------------------------------------------------- */

/* The requests of a micro-batch, one a row, and what is heard of their logits. */
struct batch {
  struct run *run;
  struct score_request **row;
  int64_t n, seq_len;
  float *logits; /* host, [vocab] */
};

static bool likeliest(const float *logits, int64_t vocab, int32_t id) {
  for (int64_t i = 0; i < vocab; i++)
    if (logits[i] > logits[id] || (logits[i] == logits[id] && i < id)) return false;
  return logits[id] == logits[id];
}

/* A request stays greedy until one of its tokens is not the likeliest. */
static void hear_logits(void *context, int64_t first, const struct matrix *logits) {
  struct batch *b = context;
  struct run *run = b->run;
  struct error none;
  for (int64_t i = 0; i < logits->rows; i++) {
    const int64_t row = (first + i) / b->seq_len;
    const int32_t target = run->host_targets[first + i];
    if (target < 0 || !b->row[row]->greedy) continue;
    run->device->k->download(run->device, b->logits, (const float *)logits->data + i * logits->cols, (size_t)logits->cols * sizeof *b->logits);
    b->row[row]->greedy = run->device->k->synchronize(run->device, &none) && likeliest(b->logits, run->parity.vocabulary > 0 ? run->parity.vocabulary : logits->cols, target);
  }
}

static bool run_batch(struct batch *b, struct error *e) {
  struct run *run = b->run;
  const struct kernels *k = run->device->k;
  const size_t bytes = (size_t)run->tokens * sizeof(int32_t);
  for (int64_t i = 0; i < run->tokens; i++) {
    run->host_inputs[i] = 0;
    run->host_targets[i] = -1;
  }
  for (int64_t r = 0; r < b->n; r++) {
    struct score_request *q = b->row[r];
    q->greedy = true;
    memcpy(run->host_inputs + r * b->seq_len, q->ids, (size_t)(q->n_ids - 1) * sizeof *q->ids);
    for (int64_t i = q->n_context; i < q->n_ids; i++) run->host_targets[r * b->seq_len + i - 1] = q->ids[i];
  }
  k->upload(run->device, run->inputs, run->host_inputs, bytes);
  k->upload(run->device, run->targets, run->host_targets, bytes);
  struct micro_batch m = {.inputs = run->inputs, .targets = run->targets};
  model_on_logits(run->model, hear_logits, b);
  model_forward(run->model, &m, run->nll);
  k->download(run->device, run->host_nll, run->nll, bytes);
  if (!k->synchronize(run->device, e)) return false;
  for (int64_t r = 0; r < b->n; r++) {
    struct score_request *q = b->row[r];
    q->logprob = 0;
    for (int64_t i = q->n_context; i < q->n_ids; i++) {
      const float nll = run->host_nll[r * b->seq_len + i - 1];
      q->logprobs[i - q->n_context] = -nll;
      q->logprob -= (double)nll;
    }
  }
  return true;
}

/* The run's micro-batch as rows of `seq_len` tokens, with the parameters in it. */
static bool lay_out(struct run *run, struct checkpoint *k, int64_t seq_len, struct error *e) {
  const int64_t tokens = run->tokens;
  const struct kernels *ops = run->device->k;
  run->config.train.seq_len = seq_len;
  run->config.train.local_batch = tokens / seq_len;
  for (int real = 0; real < 2; real++) {
    if (run->model) model_destroy(run->model);
    run->model = NULL;
    if (real) {
      const size_t bytes = run->arena.used;
      ops->release(run->device, run->memory);
      run->memory = ops->allocate(run->device, bytes, e);
      if (!run->memory) return false;
      run->arena = arena_over(run->memory, bytes);
    } else {
      run->arena = arena_measure();
    }
    if (!run_lay_out(run, RUN_GENERATE, e)) return false;
  }
  return state_read_parameters(run, k, e);
}

static int by_length(const void *a, const void *b) {
  const struct score_request *x = *(struct score_request *const *)a, *y = *(struct score_request *const *)b;
  if (x->n_ids != y->n_ids) return x->n_ids < y->n_ids ? -1 : 1;
  return (x->line > y->line) - (x->line < y->line);
}

static int64_t row_length(int64_t wanted, int64_t longest) {
  enum { LEAST = 64 };
  int64_t length = longest;
  while (length % 2 == 0 && length / 2 >= wanted && length / 2 >= LEAST) length /= 2;
  return length;
}

bool score_run(struct run *run, struct checkpoint *k, struct score_requests *r, struct error *e) {
  const int64_t longest = run->config.train.seq_len;
  struct score_request **order = calloc((size_t)r->n + 1, sizeof *order);
  struct batch b = {.run = run, .logits = malloc((size_t)run->config.model.shape.vocab_size * sizeof *b.logits)};
  bool good = (order && b.logits) || error_set(e, ERROR_SYSTEM, "out of memory");
  for (int64_t i = 0; good && i < r->n; i++) order[i] = &r->item[i];
  if (good && r->n > 0) qsort(order, (size_t)r->n, sizeof(struct score_request *), by_length);
  for (int64_t at = 0; good && at < r->n; at += b.n) {
    const int64_t length = row_length(order[at]->n_ids - 1, longest);
    if (length != b.seq_len) good = lay_out(run, k, length, e);
    b.seq_len = length;
    b.row = order + at;
    const int64_t rows = run->tokens / length;
    for (b.n = 0; at + b.n < r->n && b.n < rows && row_length(order[at + b.n]->n_ids - 1, longest) == length; b.n++) continue;
    good = good && run_batch(&b, e);
  }
  free(order);
  free(b.logits);
  return good;
}

bool score_write(FILE *out, const struct score_requests *r, bool each) {
  for (int64_t i = 0; i < r->n; i++) {
    const struct score_request *q = &r->item[i];
    json_t *o = json_object();
    record_real(o, "logprob", q->logprob);
    json_object_set_new(o, "greedy", json_boolean(q->greedy));
    record_integer(o, "tokens", q->n_ids - q->n_context);
    if (each) {
      json_t *list = json_array();
      for (int64_t t = 0; t < q->n_ids - q->n_context; t++) json_array_append_new(list, record_number((double)q->logprobs[t]));
      json_object_set_new(o, "logprobs", list);
    }
    char *text = record_dump(o);
    json_decref(o);
    const bool written = text && fprintf(out, "%s", text) >= 0 && (strchr(text, '\n') || fputc('\n', out) != EOF);
    free(text);
    if (!written) return false;
  }
  return true;
}
