#include "trainer/indexing.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "base/threads.h"
#include "data/index.h"
#include "data/tokens.h"

static bool ends_in_index(const char *path) {
  const size_t length = strlen(path), n = strlen(".index");
  return length > n && strcmp(path + length - n, ".index") == 0;
}

bool indexing_is_wanted(const struct config *c) { return ends_in_index(c->data.train); }

static struct data_index request_of(const struct config *c, int threads) {
  return (struct data_index){.sources = c->data.source,
                             .n_sources = (int)c->data.n_sources,
                             .stages = c->data.stage,
                             .n_stages = (int)c->data.n_stages,
                             .tokens = c->data.tokens,
                             .train_path = c->data.train,
                             .validation_path = c->data.validation[0] ? c->data.validation : NULL,
                             .validation_fraction = c->data.validation_fraction,
                             .seed = (uint64_t)c->data.seed,
                             .shuffle_documents = c->data.shuffle_documents,
                             .vocab_size = c->model.shape.vocab_size,
                             .least = c->train.seq_len + 1,
                             .threads = threads};
}

static bool check_sources(const struct config *c, struct error *e) {
  if (c->data.n_sources == 0) {
    error_set(e, ERROR_CONFIG, "data.sources is empty: nothing to make the index %s of", c->data.train);
    return error_hint(e, "give token files in data.sources");
  }
  for (int64_t i = 0; i < c->data.n_sources; i++) {
    const struct data_source *s = &c->data.source[i];
    if (s->bos >= c->model.shape.vocab_size || s->eos >= c->model.shape.vocab_size) {
      const bool bos = s->bos >= c->model.shape.vocab_size;
      return error_set(e, ERROR_CONFIG, "data.sources: %s: %s %" PRId64 " is no id of model.vocab_size %" PRId64, s->name, bos ? "bos" : "eos",
                       bos ? s->bos : s->eos, c->model.shape.vocab_size);
    }
    if (tokens_is_source(s) || (s->format == DATA_AUTO && !file_exists(s->path))) continue; /* one that is not there says so itself */
    error_set(e, ERROR_CONFIG, "data.sources: %s is not known to hold token files", s->path);
    return error_hint(e, "give its format (raw-u16, raw-u32, megatron, llmc, npy); a source of text needs `fp4d prepare` and a stream in data.train");
  }
  if (c->data.validation[0] && !ends_in_index(c->data.validation)) {
    error_set(e, ERROR_CONFIG, "data.train is an index and data.validation, %s, is none", c->data.validation);
    return error_hint(e, "both are made together: name it *.index, or leave it empty");
  }
  return true;
}

bool indexing_is_current(const struct config *c, const char *path, struct error *e) {
  const struct data_index request = request_of(c, 1);
  return c->data.n_sources == 0 || data_index_current(&request, path, e);
}

static void say_built(const struct config *c, const struct data_indexed *d) {
  log_info("index built in %.1f s: %" PRId64 " token files, %.2f GB; %s: %" PRId64 " tokens in %" PRId64 " documents", d->seconds, d->files,
           (double)d->bytes * 1e-9, c->data.train, d->tokens[0], d->documents[0]);
  if (c->data.validation[0])
    log_info("%s: %" PRId64 " tokens in %" PRId64 " documents", c->data.validation, d->tokens[1], d->documents[1]);
  if (d->empty > 0) log_info("%" PRId64 " documents without a token are left out", d->empty);
  if (d->exhausted < 0) return;
  log_info("the training stream ends where source %s may give no more", c->data.source[d->exhausted].name);
  for (int64_t i = 0; i < c->data.n_sources; i++)
    if (d->unused[i] > 0) log_info("%" PRId64 " tokens of source %s are not used", d->unused[i], c->data.source[i].name);
}

bool indexing_make(const struct config *c, int threads, bool force, struct error *e) {
  const bool train = file_exists(c->data.train), validate = c->data.validation[0] != 0;
  if (train && !force) { /* the validation index is published first */
    if (validate && !file_exists(c->data.validation)) {
      error_set(e, ERROR_DATA, "%s exists and %s does not", c->data.train, c->data.validation);
      return error_hint(e, "`fp4d index CONFIG --force` makes both anew");
    }
    if (!indexing_is_current(c, c->data.train, e) || (validate && !indexing_is_current(c, c->data.validation, e))) return false;
    log_info("index reused: %s", c->data.train);
    return true;
  }
  const struct data_index request = request_of(c, threads);
  struct data_indexed done;
  if (!check_sources(c, e) || !data_index_build(&request, &done, e)) return false;
  say_built(c, &done);
  return true;
}

bool indexing_make_in_world(const struct config *c, struct comm *comm, struct error *e) {
  int threads = threads_available();
  if (c->run.threads > 0) threads = (int)c->run.threads * comm_local_world(comm);
  /* Rank 0 first: on a shared disk the others then see what it made. */
  bool good = comm_rank(comm) != 0 || indexing_make(c, threads, false, e);
  if (!comm_agree(comm, good, e)) return false;
  if (comm_rank(comm) != 0 && comm_local_rank(comm) == 0 && !file_exists(c->data.train)) good = indexing_make(c, threads, false, e);
  return comm_agree(comm, good, e);
}
