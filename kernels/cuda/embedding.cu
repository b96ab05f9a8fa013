/* The embedding table: rows by token id, and their gradient.
 *
 * Forward moves each token's row in and out.
 *
 * Backward first sorts the tokens' positions by id, stably (a radix sort: ids of
 * RADIX_BITS at a time; every position it writes follows from counts, so no order
 * of threads shows).  Then a row of the table belongs to the first of its tokens:
 * that block takes the row, adds its tokens in token order, in FP32, and writes
 * it once.  Moves dx in, and the rows that occur in and out.
 */
#include "kernels/cuda/rows.cuh"

namespace {

enum { VECTOR = 8, FORWARD_THREADS = 256, FORWARD_PIECE = FORWARD_THREADS * VECTOR };
enum { BACKWARD_THREADS = 128, BACKWARD_PIECE = BACKWARD_THREADS * VECTOR, AHEAD = 8 }; /* tokens whose rows are under way */
enum { RADIX_BITS = 9, DIGITS = 1 << RADIX_BITS, CHUNK = DIGITS, SCAN_THREADS = 1024 };

/* ---- forward --------------------------------------------------------------- */
template <typename X, typename T, bool WHOLE>
__global__ void __launch_bounds__(FORWARD_THREADS)
    gather_rows(X *x, const T *table, const int32_t *tokens, int64_t rows, int64_t n, int64_t vocab_size) {
  const int64_t i = (int64_t)blockIdx.x * FORWARD_PIECE + (int64_t)threadIdx.x * VECTOR;
  if (i >= n) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const int32_t id = tokens[row];
    CUDA_DEVICE_REQUIRE(id >= 0 && id < vocab_size, "token id outside the vocabulary");
    packed<T, VECTOR> p;
    row_load<WHOLE>(p, table + id * n, i, n);
    if constexpr (sizeof(X) == sizeof(T)) {
      row_store<WHOLE>(x + row * n, i, n, p);
    } else {
      packed<X, VECTOR> q;
      float v[VECTOR];
      unpack(v, p);
      pack(q, v);
      row_store<WHOLE>(x + row * n, i, n, q);
    }
  }
}

/* ---- the order of tokens by id --------------------------------------------- */
/* Positions and their ids, sorted by the digits before. */
struct keys {
  int32_t *position, *id;
};

CUDA_INLINE int digit_of(int32_t id, int shift) { return (id >> shift) & (DIGITS - 1); }

/* count[digit][chunk]. */
__global__ void __launch_bounds__(CHUNK)
    count_digits(int32_t *count, const int32_t *id, int64_t n, int64_t chunks, int shift, int64_t vocab_size) {
  __shared__ int seen[DIGITS];
  const int t = (int)threadIdx.x;
  const int64_t chunk = blockIdx.x, i = chunk * CHUNK + t;
  seen[t] = 0;
  __syncthreads();
  if (i < n) {
    CUDA_DEVICE_REQUIRE(id[i] >= 0 && id[i] < vocab_size, "token id outside the vocabulary");
    atomicAdd(&seen[digit_of(id[i], shift)], 1);
  }
  __syncthreads();
  count[(int64_t)t * chunks + chunk] = seen[t];
}

/* count[0..n) becomes what stands before each: one block. */
__global__ void __launch_bounds__(SCAN_THREADS) scan_counts(int32_t *count, int64_t n) {
  __shared__ int before[2][SCAN_THREADS];
  const int t = (int)threadIdx.x;
  const int64_t each = (n + SCAN_THREADS - 1) / SCAN_THREADS, first = t * each, end = first + each < n ? first + each : n;
  int sum = 0;
  for (int64_t i = first; i < end; i++) sum += count[i];
  before[0][t] = sum;
  __syncthreads();
  int turn = 0;
  for (int step = 1; step < SCAN_THREADS; step *= 2, turn ^= 1) {
    before[turn ^ 1][t] = before[turn][t] + (t >= step ? before[turn][t - step] : 0);
    __syncthreads();
  }
  int place = before[turn][t] - sum;
  for (int64_t i = first; i < end; i++) {
    const int own = count[i];
    count[i] = place;
    place += own;
  }
}

/* Each to its place: that of its chunk's first of the digit, and those of the chunk before it. */
__global__ void __launch_bounds__(CHUNK)
    scatter(struct keys to, const int32_t *place, const int32_t *position, const int32_t *id, int64_t n, int64_t chunks, int shift) {
  __shared__ int digit[CHUNK];
  const int t = (int)threadIdx.x;
  const int64_t chunk = blockIdx.x, i = chunk * CHUNK + t;
  const int own = i < n ? digit_of(id[i], shift) : -1;
  digit[t] = own;
  __syncthreads();
  if (i >= n) return;
  int rank = 0;
  for (int j = 0; j < t; j++) rank += digit[j] == own;
  const int64_t at = place[own * chunks + chunk] + rank;
  to.position[at] = position ? position[i] : (int32_t)i;
  to.id[at] = id[i];
}

/* Tokens in scratch: two of `keys`, then counts. */
int64_t chunks_of(int64_t tokens) { return (tokens + CHUNK - 1) / CHUNK; }

