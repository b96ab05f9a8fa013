#include <string.h>

#include "trainer/command.h"
#include "trainer/config.h"

struct help_arguments {
  const char *topic;
  bool markdown;
};

const struct argument command_help_arguments[] = {
    {.name = "TOPIC", .type = ARGUMENT_OPTIONAL_WORD, .offset = offsetof(struct help_arguments, topic),
     .help = "a command, commands (all of them) or config"},
    {.name = "--markdown", .type = ARGUMENT_FLAG, .offset = offsetof(struct help_arguments, markdown),
     .help = "commands or config as Markdown (docs/commands.md, docs/config.md)"},
    {0},
};

int command_help(int argc, char **argv) {
  struct help_arguments a = {0};
  struct error e = {0};
  if (!arguments_parse(command_help_arguments, argc, argv, &a, &e)) return command_fail(&e);
  if (!a.topic) {
    help_overview(stdout);
  } else if (strcmp(a.topic, "config") == 0) {
    config_print_options(a.markdown);
  } else if (strcmp(a.topic, "commands") == 0) {
    help_commands(stdout, a.markdown);
  } else {
    static const char *const topics[] = {"commands", "config", NULL};
    const struct command *c = command_find(a.topic);
    if (!c) {
      command_unknown(a.topic, topics, &e);
      return command_fail(&e);
    }
    help_command(c, stdout);
  }
  return ERROR_NONE;
}
