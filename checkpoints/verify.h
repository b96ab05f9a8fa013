/* Digests of a checkpoint's files, read in shares. */
#ifndef FP4D_CHECKPOINTS_VERIFY_H
#define FP4D_CHECKPOINTS_VERIFY_H

#include "checkpoints/manifest.h"

/* Compares the digests of files rank, rank + world, ... of FOLDER with the manifest's, on up to 8
 * threads, or this rank's part of the host's processors (local_world ranks are on it).  -1: all
 * fit.  Else the number of the first file that does not, of which *e tells. */
int64_t verify_share(const char *folder, const struct manifest *m, int rank, int world, int local_world, struct error *e);

#endif
