/* A command's arguments: one table, which parses them and documents them. */
#ifndef FP4D_TRAINER_ARGUMENTS_H
#define FP4D_TRAINER_ARGUMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"

enum argument_type {
  ARGUMENT_WORD,          /* positional, must be there: const char * */
  ARGUMENT_OPTIONAL_WORD, /* positional, may be left out */
  ARGUMENT_WORDS,         /* positional, all that are left (at least one): struct argument_list */
  ARGUMENT_OPTIONAL_WORDS, /* the same, or none */
  ARGUMENT_FLAG,          /* --name: bool */
  ARGUMENT_TEXT,          /* --name VALUE or --name=VALUE: const char * */
  ARGUMENT_INTEGER,       /* int64_t within [low, high] */
  ARGUMENT_NUMBER,        /* double, finite */
  ARGUMENT_REPEATED       /* --name VALUE any number of times: struct argument_list */
};

enum { ARGUMENT_LIST = 256 };

struct argument_list {
  const char *item[ARGUMENT_LIST];
  int n;
};

/* Rows of one command; ends with a row without a name.  Positional rows stand in order. */
struct argument {
  const char *name;  /* "CONFIG", or "--set" */
  const char *value; /* how help calls the value: "key=value"; NULL without one */
  enum argument_type type;
  size_t offset;     /* of the target in the command's struct */
  int64_t low, high; /* ARGUMENT_INTEGER */
  bool needed;       /* ARGUMENT_TEXT: must be given */
  const char *help;
};

/* Every command that reads a configuration takes these two. */
#define ARGUMENT_CONFIG(type_, member) \
  {.name = "CONFIG", .type = ARGUMENT_WORD, .offset = offsetof(type_, member), .help = "the run's YAML file"}
#define ARGUMENT_SETS(type_, member)                                                                         \
  {.name = "--set", .value = "key=value", .type = ARGUMENT_REPEATED, .offset = offsetof(type_, member),      \
   .help = "overrides the file, as in --set optimizer.lr=1e-3; `fp4d help config` lists the keys"}
/* And every command that only runs a model forward these two, for comparisons with transformers. */
struct parity_arguments {
  const char *norm_cast, *rope_angles;
};
#define ARGUMENT_PARITY(type_, member)                                                                                   \
  {.name = "--norm-cast", .value = "before|after", .type = ARGUMENT_TEXT, .offset = offsetof(type_, member.norm_cast),   \
   .help = "round RMSNorm's x/rms to the activations' type before its gain too, as transformers does (default: after, as trained)"}, \
  {.name = "--rope-angles", .value = "fp32|exact", .type = ARGUMENT_TEXT, .offset = offsetof(type_, member.rope_angles), \
   .help = "compute rotary angles in FP32, as transformers does (default: exact, in FP64, as trained)"}

/* Fills *target (its members keep what they hold where nothing is given) from
 * argv[1..argc-1]; "--" ends the flags.  False: ERROR_USAGE. */
bool arguments_parse(const struct argument *rows, int argc, char **argv, void *target, struct error *e);

/* "CONFIG [--set key=value]... [--force]" */
void arguments_synopsis(const struct argument *rows, FILE *out);
/* One line a row; with markdown a row of a table. */
void arguments_describe(const struct argument *rows, FILE *out, bool markdown);

#endif
