/* What the worlds of tests/comm_*_main.c share. */
#ifndef FP4D_TESTS_COMM_RIG_H
#define FP4D_TESTS_COMM_RIG_H

#include <math.h>
#include <stdint.h>
#include <time.h>

static inline void sleep_s(double seconds) {
  struct timespec left = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - floor(seconds)) * 1e9)};
  while (nanosleep(&left, &left) != 0) {
  }
}

/* Element i of rank r, of very different sizes so that the order of a sum shows. */
static inline uint64_t bits_of(int rank, int64_t i) {
  uint64_t z = (uint64_t)i * 0x9E3779B97F4A7C15u + (uint64_t)(rank + 1) * 0xD1B54A32D192ED03u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
static inline double value_of(int rank, int64_t i) {
  uint64_t z = bits_of(rank, i);
  double mantissa = (double)(int64_t)(z >> 11) / 0x1p52 - 1;
  return ldexp(mantissa, (int)(z & 31) - 16);
}

#endif
