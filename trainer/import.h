/* A Hugging Face model folder as a checkpoint of update 0. */
#ifndef FP4D_TRAINER_IMPORT_H
#define FP4D_TRAINER_IMPORT_H

#include "checkpoints/checkpoint.h"

/* Makes FOLDER/step-00000000 of the Llama in `from`: its parameters as "param/…" in BF16
 * where all files are BF16, else in FP32 (FP16 becomes FP32, exactly), no moments, and a meta
 * that says `imported`.  With `yaml` also that file: the `model` section of a
 * configuration.  What cannot be represented is refused by name.  Memory: two times the largest
 * tensor, and two chunks of 8 MiB for each of up to 8 threads that compress. */
bool import_llama(const char *from, const char *folder, const char *yaml, enum checkpoint_compression compression, struct error *e);

#endif
