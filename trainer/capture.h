/* A capture: X, W and dY of linears as they stand in training, in HDF5.
 *
 * `fp4d capture` writes it, `bench quantize` reads it; docs/formats.md has the
 * layout.  Datasets are slices as in a checkpoint's files, with attributes.
 */
#ifndef FP4D_TRAINER_CAPTURE_H
#define FP4D_TRAINER_CAPTURE_H

#include "checkpoints/hdf5.h"
#include "model/linears.h"

#define CAPTURE_FORMAT "fp4d-capture"
enum { CAPTURE_VERSION = 1 };

/* Attributes of the file. */
struct capture_header {
  struct extent extent; /* of the micro-batch that ran */
  int64_t n_layers;
  int64_t seed;         /* of stochastic rounding */
  int64_t update;       /* of the checkpoint */
  char trained[64];     /* route that trained it */
};

/* "block-01/qkv/w", "block-01/qkv/update-00000101/dy"; block counts from 1. */
void capture_name(char *text, int size, int64_t block, enum linear_site site, enum tensor t, int64_t update);

/* One dataset, as its attributes say. */
struct capture_entry {
  int slice;            /* in the file */
  int64_t block;        /* from 1 */
  int64_t update;       /* that X and dY belong to; of W: the checkpoint's */
  int64_t first_sample; /* of X and dY */
  enum linear_site site;
  enum tensor tensor;
};

struct capture_file {
  struct hdf5_file *file;
  struct capture_header header;
  struct capture_entry *entries; /* by update, block, linear */
  int n;
};

bool capture_open(struct capture_file *c, const char *path, struct error *e);
void capture_close(struct capture_file *c);

/* The entry, or NULL.  update is not looked at for W. */
const struct capture_entry *capture_find(const struct capture_file *c, int64_t block, enum linear_site site,
                                         enum tensor t, int64_t update);

/* Attributes for writing. */
enum { CAPTURE_FILE_ATTRIBUTES = 16, CAPTURE_ENTRY_ATTRIBUTES = 6 };
void capture_file_attributes(const struct capture_header *h, struct hdf5_attribute out[CAPTURE_FILE_ATTRIBUTES]);
void capture_entry_attributes(const struct capture_entry *c, struct hdf5_attribute out[CAPTURE_ENTRY_ATTRIBUTES]);

#endif
