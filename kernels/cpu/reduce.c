/* The fixed trees, fast.
 *
 * A level of the neighbour tree reads even and odd elements of one array and
 * writes another: the compiler makes two loads, two shuffles and an add of it.
 */
#include "kernels/cpu/reduce.h"

#include "kernels/cpu/cpu.h"

/* The smallest power of two that holds `used` lanes; those between are zeroed. */
static int64_t pad_lanes(void *lanes, size_t element, int64_t used) {
  int64_t width = 1;
  while (width < used) width *= 2;
  memset((char *)lanes + (size_t)used * element, 0, (size_t)(width - used) * element);
  return width;
}

static inline void add_neighbours(float *restrict to, const float *restrict from, int64_t n) {
  for (int64_t j = 0; j < n; j++) to[j] = from[2 * j] + from[2 * j + 1];
}

static inline void add_neighbours_f64(double *restrict to, const double *restrict from, int64_t n) {
  for (int64_t j = 0; j < n; j++) to[j] = from[2 * j] + from[2 * j + 1];
}

CPU_CLONES
float cpu_reduce_lanes(float *lanes, int64_t used) {
  float other[REDUCE_LANES / 2];
  int64_t n = pad_lanes(lanes, sizeof *lanes, used);
  while (n >= 4) {
    add_neighbours(other, lanes, n / 2);
    add_neighbours(lanes, other, n / 4);
    n /= 4;
  }
  return n == 2 ? lanes[0] + lanes[1] : lanes[0];
}

CPU_CLONES
double cpu_reduce_lanes_f64(double *lanes, int64_t used) {
  double other[REDUCE_LANES / 2];
  int64_t n = pad_lanes(lanes, sizeof *lanes, used);
  while (n >= 4) {
    add_neighbours_f64(other, lanes, n / 2);
    add_neighbours_f64(lanes, other, n / 4);
    n /= 4;
  }
  return n == 2 ? lanes[0] + lanes[1] : lanes[0];
}

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

CPU_CLONES
float cpu_reduce_sum(const float *x, int64_t n) {
  float lanes[REDUCE_LANES];
  int64_t used = min_i64(n, REDUCE_LANES);
  for (int64_t l = 0; l < used; l++) lanes[l] = 0.0f + x[l];
  for (int64_t first = REDUCE_LANES; first < n; first += REDUCE_LANES) {
    int64_t count = min_i64(n - first, REDUCE_LANES);
    for (int64_t l = 0; l < count; l++) lanes[l] += x[first + l];
  }
  return cpu_reduce_lanes(lanes, used);
}

CPU_CLONES
float cpu_reduce_dot(const float *a, const float *b, int64_t n) {
  float lanes[REDUCE_LANES];
  int64_t used = min_i64(n, REDUCE_LANES);
  for (int64_t l = 0; l < used; l++) lanes[l] = f32_fma(a[l], b[l], 0.0f);
  for (int64_t first = REDUCE_LANES; first < n; first += REDUCE_LANES) {
    int64_t count = min_i64(n - first, REDUCE_LANES);
    for (int64_t l = 0; l < count; l++) lanes[l] = f32_fma(a[first + l], b[first + l], lanes[l]);
  }
  return cpu_reduce_lanes(lanes, used);
}

CPU_CLONES
void cpu_reduce_strips(float *x, int64_t strips, int64_t stride, int64_t cols) {
  for (int64_t n = strips; n > 1; n = (n + 1) / 2) {
    for (int64_t j = 0; j < n / 2; j++) {
      float *to = x + j * stride;
      const float *a = x + 2 * j * stride, *b = a + stride;
      for (int64_t c = 0; c < cols; c++) to[c] = a[c] + b[c];
    }
    if (n % 2) memcpy(x + n / 2 * stride, x + (n - 1) * stride, (size_t)cols * sizeof *x);
  }
}
