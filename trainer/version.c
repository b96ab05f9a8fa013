#include "trainer/version.h"

#ifndef FP4D_VERSION
#define FP4D_VERSION "unknown"
#endif

const char *version_build(void) { return FP4D_VERSION; }
