/* 64-bit arithmetic that says when it overflows. */
#ifndef FP4D_BASE_CHECKED_H
#define FP4D_BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* *out = a + b, a * b; false on overflow (then *out is not to be used). */
static inline bool checked_add(int64_t a, int64_t b, int64_t *out) { return !__builtin_add_overflow(a, b, out); }
static inline bool checked_mul(int64_t a, int64_t b, int64_t *out) { return !__builtin_mul_overflow(a, b, out); }

/* *out = a / b where b > 0 divides a exactly; false otherwise. */
static inline bool checked_div_exact(int64_t a, int64_t b, int64_t *out) {
  if (b <= 0 || a % b != 0) return false;
  *out = a / b;
  return true;
}

/* The smallest multiple of `unit` that is >= n (n >= 0, unit > 0). */
static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* ceil(n / unit) for n >= 0, unit > 0. */
static inline int64_t ceil_div(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

#endif
