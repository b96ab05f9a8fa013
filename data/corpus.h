/* Text files: finding them and reading their bytes, compressed or not. */
#ifndef FP4D_DATA_CORPUS_H
#define FP4D_DATA_CORPUS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

/* Paths in the order found, and the source that each belongs to. */
struct corpus_files {
  char **path;
  int *source;
  int64_t count, room;
};

/* Adds the file `path`, or the text files of the folder `path`; see struct
 * data_source. A source without text files is an error. */
bool corpus_find(struct corpus_files *files, const char *path, int source, struct error *e);
void corpus_files_free(struct corpus_files *files);

struct corpus_text; /* an open text file */

/* NULL with *e filled. Names ending in .gz are decompressed. */
struct corpus_text *corpus_open(const char *path, struct error *e);
/* Up to `room` bytes into `buffer`; fewer only at the end; -1 with *e filled. */
int64_t corpus_read(struct corpus_text *t, void *buffer, int64_t room, struct error *e);
void corpus_close(struct corpus_text *t);

#endif
