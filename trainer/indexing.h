/* Indexes of a configuration: made from data.sources where the sources are
 * token files and data.train names a file that ends in .index. */
#ifndef FP4D_TRAINER_INDEXING_H
#define FP4D_TRAINER_INDEXING_H

#include "comm/comm.h"
#include "trainer/config.h"

bool indexing_is_wanted(const struct config *c);

/* Refuses an existing index (of data.train or data.validation) that is not what the configuration
 * says; without data.sources nothing is known against it. */
bool indexing_is_current(const struct config *c, const char *path, struct error *e);

/* Builds them, or finds that they are there and made of what the configuration says; says
 * which in the log. With `force` builds anyway. */
bool indexing_make(const struct config *c, int threads, bool force, struct error *e);

/* The same on every host of a world that does not see them; all ranks call it. */
bool indexing_make_in_world(const struct config *c, struct comm *comm, struct error *e);

#endif
