/* The program's commands.
 *
 * A command is a function in trainer/command_NAME.c, the table of its
 * arguments beside it, and a row in trainer/help.c.
 */
#ifndef FP4D_TRAINER_COMMAND_H
#define FP4D_TRAINER_COMMAND_H

#include "base/error.h"
#include "checkpoints/checkpoint.h"
#include "trainer/arguments.h"

struct command {
  const char *name, *summary;
  const struct argument *arguments;
  int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns the exit code */
  const char *details;               /* more of the help text; lines end with \n */
};

/* Ends with a row without a name. */
extern const struct command commands[];

const struct command *command_find(const char *name); /* NULL: none */

/* --compression: "zstd" or "store". */
bool command_compression(const char *word, enum checkpoint_compression *out, struct error *e);

/* Prints the error; returns its exit code. */
int command_fail(const struct error *e);

/* "unknown command 'trian'; did you mean train?" in *e (ERROR_USAGE).  `also`: more
 * words that may have been meant, NULL-terminated, or NULL. */
void command_unknown(const char *name, const char *const *also, struct error *e);

void help_overview(FILE *out);
void help_command(const struct command *c, FILE *out);
/* All of them; with markdown docs/commands.md. */
void help_commands(FILE *out, bool markdown);

extern const struct argument command_train_arguments[], command_check_arguments[], command_plan_arguments[],
    command_prepare_arguments[], command_index_arguments[], command_eval_arguments[], command_generate_arguments[], command_inspect_arguments[],
    command_bench_arguments[], command_capture_arguments[], command_compare_arguments[],
    command_ablate_arguments[], command_tokenize_arguments[], command_export_arguments[], command_import_arguments[],
    command_score_arguments[], command_diff_arguments[],
    command_reshard_arguments[], command_doctor_arguments[], command_help_arguments[];
int command_train(int argc, char **argv);
int command_check(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_prepare(int argc, char **argv);
int command_index(int argc, char **argv);
int command_eval(int argc, char **argv);
int command_generate(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_capture(int argc, char **argv);
int command_compare(int argc, char **argv);
int command_ablate(int argc, char **argv);
int command_tokenize(int argc, char **argv);
int command_export(int argc, char **argv);
int command_import(int argc, char **argv);
int command_score(int argc, char **argv);
int command_diff(int argc, char **argv);
int command_reshard(int argc, char **argv);
int command_doctor(int argc, char **argv);
int command_help(int argc, char **argv);

#endif
