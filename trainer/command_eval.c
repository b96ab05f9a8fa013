/* fp4d eval: mean NLL of a checkpoint on the fixed validation stream. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "trainer/command.h"
#include "trainer/evaluate.h"
#include "trainer/match.h"
#include "trainer/record.h"
#include "trainer/run.h"
#include "trainer/state.h"
#include "trainer/vocabulary.h"

struct eval_arguments {
  const char *checkpoint, *config, *json;
  struct parity_arguments parity;
  struct argument_list sets;
  int64_t samples, vocab_size;
};

const struct argument command_eval_arguments[] = {
    {.name = "CKPT", .type = ARGUMENT_WORD, .offset = offsetof(struct eval_arguments, checkpoint),
     .help = "a step folder, a folder of them, or a run's folder (then the newest whole one)"},
    ARGUMENT_CONFIG(struct eval_arguments, config),
    ARGUMENT_SETS(struct eval_arguments, sets),
    {.name = "--samples", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct eval_arguments, samples),
     .low = 0, .high = INT64_MAX, .help = "sequences from the stream's start; 0: all (default: validation.samples)"},
    {.name = "--json", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct eval_arguments, json),
     .help = "also write the result with every sequence's NLL and targets"},
    {.name = "--vocab-size", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct eval_arguments, vocab_size),
     .low = 1, .high = INT32_MAX, .help = "share the probability among the ids below N alone (default: all rows of the model, as in training)"},
    ARGUMENT_PARITY(struct eval_arguments, parity),
    {0}};

static bool write_json(const char *path, const struct run *run, const struct checkpoint *k, const struct evaluation *v,
                       const struct nll *sequence, struct error *e) {
  json_t *o = json_object(), *each = json_array(), *targets = json_array();
  record_text(o, "checkpoint", checkpoint_path(k));
  record_integer(o, "update", checkpoint_update(k));
  evaluate_record(run, v, o);
  if (run->parity.norm_cast == NORM_CAST_BEFORE) record_text(o, "norm_cast", "before");
  if (run->parity.rope_angles == ROPE_ANGLES_FP32) record_text(o, "rope_angles", "fp32");
  if (run->parity.vocabulary > 0) record_integer(o, "vocab_size", run->parity.vocabulary);
  for (int64_t i = 0; i < v->samples; i++) {
    json_array_append_new(each, record_number(nll_mean(&sequence[i])));
    json_array_append_new(targets, json_integer(sequence[i].targets));
  }
  json_object_set_new(o, "sequence_nll", each);
  json_object_set_new(o, "sequence_targets", targets);
  bool good = json_dump_file(o, path, JSON_REAL_PRECISION(17) | JSON_INDENT(1)) == 0;
  json_decref(o);
  return good || error_errno(e, ERROR_SYSTEM, "cannot write %s", path);
}

/* For people: the loss, its interval, and the sources' where there are several. */
static void print_result(const struct run *run, const struct checkpoint *k, const struct evaluation *v) {
  const struct stream_info *info = stream_info(run->validation);
  char text[64];
  evaluate_text(v, 6, text, sizeof text);
  printf("update %" PRId64 "  loss %s nats/token  %" PRId64 " sequence%s, %" PRId64 " targets\n", checkpoint_update(k), text, v->samples,
         v->samples == 1 ? "" : "s", v->all.targets);
  if (isfinite(v->standard_error))
    printf("95%% interval %.6f to %.6f (mean +- 1.96 standard errors over sequences)\n", v->low, v->high);
  else
    printf("no interval: one sequence has no standard error\n");
  for (int s = 0; info->n_sources > 1 && s < info->n_sources; s++)
    printf("  %-20s %10.6f  %" PRId64 " targets\n", info->source[s].name, nll_mean(&v->source[s]), v->source[s].targets);
}

static bool evaluate(struct run *run, const struct eval_arguments *a, struct error *e) {
  struct checkpoint *k = state_find_together(run, a->checkpoint, e);
  if (!k) return false;
  if (!comm_agree(run->comm, state_read_parameters(run, k, e), e)) {
    checkpoint_close(k);
    return false;
  }
  if (run->rank == 0) match_warn(k, run->config_text);
  if (run->rank == 0 && a->vocab_size == 0) vocabulary_warn(run, k);
  if (a->vocab_size > 0 && !comm_agree(run->comm, vocabulary_set(run, k, a->vocab_size, e), e)) {
    checkpoint_close(k);
    return false;
  }
  const int64_t wanted = a->samples >= 0 ? a->samples : run->config.validation.samples;
  if (!comm_agree(run->comm, evaluate_has_samples(run, wanted, e), e)) {
    checkpoint_close(k);
    return false;
  }
  const int64_t samples = evaluate_samples(run, wanted);
  struct nll *sequence = malloc((size_t)samples * sizeof *sequence);
  struct evaluation v;
  bool good = comm_agree(run->comm, sequence != NULL || error_set(e, ERROR_SYSTEM, "out of memory"), e) &&
              evaluate_run(run, samples, sequence, &v, e);
  if (good && run->rank == 0) {
    print_result(run, k, &v);
    if (a->json) good = write_json(a->json, run, k, &v, sequence, e);
  }
  free(sequence);
  checkpoint_close(k);
  return comm_agree(run->comm, good, e);
}

int command_eval(int argc, char **argv) {
  struct eval_arguments a = {.samples = -1};
  struct error e = {0};
  if (!arguments_parse(command_eval_arguments, argc, argv, &a, &e)) return command_fail(&e);

  struct config config;
  struct run run;
  const bool loaded = config_load(&config, a.config, a.sets.item, a.sets.n, &e);
  if (!run_open(&run, &config, loaded, RUN_EVAL, &e)) return run_leave(&run, false, &e);
  const bool good = run_set_parity(&run, &a.parity, &e) && evaluate(&run, &a, &e);
  return run_leave(&run, good, &e);
}
