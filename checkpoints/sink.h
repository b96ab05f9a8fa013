/* Writing HDF5 files whose writes may fail.
 *
 * Once a write has failed (full disk, quota, file size limit) HDF5 cannot close
 * the file any more: it stays open inside the library, holds its descriptor and
 * its blocks, and is tried again when the process ends.  This file driver tells
 * the library that every write went well and keeps the first failure for its
 * caller, who closes the file in good order and throws it away.
 */
#ifndef FP4D_CHECKPOINTS_SINK_H
#define FP4D_CHECKPOINTS_SINK_H

#include <hdf5.h>
#include <stdbool.h>

/* Sets the driver on a file access list, for H5Fcreate alone.  *failure becomes
 * the errno of the first call that failed, 0 while none has; it must outlive
 * the file.  Closing the file also syncs it.  False where HDF5 refuses. */
bool sink_set(hid_t access, int *failure);

#endif
