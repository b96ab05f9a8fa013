/* fp4d generate: text from a checkpoint. */
#include <stdio.h>
#include <stdlib.h>

#include "trainer/command.h"
#include "trainer/sample.h"
#include "trainer/state.h"

struct generate_arguments {
  const char *checkpoint, *prompt, *tokenizer;
  struct parity_arguments parity;
  int64_t tokens, context, seed;
  double temperature, top_p;
};

const struct argument command_generate_arguments[] = {
    {.name = "CKPT", .type = ARGUMENT_WORD, .offset = offsetof(struct generate_arguments, checkpoint),
     .help = "a step folder, a folder of them, or a run's folder (then the newest whole one)"},
    {.name = "--prompt", .value = "TEXT", .type = ARGUMENT_TEXT, .offset = offsetof(struct generate_arguments, prompt),
     .help = "what the text begins with (default: nothing)"},
    {.name = "--tokenizer", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct generate_arguments, tokenizer),
     .help = "in the place of the run's data.tokenizer, whose file may have moved"},
    {.name = "--tokens", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct generate_arguments, tokens),
     .low = 1, .high = 1000000, .help = "at most so many new tokens (default 256)"},
    {.name = "--context", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct generate_arguments, context),
     .low = 1, .high = 1 << 24, .help = "of a longer text the model sees the last N tokens, at positions from 0 on (default train.seq_len)"},
    {.name = "--temperature", .value = "X", .type = ARGUMENT_NUMBER, .offset = offsetof(struct generate_arguments, temperature),
     .help = "0: always the likeliest token (default 0.8)"},
    {.name = "--top-p", .value = "X", .type = ARGUMENT_NUMBER, .offset = offsetof(struct generate_arguments, top_p),
     .help = "keep the likeliest tokens with this share of the probability (default 0.95)"},
    {.name = "--seed", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct generate_arguments, seed),
     .low = 0, .high = INT64_MAX, .help = "of the sampling (default 0)"},
    ARGUMENT_PARITY(struct generate_arguments, parity),
    {0}};

/* The model runs as it was trained, one sample at a time, of `context` tokens where that is not 0. */
static bool saved_config(const struct checkpoint *k, int64_t context, struct config *c, struct error *e) {
  char length[64];
  const char *const alone[] = {"train.local_batch=1", "train.global_batch=1", "train.accumulation=0", "run.ranks=0", "fault=", length};
  const int n = (int)(sizeof alone / sizeof *alone) - (context == 0);
  snprintf(length, sizeof length, "train.seq_len=%lld", (long long)context);
  char *text = state_saved_config(k, e);
  if (!text) return false;
  bool good = config_parse(c, text, checkpoint_path(k), alone, n, e);
  free(text);
  return good;
}

int command_generate(int argc, char **argv) {
  struct generate_arguments a = {.prompt = "", .tokens = 256, .temperature = 0.8, .top_p = 0.95};
  struct error e = {0};
  if (!arguments_parse(command_generate_arguments, argc, argv, &a, &e)) return command_fail(&e);
  if (a.temperature < 0 || a.top_p <= 0 || a.top_p > 1) {
    error_set(&e, ERROR_USAGE, "--temperature must be at least 0 and --top-p above 0 and at most 1");
    return command_fail(&e);
  }

  struct checkpoint *k = state_find(a.checkpoint, &e);
  if (!k) return command_fail(&e);
  struct config config;
  struct run run;
  const bool loaded = saved_config(k, a.context, &config, &e);
  if (!run_open(&run, &config, loaded, RUN_GENERATE, &e)) {
    checkpoint_close(k);
    return run_leave(&run, false, &e);
  }
  const struct sampling s = {a.tokens, a.temperature, a.top_p, (uint64_t)a.seed};
  struct tokenizer *t = tokenizer_open(a.tokenizer ? a.tokenizer : config.data.tokenizer, &e);
  if (!t && !a.tokenizer) error_hint(&e, "--tokenizer FILE says where it is now");
  const bool good = t && run_set_parity(&run, &a.parity, &e) && state_read_parameters(&run, k, &e) && sample_text(&run, t, a.prompt, &s, stdout, &e);
  if (good) printf("\n");
  tokenizer_close(t);
  checkpoint_close(k);
  return run_leave(&run, good, &e);
}
