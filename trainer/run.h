/* A run: everything that `train`, `eval` and `generate` stand on.
 *
 * Opened in one order (configuration, world, device, model in its arena, data)
 * by run_open; every rank fails together with the first failing rank's error.
 */
#ifndef FP4D_TRAINER_RUN_H
#define FP4D_TRAINER_RUN_H

#include <stdint.h>

#include "base/arena.h"
#include "base/hash.h"
#include "comm/comm.h"
#include "data/data.h"
#include "kernels/kernels.h"
#include "model/model.h"
#include "trainer/arguments.h"
#include "trainer/config.h"
#include "trainer/divergence.h"

enum run_purpose {
  RUN_TRAIN,    /* parameters, moments, gradients; both streams */
  RUN_EVAL,     /* parameters; the validation stream */
  RUN_GENERATE  /* parameters; no data; one process */
};

struct run {
  struct config config;
  char *config_text; /* resolved, as YAML */
  struct hash config_hash;

  struct comm *comm;
  int rank, world;
  int threads; /* of this rank: run.threads, or its share of the host's processors */

  struct device *device;
  void *memory;
  struct arena arena;
  struct model *model;
  struct model_parity parity; /* zeros unless run_set_parity or vocabulary_set says otherwise */
  int64_t tokens;  /* of a micro-batch: local_batch * seq_len */
  int32_t *inputs, *targets; /* device, [tokens] */
  int32_t *starts;           /* likewise, of data.attention: document; else NULL */
  float *nll;                /* device, [tokens] */
  float *logits;             /* device, [vocab_size]; RUN_GENERATE */
  double *loss;              /* device: an update's sum of nll */
  struct comm_part *gradient_parts, *weight_parts; /* [parameters], of RUN_TRAIN: trainer/shards.h */
  int64_t *weight_copies;                          /* likewise, [units]: tickets of the newest copies */
  void *staging;                          /* device, [staging_bytes], for exchanges between devices; else NULL */
  int64_t staging_bytes;
  struct measure *gradient_measures;      /* device, [parameters] */
  struct update_measure *update_measures; /* device, [parameters] */

  void *host; /* the backend's host memory, which it copies to and from beside computing: what follows lies in it */
  int32_t *host_inputs, *host_targets, *host_starts; /* [tokens]; starts as above */
  float *host_nll;                                   /* [tokens] */
  double *host_loss;
  struct measure *host_gradient_measures;      /* [parameters] */
  struct update_measure *host_update_measures; /* [parameters] */

  int64_t local_batch;       /* samples of a micro-batch */
  int64_t first_micro_batch; /* of an update's, which this rank computes; 0 but in training */
  int64_t accumulation;      /* micro-batches from there on, rank 0 has the most; 0 but in training */
  struct stream *train, *validation;
  struct data_order train_order, validation_order;

  /* State that a checkpoint carries besides tensors. */
  int64_t update;  /* updates done, skipped ones included */
  int64_t applied; /* updates that changed parameters: AdamW's t */
  int64_t samples; /* samples consumed: the next update reads from here */
  int64_t tokens_read; /* in these; samples may have had another length before a resume */
  int64_t source_tokens[STREAM_SOURCES]; /* of these, by the training stream's source that the target is of */
  struct hash init_hash; /* of the initial parameters */
  struct divergence divergence;
};

/* Opens a run.  `config` was loaded by the caller with `loaded` telling whether
 * that succeeded (`e` then holds the configuration's problems): the world is
 * joined first, so that problems are reported once and every rank leaves.
 * On failure run_leave reports, before any rank leaves, and closes what was opened. */
bool run_open(struct run *run, const struct config *config, bool loaded, enum run_purpose purpose, struct error *e);

/* Lays out model and batch in run->arena, for run->config on run->device; over a
 * measuring arena first, then over a real one. */
bool run_lay_out(struct run *run, enum run_purpose purpose, struct error *e);

/* Takes the host's side of it, run->host, once the model is laid out, and gives it back. */
bool run_take_host(struct run *run, enum run_purpose purpose, struct error *e);
void run_release_host(struct run *run);

/* Closes the run and gives the exit code: reports a failure once (rank 0) where
 * all ranks agree on it, and ends the whole job where only this rank has it. */
int run_leave(struct run *run, bool good, struct error *e);

/* ARGUMENT_PARITY's words. Of a run without training; holds when it is laid out anew. */
bool run_set_parity(struct run *run, const struct parity_arguments *a, struct error *e);

/* Hash of all parameters (of the master where there is one), the same in every world. All ranks. */
bool run_parameter_hash(struct run *run, struct hash *out, struct error *e);

/* Begins to copy a micro-batch, [tokens] each, to the device; the rest of it is the caller's to fill in. starts may be
 * NULL.  Nobody waits for the copy: what is copied stands until the device is next synchronized. */
struct micro_batch run_upload(struct run *run, const int32_t *inputs, const int32_t *targets, const int32_t *starts);

/* What data.attention and data.boundary say, in words. */
enum { RUN_DOCUMENTS_TEXT = 128 };
void run_documents_text(const struct config *c, char text[RUN_DOCUMENTS_TEXT]);

/* Sets what fprop contracts to what update `update` (0: before the first) does. */
void run_set_forward(struct run *run, int64_t update);

/* `fault` of the configuration: is KIND due at this update on this rank? */
bool run_fault(const struct run *run, const char *kind, int64_t update);

#endif
