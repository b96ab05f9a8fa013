/* An ablation: matched runs that differ in their route, as a YAML file says.
 *
 *   base: tiny.yaml              # the configuration; relative to this file
 *   folder: runs/ablation        # each run in folder/ROUTE
 *   routes: [bf16, mxfp4-row-sr] # the first is what the others are compared with
 *   launch: mpirun -np 2         # words before `fp4d train`; left out: one process
 *   set: {train: {updates: 200, local_batch: 2}} # on top of the base
 */
#ifndef FP4D_TRAINER_ABLATION_H
#define FP4D_TRAINER_ABLATION_H

#include "trainer/config.h"

enum { ABLATION_ROUTES = 64, ABLATION_SETS = 64, ABLATION_WORDS = 32 };

struct ablation {
  char *base;
  char folder[CONFIG_TEXT], launch[CONFIG_TEXT];
  char *launch_word[ABLATION_WORDS]; /* into `launch` */
  char route[ABLATION_ROUTES][64];
  char *set[ABLATION_SETS]; /* "key=value" */
  int n_words, n_routes, n_sets;
};

/* ERROR_CONFIG with every problem, as FILE:LINE:COLUMN. Freed by ablation_free in any case. */
bool ablation_read(struct ablation *a, const char *path, struct error *e);
void ablation_free(struct ablation *a);

/* Adds "key=value"; route, run.name and run.folder are each run's own. */
bool ablation_set(struct ablation *a, const char *set, struct error *e);

/* folder/ROUTE, with '-' for '/' in the route's name. */
void ablation_run_folder(const struct ablation *a, int route, char *text, int size);

#endif
