/* `fp4d index`: the order of token files that others made, once. */
#include <string.h>

#include "base/threads.h"
#include "trainer/command.h"
#include "trainer/indexing.h"

struct index_arguments {
  const char *config;
  struct argument_list sets;
  bool force;
};

const struct argument command_index_arguments[] = {
    ARGUMENT_CONFIG(struct index_arguments, config),
    ARGUMENT_SETS(struct index_arguments, sets),
    {.name = "--force", .type = ARGUMENT_FLAG, .offset = offsetof(struct index_arguments, force),
     .help = "make the indexes anew although they exist"},
    {0},
};

int command_index(int argc, char **argv) {
  struct index_arguments a = {0};
  struct error e = {0};
  static struct config c;
  if (!arguments_parse(command_index_arguments, argc, argv, &a, &e)) return command_fail(&e);
  if (!config_load(&c, a.config, a.sets.item, a.sets.n, &e)) return command_fail(&e);
  if (!indexing_is_wanted(&c)) {
    error_set(&e, ERROR_CONFIG, "data.train is %s: an index is a file NAME.index", c.data.train);
    error_hint(&e, "`fp4d prepare` makes token streams from text");
    return command_fail(&e);
  }
  const int threads = c.run.threads > 0 ? (int)c.run.threads : threads_available();
  return indexing_make(&c, threads, a.force, &e) ? ERROR_NONE : command_fail(&e);
}
