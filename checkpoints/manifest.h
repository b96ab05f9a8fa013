/* manifest.json: what makes a folder a checkpoint. Written last. */
#ifndef FP4D_CHECKPOINTS_MANIFEST_H
#define FP4D_CHECKPOINTS_MANIFEST_H

#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"

/* 2: files may be compressed. 1: none is; it is read too. */
enum { MANIFEST_VERSION = 2 };

struct manifest_file {
  char name[64];
  int64_t bytes;
  struct hash hash;
};

struct manifest {
  int64_t update;
  struct manifest_file *files; /* one a rank, in rank order */
  int n_files;
  char *meta; /* JSON text */
};

/* The name of a rank's file; a manifest with another one in its place is refused. */
void manifest_file_name(int rank, struct manifest_file *f);

/* Publishes FOLDER/manifest.json (base/file.h: whole or not at all). */
bool manifest_write(const char *folder, const struct manifest *m, struct error *e);

/* Reads it; looks at none of the files that it names. */
bool manifest_load(const char *folder, struct manifest *m, struct error *e);

/* Is this file of FOLDER there, with the size and, with `verify`, the hash that
 * the manifest says? */
bool manifest_check(const char *folder, const struct manifest_file *f, bool verify, struct error *e);

/* Loads it and checks every file. */
bool manifest_read(const char *folder, bool verify, struct manifest *m, struct error *e);
void manifest_free(struct manifest *m);

/* Size and XXH3-128 of a file. */
bool manifest_measure(const char *path, struct manifest_file *f, struct error *e);

#endif
