/* A run's configuration: one struct, filled from YAML, --set and defaults.
 *
 * trainer/options.c holds one table per section (key, type, range, default,
 * help); the same rows drive parsing, --set, `help config`, the resolved dump
 * saved with the run, and docs/config.md.  Every problem of a file is reported
 * at once, each as FILE:LINE:COLUMN.
 */
#ifndef FP4D_TRAINER_CONFIG_H
#define FP4D_TRAINER_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "comm/comm.h"
#include "data/source.h"
#include "model/model.h"

enum { CONFIG_TEXT = 512 };

enum schedule_kind { SCHEDULE_CONSTANT, SCHEDULE_COSINE, SCHEDULE_WSD };
enum checkpoint_failure { CHECKPOINT_CONTINUE, CHECKPOINT_STOP };
enum divergence_policy { DIVERGENCE_RECORD, DIVERGENCE_HALT, DIVERGENCE_SKIP };

struct config {
  struct {
    char name[CONFIG_TEXT]; /* "demo-bf16" */
    char folder[CONFIG_TEXT]; /* where metrics.jsonl and checkpoints go: runs/NAME */
    int64_t seed;
    char backend[32]; /* "cpu" */
    int64_t threads;  /* per rank; 0 = cores / ranks on the host */
    int64_t ranks;    /* expected world size; 0 = any */
    int64_t stop_after_update; /* end (as finished preemption, exit 75) after this update; 0 = off: for tests and time slices */
  } run;

  struct {
    char preset[64]; /* names a base; keys below override it */
    struct model_config shape;
  } model;

  char route_name[64];
  struct route route; /* resolved against model.shape.n_layers */

  struct {
    struct data_source source[DATA_SOURCES]; /* what `prepare` and `index` read */
    int64_t n_sources;
    struct data_stage stage[DATA_STAGES]; /* none: the sources' own weights throughout */
    int64_t n_stages;
    int64_t tokens;          /* length of the training stream; 0 = what the sources give */
    char train[CONFIG_TEXT]; /* token streams or indexes */
    char validation[CONFIG_TEXT];
    double validation_fraction;
    int64_t seed;
    bool shuffle_documents, shuffle_samples;
    struct data_skip skip[DATA_SKIPS]; /* samples of the order left out, ascending */
    int64_t n_skips;
    bool allow_change; /* resume with another stream digest */
    char tokenizer[CONFIG_TEXT]; /* "bytes" or a file */
    bool bos, eos;               /* put round each document by `prepare` */
    enum data_invalid_utf8 invalid_utf8;
    enum data_dedup dedup;
    double minhash_threshold;
    bool overlap_report;
    int64_t prepare_memory; /* bytes */
    enum data_boundary boundary;
    enum data_attention attention;
  } data;

  struct {
    int64_t updates;
    int64_t global_batch; /* samples an update */
    int64_t local_batch;  /* samples a micro-batch on a rank */
    int64_t accumulation; /* micro-batches of a rank in an update; 0 = global / (local * ranks), one more on the first where not whole */
    int64_t seq_len;
    enum recompute recompute;
    int64_t recompute_every;
    int64_t head_chunk; /* 0 = chosen */
    enum dtype param_dtype;
    bool master;
    enum dtype gradient_dtype;
    bool overfit_one_batch; /* every update reads update 0's samples */
  } train;

  struct {
    double lr, min_lr, beta1, beta2, eps, weight_decay, clip; /* clip 0 = none */
    enum schedule_kind schedule;
    int64_t warmup_updates;
    int64_t decay_updates; /* WSD: length of the last phase; cosine: 0 = to the end */
  } optimizer;

  struct {
    int64_t every; /* updates; 0 = never (only at the end and on signals) */
    int64_t keep;  /* newest kept; 0 = all */
    int64_t keep_every; /* and each update that is a multiple; 0 = none */
    bool at_end;
    bool async;    /* written by a thread while training goes on */
    int64_t threads; /* that compress; 0 = half of the rank's, at most 8 */
    enum checkpoint_compression compression;
    enum checkpoint_failure on_failure;
  } checkpoint;

  struct {
    int64_t every; /* updates; 0 = only at the end */
    int64_t samples; /* of the validation stream, from its start; 0 = all */
  } validation;

  struct {
    enum divergence_policy nonfinite; /* halt or skip (never record: a parameter is never touched) */
    enum divergence_policy grad_norm;
    enum divergence_policy loss;
    enum divergence_policy attention_zeros;
    double grad_norm_z, loss_z; /* z-score over `window` */
    double attention_zero_fraction; /* of attention's dO and dS, each */
    int64_t window;             /* updates of running statistics */
  } divergence;

  struct comm_limits limits;

  struct {
    int64_t every; /* human lines: each n-th update */
    double peak_flops; /* of one rank, for MFU; 0 = measured GEMM rate (cpu) or device table */
    enum log_level level;
  } log;

  /* Fault injection, for tests: "nan@7/1" = NaN in rank 1's gradients at update 7;
   * "stall@3/0", "kill@3/1", "save-error@4", "spike@5/1". Empty = none. */
  char fault[64];
};

/* Reads FILE, applies --set key=value overrides in order, checks everything.
 * On failure *e (ERROR_CONFIG) holds every problem, one a line, as
 * FILE:LINE:COLUMN: KEY: what (or "--set KEY: what"). */
/* The limits of a command without a configuration, or with one that cannot be read. */
void config_default_limits(struct comm_limits *out);

bool config_load(struct config *c, const char *path, const char *const *sets, int n_sets, struct error *e);

/* The same from text (a checkpoint's saved config); `name` stands for FILE. */
bool config_parse(struct config *c, const char *text, const char *name, const char *const *sets, int n_sets,
                  struct error *e);

/* The resolved configuration as YAML that config_parse reads back to the same
 * struct; malloc'ed. */
char *config_dump(const struct config *c);

/* Prints every section's keys with type, range, default and help: for
 * `fp4d help config` and, with markdown, docs/config.md. */
void config_print_options(bool markdown);

#endif
