/* Residual + RMSNorm: the arithmetic and the trees of kernels/cpu/rmsnorm.c.
 *
 * Forward: a row a block of 128 threads, which hold it in registers between the
 * sum and the scaling.  Moves residual and delta in, residual_out and out out:
 * 4 elements for each of out (2 without delta).
 *
 * Backward: a strip of 32 rows a block of 256 threads.  Each holds its columns'
 * sums of d_gain while it walks the rows, and has the next row copied to shared
 * memory while it computes one.  Moves dy, residual, d_above in, d_residual out: 4
 * elements for each of d_residual; strips' sums besides, an eighth of an FP32 row
 * a row of BF16.  Then the tree over strips, 256 of them a pass.
 *
 * Rows too long for the registers are read again, from the caches at best.
 */
#include "kernels/cuda/reduce.cuh"

namespace {

enum { FORWARD_VECTOR = 8, FORWARD_THREADS = REDUCE_LANES / FORWARD_VECTOR };
enum { BACKWARD_VECTOR = 4, BACKWARD_THREADS = REDUCE_LANES / BACKWARD_VECTOR };

/* ---- forward --------------------------------------------------------------- */
struct forward {
  struct targets out;
  void *residual_out;
  float *rstd;
  const void *residual, *delta, *gain; /* delta may be NULL */
  float eps;
  int64_t rows, n;
};

/* A piece of the residual: x, what of it is written, and its squares taken up by the lanes. */
template <typename T, bool WHOLE>
CUDA_INLINE void take_piece(packed<T, 8> &x, const packed<T, 8> &delta, const struct forward &f, int64_t row, int64_t i,
                            float (&lane)[8]) {
  float v[8];
  unpack(v, x);
  if (f.delta) {
    float add[8];
    unpack(add, delta);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = v[e] + add[e];
    pack(x, v);
    row_store<WHOLE>((T *)f.residual_out + row * f.n, i, f.n, x);
    unpack(v, x);
  }
#pragma unroll
  for (int e = 0; e < 8; e++) lane[e] = f32_fma(v[e], v[e], lane[e]); /* of an element that is not there: +0 */
}

template <bool WHOLE, bool CAST, typename T, typename G>
CUDA_INLINE void scale_piece(packed<T, 8> &x, const packed<G, 8> &gain, const struct forward &f, float rstd, int64_t row, int64_t i) {
  float v[8], g[8];
  unpack(g, gain);
  unpack(v, x);
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] = v[e] * rstd;
  if (CAST) {
    pack(x, v);
    unpack(v, x);
  }
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] = v[e] * g[e];
  pack(x, v);
  targets_store<WHOLE>(f.out, row * f.n, i, f.n, x);
}

CUDA_INLINE float rstd_of(float (&lane)[8], float *shared, const struct forward &f, int64_t row) {
  const float mean = reduce_lanes(lane, shared) / (float)f.n;
  const float rstd = 1.0f / f32_sqrt(mean + f.eps);
  if (threadIdx.x == 0) f.rstd[row] = rstd;
  return rstd;
}

/* PIECES of 1024 elements hold a row, and the gain (G) comes while it is summed; 0: as many as it has, read twice. */
template <typename T, typename G, int PIECES, bool WHOLE, bool CAST>
__global__ void __launch_bounds__(FORWARD_THREADS) normalise(const __grid_constant__ struct forward f) {
  __shared__ float shared[2][FORWARD_THREADS / 32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < f.rows; row += gridDim.x, turn ^= 1) {
    const T *residual = (const T *)f.residual + row * f.n, *delta = (const T *)f.delta + (f.delta ? row * f.n : 0);
    const G *gain = (const G *)f.gain;
    const int64_t first = (int64_t)threadIdx.x * 8;
    float lane[8] = {0.0f};
    if constexpr (PIECES > 0) {
      packed<T, 8> x[PIECES], d[PIECES];
      packed<G, 8> g[PIECES];
#pragma unroll
      for (int p = 0; p < PIECES; p++) {
        row_load<WHOLE>(x[p], residual, first + p * REDUCE_LANES, f.n);
        if (f.delta) row_load<WHOLE>(d[p], delta, first + p * REDUCE_LANES, f.n);
      }
#pragma unroll
      for (int p = 0; p < PIECES; p++) take_piece<T, WHOLE>(x[p], d[p], f, row, first + p * REDUCE_LANES, lane);
#pragma unroll
      for (int p = 0; p < PIECES; p++) row_load<WHOLE>(g[p], gain, first + p * REDUCE_LANES, f.n);
      const float rstd = rstd_of(lane, shared[turn], f, row);
#pragma unroll
      for (int p = 0; p < PIECES; p++)
        scale_piece<WHOLE, CAST>(x[p], g[p], f, rstd, row, first + p * REDUCE_LANES);
    } else {
      packed<T, 8> x, d;
      packed<G, 8> g;
      for (int64_t i = first; i < f.n; i += REDUCE_LANES) {
        row_load<WHOLE>(x, residual, i, f.n);
        if (f.delta) row_load<WHOLE>(d, delta, i, f.n);
        take_piece<T, WHOLE>(x, d, f, row, i, lane);
      }
      const float rstd = rstd_of(lane, shared[turn], f, row);
      const T *sum = f.delta ? (const T *)f.residual_out + row * f.n : residual; /* this thread's own writes */
      for (int64_t i = first; i < f.n; i += REDUCE_LANES) {
        row_load<WHOLE>(x, sum, i, f.n);
        row_load<WHOLE>(g, gain, i, f.n);
        scale_piece<WHOLE, CAST>(x, g, f, rstd, row, i);
      }
    }
  }
}

