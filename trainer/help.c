/* The table of commands, and help made from it. */
#include <string.h>

#include "base/log.h"
#include "trainer/command.h"
#include "trainer/findings.h"
#include "trainer/suggest.h"

const struct command commands[] = {
    {"train", "train a model; goes on from the newest checkpoint of the run's folder", command_train_arguments, command_train,
     "Signals: SIGUSR1 saves a checkpoint and goes on; SIGUSR2, SIGTERM, SIGINT and SIGHUP (but\n"
     "under nohup) save one and leave with exit code 75: the same command goes on from there. Under mpirun\n"
     "send SIGUSR1 or SIGUSR2 to mpirun, which forwards them at once (docs/operations.md).\n"},
    {"check", "read config, data, checkpoints and environment; report every problem", command_check_arguments,
     command_check,
     "Trains nothing and changes nothing.  Prints a line for each thing looked at: \"ok\", or\n"
     "the problem.  The exit code is that of the first kind of problem.\n"},
    {"doctor", "what this machine has for fp4d, and a hello of each part", command_doctor_arguments, command_doctor,
     "Processors, the CPU backend, MPI (under mpirun a sum of all ranks), NVIDIA's driver, each GPU with a contraction\n"
     "on it, the NVLink fabric, cuBLASLt, NCCL, and a checkpoint on the disk.  Changes nothing that stays.  What a\n"
     "machine need not have is \"absent\"; MPI's start may take five minutes; the exit code is that of the first kind of\n"
     "problem.\n"},
    {"plan", "parameters, FLOPs, memory and roofline of a run; needs no GPU", command_plan_arguments, command_plan, ""},
    {"prepare", "make token streams from text", command_prepare_arguments, command_prepare,
     "Reads data.sources once, drops duplicates, holds documents out for validation, and\n"
     "writes the streams data.train and data.validation in their final order (keyed\n"
     "shuffle, sources mixed by their weights), whole or not at all.  Where they exist\n"
     "already nothing is done.  After a kill or an error the same command goes on from\n"
     "what is finished in TRAIN.work.\n"},
    {"tokenize", "text to token ids and back; a vocabulary from text", command_tokenize_arguments, command_tokenize,
     "Reads whole texts and writes a line of ids for each; with --decode the bytes of ids.\n"
     "--train writes a rank file (BASE64 SPACE RANK lines), which data.tokenizer and tiktoken take.\n"},
    {"index", "order token files that Megatron-LM, llm.c, OLMo, torchtitan or nanoGPT made, without a copy", command_index_arguments,
     command_index,
     "Reads the token files of data.sources and writes data.train and data.validation, NAME.index: the\n"
     "order that `prepare` would give the same documents, and digests of the files, which stay where\n"
     "they are.  Needs no GPU.  `fp4d train` does it at its start where the index is absent.\n"},
    {"eval", "mean NLL of a checkpoint on the fixed validation stream", command_eval_arguments, command_eval, ""},
    {"generate", "text from a checkpoint", command_generate_arguments, command_generate, ""},
    {"score", "log-probabilities of given continuations of given contexts, from a checkpoint", command_score_arguments, command_score,
     "A request is a line {\"context\": [ids], \"continuation\": [ids]}, its answer a line {\"logprob\": the sum over the\n"
     "continuation's tokens, \"greedy\": is each of them the likeliest?, \"tokens\": how many}, in the order of the requests.\n"
     "No id is added: where a text begins with BOS, the context does, and it is never empty.  Runs in one process.\n"},
    {"export", "a checkpoint as a Hugging Face Llama: safetensors, config.json, tokenizer files", command_export_arguments, command_export,
     "DIR is there whole or not at all.  FP32 master weights are rounded to nearest even for bf16 and written as they\n"
     "are for fp32.  docs/formats.md says what is written, docs/operations.md how to evaluate it.\n"},
    {"import", "a Hugging Face Llama as a checkpoint of update 0", command_import_arguments, command_import,
     "The checkpoint is CKPT-FOLDER/step-00000000: parameters in the type of the files (FP16 as FP32), no moments.\n"
     "`fp4d train CONFIG --resume CKPT-FOLDER/step-00000000` begins a run with them: a new optimizer, schedule and data.\n"
     "What no model here can be (another architecture, biases, other rotary types, ...) is refused by its key.\n"},
    {"inspect", "what is in a token stream, checkpoint, capture or metrics.jsonl, and whether it is whole", command_inspect_arguments,
     command_inspect,
     "Exit code 74 for a damaged checkpoint, 65 for a damaged stream or metrics.jsonl or for what is neither.\n"},
    {"diff", "two checkpoints, tensor by tensor: largest difference and relative L2", command_diff_arguments, command_diff,
     "Exit code 0: all tensors have the same bits; 1: some differ, or only one of the two has them.  Tensors are compared\n"
     "whatever the number of ranks and the compression that they were written with; meta texts are not compared.\n"},
    {"reshard", "a checkpoint written again, for another number of ranks or in another compression", command_reshard_arguments, command_reshard,
     "No resume needs it: a run reads the checkpoints of any number of ranks.\n"},
    {"bench", "speed of a part, or error of formats, measured here: gemm, quantize, attention, step, loader, checkpoint, collectives, tokenizer", command_bench_arguments,
     command_bench,
     "  gemm         contractions of a configuration's linears (or --shape, or squares) beside the machine's measured peak\n"
     "  quantize     of captured tensors (--from): error of each route's contractions and operands, ratios of error\n"
     "               energy between routes, speed of each quantiser\n"
     "  attention    forward and backward beside it; with --setup or --shape: what formats of Q, K,\n"
     "               P and V lose against FP64 (cosine, relative L2, RMSE, zero scales and codes of P, probability\n"
     "               mass at codes 0, non-finite outputs): training is the backend's causal operator, table-3 and\n"
     "               appendix-d are those of the FP4 FlashAttention-4 report\n"
     "  step         an update by phase, routes in turn, and their ratio to bf16: train.global_batch (of run.ranks) in\n"
     "               micro-batches of train.local_batch, and an optimizer step; on a GPU beside its roofline and memory\n"
     "  loader       samples per second from data.train\n"
     "  checkpoint   save and load, under mpirun each rank its share\n"
     "  collectives  under mpirun: the sum of gradients, spread to all, beside a copy in memory; on GPUs (a CONFIG's\n"
     "               run.backend) beside NCCL's own, at 64 MB and 1 GB, alone what one GPU can\n"
     "  tokenizer    --text to ids and back, one thread\n"},
    {"capture", "X, W and dY of a model's linears from a checkpoint, to HDF5", command_capture_arguments, command_capture,
     "Runs forward and backward of the batches that training would read next, under route bf16,\n"
     "where every operand exists as it is, with the checkpoint's weights, which do not change.\n"
     "Of each batch the first micro-batch runs.  `fp4d bench quantize --from FILE.h5` reads the file;\n"
     "docs/formats.md describes it.\n"},
    {"compare", "runs side by side at exactly shared updates, from their records", command_compare_arguments, command_compare,
     "Refuses runs whose initial parameters, training stream or batches differ (exit code 65).\n"
     "scripts/plot_loss.py --excess draws what it prints.\n"},
    {"ablate", "matched runs of several routes, one after the other, then compared", command_ablate_arguments, command_ablate,
     "  base: tiny.yaml              # the configuration; relative to this file\n"
     "  folder: runs/ablation        # each run in folder/ROUTE; the tables in folder/compare.md\n"
     "  routes: [bf16, mxfp4-row-sr] # the first is what the others are compared with\n"
     "  launch: mpirun -np 2         # words before `fp4d train`; left out: one process\n"
     "  set: {train: {updates: 200, local_batch: 2}} # on top of the base\n"
     "The same command goes on where the last one stopped.  A run that diverges is recorded and\n"
     "the others go on; exit code 75 of a run, and signals (as for train), end the whole with 75.\n"},
    {"help", "this list; `fp4d help COMMAND`; `fp4d help commands`; `fp4d help config`", command_help_arguments, command_help,
     "`fp4d help commands` documents every command, `fp4d help config` every key of a configuration.\n"},
    {NULL, NULL, NULL, NULL, NULL},
};

