#ifndef FP4D_TRAINER_VERSION_H
#define FP4D_TRAINER_VERSION_H

/* The build's name: `git describe` of the source tree. */
const char *version_build(void);

#endif