/* f(pieces of a row that registers hold, or 0; whether they are whole), as types. */
template <int MOST, typename F> void with_pieces(int64_t n, bool whole, F f) {
  if (!whole) {
    f(std::integral_constant<int, 0>(), std::false_type());
    return;
  }
  if constexpr (MOST > 0) {
    const int64_t pieces = (n + REDUCE_LANES - 1) / REDUCE_LANES;
    if (pieces == 1) {
      f(std::integral_constant<int, 1>(), std::true_type());
      return;
    }
    if (pieces <= MOST) {
      if (pieces <= 4) f(std::integral_constant<int, 4>(), std::true_type());
      else f(std::integral_constant<int, MOST>(), std::true_type());
      return;
    }
  }
  f(std::integral_constant<int, 0>(), std::true_type());
}

template <bool CAST>
static void run_forward(struct device *device, const struct emission *out, struct matrix *residual_out, float *rstd,
                        const struct matrix *residual, const struct matrix *delta, const struct matrix *gain, float eps) {
  struct cuda_device *d = cuda_of(device);
  const int64_t rows = residual->rows, n = residual->cols;
  CUDA_REQUIRE(gain->rows * gain->cols == n, "the gain does not have the rows' length");
  CUDA_REQUIRE(!delta || (residual_out && residual_out->dtype == residual->dtype && delta->dtype == residual->dtype),
               "residual_out or delta is not of residual's type");
  struct forward f = {targets_of(out, residual->dtype, rows, n), delta ? residual_out->data : NULL, rstd, residual->data,
                      delta ? delta->data : NULL, gain->data, eps, rows, n};
  if (rows * n == 0) return;
  const bool aligned = cuda_whole(n, FORWARD_VECTOR, f.residual_out, f.residual, f.delta, f.gain) && targets_whole(&f.out);
  with_type(residual->dtype, [&](auto zero) {
    with_type(gain->dtype, [&](auto one) {
      with_pieces<CAST ? 0 : 8>(n, aligned, [&](auto pieces, auto whole) { /* cast forwards are for evaluating: not so fast */
        CUDA_LAUNCH(d, (normalise<decltype(zero), decltype(one), decltype(pieces)::value, decltype(whole)::value, CAST>),
                    grid_of_tasks(rows), FORWARD_THREADS, 0, f);
      });
    });
  });
}

/* ---- backward --------------------------------------------------------------- */
struct backward {
  struct targets out;
  float *partial; /* [strips, n] */
  const void *dy, *above, *residual, *gain; /* above may be NULL */
  bool gain_is_bf16;
  const float *rstd;
  int64_t rows, n;
};

/* Four columns of a row. */
template <typename T> struct piece {
  packed<T, BACKWARD_VECTOR> dy, x, above;
};

template <typename T, bool WHOLE>
CUDA_INLINE void piece_load(struct piece<T> &p, const struct backward &b, int64_t row, int64_t i) {
  row_load<WHOLE>(p.dy, (const T *)b.dy + row * b.n, i, b.n);
  row_load<WHOLE>(p.x, (const T *)b.residual + row * b.n, i, b.n);
  if (b.above) row_load<WHOLE>(p.above, (const T *)b.above + row * b.n, i, b.n);
}