const struct command *command_find(const char *name) {
  for (const struct command *c = commands; c->name; c++)
    if (strcmp(c->name, name) == 0) return c;
  return NULL;
}

int command_fail(const struct error *e) {
  log_failure(e);
  return (int)e->code;
}

void command_unknown(const char *name, const char *const *also, struct error *e) {
  struct suggestion near = {name, NULL, 0};
  char shown[QUOTED];
  for (const struct command *c = commands; c->name; c++) suggest_offer(&near, c->name);
  for (; also && *also; also++) suggest_offer(&near, *also);
  text_quote(name, shown);
  if (near.best)
    error_set(e, ERROR_USAGE, "unknown command %s; did you mean %s?", shown, near.best);
  else
    error_set(e, ERROR_USAGE, "unknown command %s", shown);
  error_hint(e, "`fp4d help` lists the commands");
}

void help_overview(FILE *out) {
  static const struct {
    enum error_code code;
    const char *meaning;
  } codes[] = {
      {ERROR_NONE, "what was asked for is done"},
      {ERROR_USAGE, "unknown command, flag or argument"},
      {ERROR_DATA, "corpus, token stream or tokenizer unusable"},
      {ERROR_DEVICE, "backend or device absent, in a fault, or it cannot execute what is asked"},
      {ERROR_INTERNAL, "a defect of fp4d"},
      {ERROR_SYSTEM, "memory, threads, files"},
      {ERROR_CHECKPOINT, "checkpoint absent, damaged or not writable"},
      {ERROR_PREEMPTED, "stopped after a complete checkpoint: start again to go on"},
      {ERROR_COMMUNICATION, "launch, MPI or NCCL failed, or a rank was lost"},
      {ERROR_CONFIG, "configuration wrong"},
      {ERROR_DIVERGED, "a divergence policy said halt"},
  };
  fputs("fp4d: pretraining of Llama-family models with FP4, FP8 and BF16 routes\n\n", out);
  for (const struct command *c = commands; c->name; c++) fprintf(out, "  fp4d %-9s %s\n", c->name, c->summary);
  fputs("  fp4d --version\n\nExit codes\n", out);
  for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
    fprintf(out, "  %3d  %-14s %s\n", (int)codes[i].code, codes[i].code ? error_code_name(codes[i].code) : "done", codes[i].meaning);
}

