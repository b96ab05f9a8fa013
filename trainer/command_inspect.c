/* fp4d inspect: what is in a file, and whether it is whole. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "checkpoints/store.h"
#include "data/index_file.h"
#include "data/stream_file.h"
#include "trainer/command.h"
#include "trainer/inspect.h"
#include "trainer/state.h"

const struct argument command_inspect_arguments[] = {
    {.name = "FILE", .type = ARGUMENT_WORD, .offset = offsetof(struct inspection, path),
     .help = "a token stream, a checkpoint (a step folder, a folder of steps, a rank's .h5), a metrics.jsonl or a run's folder"},
    {.name = "--verify", .type = ARGUMENT_FLAG, .offset = offsetof(struct inspection, verify),
     .help = "read all of it and compare every checksum"},
    {.name = "--token", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct inspection, token), .low = 0,
     .high = INT64_MAX, .help = "of a token stream: show the text from token N on (default 0)"},
    {.name = "--vds", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct inspection, vds),
     .help = "of a step folder: write FILE, an HDF5 file of virtual datasets that shows whole tensors to h5py (a missing rank file reads as NaN: for analysis alone)"},
    {.name = "--sample", .value = "I", .type = ARGUMENT_INTEGER, .offset = offsetof(struct inspection, sample), .low = 0,
     .high = INT64_MAX, .help = "of a token stream: show sample I of the order, document by document; needs --seq-len"},
    {.name = "--seq-len", .value = "S", .type = ARGUMENT_INTEGER, .offset = offsetof(struct inspection, seq_len), .low = 1,
     .high = (int64_t)1 << 31, .help = "its length, as train.seq_len"},
    {.name = "--seed", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct inspection, seed), .low = 0,
     .high = INT64_MAX, .help = "the order's, as data.seed (default 1)"},
    {.name = "--shuffle-samples", .type = ARGUMENT_FLAG, .offset = offsetof(struct inspection, shuffle_samples),
     .help = "the order's, as data.shuffle_samples"},
    {.name = "--tokenizer", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct inspection, tokenizer),
     .help = "of a token stream: the tokenizer that its text is shown by; without it ids are shown, unless it is bytes"},
    {0}};

void inspect_line(const char *name, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  printf("  %-14s ", name);
  vprintf(format, arguments);
  putchar('\n');
  va_end(arguments);
}

static bool unknown(const char *path, const char *why, struct error *e) {
  error_set(e, ERROR_DATA, "%s is nothing that fp4d makes: %s", path, why);
  return error_hint(e, "inspect takes token streams, checkpoints, metrics.jsonl and run folders");
}

static bool inspect_file(const struct inspection *i, struct error *e) {
  static const char hdf5[8] = "\x89HDF\r\n\x1a\n";
  char first[8] = {0};
  FILE *in = fopen(i->path, "rb");
  if (!in) return error_errno(e, ERROR_DATA, "cannot open %s", i->path);
  const size_t n = fread(first, 1, sizeof first, in);
  const bool broken = ferror(in);
  fclose(in);
  if (broken) return error_errno(e, ERROR_DATA, "cannot read %s", i->path);
  if (n == 0) return unknown(i->path, "it is empty", e);
  if (n == sizeof first && (memcmp(first, STREAM_MAGIC, 8) == 0 || memcmp(first, INDEX_MAGIC, 8) == 0)) return inspect_stream(i, e);
  if (n == sizeof first && memcmp(first, hdf5, 8) == 0) return inspect_apart(inspect_rank_file, i, e);
  const char *slash = strrchr(i->path, '/'), *name = slash ? slash + 1 : i->path;
  if (strcmp(name, "manifest.json") == 0) {
    unknown(i->path, "it is a part of a checkpoint", e);
    return error_hint(e, "inspect the folder that it lies in");
  }
  if (first[0] == '{') return inspect_records(i, e);
  return unknown(i->path, "its first bytes are those of no such file", e);
}

static bool has(const char *folder, const char *name) {
  char path[STORE_PATH + 64];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return file_exists(path);
}

/* A run's records, then its checkpoints; the first fault is the error. */
static bool inspect_run(const struct inspection *i, struct error *e) {
  char path[STORE_PATH];
  struct inspection part = *i;
  struct error fault = {0};
  bool good = true;
  part.path = path;
  if (has(i->path, "metrics.jsonl")) {
    snprintf(path, sizeof path, "%s/metrics.jsonl", i->path);
    good = inspect_records(&part, e);
    putchar('\n');
  }
  state_folder(i->path, path, sizeof path);
  if (!file_exists(path)) {
    printf("%s: no checkpoints\n", i->path);
  } else if (!inspect_apart(inspect_steps, &part, &fault) && good) {
    *e = fault;
    good = false;
  }
  return good;
}

static bool inspect_folder(const struct inspection *i, struct error *e) {
  if (has(i->path, "manifest.json")) return inspect_apart(inspect_step, i, e);
  if (has(i->path, "metrics.jsonl") || has(i->path, "checkpoints")) return inspect_run(i, e);
  int64_t *updates;
  int n;
  if (!store_list(i->path, &updates, &n, e)) return false;
  free(updates);
  if (n > 0) return inspect_apart(inspect_steps, i, e);
  if (has(i->path, "rank-00000.h5"))
    return error_set(e, ERROR_CHECKPOINT, "%s is not a whole checkpoint: it has no manifest.json", i->path);
  return unknown(i->path, "the folder holds no manifest.json, no steps and no metrics.jsonl", e);
}

int command_inspect(int argc, char **argv) {
  struct inspection i = {.sample = -1, .seed = 1};
  struct error e = {0};
  if (!arguments_parse(command_inspect_arguments, argc, argv, &i, &e)) return command_fail(&e);
  struct stat st;
  bool good;
  if (i.vds && !has(i.path, "manifest.json"))
    good = error_set(&e, ERROR_USAGE, "--vds is for a step folder, which %s is not", i.path);
  else if (strlen(i.path) >= STORE_PATH - 32)
    good = error_set(&e, ERROR_USAGE, "the path is too long");
  else if (stat(i.path, &st) != 0)
    good = error_errno(&e, ERROR_DATA, "cannot open %s", i.path);
  else if (S_ISDIR(st.st_mode))
    good = inspect_folder(&i, &e);
  else if (S_ISREG(st.st_mode))
    good = inspect_file(&i, &e);
  else
    good = unknown(i.path, "it is no regular file", &e);
  fflush(stdout);
  return good ? ERROR_NONE : command_fail(&e);
}