/* lane[e] takes t x of the elements that are there: another +0 would make +0 of -0. */
template <bool WHOLE, typename T>
CUDA_INLINE void piece_dot(float (&lane)[BACKWARD_VECTOR], const struct piece<T> &p, const float (&gain)[BACKWARD_VECTOR],
                           int64_t i, int64_t n) {
  float dy[BACKWARD_VECTOR], x[BACKWARD_VECTOR];
  unpack(dy, p.dy);
  unpack(x, p.x);
#pragma unroll
  for (int e = 0; e < BACKWARD_VECTOR; e++)
    if (WHOLE ? i < n : i + e < n) lane[e] = f32_fma(dy[e] * gain[e], x[e], lane[e]);
}

template <bool WHOLE, bool USUAL, typename T>
CUDA_INLINE void piece_finish(float (&d_gain)[BACKWARD_VECTOR], const struct piece<T> &p, const float (&gain)[BACKWARD_VECTOR],
                              const struct backward &b, int64_t row, int64_t i, float rstd, float c) {
  float dy[BACKWARD_VECTOR], x[BACKWARD_VECTOR], t[BACKWARD_VECTOR];
  unpack(dy, p.dy);
  unpack(x, p.x);
#pragma unroll
  for (int e = 0; e < BACKWARD_VECTOR; e++) {
    d_gain[e] = f32_fma(dy[e], x[e] * rstd, d_gain[e]);
    t[e] = rstd * f32_fma(-x[e], c, dy[e] * gain[e]);
  }
  if (b.above) {
    unpack(x, p.above);
#pragma unroll
    for (int e = 0; e < BACKWARD_VECTOR; e++) t[e] = t[e] + x[e];
  }
  packed<T, BACKWARD_VECTOR> result;
  pack(result, t);
  if constexpr (USUAL) row_store<WHOLE>((T *)b.out.at[0] + row * b.n, i, b.n, result);
  else targets_store<WHOLE>(b.out, row * b.n, i, b.n, result);
}

/* A row, and the next on its way: each thread reads what it asked for itself, and of
 * pieces past the row's end what was there, of which nothing is kept. */
template <typename T, int PIECES> struct rows_ahead {
  packed<T, BACKWARD_VECTOR> row[2][3][PIECES][BACKWARD_THREADS]; /* of dy, residual, d_above */
};
template <typename T, int PIECES> constexpr size_t rows_ahead_bytes() {
  if constexpr (PIECES > 0) return sizeof(struct rows_ahead<T, PIECES>);
  else return 0;
}

template <typename T> CUDA_INLINE void copy_begin(packed<T, BACKWARD_VECTOR> *to, const T *from) {
#ifdef FP4D_CUDA_MODEL
  words_load(to->word, from);
#else
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (sizeof(*to) == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(from) : "memory");
#endif
}

