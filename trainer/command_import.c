/* fp4d import: a Hugging Face Llama as a checkpoint. */
#include "trainer/command.h"
#include "trainer/import.h"

struct import_arguments {
  const char *from, *folder, *yaml, *compression;
};

const struct argument command_import_arguments[] = {
    {.name = "DIR", .type = ARGUMENT_WORD, .offset = offsetof(struct import_arguments, from),
     .help = "holds config.json and model.safetensors, or shards and model.safetensors.index.json"},
    {.name = "CKPT-FOLDER", .type = ARGUMENT_WORD, .offset = offsetof(struct import_arguments, folder),
     .help = "gets step-00000000; holds no step yet"},
    {.name = "--config", .value = "OUT.yaml", .type = ARGUMENT_TEXT, .offset = offsetof(struct import_arguments, yaml),
     .help = "also write the model section of a configuration"},
    {.name = "--compression", .value = "zstd|store", .type = ARGUMENT_TEXT, .offset = offsetof(struct import_arguments, compression),
     .help = "as checkpoint.compression (default zstd)"},
    {0}};

int command_import(int argc, char **argv) {
  struct import_arguments a = {.compression = "zstd"};
  struct error e = {0};
  enum checkpoint_compression compression;
  if (!arguments_parse(command_import_arguments, argc, argv, &a, &e) || !command_compression(a.compression, &compression, &e))
    return command_fail(&e);
  return import_llama(a.from, a.folder, a.yaml, compression, &e) ? ERROR_NONE : command_fail(&e);
}