void help_command(const struct command *c, FILE *out) {
  fprintf(out, "fp4d %s: %s\n\n  fp4d %s", c->name, c->summary, c->name);
  arguments_synopsis(c->arguments, out);
  fputs("\n\n", out);
  arguments_describe(c->arguments, out, false);
  if (c->details[0]) fprintf(out, "\n%s", c->details);
}

static void command_markdown(const struct command *c, FILE *out) {
  fprintf(out, "\n## `%s`: %s\n\n    fp4d %s", c->name, c->summary, c->name);
  arguments_synopsis(c->arguments, out);
  fputs("\n\n| argument | |\n| --- | --- |\n", out);
  arguments_describe(c->arguments, out, true);
  if (c->details[0]) fprintf(out, "\n```text\n%s```\n", c->details);
}

void help_commands(FILE *out, bool markdown) {
  if (markdown)
    fputs("# Commands\n\n<!-- made by `fp4d help commands --markdown` from the tables that parse them -->\n\n"
          "Every command takes `--help`; `--` ends the flags. [config.md](config.md) has the keys of CONFIG,\n"
          "[operations.md](operations.md) the exit codes.\n", out);
  for (const struct command *c = commands; c->name; c++) {
    if (markdown)
      command_markdown(c, out);
    else
      help_command(c, out);
    if (!markdown && c[1].name) fputs("\n\n", out);
  }
}
