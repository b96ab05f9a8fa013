/* Random numbers of the tests' own: a sequence that begins at `state`. */
#ifndef FP4D_TESTS_RANDOM_H
#define FP4D_TESTS_RANDOM_H

#include <math.h>
#include <stdint.h>

static uint64_t state = 1;

static inline uint32_t next(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 32);
}

static inline double uniform(void) { return (next() + .5) * 0x1p-32; } /* (0, 1) */

static inline double normal(void) {
  const double u = uniform();
  return sqrt(-2 * log(u)) * cos(6.283185307179586 * uniform());
}

#endif
