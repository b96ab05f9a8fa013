/* fp4d reshard: a checkpoint written again. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "checkpoints/checkpoint.h"
#include "trainer/command.h"
#include "trainer/state.h"

struct reshard_arguments {
  const char *checkpoint, *out, *compression;
  int64_t ranks;
};

const struct argument command_reshard_arguments[] = {
    {.name = "CKPT", .type = ARGUMENT_WORD, .offset = offsetof(struct reshard_arguments, checkpoint),
     .help = "a step folder, or a folder of steps or a run's folder (then the newest whole one)"},
    {.name = "OUT", .type = ARGUMENT_WORD, .offset = offsetof(struct reshard_arguments, out),
     .help = "the step folder that is written; it must not be there"},
    {.name = "--ranks", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct reshard_arguments, ranks), .low = 1,
     .high = 1 << 20, .help = "how many files, each with its share of every tensor's rows (default 1)"},
    {.name = "--compression", .value = "zstd|store", .type = ARGUMENT_TEXT, .offset = offsetof(struct reshard_arguments, compression),
     .help = "as checkpoint.compression (default zstd)"},
    {0}};

bool command_compression(const char *word, enum checkpoint_compression *out, struct error *e) {
  *out = strcmp(word, "store") == 0 ? CHECKPOINT_STORE : CHECKPOINT_ZSTD;
  return *out == CHECKPOINT_STORE || strcmp(word, "zstd") == 0 ||
         error_set(e, ERROR_USAGE, "--compression '%.40s': there are zstd and store", word);
}

int command_reshard(int argc, char **argv) {
  struct reshard_arguments a = {.compression = "zstd", .ranks = 1};
  struct error e = {0};
  enum checkpoint_compression compression;
  if (!arguments_parse(command_reshard_arguments, argc, argv, &a, &e) || !command_compression(a.compression, &compression, &e))
    return command_fail(&e);
  struct checkpoint *k = state_find(a.checkpoint, &e);
  if (!k) return command_fail(&e);
  const double t0 = clock_seconds();
  const bool good = checkpoint_reshard(k, a.out, (int)a.ranks, compression, &e);
  if (good)
    printf("%s: update %" PRId64 ", %d tensors of %s in %" PRId64 " file%s, %.1f s\n", a.out, checkpoint_update(k), checkpoint_tensor_count(k),
           checkpoint_path(k), a.ranks, a.ranks == 1 ? "" : "s", clock_seconds() - t0);
  checkpoint_close(k);
  return good ? ERROR_NONE : command_fail(&e);
}
