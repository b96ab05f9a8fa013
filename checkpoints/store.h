/* A folder of checkpoints: step-00000003, step-00000006, …, latest. */
#ifndef FP4D_CHECKPOINTS_STORE_H
#define FP4D_CHECKPOINTS_STORE_H

#include <stdint.h>

#include "base/error.h"

enum { STORE_PATH = 1024 };

/* Whose fault an errno is: ERROR_CHECKPOINT the file's (absent, broken), ERROR_SYSTEM this
 * process' (permission, too many open files, memory), which says nothing about the file. */
enum error_code store_fault(int number);

/* Is PATH, a step or a folder of steps, short enough for the names that are made of it? */
bool store_path_fits(const char *path, struct error *e);

/* FOLDER/step-N, FOLDER/step-N.tmp. */
void store_step_path(const char *folder, int64_t update, char path[STORE_PATH]);
void store_temporary_path(const char *folder, int64_t update, char path[STORE_PATH]);

/* Updates of the steps present, ascending, malloc'ed; *n 0 (and NULL) where the
 * folder is absent or holds none. Folders without a manifest are listed too:
 * whether they are whole is for checkpoint_open to say. */
bool store_list(const char *folder, int64_t **updates, int *n, struct error *e);

/* Where `latest` points, if that is not there (any more); else false. */
bool store_latest_dangles(const char *folder, char target[STORE_PATH]);

/* Makes a fully written temporary folder the checkpoint of `update` and points
 * `latest` at it; durable when it returns.  It replaces one of the same update. */
bool store_publish(const char *folder, int64_t update, struct error *e);

/* Removes all but the newest `keep` steps that are whole as far as sizes tell and those
 * whose update is a multiple of keep_every, manifest first.  keep 0: none goes;
 * keep_every 0: no multiples.  What is newer than the last of these stays, whole or not. */
bool store_prune(const char *folder, int keep, int64_t keep_every, struct error *e);

/* Renames the steps after `update` to superseded-N and lets `latest` be the step
 * of `update`, or absent where the folder has none.  What was renamed is logged. */
bool store_set_aside(const char *folder, int64_t update, struct error *e);

/* Removes temporaries that an earlier process left. */
bool store_clean(const char *folder, struct error *e);

#endif
