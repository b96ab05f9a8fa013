/* What `fp4d inspect` says about a file: one function a kind.
 *
 * Each prints what it finds on standard output and returns false with *e where
 * the file is damaged; what could be read has been printed by then. */
#ifndef FP4D_TRAINER_INSPECT_H
#define FP4D_TRAINER_INSPECT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct inspection {
  const char *path;
  bool verify;    /* read and check everything */
  const char *vds; /* of a step: the file of virtual datasets that is made; NULL: none */
  int64_t token;  /* a stream's text is shown from this token on, */
  int64_t sample; /* or, where this is not -1: this sample of the order, of seq_len tokens, by this seed */
  int64_t seq_len, seed;
  bool shuffle_samples;
  const char *tokenizer; /* that shows it; NULL: bytes for a stream of bytes, ids for others */
};

bool inspect_stream(const struct inspection *i, struct error *e);
/* The part of it that shows text. */
struct stream;
bool inspect_sample(const struct stream *s, const struct inspection *i, struct error *e);
bool inspect_rank_file(const struct inspection *i, struct error *e); /* one HDF5 file of a checkpoint */
bool inspect_step(const struct inspection *i, struct error *e);      /* a step folder */
bool inspect_steps(const struct inspection *i, struct error *e);     /* a folder of them; then the newest whole one */
bool inspect_records(const struct inspection *i, struct error *e);   /* metrics.jsonl */

/* Looks in a process of its own, whose end by a crash is an error like others. */
bool inspect_apart(bool (*look)(const struct inspection *i, struct error *e), const struct inspection *i, struct error *e);

/* One "  name          value" line. */
void inspect_line(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
