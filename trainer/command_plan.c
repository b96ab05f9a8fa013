/* fp4d plan: what a run needs and could reach; trains nothing. */
#include <string.h>

#include "trainer/command.h"
#include "trainer/plan.h"

struct plan_arguments {
  const char *config, *machine;
  struct argument_list sets;
  int64_t gpus;
};

const struct argument command_plan_arguments[] = {
    ARGUMENT_CONFIG(struct plan_arguments, config),
    ARGUMENT_SETS(struct plan_arguments, sets),
    {.name = "--gpus", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct plan_arguments, gpus),
     .low = 1, .high = 1 << 20, .help = "one number of GPUs (default: a table from 1 to 72)"},
    {.name = "--machine", .value = "NAME", .type = ARGUMENT_TEXT, .offset = offsetof(struct plan_arguments, machine),
     .help = "a100, h100, h200, b200, gb200, gb300, or cpu: this machine, measured (default: gb200 and h200)"},
    {0}};

static bool find_machine(const char *name, const struct machine **out, struct error *e) {
  *out = name ? machine_named(name) : NULL;
  if (*out || !name || strcmp(name, "cpu") == 0) return true;
  char known[256] = "";
  int n;
  const struct machine *all = machine_list(&n);
  for (int i = 0; i < n; i++) {
    if (i) strncat(known, ", ", sizeof known - strlen(known) - 1);
    strncat(known, all[i].name, sizeof known - strlen(known) - 1);
  }
  strncat(known, ", cpu", sizeof known - strlen(known) - 1);
  return error_set(e, ERROR_USAGE, "--machine %s is not known; known are %s", name, known);
}

int command_plan(int argc, char **argv) {
  struct plan_arguments a = {0};
  struct error e = {0};
  struct config config;
  const struct machine *machine;
  struct machine here;
  bool good = arguments_parse(command_plan_arguments, argc, argv, &a, &e) && find_machine(a.machine, &machine, &e) &&
              config_load(&config, a.config, a.sets.item, a.sets.n, &e);
  if (good && a.machine && !machine) { /* cpu */
    good = machine_here((int)config.run.threads, &here, &e);
    machine = &here;
  }
  if (!good || !plan_print(stdout, &config, machine, a.gpus, &e)) return command_fail(&e);
  return ERROR_NONE;
}
