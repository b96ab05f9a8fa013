/* Reading metrics.jsonl (docs/formats.md): what `compare`, `ablate` and
 * `inspect` know of a run. */
#ifndef FP4D_TRAINER_RECORDS_H
#define FP4D_TRAINER_RECORDS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"

/* Hands over every whole line's object; take returns false for what is no
 * record.  *torn is the number of a last line without its end, else 0.
 * ERROR_DATA names file and line. */
bool records_each(const char *path, bool (*take)(void *context, const json_t *object), void *context, int64_t *torn,
                  struct error *e);

/* A number as records write it, "nan" and "inf" included; NaN where there is none. */
double records_real(const json_t *value);

struct records_update {
  int64_t update;
  double loss, grad_norm;
  char batch_hash[HASH_TEXT];
};

struct records_validation {
  int64_t update, samples, targets;
  double loss;
};

struct records {
  char name[64], route[64];        /* name: of the run */
  char init_hash[HASH_TEXT], train_digest[HASH_TEXT], validation_digest[HASH_TEXT];
  char reason[32];                 /* of the last "end"; "" where the run has not ended */
  char *config;                    /* of the first start */
  bool config_changed;             /* of a later one */
  int64_t applied, skipped, halted;
  struct records_update *update;   /* ascending */
  int64_t n_updates, update_room;
  struct records_validation *validation; /* ascending */
  int64_t n_validations, validation_room;
};

/* RUN is a run's folder or a file of records. On failure there is nothing to free. */
bool records_read(struct records *r, const char *run, struct error *e);
void records_free(struct records *r);

/* NULL: none of that update. */
const struct records_update *records_update(const struct records *r, int64_t update);
const struct records_validation *records_validation(const struct records *r, int64_t update);

#endif
