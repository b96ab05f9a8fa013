/* fp4d score: log-probabilities of given continuations, from a checkpoint. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "trainer/command.h"
#include "trainer/match.h"
#include "trainer/score.h"
#include "trainer/state.h"
#include "trainer/vocabulary.h"

struct score_arguments {
  const char *checkpoint, *config, *in, *out;
  struct parity_arguments parity;
  struct argument_list sets;
  int64_t vocab_size;
  bool each;
};

const struct argument command_score_arguments[] = {
    {.name = "CKPT", .type = ARGUMENT_WORD, .offset = offsetof(struct score_arguments, checkpoint),
     .help = "a step folder, a folder of them, or a run's folder (then the newest whole one)"},
    ARGUMENT_CONFIG(struct score_arguments, config),
    ARGUMENT_SETS(struct score_arguments, sets),
    {.name = "--in", .value = "FILE.jsonl", .type = ARGUMENT_TEXT, .offset = offsetof(struct score_arguments, in),
     .help = "the requests (default: standard input)"},
    {.name = "--out", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct score_arguments, out),
     .help = "the answers, whole or not at all (default: standard output)"},
    {.name = "--each", .type = ARGUMENT_FLAG, .offset = offsetof(struct score_arguments, each),
     .help = "also every token's own log-probability, as the list logprobs"},
    {.name = "--vocab-size", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct score_arguments, vocab_size),
     .low = 1, .high = INT32_MAX, .help = "share the probability among the ids below N alone (default: those that an export keeps)"},
    ARGUMENT_PARITY(struct score_arguments, parity),
    {0}};

static bool read_requests(const struct score_arguments *a, const struct run *run, struct score_requests *r, struct error *e) {
  FILE *in = a->in ? fopen(a->in, "r") : stdin;
  if (!in) return error_errno(e, ERROR_DATA, "cannot open %s", a->in);
  const bool good = score_read(in, a->in ? a->in : "standard input", run->parity.vocabulary > 0 ? run->parity.vocabulary : run->config.model.shape.vocab_size,
                               run->config.train.seq_len, r, e);
  if (a->in) fclose(in);
  return good;
}

static bool write_answers(const struct score_arguments *a, const struct score_requests *r, struct error *e) {
  if (!a->out) return (score_write(stdout, r, a->each) && fflush(stdout) == 0) || error_errno(e, ERROR_SYSTEM, "cannot write the answers");
  char *text = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&text, &bytes);
  bool good = out && score_write(out, r, a->each);
  if (out) good = fclose(out) == 0 && good;
  good = good ? file_publish(a->out, text, bytes, ERROR_SYSTEM, e) : error_set(e, ERROR_SYSTEM, "out of memory");
  free(text);
  return good;
}

static bool score(struct run *run, const struct score_arguments *a, struct error *e) {
  struct score_requests r = {0};
  struct checkpoint *k = state_find(a->checkpoint, e);
  if (k) match_warn(k, run->config_text);
  const bool good = k && vocabulary_set(run, k, a->vocab_size, e) && read_requests(a, run, &r, e) && score_run(run, k, &r, e) && write_answers(a, &r, e);
  checkpoint_close(k);
  score_free(&r);
  return good;
}

int command_score(int argc, char **argv) {
  struct score_arguments a = {0};
  struct error e = {0};
  if (!arguments_parse(command_score_arguments, argc, argv, &a, &e)) return command_fail(&e);
  struct config config;
  struct run run;
  const bool loaded = config_load(&config, a.config, a.sets.item, a.sets.n, &e);
  if (loaded) { /* whatever the run's ranks and batch were: one process, one micro-batch at a time */
    config.run.ranks = 0;
    config.train.global_batch = config.train.local_batch;
    config.train.accumulation = 0;
  }
  if (!run_open(&run, &config, loaded, RUN_GENERATE, &e)) return run_leave(&run, false, &e);
  const bool good = run_set_parity(&run, &a.parity, &e) && score(&run, &a, &e);
  return run_leave(&run, good, &e);
}