/* All that this thread began before is there, but for the last row. */
CUDA_INLINE void copy_wait_but_last() {
#ifndef FP4D_CUDA_MODEL
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

/* A row that is none is a group all the same. */
template <typename T, int PIECES> CUDA_INLINE void row_begin(struct rows_ahead<T, PIECES> *to, int turn, const struct backward &b, int64_t row, int64_t end) {
  const void *const from[3] = {b.dy, b.residual, b.above};
#pragma unroll
  for (int a = 0; a < 3; a++)
    if (row < end && from[a])
#pragma unroll
      for (int p = 0; p < PIECES; p++) {
        const int64_t i = (int64_t)threadIdx.x * BACKWARD_VECTOR + p * REDUCE_LANES;
        if (i < b.n) copy_begin(&to->row[turn][a][p][threadIdx.x], (const T *)from[a] + row * b.n + i);
      }
#ifndef FP4D_CUDA_MODEL
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* USUAL: the result has one target, of its own type; the others' code takes registers. */
template <typename T, int PIECES, bool WHOLE, bool USUAL>
__global__ void __launch_bounds__(BACKWARD_THREADS) differentiate(const __grid_constant__ struct backward b) {
  __shared__ float shared[2][BACKWARD_THREADS / 32];
  const int64_t first = (int64_t)threadIdx.x * BACKWARD_VECTOR, begin = (int64_t)blockIdx.x * REDUCE_STRIP;
  const int64_t end = begin + REDUCE_STRIP < b.rows ? begin + REDUCE_STRIP : b.rows;
  constexpr int HELD = PIECES > 0 ? PIECES : 1;
  struct piece<T> now[HELD];
  float gain[HELD][BACKWARD_VECTOR], d_gain[HELD][BACKWARD_VECTOR] = {{0.0f}};
  int turn = 0;
  if constexpr (PIECES > 0) {
    using rows = struct rows_ahead<T, PIECES>;
    CUDA_DYNAMIC_SHARED(rows, ahead);
    row_begin(ahead, 0, b, begin, end);
#pragma unroll
    for (int p = 0; p < HELD; p++) row_load_any<WHOLE>(gain[p], b.gain, b.gain_is_bf16, first + p * REDUCE_LANES, b.n);
    for (int64_t row = begin; row < end; row++, turn ^= 1) {
      float lane[BACKWARD_VECTOR] = {0.0f};
      const float rstd = b.rstd[row];
      row_begin(ahead, turn ^ 1, b, row + 1, end);
      copy_wait_but_last();
#pragma unroll
      for (int p = 0; p < HELD; p++) {
        words_load(now[p].dy.word, &ahead->row[turn][0][p][threadIdx.x]);
        words_load(now[p].x.word, &ahead->row[turn][1][p][threadIdx.x]);
        if (b.above) words_load(now[p].above.word, &ahead->row[turn][2][p][threadIdx.x]);
      }
#pragma unroll
      for (int p = 0; p < HELD; p++) piece_dot<WHOLE>(lane, now[p], gain[p], first + p * REDUCE_LANES, b.n);
      const float c = reduce_lanes(lane, shared[turn]) / (float)b.n * rstd * rstd; /* a barrier: the row is read */
#pragma unroll
      for (int p = 0; p < HELD; p++)
        piece_finish<WHOLE, USUAL>(d_gain[p], now[p], gain[p], b, row, first + p * REDUCE_LANES, rstd, c);
    }
#pragma unroll
    for (int p = 0; p < HELD; p++) {
      packed<float, BACKWARD_VECTOR> sum;
      pack(sum, d_gain[p]);
      row_store<WHOLE>(b.partial + (int64_t)blockIdx.x * b.n, first + p * REDUCE_LANES, b.n, sum);
    }
    return;
  }
  float *partial = b.partial + (int64_t)blockIdx.x * b.n; /* these columns are this thread's alone */
  packed<float, BACKWARD_VECTOR> sum;
  for (int64_t row = begin; row < end; row++, turn ^= 1) {
    float lane[BACKWARD_VECTOR] = {0.0f};
    const float rstd = b.rstd[row];
    for (int64_t i = first; i < b.n; i += REDUCE_LANES) {
      row_load_any<WHOLE>(gain[0], b.gain, b.gain_is_bf16, i, b.n);
      piece_load<T, WHOLE>(now[0], b, row, i);
      piece_dot<WHOLE>(lane, now[0], gain[0], i, b.n);
    }
    const float c = reduce_lanes(lane, shared[turn]) / (float)b.n * rstd * rstd;
    for (int64_t i = first; i < b.n; i += REDUCE_LANES) {
      row_load_any<WHOLE>(gain[0], b.gain, b.gain_is_bf16, i, b.n);
      piece_load<T, WHOLE>(now[0], b, row, i);
#pragma unroll
      for (int e = 0; e < BACKWARD_VECTOR; e++) d_gain[0][e] = 0.0f;
      if (row > begin) {
        row_load<WHOLE>(sum, partial, i, b.n);
        unpack(d_gain[0], sum);
      }
      piece_finish<WHOLE, USUAL>(d_gain[0], now[0], gain[0], b, row, i, rstd, c);
      pack(sum, d_gain[0]);
      row_store<WHOLE>(partial, i, b.n, sum);
    }
  }
}

/* ---- the tree over strips --------------------------------------------------- */
/* A block makes, of 32 columns, the subtree of SEGMENT strips: each of its 8 warps
 * that of 32, a thread for a column. */
constexpr int SEGMENT = 256, COLUMNS = 32, DEEP = 32, WARPS = SEGMENT / DEEP;

/* partial[strips, n] becomes to[segments, n]; the one that is left is added to d_gain. */
template <typename D>
__global__ void __launch_bounds__(COLUMNS * WARPS)
    sum_strips(float *to, const float *partial, D *d_gain, int64_t strips, int64_t n) {
  __shared__ float warp_sum[WARPS][COLUMNS];
  cuda_wait_for_last();
  const int column = (int)threadIdx.x % COLUMNS, warp = (int)threadIdx.x / COLUMNS;
  const int64_t c = (int64_t)blockIdx.x * COLUMNS + column;
  for (int64_t segment = blockIdx.y; segment * SEGMENT < strips; segment += gridDim.y) {
    const int64_t first = segment * SEGMENT + warp * DEEP, left = strips - first;
    const int have = left < DEEP ? (left > 0 ? (int)left : 0) : DEEP;
    float x[DEEP];
#pragma unroll
    for (int j = 0; j < DEEP; j++) x[j] = j < have && c < n ? partial[(first + j) * n + c] : 0.0f;
    __syncthreads(); /* the last segment's sums have been read */
    warp_sum[warp][column] = reduce_some(x, have);
    __syncthreads();
    if (warp > 0 || c >= n) continue;
    const int64_t all = strips - segment * SEGMENT < SEGMENT ? strips - segment * SEGMENT : SEGMENT;
    float y[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) y[w] = warp_sum[w][column];
    const float sum = reduce_some(y, (int)((all + DEEP - 1) / DEEP));
    if (d_gain) element_set(d_gain + c, element(d_gain[c]) + sum);
    else to[segment * n + c] = sum;
  }
}

static int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void sum_gain(struct cuda_device *d, struct matrix *d_gain, float *partial, int64_t strips, int64_t n) {
  float *other = partial + strips * n;
  for (;;) {
    const int64_t segments = ceil_of(strips, SEGMENT);
    const dim3 grid((unsigned)ceil_of(n, COLUMNS), (unsigned)(segments < 65535 ? segments : 65535));
    with_type(d_gain->dtype, [&](auto zero) {
      using D = decltype(zero);
      CUDA_LAUNCH_EARLY(d, (sum_strips<D>), grid, COLUMNS * WARPS, 0, other, (const float *)partial,
                  segments == 1 ? (D *)d_gain->data : (D *)NULL, strips, n);
    });
    if (segments == 1) return;
    float *swap = partial;
    partial = other, other = swap; /* what is written next has less than a 256th of either */
    strips = segments;
  }
}

}  // namespace

void cuda_add_rmsnorm_forward(struct device *d, const struct emission *out, struct matrix *residual_out, float *rstd,
                              const struct matrix *residual, const struct matrix *delta, const struct matrix *gain,
                              float eps) {
  run_forward<false>(d, out, residual_out, rstd, residual, delta, gain, eps);
}

void cuda_add_rmsnorm_forward_cast(struct device *d, const struct emission *out, struct matrix *residual_out, float *rstd,
                                   const struct matrix *residual, const struct matrix *delta, const struct matrix *gain,
                                   float eps) {
  run_forward<true>(d, out, residual_out, rstd, residual, delta, gain, eps);
}

int64_t cuda_rmsnorm_scratch_bytes(int64_t rows, int64_t cols) {
  const int64_t strips = ceil_of(rows, REDUCE_STRIP);
  return (strips + ceil_of(strips, SEGMENT)) * cols * (int64_t)sizeof(float);
}

void cuda_add_rmsnorm_backward(struct device *device, const struct emission *out, struct matrix *d_gain,
                               const struct matrix *dy, const struct matrix *d_above, const struct matrix *residual,
                               const float *rstd, const struct matrix *gain) {
  struct cuda_device *d = cuda_of(device);
  const int64_t rows = dy->rows, n = dy->cols, strips = ceil_of(rows, REDUCE_STRIP);
  CUDA_REQUIRE(gain->rows * gain->cols == n && d_gain->rows * d_gain->cols == n, "the gain does not have the rows' length");
  CUDA_REQUIRE(residual->dtype == dy->dtype && (!d_above || d_above->dtype == dy->dtype),
               "residual or d_above is not of dy's type");
  CUDA_REQUIRE(d->scratch_bytes >= cuda_rmsnorm_scratch_bytes(rows, n), "scratch is too small");
  struct backward b = {targets_of(out, dy->dtype, rows, n), (float *)(void *)d->scratch, dy->data,
                       d_above ? d_above->data : NULL, residual->data, gain->data, gain->dtype == DTYPE_BF16, rstd, rows, n};
  if (rows * n == 0) return;
  const bool aligned = cuda_whole(n, BACKWARD_VECTOR, b.partial, b.dy, b.above, b.residual, b.gain) && targets_whole(&b.out);
  with_type(dy->dtype, [&](auto zero) {
    using T = decltype(zero);
    with_pieces<sizeof(T) == 2 ? 8 : 4>(n, aligned, [&](auto pieces, auto whole) {
      constexpr int PIECES = decltype(pieces)::value;
      with_bool(PIECES > 0 && b.out.count == 1 && b.out.is_bf16[0] == (sizeof(T) == 2), [&](auto usual) {
        CUDA_LAUNCH(d, (differentiate<T, PIECES, decltype(whole)::value, decltype(usual)::value>), cuda_grid(strips), BACKWARD_THREADS,
                    (rows_ahead_bytes<T, PIECES>()), b);
      });
    });
  });
  sum_gain(d, d_gain, b.partial, strips, n);
}
