/* The folder of an export and its small files (export*.c only). */
#ifndef FP4D_TRAINER_EXPORT_FILES_H
#define FP4D_TRAINER_EXPORT_FILES_H

#include <limits.h>

#include "checkpoints/llama_config.h"
#include "trainer/arguments.h"

/* Refuses a `folder` that holds anything; makes the empty FOLDER.tmp. */
bool export_begin(const char *folder, char temporary[PATH_MAX], struct error *e);

/* config.json, generation_config.json. */
bool export_configs(const char *temporary, const struct llama_config *c, enum dtype dtype, struct error *e);

/* Byte for byte: each file, and of each folder those whose names tokenizers have. */
bool export_copies(const char *temporary, const struct argument_list *from, struct error *e);

/* FOLDER.tmp becomes FOLDER, durably. */
bool export_publish(const char *temporary, const char *folder, struct error *e);
void export_abandon(const char *temporary);

#endif
