/* The zstd filter as a plugin, for h5py, h5dump and h5repack:
 *
 *   HDF5_PLUGIN_PATH=build/plugins h5dump step-00000500/rank-00000.h5
 */
#include <H5PLextern.h>

#include "checkpoints/zstd_filter.h"

H5PL_type_t H5PLget_plugin_type(void) { return H5PL_TYPE_FILTER; }
const void *H5PLget_plugin_info(void) { return &zstd_filter; }
