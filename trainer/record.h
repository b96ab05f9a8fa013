/* Records: metrics.jsonl, one self-contained JSON object a line.
 *
 * Kinds: "start" (a process began or went on), "update", "validation",
 * "checkpoint", "end".  Every record carries "update".  Lines are appended and
 * flushed; on resume the file is cut back to the checkpoint, so there is one
 * line per update whatever happened in between.  Numbers are written with 17
 * significant digits, i.e. exactly; non-finite ones as the strings "nan",
 * "inf", "-inf" (JSON has no such numbers).
 */
#ifndef FP4D_TRAINER_RECORD_H
#define FP4D_TRAINER_RECORD_H

#include <jansson.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"
#include "comm/comm.h"

struct record_file; /* opaque */

/* Takes FOLDER's lock: a second process on the same run folder is refused.
 * Nothing else of the run is read or written before that. */
struct record_file *record_open(const char *folder, struct error *e);

/* Opens FOLDER/metrics.jsonl to go on after `update`: later lines (and a torn
 * last line) are cut away; update 0 empties the file. */
bool record_begin(struct record_file *f, int64_t update, struct error *e);

/* The newest "contractions" among the lines that record_begin kept; NULL: none. */
const json_t *record_contractions(const struct record_file *f);

/* Appends an object and flushes; takes the reference to `object`. */
bool record_write(struct record_file *f, json_t *object, struct error *e);

/* The same by all ranks, of which rank 0 has a file and appends to it; `f` is NULL elsewhere. */
bool record_write_together(struct record_file *f, struct comm *c, json_t *object, struct error *e);
void record_close(struct record_file *f);

/* A number as JSON; what is not finite is the text "nan", "inf" or "-inf". */
json_t *record_number(double value);

/* object[key] = value, as the file writes it. */
void record_real(json_t *object, const char *key, double value);
void record_integer(json_t *object, const char *key, int64_t value);
void record_text(json_t *object, const char *key, const char *value);
void record_hash(json_t *object, const char *key, struct hash value);

/* One line of JSON text, malloc'ed. */
char *record_dump(const json_t *object);

#endif
