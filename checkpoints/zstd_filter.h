/* HDF5's registered filter 32015, zstd.
 *
 * In our process it stands beside our own reader and writer of chunks (chunk.h),
 * so that HDF5's pipeline knows it too; in a plugin of its own (plugin/fp4d_zstd.c)
 * it lets h5py, h5dump and h5repack read checkpoints.  It needs nothing of the
 * HDF5 library but a header, so that it fits any build of that.
 */
#ifndef FP4D_CHECKPOINTS_ZSTD_FILTER_H
#define FP4D_CHECKPOINTS_ZSTD_FILTER_H

#include <hdf5.h>

enum { ZSTD_FILTER = 32015 };

extern const H5Z_class2_t zstd_filter;

#endif
