/* What an update says: one aligned line for people, one record for programs,
 * and the run header. */
#ifndef FP4D_TRAINER_REPORT_H
#define FP4D_TRAINER_REPORT_H

#include "trainer/optimizer.h"
#include "trainer/record.h"
#include "trainer/run.h"
#include "trainer/timeline.h"

struct update_report {
  int64_t update, batch_targets;
  struct hash batch_hash;
  const int64_t *source_targets; /* [STREAM_SOURCES], of the batch */
  double exchange_wait;          /* seconds that rank 0 stood still for gradients and parameters of other ranks */
  double data_wait;              /* seconds that the rank that waited longest waited for samples */
  const struct update_signals *signals;
  const struct judgement *judgement;
  const struct model_signals *seen; /* of all ranks */
  const struct step *step;
  const struct timeline *time;
  double flops_per_token; /* forward + backward, causal half counted */
  double peak_flops;      /* of one rank */
  double elapsed;         /* seconds since the loop began */
  int64_t done;           /* updates since then */
};

json_t *report_record(const struct run *run, const struct update_report *r);
void report_line(const struct run *run, const struct update_report *r);

/* The start of a run, as a record ("kind": "start") and on the log: build,
 * configuration and its hash, initial parameters' hash, data digests, topology,
 * backend, memory by category, and the formats that are actually executed. */
json_t *report_start(struct run *run, bool resumed);

/* FLOP/s that one rank could reach: log.peak_flops, else the data sheet's BF16 peak of
 * a GPU that is listed (machine.h), else measured with the backend's own BF16
 * contraction (a few large ones; the best counts). */
double report_peak_flops(struct run *run);

#endif