struct keys sort_by_id(struct cuda_device *d, const int32_t *tokens, int64_t n, int64_t vocab_size) {
  int32_t *at = (int32_t *)(void *)d->scratch, *count = at + 4 * n;
  struct keys now = {NULL, NULL}, next = {at, at + n}, other = {at + 2 * n, at + 3 * n};
  const int64_t chunks = chunks_of(n);
  for (int shift = 0; shift == 0 || (shift < 31 && vocab_size > (int64_t)1 << shift); shift += RADIX_BITS) {
    const int32_t *id = now.id ? now.id : tokens;
    CUDA_LAUNCH(d, count_digits, cuda_grid(chunks), CHUNK, 0, count, id, n, chunks, shift, vocab_size);
    CUDA_LAUNCH(d, scan_counts, 1, SCAN_THREADS, 0, count, DIGITS * chunks);
    CUDA_LAUNCH(d, scatter, cuda_grid(chunks), CHUNK, 0, next, count, now.position, id, n, chunks, shift);
    now = next;
    next = other, other = now;
  }
  return now;
}

/* ---- backward --------------------------------------------------------------- */
template <typename D, typename X, bool WHOLE>
__global__ void __launch_bounds__(BACKWARD_THREADS)
    add_rows(D *d_table, const X *dx, struct keys sorted, int64_t tokens, int64_t n) {
  const int64_t i = (int64_t)blockIdx.x * BACKWARD_PIECE + (int64_t)threadIdx.x * VECTOR;
  if (i >= n) return;
  for (int64_t first = blockIdx.y; first < tokens; first += gridDim.y) {
    const int32_t id = sorted.id[first];
    if (first > 0 && sorted.id[first - 1] == id) continue; /* not the row's first */
    packed<D, VECTOR> row;
    float sum[VECTOR];
    row_load<WHOLE>(row, d_table + id * n, i, n);
    unpack(sum, row);
    for (int64_t j = first, have = AHEAD; have == AHEAD; j += AHEAD) {
      packed<X, VECTOR> held[AHEAD];
      have = 0;
#pragma unroll
      for (int a = 0; a < AHEAD; a++)
        if (j + a < tokens && sorted.id[j + a] == id) {
          row_load<WHOLE>(held[a], dx + sorted.position[j + a] * n, i, n);
          have = a + 1;
        }
#pragma unroll
      for (int a = 0; a < AHEAD; a++)
        if (a < have) {
          float x[VECTOR];
          unpack(x, held[a]);
#pragma unroll
          for (int e = 0; e < VECTOR; e++) sum[e] = sum[e] + x[e];
        }
    }
    pack(row, sum);
    row_store<WHOLE>(d_table + id * n, i, n, row);
  }
}

}  // namespace

void cuda_embedding_forward(struct device *device, struct matrix *x, const struct matrix *table, const int32_t *tokens) {
  struct cuda_device *d = cuda_of(device);
  const int64_t rows = x->rows, n = x->cols;
  CUDA_REQUIRE(n == table->cols, "x and table differ in width");
  if (rows * n == 0) return;
  with_type(x->dtype, [&](auto zero) {
    with_type(table->dtype, [&](auto zero_table) {
      with_bool(cuda_whole(n, VECTOR, x->data, table->data), [&](auto whole) {
        using X = decltype(zero);
        using T = decltype(zero_table);
        CUDA_LAUNCH(d, (gather_rows<X, T, decltype(whole)::value>), grid_of_rows((n + FORWARD_PIECE - 1) / FORWARD_PIECE, rows),
                    FORWARD_THREADS, 0, (X *)x->data, (const T *)table->data, tokens, rows, n, table->rows);
      });
    });
  });
}

int64_t cuda_embedding_scratch_bytes(int64_t tokens) {
  return (4 * tokens + DIGITS * chunks_of(tokens)) * (int64_t)sizeof(int32_t);
}

void cuda_embedding_backward(struct device *device, struct matrix *d_table, const struct matrix *dx, const int32_t *tokens) {
  struct cuda_device *d = cuda_of(device);
  const int64_t rows = dx->rows, n = dx->cols;
  CUDA_REQUIRE(n == d_table->cols, "dx and d_table differ in width");
  CUDA_REQUIRE(rows <= INT32_MAX && d->scratch_bytes >= cuda_embedding_scratch_bytes(rows), "scratch is too small");
  if (rows * n == 0) return;
  const struct keys sorted = sort_by_id(d, tokens, rows, d_table->rows);
  with_type(d_table->dtype, [&](auto zero) {
    with_type(dx->dtype, [&](auto zero_dx) {
      with_bool(cuda_whole(n, VECTOR, dx->data, d_table->data), [&](auto whole) {
        using D = decltype(zero);
        using X = decltype(zero_dx);
        CUDA_LAUNCH(d, (add_rows<D, X, decltype(whole)::value>), grid_of_rows((n + BACKWARD_PIECE - 1) / BACKWARD_PIECE, rows),
                    BACKWARD_THREADS, 0, (D *)d_table->data, (const X *)dx->data, sorted, rows, n);
      });
    });
  });
}
