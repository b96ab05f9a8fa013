/* The rows of the command table (trainer/help.c): one function and one table
 * of arguments a command. */
#ifndef FP4D_TRAINER_COMMANDS_H
#define FP4D_TRAINER_COMMANDS_H

#include "trainer/arguments.h"

extern const struct argument command_train_arguments[];
int command_train(int argc, char **argv);
extern const struct argument command_eval_arguments[];
int command_eval(int argc, char **argv);
extern const struct argument command_generate_arguments[];
int command_generate(int argc, char **argv);
extern const struct argument command_plan_arguments[];
int command_plan(int argc, char **argv);

#endif
