/* fp4d compare: runs side by side, from their records. */
#include "trainer/command.h"
#include "trainer/compare.h"

struct compare_arguments {
  struct argument_list runs;
  const char *markdown;
  int64_t every;
  bool allow_unmatched;
};

const struct argument command_compare_arguments[] = {
    {.name = "RUN", .type = ARGUMENT_WORDS, .offset = offsetof(struct compare_arguments, runs),
     .help = "run folders or metrics.jsonl files; the first is what the others are compared with"},
    {.name = "--every", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct compare_arguments, every), .low = 1,
     .high = INT64_MAX, .help = "updates between columns (default: about ten columns)"},
    {.name = "--markdown", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct compare_arguments, markdown),
     .help = "also write the tables there"},
    {.name = "--allow-unmatched", .type = ARGUMENT_FLAG, .offset = offsetof(struct compare_arguments, allow_unmatched),
     .help = "warn where initial parameters, stream or batches differ, instead of refusing"},
    {0}};

int command_compare(int argc, char **argv) {
  struct compare_arguments a = {0};
  struct error e = {0};
  if (!arguments_parse(command_compare_arguments, argc, argv, &a, &e)) return command_fail(&e);
  const struct compare c = {a.runs.item, a.runs.n, a.allow_unmatched, a.every, a.markdown};
  return compare_runs(&c, &e) ? ERROR_NONE : command_fail(&e);
}
